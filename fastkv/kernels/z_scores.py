"""(s - mean) / std of each row of scores over its real tokens, in one launch (Compactor, arXiv:2507.08143, Eq. 6).

Twin of `reference.z_scores`, and of `needed_scores`, which adds up those of two or three scores. A program reads its
row three times: for the mean, for the squares of what is left, which do not cancel, and to write. Bytes per score: 4
in, from L2 after the first time, 3 of masks, 4 out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import check_like

BLOCK = 1024
# Which scores of a row are known: all that are real, or those above 0, whose logs may count instead.
REAL, KNOWN, LOGS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _read(score_ptr, mask_ptr, index, N, WHICH: tl.constexpr):
    """Some scores of a row: which are real, which are known, and these; 0 of the others."""
    real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
    score = tl.load(score_ptr + index, mask=real, other=0.0)
    known = real
    if WHICH != REAL:
        known = score > 0
    if WHICH == LOGS:
        score = tl.log(tl.where(known, score, 1.0))
    return real, known, tl.where(known, score, 0.0)


@triton.jit
def _standard(score_ptr, mask_ptr, N, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and standard deviation of a row's real scores, of which the unknown are the mean of the others. A deviation
    of 0 means that they are as good as equal, see the reference.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    knowns = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        real, known, score = _read(score_ptr, mask_ptr, first + tl.arange(0, BLOCK), N, WHICH)
        sums += score
        counts += real.to(tl.int32)
        knowns += known.to(tl.int32)
    mean = tl.sum(sums, 0) / tl.maximum(tl.sum(knowns, 0), 1).to(tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        _, known, score = _read(score_ptr, mask_ptr, first + tl.arange(0, BLOCK), N, WHICH)
        away = tl.where(known, score - mean, 0.0)
        squares += away * away
    std = tl.sqrt(tl.sum(squares, 0) / tl.maximum(tl.sum(counts, 0), 1).to(tl.float32))
    return mean, tl.where(std <= 1e-3 * tl.abs(mean), 0.0, std)


@triton.jit
def _z(score_ptr, mask_ptr, index, N, mean, std, WHICH: tl.constexpr):
    """z-scores of some scores of a row; 0 of those that are unknown."""
    _, known, score = _read(score_ptr, mask_ptr, index, N, WHICH)
    away = tl.where(known, score - mean, 0.0)
    return tl.where(std > 0, away / tl.where(std > 0, std, 1.0), 0.0)


@triton.jit(do_not_specialize=["N"])
def _needed_kernel(unlike_ptr, expected_ptr, reread_ptr, valid_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    valid_ptr += row * N
    place = (tl.program_id(1) * tl.num_programs(0).to(tl.int64) + row) * N  # of as many scores as there are
    mean, std = _standard(unlike_ptr + place, valid_ptr, N, REAL, BLOCK)
    if expected_ptr is not None:
        e_mean, e_std = _standard(expected_ptr + place, valid_ptr, N, LOGS, BLOCK)
    if reread_ptr is not None:
        r_mean, r_std = _standard(reread_ptr + place, valid_ptr, N, KNOWN, BLOCK)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        score = _z(unlike_ptr + place, valid_ptr, index, N, mean, std, REAL)
        if expected_ptr is not None:
            score += _z(expected_ptr + place, valid_ptr, index, N, e_mean, e_std, LOGS)
        if reread_ptr is not None:
            score += _z(reread_ptr + place, valid_ptr, index, N, r_mean, r_std, KNOWN)
        tl.store(out_ptr + place + index, score, mask=index < N)


def needed_scores(unlike: Tensor, expected: Tensor | None, reread: Tensor | None, valid: Tensor) -> Tensor:
    """`reference.needed_scores`, in one launch: all [B, Hkv, N], contiguous; fp32, and valid bool.

    Raises: FastKVError for other shapes or strides.
    """
    shape = (*unlike.shape[: -valid.ndim], *valid.shape)
    check_like("needed_scores", shape, unlike=unlike, expected=expected, reread=reread)
    valid, out = valid.contiguous(), torch.empty_like(unlike)
    if out.numel():
        grid = valid[..., 0].numel(), out.numel() // valid.numel()
        _needed_kernel[grid](unlike, expected, reread, valid.view(torch.uint8), out, valid.shape[-1], BLOCK=BLOCK)
    return out


def z_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """`reference.z_scores`, likewise; scores may have further axes before those of the mask."""
    return needed_scores(scores, None, None, mask)
