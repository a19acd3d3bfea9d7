"""A single token through an attention module on a CPU, without what its own forward does around attention.

Views, the rotary embedding, and the interfaces of caches and attention are some forty calls into torch a layer, which
take longer than attention to a few hundred tokens. A module whose forward is like Llama's needs none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backend import ON_CPU, implementation
from ...cache.layout import Attends
from . import modules
from .cache import FastKVCache
from .layer import FastKVLayer
from .stock import BEFORE, CACHE

# Arguments of a forward that say no more of a single token, which is no padding.
PLACED = {"position_embeddings", "attention_mask", "position_ids", "cache_position"}
USUAL = frozenset({"hidden_states", *PLACED, CACHE, BEFORE, "use_cache", "output_attentions", "output_router_logits"})


def attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a patched attention module: passes its cache layer on, which attention functions are otherwise not
    given, unless the token is served here.
    """
    cache = kwargs.get(CACHE)
    if not isinstance(cache, FastKVCache):
        cache = next((given for given in kwargs.values() if isinstance(given, FastKVCache)), None)
    if cache is None:
        return self._fastkv_attention_forward(*args, **kwargs)
    layer = cache.layer_of(self.layer_idx)
    layer.named |= self.layer_idx not in cache.sources  # which bring no keys of their own
    if self._fastkv_single is not False and not args and kwargs.keys() <= USUAL and not torch.compiler.is_compiling():
        out = _served(self, layer, kwargs)
        if out is not None:
            return out, None
    return self._fastkv_attention_forward(*args, **kwargs, fastkv_layer=layer)


def _served(module: Any, layer: FastKVLayer, given: dict[str, Any]) -> Tensor | None:
    """What the module makes of its arguments, of hidden states [B, 1, hidden]; None where its own forward has to."""
    hidden, config = given["hidden_states"], layer.cache.config
    served = type(hidden) is Tensor and hidden.is_cpu and hidden.dtype == torch.float32
    if not served or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    if not layer.decodes(hidden.shape[1]) or config.backend not in ON_CPU or config.needs("output"):
        return None
    if module._fastkv_single is None and not _watched(module):
        module._fastkv_single = _how(module, layer, given) or False
    if not module._fastkv_single:
        return None
    q, k, v = _projected(module, hidden)
    out = layer.step_before_rope(q, k, v, given["position_embeddings"], module._fastkv_single)
    return None if out is None else module.o_proj(out)


def _projected(module: Any, hidden: Tensor) -> list[Tensor]:
    """Query [B, 1, Hq * D], key and value [B, 1, Hkv * D] of a token before RoPE, as Llama's forward makes them."""
    parts = module._modules  # attributes of a module are found last
    q, k, v = (parts[name](hidden) for name in ("q_proj", "k_proj", "v_proj"))
    if "q_norm" in parts:
        heads = -1, module.head_dim
        q, k = parts["q_norm"](q.unflatten(-1, heads)).flatten(-2), parts["k_norm"](k.unflatten(-1, heads)).flatten(-2)
    return [rows.contiguous() for rows in (q, k, v)]


def _watched(module: Any) -> bool:
    """Whether hooks would see what is tried on projections."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.children())


def _how(module: Any, layer: FastKVLayer, given: dict[str, Any]) -> Attends | None:
    """How a module attends, if its own forward hands on the bits that are made of a token here, too; else None."""
    hidden, turns, dim = given["hidden_states"], given.get("position_embeddings"), getattr(module, "head_dim", 0)
    if (
        not modules.is_like_llama(module)
        or not isinstance(turns, tuple)
        or any(turn.shape[-1] != dim for turn in turns)
    ):
        return None
    norm = getattr(module._modules.get("q_norm"), "weight", None)
    if norm is not None and norm.numel() != dim:  # of all heads together, as OLMo 2's
        return None
    hidden, turns = hidden + 1, (turns[0] + 0.5, turns[1] + 0.5)  # not of position 0, which turns nothing
    handed: list[Any] = []
    alone = {name: None if isinstance(value, FastKVCache) else value for name, value in given.items()}
    alone |= {"hidden_states": hidden, "position_embeddings": turns, "fastkv_handed": handed}
    module._fastkv_attention_forward(**alone)
    tokens, how = handed[0]
    q, k, v = (rows.view(len(rows), -1, 1, dim) for rows in _projected(module, hidden))
    turned = implementation("rotated", "cpu", "cpu")(q, k, *turns)
    return how if turned is not None and all(map(torch.equal, tokens, (*turned, v))) else None
