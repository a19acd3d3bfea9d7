"""Exact selection of the best `tokens` candidates of every head, without a sort.

Order of preference: protected before unprotected, higher score, lower position, lower index; twin of
`reference.select`. One program per (batch, KV head) finds the last admitted score by bisection: scores become int32
that sort alike, and sixteen rounds of counting fix two bits of the threshold each. Equal scores are split by a second
bisection over positions, and equal positions (which only invalid data has) by index.

Bytes: scores, positions and masks once if a head fits one tile (N <= 8192), else 32 further passes over 8N bytes of
scratch, which stay in L2. Block sizes cannot change the result: it is a count.
NaN is the lowest score, and infinities equal the largest number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import Selection
from ._attention import _barrier
from ._launch import cdiv, check_like, chip_of, on_hip

FEWER = {2048: 8, 4096: 16}  # with 8192, triton 3.7 spills on gfx942 and 3.9 on sm_80
# By chip and candidates held in registers: few tiles, so that lengths share them.
WARPS = {"hip": FEWER, "80": FEWER, "": {2048: 8, 8192: 16}}
LOWEST = tl.constexpr(-(2**31))  # below every key: not in the running
FIRST = tl.constexpr(2**31 - 1)  # above the key of every score


@triton.jit
def _sortable(x):
    """int32 that sort as the fp32 x do, all above LOWEST; -0.0 is 0.0, NaN and -inf the lowest number.

    Clamped as integers: LLVM for gfx942 (triton 3.7.1) aborts on the clamped fp32.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.minimum(tl.maximum(bits, -2139095040), 2139095039)  # the largest finite numbers
    return tl.where(x == x, bits, -2139095040)


@triton.jit
def _counts(key, threshold, step):
    """How many keys of a tile reach threshold + 1, 2 and 3 steps; two sums travel as halves of an int32."""
    two = (key >= threshold + step + step).to(tl.int32)
    both = tl.sum((key >= threshold + step).to(tl.int32) + (two << 16), 0)
    return both & 0xFFFF, both >> 16, tl.sum((key >= threshold + step + step + step).to(tl.int32), 0)


@triton.jit
def _kth_largest(key, key_ptr, wanted, room, BLOCK: tl.constexpr):
    """The largest t with at least `wanted` keys >= t; keys are `key`, or the `room` at key_ptr, whole tiles."""
    lane = tl.arange(0, BLOCK)
    threshold = tl.full([], LOWEST, tl.int32)
    for level in range(0, 16):
        step = tl.full([], 1, tl.int32) << (30 - 2 * level)
        if key_ptr is None:
            one, two, three = _counts(key, threshold, step)
        else:
            one = tl.zeros([], tl.int32)
            two = tl.zeros([], tl.int32)
            three = tl.zeros([], tl.int32)
            for start in range(0, room, BLOCK):
                part = tl.load(key_ptr + start + lane)
                more_one, more_two, more_three = _counts(part, threshold, step)
                one += more_one
                two += more_two
                three += more_three
        reached = (one >= wanted).to(tl.int32) + (two >= wanted).to(tl.int32) + (three >= wanted).to(tl.int32)
        threshold += step * reached
    return threshold


@triton.jit
def _candidates(valid_ptr, protected_ptr, row, index, N):
    """Which of the candidates `index` are valid, and which of those are protected."""
    valid = tl.load(valid_ptr + row + index, mask=index < N, other=0) != 0
    return valid, valid & (tl.load(protected_ptr + row + index, mask=index < N, other=0) != 0)


@triton.jit(do_not_specialize=["N", "tokens"])
def _select_kernel(
    scores_ptr, positions_ptr, valid_ptr, protected_ptr, key_ptr, kept_ptr, counts_ptr, N, tokens, BLOCK: tl.constexpr,
    HIP: tl.constexpr,
):  # fmt: skip
    # key_ptr None: a head is one tile.
    # tokens: of all heads, or where each finds its own.
    SINGLE: tl.constexpr = key_ptr is None
    head = tl.program_id(0)
    row = head.to(tl.int64) * N
    if tokens.dtype.is_ptr():
        tokens = tl.maximum(tl.load(tokens + head), 0).to(tl.int32)
    room = tl.cdiv(N, BLOCK) * BLOCK  # of a head in scratch
    key2_ptr = key_ptr
    if key_ptr is not None:
        key_ptr += head.to(tl.int64) * room
        key2_ptr = key_ptr + tl.num_programs(0).to(tl.int64) * room
    lane = tl.arange(0, BLOCK)
    num_valid = tl.zeros([], tl.int32)
    num_guarded = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        valid, guarded = _candidates(valid_ptr, protected_ptr, row, start + lane, N)
        num_valid += tl.sum(valid.to(tl.int32), 0)
        num_guarded += tl.sum(guarded.to(tl.int32), 0)
    # If the protected alone exceed the budget, only they are in the running; else they come before every score.
    crowded = num_guarded >= tokens
    wanted = tl.minimum(num_valid, tokens)
    tl.store(counts_ptr + head, wanted.to(tl.int64))

    key = tl.full([BLOCK], LOWEST, tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        valid, guarded = _candidates(valid_ptr, protected_ptr, row, index, N)
        score = tl.load(scores_ptr + row + index, mask=index < N, other=0.0)
        key = tl.where(tl.where(crowded, guarded, valid), _sortable(score), LOWEST)
        key = tl.where(guarded & (crowded == 0), FIRST, key)
        if not SINGLE:
            tl.store(key_ptr + index, key)
    if not SINGLE:
        _barrier(HIP)  # keys are counted by other threads than wrote them
    least = _kth_largest(key, key_ptr, wanted, room, BLOCK)

    # Of the candidates at the threshold, the lowest positions fill what is left. -1 - position sorts in reverse.
    above = tl.zeros([], tl.int32)
    place = tl.full([BLOCK], LOWEST, tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        if not SINGLE:
            key = tl.load(key_ptr + index)
        above += tl.sum((key > least).to(tl.int32), 0)
        position = tl.load(positions_ptr + row + index, mask=index < N, other=0)
        place = tl.where((key == least) & (key != LOWEST), -1 - position, LOWEST)
        if not SINGLE:
            tl.store(key2_ptr + index, place)
    if not SINGLE:
        _barrier(HIP)
    latest = _kth_largest(place, key2_ptr, wanted - above, room, BLOCK)
    earlier = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        if not SINGLE:
            place = tl.load(key2_ptr + start + lane)
        earlier += tl.sum((place > latest).to(tl.int32), 0)

    left = wanted - above - earlier
    taken = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        if not SINGLE:
            key = tl.load(key_ptr + index)
            place = tl.load(key2_ptr + index)
        twin = ((place == latest) & (place != LOWEST)).to(tl.int32)
        nth = taken + tl.cumsum(twin, 0)
        taken += tl.sum(twin, 0)
        kept = (key > least) | (place > latest) | ((twin != 0) & (nth <= left))
        tl.store(kept_ptr + row + index, kept.to(tl.uint8), mask=index < N)


def select(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int | Tensor) -> Selection:
    """`reference.select`, and `reference.select_each` where each head has its own number, [B, Hkv] int64.

    Args: scores [B, Hkv, N] fp32; positions [B, Hkv, N] int32, not negative; valid, protected [B, Hkv, N] bool.
    Cost: one launch, no host sync.
    """
    batch, heads, num = scores.shape
    check_like("select", scores.shape, scores=scores, positions=positions, valid=valid, protected=protected)
    assert scores.dtype == torch.float32
    kept = torch.empty(batch, heads, num, dtype=torch.bool, device=scores.device)
    counts = torch.empty(batch, heads, dtype=torch.int64, device=scores.device)
    if not kept.numel():
        return Selection(kept, counts.zero_())
    tiles = WARPS.get(chip_of(scores.device), WARPS[""])
    block = next((tile for tile in tiles if num <= tile), max(tiles))
    scratch = None
    if num > block:
        room = cdiv(num, block) * block
        scratch = torch.empty(2 * batch * heads * room, dtype=torch.int32, device=scores.device)
    if isinstance(tokens, Tensor):
        tokens = tokens.contiguous()
        check_like("select", (batch, heads), tokens=tokens)
    _select_kernel[(batch * heads,)](
        scores, positions, valid.view(torch.uint8), protected.view(torch.uint8), scratch, kept.view(torch.uint8),
        counts, num, tokens, BLOCK=block, HIP=on_hip(), num_warps=tiles[block],
    )  # fmt: skip
    return Selection(kept, counts)


select_each = select
