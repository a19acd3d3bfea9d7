"""R-KV: keep tokens that are attended to and not repeated later."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from ..errors import FastKVError
from ..reference import check_pool, compute_dtype, position_order
from ..reference.attention import masked_softmax
from .base import Policy, Signals, check_at_least

ROWS = 256  # keys compared with all others at once


@dataclass(frozen=True)
class RKV(Policy):
    """score_i = weight a_i - (1 - weight) softmax_i(mean_j s_ji), a the attention, s_ji = cos(k_j, k_i) the redundancy.

    Source: R-KV, Cai et al. 2025, arXiv:2505.24133, Sec. 3. Attention is that of the last `window` queries, and of a
    token and its neighbours the largest. s_jj is 0, and so is s_ji where i is the most recent token that is like j, by
    a cosine above the threshold: of tokens that repeat each other, the latest stays. The authors' code takes the
    largest logit of the group where this takes the mean weight. Made for long outputs: while decoding, the window is
    the queries since the last eviction.

    Args:
        window: observation window, queries; these tokens are themselves kept by `Budget.recent`.
        pool: odd width of the max pooling of the attention.
        weight: of the attention, in [0, 1]; the rest is that of the redundancy.
        threshold: cosine above which two keys are alike.
    """

    name = "rkv"
    needs = frozenset({"attention"})

    window: int = 8
    pool: int = 7
    weight: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(self, window=1, pool=1)
        check_pool(self.pool)
        if not 0 <= self.weight <= 1 or not math.isfinite(self.threshold):
            raise FastKVError(
                f"rkv: weight must be in [0, 1] and threshold finite, got {self.weight!r} and {self.threshold!r}; the "
                "paper's code uses 0.1 and 0.5"
            )

    @property
    def observation(self) -> int:
        """The window."""
        return self.window

    def score(self, signals: Signals) -> Tensor:
        """Attention less redundancy, [B, Hkv, N] fp32."""
        assert signals.attention is not None
        positions, valid = signals.positions, signals.valid
        order, inverse = position_order(positions, valid)
        ordered = torch.where(valid, signals.attention, 0).gather(-1, order)
        attention = max_pool1d(ordered, self.pool, stride=1, padding=self.pool // 2).gather(-1, inverse)
        repeated, _ = masked_softmax(redundancy(signals.keys, positions, valid, self.threshold), valid)
        return self.weight * attention - (1 - self.weight) * repeated


def redundancy(keys: Tensor, positions: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Mean cosine of every key [B, Hkv, N, D] with the others, except those that it is the latest like: [B, Hkv, N].

    Cost: N^2 D, with N ROWS numbers in memory for each head.
    """
    unit = normalize(torch.where(valid[..., None], keys.to(compute_dtype(keys)), 0), dim=-1)
    places = torch.where(valid, positions, -1)
    total = unit.new_zeros(places.shape)
    for some, place in zip(unit.split(ROWS, 2), places.split(ROWS, 2)):
        other = places[:, :, None] != place[..., None]
        cosine = some @ unit.transpose(-1, -2)
        like = other & (cosine > threshold)
        latest = torch.where(like, places[:, :, None], -1).amax(-1, keepdim=True)
        total += torch.where(other & ~(like & (places[:, :, None] == latest)), cosine, 0).sum(2)
    return total / valid.sum(-1, keepdim=True).clamp(min=1)
