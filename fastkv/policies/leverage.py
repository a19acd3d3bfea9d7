"""Leverage: keep the keys whose direction is their own; the part of Compactor that needs no attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..errors import FastKVError
from ..reference import check_leverage
from .base import Policy, Signals, check_at_least

LARGEST_SKETCH = 128  # columns that the leverage kernel holds on chip


@dataclass(frozen=True)
class Leverage(Policy):
    """score_i = |U_i|^2, U an orthonormal basis of the column space of K Phi: keys before the rotation, sketched.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.2, Alg. 1; its appendices for other methods.

    Args:
        sketch: columns of the Gaussian sketch Phi; None, or no fewer than the head size, for the keys themselves.
        method: "cholesky", "qr", "svd", "exact" (SVD of the keys, no sketch) or "srht" (Hadamard sketch, Cholesky).
        seed: of the sketch, which all heads and layers share.
    """

    name = "leverage"
    needs = frozenset({"pre_rope"})

    sketch: int | None = 64
    method: str = "cholesky"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sketch is not None:
            check_at_least(self, sketch=1)
        check_leverage(self.sketch, self.method)
        if self.sketch is not None and self.sketch > LARGEST_SKETCH and self.method in ("cholesky", "srht"):
            raise FastKVError(
                f"{self.name}: sketch must be at most {LARGEST_SKETCH} columns for method {self.method!r}, got "
                f"{self.sketch}; pass None for unsketched keys, or method='qr'"
            )

    def score(self, signals: Signals) -> Tensor:
        """Leverage of each key among the cached ones."""
        return ops.leverage_scores(
            signals.pre_rope_keys, self.sketch, self.method, self.seed, mask=signals.valid, backend=signals.backend
        )
