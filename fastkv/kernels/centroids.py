"""What the centroids of the evicted set say about the queries of a prompt block: attention over M biased slots.

    logit_c = log n_c + scale q.k_c + log cosh(scale |q| sqrt(spread_c / n_c));   out = softmax(logit) v,   lse

Twin of `reference.centroid_estimate` with the cosh mass; the arithmetic is that of the fused decode kernel. Rows of a
program are the queries of one KV head, (token, head of the group) in that order. The result is merged with that of the
other tokens by `reference.merge_partials`.

Bytes: the centroids, 8 M D, once per BLOCK_M rows; q once; 4 D of out per row. Products are fp32, as the centroids are.
Does not handle: head_dim above 512, centroids that are not fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_groups
from ..reference import Centroids
from ._attention import LN2, _normalise
from ._evicted import _centroid_partial
from ._launch import INTERPRET, check_centroids, check_contiguous, check_head_dim, pow2

# padded head_dim: (rows, dimensions of a key at a time, warps)
BLOCKS = {16: (64, 16, 4), 32: (64, 32, 4), 64: (64, 32, 4), 128: (32, 32, 4), 256: (32, 32, 4), 512: (16, 32, 4)}
BLOCK_C = 16  # centroids at a time


@triton.jit
def _centroid_kernel(
    q_ptr, sizes_ptr, keys_ptr, values_ptr, spread_ptr, out_ptr, lse_ptr, scale, softcap, T, num,
    stride_qb, stride_qh, stride_qt,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    batch, kv = pair // HEADS, pair % HEADS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < T * G
    token, head = row // G, kv * G + row % G
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + token.to(tl.int64) * stride_qt
    first = pair * num
    top, total, acc = _centroid_partial(
        q_ptrs, rows, sizes_ptr + first, keys_ptr + first * D, values_ptr + first * DV, spread_ptr + first, num,
        scale, softcap, BLOCK_M, D, DV, BLOCK_V, BLOCK_C, BLOCK_K, HAS_CAP, INTERP,
    )  # fmt: skip
    place = (batch * HEADS * G + head) * T + token
    tl.store(lse_ptr + place, (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, mask=rows)
    cols = tl.arange(0, BLOCK_V)[None, :]
    tl.store(out_ptr + place[:, None] * DV + cols, _normalise(total, acc), mask=rows[:, None] & (cols < DV))


def centroid_attention(
    q: Tensor, centroids: Centroids, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of many queries over the centroids of their KV head.

    Args: q: [B, Hq, T, D], any strides with unit stride along D.  centroids: [B, Hkv, M, ...] fp32, contiguous.
    Returns: out [B, Hq, T, Dv] and lse [B, Hq, T], fp32; zero and -inf where no centroid is in use.
    Raises: FastKVError for other shapes, strides or dtypes.  Cost: one launch, no host sync.
    """
    batch, num_heads, num, dim = q.shape
    heads, parts, value_dim = centroids.values.shape[1:]
    groups = check_groups("centroid_attention", num_heads, heads)
    check_head_dim("centroid_attention", max(dim, value_dim))
    check_centroids("centroid_attention", centroids, (batch, heads, parts), dim, value_dim)
    check_contiguous("centroid_attention", **dict(zip(("count", "keys", "values", "spread"), centroids.tensors())))
    if q.stride(-1) != 1:
        raise FastKVError(f"centroid_attention: q needs unit stride along D, got strides {q.stride()}; copy it")
    out = q.new_empty(batch, num_heads, num, value_dim, dtype=torch.float32)
    lse = q.new_empty(batch, num_heads, num, dtype=torch.float32)
    width = pow2(value_dim, 16)
    rows, block_k, warps = BLOCKS[max(width, pow2(dim, 16))]
    if q.numel():
        _centroid_kernel[(triton.cdiv(num * groups, rows), batch * heads)](
            q, centroids.count, centroids.keys, centroids.values, centroids.spread, out, lse, scale, softcap or 1.0,
            num, parts, *q.stride()[:3], HEADS=heads, G=groups, D=dim, DV=value_dim, BLOCK_V=width, BLOCK_M=rows,
            BLOCK_C=BLOCK_C, BLOCK_K=block_k, HAS_CAP=softcap is not None, INTERP=INTERPRET, num_warps=warps,
        )  # fmt: skip
    return out, lse
