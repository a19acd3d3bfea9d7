"""Reading a prompt: attention of a block, selection, compaction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..backend import uses_kernels
from ..reference import Moments, Selection
from ..reference.moments import compute_dtype
from ._register import CHANGED_SLOTS, CHANGED_STATISTICS, STATISTICS, check_mass, flat, nothing, operator, run


def _block_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@operator(
    "prefill_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor new_keys, Tensor new_values, "
    f"Tensor new_valid, {STATISTICS}, float scale, float? softcap, int? order, str mass, str backend) -> "
    "(Tensor, Tensor)",
    _block_outputs,
)
def _prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_valid: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    spread: Tensor | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    mass: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    moments = Moments(count, key_mean, value_mean, cross, None, spread)
    tensors = (q, keys, values, lengths, new_keys, new_values, new_valid)
    if cpu.serves(backend, q, values, softcap):
        return cpu.prefill_attention(*tensors, moments, scale, order=order, mass=mass)
    if not uses_kernels(backend, q.device):
        return reference.prefill_attention(*tensors, moments, scale, softcap, order=order, mass=mass)
    from ..kernels.prefill_attention import prefill_attention

    out, lse = prefill_attention(
        q=q,
        keys=keys,
        values=values,
        lengths=lengths,
        new_keys=new_keys,
        new_values=new_values,
        new_valid=new_valid,
        moments=moments,
        scale=scale,
        softcap=softcap,
        order=order,
        slope=slope,
        spread=spread if mass == "cosh" and order is not None else None,
    )
    return out, lse


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_valid: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    mass: str = "jensen",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`reference.prefill_attention`; mass: see `reference.moment_estimate`. Kernel: one launch."""
    if moments is None or moments.order is None:
        moments, order = Moments(torch.zeros_like(lengths, dtype=torch.int64)), None
    tensors = (q, keys, values, lengths, new_keys, new_values, new_valid)
    check_mass(mass, moments)
    return run(_prefill_attention, *tensors, *flat(moments), scale, softcap, order, mass, backend)


def _selection_outputs(scores: Tensor, positions: Tensor, valid: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(valid), valid.new_empty(valid.shape[:2], dtype=torch.int64)


@operator(
    "select(Tensor scores, Tensor positions, Tensor valid, Tensor protected, int tokens, str backend) -> "
    "(Tensor, Tensor)",
    _selection_outputs,
)
def _select(
    scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int, backend: str
) -> tuple[Tensor, Tensor]:
    if not uses_kernels(backend, scores.device):
        chosen = reference.select(scores, positions, valid, protected, tokens)
        return chosen.kept, chosen.counts
    from ..kernels.select import select

    return select(scores=scores, positions=positions, valid=valid, protected=protected, tokens=tokens)


def select(
    scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int, *, backend: str = "auto"
) -> Selection:
    """`reference.select`. Kernel: one launch, bisection instead of sorting."""
    return Selection(*run(_select, scores, positions, valid, protected, tokens, backend))


@operator(
    f"compact({CHANGED_SLOTS}, {CHANGED_STATISTICS}, Tensor new_keys, Tensor new_values, Tensor new_positions, "
    "Tensor valid, Tensor kept, Tensor counts, str backend) -> ()",
    nothing,
)
def _compact(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    spread: Tensor | None,
    new_keys: Tensor,
    new_values: Tensor,
    new_positions: Tensor,
    valid: Tensor,
    kept: Tensor,
    counts: Tensor,
    backend: str,
) -> None:
    moments = Moments(count, key_mean, value_mean, cross, slope, spread)
    slots, block = (keys, values, positions, lengths), (new_keys, new_values, new_positions)
    if not uses_kernels(backend, keys.device):
        reference.compact(*slots, moments, *block, valid, Selection(kept, counts))
        return
    from ..kernels.compact import compact

    compact(
        keys=keys,
        values=values,
        positions=positions,
        lengths=lengths,
        moments=moments,
        new_keys=new_keys,
        new_values=new_values,
        new_positions=new_positions,
        valid=valid,
        kept=kept,
        slope=slope,
    )


def compact(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    moments: Moments,
    new_keys: Tensor,
    new_values: Tensor,
    new_positions: Tensor,
    valid: Tensor,
    selection: Selection,
    *,
    backend: str = "auto",
) -> None:
    """`reference.compact`. Kernel: survivors stay in place, only holes are filled; refreshes `moments.slope`."""
    slots, block = (keys, values, positions, lengths), (new_keys, new_values, new_positions)
    run(_compact, *slots, *flat(moments), *block, valid, *selection, backend)
