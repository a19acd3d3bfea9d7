"""MomentKV: evict what the moments can predict, and correct attention with the moments of what was evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import ops
from .base import Policy, Signals, check_at_least


@dataclass(frozen=True)
class MomentKV(Policy):
    """score_j = alpha_j |r_j|: attention received times what the moments of the evicted set miss of the value.

    Source: MomentKV, arXiv:2606.01563, Eq. 10 and Sec. 5.1: observation window of the last 32 queries, the first token
    kept as a sink (`Budget.sinks`), adjacent tokens scored in chunks of 4 while the prompt is read. While decoding,
    alpha is the mean since the last eviction, so `evict_every=1` is the paper's algorithm. Before anything is evicted
    the residual is the value itself.

    Args:
        window: observation window, queries.
        chunk: adjacent prompt tokens that share their mean score.
    """

    name: ClassVar[str] = "momentkv"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    order: ClassVar[int | None] = 1
    moment_order: ClassVar[int | None] = 1

    window: int = 32
    chunk: int = 4

    def __post_init__(self) -> None:
        check_at_least(self, window=1, chunk=1)

    @property
    def observation(self) -> int:
        """The window."""
        return self.window

    def score(self, signals: Signals) -> Tensor:
        """Window attention times the moment residual, averaged over chunks while the prompt is read."""
        assert signals.attention is not None
        scores = ops.moment_scores(
            signals.attention,
            signals.keys,
            signals.values,
            signals.moments,
            signals.scale,
            backend=signals.backend,
        )
        if signals.decoding:
            return scores
        return ops.chunk_mean(scores, self.chunk, signals.positions, signals.valid)
