"""Prompts that are compressed only after all layers have read them: some policies read twice, quality budgets grade."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...cache.wrappers import HeldPrompt
from ...calibration.quality import context_nll
from ...config import Config
from ...errors import FastKVError
from ...policies import SecondReading
from . import stock
from .cache import FastKVCache
from .layer import FastKVLayer
from .prompt import Prompt, check_mask
from .stock import CACHE


def read_in_full(base: Any, cache: FastKVCache, given: dict[str, Any], prompt: Prompt) -> Any:
    """Forward of the base model over a first prompt, then compression of all layers. Returns the model's output.

    Args: base: the patched base model.  cache: empty.  given: arguments of its forward.  prompt: that is read.
    """
    config, layers = cache.config, cache.compressed
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        raise FastKVError(
            "second readings and Budget(quality=...) need the prompt's tokens; pass input_ids, not inputs_embeds"
        )
    check_mask(mask, "what reads a prompt twice or follows Budget(quality=...)")
    held = [layer.hold() for layer in layers]
    out = base._fastkv_base_forward(**given)
    if config.policy.second_reading is not None:
        # Of images there are no ids, but embeddings, which the decoder got.
        tokens = ids if prompt.embeds is None else prompt.embeds
        read_again(base, cache, held, tokens, torch.ones_like(ids) if mask is None else mask)
    keep = None if config.budget.quality is None else share_to_keep(base, config, out.last_hidden_state, ids, mask)
    for layer in layers:
        layer.commit(keep)
    return out


def read_again(
    base: Any,
    cache: FastKVCache,
    held: Sequence[HeldPrompt],
    tokens: Tensor,
    mask: Tensor,
    chunk: int | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Feed the prompt once more, in chunks, and let each layer collect what attention its tokens receive.

    Each chunk stands where a text that goes on after the first reading would.
    Args: tokens: ids [B, N] or embeddings [B, N, hidden].  mask [B, N]: 0 for padding.  chunk: tokens, by default those
        of the policy.  after: called with the model's output for each chunk.
    """
    first = cache.prompt
    assert first is not None
    second = cache.config.policy.second_reading or SecondReading()
    batch, num = mask.shape
    follows = None if first.positions is None else next_position(first.positions, mask)
    # Chunks count real tokens, so that a row does not depend on how far it is padded.
    order = (mask == 0).to(torch.uint8).argsort(dim=-1, stable=True)
    row = torch.arange(batch, device=order.device)[:, None]
    packed, packed_mask = tokens[row, order], mask[row, order]
    asked = torch.tensor(second.prompt, dtype=torch.long, device=tokens.device).expand(batch, -1)
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    request = base.get_input_embeddings()(asked).to(tokens.dtype) if name == "inputs_embeds" else asked.to(tokens.dtype)
    unpadded = mask.new_ones(asked.shape)
    others = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, FastKVLayer)}
    beside = {layer: stock.tensors(layer) for layer in cache.compressed}
    kept = {layer: {name: one.clone() for name, one in found.items()} for layer, found in beside.items()}
    for prompt in held:
        prompt.expect_again()
    chunk = chunk or second.chunk
    for start in range(0, num, chunk):
        part = slice(start, start + chunk)
        fed = torch.cat([request, packed[:, part]], 1)
        fed_mask = torch.cat([unpadded, packed_mask[:, part]], 1)
        # Layers that are transformers' forget the second reading by being put back.
        for index, layer in others.items():
            cache.layers[index] = copy.deepcopy(layer)
        cache.prompt = replace(first, padding=torch.cat([mask, fed_mask], 1))
        # A decoder that was given no positions numbers its tokens itself: from the length on, padding included, or by
        # the mask. It goes on so.
        placed = {} if follows is None else {"position_ids": follows + (fed_mask.cumsum(-1) - 1).clamp(min=0)}
        out = base._fastkv_base_forward(
            **{name: fed}, **placed, attention_mask=cache.prompt.padding, **{CACHE: cache}, use_cache=True
        )
        if after is not None:
            after(out)
        with torch.no_grad():
            for layer, found in beside.items():
                for name, tensor in found.items():
                    tensor.copy_(kept[layer][name])
    cache.prompt = first
    for index, layer in others.items():
        cache.layers[index] = layer


def next_position(positions: Tensor, mask: Tensor) -> Tensor:
    """The position [B, 1], int64, after a prompt's tokens; mask [B, N]: 0 for padding.

    Args: positions: [1 or B, N], or [3 or 4, B, N], the last three of which are of M-RoPE.
    """
    largest = positions if positions.ndim == 2 else positions[-3:].amax(0)
    return torch.where(mask.bool(), largest, 0).amax(-1, keepdim=True).long() + 1


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
