"""FastKV: keep what queries to come are expected to read, keys unlike the others, and what any query looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import check_pool
from .base import Policy, SecondReading, Signals, check_at_least
from .expected import ExpectedAttention

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class FastKV(Policy):
    """score = z(E) + z(K) + z(N): three reasons why a token may be needed, each as a z-score over the head's tokens.

    Source: fastkv's own sum of three published scores. With s the layer's scale, k the keys and v the values,

        E = log(mean over the group of E_q[exp(s q.k)] |v|)   Expected Attention (arXiv:2510.00636), without its epsilon
        K = -cos(mean of unit keys, k), before the rotary embedding           KeyDiff (arXiv:2504.15364)
        N = pool(|v| max over queries of softmax(s q.k over all tokens))      Compactor's non-causal attention
                                                                              (arXiv:2507.08143), its maximum

    E knows what most queries read, K what stands out whatever they read, N what few of them read, and much. The mean
    over the queries of a text forgets what one of them looked up; the maximum does not. Every eighth query is asked,
    which is an eighth of the work. A prompt is read once, whole or in blocks: of earlier blocks N is
    remembered, E and K are computed anew. Between generated tokens, whose queries nobody keeps, K and N decide.
    Of the evicted tokens a head keeps centroids, in a sixteenth of the bytes of its pairs.

    Args:
        every: one query in so many is asked for N.
        pool: odd width of the mean pooling of N.
        horizon: positions to come, over which E averages the rotation.
    """

    name = "fastkv"
    correction = "centroids"
    needs = frozenset({"queries", "memory", "rotary"})

    every: int = 8
    pool: int = 3
    horizon: int = 512

    def __post_init__(self) -> None:
        check_at_least(self, every=1, pool=1, horizon=1)
        check_pool(self.pool)

    def remember(self, signals: Signals) -> Tensor:
        """N of every candidate, the largest so far; 0 for generated tokens."""
        layer, valid, backend = signals.layer, signals.valid, signals.layer.backend
        assert signals.memory is not None
        if signals.queries is None:
            return signals.memory
        most = ops.peak_attention(
            signals.queries,
            signals.keys,
            layer.scale,
            layer.softcap,
            valid=valid,
            every=self.every,
            sink_logits=layer.sink_logits,
            backend=backend,
        )
        known = (signals.values, signals.memory, signals.positions, valid)
        return ops.peaks_to_keep(most, *known, self.pool, backend=backend)

    def score(self, signals: Signals) -> Tensor:
        """The sum of the z-scores, [B, Hkv, N] fp32."""
        layer, valid, ahead = signals.layer, signals.valid, None
        assert signals.memory is not None
        unlike = ops.keydiff_scores(
            signals.keys,
            "normalized_mean",
            mask=valid,
            positions=signals.positions,
            rotary=layer.rotary,
            backend=layer.backend,
        )
        if signals.queries is not None:
            ahead = ExpectedAttention(horizon=self.horizon).ahead(signals)
        tokens = signals.keys, signals.values, valid
        return ops.needed_scores(unlike, signals.memory, *tokens, ahead, layer.scale, backend=layer.backend)


@dataclass(frozen=True)
class FastKVReread(FastKV):
    """`FastKV` with a second reading of the prompt, which says what the model looks up when it reads the same again.

    Source: fastkv's own; the second reading is KVzip's (Kim et al. 2025, arXiv:2505.23416). N is then |v| times the
    largest attention that any query of the second reading gave, in chunks of 512. Reading takes about twice as long
    and, until it ends, the memory of the whole cache.

    Args:
        every: for `FastKV` only.
        pool: odd width of the mean pooling of N.
        horizon: positions to come, over which E averages the rotation.
    """

    name = "fastkv-reread"
    second_reading = SecondReading(chunk=512)

    def remember(self, signals: Signals) -> Tensor:
        """What a token received on the second reading; of tokens that were read once what `FastKV` remembers."""
        if signals.reread is None:
            return super().remember(signals)
        length = torch.linalg.vector_norm(signals.values.float(), dim=-1)
        known = (signals.reread.received * length).clamp(min=TINY)
        return torch.where(signals.valid, known, 0)
