"""CriticalKV: half of the budget by attention, half by attention times what the value does to the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from .base import Policy, Signals


@dataclass(frozen=True)
class CriticalKV(Policy):
    """Stage one keeps the best by the base score a_j; stage two fills up by (a_j + epsilon) |W_o v_j|_1.

    Source: CriticalKV, Feng et al. 2025, arXiv:2502.03805, Alg. 1. The base score is made positive by subtracting its
    minimum over the tokens of the head; the norm is the mean over the group. Sinks and recent tokens win in stage one
    like any other; where they leave no room for all of its winners, those with the best base score stay.

    Args:
        base: name of the policy, or the policy, that scores stage one; all that it asks for is passed on.
        epsilon: added to the base score in stage two.
        first: share of the budget that stage one fills, in [0, 1].
    """

    name: ClassVar[str] = "criticalkv"
    scorer: ClassVar[Policy]  # the base policy, of each instance

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

        object.__setattr__(self, "scorer", get(self.base))  # once: a compiled step cannot make policies
        for name in ("remembers", "rereads", "layers", "moment_order"):
            object.__setattr__(self, name, getattr(self.scorer, name))
        object.__setattr__(self, "needs", self.scorer.needs | {"output"})

    @property
    def observation(self) -> int | None:
        """The base's."""
        return self.scorer.observation

    @property
    def recent_share(self) -> float:
        """The base's."""
        return self.scorer.recent_share

    def check(self, heads: Sequence[int]) -> None:
        """Raise FastKVError unless the base can serve the model."""
        self.scorer.check(heads)

    def head_tokens(self, layer: int, heads: int, tokens: int, reserved: int) -> tuple[int, ...] | None:
        """The base's."""
        return self.scorer.head_tokens(layer, heads, tokens, reserved)

    def remember(self, signals: Signals) -> Tensor:
        """What the base stores, [B, Hkv, N] fp32."""
        return self.scorer.remember(signals)

    def score(self, signals: Signals) -> Tensor:
        """One number per token, [B, Hkv, N] float, by which a top-k does both stages.

        At least 2 for the winners of stage one, in the order of the base; at most 1 for the others, in the order of
        stage two. All heads of a layer share both divisors, so that they stay comparable.
        """
        assert signals.output is not None
        base, positions, valid = self.scorer.score(signals), signals.positions, signals.valid
        tokens = ceil(self.first * signals.tokens)
        won = ops.select(base, positions, valid, torch.zeros_like(valid), tokens, backend=signals.backend).kept
        base = base - base.masked_fill(~valid, torch.inf).amin(-1, keepdim=True) + self.epsilon
        rest = torch.where(valid, base * ops.output_norms(signals.values, signals.output), 0)
        gather, tiny = signals.parallel.gather, torch.finfo(rest.dtype).tiny
        smallest = gather(base.masked_fill(~won, torch.inf).amin(2, keepdim=True)).amin(1, keepdim=True)
        largest = gather(rest.amax(2, keepdim=True)).amax(1, keepdim=True).clamp(min=tiny)
        return torch.where(won, 2 * base / smallest, rest / largest)
