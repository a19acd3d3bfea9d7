"""The entry points of `generate` that create caches, masks and positions, as a compressed cache needs them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from ...errors import FastKVError
from .cache import FastKVCache
from .stock import CACHE

SLIDING_ROLLBACK = Version("5.23")  # first transformers whose sliding-window layers can roll back


def announce_logits(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pre-hook of the model: tell the block loop how many last rows lm_head will read, so that it keeps no more."""
    wanted = kwargs.get("logits_to_keep")
    if type(wanted) is int and wanted > 0 and kwargs.get("labels") is None:
        kwargs["fastkv_rows"] = wanted
    return args, kwargs


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` asks for a cache here; give it a FastKVCache unless the user brought one or wants none."""
    stock = type(self)._prepare_cache_for_generation
    if model_kwargs.get(CACHE) is not None or generation_config.use_cache is False:
        return stock(self, generation_config, model_kwargs, *args, **kwargs)
    if getattr(generation_config, "is_assistant", False):
        raise FastKVError("a patched model cannot be the assistant of another; call fastkv.unpatch(assistant) first")
    wanted = generation_config.cache_implementation
    if wanted not in (None, "dynamic"):
        raise FastKVError(
            f"cache_implementation={wanted!r} conflicts with a patched model, which brings its own cache; leave it out "
            "or call fastkv.unpatch(model) first"
        )
    mode = args[0] if args else kwargs.get("generation_mode")
    assisted = "assisted" in str(mode).lower()
    cache = FastKVCache(self, static=False if assisted else None)  # the host has to count what is rolled back
    if assisted:
        if cache.config.deferred:
            raise FastKVError(
                "assisted decoding may take back part of the prompt, which a second reading and Budget(quality=...) "
                "compress at once; use another policy and budget or decode without an assistant"
            )
        if not hasattr(Cache, "activate_past_recording"):
            raise FastKVError("assisted decoding needs transformers >= 5.14, which announces roll-backs; update it")
        # The sliding-window layers of 5.17 announce roll-backs but fail in them, so asking for a method does not tell.
        if not cache.fully_compressed and Version(transformers.__version__) < SLIDING_ROLLBACK:
            raise FastKVError(
                "assisted decoding of a model with sliding-window layers needs transformers >= 5.23, whose sliding "
                "layers can roll back; update it or decode without an assistant"
            )
    model_kwargs[CACHE] = cache
    return None


def masks_for_generate(self: Any, **given: Any) -> Any:
    """`generate` prepares masks outside the compiled step here; a compressed cache makes its own in the forward."""
    cache = given[CACHE]
    if not isinstance(cache, FastKVCache):
        return getattr(type(self), "create_masks_for_generate", create_masks_for_generate)(**given)
    if not is_step(cache, given["inputs_embeds"].shape[1], given["attention_mask"]):
        return given["attention_mask"]
    if not cache.rolled:
        cache.roll(given["attention_mask"])
    return None


def positions_for_generate(self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """`generate` continues 3-D positions (M-RoPE) by what the model met last; a compressed cache knows its own."""
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, FastKVCache):
        self.base_model.rope_deltas = cache.rope_deltas
    positions: Tensor = type(self)._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)
    return positions


def update_kwargs(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` prepares its next step here, and the mask for it, whose new tokens are real."""
    model_kwargs = type(self)._update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs)
    cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
    if isinstance(cache, FastKVCache) and isinstance(mask, Tensor):
        cache.known_mask = mask
    return model_kwargs


def is_step(cache: FastKVCache, total: int, mask: Any) -> bool:
    """Whether the next `total` tokens are one decode step: one for every row, none of them padding.

    The last column of a 2-D mask says so. Nobody has to look where `generate` has made it: an accelerator would have to
    be waited for. A compiled step takes no padding.
    """
    if not cache.decodes(total):
        return False
    if torch.compiler.is_compiling() or not isinstance(mask, Tensor) or mask.ndim != 2:
        return True
    return mask is cache.known_mask or not ends_in_padding(mask)


def ends_in_padding(mask: Tensor) -> bool:
    """Whether the last token of any row is padding, by a mask [B, N]. One host sync."""
    return not bool((mask[:, -1] != 0).all())
