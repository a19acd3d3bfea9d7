"""A single token through an attention module on a CPU, without what its own forward does around attention.

Views, the rotary embedding, and the interfaces of caches and attention are some forty calls into torch a layer, which
take longer than attention to a few hundred tokens. A module whose forward is like Llama's needs none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backend import autocast_dtype, implementation, resolve
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
    hidden = given["hidden_states"]
    if not layer.decodes(hidden.shape[1]) or torch.is_grad_enabled() or autocast_dtype(hidden):
        return None
    if not hidden.is_cpu or hidden.dtype != torch.float32 or layer.cache.config.needs("output"):
        return None
    if module._fastkv_single is None and not _watched(module):
        module._fastkv_single = _how(module, layer, given) or False
    tokens = _projected(module, hidden, given["position_embeddings"]) if module._fastkv_single else None
    if tokens is None:
        return None
    layer.update(*tokens[1:])
    out: Tensor = module.o_proj(layer.step(*tokens, module._fastkv_single).reshape(len(hidden), 1, -1))
    return out


def _projected(module: Any, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Query [B, Hq, 1, D], key and value [B, Hkv, 1, D] of a token, as a forward like Llama's makes them; None where
    nothing turns them faster.
    """
    shape = len(hidden), -1, 1, module.head_dim
    q, k, v = (project(hidden).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
    if "q_norm" in module._modules:  # hasattr of a module is slow to say no
        q, k = module.q_norm(q), module.k_norm(k)
    turned = implementation("rotated", "cpu", "cpu")(q, k, *turns)
    return None if turned is None else (*turned, v)


def _watched(module: Any) -> bool:
    """Whether hooks would see what is tried on projections."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.children())


def _how(module: Any, layer: FastKVLayer, given: dict[str, Any]) -> Attends | None:
    """How a module attends, if its own forward hands on the bits that `_projected` makes of a token, too; else None."""
    config, hidden, turns = layer.cache.config, given["hidden_states"], given.get("position_embeddings")
    if not modules.is_like_llama(module) or resolve(config.backend, hidden.device) != "cpu":
        return None
    if not isinstance(turns, tuple) or any(turn.shape[-1] != module.head_dim for turn in turns):
        return None
    norm = getattr(module._modules.get("q_norm"), "weight", None)
    if norm is not None and norm.numel() != module.head_dim:  # of all heads together, as OLMo 2's
        return None
    hidden, turns = hidden + 1, (turns[0] + 0.5, turns[1] + 0.5)  # not of position 0, which turns nothing
    handed: list[Any] = []
    alone = {name: None if isinstance(value, FastKVCache) else value for name, value in given.items()}
    alone |= {"hidden_states": hidden, "position_embeddings": turns, "fastkv_handed": handed}
    module._fastkv_attention_forward(**alone)
    tokens, how = handed[0]
    found = _projected(module, hidden, turns)
    return how if found is not None and all(map(torch.equal, tokens, found)) else None
