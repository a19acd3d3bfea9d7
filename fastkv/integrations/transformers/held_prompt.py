"""A first prompt that is compressed after all layers have read it: KVzip reads it twice, quality budgets grade it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...calibration.nll import context_nll
from ...config import Plan
from ...errors import FastKVError
from .cache import FastKVCache, FastKVLayer


def read_in_full(base: Any, cache: FastKVCache, given: dict[str, Tensor | None], kwargs: dict[str, Any]) -> Any:
    """Forward of the base model over a first prompt, then compression of all layers. Returns the model's output.

    Args:
        base: the patched base model.  cache: empty.
        given: input_ids, attention_mask, position_ids, inputs_embeds.  kwargs: further arguments of the forward.
    """
    plan = cache.plan
    layers = cache.compressed
    for layer in layers:
        layer.deferring = True
    ids, mask = given["input_ids"], given["attention_mask"]
    if ids is None:
        raise FastKVError("KVzip and Budget(quality=...) read the prompt's tokens; pass input_ids, not inputs_embeds")
    if mask is not None and mask.ndim != 2:
        raise FastKVError("KVzip and Budget(quality=...) need a 2-D padding mask, got a prepared one; pass the 2-D one")
    out = base._fastkv_stock_forward(**given, past_key_values=cache, **kwargs)
    if plan.policy.rereads:
        read_again(base, cache, layers, ids, torch.ones_like(ids) if mask is None else mask)
    keep = None if plan.budget.quality is None else share_to_keep(base, plan, out.last_hidden_state, ids, mask)
    for layer in layers:
        layer.commit(keep)
    return out


def read_again(base: Any, cache: FastKVCache, layers: list[FastKVLayer], ids: Tensor, mask: Tensor) -> None:
    """Feed the prompt [B, N] once more, in chunks, and let each layer collect what attention its tokens receive."""
    policy: Any = getattr(cache.plan.policy, "scorer", cache.plan.policy)
    batch, num = ids.shape
    length = mask.sum(-1, keepdim=True)
    # Chunks count real tokens, so that a row does not depend on how far it is padded.
    order = (mask == 0).to(torch.uint8).argsort(dim=-1, stable=True)
    packed, packed_mask = ids.gather(1, order), mask.gather(1, order)
    request = ids.new_tensor(policy.prompt, dtype=ids.dtype).expand(batch, -1)
    stock = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, FastKVLayer)}
    for layer in layers:
        assert layer.pending is not None
        keys = layer.pending[1]
        layer.received = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
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


def share_to_keep(base: Any, plan: Plan, hidden: Tensor, ids: Tensor, mask: Tensor | None) -> float:
    """The share of the prompt to keep for the budget's quality; of a batch, what its most demanding row needs."""
    assert plan.curve is not None and plan.budget.quality is not None
    config = base.config.get_text_config(decoder=True)
    if ids.shape[1] < 2:
        return 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    nll = context_nll(hidden, ids, base._fastkv_head, softcap, mask)
    shares = plan.curve.keep(plan.budget.quality, nll)
    known = shares[~shares.isnan()]  # a row that is not a number asks for nothing
    return float(known.max()) if len(known) else 1.0
