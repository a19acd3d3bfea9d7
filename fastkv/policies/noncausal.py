"""Non-causal attention: keep what the tokens around it attend to; the part of Compactor that reads queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import check_pool, neighbour_mean
from .base import Policy, Signals, check_at_least


@dataclass(frozen=True)
class NonCausal(Policy):
    """score_i = |v_i| times the pooled attention that token i gets from its chunk, tokens before and after it alike.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.3, Eq. 5. Chunks do not reach across prompt
    blocks, and a shorter last chunk has neither padded rows nor padded columns. Pooling averages over real neighbours
    only, so the ends are not favoured. The score of a prompt token is computed once, with its block, and remembered;
    a generated token, for which nobody asked without a causal mask, counts as much as the mean of the others.

    Args:
        chunk: tokens that attend to each other.
        pool: odd width of the mean pooling; the paper names none.
    """

    name = "noncausal"
    needs = frozenset({"queries"})
    remembers = True

    chunk: int = 256
    pool: int = 5

    def __post_init__(self) -> None:
        check_at_least(self, chunk=1, pool=1)
        check_pool(self.pool)

    def remember(self, signals: Signals) -> Tensor:
        """The score of each token of a prompt block; 0, which no known score is, for generated tokens."""
        assert signals.memory is not None
        if signals.queries is None:
            return signals.memory
        start = signals.keys.shape[2] - signals.queries.shape[2]
        valid = signals.valid[:, :, start:].contiguous()
        keys, positions = signals.keys[:, :, start:], signals.positions[:, :, start:]
        mass = ops.noncausal_attention_mass(
            signals.queries,
            keys,
            signals.scale,
            self.chunk,
            softcap=signals.softcap,
            mask=valid,
            backend=signals.backend,
        )
        length = torch.linalg.vector_norm(signals.values[:, :, start:].float(), dim=-1)
        score = (neighbour_mean(mass, self.pool, positions, valid) * length).float()
        known = score.clamp(min=torch.finfo(torch.float32).tiny)  # also where the value is zero
        return torch.cat([signals.memory[:, :, :start], torch.where(valid, known, 0)], 2)

    def score(self, signals: Signals) -> Tensor:
        """The remembered score; where there is none, the mean of those that the head remembers."""
        assert signals.memory is not None
        known = signals.valid & (signals.memory > 0)
        score = torch.where(known, signals.memory, 0)
        mean = score.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(known, score, mean)
