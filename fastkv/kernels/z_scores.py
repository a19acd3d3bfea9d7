"""(s - mean) / std of each row of scores over its real tokens, in one launch (Compactor, arXiv:2507.08143, Eq. 6).

Twin of `reference.z_scores`, and of `needed_scores`, which adds up those of two or three scores, one of them made of
logits here. A program reads its row three times: for the mean, for the squares of what is left, which do not cancel,
and to write; logits once more before, for their sums. Bytes per score: 4 in, from L2 after the first time, 3 of masks,
4 out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError
from ._launch import check_contiguous, check_like, pow2
from .expected_attention import gaussian_logits

BLOCK = 1024
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _scaled(away, mean, squares, count):
    """z-scores of what is so far from the mean, as in the reference, which says why equal scores get 0."""
    std = tl.sqrt(squares / count)
    flat = std <= 1e-3 * tl.abs(mean)
    return tl.where(flat, 0.0, away / tl.where(flat, 1.0, std))


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
    square = tl.sum(squares, 0)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        real = tl.load(mask_ptr + index, mask=index < N, other=0) != 0
        away = tl.load(scores_ptr + place + index, mask=real, other=0.0) - mean
        tl.store(out_ptr + place + index, tl.where(real, _scaled(away, mean, square, count), 0.0), mask=index < N)


class Ahead(NamedTuple):
    """What is known of queries to come: logits [B, Hq, N] and lengths [B, Hkv, N] of values, as of `gaussian_logits`,
    and how many queries say so, [B] int64. Absent: all.
    """

    logits_ptr: Any = None
    lengths_ptr: Any = None
    count_ptr: Any = None


@triton.jit
def _logits(ahead, row, first, N, G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [GROUP, BLOCK] of the query heads of a KV head."""
    member, index = tl.arange(0, GROUP), first + tl.arange(0, BLOCK)
    inside = (member < G)[:, None] & (index < N)[None, :]
    far = (row * G + member)[:, None] * N
    return tl.load(ahead.logits_ptr + far + index[None, :], mask=inside, other=-float("inf"))


@triton.jit
def _sums(ahead, row, N, G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of each query head, and one over G times its sum of weights; zeros without."""
    top = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if ahead.logits_ptr is not None:
        for first in range(0, N, BLOCK):
            logits = _logits(ahead, row, first, N, G, GROUP, BLOCK)
            new_top = tl.maximum(top, tl.max(logits, 1))
            floor = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - floor) + tl.sum(tl.exp(logits - floor[:, None]), 1)
            top = new_top
    return tl.where(top == -float("inf"), 0.0, top), 1.0 / tl.where(total > 0, total * G, 1.0)


@triton.jit
def _reasons(unlike_ptr, memory_ptr, ahead, sums, valid_ptr, asked, row, first, N, LOGS: tl.constexpr,
             G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """What is known of some candidates: which are real, how unlike they are, whether anything is remembered and what,
    the log of what is expected, or 0.
    """
    top, share = sums
    index = first + tl.arange(0, BLOCK)
    place = row * N + index
    real = tl.load(valid_ptr + place, mask=index < N, other=0) != 0
    unlike = tl.load(unlike_ptr + place, mask=real, other=0.0)
    memory = tl.load(memory_ptr + place, mask=real, other=0.0)
    known = memory > 0
    if LOGS:
        memory = tl.log(tl.where(known, memory, 1.0))
    expected = tl.zeros([BLOCK], tl.float32)
    if ahead.logits_ptr is not None:
        weights = tl.exp(_logits(ahead, row, first, N, G, GROUP, BLOCK) - top[:, None]) * share[:, None]
        given = tl.sum(weights, 0) * tl.load(ahead.lengths_ptr + place, mask=real, other=0.0)
        expected = tl.log(tl.where(asked, tl.maximum(given, TINY), TINY))
    return real, unlike, known, tl.where(known, memory, 0.0), tl.where(real, expected, 0.0)


@triton.jit(do_not_specialize=["N"])
def _needed_kernel(
    unlike_ptr, memory_ptr, ahead: Ahead, valid_ptr, out_ptr, N, LOGS: tl.constexpr, HEADS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, asked = tl.program_id(0).to(tl.int64), True
    if ahead.count_ptr is not None:
        asked = tl.load(ahead.count_ptr + row // HEADS) > 0
    sums = _sums(ahead, row, N, G, GROUP, BLOCK)
    u_sum = tl.zeros([BLOCK], tl.float32)
    m_sum = tl.zeros([BLOCK], tl.float32)
    e_sum = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    known = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        real, unlike, some, memory, expected = _reasons(
            unlike_ptr, memory_ptr, ahead, sums, valid_ptr, asked, row, first, N, LOGS, G, GROUP, BLOCK
        )
        u_sum += unlike
        m_sum += memory
        e_sum += expected
        counts += real.to(tl.int32)
        known += some.to(tl.int32)
    count = tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    u_mean, e_mean = tl.sum(u_sum, 0) / count, tl.sum(e_sum, 0) / count
    m_mean = tl.sum(m_sum, 0) / tl.maximum(tl.sum(known, 0), 1).to(tl.float32)  # and of all: the others get it
    u_squares = tl.zeros([BLOCK], tl.float32)
    m_squares = tl.zeros([BLOCK], tl.float32)
    e_squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        real, unlike, some, memory, expected = _reasons(
            unlike_ptr, memory_ptr, ahead, sums, valid_ptr, asked, row, first, N, LOGS, G, GROUP, BLOCK
        )
        u_away = tl.where(real, unlike - u_mean, 0.0)
        m_away = tl.where(some, memory - m_mean, 0.0)
        e_away = tl.where(real, expected - e_mean, 0.0)
        u_squares += u_away * u_away
        m_squares += m_away * m_away
        e_squares += e_away * e_away
    u_square, m_square, e_square = tl.sum(u_squares, 0), tl.sum(m_squares, 0), tl.sum(e_squares, 0)
    for first in range(0, N, BLOCK):
        real, unlike, some, memory, expected = _reasons(
            unlike_ptr, memory_ptr, ahead, sums, valid_ptr, asked, row, first, N, LOGS, G, GROUP, BLOCK
        )
        score = _scaled(unlike - u_mean, u_mean, u_square, count)
        score += _scaled(tl.where(some, memory - m_mean, 0.0), m_mean, m_square, count)
        if ahead.logits_ptr is not None:
            score += _scaled(expected - e_mean, e_mean, e_square, count)
        index = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * N + index, tl.where(real, score, 0.0), mask=index < N)


def needed_scores(
    unlike: Tensor, memory: Tensor, keys: Tensor, values: Tensor, valid: Tensor,
    ahead: tuple[Tensor, Tensor, Tensor] | None, scale: float, logs: bool = False,
) -> Tensor:  # fmt: skip
    """`reference.needed_scores`, in one launch, and one before it where queries to come are known; unlike, memory fp32
    and valid [B, Hkv, N], contiguous, the rest as in `expected_attention`.

    Raises: FastKVError for other shapes or strides.
    """
    valid, known, groups = valid.contiguous(), Ahead(), 1
    check_like("needed_scores", valid.shape, unlike=unlike, memory=memory)
    out = torch.empty_like(unlike)
    if ahead is not None:
        known = Ahead(*gaussian_logits("needed_scores", keys, values, *ahead, scale, valid), ahead[2])
        groups = ahead[0].shape[1] // valid.shape[1]
    if out.numel():
        _needed_kernel[(valid[..., 0].numel(),)](
            unlike, memory, known, valid.view(torch.uint8), out, valid.shape[-1], LOGS=logs, HEADS=valid.shape[1],
            G=groups, GROUP=pow2(groups), BLOCK=max(BLOCK // pow2(groups), 128),
        )  # fmt: skip
    return out


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
