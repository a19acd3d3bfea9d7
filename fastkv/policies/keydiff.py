"""KeyDiff: keep keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..errors import FastKVError
from ..reference import check_keydiff
from .base import Policy, Shares, Signals


@dataclass(frozen=True)
class KeyDiff(Policy):
    """score_i = -cos(anchor, k_i): attention-free, so it works with any attention kernel and in blocks.

    Source: KeyDiff, Park et al. 2025, arXiv:2504.15364, Sec. 3.2 and 3.3.

    Args:
        anchor: "mean", "normalized_mean" (Eq. 8), "median" or "pairwise" (Eq. 7).
        distance: "cosine"; "dot" and "euclidean" are the paper's ablation.
        sliding_window: share of the budget reserved for the most recent tokens (0.2 in the reasoning experiments).
    """

    name = "keydiff"

    anchor: str = "mean"
    distance: str = "cosine"
    sliding_window: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.sliding_window <= 1:
            raise FastKVError(
                f"keydiff: sliding_window must be a share in [0, 1], got {self.sliding_window!r}; the paper uses 0.2"
            )
        check_keydiff(self.anchor, self.distance)

    @property
    def shares(self) -> Shares:
        """The sliding window."""
        return Shares(recent=self.sliding_window)

    def score(self, signals: Signals) -> Tensor:
        """Negative similarity to the anchor of the cached keys."""
        keys, valid, backend = signals.keys, signals.valid, signals.layer.backend
        return ops.keydiff_scores(keys, self.anchor, distance=self.distance, mask=valid, backend=backend)
