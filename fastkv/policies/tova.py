"""TOVA: keep what the latest query attends to, the same tokens in every head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Policy, Signals


@dataclass(frozen=True)
class TOVA(Policy):
    """Attention row of the last query, averaged over all heads of the layer; every KV head keeps the same tokens.

    Source: TOVA, Oren et al. 2024, arXiv:2401.06104. While decoding, the row is the mean over the queries since the
    last eviction, so `evict_every=1` is the paper's algorithm. The paper protects nothing: `Budget(sinks=0, recent=0)`.
    """

    name = "tova"
    needs = frozenset({"attention"})
    adaptive = False
    observation = 1

    def score(self, signals: Signals) -> Tensor:
        """Mean attention over the heads, [B, Hkv, N] fp32, the same for a token in all of them."""
        assert signals.attention is not None
        # A token may sit in another slot in another head: put the heads in order of position before averaging.
        last = torch.iinfo(signals.positions.dtype).max
        order = torch.where(signals.valid, signals.positions, last).argsort(dim=-1)
        weights = signals.attention.gather(-1, order)
        mean = signals.parallel.mean_heads(weights).expand_as(weights)
        return torch.empty_like(weights).scatter_(-1, order, mean)
