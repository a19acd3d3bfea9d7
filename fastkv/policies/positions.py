"""Keep tokens by where they are: the first and the latest (StreamingLLM), in some heads all of them (DuoAttention), or
any (random).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from .. import ops
from ..errors import FastKVError, alternatives
from .base import Policy, Shares, Signals, check_at_least, check_within


@dataclass(frozen=True)
class Random(Policy):
    """Uniform random scores, a fixed number per (layer, head, position).

    Source: folklore baseline (also in kvpress).

    Args:
        seed: of the random numbers.
    """

    name = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, seed=0)

    def score(self, signals: Signals) -> Tensor:
        """Hash of seed, layer, head and position."""
        layer, positions = signals.layer, signals.positions
        return ops.random_scores(positions, self.seed, layer.index, layer.parallel.rank * positions.shape[1])


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first `Budget.sinks` tokens and the latest ones.

    Source: StreamingLLM, Xiao et al. 2023, arXiv:2309.17453. Unlike the paper, tokens keep their true positions.
    """

    name = "streaming"

    def score(self, signals: Signals) -> Tensor:
        """The position itself."""
        return signals.positions.float()


@dataclass(frozen=True)
class DuoAttention(Streaming):
    """A fixed split: streaming heads keep sinks and recent tokens, retrieval heads share the rest of the budget.

    Source: DuoAttention, Xiao et al. 2024, arXiv:2410.10819, Sec. 2. Which heads retrieve was learnt beforehand and
    comes from a file. Within the budget, retrieval heads keep their latest tokens: they lose nothing as long as their
    share holds the context. `Budget.sinks` and `Budget.recent` size the streaming heads. In a layer of streaming heads
    alone, each keeps as much as the budget gives it.

    Args:
        pattern: path of the `full_attention_heads.tsv` that DuoAttention publishes for the model: one line per layer,
            one number in [0, 1] per KV head. Read once; later changes of the file go unnoticed.
        threshold: heads with at least this number are retrieval heads.
    """

    name = "duoattention"
    adaptive = False

    pattern: str | Path = ""
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_within(self, 0, 1, threshold=0.5)

    @property
    def shares(self) -> Shares:
        """The split."""
        return Shares(heads=self)

    def check(self, heads: Sequence[int]) -> None:
        """Raise FastKVError without a pattern, for one that cannot be read, or for one of another model."""
        found = [len(row) for row in _read(self.pattern)]
        if found != list(heads):
            raise FastKVError(
                f"duoattention: the pattern must have a line per layer and a number per KV head, {len(heads)} lines of "
                f"{alternatives(heads)} for this model, got {len(found)} of {alternatives(found)} in {self.pattern}; "
                "use the file made for this model"
            )

    def head_tokens(self, layer: int, heads: int, tokens: int, reserved: int) -> tuple[int, ...] | None:
        """`reserved` for streaming heads, an even share of the rest for the others; heads * tokens in all."""
        lines = _read(self.pattern)
        retrieval = [value >= self.threshold for value in lines[layer if len(lines) > 1 else 0]]  # of a layer by itself
        count = sum(retrieval)
        if not count:
            return None
        share, left = divmod(heads * tokens - (heads - count) * reserved, count)
        ranks = [sum(retrieval[:head]) for head in range(heads)]
        return tuple(share + (rank < left) if full else reserved for full, rank in zip(retrieval, ranks))


@cache
def _read(pattern: str | Path) -> list[list[float]]:
    """The numbers of a pattern file, a list per layer."""
    if not str(pattern):
        raise FastKVError(
            "duoattention needs the pattern file of the model, got none; download its full_attention_heads.tsv and use "
            "fastkv.policies.get('duoattention', pattern=path)"
        )
    try:
        lines = Path(pattern).read_text(encoding="utf-8").splitlines()
        rows = [[float(number) for number in line.split()] for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise FastKVError(
            f"duoattention: the pattern must be a readable file of numbers separated by tabs, got {pattern} ({error}); "
            "pass the full_attention_heads.tsv that DuoAttention publishes"
        ) from error
    if not rows or not all(math.isfinite(number) for row in rows for number in row):
        raise FastKVError(
            f"duoattention: the pattern must hold finite numbers, got {'others' if rows else 'none'} in {pattern}; "
            "pass the full_attention_heads.tsv that DuoAttention publishes"
        )
    return rows
