"""Average pooling of scores over neighbouring tokens, by index or by position; twin of `reference.pool_scores`.

    p[n] = (s[n - r] + ... + s[n + r]) / (2 r + 1), zero beyond the ends and where there is no token

A launch of its own after the scores, so that no tile edge shows and every output sums its neighbours in the same order.
Slots are unordered, so neighbours by position go through an argsort (torch, no host sync) and back.
Bytes: 8 N per head, 24 N by position. Does not handle: even widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import check_pool
from ._launch import check_contiguous, check_like, variant

BLOCK = 512
NOWHERE = tl.constexpr(2**31 - 1)  # the position of what is not a token: after every query


@triton.jit
def _pool_kernel(
    scores_ptr, order_ptr, places_ptr, pooled_ptr, N, POOL: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * N
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(POOL):
        near = rank + step - POOL // 2
        inside = (near >= 0) & (near < N)
        if ORDERED:
            near = tl.load(order_ptr + row + near, mask=inside, other=0)
            inside = inside & (tl.load(places_ptr + row + near, mask=inside, other=NOWHERE) < NOWHERE)
        total += tl.load(scores_ptr + row + near, mask=inside, other=0.0)
    place = rank.to(tl.int64)
    if ORDERED:
        place = tl.load(order_ptr + row + rank, mask=rank < N, other=0)
    tl.store(pooled_ptr + row + place, total / POOL, mask=rank < N)


def as_places(positions: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """int32 positions with NOWHERE for what is not valid; all 0 without positions; None if nothing is known."""
    if valid is None:
        return positions
    return torch.where(valid, 0 if positions is None else positions, NOWHERE.value).to(torch.int32)


def pool_in_order(scores: Tensor, pool: int, places: Tensor | None) -> Tensor:
    """`pool_scores` with neighbours in order of `places` [B, Hkv, N] int32, or by index if None."""
    check_pool(pool)
    check_contiguous("pool_scores", scores=scores, places=places)
    batch, heads, num = scores.shape
    if pool == 1 or not scores.numel():
        return scores
    pooled = torch.empty_like(scores)
    order = scores if places is None else places.argsort(dim=-1, stable=True)
    _pool_kernel[(triton.cdiv(num, BLOCK), batch * heads)](
        scores, order, scores if places is None else places, pooled, num,
        POOL=pool, BLOCK=BLOCK, ORDERED=places is not None,
    )  # fmt: skip
    return pooled


def pool_scores(*, scores: Tensor, pool: int, positions: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Average over `pool` neighbours, zero beyond the ends; in order of position if positions and valid are given.

    Args: scores [B, Hkv, N] fp32; pool: odd; positions [B, Hkv, N] int32 and valid [B, Hkv, N] bool.
    Returns: [B, Hkv, N] fp32; `scores` itself for pool = 1.  Cost: one launch, and an argsort if by position.
    """
    ordered = positions is not None and valid is not None
    check_like("pool_scores", scores.shape, positions=positions, valid=valid)
    return pool_in_order(scores, pool, as_places(positions, valid) if ordered else None)


AOT = [
    variant(f"pool {pool}{' ordered' if ordered else ''}", _pool_kernel, dict(POOL=pool, BLOCK=BLOCK, ORDERED=ordered),
            dict(order_ptr="*i64", places_ptr="*i32"), even=("N",), wide=False)
    for pool, ordered in ((5, False), (7, False), (7, True))
]  # fmt: skip
