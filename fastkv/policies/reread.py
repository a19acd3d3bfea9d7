"""Keep what a second reading of the prompt attends to: KVzip, and Attention Matching, whose correction then fits biases
and values of what stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import FastKVError, is_whole
from ..reference.attention import QUERY_CHUNK, grouped_logits, masked_softmax
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
        if isinstance(self.prompt, (list, tuple)):
            object.__setattr__(self, "prompt", tuple(self.prompt))
        if not isinstance(self.prompt, tuple) or not all(is_whole(token, 0) for token in self.prompt):
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


@dataclass(frozen=True)
class AttentionMatching(KVzip):
    """score_j = root mean square of the attention of reference queries to j.

    Source: Attention Matching, Zweiger et al. 2026, arXiv:2602.16284, with keys that stay as they are, chosen by
    attention. Its correction, "matching", fits a bias and a value to each kept token. Reference queries are some of
    those of a second reading of the prompt ("repeat-prefill"); the paper adds queries of answers that the model makes
    up, and keys that are chosen one by one.

    Tokens that are read once (generated ones and those of later prompts) are scored by the attention that they receive,
    as in `KVzip`, and compared with the scores of the second reading.

    Args:
        chunk: tokens that are fed again at once.
        prompt: token ids that are fed before each chunk.
    """

    name = "attention-matching"
    correction = "matching"

    @property
    def second_reading(self) -> SecondReading:
        """That of KVzip, of which queries are kept."""
        return super().second_reading._replace(samples=True)

    def remember(self, signals: Signals) -> Tensor:
        """The score by attention, [B, Hkv, N] fp32; generated tokens get none."""
        if signals.reread is not None:
            signals = replace(signals, reread=replace(signals.reread, received=_root_mean_square(signals)))
        return super().remember(signals)


def _root_mean_square(signals: Signals) -> Tensor:
    """Of the weights that reference queries give each candidate, [B, Hkv, N] fp32."""
    reread, layer = signals.reread, signals.layer
    assert reread is not None
    total, queries = torch.zeros_like(signals.valid, dtype=torch.float32), reread.asked.sum(-1)[:, None, None]
    for q, asked in zip(reread.queries.split(QUERY_CHUNK, 2), reread.asked.split(QUERY_CHUNK, 1)):
        logits = grouped_logits(q, signals.keys, layer.scale, layer.softcap)
        weights, _ = masked_softmax(logits, signals.valid[:, :, None, None] & asked[:, None, None, :, None])
        total = total + weights.square().mean(2).sum(2)
    return (total / queries.clamp(min=1)).sqrt()
