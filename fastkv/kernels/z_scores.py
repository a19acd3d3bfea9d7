"""(s - mean) / std of each row of scores over its real tokens, in one launch (Compactor, arXiv:2507.08143, Eq. 6).

Twin of `reference.z_scores`. A program reads its row three times: for the mean, for the squares of what is left, which
do not cancel, and to write. Bytes per score: 4 in, from L2 the second and third time, 3 of masks, 4 out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError
from ._launch import check_contiguous

BLOCK = 1024


@triton.jit(do_not_specialize=["N"])  # the length of a prompt
def _z_kernel(scores_ptr, mask_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask_ptr += row * N
    place = (tl.program_id(1) * tl.num_programs(0).to(tl.int64) + row) * N
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
        sums += tl.load(scores_ptr + place + index, mask=real, other=0.0)
        counts += real.to(tl.int32)
    count = tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    mean = tl.sum(sums, 0) / count
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
        away = tl.where(real, tl.load(scores_ptr + place + index, mask=real, other=0.0) - mean, 0.0)
        squares += away * away
    std = tl.sqrt(tl.sum(squares, 0) / count)
    flat = std <= 1e-3 * tl.abs(mean)  # as in the reference, which says why
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
        away = tl.load(scores_ptr + place + index, mask=real, other=0.0) - mean
        z = tl.where(flat, 0.0, away / tl.where(flat, 1.0, std))
        tl.store(out_ptr + place + index, tl.where(real, z, 0.0), mask=index < N)


def z_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """`reference.z_scores`.

    Args: scores [..., B, Hkv, N] fp32, contiguous: any number of them; mask [B, Hkv, N] bool, true for real tokens.
    Returns: fp32 in the shape of the scores, 0 where not real.  Raises: FastKVError for other shapes or strides.
    """
    if scores.shape[-mask.ndim :] != mask.shape:
        raise FastKVError(
            f"z_scores: scores must end in the shape of the mask, {list(mask.shape)}, got {list(scores.shape)}"
        )
    mask = mask.contiguous()
    check_contiguous("z_scores", scores=scores)
    out = torch.empty_like(scores, dtype=torch.float32)
    if scores.numel():
        grid = mask[..., 0].numel(), scores.numel() // mask.numel()
        _z_kernel[grid](scores, mask.view(torch.uint8), out, mask.shape[-1], BLOCK=BLOCK)
    return out
