"""Random eviction: the baseline every policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from .base import Policy, Signals


@dataclass(frozen=True)
class Random(Policy):
    """Uniform random scores, a fixed number per (layer, head, position).

    Source: folklore baseline (also in kvpress).

    Args:
        seed: other seeds keep other tokens.
    """

    name = "random"

    seed: int = 0

    def score(self, signals: Signals) -> Tensor:
        """Hash of seed, layer, head and position."""
        return ops.random_scores(signals.positions, self.seed, signals.layer)
