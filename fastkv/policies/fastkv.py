"""FastKV: keep the keys that are far from the mean key, and remember the evicted ones as centroids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Policy, Signals
from .manifold import Manifold


@dataclass(frozen=True)
class FastKV(Policy):
    """The score of ManifoldKV, with correction="centroids": what far keys leave behind, few means describe well.

    Source: fastkv's own. The score is that of `Manifold` (ManifoldKV, arXiv:2602.08343). Of its evicted tokens a head
    keeps centroids in a sixteenth of the bytes of its pairs, at least 4, joined as `fastkv.reference.centroids` says.
    Outliers among the keys stay exact; the rest lies closer together, where merging blurs least.

    Args:
        window: cached tokens, consecutive in the text, that share a mean key; None for all of them.
        metric: distance to the mean key: "l2", "l1", "linf" or "cosine".
    """

    name: ClassVar[str] = "fastkv"
    correction: ClassVar[str] = "centroids"
    scorer: ClassVar[Policy]  # of each instance

    window: int | None = None
    metric: str = "l2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", Manifold(self.window, self.metric))  # a compiled step cannot make policies

    def score(self, signals: Signals) -> Tensor:
        """Distance of each key to the mean of the cached keys of its window, [B, Hkv, N]."""
        return self.scorer.score(signals)
