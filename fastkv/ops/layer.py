"""What one layer does with its state: attend to a block or a token, shrink, remember what leaves.

Arguments are objects (`reference.LayerState`, `reference.Spec`). Operations have signature and docstring of the
reference's function of that name; which backend runs is the spec's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import corrections, reference
from ..backend import implementation, resolve
from ..reference import Evicted, LayerState, Moments, Slots, Spec, compute_dtype
from .operator import by_spec, nothing, operator


def _step_outputs(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=compute_dtype(q))
    return q.new_empty(*q.shape[:2], state.exact.value_dim), lse, torch.empty_like(lse)


# Kernel: one launch, append included; no allocation but the results.
decode_step = operator(_step_outputs, changes=("state",))(by_spec(reference.decode_step))


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
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention`. Kernel: one launch."""
    counted = moments if isinstance(moments, Moments) else Moments(torch.zeros_like(lengths, dtype=torch.int64))
    parts = None if isinstance(moments, Moments) else moments
    seen = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    slots = Slots(keys, values, lengths, attention=attention)
    state = LayerState(slots, seen, counted, parts=parts, sink_logits=sink_logits)
    return decode_step(q, None, None, state, Spec(scale, softcap, corrections.reading(state, order), backend))


def _block_outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse, torch.empty_like(lse)


# Kernel: one launch.
prefill_attention = operator(_block_outputs)(by_spec(reference.prefill_attention, changes=False))


def _slot_outputs(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def made(there: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(positions, dtype=dtype) if there else positions.new_empty(0, dtype=dtype)

    attends = state.exact.attention is not None
    guard = made(state.parts is not None, torch.bool)
    return made(True, torch.bool), guard, made(attends, torch.float32), made(attends, torch.float32)


# Kernel: one launch for heads of equally many slots.
slot_signals = operator(_slot_outputs, changes=("state",))(by_spec(reference.slot_signals))

# Static shapes, no host sync. Kernel: for centroids, one launch while decoding.
remember = operator(nothing, changes=("state",))(by_spec(reference.remember))

# Kernel: survivors stay in place, only holes are filled; refreshes `moments.slope`.
compact = operator(nothing, changes=("state",))(by_spec(reference.compact))

# Kernel: two launches for at most 64 victims a head; refreshes `moments.slope`.
evict = operator(nothing, changes=("state",))(by_spec(reference.evict))


def workspace(num_heads: int, state: LayerState, spec: Spec, room: list[Tensor] | None = None) -> list[Tensor]:
    """Scratch for the decode steps of `num_heads` query heads, for `LayerState.scratch`; empty without kernels.

    Layers whose slots have the same sizes may share it.
    Args: room: of `workspace_room`, to be viewed; None for new memory.
    """
    if resolve(spec.backend, state.seen.device) != "triton":
        return []
    return implementation("workspace", "triton", state.seen.device.type)(num_heads, state, spec, room)


def workspace_room(
    num_heads: int, state: LayerState, spec: Spec, most: int, device: torch.device
) -> list[tuple[int, torch.dtype]]:
    """Numbers and dtype of each tensor of the memory that `workspace` views for batches of up to `most` sequences, one
    at a time; nothing without kernels. All of it has to be zero at first.

    Args: state: a layer's, of any batch; it may be on "meta".  device: where it will be, which says how many programs
        run at once; where there is no GPU, as many as on an H100.
    """
    if resolve(spec.backend, device) != "triton":
        return []
    return implementation("workspace_room", "triton", device.type)(num_heads, state, spec, most, device)
