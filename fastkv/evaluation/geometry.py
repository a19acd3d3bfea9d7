"""Shape of the keys of one layer, seen as the policies see it: lengths, directions, distances, leverage, dimension.

Functions of a layer take one sequence, [Hkv, N, D] in order of position, and answer for each KV head in float64.

Intrinsic dimension, of one head, says how many coordinates its cloud of keys needs (ManifoldKV, Appendix E). PCA counts
the directions of the flat space that holds the cloud. The two others look at nearest neighbours only, so they see the
dimension of a curved sheet inside that space. Everything repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference

MOST_POINTS = 2000  # all pairs of so many take 32 MB; the estimates then vary by about 2 %
NEIGHBOURS = range(10, 21)
VARIANCE, DISCARD = 0.95, 0.1  # as in the paper
ROUNDING = 1e-12  # of the variance; a sum of eigenvalues is not exact
SHORTEST = 256  # tokens of the shortest prefix that dilution looks at
WINDOW = 4096  # of WindowedManifoldKV
TOP = 0.1  # share of the tokens whose leverage is added up


@dataclass(frozen=True)
class Norms:
    """Of the rows of each head, all [Hkv]: mean norm, standard deviation over mean, largest over mean."""

    norm: Tensor
    spread: Tensor
    peak: Tensor


@dataclass(frozen=True)
class Dilution:
    """How much a centroid still says as the context grows.

    Attributes:
        pull: [P, Hkv], |mean of keys| / mean |key|: 1 if all keys are equal, 0 if they cancel.
        spread: [P, Hkv], standard deviation over mean of the distances |k_i - centroid|: what ManifoldKV ranks by. Near
            0 all tokens are equally far, and the ranking is noise.
    """

    pull: Tensor
    spread: Tensor


def norms(rows: Tensor) -> Norms:
    """Norms of keys or values [Hkv, N, D]; zeros where all rows are zero."""
    length = rows.double().norm(dim=-1)
    mean = length.mean(-1)
    return Norms(mean, _variation(length), length.amax(-1) / _positive(mean))


def anchor_similarity(keys: Tensor, anchor: str = "mean") -> Tensor:
    """Mean cosine of the keys [Hkv, N, D] with their anchor, [Hkv] (KeyDiff, Sec. 3.2).

    anchor: "mean" of the keys, or "normalized_mean", that of their directions (Eq. 8), for which the result is the
    length of that mean, and its square the mean cosine between two keys.
    """
    return -reference.keydiff_scores(keys.double()[None], anchor)[0].mean(-1)


def prefix_lengths(num: int) -> list[int]:
    """256, 512, ... and `num` itself."""
    lengths = []
    length = SHORTEST
    while length < num:
        lengths.append(length)
        length *= 2
    return [*lengths, num]


def window_length(num: int) -> int:
    """Tokens of a window over a context of `num`: the paper's 4096, or a quarter of a shorter context."""
    return max(1, min(WINDOW, num // 4))


def dilution(keys: Tensor, lengths: list[int], window: int | None = None) -> Dilution:
    """Pull and spread of the first n keys of [Hkv, N, D], for each n in `lengths` (ManifoldKV, Sec. 3.2 and App. F).

    The centroid is the mean of the n keys or, given a window, of each `window` of them; the pull is then the mean over
    tokens of the pull of their window, and distances of all windows are compared with each other, as they are ranked.
    """
    keys = keys.double()
    pull, spread = [], []
    for length in lengths:
        prefix = keys[:, :length]
        windows = prefix.split(window or length, dim=1)
        centroids = torch.stack([part.mean(1).norm(dim=-1) * part.shape[1] / length for part in windows]).sum(0)
        pull.append(centroids / _positive(prefix.norm(dim=-1).mean(-1)))
        spread.append(_variation(reference.manifold_scores(prefix[None], window)[0]))
    return Dilution(torch.stack(pull), torch.stack(spread))


def effective_rank(rows: Tensor) -> Tensor:
    """exp of the entropy of the singular values of [Hkv, N, D], scaled to sum to 1; [Hkv] (Roy and Vetterli 2007).

    Between 1 and D; 0 if all rows are zero. Rows are not centred, as in the leverage of Compactor.
    """
    sizes = torch.linalg.svdvals(rows.double())
    total = sizes.sum(-1, keepdim=True)
    return torch.special.entr(sizes / _positive(total)).sum(-1).exp() * (total[:, 0] > 0)


def leverage_share(pre_rope_keys: Tensor, top: float = TOP) -> Tensor:
    """Share of all leverage that the `top` share of the tokens of [Hkv, N, D] holds, [Hkv] (Compactor, Sec. 3.1).

    Exact leverage, no sketch. If every token had the same, the result would be `top`; 0 if all keys are zero.
    """
    scores = reference.leverage_scores(pre_rope_keys.double()[None], method="exact")[0]
    largest = scores.topk(max(1, round(top * scores.shape[-1]))).values.sum(-1)
    return largest / _positive(scores.sum(-1))


@dataclass(frozen=True)
class Dimensions:
    """The three estimates for one cloud: components of PCA, Two-NN, Levina-Bickel."""

    pca: int
    two_nn: float
    mle: float


def dimensions(points: Tensor) -> Dimensions:
    """All three estimates of `points` [N, D], any float dtype; 0 for equal points, and for neighbours fewer than three.

    For neighbours, repeated points count once, and at most `MOST_POINTS` are used.
    """
    nearest, dim = nearest_distances(points, max(NEIGHBOURS)), points.shape[1]
    return Dimensions(pca(points), two_nn(nearest, dim), levina_bickel(nearest, dim))


def pca(points: Tensor, variance: float = VARIANCE) -> int:
    """Principal components that explain a share of the variance (ManifoldKV, Eq. 15); 0 if all points are equal.

    min {k : sum of the k largest eigenvalues of the covariance >= variance * sum of all}. Unlike the other estimates
    this takes every point, as often as it occurs.
    """
    if len(points) == 0:
        return 0
    wide = points.double()
    wide = wide - wide[0]  # equal points become exact zeros, which subtracting a rounded mean would not give
    wide = wide - wide.mean(0)
    eigenvalues = torch.linalg.eigvalsh(wide.T @ wide).flip(0).clamp(min=0)
    total = eigenvalues.sum()
    missing = eigenvalues.cumsum(0) < (variance - ROUNDING) * total
    return int(missing.sum()) + int(total > 0)


def two_nn(nearest: Tensor, dim: int, discard: float = DISCARD) -> float:
    """Dimension from the two nearest neighbours of each point (Facco et al. 2017; ManifoldKV, Eq. 16), at most `dim`.

    Where density hardly changes between them, log(mu_i) = log(r2_i / r1_i) is exponential with rate d. The largest
    `discard` of the n ratios, which break that first, count only as "at least this large", so that with m = n - discard
    n ratios in ascending order the maximum likelihood is

        d = m / (sum_{i <= m} log(mu_i) + (n - m) log(mu_m)),    which for discard = 0 is Eq. 16.

    Args: nearest: [n, >= 2] from `nearest_distances`.
    """
    if nearest.shape[1] < 2:
        return 0.0
    ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
    num = len(ratios)
    kept = num - int(discard * num)
    total = ratios[:kept].sum() + (num - kept) * ratios[kept - 1]
    return min(float(dim), float(kept / total))  # equally far neighbours, as on a grid, read as infinitely many


def levina_bickel(nearest: Tensor, dim: int, counts: Sequence[int] = NEIGHBOURS) -> float:
    """Maximum likelihood dimension from k neighbours (Levina and Bickel 2004; ManifoldKV, Eq. 17), at most `dim`.

    With T_j the distance to the j-th neighbour, the mean of log(T_k / T_j) over the j < k and over all points estimates
    1/d: inverses are averaged, not estimates, as MacKay and Ghahramani (2005) advise. The result is the mean over k.

    Args: nearest: [n, K] from `nearest_distances`; counts: every k, at least 2; at most K of them count.
    """
    if nearest.shape[1] < 2:
        return 0.0
    logs = nearest.log()
    usable = [min(count, nearest.shape[1]) for count in counts]
    inverses = [(logs[:, count - 1 : count] - logs[:, : count - 1]).mean() for count in usable]
    return min(float(dim), float((1 / torch.stack(inverses)).mean()))


def nearest_distances(points: Tensor, count: int) -> Tensor:
    """Distances of different points [N, D] to their nearest others, ascending, [n, min(count, n - 1)] fp64."""
    sample = _different(points)
    if len(sample) > MOST_POINTS:
        chosen = torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))[:MOST_POINTS]
        sample = sample[chosen.to(sample.device)]
    # Differences are squared one by one: the product form would cancel for close neighbours.
    pairs = torch.cdist(sample.double(), sample.double(), compute_mode="donot_use_mm_for_euclid_dist")
    nearest = pairs.topk(min(count + 1, len(sample)), largest=False).values[:, 1:]  # the first is the point itself
    return nearest.clamp(min=torch.finfo(torch.float64).tiny)


def _different(points: Tensor) -> Tensor:
    """The points without repetitions, in order of their first occurrence."""
    if len(points) == 0:
        return points
    rows, label = torch.unique(points, dim=0, return_inverse=True)
    place = torch.arange(len(points), device=points.device)
    first = torch.full((len(rows),), len(points), device=points.device).scatter_reduce(0, label, place, "amin")
    return points[first.sort().values]


def _variation(sizes: Tensor) -> Tensor:
    """Standard deviation over mean along the last dimension; 0 where the mean is 0."""
    return sizes.std(-1, correction=0) / _positive(sizes.mean(-1))


def _positive(number: Tensor) -> Tensor:
    """The number, or the smallest positive one, to divide a zero by."""
    return number.clamp(min=torch.finfo(number.dtype).tiny)
