"""Absorb one generated token: one fused step, and every `evict_every` steps an eviction down to the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .plan import LayerPlan
from .policies import Signals
from .select import recent_tokens
from .state import LayerState


def decode_token(state: LayerState, q: Tensor, k: Tensor, v: Tensor, rule: LayerPlan) -> Tensor:
    """Append the token, attend to everything including it, then evict if it is time.

    Args: q [B, Hq, 1, D]; k, v [B, Hkv, 1, D].  Returns: [B, Hq, 1, Dv].
    """
    out, _, _ = ops.decode_step(
        q[:, :, 0],
        k,
        v,
        state.keys,
        state.values,
        state.positions,
        state.lengths,
        state.seen,
        state.moments,
        rule.scale,
        rule.softcap,
        order=rule.plan.order,
        attention=state.attention,
        scratch=state.scratch,
        backend=rule.plan.backend,
    )
    state.filled = min(state.filled + 1, state.slots)
    state.steps += 1
    if state.filled == state.slots:
        evict(state, rule)
    return out[:, :, None]


def evict(state: LayerState, rule: LayerPlan) -> None:
    """Shrink every head to the layer's budget; heads that hold fewer tokens lose none."""
    valid = torch.arange(state.slots, device=state.keys.device) < state.lengths[..., None]
    attention = None
    if state.attention is not None:
        # A token that arrived after the last eviction was seen by fewer queries: mean over those that saw it.
        queries = (state.seen[:, None, None] - state.positions).clamp(1, max(state.steps, 1))
        attention = state.attention / queries
    signals = Signals(
        keys=state.keys,
        values=state.values,
        positions=state.positions,
        valid=valid,
        moments=state.moments,
        scale=rule.scale,
        layer=rule.layer,
        decoding=True,
        attention=attention,
        backend=rule.plan.backend,
    )
    ops.evict(
        state.keys,
        state.values,
        state.positions,
        state.lengths,
        state.seen,
        state.moments,
        rule.plan.policy.score(signals),
        rule.tokens,
        rule.plan.budget.sinks,
        recent_tokens(rule),
        scratch=state.scratch,
        backend=rule.plan.backend,
    )
    state.filled = min(state.filled, rule.tokens)
    if state.attention is not None:
        state.attention.zero_()
    state.steps = 0
