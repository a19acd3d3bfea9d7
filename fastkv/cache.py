"""FastKVCache: transformers' view of the per-layer states."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

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


def build_layers(config: Any, plan: Plan, shared: Shared) -> list[Any]:
    """The stock layer structure for this config, with every plain full-attention layer replaced by a FastKVLayer."""
    stock = DynamicCache(config=config.get_text_config(decoder=True)).layers
    full = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    return [
        FastKVLayer(plan, index, full.index(index), len(full), shared) if index in full else layer
        for index, layer in enumerate(stock)
    ]
