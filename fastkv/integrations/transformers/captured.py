"""Decode steps as CUDA graphs: for loops of one's own, and those of `generate`.

The host takes longer to launch the kernels of a step than a GPU to run them; a replayed graph is one launch. Compiling
the step instead, as `generate` does with stock models, takes more than a minute for 30 layers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache as remembered
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...backend import Parallel
from ...cache import Tick
from ...errors import FastKVError
from .cache import FastKVCache
from .selfcheck import FAILURES
from .stock import CACHE

CAPTURES = threading.Lock()  # torch makes one capture at a time
WARM_UP = 3  # steps before a capture, in which kernels are compiled and chosen


def capture_decode(model: Module, cache: FastKVCache, batch_size: int) -> DecodeStep:
    """Capture the decode step of a patched model as two CUDA graphs, one of which evicts.

    A cache that has read a prompt continues from there. An empty cache gets its slots now, so that one captured step
    serves all prompts that are read into it, with `reset()` between them. On a CPU, which has no graphs, the same calls
    run the model itself.

    Args: model: patched.  cache: a static cache of the model (`static=True` where that is not the default).
        batch_size: sequences of the cache.
    Raises: FastKVError if the cache is not static, holds another number of sequences, or is empty and its slots depend
        on the prompt.
    """
    if not isinstance(cache, FastKVCache):
        raise FastKVError(f"capture_decode needs a FastKVCache, got {type(cache).__name__}; make one of the model")
    if not cache.is_compileable:
        raise FastKVError(
            "capture_decode needs a cache that stays where it is, got one that does not; patch with static=True or "
            "make a FastKVCache(model, static=True)"
        )
    config, first = cache.config, cache.compressed[0]
    if first.cache.started and first.batch_size != batch_size:
        raise FastKVError(f"the cache holds {first.batch_size} sequences, got batch_size={batch_size}; they must agree")
    if first.cache.started and not cache.rolled:
        raise FastKVError(
            "the sliding windows of a loaded cache do not know its padding, got no step since; run the model for one "
            "token with its attention_mask first"
        )
    if any(layer.cache.anew for layer in cache.compressed):
        raise FastKVError(
            "the heads of a loaded cache get other slots at its next eviction, got none since; run the model for "
            f"{config.evict_every} tokens first"
        )
    if not first.cache.started and (config.budget.needs_prompt or config.deferred):
        raise FastKVError(
            "the size of this cache depends on its prompt, got an empty cache; read the prompt first, or give "
            "Budget(context=...) for calibrated heads"
        )
    return DecodeStep(model, cache, batch_size)


@remembered
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps room for each stream that it has met."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """One more token for every sequence of a cache, as made by `capture_decode`.

    Calling it with tokens [B, 1] int64 returns logits [B, vocabulary] in a buffer that a later call overwrites. Tokens
    get their true positions in their sequences, without padding, as in `generate`.
    """

    @torch.no_grad()
    def __init__(self, model: Module, cache: FastKVCache, batch_size: int) -> None:
        self.model, self.cache = model, cache
        device = next(model.parameters()).device
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        empty = not cache.compressed[0].cache.started
        if empty:
            model(self.tokens.expand(-1, 2), **{CACHE: cache})
        clock = cache.workspace.clock
        self.start, self.saved = clock.now, [(tensor, tensor.clone()) for tensor in cache.changed()]
        self.replay: dict[bool, Callable[[], Tensor]] = {}
        try:
            for link in (clock.first, clock.last):
                self.replay[link.next.evicts] = self._captured(link)
        finally:
            self._restore()
            del self.saved
            if empty:
                cache.reset()
        self.place = self._place()
        self.states = [layer.state for layer in cache.compressed]  # whose memory goes to nobody else

    def __call__(self, tokens: Tensor) -> Tensor:
        """Raises FastKVError if tokens are of another shape, the cache is empty, or its state has moved."""
        if tokens.shape != self.tokens.shape:
            raise FastKVError(
                f"this step takes tokens {list(self.tokens.shape)}, got {list(tokens.shape)}; capture one for every "
                "batch size"
            )
        if not self.cache.compressed[0].cache.started:
            raise FastKVError("a decode step needs a past, got an empty cache; read a prompt first")
        if self.moved:
            raise FastKVError(
                "the cache has moved since this step was captured: its batch changed or its heads traded slots; call "
                "fastkv.capture_decode again"
            )
        return self.advance(tokens)

    def advance(self, tokens: Tensor) -> Tensor:
        """The same for tokens of the right shape and a cache that has not moved."""
        self.tokens.copy_(tokens)
        clock = self.cache.workspace.clock
        following = clock.now.next
        logits = self.replay[following.evicts]()
        clock.now = following
        for layer in self.cache.compressed:
            layer.cache.held()[0].fill()
        return logits

    @property
    def moved(self) -> bool:
        """Whether the cache is no longer where it was captured."""
        return self._place() != self.place

    @torch.no_grad()
    def _run(self) -> Tensor:
        """The step itself, logits [B, vocabulary]."""
        positions = self.cache.next_positions(1, None).clone()  # the forward counts on
        out: Any = self.model(input_ids=self.tokens, position_ids=positions, **{CACHE: self.cache}, use_cache=True)
        return out.logits[:, -1]

    def _captured(self, link: Tick) -> Callable[[], Tensor]:
        """The graph of the step after `link`; where there are no graphs, the step itself."""
        if self.tokens.device.type != "cuda":
            return self._run
        clock, graph = self.cache.workspace.clock, torch.cuda.CUDAGraph()
        side = _side(self.tokens.device)
        with CAPTURES, torch.cuda.device(side.device):  # of the model, which need not be the current one
            side.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP):
                        self._restore()
                        clock.now = link
                        self._run()
                    self._restore()
            finally:
                torch.cuda.current_stream().wait_stream(side)
            clock.now = link
            # Until torch 2.13 a capture takes the random numbers that the device's generator is at when it begins, and
            # one that fails never gives them back. It gets a copy.
            generator = torch.cuda.default_generators[side.device.index]
            own = generator.graphsafe_get_state()
            generator.graphsafe_set_state(generator.clone_state())
            try:
                # The outer block leaves the stream also if a capture fails, which torch's own does not.
                with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    generator.graphsafe_set_state(own)
                    logits = self._run()
            finally:
                generator.graphsafe_set_state(own)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _restore(self) -> None:
        """As before the first step."""
        for tensor, was in self.saved:
            tensor.copy_(was)
        for layer in self.cache.compressed:
            layer.awaited, layer.cache.left = False, 0  # of a step that failed
            if layer.state is not None:
                layer.state.fill()  # a step that evicts says how many slots it leaves in use
        self.cache.workspace.clock.now = self.start

    def _place(self) -> list[tuple[int, ...]]:
        """Which states there are, where slots and offsets of positions are, of how many sequences and slots of a head:
        what was captured.
        """
        states, deltas = [layer.state for layer in self.cache.compressed], self.cache.rope_deltas
        place: list[tuple[int, ...]] = [
            (id(one), one.exact.keys.data_ptr(), one.exact.limit, len(one.seen)) for one in states if one is not None
        ]
        return place if deltas is None else [*place, (deltas.data_ptr(), len(deltas))]


# `generate`.


EAGER = 16  # steps of a text before its cache is captured, which takes about as long
# What `generate` gives a decode step that is nothing but its tokens, of whatever type; others may be there, but empty.
PLAIN = {
    *("input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
    *("use_cache", "return_dict", "logits_to_keep", CACHE),
}
NOT_CAPTURED: WeakSet[Any] = WeakSet()  # models whose steps cannot be, as they are patched


def call_for_generate(self: Any, compile_config: Any) -> Callable[..., Any]:
    """`generate` asks for the call of a text's decode steps here where its cache holds still on a GPU.

    Stock models compile it. One with a compressed cache captures it, unless the caller says how to compile, other
    processes hold a part of each layer, or a capture has failed before.
    """
    if compile_config is None and Parallel.of(self).size == 1:
        return self.__call__ if self in NOT_CAPTURED else GeneratedSteps(self)
    return type(self).get_compiled_call(self, compile_config)


class GeneratedSteps:
    """The decode steps of one `generate`: the first ones by the model, which compile kernels, all others captured.

    Steps of anything but tokens (images, masks, hidden states that are asked for) are the model's; so is every step
    after a capture that failed, of which the caller is warned.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.eager = 0  # steps by the model since its cache is where it is
        self.step: DecodeStep | None = None
        self.captures = True  # until a capture fails

    def __call__(self, **given: Any) -> Any:
        """What the model's own forward returns, of a captured step the logits and the cache."""
        if self.step is not None and (self.step.cache is not given.get(CACHE) or self.step.moved):
            self.step, self.eager = None, 0
        if self.captures and _is_plain(given):
            if self.step is None and self.eager >= EAGER:
                self._capture(given[CACHE], given["input_ids"], given.get("position_ids"))
            if self.step is not None:
                logits = self.step.advance(given["input_ids"])[:, None]
                return CausalLMOutputWithPast(logits=logits, **{CACHE: given[CACHE]})
        self.eager += 1
        return self.model(**given)

    def _capture(self, cache: FastKVCache, tokens: Tensor, positions: Tensor | None) -> None:
        """Capture a step for tokens like these, at positions like these, if that can be."""
        try:
            own = cache.next_positions(1, None)
            if positions is not None and positions.ndim == 3:
                positions = positions[-3:]  # what is before them numbers the text
            if positions is not None and bool((positions != own).any()):
                raise FastKVError("tokens have positions of their own")
            self.step = capture_decode(self.model, cache, len(tokens))
        except (FastKVError, *FAILURES) as error:  # the model can do without
            self.captures = False
            if not isinstance(error, (torch.OutOfMemoryError, FastKVError)):
                NOT_CAPTURED.add(self.model)
            reason = str(error).partition("\n")[0]
            warnings.warn(f"fastkv: decode steps are not captured, which is slower: {reason}", stacklevel=4)


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether a step of `generate` is one token for each sequence, and no more. Casts of autocast are not captured."""
    tokens, cache = given.get("input_ids"), given.get(CACHE)
    more = any(value is not None and value is not False for name, value in given.items() if name not in PLAIN)
    if more or not isinstance(cache, FastKVCache) or not isinstance(tokens, Tensor) or tokens.shape[1:] != (1,):
        return False
    return not torch.is_autocast_enabled(tokens.device.type)
