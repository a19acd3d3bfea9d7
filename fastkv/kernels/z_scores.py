"""Scores in standard deviations from the mean of their head, plus a bonus: twin of `reference.z_scores`.

    z = (s - mean) / std + weight bonus;   std that is below a thousandth of the mean counts as none

Where the bonus is attention a, the weight is divided by `reference.looked_at`, with exp(-sum p log p) = A exp(-E / A),
A = sum a, E = sum a log a.

One program a head reads its scores three times, for their mean, its deviation and the result.
Bytes: 13 N a head and 4 N for the bonus, 8 N for attention; later passes come from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import check_like

BLOCK = 2048
FLAT = tl.constexpr(1e-3)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _offsets(scores_ptr, mask_ptr, index, N, mean):
    """Scores minus the mean, 0 where not real, and which are real."""
    real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
    return tl.where(real, tl.load(scores_ptr + index, mask=index < N, other=0.0) - mean, 0.0), real


@triton.jit(do_not_specialize=["N", "tokens"])
def _z_kernel(scores_ptr, mask_ptr, bonus_ptr, out_ptr, N, weight, tokens, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * N
    scores_ptr += head
    mask_ptr += head
    total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    given, entropy = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        score, real = _offsets(scores_ptr, mask_ptr, index, N, 0.0)
        total += score
        count += real.to(tl.int32)
        if SHARED:
            a = tl.load(bonus_ptr + head + index, mask=real, other=0.0)
            given += a
            entropy += tl.where(a > 0, a * tl.log(tl.maximum(a, TINY)), 0.0)
    size = tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    if SHARED:
        sum_a = tl.sum(given, 0)
        spread = tl.where(sum_a > 0, sum_a * tl.exp(-tl.sum(entropy, 0) / tl.maximum(sum_a, TINY)), 1.0)
        weight /= spread / size * tl.minimum(tokens / size, 1.0)
    mean = tl.sum(total, 0) / size
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        offset, _ = _offsets(scores_ptr, mask_ptr, first + tl.arange(0, BLOCK), N, mean)
        squares += offset * offset
    std = tl.sqrt(tl.sum(squares, 0) / size)
    flat = std <= tl.abs(mean) * FLAT
    divisor = tl.where(flat, 1.0, std)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        offset, _ = _offsets(scores_ptr, mask_ptr, index, N, mean)
        z = tl.where(flat, 0.0, offset / divisor)
        if bonus_ptr is not None:
            z += weight * tl.load(bonus_ptr + head + index, mask=index < N, other=0.0)
        tl.store(out_ptr + head + index, z, mask=index < N)


def z_scores(
    scores: Tensor, mask: Tensor, bonus: Tensor | None = None, weight: float = 1.0, tokens: int | None = None
) -> Tensor:
    """One launch, no host sync; shapes as in `reference.z_scores`, scores and bonus in fp32.

    Raises: FastKVError for shapes or strides that do not fit.
    """
    check_like("z_scores", scores.shape, scores=scores, mask=mask, bonus=bonus)
    assert scores.dtype == torch.float32 and (bonus is None or bonus.dtype == torch.float32)
    out = torch.empty_like(scores)
    if scores.numel():
        batch, heads, num = scores.shape
        shared = bonus is not None and tokens is not None
        _z_kernel[(batch * heads,)](
            scores, mask.view(torch.uint8), bonus, out, num, weight, tokens if shared else 0, BLOCK=BLOCK,
            SHARED=shared, num_warps=8,
        )  # fmt: skip
    return out
