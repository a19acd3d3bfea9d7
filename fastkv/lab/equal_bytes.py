"""Equal bytes: what a comparison of caches must hold fixed.

A policy that stores moments, scores or anything else beside keys and values pays for it with tokens: all caches get the
bytes that a cache of keys and values alone would spend, and each keeps as many tokens as these pay for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from .. import corrections
from ..budget import Budget
from ..cache.layout import Layout
from ..calibration.files import kv_shapes
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..integrations.transformers import stock
from ..integrations.transformers.cache import FastKVCache


def full_layers(config: Any) -> list[int]:
    """Indices of a model's full-attention layers, which are compressed. Raises FastKVError if there are none."""
    text = config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=text).layers
    found = [index for index, layer in enumerate(layers) if stock.is_compressed(layer)]
    if not found:
        raise FastKVError(
            f"expected a model with full-attention layers, got {text.model_type} with none in {len(layers)}; its cache "
            "is bounded already"
        )
    return found


def equal_bytes(
    config: Any, tokens: int | Budget, dtype: torch.dtype, *, evict_every: int = EVICT_EVERY, **shares: Any
) -> Budget:
    """The bytes of a cache without moments or scores that keeps `tokens` tokens per KV head, as a `Budget`.

    Args:
        config: of a transformers model; its full-attention layers are counted.
        tokens: per KV head, or a `Budget` of tokens, whose shares the result has too; slots for `evict_every` more are
            part of the bytes.
        dtype: of keys and values.
        shares: sinks, recent, layers and heads, as in `Budget`, where `tokens` is a number.
    """
    # Tokens that cannot hold sinks and recent are refused here, in tokens.
    budget = tokens if isinstance(tokens, Budget) else Budget(tokens=tokens, **shares)
    if budget.tokens is None:
        raise FastKVError(f"equal_bytes turns tokens into bytes, got {budget}; give Budget(tokens=...)")
    text = config.get_text_config(decoder=True)
    shapes = kv_shapes(text)
    full = [shapes[index] for index in full_layers(config)]
    total, rank = 0, getattr(text, "kv_lora_rank", None)
    if rank is not None:  # of a latent, one for all heads, which is the first part of the key and the value
        full = [(1, rank + text.qk_rope_head_dim)] * len(full)
    for heads, head_dim in full:
        key = torch.empty(1, heads, 1, head_dim, dtype=dtype, device="meta")
        each = (budget.tokens,) * heads
        layout = Layout(each, corrections.NONE, spare=evict_every, latent=rank is not None)
        total += layout.allocate(key, key[..., :rank]).nbytes()
    return replace(budget, tokens=None, bytes=total)


def stored_bytes(cache: FastKVCache) -> int:
    """Bytes per sequence that the compressed layers hold: slots, positions, scores and moments.

    `nbytes()` without what no budget can change: layers that stay transformers' and the kernels' working memory.
    Raises: FastKVError for a cache that is not filled.
    """
    states = [layer.state for layer in cache.compressed if layer.state is not None]
    if not states or len(states) < len(cache.compressed):
        raise FastKVError(
            f"only a filled cache has bytes to compare, got {len(states)} of {len(cache.compressed)} layers; run the "
            "model first"
        )
    return (cache.nbytes() - cache.workspace.nbytes() - cache.stock_nbytes()) // states[0].seen.shape[0]
