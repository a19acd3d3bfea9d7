"""What fastkv would do with a model, from its architecture alone: weights may be on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from ..cache.workspace import CacheWorkspace
from ..calibration.files import kv_shapes
from ..config import Config
from ..integrations.transformers import check, modules, stock
from ..integrations.transformers.cache import build_layers
from ..integrations.transformers.layer import FastKVLayer


@dataclass(frozen=True)
class Survey:
    """What becomes of the cache of a model.

    Attributes:
        compressed: indices of the layers that are.  layers: how many there are.
        left: what the others are, in words; empty without others.
        before, after: bytes per sequence of the stock cache and of fastkv's, sliding windows included. States of linear
            attention, which are the same in both, are not.
    """

    compressed: list[int]
    layers: int
    left: str
    before: int
    after: int


def survey(model: Module, config: Config, context: int, dtype: torch.dtype) -> Survey:
    """What `patch` would do with a model, and the bytes of a sequence of `context` tokens.

    Args: model: of transformers, with weights or without.  dtype: of its cache.
    Raises: FastKVError if it cannot be patched, as far as that shows without running it.
    """
    check(model, config, runs=False)
    attentions = modules.attentions(model)
    shapes = kv_shapes(model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    layers = build_layers(model, config, CacheWorkspace())
    found = [index for index, layer in enumerate(layers) if isinstance(layer, FastKVLayer)]
    before = after = 0
    for index, layer in enumerate(layers):
        window = getattr(layer, "sliding_window", None)
        if index not in attentions or (index not in found and window is None):
            continue
        size = modules.Sizes.of(attentions[index])
        keys, values = (
            torch.empty(1, shapes[index][0], 1, dim, dtype=dtype, device="meta")
            for dim in (size.key_dim, size.value_dim)
        )
        seen = context if window is None else min(context, window - 1)  # the newest token is not among its past
        full = (keys.nbytes + values.nbytes) * seen
        before += full
        after += full if window is not None else _spent(layer, keys, values, size.groups, context)
    left = [layer for layer in layers if not isinstance(layer, FastKVLayer)]
    return Survey(found, len(layers), stock.census(left) if left else "", before, after)


def _spent(layer: FastKVLayer, keys: Tensor, values: Tensor, groups: int, context: int) -> int:
    """Bytes per sequence of a compressed layer for the shape of keys and values [1, Hkv, 1, D]."""
    layer.cache.allocate(keys.shape[1] * groups, keys, values, context)
    return layer.cache.nbytes()
