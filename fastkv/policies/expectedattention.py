"""Expected Attention: keep what future queries are expected to attend to, if they are like those so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from ..reference import compute_dtype
from .base import Policy, Signals, check_at_least, known_or_mean


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """score_i = (epsilon + mean over the group of softmax_i(s q.k_i + s^2 k_i C k_i / 2)) |v_i|, s the layer's scale.

    Source: Expected Attention, Devoto et al. 2025, arXiv:2510.00636, Sec. 3. Queries are assumed to be Gaussian;
    E exp(s Q.k) then has this closed form. The mean q and the covariance C are those of the block's queries before the
    rotary embedding, turned by the mean rotation of the positions to come. As in kvpress, |v| stands for |W_o v|. A
    soft cap and learned sinks are ignored. Every block scores all candidates anew. Queries of generated tokens are not
    kept; these tokens get the mean score of the others.

    Args:
        horizon: number of future positions over which the rotation is averaged.
        sinks: first tokens, whose queries are left out because they are unlike the others.
        epsilon: added to the attention, at least 0; a larger one gives more weight to the value.
    """

    name = "expected-attention"
    needs = frozenset({"queries", "memory", "pre_rope"})

    horizon: int = 512
    sinks: int = 4
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        check_at_least(self, horizon=1, sinks=0)
        if not 0 <= self.epsilon < math.inf:
            raise FastKVError(
                f"{self.name}: epsilon must be a finite number of at least 0, got {self.epsilon!r}; try 0.01"
            )

    def remember(self, signals: Signals) -> Tensor:
        """The score of every candidate, as the block's queries would have it; what was known where it has none."""
        assert signals.memory is not None
        if signals.queries is None:
            return signals.memory
        expected = self.expected(signals)
        return torch.where(signals.valid & (expected > 0), expected, signals.memory)

    def expected(self, signals: Signals) -> Tensor:
        """What queries to come are expected to give each candidate, [B, Hkv, N] fp32, positive; 0 in rows of no query.

        It needs `signals.queries` and the rotary embedding.
        """
        mean, covariance, count = self._queries_ahead(signals)
        layer, valid = signals.layer, signals.valid
        attention = ops.expected_attention(
            signals.keys, mean, covariance, layer.scale, valid=valid, backend=layer.backend
        )
        length = torch.linalg.vector_norm(signals.values.to(mean.dtype), dim=-1)
        known = ((attention + self.epsilon) * length).float().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(count > 0, known, 0)

    def score(self, signals: Signals) -> Tensor:
        """What is remembered; of generated tokens, the mean of the head's others."""
        return known_or_mean(signals)

    def _queries_ahead(self, signals: Signals) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [B, Hq, 1, D] and covariance [B, Hq, D, D] of queries to come, and from how many, [B, 1, 1]."""
        rotary = signals.layer.rotary
        assert signals.queries is not None and rotary is not None
        places = signals.positions[:, :1, -signals.queries.shape[2] :]
        valid = signals.valid[:, :1, -signals.queries.shape[2] :] & (places >= self.sinks)
        count = valid.sum(-1, keepdim=True)
        queries = rotary.unrotate(signals.queries.to(compute_dtype(signals.queries)), places)
        number = count[..., None].clamp(min=1)
        queries.masked_fill_(~valid[..., None], 0)  # in place, like the rest: a large copy of our own
        mean = queries.sum(2, keepdim=True) / number
        offset = queries.sub_(mean).mul_(valid[..., None].to(mean.dtype))
        covariance = offset.transpose(-1, -2) @ offset / number

        newest = torch.where(signals.valid, signals.positions, -1).amax((1, 2), keepdim=True)
        steps = torch.arange(1, self.horizon + 1, device=newest.device)
        turn = rotary.turn_ahead(newest, steps)
        half = rotary.turned(covariance, *turn)  # C is symmetric, so R C R^T = (R (R C)^T)^T
        covariance = rotary.turned(half.transpose(-1, -2), *turn)
        return rotary.turned(mean, *turn), covariance, count
