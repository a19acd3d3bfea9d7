"""Scores from the distance of each key to the mean key: KeyDiff (arXiv:2504.15364) and ManifoldKV.

    keydiff   -cos(k_i, a), a the mean of the keys or of the normalised keys; ablations -a.k_i and |a - k_i|
    manifold  |k_i - mu| in l2, l1 or linf, or 1 - cos(k_i, mu); mu of the head or of the token's window

Two passes over the keys: sums per split of each window, then, after each program has added up the splits of its window
in order, the scores. Everything in fp32; distances from differences, not from |k|^2 - 2 k.mu + |mu|^2, which cancels.
Bytes: 2 N D per head in the keys' dtype, 4 N out, and the sums of at most 64 splits per window.
The KeyDiff anchors "median" and "pairwise" are the reference's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..rotary import Rotary
from ._arguments import View
from ._launch import cdiv, check_head_dim, check_like, pow2
from ._rotary import Pairing, Turn, _turned_back

BLOCK_N = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32, 512: 16}  # rows per tile, by padded head_dim
LEAST_ROWS = 512  # of a split
MAX_SPLITS = 64
METRICS = {"keydiff": 0, "cosine": 1, "dot": 2, "l2": 3, "l1": 4, "linf": 5}
FOLLOWING = ["N", "window", "rows_per_split", "splits"]  # the length of a prompt: one compilation for all of them
TINY = tl.constexpr(1e-12)  # what torch.nn.functional.normalize never divides by less than


class Real(NamedTuple):
    """Which keys are real: order [B, Hkv, N] int64, in which the first lengths [B, Hkv] int64 are; or mask [B, Hkv, N]
    bytes; all if both are absent.
    """

    order_ptr: Any = None
    lengths_ptr: Any = None
    mask_ptr: Any = None


class Tile(NamedTuple):
    """Constants of a launch: heads, their numbers, padded ones; keys at a time; `Pairing` of keys to be turned back."""

    HEADS: int
    D: int
    BD: int
    BLOCK_N: int
    R: int = 0
    START: int = 0
    INTERLEAVED: bool = False


@triton.jit
def _stretch(N, window, rows_per_split, splits):
    """The ranks [low, high) of a program: a split of a window."""
    start = tl.program_id(0) // splits * window
    low = start + tl.program_id(0) % splits * rows_per_split
    return low, tl.minimum(tl.minimum(low + rows_per_split, start + window), N)


@triton.jit
def _load_rows(keys, known, turn, head, rank, limit, N, TILE: tl.constexpr):
    """Keys of the given ranks of a head, fp32 and 0 where not real, with their indices, and which of them are real."""
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    index, length = rank, N
    if known.order_ptr is not None:
        index = tl.load(known.order_ptr + head * N + rank, mask=rank < limit, other=0).to(tl.int32)
        length = tl.load(known.lengths_ptr + head).to(tl.int32)
    real = (rank < limit) & (rank < length)
    if known.mask_ptr is not None:
        real = real & (tl.load(known.mask_ptr + head * N + rank, mask=rank < limit, other=0) != 0)
    keys_ptr = keys.ptr + (head // HEADS) * keys.stride_b + (head % HEADS) * keys.stride_h
    column = tl.arange(0, BD)
    row_ptr = keys_ptr + index.to(tl.int64)[:, None] * keys.stride_t
    rows = tl.load(row_ptr + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    if turn.positions_ptr is not None:
        position = tl.load(turn.positions_ptr + head * N + index, mask=real, other=0)
        rows = _turned_back(row_ptr, rows, real, position, turn, column, TILE.R, TILE.START, TILE.INTERLEAVED)
    return rows, index, real


@triton.jit
def _norm(rows):
    """max(|row|, TINY)."""
    return tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), TINY)


@triton.jit(do_not_specialize=FOLLOWING)
def _sum_kernel(
    keys: View, known: Real, turn: Turn, sums_ptr, counts_ptr, N, window, rows_per_split, splits,
    TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    BD: tl.constexpr = TILE.BD
    head = tl.program_id(1).to(tl.int64)
    low, high = _stretch(N, window, rows_per_split, splits)
    total = tl.zeros([BD], tl.float32)
    count = tl.zeros([], tl.int32)
    for first in range(low, high, TILE.BLOCK_N):
        rank = first + tl.arange(0, TILE.BLOCK_N)
        k, _, real = _load_rows(keys, known, turn, head, rank, high, N, TILE)
        if UNIT:
            k = k / _norm(k)[:, None]
        total += tl.sum(k, 0)
        count += tl.sum(real.to(tl.int32), 0)
    part = head * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums_ptr + part * BD + tl.arange(0, BD), total)
    tl.store(counts_ptr + part, count)


@triton.jit(do_not_specialize=FOLLOWING)
def _score_kernel(
    keys: View, known: Real, turn: Turn, sums_ptr, counts_ptr, scores_ptr, N, window, rows_per_split, splits,
    TILE: tl.constexpr, METRIC: tl.constexpr,
):  # fmt: skip
    BD: tl.constexpr = TILE.BD
    head = tl.program_id(1).to(tl.int64)
    low, high = _stretch(N, window, rows_per_split, splits)
    part = head * tl.num_programs(0) + tl.program_id(0) // splits * splits
    total = tl.zeros([BD], tl.float32)
    count = tl.zeros([], tl.int32)
    for split in range(0, splits):
        total += tl.load(sums_ptr + (part + split) * BD + tl.arange(0, BD))
        count += tl.load(counts_ptr + part + split)
    center = total / tl.maximum(count, 1).to(tl.float32)
    length_of_center = tl.maximum(tl.sqrt(tl.sum(center * center, 0)), TINY)
    for first in range(low, high, TILE.BLOCK_N):
        rank = first + tl.arange(0, TILE.BLOCK_N)
        k, index, real = _load_rows(keys, known, turn, head, rank, high, N, TILE)
        if METRIC <= 2:
            score = tl.sum(k * center[None, :], 1)
            if METRIC <= 1:
                score = score / (_norm(k) * length_of_center)
            score = (1.0 if METRIC == 1 else 0.0) - score
        else:
            gap = tl.abs(k - center[None, :])
            if METRIC == 3:
                score = tl.sqrt(tl.sum(gap * gap, 1))
            elif METRIC == 4:
                score = tl.sum(gap, 1)
            else:
                score = tl.max(gap, 1)
        tl.store(scores_ptr + head * N + index, tl.where(real, score, 0.0), mask=rank < high)


def _scores(
    keys: Tensor, metric: str, unit: bool, window: int | None, mask: Tensor | None, positions: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:  # fmt: skip
    """The two launches. With windows and a mask, tokens are counted along `order`: real ones first, as they come."""
    batch, heads, num, dim = keys.shape
    check_head_dim("key_scores", dim)
    check_like("key_scores", (batch, heads, num), mask=mask, positions=positions)
    assert keys.stride(-1) == 1
    scores = torch.empty(batch, heads, num, dtype=torch.float32, device=keys.device)
    if not scores.numel():
        return scores
    order = lengths = None
    if window is None or window >= num:
        window = num
    elif mask is not None:
        order, lengths, mask = mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True), mask.sum(-1), None
    width = pow2(dim, 16)
    block = BLOCK_N[width] // (1 if rotary is None else 2)  # turning takes registers
    rows = cdiv(max(LEAST_ROWS, cdiv(window, MAX_SPLITS)), block) * block
    splits = cdiv(window, rows)
    grid = (cdiv(num, window) * splits, batch * heads)
    sums = torch.empty(grid[1], grid[0], width, dtype=torch.float32, device=keys.device)
    counts = torch.empty(grid[1], grid[0], dtype=torch.int32, device=keys.device)
    known = Real(order, lengths, None if mask is None else mask.view(torch.uint8))
    sizes, tile, turn = (num, window, rows, splits), Tile(heads, dim, width, block), Turn()
    if rotary is not None and positions is not None:
        tile, turn = Tile(*tile[:4], *Pairing.of(rotary, dim)), Turn.of(positions, rotary)
    given = View.of(keys), known, turn, sums, counts
    _sum_kernel[grid](*given, *sizes, TILE=tile, UNIT=unit)
    _score_kernel[grid](*given, scores, *sizes, TILE=tile, METRIC=METRICS[metric])
    return scores


def keydiff_scores(
    keys: Tensor, anchor: str = "mean", *, distance: str = "cosine", mask: Tensor | None = None,
    positions: Tensor | None = None, rotary: Rotary | None = None,
) -> Tensor:  # fmt: skip
    """`reference.keydiff_scores` of unit stride along D. Cost: two launches, no host sync; the paper's ablation, other
    anchors than "mean" and "normalized_mean", is the reference's.
    """
    reference.check_keydiff(anchor, distance)
    if anchor not in ("mean", "normalized_mean"):
        told: Any = {"distance": distance, "mask": mask, "positions": positions, "rotary": rotary}
        return reference.keydiff_scores(keys, anchor, **told)
    metric = {"cosine": "keydiff", "dot": "dot", "euclidean": "l2"}[distance]
    return _scores(keys, metric, anchor == "normalized_mean", None, mask, positions, rotary)


def manifold_scores(
    keys: Tensor, window: int | None = None, metric: str = "l2", *, mask: Tensor | None = None
) -> Tensor:
    """`reference.manifold_scores`, likewise; windows with a mask add an argsort of the mask."""
    reference.check_metric(metric, window)
    return _scores(keys, metric, False, window, mask)
