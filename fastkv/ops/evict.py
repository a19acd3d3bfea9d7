"""Decoding: shrink every head to its budget."""

from __future__ import annotations

from torch import Tensor

from .. import cpu, reference
from ..backend import uses_kernels
from ..reference import Moments
from ._register import CHANGED_SLOTS, CHANGED_STATISTICS, flat, nothing, operator, run


@operator(
    f"evict({CHANGED_SLOTS}, Tensor seen, {CHANGED_STATISTICS}, Tensor scores, int tokens, int sinks, int recent, "
    "Tensor? starts, int? drop, Tensor(f!)? tickets, str backend) -> ()",
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
    spread: Tensor | None,
    scores: Tensor,
    tokens: int,
    sinks: int,
    recent: int,
    starts: Tensor | None,
    drop: int | None,
    tickets: Tensor | None,
    backend: str,
) -> None:
    moments = Moments(count, key_mean, value_mean, cross, slope, spread)
    if not uses_kernels(backend, keys.device):
        slots = (keys, values, positions, lengths)
        if starts is None and backend == "auto" and cpu.evicts(*slots):
            cpu.evict(*slots, seen, moments, scores, tokens, sinks, recent)
            return
        reference.evict(*slots, seen, moments, scores, tokens, sinks, recent, starts=starts, drop=drop)
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
        spread=spread,
        scores=scores,
        tokens=tokens,
        sinks=sinks,
        recent=recent,
        order=moments.order,
        tickets=tickets,
        starts=starts,
        drop=drop,
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
    starts: Tensor | None = None,
    drop: int | None = None,
    scratch: list[Tensor] | None = None,
    backend: str = "auto",
) -> None:
    """`reference.evict`. Kernel: two launches for at most 64 victims a head; refreshes `moments.slope`."""
    tickets = scratch[3] if scratch else None
    slots = (keys, values, positions, lengths)
    rule = (scores, tokens, sinks, recent, starts, drop)
    run(_evict, *slots, seen, *flat(moments), *rule, tickets, backend)
