"""Approximate leverage of each key: Compactor, Alg. 1, by a sketch and a Cholesky factor.

X = K Phi (Phi [D, k], k <= 128; 64 for keys of more than 512 bytes), X^T X = L L^T, score_i = |L^-1 x_i|^2. Twin of
`reference.leverage_scores` for methods "cholesky" and "srht" (the sketch is an argument). Two passes over the keys:
Gram partials per split, added up in order; then x_i again and its solved norm. In between torch factors the k x k
matrices in float64 without a host sync; if the relative ridge of 1e-6 is lost in the rounding of rank-deficient keys, a
second factor with 1e-4 takes its place, chosen on the device. With `centre` each split sums about the mean of its first
keys, and splits merge as in Chan et al.

Bytes: keys twice, 4 N out, 4 k^2 per split and head; for k > 64 each part of the Gram matrix reads the keys.
Does not handle: unsketched keys and the QR and SVD methods; they stay in the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..errors import FastKVError
from ..reference.geometry import RIDGE
from ._arguments import View
from ._attention import _dot, _dot32
from ._launch import cdiv, check_head_dim, check_like, on_hip, pow2, stages

WARPS, WARPS_HIP = 8, 4  # other numbers spill: an fp32 dot is six partial products
LEAST_ROWS = 512  # of a split
MAX_SPLITS = 64
MAX_SKETCH = 128


class Tile(NamedTuple):
    """Constants of a launch: numbers of a key and padded ones, columns of a sketch and padded ones; keys at a time."""

    HEADS: int
    D: int
    BD: int
    K: int
    BK: int
    BLOCK_N: int


@triton.jit
def _sketch(sketch_ptr, first, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns of Phi, padded to [BD, WIDTH]."""
    K: tl.constexpr = TILE.K
    row, column = tl.arange(0, TILE.BD)[:, None], first + tl.arange(0, WIDTH)[None, :]
    return tl.load(sketch_ptr + row * K + column, mask=(row < TILE.D) & (column < K), other=0.0)


@triton.jit
def _keys(keys, mask_ptr, head, first, high, N, TILE: tl.constexpr):
    """BLOCK_N keys of a head, 0 where not real, their indices, and which are real."""
    HEADS: tl.constexpr = TILE.HEADS
    index = first + tl.arange(0, TILE.BLOCK_N)
    real = index < high
    if mask_ptr is not None:
        real = tl.load(mask_ptr + head * N + index, mask=real, other=0) != 0
    column = tl.arange(0, TILE.BD)[None, :]
    keys_ptr = keys.ptr + (head // HEADS) * keys.stride_b + (head % HEADS) * keys.stride_h
    spot = keys_ptr + index.to(tl.int64)[:, None] * keys.stride_t + column
    return tl.load(spot, mask=real[:, None] & (column < TILE.D), other=0.0), index, real


@triton.jit
def _about_mean(x, shift, real, count, more, CENTRE: tl.constexpr):
    """Sketched keys less the shift, 0 where not real, and the shift: the mean of the first tile that has real keys."""
    if CENTRE:
        shift = tl.where(count == 0, tl.sum(x, 0) / tl.maximum(more, 1).to(tl.float32), shift)
        x = tl.where(real[:, None], x - shift[None, :], 0.0)
    return x, shift


@triton.jit(do_not_specialize=["N", "rows_per_split"])  # the length of a prompt
def _gram_kernel(
    keys: View, mask_ptr, sketch_ptr, grams_ptr, means_ptr, counts_ptr, N, rows_per_split, TILE: tl.constexpr,
    PART: tl.constexpr, CENTRE: tl.constexpr,
):  # fmt: skip
    """PART rows and columns of the Gram matrix of a split; those of the first columns write the means of their rows."""
    K: tl.constexpr = TILE.K
    ALL: tl.constexpr = TILE.BK == PART
    head = tl.program_id(1).to(tl.int64)
    low = tl.program_id(0) * rows_per_split
    high = tl.minimum(low + rows_per_split, N)
    down, across = tl.program_id(2) // (TILE.BK // PART) * PART, tl.program_id(2) % (TILE.BK // PART) * PART
    sketch = _sketch(sketch_ptr, down, TILE, PART)
    other = sketch if ALL else _sketch(sketch_ptr, across, TILE, PART)
    gram = tl.zeros([PART, PART], tl.float32)
    total = tl.zeros([PART], tl.float32)
    shift = tl.zeros([PART], tl.float32)  # mean of the first tile with real keys: sums about it do not cancel
    total_across = total
    shift_across = shift
    count = tl.zeros([], tl.int32)
    for first in range(low, high, TILE.BLOCK_N):
        k, _, real = _keys(keys, mask_ptr, head, first, high, N, TILE)
        more = tl.sum(real.to(tl.int32), 0)
        x, shift = _about_mean(_dot(k, sketch), shift, real, count, more, CENTRE)
        y = x
        if not ALL:
            y, shift_across = _about_mean(_dot(k, other), shift_across, real, count, more, CENTRE)
            total_across += tl.sum(y, 0)
        gram += _dot32(tl.trans(x), y)
        total += tl.sum(x, 0)
        count += more
    mean = total / tl.maximum(count, 1).to(tl.float32)
    if CENTRE:
        mean_across = mean if ALL else total_across / tl.maximum(count, 1).to(tl.float32)
        gram -= (total[:, None] * mean_across[None, :]).to(tl.float32)
    part = head * tl.num_programs(0) + tl.program_id(0)
    row, column = down + tl.arange(0, PART)[:, None], across + tl.arange(0, PART)[None, :]
    tl.store(grams_ptr + (part * K + row) * K + column, gram, mask=(row < K) & (column < K))
    if across == 0:
        index = down + tl.arange(0, PART)
        tl.store(means_ptr + part * K + index, mean + shift, mask=index < K)
        if down == 0:
            tl.store(counts_ptr + part, count)


@triton.jit(do_not_specialize=["N", "rows_per_split"])  # the length of a prompt
def _norm_kernel(
    keys: View, mask_ptr, sketch_ptr, solve_ptr, mean_ptr, scores_ptr, N, rows_per_split, TILE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = TILE.K
    BK: tl.constexpr = TILE.BK
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    low = tl.program_id(0) * rows_per_split
    high = tl.minimum(low + rows_per_split, N)
    sketch = _sketch(sketch_ptr, 0, TILE, BK)
    row, columns = tl.arange(0, BK)[:, None], tl.arange(0, PART)[None, :]
    solve_ptr += head * K * K
    if PART == BK:
        solve = tl.load(solve_ptr + row * K + columns, mask=(row < K) & (columns < K), other=0.0)
    mean = tl.zeros([BK], tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + head * K + tl.arange(0, BK), mask=tl.arange(0, BK) < K, other=0.0)
    for first in range(low, high, BLOCK_N):
        k, index, real = _keys(keys, mask_ptr, head, first, high, N, TILE)
        x = tl.where(real[:, None], _dot(k, sketch) - mean[None, :], 0.0)
        score = tl.zeros([BLOCK_N], tl.float32)
        for part in tl.range(0, K, PART):
            if PART < BK:
                solve = tl.load(solve_ptr + row * K + part + columns, mask=(row < K) & (part + columns < K), other=0.0)
            y = _dot32(x, solve)
            score += tl.sum(y * y, 1)
        tl.store(scores_ptr + head * N + index, score, mask=index < high)


def _solve_matrix(grams: Tensor, means: Tensor, counts: Tensor, centre: bool) -> tuple[Tensor, Tensor]:
    """L^-T and the mean from the splits [B, Hkv, splits, ...], in float64, never NaN and without a host sync."""
    gram, mean = grams.double().sum(2), means.double()
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    middle = (mean * share[..., None]).sum(2)
    energy = middle.square().mean(-1)  # the ridge never falls below the rounding of x itself
    if centre:
        apart = mean - middle[..., None, :]
        gram = gram + (apart * counts.double()[..., None]).transpose(-1, -2) @ apart
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-12 * counts.sum(-1) * energy + 1e-30
    factor, info = torch.linalg.cholesky_ex(gram + ridge[..., None, None] * unit, check_errors=False)
    safe, _ = torch.linalg.cholesky_ex(gram + 100 * ridge[..., None, None] * unit, check_errors=False)
    factor = torch.where(info[..., None, None] == 0, factor, safe)
    solve = torch.linalg.solve_triangular(factor, unit.expand_as(gram), upper=False).transpose(-1, -2)
    return solve.to(torch.float32, memory_format=torch.contiguous_format), middle.float()


def sketched_leverage(
    keys: Tensor, sketch: Tensor | None, method: str = "cholesky", *, mask: Tensor | None = None, centre: bool = False
) -> Tensor:
    """`reference.sketched_leverage` by a Cholesky factor; keys have unit stride along D.

    Cost: two launches, and torch's on [B, Hkv, k, k]; no host sync. Raises: FastKVError for a sketch that does not fit.
    """
    if sketch is None or method not in ("cholesky", "srht"):  # the paper's ablation
        return reference.sketched_leverage(keys, sketch, method, mask=mask, centre=centre)
    (batch, heads, num, dim), size = keys.shape, sketch.shape[-1]
    check_head_dim("leverage_scores", dim)
    check_like("leverage_scores", (dim, None), sketch=sketch)
    check_like("leverage_scores", (batch, heads, num), mask=mask)
    width = pow2(dim, 16)
    most = MAX_SKETCH if width * keys.dtype.itemsize <= 512 else MAX_SKETCH // 2  # beside keys in shared memory
    if size > most or sketch.dtype != torch.float32:
        raise FastKVError(
            f"leverage_scores: the sketch must be fp32 with at most {most} columns for {keys.dtype} of size {dim}, got "
            f"{sketch.dtype} with {size}; use reference.leverage_scores"
        )
    assert keys.stride(-1) == 1
    scores = torch.empty(batch, heads, num, dtype=torch.float32, device=keys.device)
    if not scores.numel():
        return scores
    tile, warps = 16 if on_hip() and width == 256 else 32, WARPS_HIP if on_hip() else WARPS  # AMD spills with 32 of 256
    rows = cdiv(max(LEAST_ROWS, cdiv(num, MAX_SPLITS)), tile) * tile
    splits = cdiv(num, rows)
    grams = torch.empty(batch, heads, splits, size, size, dtype=torch.float32, device=keys.device)
    means = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=keys.device)
    counts = torch.empty(batch, heads, splits, dtype=torch.int32, device=keys.device)
    inputs = View.of(keys), None if mask is None else mask.view(torch.uint8), sketch.to(keys.dtype)
    sizes = Tile(heads, dim, width, size, pow2(size, 16), tile)
    flags, grid = {"TILE": sizes, "num_warps": warps, "num_stages": stages(2)}, (splits, batch * heads)
    # A whole Gram matrix of 128 columns spills on sm_80 and AMD, and is compiled to nothing for sm_100.
    part = sizes.BK if sizes.BK <= 64 else 32
    parts = (*grid, (sizes.BK // part) ** 2)
    _gram_kernel[parts](*inputs, grams, means, counts, num, rows, PART=part, CENTRE=centre, **flags)
    solve, middle = _solve_matrix(grams, means, counts, centre)
    # Three terms of each column fit in shared memory beside the sketch, also on sm_80, and in registers on AMD.
    part = min(sizes.BK, 32 if keys.dtype == torch.float32 or (on_hip() and sizes.BK > 64) else 64)
    _norm_kernel[grid](*inputs, solve, middle if centre else None, scores, num, rows, PART=part, **flags)
    return scores
