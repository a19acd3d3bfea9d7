"""How fastkv plugs into transformers: attach a config to one model and take it off again, bit for bit.

What is touched, all of it on the given instance: the `config` attribute and the forward of each full-attention module,
the `config` of those with a sliding window, the forwards of the base model and of its decoder, one pre-hook of the
model, and the entry points of `generate` that create caches, masks and positions. The model's own config, weights and
masks, and what bounds its cache already, stay stock. Everything about a model is found by behaviour (`modules`), except
for what is known of types by name: which are tested, and which are refused and why.
"""

from __future__ import annotations

import copy
import copyreg
import json
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from torch.nn import Module
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...backend import Parallel, check_backend
from ...cache import CacheWorkspace
from ...calibration import kv_shapes
from ...config import Config
from ...errors import FastKVError
from . import attention, captured, forward, modules, selfcheck, single, stock
from .cache import build_layers, is_static, stock_layers
from .layer import FastKVLayer
from .modules import sizes
from .selfcheck import growing, rotations, with_rotations

__all__ = ["REFUSED", "TESTED", "attach", "check", "detach", "growing", "rotations", "sizes", "with_rotations"]

FOUND = Path(__file__).with_name("families.json")  # what `python -m tests.families --write` found
_found = json.loads(FOUND.read_text(encoding="utf-8"))
TESTED_WITH: str = _found["transformers"]
TESTED: dict[str, str] = {name: what for what, names in _found["types"].items() for name in names.split()}

INDEXED = "it attends to tokens that an indexer picks from the whole past"
REFUSED = {
    "axk2": INDEXED,
    "bloom": "it biases attention by distance (ALiBi), which evicted tokens no longer have",
    "codegen": "its attention does not go through transformers' interface",
    "deepseek_v32": INDEXED,
    "deepseek_v4": "it compresses its own cache",
    "diffllama": "it attends twice to the same keys, with halves of the values",
    "dots3_note": INDEXED,
    "falcon": "its attention does not go through transformers' interface",
    "glm5_next": INDEXED,
    "glm_moe_dsa": INDEXED,
    "gpt_bigcode": "it caches keys and values in one tensor",
    "gptj": "its attention does not go through transformers' interface",
    "hy_v4": INDEXED,
    "jetmoe": "each of its experts attends with queries of its own",
    "minimax": "its linear attention keeps a cache of its own",
    "mistral_large4": INDEXED,
    "mpt": "it biases attention by distance (ALiBi), which evicted tokens no longer have",
    "opt": "its positions follow from the attention mask, which is not the sequence's when it decodes",
    "zamba": "one attention module serves several layers",
}

# transformers itself goes on from the state of these layers for single tokens only.
WHOLE_ONLY = {
    "bamba": "its linear attention begins anew at every block",
    "jamba": "its linear attention begins anew at every block",
}


def _pickled(method: types.MethodType) -> Any:
    """As pickle does it by itself, but for a patched model, whose methods a loaded one would not have."""
    if "_fastkv_undo" in getattr(method.__self__, "__dict__", ()):
        raise FastKVError("a patched model cannot be pickled; call fastkv.unpatch(model) before it is saved")
    return getattr, (method.__self__, method.__func__.__name__)


def _override(module: Module, name: str, value: Any) -> None:
    """Set an instance attribute and remember what was there, on the module: a deep copy of the model carries its own.
    Functions are bound, so that deepcopy rebinds them.
    """
    undo = module.__dict__.setdefault("_fastkv_undo", {})
    undo.setdefault(name, (name in module.__dict__, module.__dict__.get(name)))
    bound = types.MethodType(value, module) if isinstance(value, types.FunctionType) else value
    object.__setattr__(module, name, bound)


def check(model: Module, config: Config, runs: bool = True) -> list[Module]:
    """The attention modules to compress. Raises FastKVError, having changed nothing, if the model cannot be patched.

    Args: runs: whether an untested model may be run; without, its weights may be on the meta device.
    """
    model_config = getattr(model, "config", None)
    if not isinstance(model, Module) or model_config is None or not hasattr(model_config, "get_text_config"):
        raise FastKVError(
            f"patch needs a transformers model, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    if hasattr(model, "get_base_model"):
        raise FastKVError(
            f"patch needs the model inside the adapter, got {type(model).__name__}; patch model.get_base_model()"
        )
    if "config" not in vars(model):  # as torch.compile's wrapper, which hands on what it does not have
        raise FastKVError(
            f"patch needs the model itself, got a {type(model).__name__} around it, whose generate would go past the "
            "patch; patch the model first and wrap it then"
        )
    adapters = getattr(model, "peft_config", {})
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        raise FastKVError(
            "prefix and prompt tuning bring a past of their own, which a compressed cache cannot take; merge or drop "
            "the adapter first"
        )
    if runs and any(parameter.is_meta for parameter in model.parameters()):
        raise FastKVError("patch needs a model with weights, got one on the meta device; load or materialise it first")
    if getattr(model_config, "is_encoder_decoder", False):
        raise FastKVError(f"patch needs a decoder-only model, got {type(model).__name__} with an encoder; use another")
    text = model_config.get_text_config(decoder=True)
    for name in (model_config.model_type, text.model_type):
        if name in REFUSED:
            raise FastKVError(f"{name} is not supported: {REFUSED[name]}; use the model without fastkv")
        if name in WHOLE_ONLY and config.prefill_block is not None:
            raise FastKVError(f"{name} reads prompts whole only: {WHOLE_ONLY[name]}; use prefill_block=None")
    grown = growing(model)
    if grown is not None and config.prefill_block is not None:
        raise FastKVError(
            f"the rotary embedding of {type(model).__name__} is of type {grown!r}, whose frequencies follow the "
            "longest position of a call, and a block knows only its own; use prefill_block=None"
        )
    layers = build_layers(model, config, CacheWorkspace())
    full = [index for index, layer in enumerate(layers) if isinstance(layer, FastKVLayer)]
    if not full:
        raise FastKVError(
            f"{type(model).__name__} has no full-attention layer to compress, got {stock.census(layers)}; its cache is "
            "bounded already"
        )
    found = modules.attentions(model)
    missing = [index for index in full if index not in found]
    if missing:
        raise FastKVError(
            f"layers {missing} of {type(model).__name__} do not attend through transformers' attention interface; "
            "their keys cannot be compressed"
        )
    sources = modules.sources(model)
    cached = {index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}
    alone = [index for index in found if index not in sources and index not in cached]
    if alone:
        raise FastKVError(
            f"layers {alone} of {type(model).__name__} attend to keys that they do not cache, expected a layer of "
            "their kind before them to share its own; use the model without fastkv"
        )
    readers = {index for index, source in sources.items() if source in full}
    chosen = {index: module for index, module in found.items() if index in full or index in readers}
    base = model_config._attn_implementation or "eager"
    vouched = base in (getattr(model, "_compatible_flash_implementations", None) or ())
    for layer, module in chosen.items():
        where = f"layer {layer} ({type(module).__name__})"
        _check_base(module, base, where, vouched)
        _check_attention(module, config, where)
    latents = {layer for layer, module in chosen.items() if modules.is_latent(module)}
    if Parallel.of(model).size > 1 and latents:
        raise FastKVError(
            f"the layers of {type(model).__name__} cache latents (MLA), which all heads share, but tensor parallelism "
            "deals heads to processes; load the model without tp_plan"
        )
    is_static(model, config.static, config.policy)
    config.budget.check_layers(len(full))
    config.check_heads([1 if layer in latents else heads for layer, (heads, _) in enumerate(kv_shapes(text))])
    if config.budget.quality is not None and modules.get_head(model) is None:
        raise FastKVError(
            f"Budget(quality=...) reads how predictable a prompt is from its logits, but {type(model).__name__} has no "
            "output embeddings; load the model with AutoModelForCausalLM"
        )
    accepted, model_type = list(chosen.values()), model_config.model_type
    here, tested = (Version(one).release[:2] for one in (transformers.__version__, TESTED_WITH))
    if runs and (model_type not in TESTED or here < tested):  # an older one may do something else
        selfcheck.check_agreement(model, lambda changed: attach(model, accepted, changed), config)
        if model_type not in TESTED:
            warnings.warn(
                f"{model_type} is not among the model types that fastkv is tested with; compare some answers with the "
                "unpatched model's",
                UserWarning,
                stacklevel=3,
            )
    return accepted


def _check_base(module: Module, base: str, where: str, vouched: bool) -> None:
    """Raise FastKVError unless an attention implementation computes what an attention module means.

    Args: vouched: whether the model lists it as one that does: of those of flash-attn only some know sinks.
    """
    ignored = None
    if base == "sdpa":
        ignored = modules.softcap(module) or modules.sinks(module)
    elif stock.is_flash(base) and not vouched:
        ignored = modules.sinks(module)
    if ignored is not None or (base not in stock.BASES and not stock.is_hub_flash(base)):
        wanted = stock.BASES if ignored is None else ("eager",)
        why = f" ({base} ignores {ignored})" if ignored else ""
        raise FastKVError(
            f"attn_implementation must be one of {', '.join(wanted)} for {where}, got {base!r}{why}; load the model "
            f"with attn_implementation={wanted[0]!r}"
        )


def _check_attention(module: Module, config: Config, where: str) -> None:
    """Raise FastKVError unless a compressed cache can stand in for the keys of an attention module."""
    unhandled = next((what for keyword, what in modules.UNHANDLED.items() if modules.passes(module, keyword)), None)
    if unhandled is not None:
        raise FastKVError(
            f"the attention of {where} depends on {unhandled}, expected queries and keys only; use the model without "
            "fastkv"
        )
    if getattr(module, "is_causal", True) is False:
        raise FastKVError(
            f"{where} attends to later tokens too, expected causal attention; use the model without fastkv"
        )
    has_latents = modules.is_latent(module)
    if has_latents:
        _check_latents(module, config, where)
    elif config.needs("output"):
        modules.output_weight(module)
    size = modules.Sizes.of(module)
    dims = size.key_dim, size.groups, size.value_dim
    check_backend(config.backend, size.device, size.dtype, *dims, has_latents, config.slots.name)


def _check_latents(module: Module, config: Config, where: str) -> None:
    """Raise FastKVError unless a module that caches latents does so as expected, and the config can use them."""
    modules.check_latents(module, where)
    correction, latents = config.correction, f"{where} caches latents (MLA), which are keys and values in one"
    if correction.key_only or correction.match is not None:
        does = "recovers values from keys" if correction.key_only else "changes values"
        raise FastKVError(f"correction={correction.name!r} {does}, but {latents}; use another correction")
    if not config.slots.plain:
        raise FastKVError(f"slots={config.slots.name!r} stores keys and values apart, but {latents}; leave slots out")
    if config.needs("output"):
        raise FastKVError(
            f"policy {config.policy.name!r} reads values as the output projection does, but {where} caches latents "
            "(MLA), which it would have to expand; use another policy"
        )


def attach(model: Module, found: list[Module], config: Config) -> None:
    """Put the config on a model that `check` accepted, in place of what was there."""
    detach(model)
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.fastkv_attention)  # inert until a module asks for it
    ALL_ATTENTION_FUNCTIONS.register(attention.WINDOW_NAME, attention.window_attention)
    copyreg.pickle(types.MethodType, _pickled)  # type: ignore[arg-type]
    for module in found:
        _attend_with(attention.NAME, module)
        # None: not known yet. Another's forward, as accelerate's, may do more.
        _override(module, "_fastkv_single", False if "forward" in vars(module) else None)
        _override(module, "_fastkv_attention_forward", module.forward)
        _override(module, "forward", single.attention_forward)
        if modules.is_latent(module):
            _override(module, "expand_kv", modules.unexpanded)
    for module in modules.attentions(model).values():
        given: Any = module.config
        if module not in found and getattr(module, "sliding_window", None) and given._attn_implementation == "sdpa":
            _attend_with(attention.WINDOW_NAME, module)
    # base_model is where 2-D masks still exist and lm_head does not: LlamaModel, or Gemma3Model around its text model.
    base, decoder = modules.base(model), modules.decoder(model)
    for module in (decoder, base):
        _override(module, "_fastkv_prepares", base is not decoder and forward.prepares_masks(base))
    _override(decoder, "_fastkv_decoder_forward", decoder.forward)
    _override(decoder, "forward", forward.replacing(type(decoder).forward, forward.decoder_forward))
    for module in (base, model):
        _override(module, "_fastkv_config", config)
        _override(module, "_fastkv_dtype", module.dtype)
    _override(base, "_fastkv_num_layers", len(stock_layers(model)))
    _override(base, "_fastkv_head", modules.get_head(model))
    _override(base, "_fastkv_base_forward", base.forward)
    _override(base, "forward", forward.replacing(type(base).forward, forward.base_forward))
    if base is not model:
        model.register_forward_pre_hook(forward.announce_logits, with_kwargs=True)
    if hasattr(model, "_prepare_cache_for_generation"):
        _override(model, "_prepare_cache_for_generation", forward.prepare_cache)
        _override(model, "create_masks_for_generate", forward.masks_for_generate)
        _override(model, "_update_model_kwargs_for_generation", forward.update_kwargs)
        _override(model, "get_compiled_call", captured.call_for_generate)
        captured.NOT_CAPTURED.discard(model)
        if hasattr(base, "rope_deltas"):
            _override(model, "_prepare_position_ids_for_generation", forward.positions_for_generate)
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        if hasattr(model, name):
            _override(model, name, attention.refuse_continuous_batching)


def _attend_with(name: str, module: Module) -> None:
    """Give a module a config of its own that names this attention function."""
    own = copy.copy(module.config)
    own._attn_implementation_internal = name  # type: ignore[union-attr]
    _override(module, "_fastkv_stock_config", module.config)
    _override(module, "config", own)


@contextmanager
def restored(model: Module) -> Iterator[None]:
    """At the end of the with block the model is patched as it was before, or not at all."""
    before = vars(model).get("_fastkv_config")
    try:
        yield
    finally:
        restore(model, before)


def restore(model: Module, before: Config | None) -> None:
    """Patch a model as it was with that config, None for not at all."""
    detach(model)  # first: `check` looks at stock models
    if before is not None:
        attach(model, check(model, before), before)


def detach(model: Module) -> None:
    """Take off whatever `attach` put on; a model that was never patched is left as it is."""
    for module in model.modules():
        for name, (existed, value) in module.__dict__.pop("_fastkv_undo", {}).items():
            if existed:
                object.__setattr__(module, name, value)
            else:
                module.__dict__.pop(name, None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is forward.announce_logits]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for name in ("_compiled_call", "_last_compile_config"):  # transformers' compiled closure over the patched modules
        model.__dict__.pop(name, None)
