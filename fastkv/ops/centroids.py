"""Centroids of the evicted tokens: what they say about the queries of a prompt, and how tokens join them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..backend import uses_kernels
from ..reference import Centroids
from ..reference.moments import compute_dtype
from ._register import nothing, operator, run


def _outputs(q: Tensor, count: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(compute_dtype(q), keys.dtype)
    return q.new_empty(*q.shape[:3], values.shape[-1], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@operator(
    "centroid_attention(Tensor q, Tensor count, Tensor keys, Tensor values, Tensor spread, float scale, "
    "float? softcap, str backend) -> (Tensor, Tensor)",
    _outputs,
)
def _centroid_attention(
    q: Tensor,
    count: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    centroids = Centroids(count, keys, values, spread)
    if cpu.serves(backend, q, values, softcap):
        return cpu.centroid_estimate(q, centroids, scale)
    if not uses_kernels(backend, q.device):
        return reference.centroid_estimate(q, centroids, scale, softcap)
    from ..kernels.centroids import centroid_attention

    return centroid_attention(q=q, centroids=centroids, scale=scale, softcap=softcap)


def centroid_attention(
    q: Tensor, centroids: Centroids, scale: float, softcap: float | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`reference.centroid_estimate` with the cosh mass: out [B, Hq, T, Dv] and lse [B, Hq, T] fp32, for
    `reference.merge_partials`. Kernel: one launch, reads the centroids once per 64 rows, logits stay in registers.
    """
    return run(_centroid_attention, q, *centroids.tensors(), scale, softcap, backend)


@operator(
    "centroids_add(Tensor(a!) count, Tensor(b!) keys, Tensor(c!) values, Tensor(d!) spread, Tensor new_keys, "
    "Tensor new_values, Tensor? mask, str backend) -> ()",
    nothing,
)
def _centroids_add(
    count: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    mask: Tensor | None,
    backend: str,
) -> None:
    centroids = Centroids(count, keys, values, spread)
    centroids.copy_(centroids.add(new_keys, new_values, mask))


def centroids_add(
    centroids: Centroids, keys: Tensor, values: Tensor, mask: Tensor | None = None, *, backend: str = "auto"
) -> None:
    """`Centroids.add`, in place: static shapes, no host sync. The reference's tensor code on every backend.

    Args: keys [B, Hkv, N, Dk]; values [B, Hkv, N, Dv]; mask [B, Hkv, N] bool, true for pairs to add, or None for all.
    """
    run(_centroids_add, *centroids.tensors(), keys, values, mask, backend)
