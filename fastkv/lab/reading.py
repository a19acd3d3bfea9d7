"""A text that is read once: every question goes on from a copy of the cache, and it is compressed as often as asked.

A layer is compressed after its own attention, so that a prompt read whole leaves the same queries, keys and values to
every policy, budget, correction, slot format and choice of heads. `Reading` keeps them:

    reading = Reading.of(model, ids)
    cache = reading.compressed("keydiff", Budget(keep=0.25))   # a FastKVCache; `model` is patched for it

The cache is, bit for bit, the one that `model(ids)` makes with these settings. It works as long as the model stays
patched; the next `compressed` patches it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from .. import corrections
from ..api import answers, patch, patched
from ..budget import Budget
from ..cache.layer import HeldTokens
from ..cache.layout import Attends, Layout
from ..calibration import kv_shapes
from ..config import EVICT_EVERY, Config
from ..errors import FastKVError
from ..integrations.transformers import modules, stock
from ..integrations.transformers.cache import FastKVCache
from ..integrations.transformers.prompt import Prompt, read_again
from ..integrations.transformers.stock import CACHE
from ..policies import Policy, Reread, get


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Any:
    """The cache that the model, patched or not, has after tokens [B, N]."""
    return model(ids.to(model.device), logits_to_keep=1, use_cache=True)[CACHE]


def answered(model: Any, tokenizer: Any, prompt: str, question: str, tokens: int) -> list[int]:
    """What greedy decoding writes after a prompt that is read, and compressed, before its end, the question, is known.
    At most `tokens` tokens. Only what comes before the question gets the tokenizer's special tokens.
    """
    before = torch.tensor([tokenizer(prompt.removesuffix(question), verbose=False).input_ids])
    asked = tokenizer(question, add_special_tokens=False, verbose=False).input_ids
    return answers(model, tokenizer, read(model, before), before, [asked], tokens)[0]


@torch.no_grad()
def forced(model: Any, cache: Any, texts: list[list[int]], dtype: torch.dtype | None = torch.float32) -> list[Tensor]:
    """Log-probabilities [T, V] of what follows each token of a text, in `dtype`, one text a row of the cache.

    Args: cache: of what comes before, is used up; None for nothing.
    """
    rows = [torch.tensor(one, device=model.device) for one in texts]
    padded = pad_sequence(rows, batch_first=True)  # on the right, where nothing attends to it
    logits = model(padded, **{CACHE: cache}, use_cache=True).logits
    return [torch.log_softmax(row[: len(one)], -1, dtype=dtype) for row, one in zip(logits, texts)]


# One reading, many caches.

ROOM = 1 << 20  # tokens: nothing is evicted while a text is only read


def copies(tokens: HeldTokens) -> HeldTokens:
    """What a layer may compress: slots of unequal heads are filled where their tokens lie."""
    q, k, v, valid = tokens
    return q, k.clone(), v.clone(), valid


class Reading:
    """A prompt that a model has read once.

    Attributes: model.  ids: [1, N] int64.  logits: [V] fp32 after the last token.  layers: what each holds of the
        text, q [1, Hq, N, D], k, v [1, Hkv, N, D] and valid [1, N], and how it attends.
    """

    def __init__(self, model: Module, ids: Tensor, logits: Tensor, layers: list[tuple[HeldTokens, Attends]]) -> None:
        self.model, self.ids, self.logits, self.layers = model, ids, logits, layers
        self.again: dict[tuple[Any, ...], list[Reread]] = {}

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, ids: Tensor) -> Reading:
        """Read `ids` [1, N] whole; takes what one forward takes and holds all queries, keys and values. Raises
        FastKVError for more than one sequence, or for a model with layers that no policy compresses.
        """
        if ids.ndim != 2 or ids.shape[0] != 1:
            raise FastKVError(f"a reading is of one sequence, got tokens of shape {list(ids.shape)}; read each alone")
        with patched(model, "streaming", ROOM):
            cache = FastKVCache(model, static=False)
            if len(cache.compressed) < len(cache.layers) or cache.is_compileable or modules.sources(model):
                raise FastKVError(
                    f"{type(model).__name__} has layers that are not compressed or share keys, expected full attention "
                    "in every layer; run the model for each policy"
                )
            held = [layer.hold() for layer in cache.compressed]
            logits = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[0, -1].float()
        return cls(model, ids, logits, [(prompt.held, prompt.attends) for prompt in held if prompt.held is not None])

    def full(self) -> DynamicCache:
        """The cache of this text that the stock model makes, a copy. Raises FastKVError for a model that caches
        latents, which are not what its layers hold.
        """
        if any(map(modules.is_latent, modules.attentions(self.model).values())):
            raise FastKVError(f"{type(self.model).__name__} caches latents; run the stock model for its cache")
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))  # type: ignore[operator, union-attr]
        for index, (tokens, _) in enumerate(self.layers):
            cache.update(*tokens[1:3], index)
        return cache

    @torch.no_grad()
    def compressed(self, policy: str | Policy, budget: int | Budget, **settings: Any) -> FastKVCache:
        """The cache of this text under a policy and a budget; the model is then patched with them.

        Args: settings: more arguments of `fastkv.patch`.  A policy that reads twice does so once for all budgets.
        Raises: FastKVError as `patch` does, and for prompts in blocks and quality budgets, which are read for each.
        """
        chosen = get(policy)
        if settings.get("prefill_block") is not None or Budget.of(budget).quality is not None:
            raise FastKVError("blocks and Budget(quality=...) decide while a text is read; run the model for each")
        patch(self.model, chosen, budget, **settings)
        cache = FastKVCache(self.model)
        again = self._second(cache) if cache.config.policy.second_reading else [None] * len(self.layers)
        attentions = modules.attentions(self.model)
        for layer, (tokens, how), second in zip(cache.compressed, self.layers, again):
            if cache.config.needs("output"):
                output = modules.output_projection(attentions[layer.cache.layer], tokens[2].shape[-1])
                how = how._replace(output=output)
            layer.hold_tokens(copies(tokens), how, second)
            layer.commit(None)
        return cache

    def _second(self, cache: FastKVCache) -> list[Reread]:
        """A second reading with the chunks and the request of the policy; made once for each."""
        config: Config = cache.config
        key = (config.policy.second_reading, config.samples_queries)
        if key not in self.again:
            base = self.model.get_decoder()  # type: ignore[operator]
            held = [layer.hold_tokens(copies(one), how) for layer, (one, how) in zip(cache.compressed, self.layers)]
            with cache.reading(Prompt(None, None)):
                read_again(base, cache, held, self.ids, torch.ones_like(self.ids))
            found = [prompt.reread for prompt in held]
            self.again[key] = [one for one in found if one is not None]
            for layer in cache.compressed:
                layer.reset()
        return [replace(one) for one in self.again[key]]


# What a cache holds, and what attention gives. A comparison gives all caches the bytes that a cache of keys and values
# alone would spend: a policy that stores moments, scores or anything else beside them pays for it with tokens.


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors of a compressed or stock cache, all sequences together."""
    if isinstance(cache, FastKVCache):
        return cache.nbytes()
    assert isinstance(cache, DynamicCache)
    return sum(stock.nbytes(layer) for layer in cache.layers)


def kept_tokens(cache: FastKVCache) -> float:
    """Tokens per KV head that the cache keeps after an eviction, mean over layers."""
    tokens = [layer.cache.rule.layout.total for layer in cache.compressed if layer.cache.rule is not None]
    return sum(tokens) / len(tokens)


def full_layers(config: Any) -> list[int]:
    """Indices of a model's full-attention layers, which are compressed. Raises FastKVError if there are none."""
    text = config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=text).layers
    found = [index for index, layer in enumerate(layers) if stock.is_compressed(layer)]
    if not found:
        raise FastKVError(
            f"expected a model with full-attention layers, got {text.model_type} with none in {len(layers)}; its cache "
            "is bounded already"
        )
    return found


def equal_bytes(
    config: Any, tokens: int | Budget, dtype: torch.dtype, *, evict_every: int = EVICT_EVERY, **shares: Any
) -> Budget:
    """The bytes of a cache without moments or scores that keeps `tokens` tokens per KV head, as a `Budget`.

    Args:
        config: of a transformers model; its full-attention layers are counted.
        tokens: per KV head, or a `Budget` of tokens, whose shares the result has too; slots for `evict_every` more are
            part of the bytes.
        dtype: of keys and values.
        shares: sinks, recent, layers and heads, as in `Budget`, where `tokens` is a number.
    """
    # Tokens that cannot hold sinks and recent are refused here, in tokens.
    budget = tokens if isinstance(tokens, Budget) else Budget(tokens=tokens, **shares)
    if budget.tokens is None:
        raise FastKVError(f"equal_bytes turns tokens into bytes, got {budget}; give Budget(tokens=...)")
    text = config.get_text_config(decoder=True)
    shapes = kv_shapes(text)
    full = [shapes[index] for index in full_layers(config)]
    total, rank = 0, getattr(text, "kv_lora_rank", None)
    if rank is not None:  # of a latent, one for all heads, which is the first part of the key and the value
        full = [(1, rank + text.qk_rope_head_dim)] * len(full)
    for heads, head_dim in full:
        key = torch.empty(1, heads, 1, head_dim, dtype=dtype, device="meta")
        each = (budget.tokens,) * heads
        layout = Layout(each, corrections.NONE, spare=evict_every, latent=rank is not None)
        total += layout.allocate(key, key[..., :rank]).nbytes()
    return replace(budget, tokens=None, bytes=total)


def stored_bytes(cache: FastKVCache) -> int:
    """Bytes per sequence that the compressed layers hold: slots, positions, scores and moments.

    `nbytes()` without what no budget can change: layers that stay transformers' and the kernels' working memory.
    Raises: FastKVError for a cache that is not filled.
    """
    states = [layer.state for layer in cache.compressed if layer.state is not None]
    if not states or len(states) < len(cache.compressed):
        raise FastKVError(
            f"only a filled cache has bytes to compare, got {len(states)} of {len(cache.compressed)} layers; run the "
            "model first"
        )
    return (cache.nbytes() - cache.workspace.nbytes() - cache.stock_nbytes()) // states[0].seen.shape[0]


@contextmanager
def record_attention(model: PreTrainedModel) -> Iterator[dict[int, list[Tensor]]]:
    """Collect what every attention module hands to its output projection, [N, T, Hq * Dv] for each forward.

    Yields: by index of the layer; of layers that attend, those with a sliding window included.
    Raises: FastKVError for an attention module whose output projection is not found.
    """
    found = modules.attentions(model)
    recorded: dict[int, list[Tensor]] = {layer: [] for layer in found}

    def keep(steps: list[Tensor], module: Module, args: tuple[Tensor, ...]) -> None:
        steps.append(args[0].detach().clone())

    with ExitStack() as hooks:
        for layer, module in found.items():
            projection = modules.output(module)
            if projection is None:
                raise FastKVError(
                    "attention is recorded where it enters the output projection, expected one named "
                    f"{', '.join(modules.OUTPUTS)}, got none in {type(module).__name__}; try another model"
                )
            hooks.enter_context(projection.register_forward_pre_hook(partial(keep, recorded[layer])))
        yield recorded
