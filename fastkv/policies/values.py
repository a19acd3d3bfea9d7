"""Keep tokens that are attended to and whose values matter: because moments would miss them (MomentKV), or because they
move the layer's output most (CriticalKV).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from .base import MomentUse, Policy, Signals, check_at_least, check_within


@dataclass(frozen=True)
class MomentKV(Policy):
    """score_j = alpha_j |r_j|: attention received times what the moments of the evicted set miss of the value.

    Source: MomentKV, arXiv:2606.01563, Eq. 10 and Sec. 5.1: observation window of the last 32 queries, the first token
    kept as a sink, adjacent tokens scored in chunks of 4 while the prompt is read, budget shared between the heads of a
    layer. While decoding, alpha is the mean since the last eviction. Before anything is evicted, r_j = v_j. Its Alg. 1
    evicts one token at a time and scores the others anew; `rounds` do so with a share of a whole prompt's tokens. The
    softmax of alpha is over all tokens, the evicted ones with their estimated mass; in Alg. 1 over the kept ones alone.

    With `patch(model, policy, budget, evict_every=..., correction=...)`, the paper's experiments are

    - protocol: `Budget(tokens, sinks=1, recent=32, heads="adaptive")`, `evict_every=1`, everything else by default;
    - eviction only (Table 3, MI): `correction="none"`;
    - correction only (Table 3, NC): `MomentKV(informed=False)`. Its table starts from SnapKV, which pools instead of
      chunking: that row is `patch(model, "snapkv", ..., correction="moments")`;
    - order 0 (Table 4): `MomentKV(residual_order=0)` and `correction="mean"`. Its 2 d numbers per head hold no matrix,
      so there is none in the residual either: r_j = v_j - v_mean.

    Args:
        window: observation window, queries.
        chunk: adjacent prompt tokens that share their mean score.
        informed: whether the residual takes part in the score; without it, the score is attention alone.
        residual_order: 1 for the residual of Eq. 10, 0 for the distance to the mean evicted value.
        rounds: number of rounds in which a prompt that is read whole loses its tokens, equally many in each; 1 scores
            it once, by attention and the norm of values. Blocks and decoding evict a few tokens at a time anyway.
    """

    name = "momentkv"
    needs = frozenset({"attention"})
    correction = "moments"

    window: int = 32
    chunk: int = 4
    informed: bool = True
    residual_order: int = 1
    rounds: int = 1

    def __post_init__(self) -> None:
        check_at_least(self, window=1, chunk=1, rounds=1)
        if self.residual_order not in (0, 1):
            raise FastKVError(
                f"momentkv: residual_order must be 0 or 1, got {self.residual_order!r}; "
                "to score by attention alone, pass informed=False"
            )

    @property
    def moments(self) -> MomentUse:
        """What the residual reads: an ablation does not pay for moments that it leaves alone."""
        return MomentUse(self.residual_order if self.informed else None, self.rounds)

    @property
    def observation(self) -> int:
        """The window."""
        return self.window

    def score(self, signals: Signals) -> Tensor:
        """Window attention times the moment residual, averaged over chunks while the prompt is read; [B, Hkv, N]."""
        assert signals.attention is not None
        scores, backend = signals.attention, signals.layer.backend
        if self.informed:
            evicted = signals.moments.upto(self.residual_order)
            assert evicted is not None
            known = signals.keys, signals.values, evicted, signals.layer.scale
            scores = ops.moment_scores(scores, *known, backend=backend)
        if signals.decoding:
            return scores
        return ops.chunk_mean(scores, self.chunk, signals.positions, signals.valid, backend=backend)


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
        first: share of the budget, the mean of the layer's heads, that stage one fills, in [0, 1].
    """

    name = "criticalkv"
    observation, moments, remember = map(_of_base, ("observation", "moments", "remember"))
    second_reading, shares, calibration = map(_of_base, ("second_reading", "shares", "calibration"))
    waits, adaptive = map(_of_base, ("waits", "adaptive"))

    base: str | Policy = "snapkv"
    epsilon: float = 1e-4
    first: float = 0.5

    def __post_init__(self) -> None:
        check_within(self, 0, 1, first=0.5)
        check_within(self, 1e-30, epsilon=1e-4)
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
