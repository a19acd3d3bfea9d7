"""Tile sizes of `decode_attention`: what is computed does not depend on them."""

from __future__ import annotations

import torch

from ._evicted import CENTROIDS
from ._tiles import MIN_ROWS, pow2

BLOCKS = {64: (64, 64, 3), 128: (64, 64, 3), 256: (32, 32, 3)}  # padded head_dim -> slots, matrix rows, stages
FP32_BLOCKS = {64: (32, 32, 2), 128: (32, 32, 2), 256: (16, 16, 2)}
BLOCK_C = 16  # centroids at a time
BLOCK_S = 256  # slots per step when attention is added up
MERGE_TILE = 4096  # elements of partials summed at once


def decode_constants(
    dtype: torch.dtype, matrix: torch.dtype | None, heads: int, groups: int, head_dim: int, splits: int,
    order: int | None, spread: bool, capped: bool, hip: bool,
) -> tuple[dict, int, int]:  # fmt: skip
    """Constexpr arguments, warps and pipeline stages.

    matrix: dtype of the moment matrix; order: of the moments, CENTROIDS or None; spread: see `_evicted`.
    """
    padded = pow2(head_dim, 64)
    block_n, block_k, num_stages = (FP32_BLOCKS if dtype == torch.float32 else BLOCKS)[padded]
    if capped or (order == 1 and spread):
        block_k = min(block_k, 32)  # with 64, triton spills: 3.9 on sm_90 for a cap, 3.7 on sm_100 for a spread
    if matrix == torch.float32:
        block_k = 32 if hip else 16  # its exact product needs several times the registers
    if order == CENTROIDS.value:
        block_k = 32
    merge_rows = pow2(groups)
    merge_dims = min(padded, max(16, MERGE_TILE // (splits * merge_rows)))
    constants = dict(
        HEADS=heads, G=groups, M=MIN_ROWS, D=head_dim, BLOCK_D=padded, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_C=BLOCK_C, BLOCK_S=BLOCK_S, SPLITS=splits, MERGE_M=merge_rows, MERGE_D=merge_dims, ORDER=order,
        SPREAD=spread, HAS_CAP=capped,
    )  # fmt: skip
    return constants, 8 if dtype == torch.float32 and padded == 256 else 4, num_stages
