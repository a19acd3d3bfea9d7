"""Decoding where some tokens keep their key but no value (VECTOR)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import uses_kernels
from ..reference import Moments, vector
from ._register import CHANGED_SLOTS, STATISTICS, flat, operator, run
from .decode import as_scratch, as_workspace, decode_outputs

APPROX = "Tensor approx_keys, Tensor approx_positions, Tensor approx_lengths, Tensor weight, Tensor cos, Tensor sin"
REST = (
    f"{APPROX}, {STATISTICS}, float scale, float? softcap, int? order, Tensor(e!)? attention, "
    "Tensor(h!)? approx_attention, Tensor? starts, int? width, Tensor? approx_starts, int? approx_width, "
    "Tensor(f!)[] scratch, str backend"
)


def vector_workspace(
    q: Tensor,
    keys: Tensor,
    approx_keys: Tensor,
    *,
    attention: bool,
    starts: Tensor | None = None,
    width: int | None = None,
    approx_starts: Tensor | None = None,
    approx_width: int | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """`workspace` for `vector_decode_step`.

    Args: q [B, Hq, T, D]; keys [B, Hkv, C, D] or slab; approx_keys [B, Hkv, A, D] or slab; the rest as in `workspace`.
    """
    if not uses_kernels(backend, q.device):
        return []
    from ..kernels import Workspace, addressed

    batch, heads, slots, dim = addressed("vector_workspace", keys, starts).shape
    most = max(
        slots if width is None else width,
        approx_keys.shape[-2] if approx_width is None else approx_width,
    )
    pool = (keys.numel() + approx_keys.numel()) // dim
    size = (batch, heads, q.shape[1] // heads, most, dim, q.device)
    return as_scratch(Workspace.allocate(*size, attention=attention, sets=2, pool=pool))


@operator(
    f"vector_decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, {REST}) "
    "-> (Tensor, Tensor, Tensor)",
    decode_outputs,
)
def _vector_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    spread: Tensor | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    attention: Tensor | None,
    approx_attention: Tensor | None,
    starts: Tensor | None,
    width: int | None,
    approx_starts: Tensor | None,
    approx_width: int | None,
    scratch: list[Tensor],
    backend: str,
    append: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options: Any = dict(order=order, attention=attention, approx_attention=approx_attention)
    options |= dict(starts=starts, width=width, approx_starts=approx_starts, approx_width=approx_width)
    if not uses_kernels(backend, q.device):
        approx = (approx_keys, approx_positions, approx_lengths, weight, cos, sin)
        estimate = (Moments(count, key_mean, value_mean, cross), scale, softcap)
        if append is None:
            return vector.vector_decode_attention(q, keys, values, lengths, *approx, *estimate, **options)
        k, v, positions, seen = append
        slots = (keys, values, positions, lengths)
        return vector.vector_decode_step(q, k, v, *slots, seen, *approx, *estimate, **options)
    from ..kernels.vector_decode import vector_decode_attention

    return vector_decode_attention(
        q=q,
        keys=keys,
        values=values,
        lengths=lengths,
        approx_keys=approx_keys,
        approx_positions=approx_positions,
        approx_lengths=approx_lengths,
        weight=weight,
        cos=cos,
        sin=sin,
        count=count,
        key_mean=key_mean,
        value_mean=value_mean,
        matrix=cross if slope is None else slope,
        scale=scale,
        softcap=softcap,
        workspace=as_workspace(scratch),
        append=append,
        **options,
    )


@operator(
    f"vector_decode_step(Tensor q, Tensor k, Tensor v, {CHANGED_SLOTS}, Tensor(g!) seen, {REST}) "
    "-> (Tensor, Tensor, Tensor)",
    decode_outputs,
)
def _vector_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _vector_decode_attention(q, keys, values, lengths, *rest, append=(k, v, positions, seen))


def vector_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    approx_attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    approx_starts: Tensor | None = None,
    approx_width: int | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.vector_decode_attention`. Kernel: one launch, one product with the weight per query."""
    if moments is None or moments.order is None:
        moments, order = Moments(torch.zeros_like(lengths, dtype=torch.int64)), None
    elif order is not None:
        order = min(order, moments.order)
    return run(
        _vector_decode_attention,
        *(q, keys, values, lengths, approx_keys, approx_positions, approx_lengths, weight, cos, sin, *flat(moments)),
        *(scale, softcap, order, attention, approx_attention, starts, width, approx_starts, approx_width),
        *(scratch or [], backend),
    )


def vector_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    moments: Moments,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    approx_attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    approx_starts: Tensor | None = None,
    approx_width: int | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.vector_decode_step`. Kernel: one launch; `scratch` from `vector_workspace` avoids an allocation."""
    return run(
        _vector_decode_step,
        *(q, k, v, keys, values, positions, lengths, seen),
        *(approx_keys, approx_positions, approx_lengths, weight, cos, sin, *flat(moments)),
        *(scale, softcap, order, attention, approx_attention, starts, width, approx_starts, approx_width),
        *(scratch or [], backend),
    )
