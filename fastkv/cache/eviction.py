"""Shrink a layer to its budget while it decodes: score, select, remember what leaves, close the gaps."""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..reference import LayerState
from . import compaction, selection, signals
from .layout import LayerConfig


def evict(state: LayerState, rule: LayerConfig) -> None:
    """Shrink every head to its budget; heads that hold fewer tokens lose none.

    All slots are looked at, used or not (the host counts on no slot being free), so that shapes never differ.
    """
    exact, spare = state.exact, rule.layout.spare
    told = signals.of_steps(signals.candidates(state, None, rule), state, rule)
    told, scores = signals.score(told, rule)
    if state.approx is not None:
        kept = selection.keep_best(told, scores, state.seen, rule)
        compaction.store(state, told, kept, 0, rule, full=True)
        return
    if exact.memory is not None:
        told = replace(told, positions=told.positions.clone())  # eviction moves them
    chosen = None
    if state.parts is not None:  # what leaves has to be known before anything moves
        chosen = selection.keep_slots(told, scores, state, rule).kept
        compaction.remember(state, told, chosen, spare, rule)
    ops.evict(scores, chosen, state, rule.spec)
    exact.filled = exact.limit - spare
    compaction.finish(state, told)
