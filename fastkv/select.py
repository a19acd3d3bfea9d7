"""Selection, written once for all policies: protect sinks and recent tokens, then keep the best by score."""

from __future__ import annotations

import math

from torch import Tensor

from . import ops
from .plan import LayerPlan
from .policies import Signals
from .reference import Selection


def recent_tokens(rule: LayerPlan) -> int:
    """How many of the latest tokens are protected: the budget's, or the policy's larger share; sinks always fit."""
    budget, policy = rule.plan.budget, rule.plan.policy
    return min(max(budget.recent, math.ceil(policy.recent_share * rule.tokens)), rule.tokens - budget.sinks)


def keep_best(signals: Signals, seen: Tensor, rule: LayerPlan) -> Selection:
    """Score the candidates with the plan's policy and keep the layer's budget of them.

    Args: signals of the N candidates; seen [B]: true tokens absorbed, the candidates included.
    """
    scores = rule.plan.policy.score(signals)
    guard = ops.protected(signals.positions, seen, rule.plan.budget.sinks, recent_tokens(rule))
    backend = rule.plan.backend
    return ops.select(scores, signals.positions, signals.valid, guard, rule.tokens, backend=backend)
