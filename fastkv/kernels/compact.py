"""Evict: merge the candidates that are not kept into the moments, and fill the holes they leave, in place.

Twin of `reference.compact`. Candidates are the first `used` slots, then the block of T new tokens. Kept slots below the
new length L stay where they are; the other survivors (of the block, and of slots beyond L) go to the holes below L, so
no row moves that need not. Slot order may therefore differ from the reference, whose slots are sorted by position.

Launches, because every evicted row must be read before any slot is overwritten:
1. plan: prefix sums over the masks list the evicted rows, the holes and the sources; the old means are put aside.
2. merge: programs (head, slice of the value columns) add the listed rows to the moments in fp32 (Chan et al. 1979).
   With a the state before and b the rows, mean = mean_a + (n_b / n) d and S = S_a + S_b + (n_a n_b / n) d_k d_v^T,
   d = mean_b - mean_a; S_b is of centred rows, in a second pass, so that nothing cancels; the bf16
   shadow of S / n on the way. A long list is cut in splits, which one more launch merges in a fixed order.
3. move: the sources to the holes. Sources lie beyond L or in the block, holes below L, so the order does not matter.

Bytes per head: the masks three times, the listed rows (keys twice per slice, from L2), 8 d^2 of state, and moved rows
twice. Does not handle: a cache with fewer than L slots; slots that are views (the block may be one).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import LayerState, Moments, Selection, Spec
from ._attention import _dot32, _home, _page
from ._codes import _code_places, _codes_of, _exact, _packed, _plain_rows, _scale_places, _scales_of, _stored
from ._launch import check_contiguous, check_head_dim, check_rows, check_scales, pow2

PLAN = 2048  # candidates per prefix sum
ROWS = 32  # that a program moves at once
ROWS_PER_SPLIT = 2048
MAX_SPLITS = 16
# Of the merge, by padded head_dim: rows per tile, value columns per program, warps. Triton 3.7 compiles products of 512
# rows and 32 columns to nothing for sm_100.
MERGE = {64: (32, 32, 4), 128: (32, 32, 4), 256: (32, 32, 8), 512: (16, 16, 8)}
MAX_MOVERS = 32
Pairs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
FOLLOWING = ["page", "N", "slots", "used", "splits"]  # the length of a prompt: one compilation for all of them


@triton.jit(do_not_specialize=["page", "used", "splits"])  # N stays: aligned masks are read 16 bytes at a time
def _plan_kernel(
    kept_ptr, valid_ptr, lengths_ptr, count_ptr, key_mean_ptr, value_mean_ptr, lists_ptr, tally_ptr, means_ptr,
    rows_ptr, page, N, used, splits, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_MEANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    home, own = _home(rows_ptr, page, head, HEADS)
    if rows_ptr is not None:
        if home == 0:
            tl.store(tally_ptr + head * 3, 0)  # nothing to merge or to move
            tl.store(tally_ptr + head * 3 + 1, 0)
            return
    lengths_ptr = _page(lengths_ptr, home, page)
    count_ptr = _page(count_ptr, home, page)
    key_mean_ptr = _page(key_mean_ptr, home, page)
    value_mean_ptr = _page(value_mean_ptr, home, page)
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
    count = tl.load(count_ptr + own)
    tl.store(lengths_ptr + own, length)
    tl.store(tally_ptr + head * 3, gone.to(tl.int64))
    tl.store(tally_ptr + head * 3 + 1, moves.to(tl.int64))
    tl.store(tally_ptr + head * 3 + 2, count)
    if HAS_MEANS:
        dk, dv = tl.arange(0, BK), tl.arange(0, BV)
        before = means_ptr + head * (splits + 1) * (DK + DV)
        tl.store(before + dk, tl.load(key_mean_ptr + own * DK + dk, mask=dk < DK, other=0.0), mask=dk < DK)
        value_mean = tl.load(value_mean_ptr + own * DV + dv, mask=dv < DV, other=0.0)
        tl.store(before + DK + dv, value_mean, mask=dv < DV)
    else:
        tl.store(count_ptr + own, count + gone)


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
def _scales(scales_ptr, home, page, first, D: tl.constexpr):
    """The scales from slot `first` on of a row of the state; None without scales."""
    if scales_ptr is None:
        return  # as in `_page`
    else:
        return _scales_of(_page(scales_ptr, home, page), first, D)


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
def _store_state(
    count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr,
    head, count, key_mean, value_mean, cross, dk, dv,
    DK: tl.constexpr, DV: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    """Write a slice of the value columns; the program of the first slice also writes the key mean and the count."""
    if tl.program_id(1) == 0:
        tl.store(key_mean_ptr + head * DK + dk, key_mean, mask=dk < DK)
        tl.store(count_ptr + head, count)
    tl.store(value_mean_ptr + head * DV + dv, value_mean, mask=dv < DV)
    if HAS_CROSS:
        spot = (head * DK + dk[:, None]) * DV + dv[None, :]
        inside = (dk[:, None] < DK) & (dv[None, :] < DV)
        tl.store(cross_ptr + spot, cross, mask=inside)
        if HAS_SLOPE:
            slope = cross * (1.0 / tl.maximum(count, 1).to(tl.float32))
            tl.store(slope_ptr + spot, slope.to(slope_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=FOLLOWING)
def _moments_kernel(
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, new_keys_ptr, new_values_ptr, listed_ptr, tally_ptr,
    means_ptr, part_cross_ptr, count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, rows_ptr, page, N, slots,
    used, splits,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SINGLE: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    lane, dk = tl.arange(0, ROWS), tl.arange(0, BK)
    mine = tl.program_id(1) * COLUMNS
    dv = mine + tl.arange(0, COLUMNS)
    home, own = _home(rows_ptr, page, head, HEADS)
    if rows_ptr is not None:
        if home == 0:
            return
    keys = _codes_of(_page(keys_ptr, home, page), key_scales_ptr, own * slots, DK)
    values = _codes_of(_page(values_ptr, home, page), value_scales_ptr, own * slots, DV)
    key_scales = _scales(key_scales_ptr, home, page, own * slots, DK)
    value_scales = _scales(value_scales_ptr, home, page, own * slots, DV)
    count_ptr = _page(count_ptr, home, page)
    key_mean_ptr = _page(key_mean_ptr, home, page)
    value_mean_ptr = _page(value_mean_ptr, home, page)
    cross_ptr = _page(cross_ptr, home, page)
    slope_ptr = _page(slope_ptr, home, page)
    new_keys = new_keys_ptr + (head // HEADS) * stride_kb + (head % HEADS) * stride_kh
    new_values = new_values_ptr + (head // HEADS) * stride_vb + (head % HEADS) * stride_vh
    gone = tl.load(tally_ptr + head * 3).to(tl.int32)
    low, high = _range(gone, split, splits, ROWS)
    key_mean = tl.zeros([BK], tl.float32)
    value_mean = tl.zeros([COLUMNS], tl.float32)
    for start in range(low, high, ROWS):
        inside = start + lane < high
        index = tl.load(listed_ptr + head * N + start + lane, mask=inside, other=0)
        key_mean += tl.sum(_rows(keys, key_scales, new_keys, index, inside, used, 0, stride_kt, DK, BK), 0)
        v = _rows(values, value_scales, new_values, index, inside, used, mine, stride_vt, DV, COLUMNS)
        value_mean += tl.sum(v, 0)
    inverse = 1.0 / tl.maximum(high - low, 1).to(tl.float32)
    key_mean, value_mean = key_mean * inverse, value_mean * inverse
    cross = tl.zeros([BK, COLUMNS], tl.float32)
    if HAS_CROSS:
        for start in range(low, high, ROWS):
            inside = start + lane < high
            index = tl.load(listed_ptr + head * N + start + lane, mask=inside, other=0)
            v = _rows(values, value_scales, new_values, index, inside, used, mine, stride_vt, DV, COLUMNS)
            v -= value_mean[None, :]
            k = _rows(keys, key_scales, new_keys, index, inside, used, 0, stride_kt, DK, BK) - key_mean[None, :]
            cross += _dot32(tl.trans(k), tl.where(inside[:, None], v, 0.0))
    state = means_ptr + head * (splits + 1) * (DK + DV)  # the state before, then one row per split
    spot = dk[:, None] * DV + dv[None, :]
    within = (dk[:, None] < DK) & (dv[None, :] < DV)
    if SINGLE:
        before = tl.load(tally_ptr + head * 3 + 2)
        old_key = tl.load(state + dk, mask=dk < DK, other=0.0)
        old_value = tl.load(state + DK + dv, mask=dv < DV, other=0.0)
        old = tl.zeros([BK, COLUMNS], tl.float32)
        if HAS_CROSS:
            old = tl.load(cross_ptr + own * DK * DV + spot, mask=within, other=0.0)
        _, key_mean, value_mean, cross = _chan(
            before.to(tl.float32), old_key, old_value, old, gone.to(tl.float32), key_mean, value_mean, cross
        )
        _store_state(
            count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, own, before + gone,
            key_mean, value_mean, cross, dk, dv, DK, DV, HAS_CROSS, HAS_SLOPE,
        )  # fmt: skip
    else:
        mean = state + (split + 1) * (DK + DV)
        if tl.program_id(1) == 0:
            tl.store(mean + dk, key_mean, mask=dk < DK)
        tl.store(mean + DK + dv, value_mean, mask=dv < DV)
        if HAS_CROSS:
            tl.store(part_cross_ptr + (head * splits + split) * DK * DV + spot, cross, mask=within)


@triton.jit(do_not_specialize=["page", "splits"])
def _merge_kernel(
    tally_ptr, means_ptr, part_cross_ptr, count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, rows_ptr, page,
    splits, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    home, own = _home(rows_ptr, page, head, HEADS)
    if rows_ptr is not None:
        if home == 0:
            return
    count_ptr = _page(count_ptr, home, page)
    key_mean_ptr = _page(key_mean_ptr, home, page)
    value_mean_ptr = _page(value_mean_ptr, home, page)
    cross_ptr = _page(cross_ptr, home, page)
    slope_ptr = _page(slope_ptr, home, page)
    dk = tl.arange(0, BK)
    dv = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    spot = dk[:, None] * DV + dv[None, :]
    within = (dk[:, None] < DK) & (dv[None, :] < DV)
    gone = tl.load(tally_ptr + head * 3).to(tl.int32)
    before = tl.load(tally_ptr + head * 3 + 2)
    mean = means_ptr + head * (splits + 1) * (DK + DV)
    count = before.to(tl.float32)
    key_mean = tl.load(mean + dk, mask=dk < DK, other=0.0)
    value_mean = tl.load(mean + DK + dv, mask=dv < DV, other=0.0)
    cross = tl.zeros([BK, COLUMNS], tl.float32)
    if HAS_CROSS:
        cross = tl.load(cross_ptr + own * DK * DV + spot, mask=within, other=0.0)
    for split in range(0, splits):
        low, high = _range(gone, split, splits, ROWS)
        mean += DK + DV
        new_key = tl.load(mean + dk, mask=dk < DK, other=0.0)
        new_value = tl.load(mean + DK + dv, mask=dv < DV, other=0.0)
        fresh = tl.zeros([BK, COLUMNS], tl.float32)
        if HAS_CROSS:
            fresh = tl.load(part_cross_ptr + (head * splits + split) * DK * DV + spot, mask=within, other=0.0)
        count, key_mean, value_mean, cross = _chan(
            count, key_mean, value_mean, cross, (high - low).to(tl.float32), new_key, new_value, fresh
        )
    _store_state(
        count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, own, before + gone,
        key_mean, value_mean, cross, dk, dv, DK, DV, HAS_CROSS, HAS_SLOPE,
    )  # fmt: skip


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
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, bias_ptr, positions_ptr, new_keys_ptr, new_values_ptr,
    new_positions_ptr, lists_ptr, tally_ptr, rows_ptr, page, N, slots, used,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_pb, stride_ph, stride_pt,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    home, own = _home(rows_ptr, page, head, HEADS)
    lane = tl.arange(0, ROWS)
    holes_ptr = lists_ptr + (tl.num_programs(0) + head) * N
    sources_ptr = holes_ptr + tl.num_programs(0).to(tl.int64) * N
    places = _page(positions_ptr, home, page) + own * slots
    keys = _codes_of(_page(keys_ptr, home, page), key_scales_ptr, own * slots, DK)
    values = _codes_of(_page(values_ptr, home, page), value_scales_ptr, own * slots, DV)
    key_scales = _scales(key_scales_ptr, home, page, own * slots, DK)
    value_scales = _scales(value_scales_ptr, home, page, own * slots, DV)
    new_places = new_positions_ptr + batch * stride_pb + kv * stride_ph
    new_keys = new_keys_ptr + batch * stride_kb + kv * stride_kh
    new_values = new_values_ptr + batch * stride_vb + kv * stride_vh
    moves = tl.load(tally_ptr + head * 3 + 1).to(tl.int32)
    for start in range(tl.program_id(1) * ROWS, moves, tl.num_programs(1) * ROWS):
        inside = start + lane < moves
        source = tl.load(sources_ptr + start + lane, mask=inside, other=0)
        hole = tl.load(holes_ptr + start + lane, mask=inside, other=0)
        _move_row_tile(keys, key_scales, new_keys, source, hole, inside, used, stride_kt, DK, BK)
        _move_row_tile(values, value_scales, new_values, source, hole, inside, used, stride_vt, DV, BV)
        if bias_ptr is not None:  # 0 for new tokens
            bias = _page(bias_ptr, home, page) + own * slots
            moved = tl.load(bias + source, mask=inside & (source < used), other=0.0)
            tl.store(bias + hole, moved, mask=inside)
        old = tl.load(places + source, mask=inside & (source < used), other=0)
        far = (source - used).to(tl.int64) * stride_pt
        new = tl.load(new_places + far, mask=inside & (source >= used), other=0).to(tl.int32)
        tl.store(places + hole, tl.where(source < used, old, new), mask=inside)


def row_splits(candidates: int) -> int:
    """Splits of the listed rows: a function of shapes alone."""
    return min(MAX_SPLITS, max(1, candidates // ROWS_PER_SPLIT))


def move_tile(width: int, packed: bool) -> tuple[int, int]:
    """Rows at once and warps of a move, for heads padded to `width`; packed: it encodes in 4 bits, which takes the
    registers of a merge.
    """
    rows, _, warps = MERGE[width]
    return (rows, warps) if packed else (ROWS, 4)


def _merge(
    held: Pairs, new_keys: Tensor, new_values: Tensor, listed: Tensor, tally: Tensor, means: Tensor,
    used: int, moments: Moments, where: tuple[Tensor | None, int | None],
) -> None:  # fmt: skip
    """Add the listed candidates to the moments, in place.

    Args: held: keys, values and their scales in the slots; listed [B, Hkv, N] int32, rows to merge; tally [B, Hkv, 3]
        int64: how many, (moves), count before; means [B, Hkv, splits + 1, Dk + Dv] fp32 whose first row holds the means
        before; where: rows and page.
    """
    slope = moments.slope
    batch, (_, heads, slots, _) = len(listed), held[0].shape
    dk, dv = new_keys.shape[-1], new_values.shape[-1]
    splits = means.shape[2] - 1
    has_cross = moments.cross is not None
    cross = moments.cross if has_cross else means
    part = torch.empty(batch * heads * splits * dk * dv if has_cross and splits > 1 else 0, device=listed.device)
    state = (moments.count, moments.key_mean, moments.value_mean, cross, cross if slope is None else slope)
    rows, columns, warps = MERGE[pow2(dk, 64)]
    shape = {"HEADS": heads, "DK": dk, "DV": dv, "BK": pow2(dk, 16), "ROWS": rows, "COLUMNS": columns}
    shape |= {"HAS_CROSS": has_cross, "HAS_SLOPE": slope is not None}
    strides = (*new_keys.stride()[:3], *new_values.stride()[:3])
    _moments_kernel[(batch * heads, triton.cdiv(dv, columns), splits)](
        *held, new_keys, new_values, listed, tally, means, part, *state, *where,
        listed.shape[-1], slots, used, splits, *strides, SINGLE=splits == 1, num_warps=warps,
        num_stages=2, **shape,
    )  # fmt: skip
    if splits > 1:
        grid = (batch * heads, triton.cdiv(dv, columns))
        _merge_kernel[grid](tally, means, part, *state, *where, splits, num_warps=warps, **shape)


def compact(
    valid: Tensor, selection: Selection, block: tuple[Tensor, Tensor, Tensor] | None, state: LayerState, spec: Spec
) -> None:
    """Three launches (four from 4096 candidates), no host sync; shapes as in `reference.compact`.

    k, v and positions of the block have any strides, with unit stride along D. `moments.slope`, if there is one, is
    set to cross / count.
    """
    op, slots, moments, kept = "compact", state.exact, state.moments, selection.kept
    keys, values, positions, lengths = slots.keys, slots.values, slots.positions, slots.lengths
    assert values is not None and positions is not None
    batch, (_, heads, capacity, _), num = state.batch, keys.shape, valid.shape[-1]
    dk, dv = slots.format.keys.dim(keys.shape[-1]), slots.value_dim
    nothing = (
        keys.new_empty(batch, heads, 0, dk, dtype=slots.dtype),
        values.new_empty(batch, heads, 0, dv, dtype=slots.dtype),
        positions.new_empty(batch, heads, 0),
    )
    k, v, new_positions = nothing if block is None else block
    used = num - k.shape[2]
    held = (keys, values, slots.key_scales, slots.value_scales)
    check_scales(op, slots)
    check_shape(op, "kept", kept, (batch, heads, num))
    check_shape(op, "k", k, (batch, heads, None, dk))
    check_shape(op, "v", v, (batch, heads, k.shape[2], dv))
    check_head_dim(op, max(dk, dv))
    check_contiguous(op, valid=valid, kept=kept)
    page = check_rows(
        op, state, keys=keys, values=values, key_scales=held[2], value_scales=held[3], bias=slots.bias,
        positions=positions,
        lengths=lengths, count=moments.count, key_mean=moments.key_mean, value_mean=moments.value_mean,
        cross=moments.cross, slope=moments.slope,
    )  # fmt: skip
    assert 0 <= used <= capacity and k.stride(-1) == v.stride(-1) == 1
    if not num or not batch:
        lengths.zero_() if state.rows is None else lengths.index_fill_(0, state.rows, 0)
        return
    device, has_means, where = keys.device, moments.key_mean is not None, (state.rows, page)
    splits = row_splits(num)
    lists = torch.empty(3, batch, heads, num, dtype=torch.int32, device=device)
    tally = torch.empty(batch, heads, 3, dtype=torch.int64, device=device)
    means = torch.empty(batch, heads, splits + 1, dk + dv, dtype=torch.float32, device=device)
    shape = {"DK": dk, "DV": dv, "BK": pow2(dk, 16), "BV": pow2(dv, 16)}
    key_mean, value_mean = (moments.key_mean, moments.value_mean) if has_means else (means, means)
    _plan_kernel[(batch * heads,)](
        kept.view(torch.uint8), valid.view(torch.uint8), lengths, moments.count, key_mean, value_mean, lists, tally,
        means, *where, num, used, splits, HEADS=heads, **shape, HAS_MEANS=has_means, BLOCK=PLAN,
    )  # fmt: skip
    if has_means:
        _merge(held, k, v, lists[0], tally, means, used, moments, where)
    strides = (*k.stride()[:3], *v.stride()[:3], *new_positions.stride())
    rows, warps = move_tile(pow2(max(dk, dv), 64), slots.format.values.bits == 4)
    movers = min(triton.cdiv(min(num, capacity), rows), MAX_MOVERS)
    _move_kernel[(batch * heads, movers)](
        *held, slots.bias, positions, k, v, new_positions, lists, tally, *where, num, capacity, used, *strides,
        HEADS=heads, **shape, ROWS=rows, num_warps=warps,
    )  # fmt: skip
