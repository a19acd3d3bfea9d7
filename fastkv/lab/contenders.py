"""The full cache and a compressed one behind one interface, and how they are timed. Others join as subclasses.

torch and transformers alone, of any version, until a compressed cache is made: environments of peers use this, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from .shapes import Memory, Step, decode, now


@dataclass(frozen=True)
class Timed:
    """One measurement.

    Attributes:
        first: seconds to the first token.  steps: milliseconds per further token, one number a sample.
        peak: most bytes above the weights while the prompt was read and tokens were decoded; None if unknown.
        resident: bytes that the cache holds on to at the end.  kept: tokens per KV head after the prompt.
    """

    first: float
    steps: list[float]
    peak: int | None
    resident: int
    kept: int


class Full:
    """Everything is kept: transformers' dynamic cache, or its static one for a step that is compiled.

    Args:
        step: "eager", "compiled" (static shapes; with CUDA graphs on a GPU) or "captured", as compressed caches can be.
        room: tokens that are decoded after a prompt, at most.  block: prompts are read in so many tokens; None: whole.
    """

    def __init__(self, model: Any, step: str = "eager", room: int = 0, block: int | None = None) -> None:
        self.model, self.how, self.room, self.block = model, step, room, block

    def new(self, length: int) -> Any:
        """An empty cache for a prompt of that length and what is decoded after it."""
        config = self.model.config.get_text_config(decoder=True)
        if self.how == "eager":
            return DynamicCache(config=config)
        return StaticCache(config=config, max_cache_len=length + self.room)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, 1, V] after tokens [B, N]."""
        for block in ids.split(self.block or ids.shape[1], 1):
            logits = self.model(block, past_key_values=cache, logits_to_keep=1).logits
        return logits

    def step(self, cache: Any, batch: int) -> Step:
        """Decodes one token of every sequence; the only place where eager, compiled and captured differ."""
        model = self.model
        if self.how == "compiled":
            mode = "reduce-overhead" if model.device.type == "cuda" else None  # None: there are no graphs on a CPU
            model = torch.compile(model, fullgraph=True, mode=mode)
        return lambda token, position: model(token, past_key_values=cache, position_ids=position).logits

    def resident(self, cache: Any) -> int:
        """Bytes that the cache holds on to, used or not."""
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def kept(self, cache: Any) -> int:
        """Tokens per KV head, the most of all layers."""
        return int(cache.get_seq_length())


class Compressed(Full):
    """A patched model, which brings its cache and splits prompts by itself."""

    def new(self, length: int) -> Any:
        """An empty cache; the length does not matter."""
        from ..integrations.transformers.cache import FastKVCache

        return FastKVCache(self.model)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """As of `Full`."""
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits

    def step(self, cache: Any, batch: int) -> Step:
        """As of `Full`."""
        if self.how != "captured":
            return super().step(cache, batch)
        from ..integrations.transformers.cuda_graphs import capture_decode

        replay = capture_decode(self.model, cache, batch)
        return lambda token, position: replay(token)

    def resident(self, cache: Any) -> int:
        """What the cache itself says: slots, positions, scores, what is remembered of evicted tokens, scratch."""
        return cache.nbytes()

    def kept(self, cache: Any) -> int:
        """As of `Full`."""
        return max(int(layer.state.stored.max()) for layer in cache.compressed)


@torch.no_grad()
def timed(mine: Full, ids: Tensor, samples: int, period: int) -> Timed:
    """Read prompts [B, N] and decode greedily after them, a whole eviction period for each sample.

    Steps of the first period are not timed: they compile both kinds of steps, where there are two.
    """
    memory, cache = Memory(ids.device), mine.new(ids.shape[1])
    start = now()
    token = mine.read(ids, cache)[:, -1:].argmax(-1)
    first = now() - start
    peak, kept = memory.peak(), mine.kept(cache)
    position, step, steps = torch.full_like(token, ids.shape[1]), mine.step(cache, len(ids)), []
    token = decode(step, token, position, period + 1)
    for _ in range(samples):
        start = now()
        token = decode(step, token, position, period)
        steps.append((now() - start) / period * 1e3)
    if mine.how == "eager" or ids.device.type == "cuda":  # on a CPU the compiler's own memory would be counted
        peak = memory.peak()
    return Timed(first, steps, peak, mine.resident(cache), kept)


@torch.no_grad()
def warm_up(mine: Full, ids: Tensor) -> None:
    """Read prompts [B, N] and decode one token, so that kernels are compiled and chosen before a clock runs."""
    cache = mine.new(ids.shape[1])
    mine.read(ids, cache)
    mine.read(ids[:, :1], cache)
