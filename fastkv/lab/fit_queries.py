"""`fastkv calibrate queries`: what the queries of every layer are like, in one pass over text; sums only are kept.

Mean query of every head before the rotary embedding, and by how much the length of each pair of numbers that turn
together exceeds, on average, the length of the pair's mean (TriAttention, arXiv:2604.04921, Sec. 4).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from ..api import patched
from ..budget import Budget
from ..calibration.files import describe, fingerprint
from ..calibration.fits import QueryCalibration
from ..errors import FastKVError
from ..policies import Policy, QueryStatistics, Signals
from ..rotary import Rotary
from . import common
from .fit_vector import add_corpus, checked, say_use, written


class Sums:
    """Sums over the queries of one layer, in float64.

    Attributes: count: queries of a head.  mean: [Hq, Dk], of queries before the embedding.  length: [Hq, F], of the
        lengths of their pairs after it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.length: Tensor | float = 0.0
        self.rotary: Rotary | None = None

    def add(self, queries: Tensor, positions: Tensor, rotary: Rotary) -> None:
        """Add queries [B, Hq, T, Dk] as turned to `positions` [B, 1, T]."""
        queries = queries.float()
        self.count += queries.shape[0] * queries.shape[2]
        self.mean = self.mean + rotary.unrotate(queries, positions).double().sum((0, 2))
        self.length = self.length + rotary.lengths(queries).double().sum((0, 2))
        self.rotary = rotary

    def statistics(self) -> QueryStatistics:
        """What they come to, on the CPU."""
        assert isinstance(self.mean, Tensor) and isinstance(self.length, Tensor) and self.rotary is not None
        mean = (self.mean / self.count).float()
        start = torch.zeros(1, dtype=torch.int64, device=mean.device)
        turned = self.rotary.ahead(mean[None, :, None], start[None, None], start)[0, :, 0]
        excess = (self.length / self.count).float() - self.rotary.lengths(turned)
        return QueryStatistics(mean.cpu(), excess.clamp(min=0).cpu())


@dataclass(frozen=True, eq=False)
class Recorder(Policy):
    """Adds up the queries of every block; nothing is ever evicted where it is used.

    Args: sums: layer -> sums.
    """

    name = "recorder"
    needs = frozenset({"queries", "memory", "pre_rope"})

    sums: dict[int, Sums]

    def remember(self, signals: Signals) -> Tensor:
        """Nothing new, but the sums grow."""
        assert signals.queries is not None and signals.layer.rotary is not None and signals.memory is not None
        positions = signals.positions[:, :1, -signals.queries.shape[2] :]
        self.sums.setdefault(signals.layer.index, Sums()).add(signals.queries, positions, signals.layer.rotary)
        return signals.memory

    def score(self, signals: Signals) -> Tensor:
        """Zeros."""
        assert signals.memory is not None
        return signals.memory


@torch.no_grad()
def fit(
    model: PreTrainedModel, batches: Iterable[Tensor], *, progress: Callable[[int], None] | None = None
) -> QueryCalibration:
    """Read text with a stock model.

    Args:
        model: a transformers model that `fastkv.patch` takes, not patched, in eval mode.
        batches: token ids, [B, T] each, no padding; B and T may vary. They are read once and nothing of them is kept.
        progress: called after each batch with the number of tokens read so far.
    Raises: FastKVError if the model cannot be patched or there is nothing to read.
    """
    common.check_stock("fit", model)
    sums: dict[int, Sums] = {}
    tokens = 0
    for ids in checked(batches, progress):
        with patched(model, Recorder(sums), Budget(tokens=ids.shape[1], sinks=0, recent=0)):
            model.base_model(input_ids=ids.to(model.device), use_cache=True)
        tokens += ids.numel()
    if not tokens:
        raise FastKVError("fit needs a sequence to read, got none; pass more text or shorter sequences")
    layers = {layer: sums[layer].statistics() for layer in sorted(sums)}
    for layer, known in layers.items():
        if not all(part.isfinite().all() for part in known):
            raise FastKVError(
                f"fit needs finite queries, layer {layer} has others; load the model in bfloat16 or float32"
            )
    return QueryCalibration(layers, fingerprint(model.config), describe(model.config), tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv calibrate queries`."""
    add_corpus(parser, "queries.safetensors")


def run(options: argparse.Namespace) -> None:
    """Read, write the file and say how to use it."""
    console = Console(highlight=False)
    use = f'fastkv.patch(model, fastkv.policies.get("triattention", calibration="{options.out}"))'
    say_use(options, console, written(options, console, fit).tokens, use)
