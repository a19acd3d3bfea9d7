"""MomentKV: evict what the moments predict well, and correct attention with the moments of evicted tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..errors import FastKVError
from ..reference import Moments
from .base import MomentUse, Policy, Signals, check_at_least


@dataclass(frozen=True)
class MomentKV(Policy):
    """score_j = alpha_j |r_j|: attention received times what the moments of the evicted set miss of the value.

    Source: MomentKV, arXiv:2606.01563, Eq. 10 and Sec. 5.1: observation window of the last 32 queries, the first token
    kept as a sink, adjacent tokens scored in chunks of 4 while the prompt is read, budget shared between the heads of a
    layer. While decoding, alpha is the mean since the last eviction. Before anything is evicted, r_j = v_j. Its Alg. 1
    evicts one token at a time and scores the others anew; `rounds` do so with a share of a whole prompt's tokens.

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
        scores = self._informed(signals) if self.informed else signals.attention
        if signals.decoding:
            return scores
        return ops.chunk_mean(scores, self.chunk, signals.positions, signals.valid)

    def _informed(self, signals: Signals) -> Tensor:
        moments = signals.moments
        if self.residual_order == 0:
            moments = Moments(moments.count, moments.key_mean, moments.value_mean)
        state = signals.keys, signals.values, moments, signals.layer.scale
        return ops.moment_scores(signals.attention, *state, backend=signals.layer.backend)
