"""Absorb one generated token: one fused step, and every `evict_every` steps an eviction down to the budget."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from . import ops
from .plan import LayerPlan
from .reference import joined
from .select import keep_best, recent_tokens, score
from .state import LayerState
from .store import candidates, forget_attention, remember, store

Table = tuple[Tensor, Tensor]


def decode_token(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, rule: LayerPlan, table: Table | None = None
) -> Tensor:
    """Append the token, attend to everything including it, then evict if it is time.

    Args: q [B, Hq, 1, D]; k, v [B, Hkv, 1, D]; table: cos and sin [P, D/2], for layers with tokens without values.
    Returns: [B, Hq, 1, Dv].
    """
    exact, approx = state.exact, state.approx
    slots = (exact.keys, exact.values, exact.positions, exact.lengths, state.seen)
    settings = (state.moments, rule.scale, rule.softcap)
    options = dict(order=rule.plan.order, attention=exact.attention, scratch=state.scratch, backend=rule.plan.backend)
    if exact.starts is not None:
        options |= dict(starts=exact.starts, width=exact.limit)
    if approx is None:
        out, _, _ = ops.decode_step(q[:, :, 0], k, v, *slots, *settings, **options)
    else:
        assert table is not None
        if approx.starts is not None:
            options |= dict(approx_starts=approx.starts, approx_width=approx.limit)
        keys = (approx.keys, approx.positions, approx.lengths, rule.weight, *table)
        out, _, _ = ops.vector_decode_step(
            q[:, :, 0], k, v, *slots, *keys, *settings, approx_attention=approx.attention, **options
        )
    exact.filled += 1
    state.steps += 1
    if state.steps == state.layout.spare:  # whether or not the room is needed, so that rows do not depend on others
        if exact.filled > exact.limit - state.steps or rule.plan.policy.remembers:
            evict(state, rule)
        else:
            forget_attention(state)
    return out[:, :, None]


def evict(state: LayerState, rule: LayerPlan) -> None:
    """Shrink every head to its budget; heads that hold fewer tokens lose none."""
    exact, spare = state.exact, state.layout.spare
    filled, exact.filled = exact.filled, exact.limit  # all slots are looked at
    signals = candidates(state, None, rule)
    if exact.attention is not None:
        received = [exact["attention"]] + ([] if state.approx is None else [state.approx["attention"]])
        # A token that arrived after the last eviction was seen by fewer queries: mean over those that saw it.
        queries = (state.seen[:, None, None] - signals.positions).clamp(1, max(state.steps, 1))
        signals = replace(signals, attention=joined(*received) / queries, queried=queries)
    signals, scores = score(signals, rule)
    if state.approx is not None:
        store(state, signals, keep_best(signals, scores, state.seen, rule), 0, rule, full=True)
        return
    if exact.memory is not None:
        signals = replace(signals, positions=signals.positions.clone())  # eviction moves them
    ragged = {} if exact.starts is None else dict(starts=exact.starts, drop=spare)
    ops.evict(
        exact.keys,
        exact.values,
        exact.positions,
        exact.lengths,
        state.seen,
        state.moments,
        scores,
        rule.least,
        rule.plan.budget.sinks,
        recent_tokens(rule),
        scratch=state.scratch,
        backend=rule.plan.backend,
        **ragged,
    )
    exact.filled = min(filled, exact.limit - spare)
    remember(exact, signals)
    forget_attention(state)
