"""Absorb one generated token: one fused step, and every `evict_every` steps an eviction down to the budget."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .. import ops
from ..config import LayerPlan
from ..policies import Signals
from ..reference import joined, select_each
from ..state import LayerState
from .compaction import candidates, forget_attention, remember, sketch, store
from .selection import keep_best, protected, recent_tokens, score

Table = tuple[Tensor, Tensor]


def decode_token(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, rule: LayerPlan, *, evicts: bool, table: Table | None = None
) -> Tensor:
    """Append the token, attend to everything including it, then evict if it is time.

    All lengths stay on the device, and the host counts nothing: a captured graph of the step can be replayed.

    Args:
        q [B, Hq, 1, D]; k, v [B, Hkv, 1, D].
        evicts: whether this is one of the steps that evict (`Shared.phase`).
        table: cos and sin [P, D/2], for layers with tokens without values.
    Returns: [B, Hq, 1, Dv].
    """
    exact, approx, plan = state.exact, state.approx, rule.plan
    if approx is None:
        out, _, _ = ops.decode_step(
            q[:, :, 0],
            k,
            v,
            *exact.pairs,
            state.seen,
            state.moments,
            rule.scale,
            rule.softcap,
            order=plan.order,
            mass=plan.mass,
            centroids=state.centroids,
            attention=exact.attention,
            starts=exact.starts,
            width=exact.width,
            scratch=state.scratch,
            backend=plan.backend,
        )
    else:
        assert table is not None and rule.weight is not None
        out, _, _ = ops.vector_decode_step(
            q[:, :, 0],
            k,
            v,
            *exact.pairs,
            state.seen,
            approx.keys,
            approx.positions,
            approx.lengths,
            rule.weight,
            *table,
            state.moments,
            rule.scale,
            rule.softcap,
            order=plan.order,
            attention=exact.attention,
            approx_attention=approx.attention,
            starts=exact.starts,
            width=exact.width,
            approx_starts=approx.starts,
            approx_width=approx.width,
            scratch=state.scratch,
            backend=plan.backend,
        )
    state.fill()
    if evicts:
        evict(state, rule)
    return out[:, :, None]


def evict(state: LayerState, rule: LayerPlan) -> None:
    """Shrink every head to its budget; heads that hold fewer tokens lose none.

    All slots are looked at, used or not (`decode_token` has filled the state), so that shapes never differ.
    """
    exact, spare = state.exact, state.layout.spare
    signals = candidates(state, None, rule)
    if exact.attention is not None:
        received = [exact["attention"]] + ([] if state.approx is None else [state.approx["attention"]])
        # A token that arrived after the last eviction was seen by fewer queries: mean over those that saw it.
        queries = (state.seen[:, None, None] - signals.positions).clamp(1, spare)
        signals = replace(signals, attention=joined(*received) / queries, queried=queries)
    signals, scores = score(signals, rule)
    if state.approx is not None:
        store(state, signals, keep_best(signals, scores, state.seen, rule), 0, rule, full=True)
        return
    if exact.memory is not None:
        signals = replace(signals, positions=signals.positions.clone())  # eviction moves them
    if state.centroids is not None:
        sketch(state, signals, stays(state, signals, scores, rule), spare)
    ops.evict(
        *exact.pairs,
        state.seen,
        state.moments,
        scores,
        rule.least,
        rule.plan.budget.sinks,
        recent_tokens(rule),
        scratch=state.scratch,
        starts=exact.starts,
        drop=None if exact.starts is None else spare,
        backend=rule.plan.backend,
    )
    exact.filled = exact.limit - spare
    remember(exact, signals)
    forget_attention(state)


def stays(state: LayerState, signals: Signals, scores: Tensor, rule: LayerPlan) -> Tensor:
    """[B, Hkv, N] bool, which candidates `ops.evict` is going to keep."""
    guard, starts = protected(signals, state.seen, rule), state.exact.starts
    choice = (scores, signals.positions, signals.valid, guard)
    if starts is None:
        return ops.select(*choice, rule.least, backend=rule.plan.backend).kept
    return select_each(*choice, starts.diff(dim=-1) - state.layout.spare).kept
