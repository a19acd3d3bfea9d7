"""KVzip: keep what the model needs to repeat the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FastKVError
from .base import Policy, SecondReading, Signals, check_at_least


@dataclass(frozen=True)
class KVzip(Policy):
    """score_j = the largest attention weight that token j receives, from any query of its group, on a second reading.

    Source: KVzip, Kim et al. 2025, arXiv:2505.23416, Sec. 3. The context is read, then fed again in chunks, and only
    then compressed, so the score depends on no question and the compressed cache serves many. It costs a second prefill
    and, until that ends, the memory of the whole cache. Generated tokens are never read again: they are scored by the
    attention they receive.

    Args:
        chunk: tokens that are fed again at once.
        prompt: token ids of "Repeat the previous context exactly." in the model's vocabulary, fed before each chunk;
            empty feeds the chunk alone.
    """

    name = "kvzip"
    needs = frozenset({"attention", "memory"})
    observation = 1  # query; what counts while a prompt is read is the second reading

    chunk: int = 2048
    prompt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_at_least(self, chunk=1)
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in self.prompt):
            raise FastKVError(
                f"kvzip: prompt must hold token ids of at least 0, got {self.prompt!r}; pass tokenizer(...).input_ids"
            )

    @property
    def second_reading(self) -> SecondReading:
        """The chunks and what is asked before each."""
        return SecondReading(self.chunk, self.prompt)

    def remember(self, signals: Signals) -> Tensor:
        """The largest weight so far, [B, Hkv, N] fp32; generated tokens get none."""
        assert signals.memory is not None and signals.attention is not None
        known = signals.attention if signals.reread is None else signals.reread.received
        return signals.memory if signals.decoding else torch.maximum(signals.memory, known)

    def score(self, signals: Signals) -> Tensor:
        """What is remembered, or the attention of tokens that were not read twice; [B, Hkv, N] fp32."""
        assert signals.memory is not None and signals.attention is not None
        return torch.where(signals.memory > 0, signals.memory, signals.attention)
