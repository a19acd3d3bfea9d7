"""The moments of the evicted tokens: their first-order estimate (MomentKV), its means only, or with a tighter mass."""

from __future__ import annotations

from dataclasses import dataclass

from ..reference import Evicted, LayerState
from .base import Correction


@dataclass(frozen=True)
class MomentCorrection(Correction):
    """Mixes in what the moments say (MomentKV, arXiv:2606.01563, Eqs. 9, 11 and 12; `reference.moment_estimate`)."""

    def evicted(self, state: LayerState) -> Evicted | None:
        """The moments, without what a policy alone wants of them."""
        return state.moments.upto(self.order)


MEAN = MomentCorrection("mean", order=0)
MOMENTS = MomentCorrection("moments", order=1)
COSH = MomentCorrection("cosh", order=1, spread=True)
