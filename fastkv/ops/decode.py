"""Decoding: append and attend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..backend import uses_kernels
from ..reference import Centroids, Moments
from ..reference.moments import compute_dtype
from ._register import (
    CHANGED_SLOTS,
    PARTS,
    STATISTICS,
    check_mass,
    flat,
    flat_parts,
    joined_parts,
    operator,
    run,
)

if TYPE_CHECKING:
    from ..kernels import Workspace


REST = (
    "float scale, float? softcap, int? order, str mass, Tensor(e!)? attention, Tensor? starts, int? width, "
    "Tensor(f!)[] scratch, str backend) -> (Tensor, Tensor, Tensor)"
)


def _matrix(cross: Tensor | None, slope: Tensor | None) -> Tensor | None:
    """What kernels read of the cross moment: its half-precision copy if there is one."""
    return cross if slope is None else slope


def workspace(
    q: Tensor,
    keys: Tensor,
    *,
    attention: bool,
    starts: Tensor | None = None,
    width: int | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Scratch for `decode_step`, reusable by all layers of one shape; empty where the reference runs.

    Args: q [B, Hq, T, D]; keys [B, Hkv, C, D] or slab [B, S, D]; attention: whether steps add up the attention of each
        slot; starts, width: as in `decode_step`, at the largest width there will be.
    """
    if not uses_kernels(backend, q.device):
        return []
    from ..kernels import Workspace, addressed

    batch, heads, slots, dim = addressed("workspace", keys, starts).shape
    size = (batch, heads, q.shape[1] // heads, slots if width is None else width, dim, q.device)
    return as_scratch(Workspace.allocate(*size, attention=attention, pool=keys.numel() // dim))


def as_scratch(room: Workspace) -> list[Tensor]:
    """A workspace as the operators take it."""
    return [t for t in (room.accs, room.tops, room.totals, room.tickets, room.logits) if t is not None]


def as_workspace(scratch: list[Tensor]) -> Workspace | None:
    """The inverse of `as_scratch`; None if there is none."""
    if not scratch:
        return None
    from ..kernels import Workspace

    accs, tops, totals, tickets, *logits = scratch
    return Workspace(accs, tops, totals, logits[0] if logits else None, tickets)


def decode_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Fake results of a decode operator: out [B, Hq, D] and two log-sum-exps [B, Hq]."""
    lse = q.new_empty(q.shape[:2], dtype=compute_dtype(q))
    return torch.empty_like(q), lse, torch.empty_like(lse)


@operator(
    f"decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, {STATISTICS}, {PARTS}, {REST}",
    decode_outputs,
)
def _decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    spread: Tensor | None,
    part_count: Tensor | None,
    part_keys: Tensor | None,
    part_values: Tensor | None,
    part_spread: Tensor | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    mass: str,
    attention: Tensor | None,
    starts: Tensor | None,
    width: int | None,
    scratch: list[Tensor],
    backend: str,
    append: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    centroids = joined_parts(part_count, part_keys, part_values, part_spread)
    if not uses_kernels(backend, q.device):
        estimate = (Moments(count, key_mean, value_mean, cross, None, spread), scale, softcap)
        options: Any = dict(order=order, mass=mass, centroids=centroids)
        options |= dict(attention=attention, starts=starts, width=width)
        if append is None:
            return reference.decode_attention(q, keys, values, lengths, *estimate, **options)
        k, v, positions, seen = append
        slots = (q, k, v, keys, values, positions, lengths, seen)
        if cpu.serves(backend, q, values, softcap):
            return cpu.decode_step(*slots, estimate[0], scale, **options)
        return reference.decode_step(*slots, *estimate, **options)
    from ..kernels.decode_attention import decode_attention

    return decode_attention(
        q=q,
        keys=keys,
        values=values,
        lengths=lengths,
        count=count,
        key_mean=key_mean,
        value_mean=value_mean,
        matrix=_matrix(cross, slope),
        scale=scale,
        softcap=softcap,
        order=order,
        spread=spread if mass == "cosh" else None,
        centroids=centroids,
        attention=attention,
        workspace=as_workspace(scratch),
        append=append,
        starts=starts,
        width=width,
    )


@operator(
    f"decode_step(Tensor q, Tensor k, Tensor v, {CHANGED_SLOTS}, Tensor(g!) seen, {STATISTICS}, {PARTS}, {REST}",
    decode_outputs,
)
def _decode_step(
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
    return _decode_attention(q, keys, values, lengths, *rest, append=(k, v, positions, seen))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    mass: str = "jensen",
    centroids: Centroids | None = None,
    attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention`. Kernel: one launch. `scratch` from `workspace` avoids an allocation.

    mass: of the moments, see `reference.moment_estimate`.  centroids: of the evicted tokens, in place of the moments,
    always with the cosh mass (a spread of zero is Jensen's).
    """
    if moments is None or moments.order is None:
        moments, order = Moments(torch.zeros_like(lengths, dtype=torch.int64)), None
    elif order is not None:
        order = min(order, moments.order)
    check_mass(mass, moments)
    return run(
        _decode_attention,
        q,
        keys,
        values,
        lengths,
        *flat(moments),
        *flat_parts(centroids),
        scale,
        softcap,
        order,
        mass,
        attention,
        starts,
        width,
        scratch or [],
        backend,
    )


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    moments: Moments,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    mass: str = "jensen",
    centroids: Centroids | None = None,
    attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step`. Kernel: one launch, append included; no allocation but the results.

    mass, centroids: as in `decode_attention`; the position of the token needs moments.count either way.
    """
    check_mass(mass, moments)
    return run(
        _decode_step,
        *(q, k, v, keys, values, positions, lengths, seen, *flat(moments)),
        *flat_parts(centroids),
        *(scale, softcap, order, mass, attention, starts, width, scratch or [], backend),
    )
