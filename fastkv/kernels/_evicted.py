"""The evicted set as a partial of a split softmax (see `_attention`): from its moments, or from centroids.

Moments are one part, (log2 Z_E, 1, f_E). Centroids are M slots in bf16 or fp32 whose logits have a bias.
Twins: `moment_estimate` and `centroid_estimate` of `fastkv.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..errors import FastKVError
from ..reference import Centroids, Evicted, Moments
from ._arguments import EvictedPointers
from ._attention import LN2, LOG2E, _dot, _dot32, _empty, _load_query, _rows_mask, _softmax_update, _sum_products, _tanh
from ._launch import check_centroids

CENTROIDS = 2  # in place of the order of the moments


@triton.jit
def _log_cosh(x):
    """log cosh(x) for x >= 0, without overflow."""
    return x + (tl.log2(1 + tl.exp(-2 * x)) - 1) * LN2


@triton.jit
def _moment_partial(q_ptr, evicted, pair, count, scaling, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """(log2 n + log2(e) scale q.k_mean, 1, v_mean + (scale / n) S^T q), or an empty partial. Rows: heads of a group."""
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    rows, cols = tl.arange(0, M), tl.arange(0, GROUP.BLOCK_D)
    top, total, acc = _empty(M, GROUP.BLOCK_D)
    if count > 0:
        products = tl.zeros([M], tl.float32)
        for first in range(0, D, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            mask = (rows < GROUP.G)[:, None] & (k < D)[None, :]
            q = tl.load(q_ptr + rows[:, None] * D + k[None, :], mask=mask, other=0.0)
            mean = tl.load(evicted.key_mean_ptr + pair * D + k, mask=k < D, other=0.0)
            products += _sum_products(q.to(tl.float32), mean[None, :])
            if evicted.matrix_ptr is not None:
                mask = _rows_mask(k < D, cols, D, GROUP.BLOCK_D)
                place = evicted.matrix_ptr + pair * D * D + k[:, None] * D + cols[None, :]
                tile = tl.load(place, mask=mask, other=0.0)
                if tile.dtype == tl.float32:
                    acc += _dot32(q.to(tl.float32), tile)
                else:
                    acc += _dot(q, tile.to(q.dtype))
        size = count.to(tl.float32)
        slope = tl.full([M], 1.0, tl.float32) * scaling.scale
        logit = products * scaling.scale
        if scaling.softcap is not None:
            bent = _tanh(logit / scaling.softcap)
            logit, slope = scaling.softcap * bent, slope * (1 - bent * bent)
        if evicted.matrix_ptr is not None:
            if evicted.matrix_ptr.dtype.element_ty == tl.float32:
                slope = slope / size
        top = logit * LOG2E + tl.log2(size)
        total = tl.full([M], 1.0, tl.float32)
        value_mean = tl.load(evicted.value_mean_ptr + pair * D + cols, mask=cols < D, other=0.0)
        acc = acc * slope[:, None] + value_mean[None, :]
    return top, total, acc


@triton.jit
def _seed(q_ptrs, rows, evicted, head, scaling, TILE: tl.constexpr):
    """`_moment_partial` of many rows, each with its own q: the start of the online softmax of a prompt block."""
    M: tl.constexpr = TILE.BLOCK_M
    D: tl.constexpr = TILE.D
    DV: tl.constexpr = TILE.DV
    top, total, acc = _empty(M, TILE.BV)
    count = tl.load(evicted.count_ptr + head).to(tl.float32)
    if count > 0:
        column = tl.arange(0, TILE.BV)
        middle = tl.zeros([M], tl.float32)
        for first in range(0, D, TILE.SEED):
            part = first + tl.arange(0, TILE.SEED)
            inside = part < D
            q = tl.load(q_ptrs[:, None] + part[None, :], mask=rows[:, None] & inside[None, :], other=0.0)
            k = tl.load(evicted.key_mean_ptr + head * D + part, mask=inside, other=0.0)
            middle += _sum_products(q.to(tl.float32), k[None, :])
            if evicted.matrix_ptr is not None:
                spot = evicted.matrix_ptr + (head * D + part[:, None]) * DV + column[None, :]
                slope = tl.load(spot, mask=inside[:, None] & (column[None, :] < DV), other=0.0)
                if not TILE.HAS_SLOPE:
                    slope = slope / count
                high = slope.to(q.dtype)
                acc += _dot(q, high)
                if not TILE.HAS_SLOPE and q.dtype != tl.float32:  # what a matrix of the dtype of q leaves of S / n
                    acc += _dot(q, (slope - high.to(tl.float32)).to(q.dtype))
        logit = middle * scaling.scale
        gain = tl.full([M], 1.0, tl.float32) * scaling.scale
        if scaling.softcap is not None:
            bent = _tanh(logit / scaling.softcap)
            logit = scaling.softcap * bent
            gain = gain * (1 - bent * bent)
        value_mean = tl.load(evicted.value_mean_ptr + head * DV + column, mask=column < DV, other=0.0)
        acc = acc * gain[:, None] + value_mean[None, :]
        top = logit * LOG2E + tl.log2(count)
        total = tl.full([M], 1.0, tl.float32)
    return top, total, acc


@triton.jit
def _centroid_logits(products, square, sizes_ptr, spread_ptr, index, inside, scaling):
    """Base-2 logits [M, C] of centroids `index` [C], -inf of unused ones.

    log n_c + scale q.k_c + log cosh(scale |q| sqrt(spread_c / n_c)), for products q.k_c [M, C] and square |q|^2 [M].
    """
    size = tl.load(sizes_ptr + index, mask=inside, other=0.0)
    used = tl.where(size > 0, size, 1.0)
    sigma = tl.sqrt(tl.load(spread_ptr + index, mask=inside, other=0.0) / used)
    logits = products * scaling.scale
    deviation = tl.abs(scaling.scale) * tl.sqrt(square)[:, None] * sigma[None, :]
    if scaling.softcap is not None:
        bent = _tanh(logits / scaling.softcap)
        logits, deviation = scaling.softcap * bent, deviation * (1 - bent * bent)
    logits = (logits + _log_cosh(deviation)) * LOG2E + tl.log2(used)[None, :]
    return tl.where((size > 0)[None, :], logits, -float("inf"))


@triton.jit
def _dot_terms(acc, a, b, TERMS: tl.constexpr):
    """acc + a @ b. Of b in fp32 so many terms in the dtype of a are taken: 2 of bf16 have 16 bits, 3 all of them."""
    if a.dtype == tl.float32:
        acc += _dot32(a, b.to(tl.float32))
    elif b.dtype != tl.float32:
        acc += _dot(a, b.to(a.dtype))
    else:
        for _ in tl.static_range(TERMS):
            term = b.to(a.dtype)
            acc += _dot(a, term)
            b -= term.to(tl.float32)
    return acc


@triton.jit
def _centroid_partial(
    q_ptr, evicted, pair, num, piece, scaling, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The partial of one of PIECES of the `num` centroids of a pair; unused ones have size 0. Products: dtype of q."""
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    rows, cols = tl.arange(0, M), tl.arange(0, GROUP.BLOCK_D)
    top, total, acc = _empty(M, GROUP.BLOCK_D)
    first = pair * num
    keys_ptr, values_ptr = evicted.key_mean_ptr + first * D, evicted.value_mean_ptr + first * D
    sizes_ptr, spread_ptr = evicted.sizes_ptr + first, evicted.spread_ptr + first
    whole = _load_query(q_ptr, GROUP).to(tl.float32)
    square = _sum_products(whole, whole)
    share = tl.cdiv(tl.cdiv(num, BLOCK_C), PIECES) * BLOCK_C
    stop = tl.minimum((piece + 1) * share, num)
    for start in range(piece * share, stop, BLOCK_C):
        index = start + tl.arange(0, BLOCK_C)
        inside = index < stop
        products = tl.zeros([M, BLOCK_C], tl.float32)
        for begin in range(0, D, BLOCK_K):
            dims = begin + tl.arange(0, BLOCK_K)
            mask = (rows < GROUP.G)[:, None] & (dims < D)[None, :]
            q = tl.load((q_ptr + rows * D)[:, None] + dims[None, :], mask=mask, other=0.0)
            place = keys_ptr + index[:, None] * D + dims[None, :]
            k = tl.load(place, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
            products = _dot_terms(products, q, tl.trans(k), 3)
        logits = _centroid_logits(products, square, sizes_ptr, spread_ptr, index, inside, scaling)
        top, total, acc, weights = _softmax_update(top, total, acc, logits)
        spot = values_ptr + index[:, None] * D + cols[None, :]
        v = tl.load(spot, mask=_rows_mask(inside, cols, D, GROUP.BLOCK_D), other=0.0)
        acc = _dot_terms(acc, weights.to(q_ptr.dtype.element_ty), v, 2)
    return top, total, acc


@triton.jit
def _evicted_partial(
    q_ptr, evicted, pair, count, num, piece, scaling, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The partial of a pair for its query heads q_ptr [G, D]: of its `count` tokens as moments, or of one of PIECES of
    its centroids."""
    if evicted.sizes_ptr is not None:
        return _centroid_partial(q_ptr, evicted, pair, num, piece, scaling, GROUP, BLOCK_K, BLOCK_C, PIECES)
    else:
        return _moment_partial(q_ptr, evicted, pair, count, scaling, GROUP, BLOCK_K)


class Terms(NamedTuple):
    """What the kernels read of the evicted tokens.

    Attributes: order: of the moments, CENTROIDS, or None for nothing.  num: of centroids, else None.
    """

    order: int | None = None
    pointers: EvictedPointers = EvictedPointers()
    num: int | None = None

    @classmethod
    def of(cls, op: str, evicted: Evicted | None, dim: int) -> Terms:
        """Of what is remembered of [B, Hkv] heads. Raises FastKVError unless its shapes and dtypes suit the kernels."""
        if isinstance(evicted, Moments):
            m = evicted
            matrix = m.cross if m.slope is None else m.slope
            return cls(m.order, EvictedPointers(m.count, m.key_mean, m.value_mean, matrix))
        if isinstance(evicted, Centroids):
            c = evicted
            check_centroids(op, c, tuple(c.count.shape), dim, c.values.shape[-1])
            return cls(CENTROIDS, EvictedPointers(None, c.keys, c.values, None, c.spread, c.count), c.num)
        if evicted is not None:
            raise FastKVError(
                f"{op}: the kernels know moments and centroids of evicted tokens, got {evicted.kind}; use "
                "backend='reference'"
            )
        return cls()
