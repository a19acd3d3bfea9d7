"""Distance and attention in one score: twin of `reference.blended_scores`.

    min(|g|, 1) z + weight a / (s c);   z = (d - mean) / std,  std that is below a thousandth of the mean counts as none

with s = exp(-sum p log p) / n = A exp(-E / A) / n, A = sum a, E = sum a log a.

One program a head reads its distances three times, for their mean, its second and third moment, and the result.
Bytes: 25 N a head; later passes come from L2.
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
def _offsets(distance_ptr, mask_ptr, index, N, mean):
    """Distances minus the mean, 0 where not real, and which are real."""
    real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
    return tl.where(real, tl.load(distance_ptr + index, mask=index < N, other=0.0) - mean, 0.0), real


@triton.jit(do_not_specialize=["N", "tokens"])
def _blend_kernel(
    distance_ptr, attention_ptr, positions_ptr, mask_ptr, out_ptr, N, weight, tokens, BLOCK: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * N
    distance_ptr += head
    mask_ptr += head
    total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    given, entropy = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    last = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        distance, real = _offsets(distance_ptr, mask_ptr, index, N, 0.0)
        total += distance
        count += real.to(tl.int32)
        a = tl.load(attention_ptr + head + index, mask=real, other=0.0)
        given += a
        entropy += tl.where(a > 0, a * tl.log(tl.maximum(a, TINY)), 0.0)
        last = tl.maximum(last, tl.load(positions_ptr + head + index, mask=real, other=0))
    size = tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    sum_a = tl.sum(given, 0)
    spread = tl.where(sum_a > 0, sum_a * tl.exp(-tl.sum(entropy, 0) / tl.maximum(sum_a, TINY)), 1.0) / size
    seen = (tl.max(last, 0) + 1).to(tl.float32)
    weight /= spread * tl.minimum(tokens / seen, 1.0)
    mean = tl.sum(total, 0) / size
    squares, cubes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        offset, _ = _offsets(distance_ptr, mask_ptr, first + tl.arange(0, BLOCK), N, mean)
        squares += offset * offset
        cubes += offset * offset * offset
    std = tl.sqrt(tl.sum(squares, 0) / size)
    flat = std <= tl.abs(mean) * FLAT
    skewness = tl.sum(cubes, 0) / size / tl.where(flat, 1.0, std * std * std)
    factor = tl.where(flat, 0.0, tl.minimum(tl.abs(skewness), 1.0) / tl.where(flat, 1.0, std))
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        offset, real = _offsets(distance_ptr, mask_ptr, index, N, mean)
        a = tl.load(attention_ptr + head + index, mask=real, other=0.0)
        tl.store(out_ptr + head + index, factor * offset + weight * a, mask=index < N)


def blended_scores(
    distance: Tensor, attention: Tensor, positions: Tensor, mask: Tensor, tokens: int, weight: float
) -> Tensor:
    """One launch, no host sync; shapes as in `reference.blended_scores`, distance and attention in fp32.

    Raises: FastKVError for shapes or strides that do not fit.
    """
    given = {"distance": distance, "attention": attention, "positions": positions, "mask": mask}
    check_like("blended_scores", distance.shape, **given)
    assert distance.dtype == attention.dtype == torch.float32 and positions.dtype == torch.int32
    out = torch.empty_like(distance)
    if distance.numel():
        batch, heads, num = distance.shape
        _blend_kernel[(batch * heads,)](
            distance, attention, positions, mask.view(torch.uint8), out, num, weight, tokens, BLOCK=BLOCK, num_warps=8
        )
    return out
