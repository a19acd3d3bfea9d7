"""The forwards of a patched model, in two places that may be one module.

The base model (`Gemma3Model`, `LlamaModel`) is where a cache is made and where 2-D masks exist. Its decoder
(`Gemma3TextModel`, `LlamaModel`) is where embeddings of images and audio and positions in three dimensions exist, so
that is where prompts are read (`prompt`). `generate` asks for caches, masks and positions here, too.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers.masking_utils import create_masks_for_generate

from ...errors import FastKVError
from .cache import FastKVCache, Prompt
from .prompt import (
    MaskMade,
    PreparedMasks,
    ends_in_padding,
    in_blocks,
    padding_of,
    read_in_full,
    read_prompt,
    tokens_of,
)
from .stock import BEFORE, CACHE


def replacing(stock: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls forward(self, keywords) for the same arguments as `stock`, the forward of a class.

    A cache comes under the name that this transformers has, whichever the caller used.
    """
    names = [*inspect.signature(stock).parameters][1:]

    @functools.wraps(stock)
    def named(self: Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args), **kwargs)
        if BEFORE in given and BEFORE != CACHE:
            given[CACHE] = given.pop(BEFORE)
        return forward(self, given)

    return named


def prepares_masks(base: Module) -> bool:
    """Whether a base model makes the masks that its decoder gets, as Gemma 3's does for its images."""
    names = inspect.unwrap(type(base).forward).__code__.co_names
    return any(name.startswith("create_") and "mask" in name and "bidirectional" not in name for name in names)


def base_forward(self: Any, given: dict[str, Any]) -> Any:
    """Forward of the base model: makes a cache where the stock model would, and passes on what its decoder is not told.

    Args: given: the arguments of the stock forward, and `fastkv_rows` (from `announce_logits`), the last rows of hidden
        states that somebody reads; None for all of them.
    """
    rows = given.pop("fastkv_rows", None)
    use_cache = given.get("use_cache")
    wants_cache = self.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    if given.get(CACHE) is None and wants_cache and not self.training:
        given[CACHE] = FastKVCache(self)
    cache, tokens = given.get(CACHE), tokens_of(given)
    if not isinstance(cache, FastKVCache) or tokens is None:
        return self._fastkv_base_forward(**given)
    if len(cache.layers) != self._fastkv_num_layers:
        raise FastKVError(
            f"{type(self).__name__} needs a cache of {self._fastkv_num_layers} layers, got one of {len(cache.layers)}; "
            "use the model that it was made for"
        )
    if given.get("output_attentions"):
        warnings.warn("layers with a compressed cache return no attention weights", stacklevel=3)
    if not tokens.shape[0] or not tokens.shape[1]:
        raise FastKVError(
            f"a patched model needs at least one sequence of one token, got an input of shape {list(tokens.shape)}; "
            "leave the call out"
        )
    total, padding = tokens.shape[1], padding_of(given)
    _check_shapes(cache, tokens, given)
    exact = torch.compiler.is_compiling() or padding is cache.known_mask
    if padding is not None and padding.shape[1] > total and not exact:  # of one for a longer text the first ones count
        given["attention_mask"] = padding = padding[:, : int(cache.get_seq_length()) + total]
    if hasattr(self, "rope_deltas") and given.get("position_ids") is None and cache.started:
        given["position_ids"] = _next_positions(cache, given, tokens, padding)
    if self._fastkv_prepares:
        _place(cache, given, padding, total)
        if is_step(cache, total, given.get("attention_mask")):
            given["attention_mask"] = step_mask(self, cache, tokens, given.get("attention_mask"), padding)
            return self._fastkv_base_forward(**given)
    elif cache.decodes(total):
        return self._fastkv_base_forward(**given)  # the decoder sees by the mask whether this is a step
    prompt = Prompt(padding, rows)
    with cache.reading(prompt):
        if cache.config.deferred and not cache.started:
            return read_in_full(self, cache, given, prompt)
        if self._fastkv_prepares and in_blocks(cache, total):
            prompt.masks = PreparedMasks.of(self, given)
            # transformers takes a 4-D mask as it is: masks of the whole prompt would be made for nothing.
            given["attention_mask"] = _no_mask(tokens)
        return self._fastkv_base_forward(**given)


def _check_shapes(cache: FastKVCache, tokens: Tensor, given: dict[str, Any]) -> None:
    """Raise FastKVError before any layer counts tokens of another batch, or with a mask that does not fit them."""
    (batch, total), layers = tokens.shape[:2], cache.compressed
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    first = layers[0]
    if first.cache.started and batch != first.batch_size:
        raise FastKVError(
            f"this cache holds {first.batch_size} sequences, got {batch}; use another, reset() it or change its batch "
            "with batch_select_indices and batch_repeat_interleave"
        )
    waits = total > 1 or isinstance(first.seen, int)  # a step of a static cache does not wait for its device
    told = waits and not torch.compiler.is_compiling()
    # Layers run in order: of those that count, the last one lacks what the first one has.
    ends = [one for some in (layers, cache.sliding) for one in (*some[:1], *some[-1:])]
    if told and len({int(layer.get_seq_length()) for layer in ends}) > 1:
        raise FastKVError(
            "a forward of this cache failed half way, and some layers have its tokens and others do not; reset() it "
            "and read again"
        )
    if positions is not None and positions.shape[-1] not in (1, total):
        raise FastKVError(
            f"position_ids must have a number for each of the {total} new tokens, got {list(positions.shape)}; pass "
            "those of the new tokens alone"
        )
    if not isinstance(mask, Tensor):
        return
    if mask.ndim not in (2, 4) or mask.shape[0] not in ((batch,) if mask.ndim == 2 else (1, batch)):
        raise FastKVError(
            f"attention_mask must have 2 or 4 dimensions, the first for {batch} sequences, got {list(mask.shape)}; "
            "pass a 2-D padding mask"
        )
    if mask.ndim == 4 and mask.shape[-1] != total:
        raise FastKVError(
            f"got a 4-D attention mask over {mask.shape[-1]} keys, but a compressed cache keeps no mask columns for "
            f"its past and only the {total} new tokens can be masked; pass a 2-D padding mask"
        )
    past = int(first.seen) if waits else 0
    if mask.ndim == 2 and mask.shape[1] < past + total:
        raise FastKVError(
            f"attention_mask must have a column for each of the {total} new tokens, and for the {past} before them, "
            f"got {mask.shape[1]}; pass the mask of the whole sequence"
        )


def decoder_forward(self: Any, given: dict[str, Any]) -> Any:
    """Forward of the decoder: one decode step, or a prompt, in blocks if the config says so."""
    cache, tokens = given.get(CACHE), tokens_of(given)
    if not isinstance(cache, FastKVCache) or tokens is None:
        return self._fastkv_decoder_forward(**given)
    mask, prompt, total = given.get("attention_mask"), cache.prompt, tokens.shape[1]
    if prompt is not None and prompt.masks is not None and prompt.masks.asking:
        raise MaskMade(mask)
    padding = padding_of(given)
    if prompt is None and "_fastkv_base_forward" not in vars(self):  # else it was checked there
        _check_shapes(cache, tokens, given)
    if prompt is not None:
        # A base model may lengthen what it was given, as Qwen2-Audio does with sounds, and the mask with it.
        padding = prompt.padding = prompt.padding if padding is None else padding
    _place(cache, given, padding, total)
    if prompt is not None:
        return read_prompt(self, cache, given)
    if is_step(cache, total, mask):
        if not (self._fastkv_prepares and isinstance(mask, dict)):
            given["attention_mask"] = step_mask(self, cache, tokens, mask, padding)
        return self._fastkv_decoder_forward(**given)
    with cache.reading(Prompt(padding)):
        return read_prompt(self, cache, given)


def step_mask(module: Any, cache: FastKVCache, tokens: Tensor, mask: Any, padding: Tensor | None) -> Any:
    """The mask for one decoded token of every row, which is no padding; `mask` where transformers is to make it."""
    # Compressed layers need none; one that is prepared spares transformers making it.
    ones = _no_mask(tokens)
    if cache.fully_compressed:
        return ones
    if not cache.windows:
        return mask
    if not cache.rolled:
        cache.roll(padding)
    first, eager = cache.windows[0], module.config._attn_implementation in (None, "eager")
    sliding = first.ring.step(first.keys.dtype if eager else None)
    others = getattr(module.config.get_text_config(decoder=True), "layer_types", None) or ()  # linear ones need none
    return {**dict.fromkeys(others), "full_attention": ones, "sliding_attention": sliding}


def _no_mask(tokens: Tensor) -> Tensor:
    return tokens.new_ones(len(tokens), 1, 1, 1, dtype=torch.bool)


def _place(cache: FastKVCache, given: dict[str, Any], padding: Tensor | None, total: int) -> None:
    """Let the rotary embedding use the positions that are stored, those among real tokens, if anything needs these."""
    if not cache.config.places or given.get("position_ids") is not None:
        return
    if padding is not None:
        given["position_ids"] = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -total:]
    elif cache.started and cache.compressed[0].batch_size > 1:  # some of which may have begun with padding
        given["position_ids"] = cache.next_positions(total, None)


def _next_positions(cache: FastKVCache, given: dict[str, Any], tokens: Tensor, padding: Tensor | None) -> Tensor:
    """Positions [B, T] of text that goes on after images, which take fewer positions than tokens (M-RoPE)."""
    batch, total = tokens.shape[:2]
    if any("grid_thw" in name and value is not None for name, value in given.items()):
        raise FastKVError(
            "images and videos in a later turn have positions that follow from all turns, got no position_ids; pass "
            "them, or use generate with the tokens of all turns"
        )
    if cache.rope_deltas is None and not cache.config.places:
        # Like those of the text before, which transformers numbered, padding included.
        return (cache.compressed[0].seen + torch.arange(total, device=tokens.device)).expand(batch, -1)
    return cache.next_positions(total, padding)


# What `generate` calls.


SLIDING_ROLLBACK = Version("5.23")  # first transformers whose sliding-window layers can roll back


def announce_logits(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pre-hook of the model: tell the block loop how many last rows lm_head will read, so that it keeps no more."""
    wanted = kwargs.get("logits_to_keep")
    known: Any = module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    names = "output_hidden_states", "output_router_logits"
    others = (getattr(known, name, False) if kwargs.get(name) is None else kwargs[name] for name in names)
    if type(wanted) is int and wanted > 0 and kwargs.get("labels") is None and not any(others):
        kwargs["fastkv_rows"] = wanted
    return args, kwargs


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` asks for a cache here; give it a FastKVCache unless the user brought one or wants none."""
    stock = type(self)._prepare_cache_for_generation
    config, brought = self._fastkv_config, model_kwargs.get(CACHE)
    begins = brought is None or (isinstance(brought, FastKVCache) and not brought.started)
    chunk, mask = getattr(generation_config, "prefill_chunk_size", None), model_kwargs.get("attention_mask")
    several = chunk and not (isinstance(mask, Tensor) and mask.shape[1] <= chunk)
    first_decides = config.budget.follows_prompt or config.deferred
    if begins and several and first_decides and generation_config.use_cache is not False:
        raise FastKVError(
            "prefill_chunk_size hands a prompt over in parts, of which the first would decide how much is kept; "
            "leave it out, give a budget in tokens, or use prefill_block of fastkv.patch"
        )
    if brought is not None or generation_config.use_cache is False:
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
    return type(self)._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)


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
