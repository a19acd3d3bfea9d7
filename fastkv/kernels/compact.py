"""Evict: merge the candidates that are not kept into the moments, and fill the holes they leave, in place.

Twin of `reference.compact`. Candidates are the first `used` slots, then the block of T new tokens; none while decoding.
Kept slots below the new length L stay where they are; the other survivors (of the block, and of slots beyond L) go to
the holes below L, so no row moves that need not. Slot order may therefore differ from the reference, whose slots are
sorted by position.

Launches, because every evicted row must be read before any slot is overwritten:
1. plan: prefix sums over the masks list the evicted rows, the holes and the sources; the old means are put aside, the
   tokens of the block are counted as seen, and what is known of survivors goes where they will be.
2. merge: programs (head, slice of the value columns) add the listed rows to the moments in fp32 (Chan et al. 1979).
   With a the state before and b the rows, mean = mean_a + (n_b / n) d and S = S_a + S_b + (n_a n_b / n) d_k d_v^T,
   d = mean_b - mean_a; S_b is of centred rows, in a second pass, so that nothing cancels; the bf16
   shadow of S / n on the way. A long list is cut in splits, which one more launch merges in a fixed order.
3. move: the sources to the holes. Sources lie beyond L or in the block, holes below L, so the order does not matter.

Bytes per head: the masks three times, the listed rows (keys twice per slice, from L2), 8 d^2 of state, and moved rows
twice. Does not handle: a cache with fewer than L slots; slots that are views (the block may be one).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import LayerState, Selection, Spec, compact_in_copy
from ._arguments import PAIRS, MomentPointers, StatePointers, View
from ._attention import _barrier, _dot32, _home, _page, _stretch
from ._codes import _code_places, _codes_of, _exact, _packed, _plain_rows, _scale_places, _scales_of, _stored
from ._launch import (
    addressed,
    cdiv,
    check_contiguous,
    check_head_dim,
    check_like,
    check_rows,
    check_scales,
    on_hip,
    pow2,
)

PLAN = 2048  # candidates per prefix sum
ROWS = 32  # that a program moves at once
ROWS_PER_SPLIT = 2048
MAX_SPLITS = 16
# Of the merge, by padded head_dim: rows per tile, value columns per program, warps. Triton 3.7 compiles products of 512
# rows and 32 columns to nothing for sm_100.
MERGE = {64: (32, 32, 4), 128: (32, 32, 4), 256: (32, 32, 8), 512: (16, 16, 8)}
MAX_MOVERS = 32
FOLLOWING = ["page", "N", "slots", "used", "splits"]  # the length of a prompt: one compilation for all of them


class PlanPointers(NamedTuple):
    """What the launches tell each other: lists [3, B * Hkv, N] int32 of evicted rows, of holes, of their sources; tally
    [B * Hkv, 3] int64, how many are evicted, move, and were counted before; means [B * Hkv, splits + 1, Dk + Dv], those
    before first; crosses [B * Hkv, splits, Dk, Dv], absent for one split.
    """

    lists_ptr: Any
    tally_ptr: Any
    means_ptr: Any
    crosses_ptr: Any = None


class Tile(NamedTuple):
    """Constants of a launch: sizes of keys and values, padded BK and BV; rows at a time, columns of values."""

    HEADS: int
    DK: int
    DV: int
    BK: int
    BV: int
    ROWS: int
    COLUMNS: int


@triton.jit(do_not_specialize=["page", "slots", "used", "splits"])  # N stays: aligned masks are read 16 bytes at a time
def _plan_kernel(
    kept_ptr, valid_ptr, known_ptr, state: StatePointers, moments: MomentPointers, plan: PlanPointers, rows_ptr, page,
    N, slots, used, splits, TILE: tl.constexpr, BLOCK: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    head = tl.program_id(0).to(tl.int64)
    home, own = _home(rows_ptr, page, head, TILE.HEADS)
    tally_ptr = plan.tally_ptr + head * 3
    if rows_ptr is not None:
        if home == 0:
            tl.store(tally_ptr, 0)  # nothing to merge or to move
            tl.store(tally_ptr + 1, 0)
            return
    state = StatePointers(*[p if p is None else _page(p, home, page) for p in state])
    moments = MomentPointers(*[p if p is None else _page(p, home, page) for p in moments])
    row = head * N
    listed_ptr = plan.lists_ptr + row
    holes_ptr = listed_ptr + tl.num_programs(0).to(tl.int64) * N
    sources_ptr = holes_ptr + tl.num_programs(0).to(tl.int64) * N
    lane = tl.arange(0, BLOCK)
    length = tl.zeros([], tl.int32)
    new = tl.zeros([], tl.int32)
    for start in range(0, N, BLOCK):
        index = start + lane
        valid = tl.load(valid_ptr + row + index, mask=index < N, other=0) != 0
        new += tl.sum((valid & (index >= used)).to(tl.int32), 0)
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
    count = tl.load(moments.count_ptr + own)
    tl.store(state.lengths_ptr + own, length)
    if state.seen_ptr is not None:
        if head % TILE.HEADS == 0:
            seen_ptr = state.seen_ptr + own // TILE.HEADS
            tl.store(seen_ptr, tl.load(seen_ptr) + new)
    if known_ptr is not None:
        base, room = _stretch(state.starts_ptr, own, slots, TILE.HEADS)
        memory_ptr = state.memory_ptr + base
        for start in range(0, N, BLOCK):
            index = start + lane
            stays = tl.load(kept_ptr + row + index, mask=index < tl.minimum(used, length), other=0) != 0
            stays &= tl.load(valid_ptr + row + index, mask=index < tl.minimum(used, length), other=0) != 0
            tl.store(memory_ptr + index, tl.load(known_ptr + row + index, mask=stays, other=0.0), mask=stays)
        _barrier(HIP)  # lists are read by other threads than wrote them
        few = tl.arange(0, BLOCK // 4)
        for start in range(0, moves, BLOCK // 4):
            inside = start + few < moves
            source = tl.load(sources_ptr + start + few, mask=inside, other=0)
            hole = tl.load(holes_ptr + start + few, mask=inside, other=0)
            tl.store(memory_ptr + hole, tl.load(known_ptr + row + source, mask=inside, other=0.0), mask=inside)
        _barrier(HIP)  # what is known may be the memory itself
        for start in range(length, room, BLOCK // 4):
            tl.store(memory_ptr + start + few, 0.0, mask=start + few < room)
    if state.attention_ptr is not None:
        for start in range(0, slots, BLOCK):
            tl.store(state.attention_ptr + own * slots + start + lane, 0.0, mask=start + lane < slots)
    tl.store(tally_ptr, gone.to(tl.int64))
    tl.store(tally_ptr + 1, moves.to(tl.int64))
    tl.store(tally_ptr + 2, count)
    if moments.key_mean_ptr is not None:
        dk, dv = tl.arange(0, TILE.BK), tl.arange(0, TILE.BV)
        before = plan.means_ptr + head * (splits + 1) * (DK + DV)
        key_mean = tl.load(moments.key_mean_ptr + own * DK + dk, mask=dk < DK, other=0.0)
        tl.store(before + dk, key_mean, mask=dk < DK)
        value_mean = tl.load(moments.value_mean_ptr + own * DV + dv, mask=dv < DV, other=0.0)
        tl.store(before + DK + dv, value_mean, mask=dv < DV)
    else:
        tl.store(moments.count_ptr + own, count + gone)


@triton.jit
def _rows(slots_ptr, scales_ptr, new_ptr, index, inside, used, begin, stride_t, D: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [begin, begin + BLOCK) of rows `index` of the candidates, fp32: of the slots below `used`, else of the
    block; 0 where not inside."""
    column = begin + tl.arange(0, BLOCK)
    width = column[None, :] < D
    old = (inside & (index < used))[:, None] & width
    fresh = (inside & (index >= used))[:, None] & width
    far = index.to(tl.int64)[:, None]
    if _packed(scales_ptr):
        a = _plain_rows(slots_ptr, scales_ptr, index.to(tl.int64), inside & (index < used), begin, D, BLOCK)
    else:
        a = tl.load(slots_ptr + far * D + column[None, :], mask=old, other=0.0)
    b = tl.load(new_ptr + (far - used) * stride_t + column[None, :], mask=fresh, other=0.0)
    if not _packed(scales_ptr):
        a = _exact(a, scales_ptr, index, inside & (index < used))
    return tl.where(old, a, b.to(tl.float32))


@triton.jit
def _range(gone, split, splits, ROWS: tl.constexpr):
    """First and last + 1 of the listed rows of a split."""
    each = tl.cdiv(tl.cdiv(gone, splits), ROWS) * ROWS
    low = tl.minimum(split * each, gone)
    return low, tl.minimum(low + each, gone)


@triton.jit
def _chan(count, key_mean, value_mean, cross, more, new_key, new_value, new_cross):
    """The merge of two sets; counts are fp32."""
    key_step, value_step = new_key - key_mean, new_value - value_mean
    share = more / tl.maximum(count + more, 1.0)
    cross += new_cross + (count * share) * key_step[:, None] * value_step[None, :]
    return count + more, key_mean + share * key_step, value_mean + share * value_step, cross


@triton.jit
def _store_state(moments, head, count, key_mean, value_mean, cross, dk, dv, DK: tl.constexpr, DV: tl.constexpr):
    """Write a slice of the value columns; the program of the first slice also writes the key mean and the count."""
    if tl.program_id(1) == 0:
        tl.store(moments.key_mean_ptr + head * DK + dk, key_mean, mask=dk < DK)
        tl.store(moments.count_ptr + head, count)
    tl.store(moments.value_mean_ptr + head * DV + dv, value_mean, mask=dv < DV)
    if moments.cross_ptr is not None:
        spot = (head * DK + dk[:, None]) * DV + dv[None, :]
        inside = (dk[:, None] < DK) & (dv[None, :] < DV)
        tl.store(moments.cross_ptr + spot, cross, mask=inside)
        if moments.slope_ptr is not None:
            slope = cross * (1.0 / tl.maximum(count, 1).to(tl.float32))
            tl.store(moments.slope_ptr + spot, slope.to(moments.slope_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_state(means_ptr, cross_ptr, head, dk, dv, DK: tl.constexpr, DV: tl.constexpr):
    """Means, and cross moments of a pair or of a split, 0 without; columns dv of values."""
    key_mean = tl.load(means_ptr + dk, mask=dk < DK, other=0.0)
    value_mean = tl.load(means_ptr + DK + dv, mask=dv < DV, other=0.0)
    cross = tl.zeros([dk.shape[0], dv.shape[0]], tl.float32)
    if cross_ptr is not None:
        spot, within = dk[:, None] * DV + dv[None, :], (dk[:, None] < DK) & (dv[None, :] < DV)
        cross = tl.load(cross_ptr + head * DK * DV + spot, mask=within, other=0.0)
    return key_mean, value_mean, cross


@triton.jit(do_not_specialize=FOLLOWING)
def _moments_kernel(
    state: StatePointers, new_keys: View, new_values: View, plan: PlanPointers, moments: MomentPointers, rows_ptr, page,
    N, slots, used, splits, TILE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = TILE.HEADS
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    BK: tl.constexpr = TILE.BK
    ROWS: tl.constexpr = TILE.ROWS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    lane, dk = tl.arange(0, ROWS), tl.arange(0, BK)
    mine = tl.program_id(1) * COLUMNS
    dv = mine + tl.arange(0, COLUMNS)
    home, own = _home(rows_ptr, page, head, HEADS)
    if rows_ptr is not None:
        if home == 0:
            return
    state = StatePointers(*[p if p is None else _page(p, home, page) for p in state])
    moments = MomentPointers(*[p if p is None else _page(p, home, page) for p in moments])
    base, _ = _stretch(state.starts_ptr, own, slots, TILE.HEADS)
    keys = _codes_of(state.keys_ptr, state.key_scales_ptr, base, DK)
    values = _codes_of(state.values_ptr, state.value_scales_ptr, base, DV)
    key_scales = _scales_of(state.key_scales_ptr, base, DK)
    value_scales = _scales_of(state.value_scales_ptr, base, DV)
    fresh_keys = new_keys.ptr + (head // HEADS) * new_keys.stride_b + (head % HEADS) * new_keys.stride_h
    fresh_values = new_values.ptr + (head // HEADS) * new_values.stride_b + (head % HEADS) * new_values.stride_h
    key_stride, value_stride = new_keys.stride_t, new_values.stride_t
    listed_ptr, tally_ptr = plan.lists_ptr + head * N, plan.tally_ptr + head * 3
    gone = tl.load(tally_ptr).to(tl.int32)
    low, high = _range(gone, split, splits, ROWS)
    key_mean = tl.zeros([BK], tl.float32)
    value_mean = tl.zeros([COLUMNS], tl.float32)
    for start in range(low, high, ROWS):
        inside = start + lane < high
        index = tl.load(listed_ptr + start + lane, mask=inside, other=0)
        key_mean += tl.sum(_rows(keys, key_scales, fresh_keys, index, inside, used, 0, key_stride, DK, BK), 0)
        v = _rows(values, value_scales, fresh_values, index, inside, used, mine, value_stride, DV, COLUMNS)
        value_mean += tl.sum(v, 0)
    inverse = 1.0 / tl.maximum(high - low, 1).to(tl.float32)
    key_mean, value_mean = key_mean * inverse, value_mean * inverse
    cross = tl.zeros([BK, COLUMNS], tl.float32)
    if moments.cross_ptr is not None:
        for start in range(low, high, ROWS):
            inside = start + lane < high
            index = tl.load(listed_ptr + start + lane, mask=inside, other=0)
            v = _rows(values, value_scales, fresh_values, index, inside, used, mine, value_stride, DV, COLUMNS)
            v -= value_mean[None, :]
            k = _rows(keys, key_scales, fresh_keys, index, inside, used, 0, key_stride, DK, BK) - key_mean[None, :]
            v = tl.where(inside[:, None], v, 0.0)
            if _packed(key_scales) and ROWS < 32:
                # triton pairs numbers that come out of `_turned` for products of 32 rows
                cross += tl.dot(tl.trans(k), v, input_precision="ieee")
            else:
                cross += _dot32(tl.trans(k), v)
    means_ptr = plan.means_ptr + head * (splits + 1) * (DK + DV)  # the state before, then one row per split
    if SINGLE:
        before = tl.load(tally_ptr + 2)
        old_key, old_value, old = _load_state(means_ptr, moments.cross_ptr, own, dk, dv, DK, DV)
        _, key_mean, value_mean, cross = _chan(
            before.to(tl.float32), old_key, old_value, old, gone.to(tl.float32), key_mean, value_mean, cross
        )
        _store_state(moments, own, before + gone, key_mean, value_mean, cross, dk, dv, DK, DV)
    else:
        means_ptr += (split + 1) * (DK + DV)
        if tl.program_id(1) == 0:
            tl.store(means_ptr + dk, key_mean, mask=dk < DK)
        tl.store(means_ptr + DK + dv, value_mean, mask=dv < DV)
        if moments.cross_ptr is not None:
            spot, within = dk[:, None] * DV + dv[None, :], (dk[:, None] < DK) & (dv[None, :] < DV)
            tl.store(plan.crosses_ptr + (head * splits + split) * DK * DV + spot, cross, mask=within)


@triton.jit(do_not_specialize=["page", "splits"])
def _merge_kernel(plan: PlanPointers, moments: MomentPointers, rows_ptr, page, splits, TILE: tl.constexpr):
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    head = tl.program_id(0).to(tl.int64)
    home, own = _home(rows_ptr, page, head, TILE.HEADS)
    if rows_ptr is not None:
        if home == 0:
            return
    moments = MomentPointers(*[p if p is None else _page(p, home, page) for p in moments])
    dk, dv = tl.arange(0, TILE.BK), tl.program_id(1) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    gone = tl.load(plan.tally_ptr + head * 3).to(tl.int32)
    before = tl.load(plan.tally_ptr + head * 3 + 2)
    means_ptr = plan.means_ptr + head * (splits + 1) * (DK + DV)
    count = before.to(tl.float32)
    key_mean, value_mean, cross = _load_state(means_ptr, moments.cross_ptr, own, dk, dv, DK, DV)
    for split in range(0, splits):
        low, high = _range(gone, split, splits, TILE.ROWS)
        means_ptr += DK + DV
        new_key, new_value, fresh = _load_state(means_ptr, plan.crosses_ptr, head * splits + split, dk, dv, DK, DV)
        count, key_mean, value_mean, cross = _chan(
            count, key_mean, value_mean, cross, (high - low).to(tl.float32), new_key, new_value, fresh
        )
    _store_state(moments, own, before + gone, key_mean, value_mean, cross, dk, dv, DK, DV)


@triton.jit
def _move_row_tile(
    to_ptr, scales_ptr, new_ptr, source, hole, inside, used, stride_t, D: tl.constexpr, BLOCK: tl.constexpr
):
    """to[hole] = (slots, then block)[source] for a tile of rows; with scales, those of the block are encoded."""
    column = tl.arange(0, BLOCK)[None, :]
    old = (inside & (source < used))[:, None] & (column < D)
    fresh = (inside & (source >= used))[:, None] & (column < D)
    far = source.to(tl.int64)[:, None]
    if scales_ptr is None:
        a = tl.load(to_ptr + far * D + column, mask=old, other=0.0)
        b = tl.load(new_ptr + (far - used) * stride_t + column, mask=fresh, other=0.0)
        row = tl.where(old, a.to(tl.float32), b.to(tl.float32))
        spot = to_ptr + hole.to(tl.int64)[:, None] * D + column
        tl.store(spot, row.to(to_ptr.dtype.element_ty), mask=inside[:, None] & (column < D))
    else:
        b = tl.load(new_ptr + (far - used) * stride_t + column, mask=fresh, other=0.0)
        codes, scales, _ = _stored(b.to(tl.float32), to_ptr, scales_ptr, D)
        spot, old = _code_places(to_ptr, scales_ptr, source.to(tl.int64), inside & (source < used), D, BLOCK)
        row = tl.where(old, tl.load(spot, mask=old, other=0), codes)
        spot, mask = _code_places(to_ptr, scales_ptr, hole.to(tl.int64), inside, D, BLOCK)
        tl.store(spot, row, mask=mask)
        spot, old = _scale_places(scales_ptr, source, inside & (source < used), D, BLOCK)
        scale = tl.where(old, tl.load(spot, mask=old, other=0), scales)
        spot, mask = _scale_places(scales_ptr, hole, inside, D, BLOCK)
        tl.store(spot, scale, mask=mask)


@triton.jit(do_not_specialize=FOLLOWING[:-1])
def _move_kernel(
    state: StatePointers, new_keys: View, new_values: View, new_positions: View, plan: PlanPointers, rows_ptr, page, N,
    slots, used, TILE: tl.constexpr,
):  # fmt: skip
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    ROWS: tl.constexpr = TILE.ROWS
    head = tl.program_id(0).to(tl.int64)
    batch, kv = head // TILE.HEADS, head % TILE.HEADS
    home, own = _home(rows_ptr, page, head, TILE.HEADS)
    lane = tl.arange(0, ROWS)
    holes_ptr = plan.lists_ptr + (tl.num_programs(0) + head) * N
    sources_ptr = holes_ptr + tl.num_programs(0).to(tl.int64) * N
    state = StatePointers(*[p if p is None else _page(p, home, page) for p in state])
    base, _ = _stretch(state.starts_ptr, own, slots, TILE.HEADS)
    keys = _codes_of(state.keys_ptr, state.key_scales_ptr, base, DK)
    values = _codes_of(state.values_ptr, state.value_scales_ptr, base, DV)
    key_scales = _scales_of(state.key_scales_ptr, base, DK)
    value_scales = _scales_of(state.value_scales_ptr, base, DV)
    places = state.positions_ptr + base
    fresh_places = new_positions.ptr + batch * new_positions.stride_b + kv * new_positions.stride_h
    fresh_keys = new_keys.ptr + batch * new_keys.stride_b + kv * new_keys.stride_h
    fresh_values = new_values.ptr + batch * new_values.stride_b + kv * new_values.stride_h
    moves = tl.load(plan.tally_ptr + head * 3 + 1).to(tl.int32)
    for start in range(tl.program_id(1) * ROWS, moves, tl.num_programs(1) * ROWS):
        inside = start + lane < moves
        source = tl.load(sources_ptr + start + lane, mask=inside, other=0)
        hole = tl.load(holes_ptr + start + lane, mask=inside, other=0)
        _move_row_tile(keys, key_scales, fresh_keys, source, hole, inside, used, new_keys.stride_t, DK, TILE.BK)
        _move_row_tile(values, value_scales, fresh_values, source, hole, inside, used, new_values.stride_t, DV, TILE.BV)
        if state.bias_ptr is not None:  # 0 for new tokens
            bias = state.bias_ptr + base
            moved = tl.load(bias + source, mask=inside & (source < used), other=0.0)
            tl.store(bias + hole, moved, mask=inside)
        old = tl.load(places + source, mask=inside & (source < used), other=0)
        far = (source - used).to(tl.int64) * new_positions.stride_t
        new = tl.load(fresh_places + far, mask=inside & (source >= used), other=0).to(tl.int32)
        tl.store(places + hole, tl.where(source < used, old, new), mask=inside)


def compact(
    valid: Tensor, selection: Selection, block: tuple[Tensor, Tensor, Tensor] | None, known: Tensor | None,
    state: LayerState, spec: Spec,
) -> None:  # fmt: skip
    """Three launches (two if only the count is remembered, four from 4096 candidates), no host sync; shapes as in
    `reference.compact`.

    k, v and positions of the block have any strides, with unit stride along D. `moments.slope`, if there is one, is
    set to cross / count.
    """
    op, slots, moments, kept = "compact", state.exact, state.moments, selection.kept
    keys, values, positions, lengths = slots.keys, slots.values, slots.positions, slots.lengths
    assert values is not None and positions is not None
    (_, heads, capacity, _), batch, num = addressed(op, keys, slots.starts).shape, state.batch, valid.shape[-1]
    dk, dv = slots.format.keys.dim(keys.shape[-1]), slots.value_dim
    nothing = (
        keys.new_empty(batch, heads, 0, dk, dtype=slots.dtype),
        values.new_empty(batch, heads, 0, dv, dtype=slots.dtype),
        positions.new_empty(batch, heads, 0),
    )
    k, v, new_positions = nothing if block is None else block
    used = num - k.shape[2]
    held, changing = StatePointers.of(slots, *PAIRS, "bias", "positions", "starts"), MomentPointers.of(moments)
    check_scales(op, slots)
    check_shape(op, "kept", kept, (batch, heads, num))
    check_shape(op, "k", k, (batch, heads, None, dk))
    check_shape(op, "v", v, (batch, heads, k.shape[2], dv))
    check_head_dim(op, max(dk, dv))
    check_contiguous(op, valid=valid, kept=kept)
    shared, begins = slots.starts is not None, block is not None
    changed = ("lengths", *["attention"] * (begins and not shared), *["memory", "starts"] * (known is not None))
    counted = StatePointers.of(slots, *changed, seen=None if block is None else state.seen)
    check_like(op, valid.shape, known=known)
    for name in ("attention", "memory"):
        if (numbers := getattr(slots, name)) is not None:
            check_shape(op, name, addressed(op, numbers, slots.starts), (None, heads, capacity))
    page = check_rows(op, state, held, changing, counted)
    assert 0 <= used <= capacity and k.stride(-1) == v.stride(-1) == 1
    if shared and begins and used:
        compact_in_copy(compact, valid, selection, block, known, state, spec)
        return
    if shared and begins and slots.attention is not None:
        slots.attention.zero_()
    if not num or not batch:
        lengths.zero_() if state.rows is None else lengths.index_fill_(0, state.rows, 0)
        return
    device, where, width = keys.device, (state.rows, page), pow2(dk, 64)
    most = num  # rows that leave, or move; every head keeps `spec.tokens`, and of a slab all but `spec.spare`
    if not begins:
        most = max(spec.spare if shared else num - spec.tokens, 1)
    splits, pairs = min(MAX_SPLITS, max(1, most // ROWS_PER_SPLIT)), batch * heads
    crosses = None
    if moments.cross is not None and splits > 1:
        crosses = torch.empty(pairs, splits, dk, dv, dtype=torch.float32, device=device)
    plan = PlanPointers(
        torch.empty(3, pairs, num, dtype=torch.int32, device=device),
        torch.empty(pairs, 3, dtype=torch.int64, device=device),
        torch.empty(pairs, splits + 1, dk + dv, dtype=torch.float32, device=device),
        crosses,
    )
    rows, columns, warps = MERGE[width]
    tile = Tile(heads, dk, dv, pow2(dk, 16), pow2(dv, 16), rows, columns)
    _plan_kernel[(pairs,)](
        kept.view(torch.uint8), valid.view(torch.uint8), known, counted, changing, plan, *where, num, capacity, used,
        splits, TILE=tile, BLOCK=PLAN, HIP=on_hip(),
    )  # fmt: skip
    block_keys, block_values = View.of(k), View.of(v)
    if moments.key_mean is not None:
        slices = cdiv(dv, columns)
        _moments_kernel[(pairs, slices, splits)](
            held, block_keys, block_values, plan, changing, *where, num, capacity, used, splits, TILE=tile,
            SINGLE=splits == 1, num_warps=warps, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            _merge_kernel[(pairs, slices)](plan, changing, *where, splits, TILE=tile, num_warps=warps)
    width = pow2(max(dk, dv), 64)
    (rows, _, warps), packed = MERGE[width], slots.format.values.bits == 4  # which takes the registers of a merge
    rows, warps = (rows, warps) if packed or width > 256 else (ROWS, 4)
    movers = min(cdiv(min(most, capacity), rows), MAX_MOVERS)
    _move_kernel[(pairs, movers)](
        held, block_keys, block_values, View.of(new_positions), plan, *where, num, capacity, used,
        TILE=tile._replace(ROWS=rows), num_warps=warps,
    )  # fmt: skip
