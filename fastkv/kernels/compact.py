"""Evict: merge the candidates that are not kept into the moments, and fill the holes they leave, in place.

Twin of `reference.compact`. Candidates are the first `used` slots, then the block of T new tokens. Kept slots below the
new length L stay where they are; the other survivors (of the block, and of slots beyond L) go to the holes below L, so
no row moves that need not. Slot order may therefore differ from the reference, whose slots are sorted by position.

Launches, because every evicted row must be read before any slot is overwritten:
1. plan: prefix sums over the masks list the evicted rows, the holes and the sources; the old means are put aside.
2. `moments.merge_rows` (one launch, two for long prompts).
3. move: the sources to the holes. Sources lie beyond L or in the block, holes below L, so the order does not matter.

Bytes per head: the masks three times, what `moments` reads, and moved rows twice.
Does not handle: a cache with fewer than L slots; slots that are views (the block may be one).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import Moments
from . import moments as moments_kernels
from ._launch import Variant, check_contiguous, check_head_dim, pow2

PLAN = 2048  # candidates per prefix sum
ROWS = 32  # rows per tile of the moves
MAX_MOVERS = 32


@triton.jit
def _plan_kernel(
    kept_ptr,
    valid_ptr,
    lengths_ptr,
    count_ptr,
    key_mean_ptr,
    value_mean_ptr,
    lists_ptr,
    tally_ptr,
    means_ptr,
    N,
    used,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row = head * N
    listed_ptr = lists_ptr + row
    holes_ptr = listed_ptr + tl.num_programs(0).to(tl.int64) * N
    sources_ptr = holes_ptr + tl.num_programs(0).to(tl.int64) * N
    lane = tl.arange(0, BLOCK)
    length = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        valid = tl.load(valid_ptr + row + index, mask=index < N, other=0) != 0
        kept = valid & (tl.load(kept_ptr + row + index, mask=index < N, other=0) != 0)
        length += tl.sum(kept.to(tl.int32), 0)
    gone = tl.zeros([], tl.int32)
    holes = tl.zeros([], tl.int32)
    moves = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        valid = tl.load(valid_ptr + row + index, mask=index < N, other=0) != 0
        kept = valid & (tl.load(kept_ptr + row + index, mask=index < N, other=0) != 0)
        evicted = (valid & (kept == 0)).to(tl.int32)
        hole = ((index < length) & ((kept == 0) | (index >= used))).to(tl.int32)
        source = (kept & ((index >= used) | (index >= length))).to(tl.int32)
        tl.store(listed_ptr + gone + tl.cumsum(evicted, 0) - 1, index, mask=evicted != 0)
        tl.store(holes_ptr + holes + tl.cumsum(hole, 0) - 1, index, mask=hole != 0)
        tl.store(sources_ptr + moves + tl.cumsum(source, 0) - 1, index, mask=source != 0)
        gone += tl.sum(evicted, 0)
        holes += tl.sum(hole, 0)
        moves += tl.sum(source, 0)
    count = tl.load(count_ptr + head)
    tl.store(lengths_ptr + head, length)
    tl.store(tally_ptr + head * 3, gone.to(tl.int64))
    tl.store(tally_ptr + head * 3 + 1, moves.to(tl.int64))
    tl.store(tally_ptr + head * 3 + 2, count)
    if HAS_MEANS:
        dk, dv = tl.arange(0, BK), tl.arange(0, BV)
        before = means_ptr + head * (SPLITS + 1) * (DK + DV)
        tl.store(before + dk, tl.load(key_mean_ptr + head * DK + dk, mask=dk < DK, other=0.0), mask=dk < DK)
        value_mean = tl.load(value_mean_ptr + head * DV + dv, mask=dv < DV, other=0.0)
        tl.store(before + DK + dv, value_mean, mask=dv < DV)
    else:
        tl.store(count_ptr + head, count + gone)


@triton.jit
def _move_row_tile(to_ptr, new_ptr, source, hole, inside, used, stride_t, D: tl.constexpr, BLOCK: tl.constexpr):
    """to[hole] = (slots, then block)[source] for a tile of rows."""
    column = tl.arange(0, BLOCK)[None, :]
    old = (inside & (source < used))[:, None] & (column < D)
    fresh = (inside & (source >= used))[:, None] & (column < D)
    far = source.to(tl.int64)[:, None]
    a = tl.load(to_ptr + far * D + column, mask=old, other=0.0)
    b = tl.load(new_ptr + (far - used) * stride_t + column, mask=fresh, other=0.0)
    row = tl.where(old, a.to(tl.float32), b.to(tl.float32))
    spot = to_ptr + hole.to(tl.int64)[:, None] * D + column
    tl.store(spot, row.to(to_ptr.dtype.element_ty), mask=inside[:, None] & (column < D))


@triton.jit
def _move_kernel(
    keys_ptr,
    values_ptr,
    positions_ptr,
    new_keys_ptr,
    new_values_ptr,
    new_positions_ptr,
    lists_ptr,
    tally_ptr,
    N,
    slots,
    used,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_pb,
    stride_ph,
    stride_pt,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    lane = tl.arange(0, ROWS)
    holes_ptr = lists_ptr + (tl.num_programs(0) + head) * N
    sources_ptr = holes_ptr + tl.num_programs(0).to(tl.int64) * N
    places = positions_ptr + head * slots
    new_places = new_positions_ptr + batch * stride_pb + kv * stride_ph
    new_keys = new_keys_ptr + batch * stride_kb + kv * stride_kh
    new_values = new_values_ptr + batch * stride_vb + kv * stride_vh
    moves = tl.load(tally_ptr + head * 3 + 1).to(tl.int32)
    for start in range(tl.program_id(1) * ROWS, moves, tl.num_programs(1) * ROWS):
        inside = start + lane < moves
        source = tl.load(sources_ptr + start + lane, mask=inside, other=0)
        hole = tl.load(holes_ptr + start + lane, mask=inside, other=0)
        _move_row_tile(keys_ptr + head * slots * DK, new_keys, source, hole, inside, used, stride_kt, DK, BK)
        _move_row_tile(values_ptr + head * slots * DV, new_values, source, hole, inside, used, stride_vt, DV, BV)
        old = tl.load(places + source, mask=inside & (source < used), other=0)
        far = (source - used).to(tl.int64) * stride_pt
        new = tl.load(new_places + far, mask=inside & (source >= used), other=0).to(tl.int32)
        tl.store(places + hole, tl.where(source < used, old, new), mask=inside)


def compact(
    *,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    moments: Moments,
    new_keys: Tensor,
    new_values: Tensor,
    new_positions: Tensor,
    valid: Tensor,
    kept: Tensor,
    slope: Tensor | None = None,
) -> None:
    """Merge the valid candidates that are not kept into the moments, then close the gaps, in place.

    Args: keys, values [B, Hkv, C, D], positions [B, Hkv, C] int32, lengths [B, Hkv] int32, moments and slope
        ([B, Hkv, Dk, Dv], cross / count, optional): mutated; new_keys, new_values [B, Hkv, T, D] and new_positions
        [B, Hkv, T], any strides with unit stride along D; valid, kept [B, Hkv, N] bool over the N - T first slots and
        then the block.
    Cost: three launches (four from 4096 candidates), no host sync.
    """
    batch, heads, slots, dk = keys.shape
    num, dv = valid.shape[-1], values.shape[-1]
    used = num - new_keys.shape[2]
    check_shape("compact", "kept", kept, (batch, heads, num))
    check_shape("compact", "new_keys", new_keys, (batch, heads, None, dk))
    check_shape("compact", "new_values", new_values, (batch, heads, new_keys.shape[2], dv))
    check_head_dim("compact", max(dk, dv))
    check_contiguous("compact", keys=keys, values=values, positions=positions, lengths=lengths, slope=slope)
    check_contiguous("compact", valid=valid, kept=kept, cross=moments.cross)
    assert 0 <= used <= slots and new_keys.stride(-1) == new_values.stride(-1) == 1
    if not num or not batch:
        lengths.zero_()
        return
    device, has_means = keys.device, moments.key_mean is not None
    splits = moments_kernels.num_splits(num)
    lists = torch.empty(3, batch, heads, num, dtype=torch.int32, device=device)
    tally = torch.empty(batch, heads, 3, dtype=torch.int64, device=device)
    means = torch.empty(batch, heads, splits + 1, dk + dv, dtype=torch.float32, device=device)
    shape = {"DK": dk, "DV": dv, "BK": pow2(dk, 16), "BV": pow2(dv, 16)}
    key_mean, value_mean = (moments.key_mean, moments.value_mean) if has_means else (means, means)
    _plan_kernel[(batch * heads,)](
        kept.view(torch.uint8), valid.view(torch.uint8), lengths, moments.count, key_mean, value_mean, lists, tally,
        means, num, used, **shape, SPLITS=splits, HAS_MEANS=has_means, BLOCK=min(PLAN, pow2(num, 128)),
    )  # fmt: skip
    if has_means:
        moments_kernels.merge_rows(
            keys=keys,
            values=values,
            new_keys=new_keys,
            new_values=new_values,
            listed=lists[0],
            tally=tally,
            means=means,
            used=used,
            moments=moments,
            slope=slope,
        )
    strides = (*new_keys.stride()[:3], *new_values.stride()[:3], *new_positions.stride())
    movers = min(triton.cdiv(min(num, slots), ROWS), MAX_MOVERS)
    _move_kernel[(batch * heads, movers)](
        keys, values, positions, new_keys, new_values, new_positions, lists, tally, num, slots, used, *strides,
        HEADS=heads, **shape, ROWS=ROWS,
    )  # fmt: skip


_STRIDES = tuple(f"stride_{tensor}{axis}" for tensor in "kv" for axis in "bht")
_TYPES = {
    **dict.fromkeys(("keys_ptr", "values_ptr", "new_keys_ptr", "new_values_ptr"), "*bf16"),
    **dict.fromkeys(("positions_ptr", "new_positions_ptr", "lists_ptr", "lengths_ptr"), "*i32"),
    **dict.fromkeys(("key_mean_ptr", "value_mean_ptr", "means_ptr"), "*fp32"),
    **dict.fromkeys(("tally_ptr", "count_ptr"), "*i64"),
    **dict.fromkeys(("kept_ptr", "valid_ptr"), "*u8"),
    **dict.fromkeys(("N", "slots", "used", "stride_pb", "stride_ph", "stride_pt", *_STRIDES), "i32"),
}


def _variant(name: str, kernel, div16: tuple[str, ...], constants: dict, **launch) -> Variant:
    types = {argument: _TYPES[argument] for argument in kernel.arg_names if argument in _TYPES}
    return Variant(name, kernel, types, constants, div16, **launch)


AOT = [
    _variant(
        f"compact plan D{dim}", _plan_kernel, ("N",), num_stages=1,
        constants={"DK": dim, "DV": dim, "BK": pow2(dim), "BV": pow2(dim), "SPLITS": 1,
                   "HAS_MEANS": True, "BLOCK": PLAN},
    )
    for dim in (128,)
] + [
    _variant(
        f"compact move D{dim}", _move_kernel, ("N", *_STRIDES),
        constants={"HEADS": 8, "DK": dim, "DV": dim, "BK": pow2(dim), "BV": pow2(dim), "ROWS": ROWS},
    )
    for dim in (64, 80, 128, 256)
]  # fmt: skip
