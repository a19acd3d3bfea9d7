"""Means of scores over neighbours in the text: of so many, or of those in the same chunk.

Twins of `reference.pool_scores` and `reference.chunk_mean`: one launch, and one before it that ranks candidates by
position. Bytes per candidate: `pool` scores in, from L2, 4 out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..reference import check_pool
from ._launch import cdiv, check_like
from .slot_signals import in_order

ROWS = 64  # candidates of a program


@triton.jit(do_not_specialize=["N"])  # the length of a prompt
def _pool_kernel(
    scores_ptr, positions_ptr, order_ptr, counts_ptr, out_ptr, N, POOL: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    # positions_ptr None: whatever chunk of the text a neighbour is in.
    kv = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    scores_ptr, order_ptr, out_ptr = scores_ptr + kv * N, order_ptr + kv * N, out_ptr + kv * N
    count = tl.load(counts_ptr + kv).to(tl.int32)
    own = tl.load(order_ptr + rank, mask=rank < N, other=0)
    if positions_ptr is not None:
        positions_ptr += kv * N
        chunk = tl.load(positions_ptr + own, mask=rank < count, other=0) // CHUNK
    total = tl.zeros([ROWS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for step in range(0, POOL):
        near = rank + step - POOL // 2
        inside = (near >= 0) & (near < count)
        index = tl.load(order_ptr + near, mask=inside, other=0).to(tl.int32)
        if positions_ptr is not None:
            inside &= tl.load(positions_ptr + index, mask=inside, other=0) // CHUNK == chunk
        total += tl.load(scores_ptr + index, mask=inside, other=0.0)
        number += inside.to(tl.float32)
    if positions_ptr is not None:
        mean = tl.where(rank < count, total / tl.maximum(number, 1.0), 0.0)
    else:  # beyond the ends is nothing
        mean = total / POOL
    tl.store(out_ptr + own, mean, mask=rank < N)


def _pooled(scores: Tensor, positions: Tensor, valid: Tensor, pool: int, chunk: int | None = None) -> Tensor:
    """The two launches of means over neighbours."""
    check_like("pool", valid.shape, scores=scores, positions=positions, valid=valid)
    order, counts = in_order(positions, valid)
    out = torch.empty_like(scores)
    if out.numel():
        _pool_kernel[counts.numel(), cdiv(valid.shape[2], ROWS)](
            scores, positions if chunk else None, order, counts, out, valid.shape[2], POOL=pool, CHUNK=chunk or 1,
            ROWS=ROWS,
        )  # fmt: skip
    return out


def pool_scores(scores: Tensor, pool: int, positions: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """`reference.pool_scores`: scores fp32, positions int32, valid bool [B, Hkv, N], contiguous.

    Cost: two launches, and a sort of many candidates.
    """
    if pool == 1 or positions is None or valid is None:
        return reference.pool_scores(scores, pool)
    check_pool(pool)
    return _pooled(scores, positions, valid, pool)


def chunk_mean(scores: Tensor, chunk: int, positions: Tensor, valid: Tensor) -> Tensor:
    """`reference.chunk_mean`: scores fp32, positions int32, valid bool [B, Hkv, N], contiguous. Cost: as above."""
    return _pooled(scores, positions, valid, 2 * chunk - 1, chunk)
