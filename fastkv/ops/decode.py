"""Decoding: append, attend and evict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..backend import uses_kernels
from ..reference import Moments
from ..reference.moments import compute_dtype
from ._register import CHANGED_SLOTS, CHANGED_STATISTICS, STATISTICS, flat, nothing, operator


def _matrix(cross: Tensor | None, slope: Tensor | None) -> Tensor | None:
    """What kernels read of the cross moment: its half-precision copy if there is one."""
    return cross if slope is None else slope


def workspace(q: Tensor, keys: Tensor, *, attention: bool, backend: str = "auto") -> list[Tensor]:
    """Scratch for `decode_step`, reusable by all layers of one shape; empty where the reference runs.

    Args: q [B, Hq, T, D]; keys [B, Hkv, C, D]; attention: whether steps add up the attention of each slot.
    """
    if not uses_kernels(backend, q.device):
        return []
    from ..kernels._workspace import Workspace

    batch, heads, slots, dim = keys.shape
    made = Workspace.allocate(batch, heads, q.shape[1] // heads, slots, dim, q.device, attention=attention)
    return [t for t in (made.accs, made.tops, made.totals, made.tickets, made.logits) if t is not None]


def decode_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Fake results of a decode operator: out [B, Hq, D] and two log-sum-exps [B, Hq]."""
    lse = q.new_empty(q.shape[:2], dtype=compute_dtype(q))
    return torch.empty_like(q), lse, torch.empty_like(lse)


@operator(
    f"decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, {STATISTICS}, float scale, "
    "float? softcap, int? order, Tensor(e!)? attention, Tensor(f!)[] scratch, str backend) -> (Tensor, Tensor, Tensor)",
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
    scale: float,
    softcap: float | None,
    order: int | None,
    attention: Tensor | None,
    scratch: list[Tensor],
    backend: str,
    append: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not uses_kernels(backend, q.device):
        estimate = (Moments(count, key_mean, value_mean, cross), scale, softcap)
        if append is None:
            return reference.decode_attention(q, keys, values, lengths, *estimate, order=order, attention=attention)
        k, v, positions, seen = append
        slots = (keys, values, positions, lengths)
        return reference.decode_step(q, k, v, *slots, seen, *estimate, order=order, attention=attention)
    from ..kernels._workspace import Workspace
    from ..kernels.decode_attention import decode_attention

    room = None
    if scratch:
        accs, tops, totals, tickets, *logits = scratch
        room = Workspace(accs, tops, totals, logits[0] if logits else None, tickets)
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
        attention=attention,
        workspace=room,
        append=append,
    )


@operator(
    f"decode_step(Tensor q, Tensor k, Tensor v, {CHANGED_SLOTS}, Tensor(g!) seen, {STATISTICS}, float scale, "
    "float? softcap, int? order, Tensor(e!)? attention, Tensor(f!)[] scratch, str backend) -> (Tensor, Tensor, Tensor)",
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
    attention: Tensor | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention`. Kernel: one launch. `scratch` from `workspace` avoids an allocation."""
    if moments is None or moments.order is None:
        moments, order = Moments(torch.zeros_like(lengths, dtype=torch.int64)), None
    elif order is not None:
        order = min(order, moments.order)
    return torch.ops.fastkv.decode_attention(
        q, keys, values, lengths, *flat(moments), scale, softcap, order, attention, scratch or [], backend
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
    attention: Tensor | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step`. Kernel: one launch, append included; no allocation but the results."""
    return torch.ops.fastkv.decode_step(
        q,
        k,
        v,
        keys,
        values,
        positions,
        lengths,
        seen,
        *flat(moments),
        scale,
        softcap,
        order,
        attention,
        scratch or [],
        backend,
    )


@operator(
    f"evict({CHANGED_SLOTS}, Tensor seen, {CHANGED_STATISTICS}, Tensor scores, int tokens, int sinks, int recent, "
    "Tensor(f!)? tickets, str backend) -> ()",
    nothing,
)
def _evict(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    scores: Tensor,
    tokens: int,
    sinks: int,
    recent: int,
    tickets: Tensor | None,
    backend: str,
) -> None:
    moments = Moments(count, key_mean, value_mean, cross, slope)
    if not uses_kernels(backend, keys.device):
        reference.evict(keys, values, positions, lengths, seen, moments, scores, tokens, sinks, recent)
        return
    from ..kernels.evict import evict

    evict(
        keys=keys,
        values=values,
        positions=positions,
        lengths=lengths,
        seen=seen,
        count=count,
        key_mean=key_mean,
        value_mean=value_mean,
        cross=cross,
        slope=slope,
        scores=scores,
        tokens=tokens,
        sinks=sinks,
        recent=recent,
        order=moments.order,
        tickets=tickets,
    )


def evict(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    moments: Moments,
    scores: Tensor,
    tokens: int,
    sinks: int,
    recent: int,
    *,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> None:
    """`reference.evict`. Kernel: two launches for at most 64 victims a head; refreshes `moments.slope`."""
    tickets = scratch[3] if scratch else None
    slots = (keys, values, positions, lengths)
    torch.ops.fastkv.evict(*slots, seen, *flat(moments), scores, tokens, sinks, recent, tickets, backend)
