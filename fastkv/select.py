"""Selection, written once for all policies: protect sinks and recent tokens, then keep the best by score."""

from __future__ import annotations

import math

from torch import Tensor

from . import ops
from .plan import LayerPlan
from .policies import Signals
from .reference import Selection


def protected(positions: Tensor, seen: Tensor, sinks: int, recent: int) -> Tensor:
    """Which tokens no policy may evict: position < sinks, or among the last `recent` of the `seen` [B] true tokens."""
    return (positions < sinks) | (positions >= seen[:, None, None] - recent)


def keep_best(signals: Signals, seen: Tensor, rule: LayerPlan) -> Selection:
    """Score the candidates with the plan's policy and keep the layer's budget of them.

    Args: signals of the N candidates; seen [B]: true tokens absorbed, the candidates included.
    """
    plan = rule.plan
    budget = plan.budget
    # The policy may ask for a larger share of recent tokens, but sinks stay.
    recent = min(max(budget.recent, math.ceil(plan.policy.recent_share * rule.tokens)), rule.tokens - budget.sinks)
    guard = protected(signals.positions, seen, budget.sinks, recent)
    return ops.select(plan.policy.score(signals), signals.positions, signals.valid, guard, rule.tokens)
