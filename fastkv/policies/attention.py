"""Keep what queries attend to: those of a window (SnapKV, PyramidKV), the last one alone (TOVA), all so far (H2O), or a
window, less what later keys repeat (R-KV).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from .. import ops
from ..reference import check_pool, compute_dtype, position_order
from ..reference.attention import masked_softmax
from .base import Policy, Shares, Signals, check_at_least, check_within


@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention of the last `window` queries, averaged over the group and pooled over neighbouring tokens.

    Source: SnapKV, Li et al. 2024, arXiv:2404.14469. While decoding, the queries since the last eviction are the
    window and tokens are scored one by one. A prompt shorter than the window shrinks it.

    Args:
        window: observation window, queries; these tokens are themselves kept by `Budget.recent`.
        pool: odd width of the average pooling; the paper also uses 5 (with window 64).
    """

    name = "snapkv"
    needs = frozenset({"attention"})

    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        check_at_least(self, window=1, pool=1)
        check_pool(self.pool)

    @property
    def observation(self) -> int:
        """The window."""
        return self.window

    def score(self, signals: Signals) -> Tensor:
        """Pooled window attention."""
        assert signals.attention is not None
        if signals.decoding:
            return signals.attention
        known = signals.attention, self.pool, signals.positions, signals.valid
        return ops.pool_scores(*known, backend=signals.layer.backend)


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """The score of SnapKV; layer budgets fall linearly from first to last, with the same total.

    Source: PyramidKV, Cai et al. 2024, arXiv:2406.02069. Where the budget says `layers="uniform"` this policy brings
    "pyramid", whose last layer gets a twentieth of the average (beta = 20); any other choice of layers is left alone.

    Args:
        window: observation window, queries; these tokens are themselves kept by `Budget.recent`.
        pool: odd width of the average pooling.
    """

    name = "pyramidkv"
    shares = Shares(layers="pyramid")


@dataclass(frozen=True)
class TOVA(Policy):
    """Attention row of the last query, averaged over the heads of the layer that hold the token. KV heads of equal
    budgets keep the same tokens, as in the paper.

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
        parallel = signals.layer.parallel
        # A token may sit in another slot in another head, or in none: add up what has the same position.
        weights, valid = parallel.gather(signals.attention), parallel.gather(signals.valid)
        places = torch.where(valid, parallel.gather(signals.positions), torch.iinfo(torch.int32).max).flatten(1)
        ordered, order = places.sort(-1)
        token = pad((ordered.diff(dim=-1) != 0).long(), (1, 0)).cumsum(-1)
        token = torch.empty_like(token).scatter_(-1, order, token).view(places.shape[0], weights.shape[1], -1)
        totals, holders = weights.new_zeros(2, *places.shape)
        for head in range(weights.shape[1]):  # one by one, so that a device adds up in this order
            totals.scatter_add_(-1, token[:, head], weights[:, head])
            holders.scatter_add_(-1, token[:, head], torch.ones_like(weights[:, head]))
        mean = totals / holders.clamp(min=1)
        return parallel.own(mean.gather(-1, token.flatten(1)).view_as(weights))


@dataclass(frozen=True)
class H2O(Policy):
    """score_j = sum over all queries so far of the attention that token j received, mean over the group.

    Source: H2O, Zhang et al. 2023, arXiv:2306.14048, Sec. 4. The sum is stored with each token, so it grows across
    prompt blocks and generated tokens; it starts with the queries that see the token first.

    Args:
        recent: share of the budget, the mean of the layer's heads, that goes to the most recent tokens, in [0, 1]; half
            in the paper. The head that keeps fewest tokens limits it.
    """

    name = "h2o"
    needs = frozenset({"attention", "memory"})

    recent: float = 0.5

    def __post_init__(self) -> None:
        check_within(self, 0, 1, recent=0.5)

    @property
    def shares(self) -> Shares:
        """The recent window."""
        return Shares(recent=self.recent)

    def remember(self, signals: Signals) -> Tensor:
        """The stored sum plus the attention since then, [B, Hkv, N] fp32: a mean times its number of queries."""
        assert signals.memory is not None and signals.attention is not None and signals.queried is not None
        return signals.memory + signals.attention * signals.queried

    def score(self, signals: Signals) -> Tensor:
        """The sum, [B, Hkv, N] fp32."""
        assert signals.memory is not None
        return signals.memory


ROWS = 256  # keys compared with all others at once


@dataclass(frozen=True)
class RKV(SnapKV):
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

    window: int = 8
    weight: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, 0, 1, weight=0.1)
        check_within(self, -1, 1, threshold=0.5)

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
