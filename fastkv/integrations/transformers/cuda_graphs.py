"""A whole decode step as CUDA graphs, for loops that serve a model without `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ...cache.workspace import Tick
from ...errors import FastKVError
from .cache import FastKVCache
from .stock import CACHE

WARM_UP = 3  # steps before a capture, in which kernels are compiled and chosen


def capture_decode(model: Module, cache: FastKVCache, batch_size: int) -> DecodeStep:
    """Capture the decode step of a patched model as two CUDA graphs, one of which evicts.

    A cache that has read a prompt continues from there. An empty cache gets its slots now, so that one captured step
    serves all prompts that are read into it, with `reset()` between them. On a CPU, which has no graphs, the same calls
    run the model itself.

    Args: model: patched.  cache: a static cache of the model (`static=True` where that is not the default).
        batch_size: sequences of the cache.
    Raises: FastKVError if the cache is not static, holds another number of sequences, or is empty and its size depends
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
    if not first.cache.started and (config.budget.follows_prompt or config.deferred):
        raise FastKVError("the size of this cache depends on its prompt, got an empty cache; read the prompt first")
    return DecodeStep(model, cache, batch_size)


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
        changed = cache.changed()
        self.start, self.saved = clock.now, [(tensor, tensor.clone()) for tensor in changed]
        self.replay: dict[bool, Callable[[], Tensor]] = {}
        for link in (clock.first, clock.last):
            self.replay[link.next.evicts] = self._captured(link) if device.type == "cuda" else self._run
        self._restore()
        del self.saved
        self.place = self._place()
        if empty:
            cache.reset()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Raises FastKVError if tokens are of another shape, the cache is empty, or its state has moved."""
        if tokens.shape != self.tokens.shape:
            raise FastKVError(
                f"this step takes tokens {list(self.tokens.shape)}, got {list(tokens.shape)}; capture one for every "
                "batch size"
            )
        if not self.cache.compressed[0].cache.started:
            raise FastKVError("a decode step needs a past, got an empty cache; read a prompt first")
        if self._place() != self.place:
            raise FastKVError(
                "the cache has moved since this step was captured: its batch changed or its heads traded slots; call "
                "fastkv.capture_decode again"
            )
        self.tokens.copy_(tokens)
        clock = self.cache.workspace.clock
        following = clock.now.next
        logits = self.replay[following.evicts]()
        clock.now = following
        for layer in self.cache.compressed:
            assert layer.state is not None
            layer.state.fill()
        return logits

    @torch.no_grad()
    def _run(self) -> Tensor:
        """The step itself, logits [B, vocabulary]."""
        positions = self.cache.next_positions(1, None).clone()  # the forward counts on
        out: Any = self.model(input_ids=self.tokens, position_ids=positions, **{CACHE: self.cache}, use_cache=True)
        return out.logits[:, -1]

    def _captured(self, link: Tick) -> Callable[[], Tensor]:
        """The graph of the step after `link`."""
        clock, graph = self.cache.workspace.clock, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._restore()
                clock.now = link
                self._run()
            self._restore()
        torch.cuda.current_stream().wait_stream(side)
        clock.now = link
        with torch.cuda.graph(graph):
            logits = self._run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _restore(self) -> None:
        """As before the first step."""
        for tensor, was in self.saved:
            tensor.copy_(was)
        self.cache.workspace.clock.now = self.start

    def _place(self) -> list[tuple[int, int]]:
        """Where slots and offsets of positions are, and how many slots a head may have: what was captured."""
        states, deltas = [layer.state for layer in self.cache.compressed], self.cache.rope_deltas
        slots = [(state.exact.keys.data_ptr(), state.exact.limit) for state in states if state is not None]
        return slots if deltas is None else [*slots, (deltas.data_ptr(), len(deltas))]
