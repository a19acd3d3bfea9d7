"""SnapKV: keep what the last queries of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..reference import check_pool
from .base import Policy, Signals, check_at_least


@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention of the last `window` queries, averaged over the group and pooled over neighbouring tokens.

    Source: SnapKV, Li et al. 2024, arXiv:2404.14469. While decoding, the queries since the last eviction are the
    window and tokens are scored one by one. A prompt shorter than the window shrinks it.

    Args:
        window: observation window, queries; these tokens are themselves kept by `Budget.recent`.
        pool: odd width of the average pooling; the paper also uses 5 (with window 64).
    """

    name = "snapkv"
    needs = frozenset({"attention"})

    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        check_at_least(self, window=1, pool=1)
        check_pool(self.pool)

    @property
    def observation(self) -> int:
        """The window."""
        return self.window

    def score(self, signals: Signals) -> Tensor:
        """Pooled window attention."""
        assert signals.attention is not None
        if signals.decoding:
            return signals.attention
        return ops.pool_scores(signals.attention, self.pool, signals.positions, signals.valid)
