"""Baselines: the norm of a key, its position, chance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..reference import knorm_scores
from .base import Policy, Signals


@dataclass(frozen=True)
class KNorm(Policy):
    """score_i = -|k_i|: in many heads the keys that receive most attention have the smallest norm.

    Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arXiv:2406.11430.
    """

    name = "knorm"

    def score(self, signals: Signals) -> Tensor:
        """Negative Euclidean norm of the key, in fp32."""
        return knorm_scores(signals.keys)


@dataclass(frozen=True)
class Random(Policy):
    """Uniform random scores, a fixed number per (layer, head, position).

    Source: folklore baseline (also in kvpress).

    Args:
        seed: of the random numbers.
    """

    name = "random"

    seed: int = 0

    def score(self, signals: Signals) -> Tensor:
        """Hash of seed, layer, head and position."""
        return ops.random_scores(signals.positions, self.seed, signals.layer.index)


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first `Budget.sinks` tokens and the latest ones.

    Source: StreamingLLM, Xiao et al. 2023, arXiv:2309.17453. Unlike the paper, tokens keep their true positions.
    """

    name = "streaming"

    def score(self, signals: Signals) -> Tensor:
        """The position itself."""
        return ops.streaming_scores(signals.positions)
