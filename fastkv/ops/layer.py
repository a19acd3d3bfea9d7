"""What one layer does with its state: attend to a block or a token, shrink, remember what leaves.

Arguments are objects (`reference.LayerState`, `reference.Spec`); the function of the same name in `reference` says what
they mean. Which backend runs is the spec's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import corrections
from ..backend import implementation, resolve
from ..reference import Evicted, LayerState, Moments, Selection, Slots, Spec, compute_dtype
from .operator import Block, nothing, operator


def _step_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=compute_dtype(q))
    return torch.empty_like(q), lse, torch.empty_like(lse)


@operator(_step_outputs, changes=("state",))
def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step`. Kernel: one launch, append included; no allocation but the results."""
    return implementation("decode_step", spec.backend, q.device.type)(q, k, v, state, spec)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Evicted | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention`. Kernel: one launch."""
    counted = moments if isinstance(moments, Moments) else Moments(torch.zeros_like(lengths, dtype=torch.int64))
    parts = None if isinstance(moments, Moments) else moments
    seen = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    state = LayerState(Slots(keys, values, lengths, attention=attention), seen, counted, parts=parts)
    return decode_step(q, None, None, state, Spec(scale, softcap, corrections.reading(state, order), backend))


def _block_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@operator(_block_outputs)
def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor]:
    """`reference.prefill_attention`. Kernel: one launch, two with centroids."""
    return implementation("prefill_attention", spec.backend, q.device.type)(q, k, v, valid, state, spec)


def _masses(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@operator(_masses)
def evicted_mass(q: Tensor, state: LayerState, spec: Spec) -> Tensor:
    """`reference.evicted_mass`. Kernel: for centroids, one launch; their logits stay in registers."""
    return implementation("evicted_mass", spec.backend, q.device.type)(q, state, spec)


def _slot_outputs(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def made(there: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(positions, dtype=dtype) if there else positions.new_empty(0, dtype=dtype)

    attends = state.exact.attention is not None
    guard = made(state.parts is not None, torch.bool)
    return made(True, torch.bool), guard, made(attends, torch.float32), made(attends, torch.float32)


@operator(_slot_outputs, changes=("state",))
def slot_signals(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.slot_signals`. Kernel: one launch for heads of equally many slots."""
    return implementation("slot_signals", spec.backend, positions.device.type)(positions, state, spec)


@operator(nothing, changes=("state",))
def remember(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    valid: Tensor,
    kept: Tensor,
    most: int,
    state: LayerState,
    spec: Spec,
) -> None:
    """`reference.remember`: static shapes, no host sync. Kernel: for centroids, one launch while decoding."""
    function = implementation("remember", spec.backend, keys.device.type)
    function(keys, values, positions, valid, kept, most, state, spec)


@operator(nothing, changes=("state",))
def compact(valid: Tensor, selection: Selection, block: Block | None, state: LayerState, spec: Spec) -> None:
    """`reference.compact`. Kernel: survivors stay in place, only holes are filled; refreshes `moments.slope`."""
    implementation("compact", spec.backend, valid.device.type)(valid, selection, block, state, spec)


@operator(nothing, changes=("state",))
def evict(scores: Tensor, kept: Tensor | None, state: LayerState, spec: Spec) -> None:
    """`reference.evict`. Kernel: two launches for at most 64 victims a head; refreshes `moments.slope`."""
    implementation("evict", spec.backend, scores.device.type)(scores, kept, state, spec)


def workspace(num_heads: int, state: LayerState, spec: Spec) -> list[Tensor]:
    """Scratch for the decode steps of `num_heads` query heads, for `LayerState.scratch`; empty without kernels.

    Layers whose slots have the same sizes may share it.
    """
    if resolve(spec.backend, state.seen.device) != "triton":
        return []
    return implementation("workspace", "triton", state.seen.device.type)(num_heads, state, spec)
