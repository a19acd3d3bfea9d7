"""FastKVCache: transformers' view of the per-layer states."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer

from ...backend import Parallel
from ...budget import UNITS
from ...cache import FIRST_TABLE, CacheWorkspace
from ...cache.layer import LayerCache
from ...cache.layout import LayerPlan
from ...config import Config
from ...errors import FastKVError, is_whole
from ...policies import Policy
from ...reference import LayerState, Moments
from . import modules, serialization, stock
from .layer import FastKVLayer, HybridLayer, Ring, WindowLayer


@dataclass
class Prompt:
    """A prompt while it is read: what a base model knows of it and its decoder is not told.

    Attributes:
        padding: [B, tokens so far], 0 for padding; None without any.
        rows: how many last rows of hidden states somebody reads; None for all.
        masks: `PreparedMasks`, which makes the masks of a block, if the base model prepares them.
        embeds: [B, T, hidden], the prompt as the decoder got it, images included; kept while it is read twice.
        positions: as the decoder got them, [1 or B, T] or [3 or 4, B, T]; kept likewise. None where it numbers tokens.
    """

    padding: Tensor | None = None
    rows: int | None = None
    masks: Any = None
    embeds: Tensor | None = None
    positions: Tensor | None = None


class FastKVCache(Cache):
    """The cache of a patched model: full-attention layers are compressed, other layers are those of transformers.

    `model.generate` and `model(...)` make one by themselves; make one by hand to keep it across calls. `layer` in the
    methods below is the index of a full-attention layer of the model.

    Args:
        model: a patched model.
        static: whether decode steps may be compiled and captured as graphs; None: as in `patch`.
    Raises:
        FastKVError: if the model is not patched, or static is True and cannot be.
    """

    layers: list[Any]

    def __init__(self, model: Module, static: bool | None = None) -> None:
        config = getattr(model, "__dict__", {}).get("_fastkv_config")
        if config is None:
            raise FastKVError(
                f"FastKVCache needs a patched model, got {type(model).__name__}; call fastkv.patch(model) first"
            )
        if config.rotations and model.dtype != model._fastkv_dtype:
            raise FastKVError(
                f"the model was patched in {model._fastkv_dtype} and is {model.dtype} now, which rounds its rotary "
                "embedding anew; call fastkv.patch again"
            )
        model_config: Any = model.config
        positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None) or FIRST_TABLE
        static = is_static(model, config.static if static is None else static, config.policy)
        positions = positions if static else FIRST_TABLE
        self.workspace = CacheWorkspace(Parallel.of(model), config.evict_every, positions)
        super().__init__(layers=build_layers(model, config, self.workspace, static))
        self.config: Config = config
        self.sources = modules.sources(model)
        self.known_mask: Tensor | None = None  # that `generate` made for its next step: its new tokens are real
        self.prompt: Prompt | None = None  # that is being read
        # [B, 1] int64, how far positions are ahead of the number of tokens (M-RoPE); None before there are any such.
        self.rope_deltas: Tensor | None = None
        self.model_config = model_config

    def _state(self, layer: int) -> LayerState:
        compressed = [i for i, one in enumerate(self.layers) if isinstance(one, FastKVLayer)]
        if layer not in compressed:
            raise FastKVError(f"layer {layer} is not compressed; the compressed layers are {compressed}")
        state, _ = self.layers[layer].cache.held()
        return state  # type: ignore[no-any-return]

    def layer_of(self, index: int) -> Any:
        """The layer whose keys and values layer `index` of the model attends to: its own, or that which it shares."""
        return self.layers[self.sources.get(index, index)]

    @property
    def compressed(self) -> list[FastKVLayer]:
        """The layers that are not left to transformers."""
        return [layer for layer in self.layers if isinstance(layer, FastKVLayer)]

    @property
    def sliding(self) -> list[Any]:
        """Those that keep a window and count the tokens they have seen."""
        return [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized]

    def decodes(self, num: int) -> bool:
        """Whether the next `num` tokens are one decode step."""
        return self.compressed[0].decodes(num)

    @property
    def started(self) -> bool:
        """Whether there is a past."""
        return self.compressed[0].cache.started

    @contextmanager
    def reading(self, prompt: Prompt) -> Iterator[None]:
        """While this is open, what the cache gets belongs to this prompt; a refused one leaves rings as they were."""
        unrolled, finished = self.unroll(), False
        self.prompt, self.workspace.reading = prompt, True
        try:
            yield
            finished = True
        finally:
            self.prompt, self.workspace.reading = None, False
            if unrolled and not finished:
                self.windows[0].ring.rolled = True
                for layer in self.windows:
                    layer.keys, layer.values = layer.key_room, layer.value_room
        if self.is_compileable:
            self.roll(prompt.padding)

    def __repr__(self) -> str:
        """What a person wants to know: settings, tokens seen and kept, bytes."""
        budget = self.config.budget
        unit = next(name for name in UNITS if getattr(budget, name) is not None)
        settings = f"policy={self.config.policy.name!r}, correction={self.config.correction.name!r}"
        settings += f", budget={unit} {getattr(budget, unit)}"
        settings += f", heads={'calibrated' if budget.shared is not None else repr(budget.heads)}"
        first = self.compressed[0].state
        if first is None:
            return f"FastKVCache({settings}, empty)"
        kept = sum(
            float(layer.state.stored.float().mean(-1).max()) for layer in self.compressed if layer.state is not None
        )
        return (
            f"FastKVCache({settings}, {len(first.seen)} sequences, {int(first.seen.max())} tokens seen, "
            f"{kept / len(self.compressed):.0f} kept per head, {self.nbytes() / 2**20:.1f} MiB)"
        )

    def changed(self) -> list[Tensor]:
        """All tensors that a decode step changes, if the cache is static."""
        found: list[Tensor] = []
        for layer in self.layers:
            found += stock.tensors(layer).values()
            if isinstance(layer, FastKVLayer):
                found += [layer.seen, *(tensor for _, tensor in layer.cache.held()[0].named_tensors())]
            elif isinstance(layer, WindowLayer) and layer.counts:  # one of those that share a ring
                found += [layer.ring.seen, layer.ring.place, layer.ring.real]
        return found

    def activate_past_recording(self) -> None:
        """As transformers' caches. Raises: FastKVError for rings, which have no end to cut."""
        if self.windows:
            raise FastKVError(
                "the sliding windows of a static cache cannot take tokens back; make a FastKVCache(model, static=False)"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' caches. Raises: FastKVError, before any layer is cropped, for tokens that are compressed."""
        self.compressed[0].dropped(tokens_to_remove)
        super().crop(tokens_to_remove)

    # Layers with a sliding window, of a static cache.

    @property
    def windows(self) -> list[WindowLayer]:
        """The layers that keep their window in a ring."""
        return [layer for layer in self.layers if isinstance(layer, WindowLayer)]

    @property
    def rolled(self) -> bool:
        """Whether sliding windows are ready for a decode step, if there are any."""
        return all(layer.ring.rolled for layer in self.windows)

    def roll(self, mask: Tensor | None) -> None:
        """After a prompt: sliding windows become rings. mask [B, tokens so far] is 0 for padding, None without any."""
        for index, layer in enumerate(self.windows):
            length = layer.cumulative_length
            recent = layer.ring.recent(length, layer.keys.device)
            if index == 0:
                layer.ring.roll(len(layer.keys), recent, length, mask)
            layer.roll(recent)

    def unroll(self) -> bool:
        """Before a prompt: rings become what transformers expects. Returns whether there were any. One host sync."""
        if not self.windows or not self.windows[0].ring.rolled:
            return False
        ring = self.windows[0].ring
        length = int(ring.seen)
        ring.rolled = False
        for layer in self.windows:
            layer.unroll(ring.recent(length, layer.keys.device), length)
        return True

    # Positions in three dimensions (M-RoPE), which do not count tokens: an image takes fewer.

    def next_positions(self, num: int, padding: Tensor | None) -> Tensor:
        """Positions [B, T] of the next `num` tokens, which are text; padding [B, tokens so far] is 0 for padding."""
        first = self.compressed[0]
        first.cache.accept()
        state, _ = first.cache.held()
        seen = state.seen if padding is None else state.seen.to(padding.device)
        new = torch.arange(num, device=seen.device).expand(len(seen), -1)
        if padding is not None:
            new = (padding[:, -num:].long().cumsum(-1) - 1).clamp(min=0)
        positions = seen[:, None] + new
        return positions if self.rope_deltas is None else positions + self.rope_deltas.to(seen.device)

    def deltas_after(self, positions: Tensor | None, num: int, padding: Tensor | None) -> Tensor | None:
        """`rope_deltas` after `num` tokens at positions [3 or 4, B, T], the last three of which are of M-RoPE.

        None for positions in one dimension, which change nothing.
        """
        if positions is None or positions.ndim != 3:
            return None
        first = self.compressed[0]
        first.cache.accept()
        state = first.state
        before = 0 if state is None or not self.started else state.seen[:, None].to(positions.device)
        new = num if padding is None else padding[:, -num:].long().sum(-1, keepdim=True).to(positions.device)
        # Some models number positions in floating point.
        return positions[-3:].amax((0, 2))[:, None].long() + 1 - before - new

    def continue_from(self, deltas: Tensor) -> None:
        """Set `rope_deltas`, in place if they have the same shape: captured graphs read them."""
        if self.rope_deltas is None or self.rope_deltas.shape != deltas.shape:
            self.rope_deltas = deltas.clone()
        else:
            self.rope_deltas.copy_(deltas)

    def reset(self) -> None:
        """Forget the sequences, but keep the memory that they were stored in."""
        self.unroll()
        self.known_mask = None
        if self.rope_deltas is not None:
            self.rope_deltas.zero_()
        super().reset()
        for layer in self.layers:  # before transformers 5.23 a layer that was reset keeps its tokens, zeroed
            if isinstance(layer, DynamicLayer):
                layer.is_initialized = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i of the batch continues from row beam_idx[i]."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, at least once."""
        if repeats < 1:
            raise FastKVError(f"rows can be repeated once or more often, got {repeats}; reset() forgets all of them")
        self._map_batch(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the given rows, at least one."""
        if not indices.numel():
            raise FastKVError("a cache needs at least one row, got none to select; reset() forgets all of them")
        self._map_batch(lambda t: t[indices.to(t.device)])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            if isinstance(layer, (FastKVLayer, WindowLayer)):
                layer.map_batch(change)
            else:
                stock.map_batch(layer, change)
        if self.rope_deltas is not None:
            self.rope_deltas = stock.changed(self.rope_deltas, change)
        if self.windows:
            self.windows[0].ring.map_batch(change)

    @property
    def fully_compressed(self) -> bool:
        """Whether no layer that is left to transformers has keys: then none asks for a mask in a decode step."""
        return not any(isinstance(layer, DynamicLayer) for layer in self.layers)

    def nbytes(self) -> int:
        """Bytes of everything: slots (used or not), positions, scores, moments, layers of transformers, and scratch."""
        return self.workspace.nbytes() + sum(layer.cache.nbytes() for layer in self.compressed) + self.stock_nbytes()

    def stock_nbytes(self) -> int:
        """Bytes of the layers of transformers: sliding windows and states of linear attention."""
        return sum(stock.nbytes(layer) for layer in self.layers)

    def stored(self, layer: int) -> Tensor:
        """[B, Hkv] int32, number of tokens in the slots of each head."""
        return self._state(layer).stored

    def slots(self, layer: int) -> int:
        """Slots per head, mean over heads: the layer's budget plus `evict_every`."""
        return self._state(layer).slots

    def moments(self, layer: int) -> Moments:
        """Moments of the tokens that the layer has evicted."""
        return self._state(layer).moments

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file of about `nbytes()` bytes; a crash leaves the previous file.

        Raises: FastKVError if the cache is empty, awaits a roll-back or is shared by several processes, or if the file
            cannot be written.
        """
        source = self
        if self.windows:  # the file holds what transformers expects; this cache goes on with its rings
            source = self.clone()
            source.unroll()
        serialization.write(path, source)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Module) -> FastKVCache:
        """Load a cache that `save` wrote, on the devices of the model; it continues bit for bit.

        Args: model: patched with the policy, budget, correction, slots and evict_every that the cache was saved with.
        Raises: FastKVError if it is not, if shapes or dtype differ, or if the file is damaged or of another kind.
        """
        cache = cls(model)
        serialization.read(path, cache, model)
        return cache

    def clone(self) -> FastKVCache:
        """An independent copy."""
        twin = copy.copy(self)
        twin.workspace = self.workspace.twin()
        twin.rope_deltas = None if self.rope_deltas is None else self.rope_deltas.clone()
        twin.layers = [
            layer.copied(twin.workspace) if isinstance(layer, FastKVLayer) else stock.copied(layer)
            for layer in self.layers
        ]
        if self.windows:
            ring = copy.deepcopy(self.windows[0].ring)
            for layer in twin.windows:
                layer.ring = ring
                layer.key_room, layer.value_room = (layer.keys, layer.values) if ring.rolled else (None, None)
        return twin

    def fork(self, n: int) -> FastKVCache:
        """A copy with every sequence `n` times, for `n` questions about one prefix: row i continues row i // n.

        Raises: FastKVError unless n is a whole number of at least 1.
        """
        if not is_whole(n, 1):
            raise FastKVError(f"fork needs a whole number of copies of at least 1, got {n!r}; pass one per question")
        twin = self.clone()
        twin.batch_repeat_interleave(n)
        return twin


def stock_layers(model: Module) -> list[Any]:
    """The layers that transformers' own cache of the model would have."""
    config: Any = model.config
    return DynamicCache(config=config.get_text_config(decoder=True)).layers


def is_static(model: Module, wanted: bool | None, policy: Policy) -> bool:
    """Whether caches of the model hold still for captured graphs: as `wanted`, by default on a single CUDA device.

    Raises: FastKVError if it is wanted and not possible.
    """
    devices = {parameter.device for parameter in model.parameters()}
    why = _why_not_static(model, policy.waits and any(device.type == "cuda" for device in devices))
    if wanted and len({device for device in devices if device.type == "cuda"}) > 1:
        why = "cannot be captured with layers on several GPUs; load the model on one,"
    if wanted and why is not None:
        raise FastKVError(f"static=True {why} or leave static out")
    if wanted is not None:
        return wanted
    return why is None and len(devices) == 1 and devices.pop().type == "cuda"


def _why_not_static(model: Module, waits: bool) -> str | None:
    """Why a cache of the model cannot hold still, and what to do; None if it can. waits: whether its policy does."""
    config: Any = model.config
    if waits:
        return "cannot be captured with a policy whose scores wait for the GPU; use method='cholesky'"
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    layers = stock_layers(model)
    if "chunked_attention" in kinds:
        return "cannot hold layers that attend in chunks still, as these have no fixed window; use another model"
    if compressible(model, layers).keys() != {i for i, layer in enumerate(layers) if stock.is_compressed(layer)}:
        return "cannot hold layers of cross-attention still, as these grow with their images; use another model"
    windows = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    if any(type(layer) is not DynamicSlidingWindowLayer for layer in windows):
        return f"cannot hold a {type(windows[0]).__name__} of transformers still; use another model"
    if windows and stock.is_flash(config._attn_implementation or ""):
        return (
            "with sliding-window layers needs masks that flash-attn does not take; load the model with "
            "attn_implementation='sdpa'"
        )
    return None


def compressible(model: Module, layers: list[Any]) -> dict[int, type[FastKVLayer]]:
    """Which layers of transformers' cache are compressed, and by what.

    Raises: FastKVError for a kind of layer that is neither compressed nor bounded by itself.
    """
    unknown = [layer for layer in layers if type(layer) not in (*stock.COMPRESSED, *stock.LEFT)]
    if unknown:
        raise FastKVError(
            f"{type(model).__name__} keeps a {type(unknown[0]).__name__}, expected layers of full, sliding-window or "
            "linear attention; use the model without fastkv"
        )
    crossing = {layer for layer, module in modules.attentions(model).items() if modules.is_cross(module)}
    kept = {index: layer for index, layer in enumerate(layers) if stock.is_compressed(layer) and index not in crossing}
    hybrid = LinearAttentionAndFullAttentionLayer
    return {index: HybridLayer if isinstance(layer, hybrid) else FastKVLayer for index, layer in kept.items()}


def build_layers(model: Module, config: Config, workspace: CacheWorkspace, static: bool = False) -> list[Any]:
    """The layers of transformers' own cache for this model, those of full attention replaced by compressed ones.

    Raises: FastKVError for a kind of layer that is neither compressed nor bounded by itself.
    """
    layers = stock_layers(model)
    kinds = compressible(model, layers)
    windows = {layer.sliding_window for layer in layers if static and type(layer) is DynamicSlidingWindowLayer}
    rings = {size: Ring(size) for size in windows}
    shared = list(modules.sources(model).values())
    latents = {index for index, module in modules.attentions(model).items() if modules.is_latent(module)}
    for place, (index, kind) in enumerate(kinds.items()):
        plan = LayerPlan(config, index, place, len(kinds), workspace.parallel, index in latents, shared.count(index))
        states = [layers[index].number_of_states] if hasattr(layers[index], "number_of_states") else []
        layers[index] = kind(LayerCache(plan, workspace, static), *states)
    return [
        WindowLayer(rings[one.sliding_window]) if rings and type(one) is DynamicSlidingWindowLayer else one
        for one in layers
    ]
