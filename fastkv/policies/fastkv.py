"""FastKV: keep what queries to come are expected to read, and keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops
from .base import Policy, SecondReading, Signals, check_at_least
from .expected import ExpectedAttention

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class FastKV(Policy):
    """score = z(E) + z(K): two reasons why a token may be needed, each as a z-score over the head's tokens.

    Source: fastkv's own sum of two published scores. With s the layer's scale, k the keys and v the values,

        E = log(mean over the group of softmax(log E_q[exp(s q.k)]) |v|)   Expected Attention (arXiv:2510.00636)
        K = -cos(mean of unit keys, k), before the rotary embedding           KeyDiff (arXiv:2504.15364)

    E is without the epsilon of its paper. It knows what most queries read, K what stands out whatever they read. No
    attention is computed: statistics of the queries and the keys are all they need. A prompt is read once, whole or in
    blocks; each block's queries judge all tokens anew. Between generated tokens, whose queries nobody keeps, E is what
    it was after the prompt, and of generated tokens the mean of the others. Of the evicted tokens a head keeps
    centroids, in a sixteenth of the bytes that its pairs would take in 16 bits.

    Args:
        horizon: positions to come, over which E averages the rotation.
    """

    name = "fastkv"
    correction = "centroids"
    needs = frozenset({"queries", "memory", "rotary"})

    horizon: int = 512

    def __post_init__(self) -> None:
        check_at_least(self, horizon=1)

    def expecting(self) -> ExpectedAttention:
        """What says E."""
        return ExpectedAttention(self.horizon, epsilon=0.0)

    def remember(self, signals: Signals) -> Tensor:
        """What every candidate is expected to receive, exp(E), as the block's queries have it."""
        return self.expecting().remember(signals)

    def score(self, signals: Signals) -> Tensor:
        """The sum of the z-scores, [B, Hkv, N] fp32."""
        backend = signals.layer.backend
        return ops.needed_scores(self.unlike(signals), signals.memory, None, signals.valid, backend=backend)

    def unlike(self, signals: Signals) -> Tensor:
        """K."""
        layer = signals.layer
        return ops.keydiff_scores(
            signals.keys,
            "normalized_mean",
            mask=signals.valid,
            positions=signals.positions,
            rotary=layer.rotary,
            backend=layer.backend,
        )


@dataclass(frozen=True)
class FastKVReread(FastKV):
    """score = z(E) + z(K) + z(N): `FastKV` with a second reading of the prompt, which says what the model looks up.

    Source: fastkv's own; the second reading is KVzip's (Kim et al. 2025, arXiv:2505.23416). N is |v| times the largest
    attention that any query of the second reading gave, in chunks of 512, and of tokens that were read once the mean of
    the others. Reading takes about twice as long and, until it ends, the memory of the whole cache. Between generated
    tokens K and N decide.

    Args:
        horizon: positions to come, over which E averages the rotation.
    """

    name = "fastkv-reread"
    second_reading = SecondReading(chunk=512)

    def remember(self, signals: Signals) -> Tensor:
        """What a token received on the second reading."""
        assert signals.memory is not None
        if signals.reread is None:
            return signals.memory
        length = torch.linalg.vector_norm(signals.values.float(), dim=-1)
        known = (signals.reread.received * length).clamp(min=TINY)
        return torch.where(signals.valid, known, 0)

    def score(self, signals: Signals) -> Tensor:
        """The sum of the z-scores, [B, Hkv, N] fp32."""
        read, valid, expected = signals.memory, signals.valid, None
        assert read is not None
        if signals.queries is not None:
            expected = self.expecting().remember(replace(signals, memory=torch.zeros_like(read)))
        return ops.needed_scores(self.unlike(signals), expected, read, valid, backend=signals.layer.backend)
