"""Random-weight models of named shapes, a clock, and the full and a compressed cache timed by it.

Speed and memory do not depend on what the weights are. Models have the same numbers under every version of
transformers. torch and transformers alone, of any version, until a compressed cache is made: environments of peers use
this, too.
"""

from __future__ import annotations

import ctypes
import gc
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from ..errors import FastKVError

LONGEST = 262_144  # positions
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
).split()


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes: model_type: of transformers.  sizes: see `SIZES`.  more: what else differs from that type's defaults.
    """

    model_type: str
    sizes: tuple[int, ...]
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def layers(self) -> int:
        """How many."""
        return self.sizes[3]

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of layers."""
        return replace(self, sizes=(*self.sizes[:3], layers, *self.sizes[4:]))

    def config(self) -> Any:
        """Of transformers."""
        settings = {**dict(zip(SIZES, self.sizes)), **dict(self.more), "max_position_embeddings": LONGEST}
        return AutoConfig.for_model(self.model_type, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)

    def parameters(self) -> int:
        """Numbers that its weights are."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(self.config()).parameters())

    @torch.no_grad()
    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model in eval mode. Every matrix is drawn by a generator seeded with its name; vectors stay as made."""
        with device:
            model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
                weight.normal_(0, 0.02, generator=generator)
        return model


TIED, UNTIED = ("tie_word_embeddings", True), ("tie_word_embeddings", False)


def gemma(*sizes: int, window: int = 1024) -> Shape:
    """Of Gemma 3: every sixth layer attends to everything, the others to a window."""
    window_of = ("sliding_window", window), ("sliding_window_pattern", 6), ("query_pre_attn_scalar", sizes[-1])
    return Shape("gemma3_text", sizes, (TIED, *window_of))


SHAPES = {
    "llama-3.1-8b": Shape("llama", (128_256, 4096, 14_336, 32, 32, 8, 128), (UNTIED,)),
    "llama-3.2-3b": Shape("llama", (128_256, 3072, 8192, 28, 24, 8, 128), (TIED,)),
    "qwen3-4b": Shape("qwen3", (151_936, 2560, 9728, 36, 32, 8, 128), (TIED,)),
    "gemma-3-12b": gemma(262_208, 3840, 15_360, 48, 16, 8, 256),
    "llama-small": Shape("llama", (1000, 256, 688, 4, 4, 2, 64), (UNTIED,)),
}


def fitting(name: str, free: int, tokens: int, dtype: torch.dtype) -> Shape:
    """The shape of that name, with fewer layers where it does not fit.

    Args: free: bytes there are.  tokens: of the largest full cache, all sequences together.
    Raises: FastKVError for an unknown name, or if not even one layer fits.
    """
    if name not in SHAPES:
        raise FastKVError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}; or give a checkpoint with --model")
    shape = SHAPES[name]
    one, two = shape.with_layers(1), shape.with_layers(2)
    each = dtype.itemsize * (two.parameters() - one.parameters() + tokens * 2 * shape.sizes[5] * shape.sizes[6])
    fixed = dtype.itemsize * (2 * one.parameters() - two.parameters()) + working_bytes(shape.config(), tokens, dtype)
    layers = min((free - fixed) // each, shape.layers)
    if layers < 1:
        raise FastKVError(
            f"one layer of {name} and a full cache of {tokens} tokens need {(fixed + each) / 2**30:.1f} GiB, there are "
            f"{free / 2**30:.1f}; choose smaller --contexts, a smaller --batch or another --shape"
        )
    return shape.with_layers(layers)


def working_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """About what one layer takes while it reads a prompt of so many tokens, all sequences together."""
    text = config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return dtype.itemsize * tokens * (3 * inner + 8 * text.hidden_size)


# Seconds, decode steps and bytes of a process.

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
        else:
            release()
            self.start = resident_set("VmRSS") if forget_peak() else None

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


def forget_peak() -> bool:
    """From here on the high-water mark of this process is that of what follows. False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


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
        from ..integrations.transformers.forward import capture_decode

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
