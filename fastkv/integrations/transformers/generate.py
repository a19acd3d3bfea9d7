"""What `generate` and plain calls need around attention: the right cache, and long inputs read in blocks."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from ...cache.wrappers import HeldPrompt
from ...calibration.quality import context_nll
from ...config import Config
from ...errors import FastKVError
from .cache import FastKVCache
from .layer import FastKVLayer

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
    if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
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
                "assisted decoding may take back part of the prompt, which KVzip and Budget(quality=...) compress at "
                "once; use another policy and budget or decode without an assistant"
            )
        if not hasattr(Cache, "activate_past_recording"):
            raise FastKVError("assisted decoding needs transformers >= 5.14, which announces roll-backs; update it")
        # The sliding-window layers of 5.17 announce roll-backs but fail in them, so asking for a method does not tell.
        if not cache.fully_compressed and Version(transformers.__version__) < SLIDING_ROLLBACK:
            raise FastKVError(
                "assisted decoding of a model with sliding-window layers needs transformers >= 5.23, whose sliding "
                "layers can roll back; update it or decode without an assistant"
            )
    model_kwargs["past_key_values"] = cache
    return None


def masks_for_generate(self: Any, **given: Any) -> Any:
    """`generate` prepares masks outside the compiled step here; a compressed cache makes its own in the forward."""
    cache = given["past_key_values"]
    if not isinstance(cache, FastKVCache):
        return getattr(type(self), "create_masks_for_generate", create_masks_for_generate)(**given)
    if not is_step(cache, given["inputs_embeds"].shape[1], given["attention_mask"]):
        return given["attention_mask"]
    if not cache.rolled:
        cache.roll(given["attention_mask"])
    return None


def update_kwargs(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` prepares its next step here, and the mask for it, whose new tokens are real."""
    model_kwargs = type(self)._update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs)
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
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


def refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Continuous batching pages its own cache and would bypass the compressed one."""
    raise FastKVError(
        "continuous batching brings its own paged cache, which would bypass the compressed one; call "
        "fastkv.unpatch(model) first"
    )


def forward_in_blocks(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Cache | None = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    fastkv_rows: int | None = None,
    **kwargs: Any,
) -> Any:
    """Forward of the base model: makes a cache where the stock model would, and reads long inputs in blocks.

    `fastkv_rows` (from `announce_logits`) bounds the rows of hidden states that are kept; None keeps all of them.
    """
    wants_cache = self.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    if past_key_values is None and wants_cache and not self.training:
        past_key_values = FastKVCache(self)
    given: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "inputs_embeds": inputs_embeds,
    }
    kwargs["use_cache"] = use_cache
    tokens = input_ids if input_ids is not None else inputs_embeds
    if not isinstance(past_key_values, FastKVCache) or tokens is None:
        return self._fastkv_stock_forward(**given, past_key_values=past_key_values, **kwargs)
    if kwargs.get("output_attentions"):
        warnings.warn("layers with a compressed cache return no attention weights", stacklevel=2)
    if not tokens.shape[0] or not tokens.shape[1]:
        raise FastKVError(
            f"a patched model needs at least one sequence of one token, got an input of shape {list(tokens.shape)}; "
            "leave the call out"
        )
    cache, total, padding = past_key_values, tokens.shape[1], None
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        padding = attention_mask
    if cache.config.undoes_rotation and position_ids is None and padding is not None:
        # What is stored are positions among real tokens; the rotary embedding has to use the same.
        given["position_ids"] = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -total:]
    if is_step(cache, total, padding):
        given["attention_mask"] = step_mask(self, cache, tokens, attention_mask, padding)
        return self._fastkv_stock_forward(**given, past_key_values=cache, **kwargs)
    cache.unroll()
    with cache.workspace.reading_prompt():
        out = read_prompt(self, cache, given, total, fastkv_rows, kwargs)
    if cache.is_compileable:
        cache.roll(padding)
    return out


def step_mask(base: Any, cache: FastKVCache, tokens: Tensor, mask: Any, padding: Tensor | None) -> Any:
    """The mask for one decoded token of every row, which is no padding; `mask` where transformers is to make it."""
    # Compressed layers need none; one that is prepared spares transformers making it.
    ones = tokens.new_ones(len(tokens), 1, 1, 1, dtype=torch.bool)
    if cache.fully_compressed:
        return ones
    if not cache.windows:
        return mask
    if not cache.rolled:
        cache.roll(padding)
    eager = base.config._attn_implementation in (None, "eager")
    return {"full_attention": ones, "sliding_attention": cache.window_mask(eager)}


def read_prompt(
    base: Any, cache: FastKVCache, given: dict[str, Any], total: int, rows: int | None, kwargs: dict[str, Any]
) -> Any:
    """Forward of the base model over `total` tokens, in blocks if the plan says so; arguments as in its callers."""
    config, compressed = cache.config, cache.compressed
    for layer in compressed:
        layer.expected = total
    if config.deferred and not compressed[0].cache.started:
        return read_in_full(base, cache, given, kwargs)
    call = functools.partial(base._fastkv_stock_forward, past_key_values=cache)
    block, mask = config.prefill_block, given["attention_mask"]
    if total == 1 or block is None or total <= block or kwargs.get("pixel_values") is not None:
        return call(**given, **kwargs)
    if isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
        raise FastKVError("reading a prompt in blocks needs a 2-D padding mask; got a prepared mask, pass the 2-D one")
    token_types = kwargs.pop("token_type_ids", None)
    edges = [*range(0, total, block), total]
    recording = any(layer.recording for layer in compressed)
    if recording and len(edges) > 2:
        del edges[-2]  # everything that may be rolled back has to sit in the last block
    outputs: list[Any] = []
    for start, end in zip(edges[:-1], edges[1:]):
        if recording:
            for layer in compressed:
                layer.commit_block()
                if end == total:
                    layer.activate_past_recording()
        if token_types is not None:
            past = token_types.shape[1] - total
            kwargs["token_type_ids"] = token_types[:, start:end] if past == 0 else token_types[:, : past + end]
        outputs.append(call(**_block(given, start, end, total), **kwargs))
        if rows is not None:
            while sum(o.last_hidden_state.shape[1] for o in outputs[1:]) >= rows:
                outputs.pop(0)
    return _join(outputs)


def _block(given: dict[str, Tensor | None], start: int, end: int, total: int) -> dict[str, Tensor | None]:
    """The arguments for tokens [start, end) of an input of `total`; the mask also covers everything before them."""
    ids, embeds = given["input_ids"], given["inputs_embeds"]
    mask, positions = given["attention_mask"], given["position_ids"]
    return {
        "input_ids": None if ids is None else ids[:, start:end],
        "inputs_embeds": None if embeds is None else embeds[:, start:end],
        "attention_mask": None if mask is None else mask[:, : mask.shape[1] - total + end],
        "position_ids": None if positions is None else positions[..., start:end],
    }


def _join(outputs: list[Any]) -> Any:
    """One model output for all blocks."""
    out = outputs[-1]
    out.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], 1)
    if out.get("hidden_states") is not None:
        out.hidden_states = tuple(torch.cat(states, 1) for states in zip(*[o.hidden_states for o in outputs]))
    if out.get("attentions") is not None:
        out.attentions = None
    if out.get("router_logits") is not None:
        out.router_logits = tuple(torch.cat(logits, 0) for logits in zip(*[o.router_logits for o in outputs]))
    return out


def read_in_full(base: Any, cache: FastKVCache, given: dict[str, Tensor | None], kwargs: dict[str, Any]) -> Any:
    """Forward of the base model over a first prompt, then compression of all layers. Returns the model's output.

    Args:
        base: the patched base model.  cache: empty.
        given: input_ids, attention_mask, position_ids, inputs_embeds.  kwargs: further arguments of the forward.
    """
    config, layers = cache.config, cache.compressed
    ids, mask = given["input_ids"], given["attention_mask"]
    if ids is None:
        raise FastKVError("KVzip and Budget(quality=...) read the prompt's tokens; pass input_ids, not inputs_embeds")
    if mask is not None and mask.ndim != 2:
        raise FastKVError("KVzip and Budget(quality=...) need a 2-D padding mask, got a prepared one; pass the 2-D one")
    held = [layer.hold() for layer in layers]
    out = base._fastkv_stock_forward(**given, past_key_values=cache, **kwargs)
    if config.policy.rereads:
        read_again(base, cache, held, ids, torch.ones_like(ids) if mask is None else mask)
    keep = None if config.budget.quality is None else share_to_keep(base, config, out.last_hidden_state, ids, mask)
    for layer in layers:
        layer.commit(keep)
    return out


def read_again(base: Any, cache: FastKVCache, held: list[HeldPrompt], ids: Tensor, mask: Tensor) -> None:
    """Feed the prompt [B, N] once more, in chunks, and let each layer collect what attention its tokens receive."""
    policy: Any = getattr(cache.config.policy, "scorer", cache.config.policy)
    batch, num = ids.shape
    length = mask.sum(-1, keepdim=True)
    # Chunks count real tokens, so that a row does not depend on how far it is padded.
    order = (mask == 0).to(torch.uint8).argsort(dim=-1, stable=True)
    packed, packed_mask = ids.gather(1, order), mask.gather(1, order)
    request = ids.new_tensor(policy.prompt, dtype=ids.dtype).expand(batch, -1)
    stock = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, FastKVLayer)}
    for prompt in held:
        prompt.expect_again()
    for start in range(0, num, policy.chunk):
        part = slice(start, start + policy.chunk)
        fed = torch.cat([request, packed[:, part]], 1)
        fed_mask = torch.cat([torch.ones_like(request), packed_mask[:, part]], 1)
        # Sliding-window layers are transformers'; they forget the second reading by being put back.
        for index, layer in stock.items():
            cache.layers[index] = copy.deepcopy(layer)
        base._fastkv_stock_forward(
            input_ids=fed,
            attention_mask=torch.cat([mask, fed_mask], 1),
            position_ids=(length + fed_mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
    for index, layer in stock.items():
        cache.layers[index] = layer


def share_to_keep(base: Any, config: Config, hidden: Tensor, ids: Tensor, mask: Tensor | None) -> float:
    """The share of the prompt to keep for the budget's quality; of a batch, what its most demanding row needs."""
    assert config.curve is not None and config.budget.quality is not None
    text = base.config.get_text_config(decoder=True)
    if ids.shape[1] < 2:
        return 1.0
    softcap = getattr(text, "final_logit_softcapping", None)
    nll = context_nll(hidden, ids, base._fastkv_head, softcap, mask)
    shares = config.curve.keep(config.budget.quality, nll)
    known = shares[~shares.isnan()]  # a row that is not a number asks for nothing
    return float(known.max()) if len(known) else 1.0
