"""Compactor: attention without a query in mind, blended with the leverage of the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import FastKVError
from ..reference import z_scores
from .base import Signals
from .leverage import Leverage
from .noncausal import NonCausal


@dataclass(frozen=True)
class Compactor(NonCausal):
    """score = z(a) + blend z(o): a the non-causal attention of `NonCausal`, o the leverage of `Leverage`.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.4, Eq. 6. Each z is over the cached tokens of
    one head of one sequence; where all tokens are equal it is 0.

    Args:
        chunk: tokens that attend to each other.
        pool: odd width of the mean pooling of the attention; the paper names none.
        blend: weight of the leverage, lambda in the paper (0.35 in its Table 2).
        sketch: columns of the Gaussian sketch; None for no sketch.
        method: how leverage is computed, see `Leverage`.
        seed: of the sketch.
    """

    name = "compactor"
    needs = frozenset({"queries", "pre_rope"})

    blend: float = 0.3
    sketch: int | None = 64
    method: str = "cholesky"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.blend < math.inf:
            raise FastKVError(f"compactor: blend must be a finite weight of at least 0, got {self.blend!r}; try 0.3")
        self._leverage()

    def _leverage(self) -> Leverage:
        return Leverage(self.sketch, self.method, self.seed)

    def score(self, signals: Signals) -> Tensor:
        """Blend of the two z-scores."""
        attention, leverage = super().score(signals), self._leverage().score(signals)
        return z_scores(attention, signals.valid) + self.blend * z_scores(leverage, signals.valid)
