"""What each stored token is worth: attention received times what the moments of the evicted set miss of its value.

    score_j = attention_j |v_j - v_mean - (scale / n) S^T k_j|

Source: MomentKV (arXiv:2606.01563, Eq. 10); the key is not centred, as there. Twin: `fastkv.reference.moment_residual`,
times attention. A program takes a tile of slots and multiplies it with the whole moment matrix.

Bytes per pair: 4 L D for keys and values in half precision, 8 C for attention and scores, 2 D^2 (4 D^2 in fp32) per
tile for the matrix, from L2 after the first. Does not handle: Dv != Dk, head_dim above 512, float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import Moments
from ._attention import _dot, _dot32
from ._launch import cdiv, check_contiguous, check_head_dim, pow2, stages

BLOCKS = {
    64: (64, 32, 4),
    128: (64, 32, 4),
    256: (64, 32, 8),
    512: (32, 32, 8),
}  # padded D -> slots, matrix rows, warps
FP32_BLOCKS = {64: (32, 16, 4), 128: (32, 16, 4), 256: (32, 32, 8), 512: (16, 32, 8)}


@triton.jit
def _moment_scores_kernel(
    attention_ptr, keys_ptr, values_ptr, value_mean_ptr, matrix_ptr, count_ptr, out_ptr, slots, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = slot < slots
    cols = tl.arange(0, BLOCK_D)
    row = (pair * slots + slot)[:, None] * D
    fitted = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if matrix_ptr is not None:
        for first in range(0, D, BLOCK_K):
            rows = first + tl.arange(0, BLOCK_K)
            if D % BLOCK_K == 0:
                k = tl.load(keys_ptr + row + rows[None, :], mask=inside[:, None], other=0.0)
            else:
                k = tl.load(keys_ptr + row + rows[None, :], mask=inside[:, None] & (rows < D)[None, :], other=0.0)
            mask = (rows < D)[:, None] & (cols < D)[None, :]
            tile = tl.load(matrix_ptr + pair * D * D + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
            if tile.dtype == tl.float32:
                fitted += _dot32(k.to(tl.float32), tile)
            else:
                fitted += _dot(k, tile.to(k.dtype))
        factor = scale + tl.zeros([1], tl.float32)
        if matrix_ptr.dtype.element_ty == tl.float32:
            factor = factor / tl.maximum(tl.load(count_ptr + pair), 1).to(tl.float32)
        fitted = fitted * factor[:, None]
    v = tl.load(values_ptr + row + cols[None, :], mask=inside[:, None] & (cols < D)[None, :], other=0.0)
    residual = v.to(tl.float32) - fitted
    if value_mean_ptr is not None:
        residual -= tl.load(value_mean_ptr + pair * D + cols, mask=cols < D, other=0.0)[None, :]
    score = tl.sqrt(tl.sum(residual * residual, 1))
    if attention_ptr is not None:
        score *= tl.load(attention_ptr + pair * slots + slot, mask=inside, other=0.0)
    tl.store(out_ptr + pair * slots + slot, tl.where(inside, score, 0.0), mask=slot < slots)


def moment_scores(attention: Tensor | None, keys: Tensor, values: Tensor, moments: Moments, scale: float) -> Tensor:
    """`reference.moment_scores`, of contiguous tensors: one launch, no host sync. Read is `moments.slope`, if there is
    one. Raises: FastKVError for other shapes or strides.
    """
    (batch, heads, slots, dim), value_mean, count = keys.shape, moments.value_mean, moments.count
    matrix = moments.cross if moments.slope is None else moments.slope
    check_head_dim("moment_scores", dim)
    check_shape("moment_scores", "values", values, keys.shape)
    given = {"attention": attention, "keys": keys, "values": values, "value_mean": value_mean, "matrix": matrix}
    check_contiguous("moment_scores", **given, count=count)
    out = torch.empty(batch, heads, slots, dtype=torch.float32, device=keys.device)
    exact = torch.float32 in (keys.dtype, None if matrix is None else matrix.dtype)
    padded = pow2(dim, 64)
    block_n, block_k, num_warps = (FP32_BLOCKS if exact else BLOCKS)[padded]
    _moment_scores_kernel[batch * heads, cdiv(slots, block_n)](
        attention, keys, values, value_mean, matrix, count, out, slots, scale,
        D=dim, BLOCK_D=padded, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=stages(3),
    )  # fmt: skip
    return out
