"""Shrink every head to its budget: merge its lowest-scoring tokens into the moments and close the holes, in place.

Of the slots in use the `drop = max(0, length - tokens)` lowest go, where tokens is so many below the slots a head owns:
unprotected before protected, then by score, equal scores by descending position. With d = drop, means m and the centred
rows of those that go (Chan et al. 1979):

    S += sum (k - k_m)(v - v_m)^T + n d / (n + d) (k_m - k_mean)(v_m - v_mean)^T;   means += d / (n + d) (m - mean)

Survivors in slots [tokens, length) then move into the holes. Program (pair, part) owns some columns of the values and
of S; all parts need all evicted keys, so keys, positions and sizes are changed by the last part to finish. With more
than MAX_SCAN slots a first launch finds candidates. Twins: `select` and `compact`, up to the order of slots.

Bytes per pair: 8 C for scores and positions, 8 D^2 for S read and written, 2 D^2 for its copy, 8 R D for the rows (half
of it for codes of 8 bits, which move as they are, with their scales).
Does not handle: more than 64 tokens at once, Dv != Dk, head_dim above 512, float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_shape
from ..reference import LayerState, Spec
from ._arguments import PAIRS, MomentPointers, StatePointers
from ._attention import (
    _barrier,
    _dot32,
    _exact_rows,
    _holes,
    _home,
    _move_rows,
    _move_scales,
    _page,
    _some,
    _stretch,
)
from ._codes import _codes_of, _packed, _scales_of
from ._launch import (
    Workspace,
    addressed,
    check_contiguous,
    check_head_dim,
    check_rows,
    check_scales,
    chip_of,
    on_hip,
    pow2,
)

MAX_DROP = 64
MAX_SCAN = 2048  # slots one program looks at
SCANS = (512, MAX_SCAN)  # rounded up to: few, because slots may follow the length of the prompt
BLOCK_V = {64: 32, 128: 32, 256: 32, 512: 16}  # value columns of one program, by padded head_dim; see `compact.MERGE`
# Of codes of 4 bits, by chip, see `chip_of`. With 32, D128 spills on sm_80 and D256 on sm_90; with 16, D256 on sm_80
# and, with triton 3.6, on sm_100. Programs of but 8 have 16 warps.
PACKED_V: dict[str, dict[int, int]] = {
    "hip": {}, "90": {128: 16, 256: 16}, "100": {128: 16, 256: 8}, "": {128: 16}
}  # fmt: skip
ROWS = 16  # evicted, at a time
MAX_FP32 = tl.constexpr(3.4028234663852886e38)
LAST_KEY = tl.constexpr(0xFFFFFFFFFFFFFFFF)


@triton.jit
def _order_bits(x):
    """uint32 that sort as the fp32 x do; -0.0 equals 0.0, NaN and -inf equal the lowest finite number."""
    x = tl.where(x == x, x, -MAX_FP32)
    x = tl.minimum(tl.maximum(x, -MAX_FP32), MAX_FP32)
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # no ~: the interpreter cannot


class Found(NamedTuple):
    """Candidates of several programs: keys [B * Hkv, chunks * R] int64 as of `_rank_slots`, slots int32; absent where
    one program looks at all slots.
    """

    keys_ptr: Any = None
    slots_ptr: Any = None


class Tile(NamedTuple):
    """Constants of a launch: R victims at most, BLOCK_C slots or candidates, numbers of a head and padded ones, value
    columns of a program, rows at a time.
    """

    HEADS: int
    R: int
    BLOCK_C: int
    D: int
    BLOCK_D: int
    BLOCK_V: int
    ROWS: int


@triton.jit
def _rank_slots(scores_ptr, state, pair, own, slot, slots, width, sinks, recent, HEADS: tl.constexpr):
    """uint64 that sort in order of eviction: class, score, descending position; LAST_KEY where nothing is stored.

    pair: of the scores; own: the same one of everything else.
    """
    base, capacity = _stretch(state.starts_ptr, own, slots, HEADS)
    known = slot < width  # a mask by length would make loads narrow
    if state.starts_ptr is not None:
        known = known & (slot < capacity)
    position = tl.load(state.positions_ptr + base + slot, mask=known, other=0)
    score = tl.load(scores_ptr + pair * width + slot, mask=known, other=0).to(tl.float32)  # or whether it is kept
    bits = _order_bits(score).to(tl.uint64)
    guarded = ((position < sinks) | (position >= tl.load(state.seen_ptr + own // HEADS) - recent)).to(tl.uint64)
    key = (guarded << 63) | (bits << 31) | (0x7FFFFFFF - position).to(tl.uint64)
    return tl.where(slot < tl.load(state.lengths_ptr + own), key, LAST_KEY)


@triton.jit(do_not_specialize=["page", "most", "sinks", "recent"])  # aligned slots are read 16 bytes at a time
def _candidates_kernel(
    scores_ptr, state: StatePointers, found: Found, rows_ptr, page, slots, width, most, sinks, recent,
    TILE: tl.constexpr,
):  # fmt: skip
    """The first `most` of at most R to go among BLOCK_C slots: keys (LAST_KEY beyond the slots in use) and slots."""
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, TILE.HEADS)
    if rows_ptr is not None:
        if row == 0:
            return
    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])
    slot = chunk * TILE.BLOCK_C + tl.arange(0, TILE.BLOCK_C)
    keys = _rank_slots(scores_ptr, state, pair, own, slot, slots, width, sinks, recent, TILE.HEADS)
    place = (pair * tl.num_programs(1) + chunk) * TILE.R
    for r in range(most):
        low = tl.min(keys, 0)
        tl.store(found.keys_ptr + place + r, low.to(tl.int64, bitcast=True))
        tl.store(found.slots_ptr + place + r, tl.max(tl.where(keys == low, slot, 0), 0))
        keys = tl.where(keys == low, LAST_KEY, keys)


@triton.jit(do_not_specialize=["page", "most", "sinks", "recent", "chunks"])
def _evict_kernel(
    scores_ptr, state: StatePointers, moments: MomentPointers, found: Found, tickets_ptr, rows_ptr, page, slots, width,
    most, sinks, recent, chunks, TILE: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    # key_mean_ptr None: only count. cross_ptr None: only means.
    HEADS: tl.constexpr = TILE.HEADS
    R: tl.constexpr = TILE.R
    D: tl.constexpr = TILE.D
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_V: tl.constexpr = TILE.BLOCK_V
    ROWS: tl.constexpr = TILE.ROWS
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, HEADS)
    if rows_ptr is not None:
        if row == 0:
            return
    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])
    moments = MomentPointers(*[p if p is None else _page(p, row, page) for p in moments])
    base, capacity = _stretch(state.starts_ptr, own, slots, HEADS)
    length, tokens = tl.load(state.lengths_ptr + own), tl.maximum(capacity - most, 0)
    drop = length - tokens
    if drop <= 0:
        return
    slot = tl.arange(0, TILE.BLOCK_C)
    if found.keys_ptr is not None:
        place, inside = (pair * chunks) * R + slot, slot < chunks * R
        order = tl.load(found.keys_ptr + place, mask=inside, other=-1).to(tl.uint64, bitcast=True)
        order = tl.where(inside & (slot % R < most), order, LAST_KEY)  # a mask of the load would make it narrow
        slot = tl.load(found.slots_ptr + place, mask=inside, other=0)
    else:
        order = _rank_slots(scores_ptr, state, pair, own, slot, slots, width, sinks, recent, HEADS)
    index = tl.arange(0, R)
    victims = tl.zeros([R], tl.int32)
    for r in range(drop):
        low = tl.min(order, 0)
        victims = tl.where(index == r, tl.max(tl.where(order == low, slot, 0), 0), victims)
        order = tl.where(order == low, LAST_KEY, order)
    hole, source = _holes(victims, drop, length, tokens, R)

    keys_ptr = _codes_of(state.keys_ptr, state.key_scales_ptr, base, D)
    values_ptr = _codes_of(state.values_ptr, state.value_scales_ptr, base, D)
    key_scales_ptr = _scales_of(state.key_scales_ptr, base, D)
    value_scales_ptr = _scales_of(state.value_scales_ptr, base, D)
    positions_ptr = state.positions_ptr + base
    cols, mine = tl.arange(0, BLOCK_D), part * BLOCK_V + tl.arange(0, BLOCK_V)
    before = tl.load(moments.count_ptr + own)
    size, share = drop.to(tl.float32), drop.to(tl.float32) / (before + drop).to(tl.float32)
    key_mean = tl.zeros([BLOCK_D], tl.float32)
    if moments.key_mean_ptr is not None:
        value_mean = tl.zeros([BLOCK_V], tl.float32)
        for first in range(0, drop, ROWS):
            gone, live = _some(victims, first, R, ROWS), first + tl.arange(0, ROWS) < drop
            k = _exact_rows(keys_ptr, key_scales_ptr, gone, live, 0, D, BLOCK_D)
            key_mean += tl.sum(k, 0) / size
            v = _exact_rows(values_ptr, value_scales_ptr, gone, live, part * BLOCK_V, D, BLOCK_V)
            value_mean += tl.sum(v, 0) / size
        key_before = tl.load(moments.key_mean_ptr + own * D + cols, mask=cols < D, other=0.0)
        value_before = tl.load(moments.value_mean_ptr + own * D + mine, mask=mine < D, other=0.0)
        key_step, value_step = key_mean - key_before, value_mean - value_before
        if moments.cross_ptr is not None:
            place = own * D * D + cols[:, None] * D + mine[None, :]
            mask = (cols < D)[:, None] & (mine < D)[None, :]
            cross = tl.load(moments.cross_ptr + place, mask=mask, other=0.0)
            cross += (key_step * (before.to(tl.float32) * share))[:, None] * value_step[None, :]
            for first in range(0, drop, ROWS):
                gone, live = _some(victims, first, R, ROWS), first + tl.arange(0, ROWS) < drop
                k = _exact_rows(keys_ptr, key_scales_ptr, gone, live, 0, D, BLOCK_D) - key_mean[None, :]
                v = _exact_rows(values_ptr, value_scales_ptr, gone, live, part * BLOCK_V, D, BLOCK_V)
                v -= value_mean[None, :]
                k, v = tl.where(live[:, None], k, 0.0), tl.where(live[:, None], v, 0.0)
                if _packed(key_scales_ptr):
                    # triton pairs numbers that come out of `_turned` for products of 32 rows, and here are 16
                    cross += tl.dot(tl.trans(k), v, input_precision="ieee")
                else:
                    cross += _dot32(tl.trans(k), v)
            tl.store(moments.cross_ptr + place, cross, mask=mask)
            if moments.slope_ptr is not None:
                slope = cross / (before + drop).to(tl.float32)
                tl.store(moments.slope_ptr + place, slope.to(moments.slope_ptr.dtype.element_ty), mask=mask)
        tl.store(moments.value_mean_ptr + own * D + mine, value_before + share * value_step, mask=mine < D)
        key_mean = key_before + share * key_step
    _barrier(HIP)  # every thread has read the evicted values before they are overwritten
    if not _packed(value_scales_ptr):
        _move_rows(values_ptr, drop, hole, victims, source, mine, D, R, ROWS)

    _barrier(HIP)  # every thread has read what the last part changes
    parts = tl.num_programs(1)
    if tl.atomic_add(tickets_ptr + pair, 1, sem="acq_rel", scope="gpu") == parts - 1:
        if _packed(key_scales_ptr):
            _move_rows(keys_ptr, drop, hole, victims, source, cols, D // 2, R, ROWS)
        else:
            _move_rows(keys_ptr, drop, hole, victims, source, cols, D, R, ROWS)
        if _packed(value_scales_ptr):  # every part needs all numbers of a rotated value
            _move_rows(values_ptr, drop, hole, victims, source, cols, D // 2, R, ROWS)
        if key_scales_ptr is not None:  # which every part has read
            _move_scales(key_scales_ptr, hole, victims, source, D, BLOCK_D)
            _move_scales(value_scales_ptr, hole, victims, source, D, BLOCK_D)
        if state.bias_ptr is not None:
            bias = tl.load(state.bias_ptr + base + source, mask=hole, other=0.0)
            tl.store(state.bias_ptr + base + victims, bias, mask=hole)
        moved = tl.load(positions_ptr + source, mask=hole, other=0)
        tl.store(positions_ptr + victims, moved, mask=hole)
        if moments.key_mean_ptr is not None:
            tl.store(moments.key_mean_ptr + own * D + cols, key_mean, mask=cols < D)
        tl.store(moments.count_ptr + own, before + drop)
        tl.store(state.lengths_ptr + own, tokens)
        tl.store(tickets_ptr + pair, 0)


def _constants(
    heads: int, width: int, drop: int, head_dim: int, chip: str, single: bool, packed: bool
) -> tuple[Tile, int, int]:
    """Tile of the eviction, chunks of the candidate search (0: none), and warps; chip: see `chip_of`; single: slots
    hold fp32; packed: codes of 4 bits."""
    hip, most, padded = chip == "hip", pow2(drop, ROWS), pow2(head_dim, 64)
    chunks = triton.cdiv(width, MAX_SCAN) if width > MAX_SCAN else 0
    found = chunks * most if chunks else width
    scanned = next((block for block in SCANS if found <= block), pow2(found))
    columns = (BLOCK_V | (PACKED_V.get(chip, PACKED_V[""]) if packed else {}))[padded]
    wide = padded >= (128 if packed or single else 256) and not hip
    return Tile(heads, most, scanned, head_dim, padded, columns, ROWS), chunks, 16 if columns < 16 else 8 if wide else 4


def evict(scores: Tensor, kept: Tensor | None, state: LayerState, spec: Spec) -> None:
    """Two launches, one for short slots; everything is changed in place, shapes as in `reference.evict`.

    Statistics are fp32; `moments.slope`, if there is one, is set to cross / count. Tokens that are `kept` score above
    those that are not, so that the kernel's own selection finds them again. The tickets are those of the workspace in
    `state.scratch`, made if it is empty.

    Raises: FastKVError if more than 64 tokens of a head could go, or for shapes or strides that do not fit.
    """
    op, exact, moments, starts = "evict", state.exact, state.moments, state.exact.starts
    keys, values = exact.keys, exact.values
    assert values is not None
    _, heads, slots, width = addressed(op, keys, starts).shape
    dim = exact.format.keys.dim(width)
    check_head_dim(op, dim)
    check_shape(op, "values", values, (*keys.shape[:-1], exact.format.values.width(dim)))
    check_scales(op, exact)
    check_shape(op, "scores", scores, (state.batch, heads, slots if starts is None else None))
    width, drop = scores.shape[-1], slots - spec.tokens if starts is None else spec.spare
    if not 0 <= drop <= MAX_DROP:
        raise FastKVError(f"evict removes at most {MAX_DROP} tokens of a head, got {drop}; evict more often")
    scores = scores if kept is None else kept.view(torch.uint8)
    check_contiguous(op, scores=scores)
    pointers = StatePointers.of(exact, *PAIRS, "bias", "positions", "lengths", "starts", seen=state.seen)
    known = MomentPointers.of(moments)
    page, pairs = check_rows(op, state, pointers, known), state.batch * heads
    tile, chunks, num_warps = _constants(
        heads, width, drop, dim, chip_of(keys.device), keys.dtype == torch.float32, exact.format.values.bits == 4,
    )  # fmt: skip
    found, numbers = Found(), (state.rows, page, slots, width, drop, spec.sinks, spec.recent)
    if chunks:
        shape = pairs, chunks * tile.R
        found = Found(*(torch.empty(shape, dtype=t, device=keys.device) for t in (torch.int64, torch.int32)))
        _candidates_kernel[pairs, chunks](
            scores, StatePointers.of(exact, "positions", "lengths", "starts", seen=state.seen), found, *numbers,
            TILE=tile._replace(BLOCK_C=MAX_SCAN), num_warps=4,
        )  # fmt: skip
    room = Workspace.of(state.scratch)
    tickets = torch.zeros(pairs, dtype=torch.int32, device=keys.device) if room is None else room.tickets
    _evict_kernel[pairs, triton.cdiv(dim, tile.BLOCK_V)](
        scores, pointers, known, found, tickets, *numbers, chunks, TILE=tile, HIP=on_hip(), num_warps=num_warps
    )
