"""Keep what the last queries attend to: those of a window (SnapKV, PyramidKV), or the last one alone (TOVA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import check_pool, in_order
from .base import Policy, Shares, Signals, check_at_least


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
        return ops.pool_scores(signals.attention, self.pool, signals.positions, signals.valid)


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
        order = in_order(signals.positions, signals.valid)
        weights = signals.attention.gather(-1, order)
        mean = signals.layer.parallel.mean_heads(weights).expand_as(weights)
        return torch.empty_like(weights).scatter_(-1, order, mean)
