"""The backend "triton": the functions that `fastkv.ops` calls, with arguments and results as in `fastkv.reference`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..reference import Centroids, LayerState, Spec
from . import decode_attention as decode
from . import remember as joining
from . import slot_signals as slots
from . import vector_decode as vector
from ._launch import workspace, workspace_room
from .blocks import candidates, read_rows, write_rows
from .compact import compact
from .expected_attention import expected_attention, queries_ahead
from .key_scores import keydiff_scores, manifold_scores
from .leverage import sketched_leverage
from .moment_scores import moment_scores
from .most_attended import most_attended
from .noncausal_mass import noncausal_attention_mass
from .pooling import chunk_mean, pool_scores
from .prefill_attention import prefill_attention
from .select import select, select_each
from .window_scores import observed_attention
from .z_scores import needed_scores, z_scores

FOLLOWS_ROWS = ("compact", "decode_step", "prefill_attention", "remember", "slot_signals")


def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec, out: Tensor | None = None
) -> Any:
    """`reference.decode_step`, which does the step itself where values are recovered from the keys of all heads."""
    if state.recovery is not None and state.recovery.weight.shape[1] != state.recovery.weight.shape[2]:
        with state.gathered() as own:
            return reference.decode_step(q, k, v, own, spec)
    step = decode.decode_step if state.approx is None else vector.vector_decode_step
    return step(q, k, v, state, spec, out)


def slot_signals(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.slot_signals`."""
    equal = state.approx is None and (state.exact.starts is None or state.exact.attention is None)
    if equal:
        return slots.slot_signals(positions, state, spec)
    with state.gathered(only=("seen", "lengths", "starts", "attention")) as own:
        return reference.slot_signals(positions, own, spec)


def remember(
    keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor, kept: Tensor, most: int, state: LayerState,
    spec: Spec,
) -> None:  # fmt: skip
    """`reference.remember`."""
    if isinstance(state.parts, Centroids):
        joining.remember(keys, values, positions, valid, kept, most, state, spec)
        return
    with state.gathered() as own:
        reference.remember(keys, values, positions, valid, kept, most, own, spec)
