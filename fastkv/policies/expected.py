"""Keep what queries to come are expected to attend to: queries like those so far (Expected Attention), or like those of
a calibration text (TriAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import ops
from ..reference import compute_dtype, known_or_mean, z_scores
from .base import Policy, Signals, check_at_least, check_within


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """score_i = (epsilon + mean over the group of softmax_i(s q.k_i + s^2 k_i C k_i / 2)) |v_i|, s the layer's scale.

    Source: Expected Attention, Devoto et al. 2025, arXiv:2510.00636, Sec. 3. Queries are assumed to be Gaussian;
    E exp(s Q.k) then has this closed form. The mean q and the covariance C are those of the block's queries before the
    rotary embedding, turned by the mean rotation of the positions to come. As in kvpress, |v| stands for |W_o v|. A
    soft cap and learned sinks are ignored; the first tokens take part in the softmax, from which kvpress leaves them
    out. Every block scores all candidates anew. Queries of generated tokens are not kept; these tokens get the mean
    score of the others.

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
        check_within(self, 0, epsilon=0.01)

    def remember(self, signals: Signals) -> Tensor:
        """The score of every candidate, as the block's queries would have it; what was known where it has none."""
        assert signals.memory is not None
        if signals.queries is None:
            return signals.memory
        layer, rotary = signals.layer, signals.layer.rotary
        assert rotary is not None
        block = signals.queries, signals.positions, signals.valid
        ahead = ops.queries_ahead(*block, rotary, self.horizon, self.sinks, backend=layer.backend)
        tokens, rest = (signals.keys, signals.values), (layer.scale, self.epsilon, signals.memory)
        return ops.expected_attention(*tokens, *ahead, *rest, valid=signals.valid, backend=layer.backend)

    def score(self, signals: Signals) -> Tensor:
        """What is remembered; of generated tokens, the mean of the head's others."""
        assert signals.memory is not None
        return known_or_mean(signals.memory, signals.valid)


@dataclass(frozen=True)
class TriAttention(Policy):
    """score_i = max over the group of z_i(mean_d RoPE(q, p + d).k_i + sum_f (E|Q_f| - |q_f|) |k_if|), q = E Q.

    Source: TriAttention, Mao et al. 2026, arXiv:2604.04921, Sec. 4. Q are the queries of a head before the rotary
    embedding, in a calibration text; Q_f and k_if are pairs of numbers that turn together, p is the latest position,
    and d = 1, 2, 4, ... up to the horizon. The first term is the paper's trigonometric series in the distance,
    sum_f |q_f| |k_if| cos(w_f (p + d - p_i) + phi_f); the second accounts for the deviation of
    queries from their mean. z is over the tokens of a head. No query is needed, so the rule is the same for prompts
    and generated tokens.

    Args:
        calibration: file of `fastkv calibrate queries`; None for queries.safetensors where the model was loaded from.
        horizon: largest distance of a future query.
    """

    name = "triattention"
    needs = frozenset({"pre_rope", "query_statistics"})

    calibration: str | Path | None = None
    horizon: int = 65536

    def __post_init__(self) -> None:
        check_at_least(self, horizon=1)

    def score(self, signals: Signals) -> Tensor:
        """The largest z-score of the group, [B, Hkv, N]."""
        rotary, known = signals.layer.rotary, signals.layer.query_statistics
        assert rotary is not None and known is not None
        valid = signals.valid
        keys = torch.where(valid[..., None], signals.keys.to(compute_dtype(signals.keys)), 0)
        newest = torch.where(valid, signals.positions, -1).amax((1, 2), keepdim=True)
        steps = 2 ** torch.arange(self.horizon.bit_length(), device=keys.device)
        mean = rotary.ahead(known.mean[:, None].expand(len(keys), -1, -1, -1).to(keys.dtype), newest, steps)
        centres, lengths = mean.unflatten(1, (keys.shape[1], -1))[..., 0, :], rotary.lengths(keys).to(keys.dtype)
        excess = known.excess.to(keys.dtype).unflatten(0, (keys.shape[1], -1))
        logits = centres @ keys.transpose(-1, -2) + excess @ lengths.transpose(-1, -2)
        return z_scores(logits, valid[:, :, None].expand_as(logits)).amax(2)
