"""Intrinsic dimension: how many coordinates a cloud of points needs, measured in three ways (ManifoldKV, Appendix E).

PCA counts the directions of the flat space that holds the cloud. The two others look at nearest neighbours only, so
they see the dimension of a curved sheet inside that space. Everything is in float64 and repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FastKVError, check_shape

MOST_POINTS = 2000  # all pairs of so many take 32 MB; the estimates then vary by about 2 %
NEIGHBOURS = range(10, 21)
ROUNDING = 1e-12  # of the variance; a sum of eigenvalues is not exact


@dataclass(frozen=True)
class Dimensions:
    """The three estimates for one cloud: components of PCA, Two-NN, Levina-Bickel."""

    pca: int
    two_nn: float
    mle: float


def dimensions(points: Tensor) -> Dimensions:
    """All three estimates of `points` [N, D] with their defaults; the neighbours are searched only once."""
    nearest = _nearest_distances(points, max(NEIGHBOURS))
    dim = points.shape[1]
    return Dimensions(pca_dimension(points), _two_nn(nearest, dim, 0.1), _levina_bickel(nearest, dim, NEIGHBOURS))


def pca_dimension(points: Tensor, variance: float = 0.95) -> int:
    """Principal components that explain a share of the variance (ManifoldKV, Eq. 15); 0 if all points are equal.

    min {k : sum of the k largest eigenvalues of the covariance >= variance * sum of all}. Unlike the other estimates
    this takes every point, as often as it occurs.

    Args: points [N, D], any float dtype; variance: in (0, 1].
    Raises: FastKVError for another shape or share.
    """
    _check("pca_dimension", points)
    if not 0 < variance <= 1:
        raise FastKVError(f"pca_dimension: variance must be a share in (0, 1], got {variance}; the paper uses 0.95")
    if len(points) == 0:
        return 0
    wide = points.double()
    wide = wide - wide[0]  # equal points become exact zeros, which subtracting a rounded mean would not give
    wide = wide - wide.mean(0)
    eigenvalues = torch.linalg.eigvalsh(wide.T @ wide).flip(0).clamp(min=0)
    total = eigenvalues.sum()
    missing = eigenvalues.cumsum(0) < (variance - ROUNDING) * total
    return int(missing.sum()) + int(total > 0)


def two_nn(points: Tensor, discard: float = 0.1) -> float:
    """Dimension from the two nearest neighbours of each point (Facco et al. 2017; ManifoldKV, Eq. 16).

    Where density hardly changes between them, log(mu_i) = log(r2_i / r1_i) is exponential with rate d. The largest
    `discard` of the n ratios, which break that first, count only as "at least this large", so that with m = n - discard
    n ratios in ascending order the maximum likelihood is

        d = m / (sum_{i <= m} log(mu_i) + (n - m) log(mu_m)),    which for discard = 0 is Eq. 16.

    Args: points [N, D], any float dtype; repeated points count once, and at most 2000 are used; discard: in [0, 1).
    Returns: a number in [0, D]; 0 for fewer than three different points.
    Raises: FastKVError for another shape or share.
    """
    _check("two_nn", points)
    if not 0 <= discard < 1:
        raise FastKVError(f"two_nn: discard must be a share in [0, 1), got {discard}; the paper uses 0.1")
    return _two_nn(_nearest_distances(points, 2), points.shape[1], discard)


def levina_bickel(points: Tensor, k: Sequence[int] = NEIGHBOURS) -> float:
    """Maximum likelihood dimension from the k nearest neighbours (Levina and Bickel 2004; ManifoldKV, Eq. 17).

    With T_j the distance to the j-th neighbour, the mean of log(T_k / T_j) over the j < k and over all points estimates
    1/d: inverses are averaged, not estimates, as MacKay and Ghahramani (2005) advise. The result is the mean over k.

    Args: points [N, D], any float dtype; repeated points count once, and at most 2000 are used; k: numbers of
        neighbours, each at least 2; those that the points do not have are replaced by as many as there are.
    Returns: a number in [0, D]; 0 for fewer than three different points.
    Raises: FastKVError for another shape, for no k, or for one below 2.
    """
    _check("levina_bickel", points)
    if len(k) == 0 or min(k) < 2:
        raise FastKVError(f"levina_bickel: k must hold numbers of at least 2, got {list(k)}; use 10 to 20")
    return _levina_bickel(_nearest_distances(points, max(k)), points.shape[1], k)


def _check(name: str, points: Tensor) -> None:
    check_shape(name, "points", points, (None, None))


def _nearest_distances(points: Tensor, count: int) -> Tensor:
    """Distances of different points to their nearest others, ascending, [n, min(count, n - 1)] fp64."""
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


def _two_nn(nearest: Tensor, dim: int, discard: float) -> float:
    """Two-NN of sorted neighbour distances [n, >= 2] of points in `dim` dimensions."""
    if nearest.shape[1] < 2:
        return 0.0
    ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
    num = len(ratios)
    kept = num - int(discard * num)
    total = ratios[:kept].sum() + (num - kept) * ratios[kept - 1]
    return _at_most(dim, kept / total)


def _levina_bickel(nearest: Tensor, dim: int, counts: Sequence[int]) -> float:
    """Levina-Bickel of sorted neighbour distances [n, K], K at least 2, of points in `dim` dimensions."""
    if nearest.shape[1] < 2:
        return 0.0
    logs = nearest.log()
    usable = [min(count, nearest.shape[1]) for count in counts]
    inverses = [(logs[:, count - 1 : count] - logs[:, : count - 1]).mean() for count in usable]
    return _at_most(dim, (1 / torch.stack(inverses)).mean())


def _at_most(dim: int, estimate: Tensor) -> float:
    """The estimate as a number. Points on a grid have equally far neighbours, which reads as infinitely many."""
    return min(float(dim), float(estimate))
