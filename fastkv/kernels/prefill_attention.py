"""Attention of a block of T queries over the retained slots, the evicted tokens and, causally, the block itself.

Flash attention over two sources of keys: the slots (all older than the block: a length, no causal mask) and the block
(causal, padding excluded). What is remembered of the evicted tokens seeds the online softmax of every row, so nothing
is mixed afterwards: the moments are one more partial, (m, l, acc) = (log Z_E, 1, f_E) (MomentKV, arXiv:2606.01563,
Eqs. 9-12), centroids are slots with a bias. Learned sinks are one more partial, (sink, 1, 0), and come last. Rows of a
program are the queries of one KV head, (token, head of the group) in that order: keys are read once per group. Where
flash-attn is installed, what it makes of the block alone is one more partial, (log-sum-exp, 1, out), see `_flash`.

Bytes: keys, values (2 D a pair and their scales in 8 bits) and what is remembered once per BLOCK_M rows; q twice, out
once.
Does not handle: sliding windows inside the slots; slots that are not the leading part of a contiguous cache; float32
with head_dim above 256. Slots in 4 bits are decoded beforehand, into a copy of one layer, where `tile_of` has no tile:
with rotated queries, codes and numbers in registers none of 16 to 128 rows does without spills. Where the batch lives
in chosen rows of pages, or heads own unequal stretches of a slab, slots are read where they lie, except by what needs
such a copy, and where both is so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_groups, check_shape
from ..reference import LayerState, Moments, Spec
from ._arguments import PAIRS, Attended, EvictedPointers, ResultPointers, Scaling, StatePointers, View
from ._attention import (
    LN2,
    LOG2E,
    _add_sink,
    _bias2,
    _dot,
    _empty,
    _home,
    _logits2,
    _normalise,
    _page,
    _softmax_update,
    _stretch,
    _sum_products,
    _turned_query,
    _turned_rest,
)
from ._codes import _codes_of, _factors, _numbers, _packed, _rotated_rows, _scales_of, _turned
from ._evicted import CENTROIDS, Terms, _dot_terms, _seed
from ._flash import _add_attended, attend_itself, serves
from ._launch import (
    addressed,
    cdiv,
    check_contiguous,
    check_head_dim,
    check_like,
    check_rows,
    check_scales,
    chip_of,
    pow2,
    stages,
)


@dataclass(frozen=True)
class Tile:
    """What a program works on: so many rows, so many keys at a time.

    Attributes:
        slice: coordinates of q and keys at a time, where registers hold no more; 0 for all.
        seed: coordinates at a time while the evicted tokens are mixed in.  centroids: at a time at most.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    slice: int = 0
    seed: int = 32
    centroids: int = 32


# By padded head_dim. No warp computes a part of q k^T that another one does (perf.aot).
SMALL = dict.fromkeys((16, 32, 64), Tile(64, 64, 4, 3))
WIDE = {512: Tile(32, 64, 8, 2, 64, 16, centroids=16)}
HALF = {  # by chip, see `chip_of`; others have less shared memory than these, or none
    "90": SMALL | WIDE | {128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2, 128, 16)},
    "100": SMALL | WIDE | {128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2, seed=16)},
    "hip": dict.fromkeys((16, 32, 64, 128), Tile(128, 64, 4, 2)) | {256: Tile(128, 32, 4, 2, seed=16)},
    "": dict.fromkeys((16, 32, 64), Tile(64, 64, 4, 2, seed=16))  # with more, triton 3.9 spills
    | WIDE
    | {128: Tile(128, 32, 8, 3, seed=16), 256: Tile(64, 64, 8, 2, 128, 16)},
}
# What centroids need instead: with them the tile above spills, and for sm_100 64 rows are compiled to nothing.
HALF_CENTROIDS = {
    "100": {256: Tile(32, 64, 8, 2, seed=16)},
}  # fmt: skip
HALF_ATTENDED = {  # centroids beside flash-attn
    "90": {256: Tile(64, 64, 8, 2, 128, 16)}, "": {128: Tile(64, 64, 8, 2, seed=16)},
}  # fmt: skip
SINGLE = {  # float32, whose products take three terms of each operand
    "hip": dict.fromkeys((16, 32, 64, 128), Tile(128, 32, 4, 1, 32)) | {256: Tile(128, 16, 4, 1, 32, 16)},
    "": dict.fromkeys((16, 32, 64), Tile(32, 64, 8, 2, 16))
    | {128: Tile(16, 64, 8, 2, 16), 256: Tile(16, 32, 4, 1, 16, 16)},
}
# And what slots in 8 bits need, whose codes and numbers are in registers at once.
HALF_CODES = {
    "90": {256: Tile(128, 32, 8, 2, 128, 32)},
    # In one stage: triton before 3.9 cannot pipeline a product of tcgen05 with what PTX has converted.
    "100": dict.fromkeys((16, 32, 64), Tile(64, 64, 4, 1))
    | {128: Tile(128, 64, 8, 1, seed=16), 256: Tile(64, 32, 8, 1, seed=16), 512: replace(WIDE[512], stages=1)},
    "hip": {256: Tile(128, 32, 4, 1, seed=16)},
}
HALF_CODES_CAPPED = {"": {128: Tile(64, 64, 8, 2, seed=16)}}  # and a softcap, with which triton 3.6 spills
# Slots in 4 bits: rotated queries are in registers whole, beside numbers that were codes. Of heads that are not here,
# and of those of more than 64 numbers with a softcap, no tile does without spills.
SMALL_PACKED = dict.fromkeys((16, 32, 64), Tile(64, 64, 4, 2))
WIDE_PACKED = SMALL_PACKED | {128: Tile(128, 32, 8, 2, seed=16, centroids=16)}
HALF_PACKED = {
    "90": WIDE_PACKED, "100": {width: replace(tile, stages=1) for width, tile in WIDE_PACKED.items()},
    "hip": dict.fromkeys((16, 32, 64, 128), Tile(128, 32, 4, 2, seed=16)),
    "": SMALL_PACKED,
}  # fmt: skip
SINGLE_PACKED = {"": dict.fromkeys((16, 32, 64), Tile(32, 32, 8, 1, seed=16))}
# Slots with a bias, with which triton 3.6 spills, and evicted tokens whose slope is found in the kernel (3.9).
HALF_BIASED = {"": dict.fromkeys((16, 32, 64), Tile(64, 32, 4, 3)) | {128: Tile(128, 32, 8, 2)}}
HALF_CROSS = {"": {128: Tile(128, 32, 8, 2, seed=16)}}
HALF_RAGGED = {"100": {128: Tile(128, 32, 8, 1, seed=16)}}  # of 8 bits, where heads own unequal stretches, likewise
HALF_ROWS = {"90": {256: Tile(64, 64, 8, 2, 128, 16)}}  # where each program looks up its page, which takes registers
CAP_TILE_HIP = 32  # keys per tile under a softcap on AMD, whose registers hold no more


@triton.jit
def _tile(base_ptr, first, inside, stride, begin, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Columns [begin, begin + BD) of ROWS rows of [N, D] from `first` on; 0 where not inside and beyond D. begin: a
    multiple of BD. Tile offsets fit int32.
    """
    column = begin + tl.arange(0, BD)[None, :]
    base_ptr += tl.full([], 1, tl.int64) * first * stride
    spot = base_ptr + tl.arange(0, ROWS)[:, None] * stride + column
    mask = inside[:, None]
    if D % BD != 0:
        mask = mask & (column < D)
    return tl.load(spot, mask=mask, other=0.0)


@triton.jit
def _queries(q_ptrs, rows, begin, D: tl.constexpr, BD: tl.constexpr):
    """Columns [begin, begin + BD) of queries, of rows in any places; as in `_tile`."""
    column = begin + tl.arange(0, BD)[None, :]
    mask = rows[:, None]
    if D % BD != 0:
        mask = mask & (column < D)
    return tl.load(q_ptrs[:, None] + column, mask=mask, other=0.0)


@triton.jit
def _products(q, q_ptrs, rows, keys_ptr, first, inside, stride, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """q k^T of BLOCK_N keys from `first` on, SLICE coordinates at a time; all at once if they are BD."""
    D: tl.constexpr = TILE.D
    SLICE: tl.constexpr = TILE.SLICE
    products = tl.zeros([q_ptrs.shape[0], BLOCK_N], tl.float32)
    if SLICE == TILE.BD:
        k = _tile(keys_ptr, first, inside, stride, 0, D, SLICE, BLOCK_N)
        return _dot_terms(products, q, tl.trans(_numbers(k, q.dtype)), 3)
    else:
        for begin in range(0, D, SLICE):
            a = _queries(q_ptrs, rows, begin, D, SLICE)
            k = _tile(keys_ptr, first, inside, stride, begin, D, SLICE, BLOCK_N)
            products = _dot_terms(products, a, tl.trans(_numbers(k, a.dtype)), 3)
        return products


@triton.jit
def _squares(q, q_ptrs, rows, TILE: tl.constexpr):
    """|q|^2 [M] of queries, as `_products` has them."""
    if TILE.SLICE == TILE.BD:
        return _sum_products(q.to(tl.float32), q.to(tl.float32))
    else:
        squares = tl.zeros([q_ptrs.shape[0]], tl.float32)
        for begin in range(0, TILE.D, TILE.SLICE):
            a = _queries(q_ptrs, rows, begin, TILE.D, TILE.SLICE).to(tl.float32)
            squares += _sum_products(a, a)
        return squares


@triton.jit
def _add_centroids(top, total, acc, q, q_ptrs, rows, evicted, head, num, scaling, TILE: tl.constexpr):
    """Add the `num` centroids of a head to partials: slots with a bias and a factor of their weights.

    Together these are n_c cosh(d), d = |scale| |q| sqrt(spread_c / n_c), see `_evicted`: of n_c = m 2^e, 1 <= m < 2,
    the bias is e - 1 + log2(exp(d)), the factor m (1 + exp(-2 d)). So there is no logarithm, and no large factor.
    """
    BLOCK_C: tl.constexpr = TILE.BLOCK_C
    first = head * num
    keys_ptr, values_ptr = evicted.key_mean_ptr + first * TILE.D, evicted.value_mean_ptr + first * TILE.DV
    reach = tl.abs(scaling.scale) * tl.sqrt(_squares(q, q_ptrs, rows, TILE)) * LOG2E
    for start in range(0, num, BLOCK_C):
        index = start + tl.arange(0, BLOCK_C)
        inside = index < num
        size = tl.load(evicted.sizes_ptr + first + index, mask=inside, other=0.0)
        used = tl.where(size > 0, size, 1.0)
        sigma = tl.sqrt(tl.load(evicted.spread_ptr + first + index, mask=inside, other=0.0) / used)
        products = _products(q, q_ptrs, rows, keys_ptr, start, inside, TILE.D, BLOCK_C, TILE)
        deviation = reach[:, None] * sigma[None, :]
        logits = _logits2(products, scaling)
        if scaling.softcap is not None:
            bent = logits * (LN2 / scaling.softcap)
            deviation *= 1 - bent * bent
        bits = used.to(tl.int32, bitcast=True)
        bias = tl.where(size > 0, ((bits >> 23) - 128).to(tl.float32), -float("inf"))
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)[None, :]
        top, total, acc, weights = _softmax_update(top, total, acc, logits + deviation + bias[None, :])
        more = tl.fma(weights, tl.fma(mantissa, tl.exp2(-2 * deviation), mantissa - 1), 0.0)  # see `_sum_products`
        total += tl.sum(more, 1)
        v = _tile(values_ptr, start, inside, TILE.DV, 0, TILE.DV, TILE.BV, BLOCK_C)
        acc = _dot_terms(acc, (weights + more).to(q_ptrs.dtype.element_ty), v, 2)
    return top, total, acc


@triton.jit
def _add_slots(
    top, total, acc, q, rest, q_ptrs, rows, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, bias_ptr, start,
    first, length, scaling, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add slots [first, first + BLOCK_N) of a head to partials; with MASKED, those of them below `length`.

    q, rest: `_turned_query`, `_turned_rest`; with values of 4 bits acc is rotated, too.  start: of the head's biases.
    """
    D: tl.constexpr = TILE.D
    DV: tl.constexpr = TILE.DV
    dtype: tl.constexpr = q_ptrs.dtype.element_ty
    index = first + tl.arange(0, TILE.BLOCK_N)
    inside = tl.full([TILE.BLOCK_N], True, tl.int1)  # which the compiler sees
    if MASKED:
        inside = index < length
    if _packed(key_scales_ptr):
        k = _rotated_rows(keys_ptr, key_scales_ptr, index, inside, 0, D, TILE.BD).to(dtype)
        products = _dot(q, tl.trans(k))
        if rest is not None:
            products += _dot(rest, tl.trans(k))
    else:
        products = _products(q, q_ptrs, rows, keys_ptr, first, inside, D, TILE.BLOCK_N, TILE)
        if key_scales_ptr is not None:
            products *= _factors(key_scales_ptr, index, inside)[None, :]
    logits = _logits2(products, scaling)
    if bias_ptr is not None:
        logits += _bias2(bias_ptr + start, index, inside)[None, :]
    logits = tl.where(inside[None, :], logits, -float("inf"))
    top, total, acc, weights = _softmax_update(top, total, acc, logits)
    if _packed(value_scales_ptr):
        v = _rotated_rows(values_ptr, value_scales_ptr, index, inside, 0, DV, TILE.BV).to(dtype)
    else:
        v = _numbers(_tile(values_ptr, first, inside, DV, 0, DV, TILE.BV, TILE.BLOCK_N), dtype)
        if value_scales_ptr is not None:
            weights *= _factors(value_scales_ptr, index, inside)[None, :]
    return top, total, acc + _dot(weights.to(v.dtype), v)


@triton.jit
def _add_tokens(
    top, total, acc, q, q_ptrs, rows, token, keys_ptr, values_ptr, key_stride, value_stride, valid_ptr, first, T,
    scaling, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add tokens [first, first + BLOCK_N) of the block to partials of queries that are all later; with MASKED, those of
    them that are no padding to queries that are not earlier.
    """
    index = first + tl.arange(0, TILE.BLOCK_N)
    usable = tl.full([TILE.BLOCK_N], True, tl.int1)
    if MASKED:
        usable = tl.load(valid_ptr + index, mask=index < T, other=0) != 0
    logits = _logits2(_products(q, q_ptrs, rows, keys_ptr, first, usable, key_stride, TILE.BLOCK_N, TILE), scaling)
    if MASKED:
        logits = tl.where(usable[None, :] & (index[None, :] <= token[:, None]), logits, -float("inf"))
    top, total, acc, weights = _softmax_update(top, total, acc, logits)
    v = _tile(values_ptr, first, usable, value_stride, 0, TILE.DV, TILE.BV, TILE.BLOCK_N)
    return top, total, acc + _dot(weights.to(v.dtype), v)


@triton.jit
def _paddings(valid_ptr, stop, CHUNK: tl.constexpr):
    """How many of the first `stop` tokens of a row are padding."""
    count = 0
    for first in range(0, stop, CHUNK):
        index = first + tl.arange(0, CHUNK)
        count += tl.sum((tl.load(valid_ptr + index, mask=index < stop, other=1) == 0).to(tl.int32))
    return count


@triton.jit
def _lse(top, total):
    """Natural log-sum-exp [BLOCK_M] of a partial; -inf for an empty one."""
    return (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN2


class PrefillTile(NamedTuple):
    """Constants of a launch: sizes of heads, padded ones BD and BV, and what a program works on at a time, see `Tile`;
    HAS_SLOPE: the matrix of the moments is S / n, not S; UNIT: a launch is given so many times as many slots, see
    `decode_attention.DecodeTile`.
    """

    HEADS: int
    G: int
    D: int
    DV: int
    BD: int
    BV: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_C: int
    SEED: int
    SLICE: int
    HAS_SLOPE: bool
    UNIT: int


class Held(NamedTuple):
    """Slots of a head, or of the slab of unequal ones, and its centroids: UNIT times as many."""

    slots: Any
    centroids: Any


@triton.jit(do_not_specialize=["page", "T"])
def _prefill_kernel(
    q: View, new_keys: View, new_values: View, new_valid_ptr, attended: Attended, state: StatePointers,
    evicted: EvictedPointers, sink_ptr, results: ResultPointers, scaling: Scaling, rows_ptr, page, T, held: Held,
    TILE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    D: tl.constexpr = TILE.D
    DV: tl.constexpr = TILE.DV
    BD: tl.constexpr = TILE.BD
    BV: tl.constexpr = TILE.BV
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    pair = tl.program_id(1).to(tl.int64)
    batch, kv = pair // HEADS, pair % HEADS
    home, head = _home(rows_ptr, page, pair, HEADS)
    if rows_ptr is not None:
        if home == 0:  # nobody's: what is in the results means nothing
            return
    state = StatePointers(*[p if p is None else _page(p, home, page) for p in state])
    evicted = EvictedPointers(*[p if p is None else _page(p, home, page) for p in evicted])
    key_scales_ptr, value_scales_ptr = state.key_scales_ptr, state.value_scales_ptr
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those that attend to most of the block come first
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < T * G
    token = row // G
    q_head = kv * G + row % G
    q_ptrs = q.ptr + batch * q.stride_b + q_head * q.stride_h + token.to(tl.int64) * q.stride_t
    queries = q_ptrs
    if TILE.SLICE == BD:
        queries = _queries(q_ptrs, rows, 0, D, BD)
    top, total, acc = _empty(BLOCK_M, BV)
    if evicted.sizes_ptr is not None:
        top, total, acc = _add_centroids(
            top, total, acc, queries, q_ptrs, rows, evicted, head, held.centroids // TILE.UNIT, scaling, TILE
        )
    elif evicted.key_mean_ptr is not None:
        top, total, acc = _seed(q_ptrs, rows, evicted, head, scaling, TILE)
    place = (batch * HEADS * G + q_head) * T + token
    tl.store(results.lse_evicted_ptr + place, _lse(top, total), mask=rows)
    if attended.runs_ptr is not None:
        before, run_ptr = (batch * T).to(tl.int32), attended.runs_ptr + 3 * batch
        begin, end = tl.load(run_ptr + 1), tl.load(run_ptr + 2)
        begin, end = begin - before, end - before  # the tokens that it holds for
        theirs, all_rows = rows & (token >= begin) & (token < end), tl.num_programs(1) // HEADS
        top, total, acc = _add_attended(
            top, total, acc, attended, batch, token, q_head, theirs, T, all_rows, HEADS * G, DV
        )

    length = tl.load(state.lengths_ptr + head).to(tl.int32)
    whole = length // BLOCK_N * BLOCK_N
    base, _ = _stretch(state.starts_ptr, head, held.slots // TILE.UNIT, HEADS)
    keys = _codes_of(state.keys_ptr, key_scales_ptr, base, D)
    values = _codes_of(state.values_ptr, value_scales_ptr, base, DV)
    key_scales = _scales_of(key_scales_ptr, base, D)
    value_scales = _scales_of(value_scales_ptr, base, DV)
    turned = _turned_query(queries, key_scales_ptr, D)
    rest = _turned_rest(queries, key_scales_ptr, D)
    if _packed(value_scales_ptr):
        acc = _turned(acc, DV)
    for first in range(0, whole, BLOCK_N):
        top, total, acc = _add_slots(
            top, total, acc, turned, rest, q_ptrs, rows, keys, values, key_scales, value_scales, state.bias_ptr,
            base, first, length, scaling, False, TILE,
        )  # fmt: skip
    for first in tl.range(whole, length, BLOCK_N, num_stages=1):
        top, total, acc = _add_slots(
            top, total, acc, turned, rest, q_ptrs, rows, keys, values, key_scales, value_scales, state.bias_ptr,
            base, first, length, scaling, True, TILE,
        )  # fmt: skip
    if _packed(value_scales_ptr):
        acc = _turned(acc, DV)

    keys = new_keys.ptr + batch * new_keys.stride_b + kv * new_keys.stride_h
    values = new_values.ptr + batch * new_values.stride_b + kv * new_values.stride_h
    valid_ptr = new_valid_ptr + batch * T
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G + 1, T)
    if attended.runs_ptr is not None:
        last = tl.where(begin < end, 0, last)
    whole = tl.minimum(tile * BLOCK_M // G + 1, last) // BLOCK_N * BLOCK_N  # tokens that all of these queries may see
    whole = tl.where(_paddings(valid_ptr, whole, 1024) > 0, 0, whole)
    for first in range(0, whole, BLOCK_N):
        top, total, acc = _add_tokens(
            top, total, acc, queries, q_ptrs, rows, token, keys, values, new_keys.stride_t, new_values.stride_t,
            valid_ptr, first, T, scaling, False, TILE,
        )  # fmt: skip
    for first in range(whole, last, BLOCK_N):
        top, total, acc = _add_tokens(
            top, total, acc, queries, q_ptrs, rows, token, keys, values, new_keys.stride_t, new_values.stride_t,
            valid_ptr, first, T, scaling, True, TILE,
        )  # fmt: skip

    if sink_ptr is not None:
        top, total, decay = _add_sink(top, total, tl.load(sink_ptr + q_head))
        acc *= decay[:, None]
    tl.store(results.lse_retained_ptr + place, _lse(top, total), mask=rows)
    wide = tl.arange(0, BV)[None, :]
    spot = results.out_ptr + place[:, None] * DV + wide
    tl.store(spot, _normalise(total, acc).to(results.out_ptr.dtype.element_ty), mask=rows[:, None] & (wide < DV))


def tile_of(
    width: int, dtype: torch.dtype, chip: str, bits: int = 0, turned: bool = False, *, capped: bool = False,
    order: int | None = None, biased: bool = False, cross: bool = False, rows: bool = False, ragged: bool = False,
    attended: bool = False,
) -> Tile | None:  # fmt: skip
    """What a tile is chosen by; None for 4-bit slots that are decoded before the launch.

    Args: width: padded head_dim.  dtype: of q.  chip: see `chip_of`.  bits: of a number in a slot where it is a code,
        else 0.  turned: whether keys are codes of 4 bits, so that queries are rotated.  capped: whether logits are.
        order: of `Terms`.  biased: whether slots have a bias.  cross: whether the slope of the evicted tokens is still
        to be found from their cross moments.  rows: whether the batch lives in chosen rows of the state.  ragged:
        whether heads own unequal stretches of a slab.  attended: whether flash-attn attends to the block itself.
    """
    single = dtype == torch.float32
    if bits == 4:
        packed = SINGLE_PACKED if single else HALF_PACKED
        spills = capped or (turned and chip == "90")  # with two terms of rotated queries in registers
        return None if spills and width > 64 else packed.get(chip, packed[""]).get(width)
    tiles = SINGLE if single else HALF
    known = chip if chip in tiles else ""
    sizes = tiles[known]
    special = [
        (bits, HALF_CODES),
        (bits and capped, HALF_CODES_CAPPED),
        (order == CENTROIDS, HALF_CENTROIDS),
        (biased, HALF_BIASED),
        (cross, HALF_CROSS),
        (rows, HALF_ROWS),
        (bits and ragged, HALF_RAGGED),
        (order == CENTROIDS and attended, HALF_ATTENDED),
    ]
    for asked, other in [] if single else special:
        sizes = sizes | (other.get(known, {}) if asked else {})
    tile = sizes[width]
    return replace(tile, keys=CAP_TILE_HIP) if capped and chip == "hip" else tile


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, no host sync; arguments and results as in `reference.prefill_attention`, both lse in fp32.

    q, k, v have any strides, with unit stride along D. Of row 0 results may be anything. With flash-attn there are
    three launches, and queries of padding attend to slots and evicted tokens alone.
    """
    op = "prefill_attention"
    exact, softcap = state.exact, spec.softcap
    batch, num_heads, num, dim = q.shape
    evicted, value_dim = spec.evicted(state), v.shape[-1]
    check_head_dim(op, max(dim, value_dim), q.dtype)
    width, value_width = pow2(dim, 16), pow2(value_dim, 16)
    known = Terms.of(op, evicted, dim)
    cross = known.order == 1 and isinstance(evicted, Moments) and evicted.slope is None
    widest = max(width, value_width)
    choose = functools.partial(
        tile_of, widest, q.dtype, chip_of(q.device), capped=softcap is not None, order=known.order,
        biased=exact.bias is not None, cross=cross, rows=state.rows is not None, ragged=exact.starts is not None,
        attended=serves(q, v, spec),
    )  # fmt: skip
    tile = choose(exact.format.values.bits, exact.format.keys.bits == 4)
    divides = cross and value_width >= 256 and q.element_size() == 2
    spills = widest >= 256 and q.dtype == torch.float32  # where each program looks up its page
    if state.rows is not None and (tile is None or divides or spills or exact.starts is not None):  # copies them alone
        with state.gathered(changes=False) as own:
            return prefill_attention(q, k, v, valid, own, spec)
    keys, values, *scales = (getattr(exact, name) for name in PAIRS)
    starts, bias, lengths = exact.starts, exact.bias, exact.lengths
    check_scales(op, exact)
    _, heads, num_slots, _ = addressed(op, keys, starts).shape
    groups, stored = check_groups(op, num_heads, heads), batch if state.rows is None else len(keys)
    check_shape(op, "keys", addressed(op, keys, starts), (stored, heads, num_slots, exact.format.keys.width(dim)))
    shape = stored, heads, num_slots, exact.format.values.width(value_dim)
    check_shape(op, "values", addressed(op, values, starts), shape)
    check_shape(op, "k", k, (batch, heads, num, dim))
    check_shape(op, "v", v, (batch, heads, num, value_dim))
    check_shape(op, "valid", valid, (batch, num))
    page, pointers = None, known.pointers
    if state.rows is None:
        check_contiguous(op, keys=keys, values=values, bias=bias, lengths=lengths, matrix=pointers.matrix_ptr)
    else:
        page = check_rows(op, state, StatePointers.of(exact, *PAIRS, "bias", "lengths"), pointers)
    check_contiguous(op, valid=valid)
    check_like(op, (num_heads,), sink_logits=state.sink_logits)
    if tile is None:  # decoded, and heads made equal
        keys, values = (exact[name].to(q.dtype) for name in PAIRS[:2])
        bias = None if bias is None else exact["bias"].contiguous()
        starts, scales, tile = None, [None, None], choose()
        assert tile is not None
    slots = keys.shape[-2]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out = torch.empty(batch, num_heads, num, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, num, dtype=torch.float32, device=q.device)
    lse_evicted = torch.empty_like(lse)
    has_slope = divides or (isinstance(evicted, Moments) and evicted.slope is not None)
    if divides:  # two matrices do not fit
        slope = pointers.matrix_ptr / pointers.count_ptr.clamp(min=1)[..., None, None]
        pointers = pointers._replace(matrix_ptr=slope.to(q.dtype))
    centroids = min(tile.keys, tile.centroids)  # at a time: their logits take more registers
    sizes = PrefillTile(
        heads, groups, dim, value_dim, width, value_width, tile.rows, tile.keys, centroids, min(tile.seed, width),
        min(tile.slice or width, width), has_slope, 1 if starts is None else 16,
    )  # fmt: skip
    held = Held(slots * sizes.UNIT, None if known.num is None else known.num * sizes.UNIT)
    _prefill_kernel[(cdiv(num * groups, tile.rows), batch * heads)](
        View.of(q), View.of(k), View.of(v), valid.view(torch.uint8), attend_itself(q, k, v, valid, spec),
        StatePointers(keys, values, scales[0], scales[1], bias, lengths_ptr=lengths, starts_ptr=starts), pointers,
        state.sink_logits, ResultPointers(out, lse, lse_evicted), Scaling(spec.scale, softcap), state.rows, page, num,
        held, TILE=sizes, num_warps=tile.warps, num_stages=stages(tile.stages),
    )  # fmt: skip
    return out, lse, lse_evicted
