"""FastKVCache: transformers' view of the per-layer states."""

from __future__ import annotations

import copy
import os
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from . import saved
from .errors import FastKVError
from .layer import FastKVLayer
from .parallel import Parallel
from .plan import Plan
from .reference import Moments
from .rotary import Rotary
from .shared import Shared
from .state import LayerState


class FastKVCache(Cache):
    """The cache of a patched model: compressed full-attention layers, stock sliding-window layers.

    `model.generate` and `model(...)` make one by themselves; make one by hand to keep it across calls. `layer` in the
    methods below is the index of a full-attention layer of the model.

    Args:
        model: a model that `fastkv.patch` has patched.
    Raises:
        FastKVError: if it is not.
    """

    layers: list[Any]

    def __init__(self, model: Module) -> None:
        plan = model.__dict__.get("_fastkv_plan")
        if plan is None:
            raise FastKVError(
                f"FastKVCache needs a patched model, got {type(model).__name__}; call fastkv.patch(model) first"
            )
        rotary = Rotary.of(model) if plan.undoes_rotation else None
        self.shared = Shared(Parallel.of(model), rotary)
        super().__init__(layers=build_layers(model.config, plan, self.shared))
        self.plan: Plan = plan
        self.config = model.config

    def _state(self, layer: int) -> LayerState:
        compressed = [i for i, one in enumerate(self.layers) if isinstance(one, FastKVLayer)]
        if layer not in compressed:
            raise FastKVError(f"layer {layer} is not compressed; the compressed layers are {compressed}")
        state = self.layers[layer].state
        if state is None:
            raise FastKVError(f"layer {layer} is empty; run the model with this cache first")
        return state

    @property
    def fully_compressed(self) -> bool:
        """Whether no layer is left to transformers."""
        return all(isinstance(layer, FastKVLayer) for layer in self.layers)

    def nbytes(self) -> int:
        """Bytes of everything: slots, used or not, positions, scores, moments, stock sliding-window layers, scratch."""
        total = self.shared.nbytes()
        for layer in self.layers:
            if isinstance(layer, FastKVLayer):
                total += layer.state.nbytes() if layer.state is not None else 0
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
        saved.write(path, self.config, self.plan, self.layers)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Module) -> FastKVCache:
        """The cache in a file that `save` wrote, on the devices of the model; it continues bit for bit.

        Args: model: patched with the policy, budget, correction and evict_every that the cache was saved with.
        Raises: FastKVError if it is not, if its shape or dtype is another, or if the file is damaged or something else.
        """
        cache = cls(model)
        attention: list[Any] = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]
        devices = {module.layer_idx: module.k_proj.weight.device for module in attention}
        saved.read(path, cache.config, cache.plan, cache.layers, devices, model.dtype)  # type: ignore[arg-type]
        return cache

    def clone(self) -> FastKVCache:
        """An independent copy: what happens to one does not touch the other."""
        twin = copy.copy(self)
        twin.shared = Shared(self.shared.parallel, self.shared.rotary)
        twin.layers = [_copied(layer, twin.shared) for layer in self.layers]
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


def _copied(layer: Any, shared: Shared) -> Any:
    """A copy of a layer that shares no tensor which is ever written."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.detach().clone())
    if isinstance(layer, FastKVLayer):
        twin.shared = shared
        if layer.state is not None:  # the kernels' scratch belongs to the cache it came from
            twin.state = copy.deepcopy(layer.state, {id(layer.state.scratch): []})
    return twin


def build_layers(config: Any, plan: Plan, shared: Shared) -> list[Any]:
    """The stock layer structure for this config, with every plain full-attention layer replaced by a FastKVLayer."""
    stock = DynamicCache(config=config.get_text_config(decoder=True)).layers
    full = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    return [
        FastKVLayer(plan, index, full.index(index), len(full), shared) if index in full else layer
        for index, layer in enumerate(stock)
    ]
