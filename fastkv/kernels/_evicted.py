"""The evicted set as a partial of a split softmax (see `_attention`): from its moments, or from centroids.

Moments are one part, (log2 Z_E, 1, f_E). Centroids are M slots in bf16 or fp32 whose logits have a bias. The second
order mass adds log cosh(d) to a logit, d = |scale| sqrt(q^T Sigma q), and multiplies the linear term by tanh(d) / d; a
softcap multiplies d by its slope. Twins: `moment_estimate` and `centroid_estimate` of `fastkv.reference`.

Sigma is a multiple of the identity if SPREAD, else zero (Jensen's mass).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError
from ..reference import Centroids, Evicted, Moments
from ._attention import LN2, LOG2E, _dot, _dot32, _rows_mask, _softmax_update, _sum_products, _tanh
from ._launch import check_centroids

CENTROIDS = tl.constexpr(2)  # in place of the order of the moments


@triton.jit
def _log_cosh(x):
    """log cosh(x) for x >= 0, without overflow."""
    return x + (tl.log2(1 + tl.exp(-2 * x)) - 1) * LN2


@triton.jit
def _spread_logit(logit, slope, variance):
    """Second-order mass and value: the logit plus log cosh(d), the slope times tanh(d) / d, d = |slope| sqrt(variance).

    variance: of q.k; slope: of the logit by q.k.
    """
    deviation = tl.abs(slope) * tl.sqrt(variance)
    shrink = tl.where(deviation > 1e-6, _tanh(deviation) / tl.maximum(deviation, 1e-6), 1.0)
    return logit + _log_cosh(deviation), slope * shrink


@triton.jit
def _moment_partial(
    q_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr, count, scale, softcap,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    ORDER: tl.constexpr, SPREAD: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """(log2 n + log2(e) scale q.k_mean, 1, v_mean + (scale / n) S^T q), or an empty partial. Rows: heads of a group.

    matrix_ptr [D, D] holds S in fp32, or S / n in half precision.
    """
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    if count > 0:
        products, variance = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
        for first in range(0, D, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            q = tl.load(q_ptr + rows[:, None] * D + k[None, :], mask=(rows < G)[:, None] & (k < D)[None, :], other=0.0)
            mean = tl.load(key_mean_ptr + k, mask=k < D, other=0.0)
            products += _sum_products(q.to(tl.float32), mean[None, :])
            if SPREAD:
                variance += _sum_products(q.to(tl.float32), q.to(tl.float32)) * tl.load(spread_ptr)
            if ORDER == 1:
                mask = _rows_mask(k < D, cols, D, BLOCK_D)
                tile = tl.load(matrix_ptr + k[:, None] * D + cols[None, :], mask=mask, other=0.0)
                if tile.dtype == tl.float32:
                    acc += _dot32(q.to(tl.float32), tile, INTERP)
                else:
                    acc += _dot(q, tile.to(q.dtype), INTERP)
        size = count.to(tl.float32)
        slope = tl.full([M], 1.0, tl.float32) * scale
        logit = products * scale
        if HAS_CAP:
            bent = _tanh(logit / softcap)
            logit, slope = softcap * bent, slope * (1 - bent * bent)
        if SPREAD:
            logit, slope = _spread_logit(logit, slope, variance / size)
        if ORDER == 1:
            if matrix_ptr.dtype.element_ty == tl.float32:
                slope = slope / size
        top = logit * LOG2E + tl.log2(size)
        total = tl.full([M], 1.0, tl.float32)
        acc = acc * slope[:, None] + tl.load(value_mean_ptr + cols, mask=cols < D, other=0.0)[None, :]
    return top, total, acc


@triton.jit
def _seed(
    q_ptrs, rows, count_ptr, key_mean_ptr, value_mean_ptr, slope_ptr, spread_ptr, head, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK_M: tl.constexpr, SEED: tl.constexpr,
    ORDER: tl.constexpr, HAS_SLOPE: tl.constexpr, SPREAD: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`_moment_partial` of many rows, each with its own q: the start of the online softmax of a prompt block."""
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BV], tl.float32)
    count = tl.load(count_ptr + head).to(tl.float32)
    if count > 0:
        column = tl.arange(0, BV)
        middle, variance = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, D, SEED):
            part = first + tl.arange(0, SEED)
            inside = part < D
            q = tl.load(q_ptrs[:, None] + part[None, :], mask=rows[:, None] & inside[None, :], other=0.0)
            k = tl.load(key_mean_ptr + head * D + part, mask=inside, other=0.0)
            middle += _sum_products(q.to(tl.float32), k[None, :])
            if SPREAD:
                variance += _sum_products(q.to(tl.float32), q.to(tl.float32)) * tl.load(spread_ptr + head)
            if ORDER == 1:
                spot = slope_ptr + (head * D + part[:, None]) * DV + column[None, :]
                slope = tl.load(spot, mask=inside[:, None] & (column[None, :] < DV), other=0.0)
                if not HAS_SLOPE:
                    slope = slope / count
                high = slope.to(q.dtype)
                acc += _dot(q, high, INTERP)
                if not HAS_SLOPE and q.dtype != tl.float32:  # what a matrix of the dtype of q leaves of the fp32 moment
                    acc += _dot(q, (slope - high.to(tl.float32)).to(q.dtype), INTERP)
        logit = middle * scale
        gain = tl.full([BLOCK_M], 1.0, tl.float32) * scale
        if HAS_CAP:
            bent = _tanh(logit / softcap)
            logit = softcap * bent
            gain = gain * (1 - bent * bent)
        if SPREAD:
            logit, gain = _spread_logit(logit, gain, variance / count)
        value_mean = tl.load(value_mean_ptr + head * DV + column, mask=column < DV, other=0.0)
        acc = acc * gain[:, None] + value_mean[None, :]
        top = logit * LOG2E + tl.log2(count)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    return top, total, acc


@triton.jit
def _centroid_logits(
    products, square, index, inside, sizes_ptr, spread_ptr, scale, softcap, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [M, C] of centroids `index` [C], -inf of unused ones.

    log n_c + scale q.k_c + log cosh(scale |q| sqrt(spread_c / n_c)), for products q.k_c [M, C] and square |q|^2 [M].
    """
    size = tl.load(sizes_ptr + index, mask=inside, other=0.0)
    used = tl.where(size > 0, size, 1.0)
    sigma = tl.sqrt(tl.load(spread_ptr + index, mask=inside, other=0.0) / used)
    logits = products * scale
    deviation = tl.abs(scale) * tl.sqrt(square)[:, None] * sigma[None, :]
    if HAS_CAP:
        bent = _tanh(logits / softcap)
        logits, deviation = softcap * bent, deviation * (1 - bent * bent)
    logits = (logits + _log_cosh(deviation)) * LOG2E + tl.log2(used)[None, :]
    return tl.where((size > 0)[None, :], logits, -float("inf"))


@triton.jit
def _centroid_partial(
    q_ptrs, rows, sizes_ptr, keys_ptr, values_ptr, spread_ptr, num, scale, softcap,
    M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`num` centroids of one head: sizes and spread [num] in fp32, keys [num, D], values [num, DV]; unused size 0.

    q_ptrs, rows [M]: queries, and which are.
    """
    cols = tl.arange(0, BLOCK_V)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_V], tl.float32)
    for first in range(0, num, BLOCK_C):
        index = first + tl.arange(0, BLOCK_C)
        inside = index < num
        products, square = tl.zeros([M, BLOCK_C], tl.float32), tl.zeros([M], tl.float32)
        for begin in range(0, D, BLOCK_K):
            dims = begin + tl.arange(0, BLOCK_K)
            q = tl.load(q_ptrs[:, None] + dims[None, :], mask=rows[:, None] & (dims < D)[None, :], other=0.0)
            q = q.to(tl.float32)
            place = keys_ptr + index[:, None] * D + dims[None, :]
            k = tl.load(place, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
            products += _dot32(q, tl.trans(k.to(tl.float32)), INTERP)
            square += _sum_products(q, q)
        logits = _centroid_logits(products, square, index, inside, sizes_ptr, spread_ptr, scale, softcap, HAS_CAP)
        top, total, acc, weights = _softmax_update(top, total, acc, logits)
        spot = values_ptr + index[:, None] * DV + cols[None, :]
        v = tl.load(spot, mask=inside[:, None] & (cols < DV)[None, :], other=0.0)
        acc += _dot32(weights, v.to(tl.float32), INTERP)
    return top, total, acc


@triton.jit
def _dot_terms(acc, a, b, TERMS: tl.constexpr, INTERP: tl.constexpr):
    """acc + a @ b. Of b in fp32 so many terms in the dtype of a are taken: 2 of bf16 have 16 bits, 3 all of them."""
    if a.dtype == tl.float32:
        acc += _dot32(a, b.to(tl.float32), INTERP)
    elif b.dtype != tl.float32:
        acc += _dot(a, b.to(a.dtype), INTERP)
    else:
        for _ in tl.static_range(TERMS):
            term = b.to(a.dtype)
            acc += _dot(a, term, INTERP)
            b -= term.to(tl.float32)
    return acc


@triton.jit
def _seed_centroids(
    q_ptrs, rows, sizes_ptr, keys_ptr, values_ptr, spread_ptr, num, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    SEED: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """`_centroid_partial` of many rows, on tensor cores in the dtype of q: the start of their online softmax."""
    column = tl.arange(0, BV)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BV], tl.float32)
    for first in range(0, num, BLOCK_C):
        index = first + tl.arange(0, BLOCK_C)
        inside = index < num
        products, square = tl.zeros([BLOCK_M, BLOCK_C], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for begin in range(0, D, SEED):
            part = begin + tl.arange(0, SEED)
            q = tl.load(q_ptrs[:, None] + part[None, :], mask=rows[:, None] & (part < D)[None, :], other=0.0)
            spot = keys_ptr + index[:, None] * D + part[None, :]
            k = tl.load(spot, mask=inside[:, None] & (part < D)[None, :], other=0.0)
            products = _dot_terms(products, q, tl.trans(k), 3, INTERP)
            square += _sum_products(q.to(tl.float32), q.to(tl.float32))
        logits = _centroid_logits(products, square, index, inside, sizes_ptr, spread_ptr, scale, softcap, HAS_CAP)
        top, total, acc, weights = _softmax_update(top, total, acc, logits)
        spot = values_ptr + index[:, None] * DV + column[None, :]
        v = tl.load(spot, mask=_rows_mask(inside, column, DV, BV), other=0.0)
        acc = _dot_terms(acc, weights.to(q_ptrs.dtype.element_ty), v, 2, INTERP)
    return top, total, acc


@triton.jit
def _evicted_partial(
    q_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr, sizes_ptr, pair, count, num, scale, softcap,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, ORDER: tl.constexpr, SPREAD: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """The partial of a pair for its query heads q_ptr [G, D]. ORDER 0, 1: of the moments; CENTROIDS: of `num` of them,
    whose sizes, means and spreads are in sizes_ptr, key_mean_ptr, value_mean_ptr and spread_ptr. Means and matrix
    of moments are those of the pair already; everything else is that of the first pair."""
    if ORDER == CENTROIDS:
        rows = tl.arange(0, M)
        first = pair * num
        return _centroid_partial(
            q_ptr + rows * D, rows < G, sizes_ptr + first, key_mean_ptr + first * D, value_mean_ptr + first * D,
            spread_ptr + first, num, scale, softcap, M, D, D, BLOCK_D, BLOCK_C, BLOCK_K, HAS_CAP, INTERP,
        )  # fmt: skip
    else:
        if SPREAD:
            spread_ptr += pair
        return _moment_partial(
            q_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr, count, scale, softcap,
            G, M, D, BLOCK_D, BLOCK_K, ORDER, SPREAD, HAS_CAP, INTERP,
        )  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """What the kernels read of the evicted tokens: ORDER and the tensors that go with them.

    Attributes: order: of the moments, CENTROIDS, or None for nothing.  num: of centroids.
    """

    order: int | None = None
    key_mean: Tensor | None = None
    value_mean: Tensor | None = None
    matrix: Tensor | None = None
    spread: Tensor | None = None
    sizes: Tensor | None = None
    num: int = 0

    @classmethod
    def of(cls, op: str, evicted: Evicted | None, dim: int) -> Terms:
        """Of what is remembered of [B, Hkv] heads. Raises FastKVError unless its shapes and dtypes suit the kernels."""
        if isinstance(evicted, Moments):
            m = evicted
            return cls(m.order, m.key_mean, m.value_mean, m.cross if m.slope is None else m.slope, m.spread)
        if isinstance(evicted, Centroids):
            c = evicted
            check_centroids(op, c, tuple(c.count.shape), dim, c.values.shape[-1])
            return cls(CENTROIDS.value, c.keys, c.values, None, c.spread, c.count, c.num)
        if evicted is not None:
            raise FastKVError(
                f"{op}: the kernels know moments and centroids of evicted tokens, got {evicted.kind}; use "
                "backend='reference'"
            )
        return cls()
