"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from .base import Policy, Signals


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first `Budget.sinks` tokens and the latest ones.

    Source: StreamingLLM, Xiao et al. 2023, arXiv:2309.17453. Unlike the paper, tokens keep their true positions.
    """

    name = "streaming"

    def score(self, signals: Signals) -> Tensor:
        """The position itself."""
        return ops.streaming_scores(signals.positions)
