"""A few weighted pairs that stand for all evicted tokens, in a sixteenth of the bytes of those that stay.

Where slots hold codes of 8 or 4 bits, bytes are those that the same tokens would take in 2-byte numbers: how many
centroids the evicted need depends on what was evicted, not on how finely the others are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..budget import LayerCost
from ..errors import FastKVError
from ..reference import Centroids, Evicted, LayerState
from .base import Correction, Shape

MEANS = torch.bfloat16  # of their keys and values, whatever the model computes in
LEAST = 4  # centroids of a head


@dataclass(frozen=True)
class CentroidCorrection(Correction):
    """Mixes in what the centroids say (`reference.centroid_estimate`); as many of them as the bytes allow.

    Attributes: share: centroids take one byte where pairs take so many (`Shape.pair`).
    """

    name: str = "centroids"
    kind: str | None = "centroids"
    share: int = 16
    options: ClassVar[tuple[str, ...]] = ("share",)

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int) or self.share < 1:
            raise FastKVError(f"centroids: share must be a whole number of at least 1, got {self.share!r}; 16 is usual")

    def evicted(self, state: LayerState) -> Evicted | None:
        """The centroids."""
        return state.parts

    def empty(self, batch: int, shape: Shape, tokens: int, device: torch.device) -> Evicted | None:
        """Unused centroids, equally many for all heads."""
        num = max(tokens * shape.pair // (self.share * nbytes(shape)), LEAST)
        return Centroids.empty(batch, shape.heads, num, shape.key_dim, shape.value_dim, device, MEANS)

    def cost(self, shape: Shape, pairs: LayerCost) -> LayerCost:
        """With the centroids, which come whole."""
        part = shape.heads * nbytes(shape)
        return replace(pairs, sketch=shape.heads * shape.pair / self.share, part=part, least=LEAST * part)


def nbytes(shape: Shape) -> int:
    """Bytes of a centroid: mean key and mean value in bf16, count and spread in fp32."""
    return MEANS.itemsize * (shape.key_dim + shape.value_dim) + 8


CENTROIDS = CentroidCorrection()
