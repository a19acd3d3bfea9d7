"""Keep what a second reading of the prompt attends to: KVzip, and Attention Matching, whose correction then fits biases
and values of what stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not all(is_whole(token, 0) for token in self.prompt):
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


MOST = math.exp(7)  # largest weight of a key while keys are pursued


@dataclass(frozen=True)
class AttentionMatching(KVzip):
    """score_j = root mean square of the attention of reference queries to j, or the order in which OMP picks keys.

    Source: Attention Matching, Zweiger et al. 2026, arXiv:2602.16284. Keys stay as they are. They are chosen by
    attention, or by orthogonal matching pursuit of the mass: the next key is the one whose column of M has the largest
    product with what is missing, z - M w, and w >= 0 is then fitted to z anew (M and z as in `Matching`). Its
    correction, "matching", fits a bias and a value to each kept token. Reference queries are some of those of a second
    reading of the prompt ("repeat-prefill"); the paper adds queries of answers that the model makes up.

    Tokens that are read once (generated ones and those of later prompts) are scored by the attention that they receive,
    as in `KVzip`, and compared with the scores of the second reading.

    Args:
        chunk: tokens that are fed again at once.
        prompt: token ids that are fed before each chunk.
        keys: "attention", or "omp", which takes a step for every kept token.
    """

    name = "attention-matching"
    correction = "matching"

    keys: str = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys not in ("attention", "omp"):
            raise FastKVError(f"attention-matching: keys must be 'attention' or 'omp', got {self.keys!r}")

    @property
    def second_reading(self) -> SecondReading:
        """That of KVzip, of which queries are kept."""
        return super().second_reading._replace(samples=True)

    def remember(self, signals: Signals) -> Tensor:
        """The score by attention, [B, Hkv, N] fp32; generated tokens get none."""
        if signals.reread is not None:
            signals = replace(signals, reread=replace(signals.reread, received=_root_mean_square(signals)))
        return super().remember(signals)

    def score(self, signals: Signals) -> Tensor:
        """What is remembered, or attention as in `KVzip`; after a second reading perhaps above 1, the keys that OMP
        picks; [B, Hkv, N] fp32.
        """
        scores = super().score(signals)
        if self.keys == "attention" or signals.reread is None:
            return scores
        return scores + pursued(*_mass(signals), signals.valid, signals.layer.tokens)


def _root_mean_square(signals: Signals) -> Tensor:
    """Of the weights that reference queries give each candidate, [B, Hkv, N] fp32."""
    assert signals.reread is not None
    total, queries = torch.zeros_like(signals.valid, dtype=torch.float32), signals.reread.asked.sum(-1)[:, None, None]
    for logits, visible in _logits(signals):
        weights, _ = masked_softmax(logits, visible)
        total = total + weights.square().mean(2).sum(2)
    return (total / queries.clamp(min=1)).sqrt()


def _logits(signals: Signals) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [B, Hkv, G, w, N] of some reference queries after another, and which of them count, broadcast to it."""
    reread, layer = signals.reread, signals.layer
    assert reread is not None
    for q, asked in zip(reread.queries.split(QUERY_CHUNK, 2), reread.asked.split(QUERY_CHUNK, 1)):
        visible = signals.valid[:, :, None, None] & asked[:, None, None, :, None]
        yield grouped_logits(q, signals.keys, layer.scale, layer.softcap), visible


def _mass(signals: Signals) -> tuple[Tensor, Tensor]:
    """M [B, Hkv, n, N] and z [B, Hkv, n, 1] of n = G W queries, 0 where nothing is visible."""
    parts = []
    for logits, visible in _logits(signals):
        logits = logits.masked_fill(~visible, -torch.inf)
        top = logits.amax(-1, keepdim=True)
        parts.append((logits - top.masked_fill(top == -torch.inf, 0)).exp().flatten(2, 3))
    mass = torch.cat(parts, 2)
    return mass, mass.sum(-1, keepdim=True)


def pursued(mass: Tensor, wanted: Tensor, valid: Tensor, num: int) -> Tensor:
    """num - i for the key that is picked as number i = 0, 1, ..., and 0 for the others: [B, Hkv, N] in mass's dtype.

    Columns that are picked are made orthogonal (Q R = M), so that each least squares solution is R^-1 Q^T z.

    Args: mass [B, Hkv, n, N]; wanted [B, Hkv, n, 1]; valid [B, Hkv, N] bool.
    """
    batch, heads, rows, length = mass.shape
    num = min(num, length)
    missing, order = wanted, mass.new_zeros(batch, heads, length)
    picked = mass.new_zeros(batch, heads, rows, num)
    q, r, z = torch.zeros_like(picked), mass.new_zeros(batch, heads, num, num), mass.new_zeros(batch, heads, num, 1)
    for number in range(num):
        gain = (missing.transpose(-1, -2) @ mass)[:, :, 0]
        best = gain.masked_fill(~valid | (order > 0), -torch.inf).argmax(-1, keepdim=True)
        order.scatter_(-1, best, num - number)
        column = mass.gather(-1, best[:, :, None].expand(-1, -1, rows, -1))
        rest = column
        for _ in range(2):  # once more for what rounding left
            along = q.transpose(-1, -2) @ rest
            rest, r[..., number : number + 1] = rest - q @ along, r[..., number : number + 1] + along
        norm = torch.linalg.vector_norm(rest, dim=2, keepdim=True)
        new = norm > 1e-5 * torch.linalg.vector_norm(column, dim=2, keepdim=True)
        picked[..., number], q[..., number] = column[..., 0], torch.where(new, rest / norm, 0)[..., 0]
        r[:, :, number, number] = torch.where(new, norm, 1)[..., 0, 0]  # a column of what is there already adds nothing
        z[:, :, number] = q[..., number][:, :, None].matmul(wanted)[..., 0]
        some = slice(number + 1)
        w = torch.linalg.solve_triangular(r[:, :, some, some], z[:, :, some], upper=True).clamp(1e-12, MOST)
        missing = wanted - picked[..., some] @ w
    return order
