"""What is done with a prefix that was read: a stock cache of it is compressed, questions go on from copies of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from . import config as settings
from .api import patch
from .budget import Budget
from .cache.layout import Attends
from .config import Config
from .errors import FastKVError
from .integrations.transformers import check, latent, modules
from .integrations.transformers.cache import FastKVCache, compressible, stock_layers
from .integrations.transformers.layer import FastKVLayer
from .integrations.transformers.stock import CACHE
from .policies import Policy, get

POLICY = "keydiff"  # of those that look at keys and values alone, the one that answers best
FROM_KEYS = frozenset({"pre_rope", "rotary", "query_statistics"})  # signals that a cache and a file can give


@torch.no_grad()
def compress(
    cache: Any,
    model: Module,
    policy: str | Policy = POLICY,
    budget: int | str | Budget = settings.BUDGET,
    *,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> FastKVCache:
    """Make a compressed cache from a stock cache, which is not changed, and patch the model for it.

    Example:
        cache = model(prefix, use_cache=True).past_key_values
        small = fastkv.compress(cache, model, budget="4x")
        model.generate(prompt, past_key_values=small)     # the prompt begins with the prefix

    Args:
        cache: a cache of transformers such as `DynamicCache`, with keys and values [B, Hkv, N, D] of N tokens in every
            layer.
        model: the model that filled it, patched or not.
        policy: one that needs keys and values only, because the queries are gone.
        budget: as in `fastkv.patch`.
        attention_mask: [B, N], 0 for padding; None for none.
        options: other arguments of `fastkv.patch`.
    Returns: the compressed cache of N tokens.
    Raises: FastKVError if the policy needs more, if the cache does not hold every token of every layer, or as `patch`.
    """
    config = Config(get(policy), Budget.of(budget))
    check(model, config)
    if config.deferred or not config.policy.needs <= FROM_KEYS:
        what = config.deferred or f"policy {config.policy.name!r}"
        raise FastKVError(
            f"a cache holds keys and values, and {what} looks at queries or attention too; use policy 'keydiff', "
            "'leverage', 'lagkv', 'knorm', 'manifold' or 'streaming', or read the prefix with a patched model"
        )
    layers = _pairs(cache, model)
    valid = _valid(attention_mask, layers[0][0])
    patch(model, policy, budget, **options)
    made = FastKVCache(model)
    batch, num = valid.shape
    attentions = modules.attentions(model)
    for layer, (k, v) in zip(made.compressed, layers):
        module = attentions[layer.cache.layer]
        groups = modules.Sizes.of(module).groups
        nobody = k.new_zeros(()).expand(batch, k.shape[1] * groups, num, k.shape[3])  # whose queries nobody reads
        own = valid.to(k.device)
        k, v = (torch.where(own[:, None, :, None], part, 0) for part in (k, v))
        layer.hold_tokens((nobody, k, v, own), Attends(float(getattr(module, "scaling", None) or k.shape[3] ** -0.5)))
        layer.commit(None)
    return made


def _valid(mask: Tensor | None, keys: Tensor) -> Tensor:
    """[B, N] bool, false for padding, of keys [B, Hkv, N, D]. Raises: FastKVError for a mask of another shape."""
    shape = keys.shape[0], keys.shape[2]
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=keys.device)
    if mask.shape != shape:
        raise FastKVError(
            f"attention_mask must have shape {list(shape)}, one number for each token of the cache, got "
            f"{list(mask.shape)}; pass the mask that the prefix was read with"
        )
    return mask.to(keys.device, torch.bool)


def _pairs(cache: Any, model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer. Raises: FastKVError if they are not there for every token of every layer."""
    name, stock = type(cache).__name__, stock_layers(model)
    held: Any = getattr(cache, "layers", None)
    kinds = list(compressible(model, stock).values())
    latents = any(map(latent.is_latent, modules.attentions(model).values()))
    if kinds != [FastKVLayer] * len(stock) or modules.sources(model) or latents:
        raise FastKVError(
            f"{type(model).__name__} has layers that are not compressed, share keys or cache latents, expected plain "
            "attention in every layer; read the prefix with a patched model"
        )
    if isinstance(cache, FastKVCache) or held is None or len(held) != len(stock):
        raise FastKVError(
            f"compress needs a cache of transformers with {len(stock)} layers, as DynamicCache, got {name}; pass what "
            "model(ids, use_cache=True).past_key_values is without fastkv"
        )
    num = int(cache.get_seq_length())
    found = []
    for index, layer in enumerate(held):
        k, v = (getattr(layer, part, None) for part in ("keys", "values"))  # of some caches there are none
        if not num or not all(isinstance(part, Tensor) and part.ndim == 4 and part.shape[2] >= num for part in (k, v)):
            raise FastKVError(
                f"layer {index} of the {name} does not hold keys and values of all {num} tokens; fill the cache, and "
                "use one that evicts, quantises and offloads nothing"
            )
        found.append((layer.keys[:, :, :num], layer.values[:, :, :num]))
    return found


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    cache: Any,
    seen: Tensor,
    questions: Sequence[Sequence[int]],
    tokens: int,
    streamer: Any = None,
) -> list[list[int]]:
    """What greedy decoding writes after each question, at most `tokens` tokens, without the one that ends it.

    Args: cache: of the tokens `seen` [1, N], which stays as it is.  questions: tokens that come after them.
        streamer: of `generate`; gets a token of every question at each step.
    """
    num, most = len(questions), max(map(len, questions))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = torch.tensor([[pad] * (most - len(one)) + [*one] for one in questions])
    mask = torch.tensor([[0] * (most - len(one)) + [1] * len(one) for one in questions])
    prompts = torch.cat([seen.expand(num, -1).to(model.device), rows.to(model.device)], 1)
    mask = torch.cat([torch.ones_like(prompts[:, : seen.shape[1]]), mask.to(model.device)], 1)
    how = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": pad}
    written = model.generate(prompts, attention_mask=mask, **{CACHE: forked(cache, num)}, streamer=streamer, **how)
    ends = ends_of(model)
    return [list(takewhile(lambda one: one not in ends, row)) for row in written[:, prompts.shape[1] :].tolist()]


def forked(cache: Any, num: int) -> Any:
    """A copy of a compressed or a stock cache, with every sequence so many times."""
    if isinstance(cache, FastKVCache):
        return cache.fork(num)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(num)
    return twin


def ends_of(model: Any) -> set[int]:
    """The tokens after which nothing is written."""
    known = model.generation_config.eos_token_id
    return set() if known is None else {known} if isinstance(known, int) else set(known)
