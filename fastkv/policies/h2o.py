"""H2O: keep the heavy hitters, the tokens that have received most attention so far, and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import FastKVError
from .base import Policy, Shares, Signals


@dataclass(frozen=True)
class H2O(Policy):
    """score_j = sum over all queries so far of the attention that token j received, mean over the group.

    Source: H2O, Zhang et al. 2023, arXiv:2306.14048, Sec. 4. The sum is stored with each token, so it grows across
    prompt blocks and generated tokens; it starts with the queries that see the token first.

    Args:
        recent: share of the budget that goes to the most recent tokens, in [0, 1]; half in the paper.
    """

    name = "h2o"
    needs = frozenset({"attention", "memory"})
    observation = None  # every query of the block

    recent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise FastKVError(f"h2o: recent must be a share in [0, 1], got {self.recent!r}; the paper uses 0.5")

    @property
    def shares(self) -> Shares:
        """The recent window."""
        return Shares(recent=self.recent)

    def remember(self, signals: Signals) -> Tensor:
        """The stored sum plus the attention since then, [B, Hkv, N] fp32: a mean times its number of queries."""
        assert signals.memory is not None and signals.attention is not None and signals.queried is not None
        return signals.memory + signals.attention * signals.queried

    def score(self, signals: Signals) -> Tensor:
        """The sum, [B, Hkv, N] fp32."""
        assert signals.memory is not None
        return signals.memory
