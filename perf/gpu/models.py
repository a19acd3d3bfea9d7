"""Small random models for checks of whole decode steps, and the kinds of caches that they are patched with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import fastkv

from ..speed.models import build
from .place import Place

FAMILIES = ("llama", "gemma-3")  # the second has layers with a window
EVERY = 4  # tokens between evictions


@dataclass(frozen=True)
class Kind:
    """A kind of cache: policy, correction, and whether heads are equal."""

    policy: str
    correction: str = "auto"
    heads: str = "uniform"

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.policy}-{self.correction}-{self.heads}"

    def patch(self, place: Place, model: Any, backend: str, **settings: Any) -> None:
        """Give the model such a cache, small enough for evictions all the time."""
        budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=self.heads)
        same: dict[str, Any] = dict(correction=self.correction, evict_every=EVERY)
        fastkv.patch(model, self.policy, budget, backend=backend, **same, **settings)


# The default first; then moments, unequal heads, sums of attention.
KINDS = (
    Kind("fastkv"),
    Kind("momentkv"),
    Kind("keydiff", "none", "adaptive"),
    Kind("h2o", "mean"),
)


def small_model(place: Place, family: str) -> Any:
    """A small model with seeded weights; its layers with a window have rings beside the cache."""
    dtype = torch.float32 if place.toy else torch.bfloat16
    return build(f"{family}-toy" if place.toy else f"{family}-small", place.device, dtype)
