"""Merge listed rows of the slots and of a new block into the moments: the arithmetic of `compact`, in fp32.

With a the state before and b the listed rows (MomentKV, arXiv:2606.01563; Chan et al. 1979):
mean = mean_a + (n_b / n) d, S = S_a + S_b + (n_a n_b / n) d_k d_v^T with d = mean_b - mean_a, and S_b from centred rows
in a second pass, so that nothing cancels; the spread likewise, by the programs of the first slice. The bf16 shadow of
S / n is refreshed on the way.

One launch of programs (head, slice of the value columns) where the list is short; else the rows are cut in splits,
which a second launch merges in a fixed order. Bytes per head: the listed rows (keys twice per slice, from L2) and 8 d^2
of state.
Does not handle: a state without means, whose count `compact` keeps itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import Moments
from ._attention import _dot32
from ._launch import INTERPRET, Variant, pow2
from ._slots import _store_spread

ROWS = 32  # per tile
COLUMNS = 32  # value columns per program
ROWS_PER_SPLIT = 2048
MAX_SPLITS = 16
WARPS = {64: 4, 128: 4, 256: 8}  # by padded head_dim


@triton.jit
def _rows(slots_ptr, new_ptr, index, inside, used, column, stride_t, D: tl.constexpr):
    """Rows `index` of the candidates, fp32: of the slots below `used`, else of the block; 0 where not inside."""
    width = column[None, :] < D
    old = (inside & (index < used))[:, None] & width
    fresh = (inside & (index >= used))[:, None] & width
    far = index.to(tl.int64)[:, None]
    a = tl.load(slots_ptr + far * D + column[None, :], mask=old, other=0.0)
    b = tl.load(new_ptr + (far - used) * stride_t + column[None, :], mask=fresh, other=0.0)
    return tl.where(old, a.to(tl.float32), b.to(tl.float32))


@triton.jit
def _range(gone, split, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """First and last + 1 of the listed rows of a split."""
    each = tl.cdiv(tl.cdiv(gone, SPLITS), ROWS) * ROWS
    low = tl.minimum(split * each, gone)
    return low, tl.minimum(low + each, gone)


@triton.jit
def _between(count, more):
    """n_a n_b / n, the weight of the distance between the means of two sets; counts are fp32."""
    return count * (more / tl.maximum(count + more, 1.0))


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


@triton.jit
def _moments_kernel(
    keys_ptr, values_ptr, new_keys_ptr, new_values_ptr, listed_ptr, tally_ptr, means_ptr, part_cross_ptr,
    part_spread_ptr, count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, spread_ptr,
    N, slots, used, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_SLOPE: tl.constexpr,
    SPREAD: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    lane, dk = tl.arange(0, ROWS), tl.arange(0, BK)
    dv = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keys = keys_ptr + head * slots * DK
    values = values_ptr + head * slots * DV
    new_keys = new_keys_ptr + (head // HEADS) * stride_kb + (head % HEADS) * stride_kh
    new_values = new_values_ptr + (head // HEADS) * stride_vb + (head % HEADS) * stride_vh
    gone = tl.load(tally_ptr + head * 3).to(tl.int32)
    low, high = _range(gone, split, SPLITS, ROWS)
    key_mean = tl.zeros([BK], tl.float32)
    value_mean = tl.zeros([COLUMNS], tl.float32)
    for start in range(low, high, ROWS):
        inside = start + lane < high
        index = tl.load(listed_ptr + head * N + start + lane, mask=inside, other=0)
        key_mean += tl.sum(_rows(keys, new_keys, index, inside, used, dk, stride_kt, DK), 0)
        value_mean += tl.sum(_rows(values, new_values, index, inside, used, dv, stride_vt, DV), 0)
    inverse = 1.0 / tl.maximum(high - low, 1).to(tl.float32)
    key_mean, value_mean = key_mean * inverse, value_mean * inverse
    cross = tl.zeros([BK, COLUMNS], tl.float32)
    if HAS_CROSS:
        for start in range(low, high, ROWS):
            inside = start + lane < high
            index = tl.load(listed_ptr + head * N + start + lane, mask=inside, other=0)
            k = _rows(keys, new_keys, index, inside, used, dk, stride_kt, DK) - key_mean[None, :]
            v = _rows(values, new_values, index, inside, used, dv, stride_vt, DV) - value_mean[None, :]
            cross += _dot32(tl.trans(k), tl.where(inside[:, None], v, 0.0), INTERP)
    squares = tl.zeros([BK], tl.float32)
    if SPREAD:
        if tl.program_id(1) == 0:
            for start in range(low, high, ROWS):
                inside = start + lane < high
                index = tl.load(listed_ptr + head * N + start + lane, mask=inside, other=0)
                k = _rows(keys, new_keys, index, inside, used, dk, stride_kt, DK) - key_mean[None, :]
                squares += tl.sum(tl.where(inside[:, None], k * k, 0.0), 0)
    state = means_ptr + head * (SPLITS + 1) * (DK + DV)  # the state before, then one row per split
    spot = dk[:, None] * DV + dv[None, :]
    within = (dk[:, None] < DK) & (dv[None, :] < DV)
    if SPLITS == 1:
        before = tl.load(tally_ptr + head * 3 + 2)
        old_key = tl.load(state + dk, mask=dk < DK, other=0.0)
        old_value = tl.load(state + DK + dv, mask=dv < DV, other=0.0)
        old = tl.zeros([BK, COLUMNS], tl.float32)
        if HAS_CROSS:
            old = tl.load(cross_ptr + head * DK * DV + spot, mask=within, other=0.0)
        if SPREAD:
            if tl.program_id(1) == 0:
                squares += (
                    _between(before.to(tl.float32), gone.to(tl.float32)) * (key_mean - old_key) * (key_mean - old_key)
                )
                _store_spread(spread_ptr + head, squares, DK)
        _, key_mean, value_mean, cross = _chan(
            before.to(tl.float32), old_key, old_value, old, gone.to(tl.float32), key_mean, value_mean, cross
        )
        _store_state(
            count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, head, before + gone,
            key_mean, value_mean, cross, dk, dv, DK, DV, HAS_CROSS, HAS_SLOPE,
        )  # fmt: skip
    else:
        mean = state + (split + 1) * (DK + DV)
        if tl.program_id(1) == 0:
            tl.store(mean + dk, key_mean, mask=dk < DK)
            if SPREAD:
                tl.store(part_spread_ptr + (head * SPLITS + split) * DK + dk, squares, mask=dk < DK)
        tl.store(mean + DK + dv, value_mean, mask=dv < DV)
        if HAS_CROSS:
            tl.store(part_cross_ptr + (head * SPLITS + split) * DK * DV + spot, cross, mask=within)


@triton.jit
def _merge_kernel(
    tally_ptr, means_ptr, part_cross_ptr, part_spread_ptr, count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr,
    slope_ptr, spread_ptr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_SLOPE: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    dk = tl.arange(0, BK)
    dv = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    spot = dk[:, None] * DV + dv[None, :]
    within = (dk[:, None] < DK) & (dv[None, :] < DV)
    gone = tl.load(tally_ptr + head * 3).to(tl.int32)
    before = tl.load(tally_ptr + head * 3 + 2)
    mean = means_ptr + head * (SPLITS + 1) * (DK + DV)
    count = before.to(tl.float32)
    key_mean = tl.load(mean + dk, mask=dk < DK, other=0.0)
    value_mean = tl.load(mean + DK + dv, mask=dv < DV, other=0.0)
    cross = tl.zeros([BK, COLUMNS], tl.float32)
    if HAS_CROSS:
        cross = tl.load(cross_ptr + head * DK * DV + spot, mask=within, other=0.0)
    squares = tl.zeros([BK], tl.float32)
    for split in range(0, SPLITS):
        low, high = _range(gone, split, SPLITS, ROWS)
        mean += DK + DV
        new_key = tl.load(mean + dk, mask=dk < DK, other=0.0)
        new_value = tl.load(mean + DK + dv, mask=dv < DV, other=0.0)
        fresh = tl.zeros([BK, COLUMNS], tl.float32)
        if HAS_CROSS:
            fresh = tl.load(part_cross_ptr + (head * SPLITS + split) * DK * DV + spot, mask=within, other=0.0)
        if SPREAD:
            step = new_key - key_mean
            place = part_spread_ptr + (head * SPLITS + split) * DK + dk
            squares += tl.load(place, mask=dk < DK, other=0.0)
            squares += _between(count, (high - low).to(tl.float32)) * step * step
        count, key_mean, value_mean, cross = _chan(
            count, key_mean, value_mean, cross, (high - low).to(tl.float32), new_key, new_value, fresh
        )
    _store_state(
        count_ptr, key_mean_ptr, value_mean_ptr, cross_ptr, slope_ptr, head, before + gone,
        key_mean, value_mean, cross, dk, dv, DK, DV, HAS_CROSS, HAS_SLOPE,
    )  # fmt: skip
    if SPREAD:
        if tl.program_id(1) == 0:
            _store_spread(spread_ptr + head, squares, DK)


def num_splits(candidates: int) -> int:
    """Splits of the listed rows: a function of shapes alone."""
    return min(MAX_SPLITS, max(1, candidates // ROWS_PER_SPLIT))


def merge_rows(
    *,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    listed: Tensor,
    tally: Tensor,
    means: Tensor,
    used: int,
    moments: Moments,
    slope: Tensor | None,
) -> None:
    """Add the listed candidates to the moments, in place. Called by `compact`, which checks shapes and makes the lists.

    Args: listed [B, Hkv, N] int32, rows to merge; tally [B, Hkv, 3] int64: how many, (moves), count before; means
        [B, Hkv, splits + 1, Dk + Dv] fp32 whose first row holds the means before; slope [B, Hkv, Dk, Dv] bf16 or None.
    """
    batch, heads, slots, dk = keys.shape
    dv = values.shape[-1]
    splits = means.shape[2] - 1
    has_cross = moments.cross is not None
    cross = moments.cross if has_cross else means
    part = torch.empty(batch * heads * splits * dk * dv if has_cross and splits > 1 else 0, device=keys.device)
    spread = moments.spread
    part_spread = None if spread is None else torch.empty(batch * heads * splits * dk, device=keys.device)
    state = (moments.count, moments.key_mean, moments.value_mean, cross, cross if slope is None else slope, spread)
    shape = {"DK": dk, "DV": dv, "BK": pow2(dk, 16), "ROWS": ROWS, "COLUMNS": COLUMNS, "SPLITS": splits}
    shape |= {"HAS_CROSS": has_cross, "HAS_SLOPE": slope is not None, "SPREAD": spread is not None}
    warps = WARPS[pow2(dk, 64)]
    strides = (*new_keys.stride()[:3], *new_values.stride()[:3])
    _moments_kernel[(batch * heads, triton.cdiv(dv, COLUMNS), splits)](
        keys, values, new_keys, new_values, listed, tally, means, part, part_spread, *state, listed.shape[-1], slots,
        used, *strides, HEADS=heads, INTERP=INTERPRET, num_warps=warps, num_stages=2, **shape,
    )  # fmt: skip
    if splits > 1:
        grid = (batch * heads, triton.cdiv(dv, COLUMNS))
        _merge_kernel[grid](tally, means, part, part_spread, *state, num_warps=warps, **shape)


_TYPES = {
    **dict.fromkeys(("keys_ptr", "values_ptr", "new_keys_ptr", "new_values_ptr", "slope_ptr"), "*bf16"),
    **dict.fromkeys(("means_ptr", "part_cross_ptr", "part_spread_ptr", "spread_ptr"), "*fp32"),
    **dict.fromkeys(("key_mean_ptr", "value_mean_ptr", "cross_ptr"), "*fp32"),
    **dict.fromkeys(("tally_ptr", "count_ptr"), "*i64"),
    "listed_ptr": "*i32",
    **dict.fromkeys(("N", "slots", "used"), "i32"),
    **{f"stride_{tensor}{axis}": "i32" for tensor in "kv" for axis in "bht"},
}


def _variant(kernel, dim: int, splits: int, spread: bool = False) -> Variant:
    constants = {"HEADS": 8, "DK": dim, "DV": dim, "BK": pow2(dim), "ROWS": ROWS, "COLUMNS": COLUMNS}
    constants |= {"SPLITS": splits, "HAS_CROSS": True, "HAS_SLOPE": True, "SPREAD": spread, "INTERP": False}
    absent = () if spread else ("spread_ptr", "part_spread_ptr")
    return Variant(
        f"{kernel.__name__.strip('_')} D{dim} splits{splits}" + " spread1" * spread,
        kernel,
        {name: _TYPES[name] for name in kernel.arg_names if name in _TYPES and name not in absent},
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        div16=tuple(name for name in kernel.arg_names if name.startswith("stride")),
        num_warps=WARPS[pow2(dim, 64)],
        num_stages=2,
    )


AOT = [_variant(_moments_kernel, dim, 1) for dim in (64, 80, 128, 256)]
AOT += [_variant(_moments_kernel, 128, 4), _variant(_merge_kernel, 128, 4), _variant(_merge_kernel, 256, 4)]
AOT += [_variant(_moments_kernel, dim, splits, True) for dim, splits in ((128, 1), (128, 4), (256, 1))]
AOT += [_variant(_merge_kernel, 128, 4, True)]
