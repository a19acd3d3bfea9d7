"""What is known of the evicted tokens, for a few queries: `reference` in as few operators as its equations have terms.

A decode step asks this of every layer, and for so few numbers an operator costs its call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..reference import Centroids, Moments

Estimate = tuple[Tensor, Tensor]


def estimate(
    q: Tensor, moments: Moments | None, centroids: Centroids | None, scale: float, order: int | None, mass: str
) -> Estimate | None:
    """Value [B, Hq, T, Dv] and log mass [B, Hq, T] for q [B, Hq, T, D], without softcap; None if nothing is kept."""
    if centroids is not None:
        return centroid_estimate(q, centroids, scale)
    if moments is None or order is None or moments.key_mean is None:
        return None
    if mass != "jensen" or moments.key_mean.dtype != torch.float32:
        return reference.moment_estimate(q, moments, scale, None, order, mass)
    return jensen_estimate(q.float(), moments, scale, order)


def jensen_estimate(q: Tensor, moments: Moments, scale: float, order: int) -> Estimate:
    """`reference.moment_estimate` with the mass "jensen"."""
    assert moments.key_mean is not None and moments.value_mean is not None
    batch, num_heads, num, dim = q.shape
    rows = q.reshape(moments.count.numel(), -1, dim)
    count = moments.count.reshape(-1, 1, 1).to(q.dtype)
    log_mass = torch.baddbmm(count.log(), rows, moments.key_mean.reshape(-1, dim, 1), alpha=scale)  # -inf if none
    value = moments.value_mean.reshape(len(rows), 1, -1)
    if order >= 1:
        assert moments.cross is not None
        linear = torch.bmm(rows, moments.cross.reshape(len(rows), dim, -1))
        value = torch.addcmul(value, linear, scale / count.clamp(min=1))
    return value.expand(-1, rows.shape[1], -1).reshape(batch, num_heads, num, -1), log_mass.view(batch, num_heads, num)


def centroid_estimate(q: Tensor, centroids: Centroids, scale: float) -> Estimate:
    """`reference.centroid_estimate` with the mass "cosh"; log n + log cosh x = log(n / 2) + log(e^x + e^-x)."""
    if centroids.keys.dtype != torch.float32:
        return reference.centroid_estimate(q, centroids, scale)
    batch, num_heads, num, dim = q.shape
    keys, values = centroids.keys.flatten(0, 1), centroids.values.flatten(0, 1)
    count, spread = (part.reshape(len(keys), 1, -1) for part in (centroids.count, centroids.spread))
    rows = q.float().reshape(len(keys), -1, dim)
    logit = torch.baddbmm((count / 2).log(), rows, keys.transpose(1, 2), alpha=scale)  # -inf for an unused centroid
    sigma = (spread / count.clamp(min=1)).sqrt()
    deviation = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) * (abs(scale) * sigma)
    logit += torch.logaddexp(deviation, -deviation)
    log_mass = logit.logsumexp(-1, keepdim=True)
    weights = torch.exp(logit - log_mass.clamp(min=torch.finfo(logit.dtype).min))
    value = torch.bmm(weights, values)
    return value.view(batch, num_heads, num, -1), log_mass.view(batch, num_heads, num)
