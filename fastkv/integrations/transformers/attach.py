"""Attach a config to one transformers model and take it off again, bit for bit.

What is touched, all of it on the given instance: the `config` attribute and one pre-hook of each full-attention module,
`base_model.forward`, one pre-hook of the model, and the entry points of `generate` that create caches and masks. The
model's own config, weights, masks and sliding-window layers stay stock. A family is an entry in
`families`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...backend import check_backend
from ...cache.workspace import CacheWorkspace
from ...config import Config
from ...errors import FastKVError
from . import attention, generate
from .cache import build_layers, is_static
from .families import FAMILIES
from .layer import FastKVLayer


@dataclass
class _Undo:
    """What `detach` needs, kept on each touched module so that a deep copy of the model carries its own."""

    attributes: dict[str, tuple[bool, Any]] = field(default_factory=dict)


def _override(module: Module, name: str, value: Any) -> None:
    """Set an instance attribute and remember what was there. Functions are bound, so that deepcopy rebinds them."""
    undo = module.__dict__.setdefault("_fastkv_undo", _Undo())
    undo.attributes.setdefault(name, (name in module.__dict__, module.__dict__.get(name)))
    bound = types.MethodType(value, module) if isinstance(value, types.FunctionType) else value
    object.__setattr__(module, name, bound)


def check(model: Module, config: Config) -> list[Module]:
    """The attention modules to compress. Raises FastKVError, having changed nothing, if the model cannot be patched."""
    model_config = getattr(model, "config", None)
    if not isinstance(model, Module) or model_config is None or not hasattr(model_config, "get_text_config"):
        raise FastKVError(
            f"patch needs a transformers model, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    if hasattr(model, "get_base_model"):
        raise FastKVError(
            f"patch needs the model inside the adapter, got {type(model).__name__}; patch model.get_base_model()"
        )
    adapters = getattr(model, "peft_config", {})
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        raise FastKVError(
            "prefix and prompt tuning bring a past of their own, which a compressed cache cannot take; merge or drop "
            "the adapter first"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise FastKVError("patch needs a model with weights, got one on the meta device; load or materialise it first")
    text = model_config.get_text_config(decoder=True)
    family = next((f for f in FAMILIES if text.model_type in f.model_types), None)
    if family is None:
        known = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
        raise FastKVError(f"unknown model type {text.model_type!r}; fastkv knows {known}")
    base = model_config._attn_implementation or "eager"
    softcapped = family.softcap is not None and getattr(text, family.softcap, None) is not None
    allowed = tuple(b for b in family.bases if not (softcapped and b == "sdpa"))
    if base not in allowed:
        why = f" (sdpa ignores {family.softcap})" if softcapped and base == "sdpa" else ""
        raise FastKVError(
            f"attn_implementation must be one of {', '.join(allowed)} for {text.model_type}, got {base!r}{why}; load "
            f"the model with attn_implementation={allowed[0]!r}"
        )
    layers = build_layers(model_config, config, CacheWorkspace())
    full = [index for index, layer in enumerate(layers) if isinstance(layer, FastKVLayer)]
    if not full:
        raise FastKVError(
            f"{type(model).__name__} has no full-attention layer to compress, all {len(layers)} use a sliding window; "
            "its cache is bounded already"
        )
    is_static(model, config.static)
    config.budget.check_layers(len(full))
    config.policy.check([text.num_key_value_heads] * text.num_hidden_layers)
    if config.budget.quality is not None and _head(model) is None:
        raise FastKVError(
            f"Budget(quality=...) reads how predictable a prompt is from its logits, but {type(model).__name__} has no "
            "output embeddings; load the model with AutoModelForCausalLM"
        )
    modules = [m for m in _decoder(model).modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]
    modules = [m for m in modules if m.layer_idx in full]
    if len(modules) != len(full):
        raise FastKVError(
            f"found {len(modules)} attention modules for {len(full)} full-attention layers in {type(model).__name__}; "
            "its layers are not laid out as this version of fastkv expects"
        )
    attentions: list[Any] = modules
    for module in attentions:
        device, dtype = module.k_proj.weight.device, module.k_proj.weight.dtype
        check_backend(config.backend, device, dtype, module.head_dim, module.num_key_value_groups, config.evict_every)
    return modules


def _decoder(model: Module) -> Module:
    """The stack of layers; of a multimodal model, its language model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    return decoder if decoder is not None else model.base_model  # type: ignore[return-value]


def _head(model: Module) -> Module | None:
    """What turns hidden states into logits."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None


def attach(model: Module, modules: list[Module], config: Config) -> None:
    """Put the config on a model that `check` accepted."""
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.fastkv_attention)  # inert until a module asks for it
    for module in modules:
        own = copy.copy(module.config)
        own._attn_implementation_internal = attention.NAME  # type: ignore[union-attr]
        _override(module, "_fastkv_stock_config", module.config)
        _override(module, "config", own)
        module.register_forward_pre_hook(attention.hand_over_layer, with_kwargs=True)
    # base_model is where 2-D masks still exist and lm_head does not: LlamaModel, or Gemma3Model around its text model.
    base: Module = model.base_model  # type: ignore[assignment]
    _override(base, "_fastkv_config", config)
    _override(base, "_fastkv_head", _head(model))
    _override(base, "_fastkv_stock_forward", base.forward)
    _override(base, "forward", functools.wraps(base.forward)(generate.forward_in_blocks))
    if base is not model:
        _override(model, "_fastkv_config", config)
        model.register_forward_pre_hook(generate.announce_logits, with_kwargs=True)
    if hasattr(model, "_prepare_cache_for_generation"):
        _override(model, "_prepare_cache_for_generation", generate.prepare_cache)
        _override(model, "create_masks_for_generate", generate.masks_for_generate)
        _override(model, "_update_model_kwargs_for_generation", generate.update_kwargs)
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        if hasattr(model, name):
            _override(model, name, generate.refuse_continuous_batching)


def detach(model: Module) -> None:
    """Take off whatever `attach` put on; a model that was never patched is left as it is."""
    hooks: tuple[Callable[..., Any], ...] = (attention.hand_over_layer, generate.announce_logits)
    for module in model.modules():
        undo = module.__dict__.pop("_fastkv_undo", _Undo())
        for name, (existed, value) in undo.attributes.items():
            if existed:
                object.__setattr__(module, name, value)
            else:
                module.__dict__.pop(name, None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook in hooks]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for name in ("_compiled_call", "_last_compile_config"):  # transformers' compiled closure over the patched modules
        model.__dict__.pop(name, None)
