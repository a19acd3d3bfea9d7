"""What fastkv would do with a model, from its architecture alone: weights may be on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from ...cache.workspace import CacheWorkspace
from ...calibration.files import kv_shapes
from ...config import Config
from . import modules, stock
from .attach import check
from .cache import build_layers
from .layer import FastKVLayer


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
    found: dict[Any, Any] = {module.layer_idx: module for module in check(model, config, runs=False)}
    attentions = modules.attentions(model)
    shapes = kv_shapes(model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    layers = build_layers(model, config, CacheWorkspace())
    before = after = 0
    for index, layer in enumerate(layers):
        window = getattr(layer, "sliding_window", None)
        if index not in attentions or (index not in found and window is None):
            continue
        size = modules.Sizes.of(attentions[index])
        shape = (1, shapes[index][0], 1)
        keys = torch.empty(*shape, size.key_dim, dtype=dtype, device="meta")
        values = torch.empty(*shape, size.value_dim, dtype=dtype, device="meta")
        each = keys.nbytes + values.nbytes
        before += each * (context if window is None else min(context, window))
        after += each * min(context, window) if window is not None else _spent(layer, keys, values, size, context)
    left = [layer for layer in layers if not isinstance(layer, FastKVLayer)]
    return Survey(sorted(found), len(layers), stock.census(left) if left else "", before, after)


def _spent(layer: FastKVLayer, keys: Any, values: Any, size: modules.Sizes, context: int) -> int:
    """Bytes per sequence of a compressed layer for the shape of keys and values [1, Hkv, 1, D]."""
    layer.cache.allocate(keys.shape[1] * size.groups, keys, values, context)
    return layer.cache.nbytes()
