"""Attention in plain torch where the evicted set has the cosh mass or consists of centroids.

`reference.decode_attention` and `reference.prefill_attention` mix with the moments of MomentKV. Here the retained
tokens are theirs, and the other estimates of the reference enter by `merge_partials`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference import Centroids, Moments, unpack
from ..reference.attention import add_to_slab, softcapped
from ..reference.moments import compute_dtype


def _estimate(
    q: Tensor,
    moments: Moments,
    centroids: Centroids | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    mass: str,
) -> tuple[Tensor, Tensor]:
    """Value [B, Hq, T, Dv] and log mass [B, Hq, T] of the evicted set for q [B, Hq, T, D]."""
    if centroids is not None:
        return reference.centroid_estimate(q, centroids, scale, softcap)
    assert order is not None
    return reference.moment_estimate(q, moments, scale, softcap, order, mass)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Moments,
    centroids: Centroids | None,
    scale: float,
    softcap: float | None,
    *,
    order: int | None,
    mass: str,
    attention: Tensor | None,
    starts: Tensor | None,
    width: int | None,
    finite_slots: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention` with any estimate; arguments and results as there."""
    where: Any = dict(starts=starts, width=width, finite_slots=finite_slots)
    if centroids is None and (mass == "jensen" or order is None):
        return reference.decode_attention(
            q, keys, values, lengths, moments, scale, softcap, order=order, attention=attention, **where
        )
    wide = q.to(compute_dtype(q))
    retained, lse, _ = reference.decode_attention(wide, keys, values, lengths, None, scale, softcap, **where)
    value, log_mass = (t[:, :, 0] for t in _estimate(q[:, :, None], moments, centroids, scale, softcap, order, mass))
    out, total = reference.merge_partials(retained, lse, value, log_mass)
    if attention is not None:
        if starts is not None:
            keys = unpack(keys, starts, keys.shape[1] if width is None else width)
        held = torch.arange(keys.shape[2], device=q.device) < lengths[..., None]
        logits = (wide.unflatten(1, (keys.shape[1], -1)) * scale) @ keys.to(wide.dtype).transpose(-1, -2)
        weights = torch.exp(softcapped(logits, softcap) - total.unflatten(1, (keys.shape[1], -1))[..., None])
        received = torch.where(held[:, :, None], weights, 0).mean(2).to(attention.dtype)
        if starts is None:
            attention.add_(received)
        else:
            add_to_slab(attention, starts, received)
    return out.to(q.dtype), lse, log_mass


def prefill_attention(
    q: Tensor,
    *rest: Any,
    moments: Moments,
    scale: float,
    softcap: float | None,
    order: int | None,
    mass: str,
) -> tuple[Tensor, Tensor]:
    """`reference.prefill_attention` with either mass; arguments and results as there."""
    if mass == "jensen" or order is None:
        return reference.prefill_attention(q, *rest, moments, scale, softcap, order=order)
    retained, lse = reference.prefill_attention(q.to(compute_dtype(q)), *rest, None, scale, softcap)
    value, log_mass = _estimate(q, moments, None, scale, softcap, order, mass)
    out, total = reference.merge_partials(retained, lse, value, log_mass)
    return out.to(q.dtype), total
