"""The front door: patch, unpatch, patched; and a prefix that was read: `compress` makes a compressed cache of a stock
one, and questions go on from copies of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn import Module

from . import config as settings
from .backend import Parallel
from .budget import Budget
from .cache import prefill
from .cache.layout import Attends
from .calibration import kv_shapes
from .calibration.fits import VectorMap
from .config import Config
from .corrections import Correction
from .errors import FastKVError
from .integrations import transformers as engine
from .integrations.transformers.cache import FastKVCache, compressible, stock_layers
from .integrations.transformers.calibrate import shares_for
from .integrations.transformers.layer import FastKVLayer
from .integrations.transformers.stock import CACHE
from .policies import Policy, get

FROM_CACHE = "keydiff"  # of the policies that look at keys and values alone, the one that answers best
FROM_KEYS = frozenset({"pre_rope", "rotary", "query_statistics"})  # signals that a cache and a file can give
# Of `generate`, whatever the model's generation config says.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
GREEDY |= {"return_dict_in_generate": False, "use_cache": True}
Model = TypeVar("Model", bound=Module)


def patch(
    model: Model,
    policy: str | Policy | None = None,
    budget: int | str | Budget = settings.BUDGET,
    *,
    prefill_block: int | str | None = None,
    evict_every: int = settings.EVICT_EVERY,
    correction: str | bool | Correction | None = "auto",
    backend: str = "auto",
    static: bool | None = None,
    slots: str = "auto",
    vector: str | Path | VectorMap | None = None,
) -> Model:
    """Give a transformers model a KV cache of fixed size, in place.

    Afterwards `model.generate(...)` and `model(...)` use a `FastKVCache`. Training, `use_cache=False` and caches that
    the caller passes in are unaffected. A model that is already patched is unpatched first.

    Args:
        model: a causal language model of a supported family, loaded with eager, sdpa or flash-attn's attention.
        policy: which tokens stay: a name from `fastkv.policies.names()` or a `Policy`. None: "fastkv", or "momentkv"
            for models whose rotary embedding cannot be undone (frequencies that depend on the length).
        budget: tokens per KV head, mean over all heads; "16x" for a cache that is sixteen times smaller than a bfloat16
            cache of the first prompt; or a `Budget`. Heads get what they need (see `Budget.heads`), which is measured
            now if the model was not calibrated yet.
        prefill_block: None reads the whole prompt with the stock attention and compresses each layer right after its
            own attention. A number reads the prompt in blocks of that many tokens, which bounds memory. "auto": blocks
            of 4,096 on a GPU, by estimate, and 512 on a CPU; None where frequencies of the rotary embedding depend on
            the length.
        evict_every: decode steps between evictions; the cache holds up to `budget + evict_every` tokens per head.
        correction: what evicted tokens add to attention. "moments": their first-order estimate; "mean": its
            zeroth-order part; "centroids": a few weighted pairs; "none": nothing. "matching": values and biases of the
            kept tokens are fitted to a second reading instead (Attention Matching). "vector": half of the pairs make
            room for twice as many tokens that keep only their key, and a linear map recovers their values (VECTOR);
            "vector+mean" and "vector+moments" do both. "centroids:64", "vector:0.25": with that share, see
            `corrections.CentroidCorrection` and `VectorCorrection`. "auto": the policy's own.
        backend: "triton": Triton kernels; "cpu": C++ and torch's fused attention; "reference": plain torch. "auto":
            "triton" on a GPU of NVIDIA or AMD, "cpu" on a CPU, else "reference".
        static: whether decode steps change tensors at fixed addresses only, so that they can be compiled and captured
            as CUDA graphs; on CUDA `model.generate` then captures them. None: on a single CUDA device.
        slots: how keys and values are stored. "model": in the model's dtype; "int8", "fp8": 8 bits a number, about
            half the bytes of bfloat16; "int4": 4 bits, about 0.29 of the bytes; "k8v4": keys as int8, values as int4.
            "auto": for a budget in bytes int8, or int4 from "12x" on; for a budget in tokens "model".
        vector: file of `fastkv calibrate vector` for this model, or the result of `VectorMap.load`. None: the model's
            own directory is searched for vector.safetensors.

    Returns: the same model.
    Raises: FastKVError if the model or an argument cannot be used; the model is then as it was.
    """
    automatic = prefill_block == "auto"
    if automatic and isinstance(model, Module) and engine.growing(model) is not None:
        automatic, prefill_block = False, None
    block: Any = prefill.ELSEWHERE if automatic else prefill_block
    rest = budget, block, evict_every, correction, backend, static, slots
    config = Config.make(settings.POLICY if policy is None else policy, *rest)
    modules = engine.check(model, config)
    otherwise = Config.make(settings.WITHOUT_ROTARY, *rest) if policy is None else None
    config = engine.with_rotations(config, model, modules, otherwise).coded(*engine.sizes(modules))
    if automatic:
        config = replace(config, prefill_block=prefill.block_tokens(next(model.parameters()).device))
    config = settings.with_fits(config, model.config, vector)
    config = settings.with_shares(config, model.config, lambda wanted: shares_for(model, wanted))
    engine.attach(model, modules, config)
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch` exactly, in place; a model that is not patched is returned as it is."""
    if not isinstance(model, Module):
        raise FastKVError(f"unpatch needs a model, got {type(model).__name__}")
    engine.detach(model)
    return model


@contextmanager
def patched(model: Model, *args: Any, **kwargs: Any) -> Iterator[Model]:
    """`patch` for the duration of a with block, with the same arguments; at its end the model is as it was before."""
    with engine.restored(model):
        yield patch(model, *args, **kwargs)


@torch.no_grad()
def compress(
    cache: Any,
    model: Module,
    policy: str | Policy = FROM_CACHE,
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
    engine.check(model, config)
    if config.deferred or not config.policy.needs <= FROM_KEYS:
        what = config.deferred or f"policy {config.policy.name!r}"
        raise FastKVError(
            f"a cache holds keys and values, and {what} looks at queries or attention too; use policy 'keydiff', "
            "'leverage', 'lagkv', 'knorm', 'manifold' or 'streaming', or read the prefix with a patched model"
        )
    layers = _pairs(cache, model)
    ahead = getattr(engine.modules.base(model), "rope_deltas", None)
    if ahead is not None and bool(ahead.any()):
        raise FastKVError(
            "the last prompt of this model had images or videos, which take fewer positions than tokens, and a cache "
            "does not say whether it has some; read the prefix with a patched model, or set rope_deltas of the base "
            "model to None if it has none"
        )
    valid = _valid(attention_mask, layers[0][0])
    before, made = vars(model).get("_fastkv_config"), None
    try:
        patch(model, policy, budget, **options)
        if vars(model)["_fastkv_config"].places and not bool(valid.all()):
            raise FastKVError(
                f"policy {config.policy.name!r} or its correction undoes the rotary embedding by each token's place "
                "among real tokens, but a cache does not say whether padding was counted, got some; compress without "
                "padding, or read the prefix with a patched model"
            )
        made = _filled(FastKVCache(model), model, layers, valid)
    finally:
        if made is None:  # a budget that is too small for this text, no memory: the model is as it was
            engine.restore(model, before)
    return made


def _filled(made: FastKVCache, model: Module, layers: list[tuple[Tensor, Tensor]], valid: Tensor) -> FastKVCache:
    """An empty cache with keys and values [B, Hkv, N, D] of each layer, of the tokens that are `valid` [B, N]."""
    batch, num = valid.shape
    attentions = engine.modules.attentions(model)
    for layer, (k, v) in zip(made.compressed, layers):
        module = attentions[layer.cache.layer]
        groups = engine.modules.Sizes.of(module).groups
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
    if not isinstance(mask, Tensor) or mask.shape != shape:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise FastKVError(
            f"attention_mask must have shape {list(shape)}, one number for each token of the cache, got {got}; pass "
            "the mask that the prefix was read with"
        )
    return mask.to(keys.device, torch.bool)


def _pairs(cache: Any, model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer. Raises: FastKVError if they are not there for every token of every layer."""
    name, stock = type(cache).__name__, stock_layers(model)
    held: Any = getattr(cache, "layers", None)
    kinds = list(compressible(model, stock).values())
    latents = any(map(engine.modules.is_latent, engine.modules.attentions(model).values()))
    if kinds != [FastKVLayer] * len(stock) or engine.modules.sources(model) or latents:
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
    found, attentions = [], engine.modules.attentions(model)
    shapes, processes = kv_shapes(model.config.get_text_config(decoder=True)), Parallel.of(model).size
    for index, layer in enumerate(held):
        k, v = (getattr(layer, part, None) for part in ("keys", "values"))  # of some caches there are none
        if not num or not all(isinstance(part, Tensor) and part.ndim == 4 and part.shape[2] >= num for part in (k, v)):
            raise FastKVError(
                f"layer {index} of the {name} does not hold keys and values of all {num} tokens; fill the cache, and "
                "use one that evicts, quantises and offloads nothing"
            )
        size = engine.modules.Sizes.of(attentions[index])
        wanted = shapes[index][0] // processes, size.key_dim, size.value_dim
        got = layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]
        if got != wanted:
            raise FastKVError(
                f"layer {index} of the {name} has KV heads and numbers of their keys and values of {got}, this model "
                f"of {wanted}; use the model that filled it"
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
    pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    rows = torch.tensor([[pad] * (most - len(one)) + [*one] for one in questions])
    mask = torch.tensor([[0] * (most - len(one)) + [1] * len(one) for one in questions])
    prompts = torch.cat([seen.expand(num, -1).to(model.device), rows.to(model.device)], 1)
    mask = torch.cat([torch.ones_like(prompts[:, : seen.shape[1]]), mask.to(model.device)], 1)
    how = {CACHE: forked(cache, num), "max_new_tokens": tokens, "pad_token_id": pad} | GREEDY
    written = model.generate(prompts, attention_mask=mask, streamer=streamer, **how)
    ends = ends_of(model)
    return [list(takewhile(lambda one: one not in ends, row)) for row in written[:, prompts.shape[1] :].tolist()]


def forked(cache: Any, num: int) -> Any:
    """A copy of a compressed or a stock cache, with every sequence so many times."""
    if isinstance(cache, FastKVCache):
        return cache.fork(num)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(num)
    return twin


def as_chat(tokenizer: Any, messages: Sequence[tuple[str, str]], opening: bool = True) -> str:
    """Messages, each of a role and a text, as the tokenizer's chat template has them, with the opening of an answer.

    Raises: FastKVError if the template refuses them.
    """
    turns = [{"role": role, "content": text} for role, text in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opening))
    except (TemplateError, TypeError) as error:  # also of what a template does with texts that it expects as lists
        raise FastKVError(
            f"the chat template of the tokenizer must take messages of a user as text, got an error ({error}); set "
            "tokenizer.chat_template = None, or choose another model"
        ) from error


def ends_of(model: Any) -> set[int]:
    """The tokens after which nothing is written."""
    known = model.generation_config.eos_token_id
    return set() if known is None else {known} if isinstance(known, int) else set(known)
