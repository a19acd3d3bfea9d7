"""One cache at one shape: time to the first token, milliseconds per further token, and memory.

A sample of decoding is a whole eviction period, so that every sample pays for its evictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from ...api import patched
from ...budget import Budget
from ...config import EVICT_EVERY
from ...integrations.transformers import stock
from ...integrations.transformers.cache import FastKVCache
from ...integrations.transformers.cuda_graphs import capture_decode
from ...policies import Policy
from ..common import FULL
from .clock import Memory, Step, decode, now


@dataclass(frozen=True)
class Settings:
    """What all caches of a run share.

    Attributes:
        block: a compressed cache reads its prompt in blocks of that many tokens; "auto", or None for all at once.
        samples: of decode steps in one measurement.  period: steps of a sample, and between evictions.
        graphs: whether decode steps are CUDA graphs, on both sides.  slots: how compressed caches store pairs.
        heads: how many tokens each keeps, as in `fastkv.Budget`; of random weights none needs more than others.
    """

    block: int | str | None = "auto"
    samples: int = 4
    period: int = EVICT_EVERY
    graphs: bool = False
    slots: str = "auto"
    heads: str = "uniform"

    @property
    def room(self) -> int:
        """Tokens that are decoded after the prompt."""
        return (self.samples + 1) * self.period + 1


@dataclass(frozen=True)
class Case:
    """A cache at a shape: `FULL` and no budget, or a policy and tokens per KV head."""

    policy: str
    budget: int
    context: int
    batch: int


@dataclass(frozen=True)
class Timed:
    """One measurement.

    Attributes:
        first: seconds to the first token.  steps: milliseconds per further token, one number a sample.
        peak: most bytes above the weights while the prompt was read and tokens were decoded; None if unknown.
        resident: bytes that the cache holds on to at the end.  kept: tokens per KV head in it, the most of all layers.
    """

    first: float
    steps: list[float]
    peak: int | None
    resident: int
    kept: int


class FullCache:
    """The stock model: everything is kept, and a prompt is read at once."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model, self.settings = model, settings

    def new(self, length: int) -> Any:
        """An empty cache for a prompt of that length and what is decoded after it."""
        config = self.model.config.get_text_config(decoder=True)
        if self.settings.graphs:
            return StaticCache(config=config, max_cache_len=length + self.settings.room)
        return DynamicCache(config=config)

    def step(self, cache: Any, batch: int) -> Step:
        """Decodes one token of every sequence."""
        model = self.model
        if self.settings.graphs:
            model = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        return lambda token, position: model(token, **{stock.CACHE: cache}, position_ids=position).logits

    def resident(self, cache: Any) -> int:
        """Bytes that the cache holds on to."""
        if self.settings.graphs:
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return sum(stock.nbytes(layer) for layer in cache.layers)

    def kept(self, cache: Any) -> int:
        """Tokens per KV head, the most of all layers."""
        return int(cache.get_seq_length())


class CompressedCache(FullCache):
    """A patched model, which brings its cache."""

    def new(self, length: int) -> FastKVCache:
        """An empty cache; the length does not matter."""
        return FastKVCache(self.model)

    def step(self, cache: Any, batch: int) -> Step:
        """Decodes one token of every sequence."""
        if not self.settings.graphs:
            return super().step(cache, batch)
        replay = capture_decode(self.model, cache, batch)
        return lambda token, position: replay(token)

    def resident(self, cache: Any) -> int:
        """What the cache itself says: slots, positions, scores, what is remembered of evicted tokens, scratch."""
        return cache.nbytes()

    def kept(self, cache: Any) -> int:
        """Tokens per KV head, the most of all layers."""
        return max(int(layer.state.stored.max()) for layer in cache.compressed)


@contextmanager
def contender(model: Any, policy: str | Policy, budget: int, settings: Settings) -> Iterator[FullCache]:
    """The model with that cache, for the length of a with block. Raises FastKVError if the model is refused."""
    if policy == FULL:
        yield FullCache(model, settings)
        return
    static = True if settings.graphs else None
    how = {"prefill_block": settings.block, "evict_every": settings.period, "slots": settings.slots}
    with patched(model, policy, Budget(tokens=budget, heads=settings.heads), static=static, **how):
        yield CompressedCache(model, settings)


@torch.no_grad()
def measure(mine: FullCache, ids: Tensor) -> Timed:
    """Read prompts [B, N] and decode greedily after them; steps of the first period are not timed: they compile."""
    settings, memory = mine.settings, Memory(ids.device)
    cache = mine.new(ids.shape[1])
    start = now()
    token = mine.model(ids, **{stock.CACHE: cache}, logits_to_keep=1).logits[:, -1:].argmax(-1)
    first = now() - start
    position = torch.full_like(token, ids.shape[1])
    step = mine.step(cache, len(ids))
    token = decode(step, token, position, settings.period + 1)
    steps = []
    for _ in range(settings.samples):
        start = now()
        token = decode(step, token, position, settings.period)
        steps.append((now() - start) / settings.period * 1e3)
    return Timed(first, steps, memory.peak(), mine.resident(cache), mine.kept(cache))


@torch.no_grad()
def warm_up(mine: FullCache, ids: Tensor) -> None:
    """Read prompts [B, N] and decode one token, so that kernels are compiled and chosen before a clock runs."""
    cache = mine.new(ids.shape[1])
    mine.model(ids, **{stock.CACHE: cache}, logits_to_keep=1)
    mine.model(ids[:, :1], **{stock.CACHE: cache})


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on the device; on a CPU those that the system says it can give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
