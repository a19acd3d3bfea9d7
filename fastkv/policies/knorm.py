"""KNorm: keep the shortest keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..reference import knorm_scores
from .base import Policy, Signals


@dataclass(frozen=True)
class KNorm(Policy):
    """score_i = -|k_i|: in many heads the keys that receive most attention are the shortest ones.

    Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arXiv:2406.11430.
    """

    name = "knorm"

    def score(self, signals: Signals) -> Tensor:
        """Negative Euclidean norm of the key, in fp32."""
        return knorm_scores(signals.keys)
