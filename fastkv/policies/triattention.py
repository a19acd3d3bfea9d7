"""TriAttention: keep what queries like those of a calibration text would attend to, from later positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..reference import compute_dtype, z_scores
from .base import Policy, Signals, check_at_least


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
