"""CriticalKV: half of the budget by attention, half by attention times the norm of the projected value."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from .base import Policy, Signals


def _of_base(name: str) -> Any:
    """A property or a method that is the base's."""
    return property(lambda self: getattr(self.base, name), doc="The base's.")


@dataclass(frozen=True)
class CriticalKV(Policy):
    """Stage one keeps the best by the base score a_j; stage two fills up by (a_j + epsilon) |W_o v_j|_1.

    Source: CriticalKV, Feng et al. 2025, arXiv:2502.03805, Alg. 1. The base score is made positive by subtracting its
    minimum over the tokens of the head; the norm is the mean over the group. Sinks and recent tokens win in stage one
    like any other; where they leave no room for all of its winners, those with the best base score stay.

    Args:
        base: the policy that scores stage one, or its name; all that it asks for is passed on.
        epsilon: added to the base score in stage two.
        first: share of the budget that stage one fills, in [0, 1].
    """

    name = "criticalkv"
    observation, moments, remember = map(_of_base, ("observation", "moments", "remember"))
    second_reading, shares, calibration = map(_of_base, ("second_reading", "shares", "calibration"))

    base: str | Policy = "snapkv"
    epsilon: float = 1e-4
    first: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1 or not self.epsilon > 0:
            raise FastKVError(
                f"criticalkv: first must be in [0, 1] and epsilon above 0, got {self.first!r} and {self.epsilon!r}; "
                "the paper uses 0.5 and 1e-4"
            )
        if self.base == self.name or isinstance(self.base, CriticalKV):
            raise FastKVError("criticalkv: base must be another policy, got criticalkv; the paper uses snapkv")
        from . import get  # the package imports this file first

        object.__setattr__(self, "base", get(self.base))  # once: a compiled step cannot make policies

    @property
    def needs(self) -> frozenset[str]:
        """What the base reads, and the output projection."""
        assert isinstance(self.base, Policy)
        return self.base.needs | {"output"}

    def score(self, signals: Signals) -> Tensor:
        """One number per token, [B, Hkv, N] float, by which a top-k does both stages.

        At least 2 for the winners of stage one, in the order of the base; at most 1 for the others, in the order of
        stage two. All heads of a layer share both divisors, so that they stay comparable.
        """
        layer = signals.layer
        assert layer.output is not None and isinstance(self.base, Policy)
        base, positions, valid = self.base.score(signals), signals.positions, signals.valid
        tokens = ceil(self.first * layer.tokens)
        won = ops.select(base, positions, valid, torch.zeros_like(valid), tokens, backend=layer.backend).kept
        base = base - base.masked_fill(~valid, torch.inf).amin(-1, keepdim=True) + self.epsilon
        rest = torch.where(valid, base * ops.output_norms(signals.values, layer.output), 0)
        gather, tiny = layer.parallel.gather, torch.finfo(rest.dtype).tiny
        smallest = gather(base.masked_fill(~won, torch.inf).amin(2, keepdim=True)).amin(1, keepdim=True)
        largest = gather(rest.amax(2, keepdim=True)).amax(1, keepdim=True).clamp(min=tiny)
        return torch.where(won, 2 * base / smallest, rest / largest)
