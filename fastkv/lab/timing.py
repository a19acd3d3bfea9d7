"""A clock, bytes of a process, and the full and a compressed cache timed by it.

torch and transformers alone, of any version, until a compressed cache is made: environments of peers use this, too.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

Step = Callable[[Tensor, Tensor], Tensor]  # tokens and their positions, both [B, 1], to logits [B, 1, V] or [B, V]


def decode(step: Step, token: Tensor, position: Tensor, num: int) -> Tensor:
    """The token [B, 1] after `num` greedy steps from a token [B, 1]; position [B, 1] is advanced in place."""
    for _ in range(num):
        token = step(token, position).reshape(len(token), -1).argmax(-1, keepdim=True)
        position += 1
    return token


def now() -> float:
    """Seconds, when everything launched so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Bytes above those when it was made: allocations on a GPU, the resident set of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            self.start: int | None = torch.cuda.memory_allocated(device)
            return
        release()
        self.start = None
        with suppress(OSError):  # where it is allowed, the high-water mark is that of what follows
            Path("/proc/self/clear_refs").write_text("5")
            self.start = resident_set("VmRSS")

    def peak(self) -> int | None:
        """The most so far; None where the system does not say."""
        if self.start is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return max(resident_set("VmHWM") - self.start, 0)


def release() -> None:
    """Give memory that was freed back to the system, or what takes its place later would not be seen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def resident_set(name: str) -> int:
    """Bytes of this process in memory, now ("VmRSS") or at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# Caches behind one interface, and how they are timed. Others join as subclasses of `Full`.


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
        """Tokens per KV head, mean."""
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
        from ..integrations.transformers.captured import capture_decode

        replay = capture_decode(self.model, cache, batch)
        return lambda token, position: replay(token)

    def resident(self, cache: Any) -> int:
        """What the cache itself says: slots, positions, scores, what is remembered of evicted tokens, scratch."""
        return cache.nbytes()

    def kept(self, cache: Any) -> int:
        """As of `Full`."""
        return round(sum(float(one.state.stored.float().mean()) for one in cache.compressed) / len(cache.compressed))


@torch.no_grad()
def timed(mine: Full, ids: Tensor, samples: int, period: int) -> Timed:
    """Read prompts [B, N] and decode greedily after them, a whole eviction period for each sample. Steps of the first
    period are not timed: they compile both kinds of steps, where there are two.
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
