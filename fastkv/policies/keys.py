"""Keep keys that are short (KNorm), unlike the others (KeyDiff), far from their mean (ManifoldKV), or whose numbers lie
unevenly in the range of the text that follows them (LagKV).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..reference import check_keydiff, check_metric, compute_dtype, position_order
from .base import Policy, Shares, Signals, check_at_least, check_within


@dataclass(frozen=True)
class KNorm(Policy):
    """score_i = -|k_i|: in many heads the keys that receive most attention have the smallest norm.

    Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arXiv:2406.11430.
    """

    name = "knorm"

    def score(self, signals: Signals) -> Tensor:
        """Negative Euclidean norm of the key, in fp32."""
        return -torch.linalg.vector_norm(signals.keys.to(compute_dtype(signals.keys)), dim=-1)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """score_i = -cos(anchor, k_i): attention-free, so it works with any attention kernel and in blocks.

    Source: KeyDiff, Park et al. 2025, arXiv:2504.15364, Sec. 3.2 and 3.3.

    Args:
        anchor: "mean", "normalized_mean" (Eq. 8), "median" or "pairwise" (Eq. 7).
        distance: "cosine"; "dot" and "euclidean" are the paper's ablation.
        sliding_window: share of the budget reserved for the most recent tokens (0.2 in the reasoning experiments).
    """

    name = "keydiff"

    anchor: str = "mean"
    distance: str = "cosine"
    sliding_window: float = 0.0

    def __post_init__(self) -> None:
        check_within(self, 0, 1, sliding_window=0.2)
        check_keydiff(self.anchor, self.distance)

    @property
    def shares(self) -> Shares:
        """The sliding window."""
        return Shares(recent=self.sliding_window)

    def score(self, signals: Signals) -> Tensor:
        """Negative similarity to the anchor of the cached keys."""
        keys, valid, backend = signals.keys, signals.valid, signals.layer.backend
        return ops.keydiff_scores(keys, self.anchor, distance=self.distance, mask=valid, backend=backend)


@dataclass(frozen=True)
class Manifold(Policy):
    """score_i = |k_i - mu|, mu the mean key of the head: unlike a cosine, it also depends on the norm of the key.

    Source: ManifoldKV, Datta et al. 2026, arXiv:2602.08343, Sec. 3.1, Eq. 4.

    Args:
        window: cached tokens, consecutive in the text, that share a mean; None for all of them.
        metric: "l2"; "l1", "linf" and "cosine" are the paper's ablation (Table 7).
    """

    name = "manifold"

    window: int | None = None
    metric: str = "l2"

    def __post_init__(self) -> None:
        if self.window is not None:
            check_at_least(self, window=1)
        check_metric(self.metric, self.window)

    def score(self, signals: Signals) -> Tensor:
        """Distance of each key to the mean of the cached keys of its window."""
        keys, valid, backend = signals.keys, signals.valid, signals.layer.backend
        if self.window is None or self.window >= keys.shape[2]:
            return ops.manifold_scores(keys, None, self.metric, mask=valid, backend=backend)
        order, inverse = position_order(signals.positions, valid)  # windows are cut in the order of the text
        keys, valid = keys.gather(2, order[..., None].expand_as(keys)), valid.gather(2, order)
        return ops.manifold_scores(keys, self.window, self.metric, mask=valid, backend=backend).gather(2, inverse)


@dataclass(frozen=True)
class WindowedManifold(Manifold):
    """ManifoldKV with a mean key per window: over a long text a single mean is close to no token in particular.

    Source: WindowedManifoldKV, Datta et al. 2026, arXiv:2602.08343, Sec. 3.3, Alg. 2. The last window may be shorter;
    selection is global over all windows.

    Args:
        window: cached tokens, consecutive in the text, that share a mean; None for all of them.
        metric: "l2"; "l1", "linf" and "cosine" are the paper's ablation (Table 7).
    """

    name = "manifold-windowed"

    window: int | None = 4096


@dataclass(frozen=True)
class LagKV(Policy):
    """score_i = rank of u(k_i) + u(v_i) in its partition, u(x_i) = softmax_i std_d ((x_id - lo_d) / (hi_d - lo_d)).

    Source: LagKV, Liang et al. 2025, arXiv:2504.04704, Sec. 3. The cached tokens of a head, in the order of the text,
    are cut into partitions; lo and hi are the least and the largest number of a channel in the partition that follows.
    Ranks give all partitions the same share of the budget. The last whole partition and the rest have no successor to
    be compared with and stay, the latest tokens first. A channel in which the successor does not vary counts as 0.
    Unlike in the paper, attention sinks are in the first partition; `Budget.sinks` protects them.

    Args:
        lag: tokens of a partition, at least 2; a quarter of the budget if that is less, so that the partition that
            stays leaves room for others.
    """

    name = "lagkv"
    adaptive = False

    lag: int = 128

    def __post_init__(self) -> None:
        check_at_least(self, lag=2)

    def score(self, signals: Signals) -> Tensor:
        """The rank as a share, [B, Hkv, N] fp32; at least 1 for tokens without a successor."""
        lag = max(min(self.lag, signals.layer.tokens // 4), 2)
        order, inverse = position_order(signals.positions, signals.valid)
        num = order.shape[-1]
        place = torch.arange(num, device=order.device)
        compared = place // lag < signals.valid.sum(-1, keepdim=True) // lag - 1
        uneven = unevenness(signals.keys, order, lag) + unevenness(signals.values, order, lag)
        rank = uneven.argsort(dim=-1, stable=True).argsort(dim=-1).flatten(2)[..., :num]
        return torch.where(compared, rank / lag, 1 + place / num).gather(-1, inverse)


def unevenness(rows: Tensor, order: Tensor, lag: int) -> Tensor:
    """u of keys or values [B, Hkv, N, D], sorted by `order` [B, Hkv, N], in each partition: [B, Hkv, N / lag, lag].

    N is rounded up to whole partitions; the numbers of the last ones mean nothing where tokens are missing.
    """
    rows = rows.gather(2, order[..., None].expand_as(rows)).to(compute_dtype(rows))
    parts = pad(rows, (0, 0, 0, -rows.shape[2] % lag)).unflatten(2, (-1, lag))
    low, high = parts.amin(3, keepdim=True).roll(-1, 2), parts.amax(3, keepdim=True).roll(-1, 2)
    varies = high > low
    share = torch.where(varies, (parts - low) / torch.where(varies, high - low, 1), 0)
    return share.std(-1).softmax(-1)
