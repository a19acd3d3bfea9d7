"""The attention function of patched modules: stock attention without a compressed cache, ours with one."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...backend import autocast_dtype
from ...cache.layout import Attends
from ...errors import FastKVError
from . import modules
from .layer import FastKVLayer
from .stock import seen

NAME = "fastkv"  # must not contain sdpa, flash or paged: transformers tests for these substrings
WINDOW_NAME = "fastkv_window"
POSITIONS = ("position_ids", "cache_position")  # tensors that only say which tokens these are


class _StockView:
    """An attention module as its stock attention function expects it, with the original config."""

    def __init__(self, module: Module, **other: Any) -> None:
        self._module = module
        for name, value in other.items():  # attributes that it has instead
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, "_fastkv_stock_config" if name == "config" else name)


def _stock_attention(module: Module) -> Any:
    name = module._fastkv_stock_config._attn_implementation  # type: ignore[union-attr]
    if name in (None, "eager"):
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def valid_tokens(mask: Tensor | None, real: Tensor | None, batch: int, num: int, device: torch.device) -> Tensor:
    """Which of the T new tokens are real, [B, T] bool.

    Args:
        mask: what the stock implementation was given: None (all), [B, *] (flash: 1 for real), or [B, 1, T, T] (sdpa:
            bool, eager: additive), in which a real token sees itself.
        real: [B, T] bool, from the 2-D mask of the forward, where there is one: it says more than a 4-D mask.
    """
    if real is not None:
        return real.to(device)
    if mask is None:
        return torch.ones(batch, num, dtype=torch.bool, device=device)
    if mask.ndim == 2:
        return mask[:, -num:].bool().clone()  # kernels want rows without gaps
    return seen(mask[:, 0].diagonal(dim1=-2, dim2=-1)).expand(batch, num).clone()


def check_call(module: Module, query: Tensor, key: Tensor, further: dict[str, Any], softcap: float | None) -> None:
    """Raise FastKVError if the result depends on more than queries, keys, values and what `fastkv_attention` names.

    Only what the host knows is looked at. Args: further: arguments of the call that have no name there.
    """
    unknown = _further_tensors(further)
    if unknown:
        raise FastKVError(
            f"the attention of {_named(module)} was given {', '.join(unknown)}, expected queries, keys, values, mask "
            "and sinks only; a compressed cache cannot know what these do, call fastkv.unpatch(model)"
        )
    if softcap is not None and module._fastkv_stock_config._attn_implementation == "sdpa":  # type: ignore[union-attr]
        raise FastKVError("sdpa ignores the soft-cap of logits that this model has; load it with eager attention")
    if further.get("is_causal") is False:
        raise FastKVError(
            f"{_named(module)} was asked to attend to later tokens, expected causal attention; unpatch the model"
        )
    if key.shape[0] != query.shape[0]:
        raise FastKVError(
            f"{_named(module)} attends with {query.shape[0]} rows of queries to {key.shape[0]} of keys, expected as "
            "many; such a model cannot be compressed, call fastkv.unpatch(model)"
        )


def window_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """sdpa as transformers calls it, for a layer with a sliding window; arguments and results as in the interface.

    Of one new token, the queries of a KV head are given as so many tokens of one head: compiled, or with transformers
    before 5.23, sdpa would be given a copy of all keys and values for each of them. A mask that is not the same for all
    heads, or anything else that attention may depend on, leaves the call as it is.
    """
    sdpa, (batch, heads, num, dim) = _stock_attention(module), query.shape
    same = attention_mask is None or attention_mask.shape[1] == 1
    if num > 1 or not same or _further_tensors(kwargs):
        out, _ = sdpa(_StockView(module), query, key, value, attention_mask, **kwargs)
        return out, None
    alone = _StockView(module, num_key_value_groups=1)
    rows = query.reshape(batch, key.shape[1], -1, dim)
    out, _ = sdpa(alone, rows, key, value, attention_mask, **kwargs | {"is_causal": False})
    return out.transpose(1, 2).reshape(batch, 1, heads, -1), None


def _further_tensors(given: dict[str, Any]) -> list[str]:
    """Names of tensors that attention may depend on."""
    return [name for name, value in given.items() if isinstance(value, Tensor) and name not in POSITIONS]


class _Detached(torch.autograd.Function):
    """Attention to a past that keeps no gradients: it can be read and not differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        """The attention; query: what it was made of, which autograd follows."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Refused."""
        raise FastKVError(
            "attention to a compressed past has no gradient; read the prompt whole (prefill_block=None) and without a "
            "past, or call the model with use_cache=False"
        )


def _handed_on(out: Tensor, query: Tensor) -> Tensor:
    """Attention [B, Hq, T, Dv] as the interface wants it, [B, T, Hq, Dv]."""
    out = out.transpose(1, 2).contiguous()
    follows = torch.is_grad_enabled() and query.requires_grad and not out.requires_grad
    if not follows or torch.compiler.is_compiling():
        return out
    return _Detached.apply(out, query)  # type: ignore[no-any-return, no-untyped-call]


def _named(module: Module) -> str:
    return f"layer {module.layer_idx} ({type(module).__name__})"


def refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """In the place of what starts continuous batching."""
    raise FastKVError(
        "continuous batching brings its own paged cache, which would bypass the compressed one; call "
        "fastkv.unpatch(model) first"
    )


def fastkv_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    fastkv_layer: FastKVLayer | None = None,
    fastkv_handed: list[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query [B, Hq, T, D], key, value [B, Hkv, T, D] post-RoPE, the new tokens only.

    Without a compressed layer (training, `use_cache=False`, a cache of the user's own) this is the stock function.
    s_aux [Hq]: learned attention sinks (gpt-oss). fastkv_handed: gets the tokens and how to attend to them instead.

    Returns: output [B, T, Hq, Dv] and None (compressed attention yields no weights).
    """
    if fastkv_layer is not None and (dtype := autocast_dtype(query)) is not None:
        # Queries, keys and values are cast, and nothing else.
        if modules.is_latent(module) and module.kv_b_proj.weight.dtype != dtype:  # type: ignore[union-attr]
            raise FastKVError(
                f"{_named(module)} caches latents (MLA), which are not compressed under autocast to another dtype than "
                f"the model's; load the model in {dtype}"
            )
        cast = query.to(dtype), key.to(dtype), value.to(dtype)
        how: Any = dropout, scaling, softcap, s_aux, fastkv_layer
        with torch.autocast(query.device.type, enabled=False):
            return fastkv_attention(module, *cast, attention_mask, *how, **kwargs)
    if kwargs.get("cache") is not None:
        refuse_continuous_batching(module)
    has_latents = modules.is_latent(module)  # key and value are then what `modules.unexpanded` makes
    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    if fastkv_handed is not None:
        fastkv_handed.append(((query, key, value), Attends(scale, softcap)))
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None
    # sdpa of newer transformers refuses even softcap=None
    extra = {name: one for name, one in (("softcap", softcap), ("s_aux", s_aux)) if one is not None}

    def stock() -> tuple[Tensor, Tensor | None]:
        keys, values = modules.expanded(module, key, value) if has_latents else (key, value)
        return _stock_attention(module)(
            _StockView(module), query, keys, values, attention_mask, dropout=dropout, scaling=scale, **extra, **kwargs
        )

    if fastkv_layer is None:
        return stock()

    def alone() -> Tensor:
        return stock()[0].transpose(1, 2)

    if module.layer_idx != fastkv_layer.cache.layer:  # the keys are another layer's, and nothing is added to them
        check_call(module, query, key, {**kwargs, "s_aux": s_aux}, softcap)
        out = fastkv_layer.attend_shared(query, Attends(scale, softcap), alone)
        if fastkv_layer.reader.differentiates:  # calibration takes what other layers read for constants
            query = query.detach()
        return _handed_on(out, query), None
    check_call(module, query, key, kwargs, softcap)
    q = modules.absorbed(module, query) if has_latents else query
    over_latents = has_latents and not fastkv_layer.begins
    output = modules.output_projection(module, value.shape[-1]) if fastkv_layer.cache.config.needs("output") else None
    how = Attends(scale, softcap, output, s_aux)
    if fastkv_layer.decodes(query.shape[2]):
        out = fastkv_layer.step(q, key, value, how)
    else:
        real = fastkv_layer.cache.workspace.real
        valid = valid_tokens(attention_mask, real, key.shape[0], key.shape[2], key.device)
        out = fastkv_layer.attend(q, key, value, valid, how, alone)
    if over_latents:
        out = modules.lifted(module, out)
    return _handed_on(out, query), None
