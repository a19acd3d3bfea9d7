"""LagKV: keep the tokens whose numbers lie unevenly in the range of the text that follows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..reference import compute_dtype, position_order
from .base import Policy, Signals, check_at_least


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
