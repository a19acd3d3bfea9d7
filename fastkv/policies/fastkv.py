"""FastKV: keep keys that are far from the mean key and keys that are attended to; remember the others as centroids."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..errors import FastKVError
from .base import Signals
from .manifold import Manifold
from .snapkv import SnapKV


@dataclass(frozen=True)
class FastKV(SnapKV):
    """score = z(|k - mu|) + weight a: ManifoldKV's distance in standard deviations, plus SnapKV's attention.

    Source: fastkv's own, from the scores of `Manifold` (ManifoldKV, arXiv:2602.08343) and `SnapKV` (arXiv:2404.14469).
    A token that gets 1 / weight of the attention gains as much as one standard deviation of distance. Attention that is
    spread out, as over a text whose question is not known yet, hardly moves a score; a token that a question points at
    rises above all others. Distance alone finds what stands out but not what was asked for, attention alone forgets
    what is asked later.

    Of the evicted tokens a head keeps centroids in a sixteenth of the bytes of its pairs, at least 4, joined as
    `fastkv.reference.centroids` says. Outliers among the keys stay exact; merging blurs the others least.

    Args:
        window: observation window, queries.
        pool: odd width of the average pooling of the attention.
        weight: of the attention, in standard deviations of distance; 0 for ManifoldKV's choice.
    """

    name = "fastkv"
    correction = "centroids"

    weight: float = 128.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight < math.inf:
            raise FastKVError(f"fastkv: weight must be a finite number of at least 0, got {self.weight!r}; try 128.0")

    def score(self, signals: Signals) -> Tensor:
        """Both together, [B, Hkv, N]."""
        distance, attention = Manifold().score(signals), super().score(signals)
        return ops.z_scores(distance, signals.valid, attention, self.weight, backend=signals.backend)
