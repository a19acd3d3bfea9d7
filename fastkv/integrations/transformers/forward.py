"""The forwards of a patched model, in two places that may be one module.

The base model (`Gemma3Model`, `LlamaModel`) is where a cache is made and where 2-D masks exist. Its decoder
(`Gemma3TextModel`, `LlamaModel`) is where embeddings of images and audio and positions in three dimensions exist, so
that is where prompts are read in blocks (`blocks`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ...errors import FastKVError
from .blocks import in_blocks, read_prompt
from .cache import FastKVCache
from .deferred import read_in_full
from .generate import is_step
from .prompt import MaskMade, PreparedMasks, Prompt, padding_of
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
    cache, tokens = given.get(CACHE), _tokens(given)
    if not isinstance(cache, FastKVCache) or tokens is None:
        return self._fastkv_base_forward(**given)
    if given.get("output_attentions"):
        warnings.warn("layers with a compressed cache return no attention weights", stacklevel=3)
    if not tokens.shape[0] or not tokens.shape[1]:
        raise FastKVError(
            f"a patched model needs at least one sequence of one token, got an input of shape {list(tokens.shape)}; "
            "leave the call out"
        )
    total, padding = tokens.shape[1], padding_of(given)
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


def decoder_forward(self: Any, given: dict[str, Any]) -> Any:
    """Forward of the decoder: one decode step, or a prompt, in blocks if the config says so."""
    cache, tokens = given.get(CACHE), _tokens(given)
    if not isinstance(cache, FastKVCache) or tokens is None:
        return self._fastkv_decoder_forward(**given)
    mask, prompt, total = given.get("attention_mask"), cache.prompt, tokens.shape[1]
    if prompt is not None and prompt.masks is not None and prompt.masks.asking:
        raise MaskMade(mask)
    padding = padding_of(given)
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
    eager = module.config._attn_implementation in (None, "eager")
    others = getattr(module.config.get_text_config(decoder=True), "layer_types", None) or ()  # linear ones need none
    return {**dict.fromkeys(others), "full_attention": ones, "sliding_attention": cache.window_mask(eager)}


def _tokens(given: dict[str, Any]) -> Tensor | None:
    """What is read: ids [B, T] or embeddings [B, T, hidden]."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _no_mask(tokens: Tensor) -> Tensor:
    return tokens.new_ones(len(tokens), 1, 1, 1, dtype=torch.bool)


def _place(cache: FastKVCache, given: dict[str, Any], padding: Tensor | None, total: int) -> None:
    """Let the rotary embedding use the positions that are stored, those among real tokens, if anything needs these."""
    if cache.config.places and given.get("position_ids") is None and padding is not None:
        given["position_ids"] = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -total:]


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
