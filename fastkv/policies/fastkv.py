"""FastKV: keep keys that are far from the mean key and keys that are attended to; remember the others as centroids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from .base import Signals, known_or_mean
from .manifold import Manifold
from .snapkv import SnapKV

BESIDE = 2.0  # weight of the window's attention beside the largest of a second reading


@dataclass(frozen=True)
class FastKV(SnapKV):
    """score = min(|g|, 1) z + weight a / (s c): ManifoldKV's distance in standard deviations, and SnapKV's attention.

    Source: fastkv's own, from the scores of `Manifold` (ManifoldKV, arXiv:2602.08343) and `SnapKV` (arXiv:2404.14469).
    Distance alone finds what stands out but not what was asked for, attention alone forgets what is asked later. How
    much each of them counts is up to the head, which chooses L of n tokens, T having been read in all:

        z = (d - mean d) / std d,  d = |k - mu|              distance from the mean key
        g = mean z^3                                         how skewed the distances are
        s = exp(-sum_j p_j log p_j) / n,  p = a / sum a      share of the tokens that the attention is spread over
        c = min(L / T, 1)                                    share of the tokens that stay

    Where few keys are far from all others, their distances are skewed, and they stand out for a reason; where distances
    scatter evenly about their mean, the largest of them mean nothing, and attention decides alone. A head whose last
    queries look at few tokens says with them what it needs; one that looks everywhere does not know yet. Where few
    tokens can stay, those come first that are needed now; where there is room, what stands out may be needed later.

    Of the evicted tokens a head keeps centroids in a sixteenth of the bytes of its pairs, at least 4, joined as
    `fastkv.reference.centroids` says. Outliers among the keys stay exact; merging blurs the others least.

    With `reread` the prompt is fed a second time, in chunks of 512, and

        score_j = max over its queries of their attention to j + 2 a_j / (s c)

    instead: what the model looks at while it reads the same again is what it needs to go on. The shorter the chunks,
    the less of their attention goes to themselves; retrieval wants them longer. Tokens that were read once, generated
    ones and those of later prompts, have the mean of the others in place of the maximum. Centroids take an eighth of
    the bytes then. They settle among the evicted tokens by that maximum (`Centroids.settled`), and their values are
    refitted to the attention of some queries of the second reading (`Centroids.refitted`).

    Args:
        window: observation window, queries.
        pool: odd width of the average pooling of the attention.
        weight: of the attention, in standard deviations of distance, for a head that looks at all tokens and keeps them
            all; 0 for ManifoldKV's choice.
        reread: read the prompt twice, which takes about twice as long and, until it ends, the memory of the whole
            cache (as KVzip, arXiv:2505.23416, whose scores these are); `policy="fastkv-reread"`.
    """

    name = "fastkv"
    chunk = 512

    weight: float = 4.0
    reread: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight < math.inf:
            raise FastKVError(f"fastkv: weight must be a finite number of at least 0, got {self.weight!r}; try 4.0")

    @property
    def correction(self) -> str:
        """Twice as many centroids after a second reading, which knows what can be spared."""
        return "fine-centroids" if self.reread else "centroids"

    @property
    def rereads(self) -> bool:
        """If asked to."""
        return self.reread

    @property
    def remembers(self) -> bool:
        """What a second reading found."""
        return self.reread

    @property
    def refits(self) -> bool:
        """After a second reading."""
        return self.reread

    def remember(self, signals: Signals) -> Tensor:
        """What a token received on the second reading, [B, Hkv, N] fp32; 0 for those that were read once."""
        assert signals.memory is not None
        return signals.memory if signals.received is None else signals.received

    def score(self, signals: Signals) -> Tensor:
        """Both together, [B, Hkv, N]."""
        attention = super().score(signals)
        told = signals.positions, signals.valid, signals.tokens
        if self.reread:
            equal = torch.zeros_like(attention)  # of equal distances the blend takes nothing
            beside = ops.blended_scores(equal, attention, *told, BESIDE, backend=signals.backend)
            return known_or_mean(signals) + beside
        distance = Manifold().score(signals)
        return ops.blended_scores(distance, attention, *told, self.weight, backend=signals.backend)


@dataclass(frozen=True)
class FastKVReread(FastKV):
    """`FastKV` with a second reading of the prompt.

    Source: fastkv's own; the second reading is KVzip's (Kim et al. 2025, arXiv:2505.23416).

    Args:
        window: observation window, queries.
        pool: odd width of the average pooling of the attention.
        weight: for `reread=False` only, see `FastKV`.
        reread: read the prompt twice.
    """

    name = "fastkv-reread"

    reread: bool = True
