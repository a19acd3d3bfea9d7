"""Equal bytes: what a comparison of caches must hold fixed, and the check that it did.

A policy that stores moments, scores or anything else beside keys and values pays for it with tokens: all caches get the
bytes that a cache of keys and values alone would spend, and each keeps as many tokens as these pay for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from .. import corrections
from ..budget import Budget
from ..cache.layer import LayerCache
from ..cache.layout import Layout, cost
from ..calibration import kv_shapes
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..integrations.transformers import stock
from ..integrations.transformers.cache import FastKVCache
from ..reference import LayerState


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
    layers = zip(DynamicCache(config=text).layers, kv_shapes(text))
    full = [shape for layer, shape in layers if stock.is_compressed(layer)]
    if not full:
        raise FastKVError(
            f"equal_bytes needs a model with full-attention layers, got {text.model_type} with none; its cache is "
            "bounded already"
        )
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
    """
    states = _states(cache)
    return (cache.nbytes() - cache.workspace.nbytes() - cache.stock_nbytes()) // states[0].seen.shape[0]


def token_bytes(cache: FastKVCache) -> int:
    """`layer_token_bytes` of all compressed layers together."""
    _states(cache)
    return round(sum(layer_token_bytes(layer.cache) for layer in cache.compressed))


def layer_token_bytes(layer: LayerCache) -> float:
    """Bytes per sequence of one more token in every KV head, with what of the evicted ones it lets be remembered."""
    state, rule = layer.state, layer.rule
    assert state is not None and rule is not None
    slots, heads, layout = state.exact, state.heads, rule.layout
    dims = slots.format.keys.dim(slots.keys.shape[-1]), slots.value_dim
    keys, values = (torch.empty(1, heads, 1, dim, dtype=slots.dtype, device="meta") for dim in dims)
    costs = cost(keys, values, lambda tokens: replace(layout, tokens=(tokens,) * heads))
    return costs.spent(layout.mean + 1) - costs.spent(layout.mean)


def assert_equal_bytes(caches: Mapping[str, FastKVCache], bound: int) -> None:
    """Check that every named cache uses the bytes it was given: no more, and less than one token per head fewer.

    Args: caches: filled; bound: bytes per sequence, `Budget.bytes` of all of them.
    """
    for name, cache in caches.items():
        held, token = stored_bytes(cache), token_bytes(cache)
        if not bound - token < held <= bound:
            raise FastKVError(
                f"caches compared at equal bytes must hold more than {bound - token} and at most {bound} bytes per "
                f"sequence, got {held} for {name}; give all of them the same Budget(bytes=...)"
            )


def _states(cache: FastKVCache) -> list[LayerState]:
    filled, num = [layer.state for layer in cache.compressed if layer.state is not None], len(cache.compressed)
    if not filled or len(filled) < num:
        raise FastKVError(
            f"only a filled cache has bytes to compare, got {len(filled)} of {num} layers; run the model first"
        )
    return filled
