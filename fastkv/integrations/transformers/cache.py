"""FastKVCache: transformers' view of the per-layer states."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ...cache.layer import LayerCache
from ...cache.workspace import FIRST_TABLE, CacheWorkspace
from ...config import Config
from ...errors import FastKVError
from ...parallel import Parallel
from ...reference import LayerState, Moments
from . import serialization
from .layer import FastKVLayer
from .sliding_window import Ring, WindowLayer


class FastKVCache(Cache):
    """The cache of a patched model: compressed full-attention layers, stock sliding-window layers.

    `model.generate` and `model(...)` make one by themselves; make one by hand to keep it across calls. `layer` in the
    methods below is the index of a full-attention layer of the model.

    Args:
        model: a model that `fastkv.patch` has patched.
        static: whether decode steps may be compiled and captured as graphs, as in `patch`; None: as the model says.
    Raises:
        FastKVError: if the model is not patched, or static is True and cannot be.
    """

    layers: list[Any]

    def __init__(self, model: Module, static: bool | None = None) -> None:
        config = model.__dict__.get("_fastkv_config")
        if config is None:
            raise FastKVError(
                f"FastKVCache needs a patched model, got {type(model).__name__}; call fastkv.patch(model) first"
            )
        model_config: Any = model.config
        positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None) or FIRST_TABLE
        static = is_static(model, config.static if static is None else static)
        positions = positions if static else FIRST_TABLE
        self.workspace = CacheWorkspace(Parallel.of(model), config.evict_every, positions)
        super().__init__(layers=build_layers(model_config, config, self.workspace, static))
        self.config: Config = config
        self.known_mask: Tensor | None = None  # that `generate` made for its next step: its new tokens are real
        self.model_config = model_config

    def _state(self, layer: int) -> LayerState:
        compressed = [i for i, one in enumerate(self.layers) if isinstance(one, FastKVLayer)]
        if layer not in compressed:
            raise FastKVError(f"layer {layer} is not compressed; the compressed layers are {compressed}")
        state: LayerState | None = self.layers[layer].state
        if state is None:
            raise FastKVError(f"layer {layer} is empty; run the model with this cache first")
        return state

    @property
    def compressed(self) -> list[FastKVLayer]:
        """The layers that are not left to transformers."""
        return [layer for layer in self.layers if isinstance(layer, FastKVLayer)]

    def decodes(self, num: int) -> bool:
        """Whether the next `num` tokens are one decode step."""
        return self.compressed[0].decodes(num)

    def __repr__(self) -> str:
        """What a person wants to know: settings, tokens seen and kept, bytes."""
        budget = self.config.budget
        unit = next(name for name in ("tokens", "keep", "bytes", "quality") if getattr(budget, name) is not None)
        settings = f"policy={self.config.policy.name!r}, correction={self.config.correction.name!r}"
        settings += f", budget={unit} {getattr(budget, unit)}"
        first = self.compressed[0].state
        if first is None:
            return f"FastKVCache({settings}, empty)"
        kept = sum(int(layer.state.stored.max()) for layer in self.compressed if layer.state is not None)
        return (
            f"FastKVCache({settings}, {len(first.seen)} sequences, {int(first.seen.max())} tokens seen, "
            f"{kept / len(self.compressed):.0f} kept per head, {self.nbytes() / 2**20:.1f} MiB)"
        )

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

    def unroll(self) -> None:
        """Before a prompt: rings become what transformers expects. One host sync."""
        if not self.windows or not self.windows[0].ring.rolled:
            return
        ring = self.windows[0].ring
        length = int(ring.seen)
        ring.rolled = False
        for layer in self.windows:
            layer.unroll(ring.recent(length, layer.keys.device), length)

    def window_mask(self, eager: bool) -> Tensor:
        """Mask of one decode step for the sliding-window layers, which count on by it; additive for eager attention."""
        layer = self.windows[0]
        return layer.ring.step(layer.dtype if eager else None)

    def reset(self) -> None:
        """Forget the sequences, not where they are stored."""
        self.unroll()
        self.known_mask = None
        super().reset()
        for layer in self.layers:  # before transformers 5.23 a layer that was reset keeps its tokens, zeroed
            if not isinstance(layer, FastKVLayer):
                layer.is_initialized = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i of the batch continues from row beam_idx[i]."""
        super().reorder_cache(beam_idx)
        self._map_ring(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._map_ring(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the given rows."""
        super().batch_select_indices(indices)
        self._map_ring(lambda t: t[indices.to(t.device)])

    def _map_ring(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.windows:
            self.windows[0].ring.map_batch_(change)

    @property
    def fully_compressed(self) -> bool:
        """Whether no layer is left to transformers."""
        return all(isinstance(layer, FastKVLayer) for layer in self.layers)

    def nbytes(self) -> int:
        """Bytes of everything: slots, used or not, positions, scores, moments, stock sliding-window layers, scratch."""
        total = self.workspace.nbytes()
        for layer in self.layers:
            if isinstance(layer, FastKVLayer):
                total += layer.cache.nbytes()
            else:
                total += sum(t.nbytes for t in (layer.keys, layer.values) if t is not None)
        return total

    def stored(self, layer: int) -> Tensor:
        """[B, Hkv] int32, tokens held in the slots of each head."""
        return self._state(layer).stored

    def slots(self, layer: int) -> int:
        """Slots per head, mean over heads: the layer's budget plus `evict_every`."""
        return self._state(layer).slots

    def moments(self, layer: int) -> Moments:
        """Moments of what the layer has evicted."""
        return self._state(layer).moments

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, about `nbytes()` long; a crash leaves the file that was there before.

        Raises: FastKVError if the cache is empty, awaits a roll-back or is shared by several processes, or if the file
            cannot be written.
        """
        source = self
        if self.windows:  # the file holds what transformers expects; this cache goes on with its rings
            source = self.clone()
            source.unroll()
        serialization.write(path, self.model_config, self.config, source.layers)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Module) -> FastKVCache:
        """The cache in a file that `save` wrote, on the devices of the model; it continues bit for bit.

        Args: model: patched with the policy, budget, correction and evict_every that the cache was saved with.
        Raises: FastKVError if it is not, if its shape or dtype is another, or if the file is damaged or something else.
        """
        cache = cls(model)
        serialization.read(path, cache.model_config, cache.config, cache.layers, attention_sizes(model), model.dtype)  # type: ignore[arg-type]
        return cache

    def clone(self) -> FastKVCache:
        """An independent copy: what happens to one does not touch the other."""
        twin = copy.copy(self)
        twin.workspace = self.workspace.twin()
        twin.layers = [_copied(layer, twin.workspace) for layer in self.layers]
        if self.windows:
            ring = copy.deepcopy(self.windows[0].ring)
            for layer in twin.windows:
                layer.ring = ring
                layer.key_room, layer.value_room = (layer.keys, layer.values) if ring.rolled else (None, None)
        return twin

    def fork(self, n: int) -> FastKVCache:
        """A copy with every sequence `n` times, for as many questions over one prefix: row i goes on from row i // n.

        Raises: FastKVError unless n is a whole number of at least 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise FastKVError(f"fork needs a whole number of copies of at least 1, got {n!r}; pass one per question")
        twin = self.clone()
        twin.batch_repeat_interleave(n)
        return twin


def _copied(layer: Any, workspace: CacheWorkspace) -> Any:
    """A copy of a layer that shares no tensor which is ever written."""
    if isinstance(layer, FastKVLayer):
        return layer.copied(workspace)
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.detach().clone())
    return twin


def attention_sizes(model: Module) -> dict[int, tuple[torch.device, int]]:
    """Of each layer of the model, the device of its attention and how many query heads share a KV head."""
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]
    return {module.layer_idx: (module.k_proj.weight.device, module.num_key_value_groups) for module in modules}


def is_static(model: Module, wanted: bool | None) -> bool:
    """Whether caches of the model hold still for captured graphs: as `wanted`, by default on a single CUDA device.

    Raises: FastKVError if it is wanted and not possible.
    """
    config: Any = model.config
    stock = {type(layer) for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers}
    flash = "flash" in (config._attn_implementation or "")
    possible = stock == {DynamicLayer} or (stock == {DynamicLayer, DynamicSlidingWindowLayer} and not flash)
    if wanted and not possible:
        raise FastKVError(
            "static=True with sliding-window layers needs masks that flash_attention_2 does not take; load the model "
            "with attn_implementation='sdpa' or leave static out"
        )
    if wanted is not None:
        return wanted
    devices = {parameter.device for parameter in model.parameters()}
    return possible and len(devices) == 1 and devices.pop().type == "cuda"


def build_layers(model_config: Any, config: Config, workspace: CacheWorkspace, static: bool = False) -> list[Any]:
    """The stock layer structure for this model, with every plain full-attention layer replaced by a FastKVLayer."""
    stock: list[Any] = DynamicCache(config=model_config.get_text_config(decoder=True)).layers
    full = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    windows = {layer.sliding_window for layer in stock if static and type(layer) is DynamicSlidingWindowLayer}
    rings = {size: Ring(size) for size in windows}
    made: list[Any] = []
    for index, layer in enumerate(stock):
        if index in full:
            cache = LayerCache(config, index, full.index(index), len(full), workspace, static)
            made.append(FastKVLayer(cache))
        else:
            made.append(WindowLayer(rings[layer.sliding_window]) if rings else layer)
    return made
