"""What a model shows of itself over a few tokens: how its layers turn keys, and whether patching changes it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache

from ... import corrections, policies
from ...budget import Budget
from ...config import Config
from ...errors import FastKVError
from ...reference import PLAIN
from ...rotary import Rotary
from . import modules
from .stock import CACHE

FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not change with the length
GROWING = ("dynamic", "longrope")  # those that do
POSITION = 7  # far enough that every pair of dimensions that matters is turned, and no multiple of any other
ROWS = 4  # tokens that are looked at: one alone may be padding, whose embedding is zero
SMALL = 2**20  # numbers of a buffer that a forward may change; larger ones are weights (GPTQ, AWQ)
# A key is turned in its own dtype, with cos and sin of that dtype: three roundings of half an eps on each of two
# products, 3 eps of the pair's length in all. In fp32 turning it back adds as much.
ROUNDING = 8
# Tokens of a prompt, of the padding on the left of its second row, of a block of it, and tokens decoded after it.
PROMPT, PADDING, BLOCK, DECODED = 17, 6, 5, 2
ROOM = 4 * PROMPT  # tokens per head of a budget that holds everything
# What a forward may raise where the model is not what it seems; everything else is an error of this library.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def unchanged(model: Module) -> Iterator[None]:
    """In eval mode and without gradients, leave a model and the random numbers bit for bit as they are.

    Attributes, buffers and hooks of every module are put back, whatever happens inside.
    """
    attributes: list[tuple[Module, dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():  # and copies of its dictionaries and sets: parameters, buffers, hooks
        values = dict(vars(module))
        containers = {name: copy.copy(value) for name, value in values.items() if isinstance(value, (dict, set))}
        attributes.append((module, values, containers))
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.numel() <= SMALL]
    devices = {parameter.device for parameter in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {"cuda"} | {device.type for device in devices} - {"cpu", "meta", "mps"}:
            own = [device for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(own, device_type=kind))
        try:
            model.eval()
            yield
        finally:
            for module, values, copies in attributes:
                vars(module).clear()
                vars(module).update(values)
                for name, held in copies.items():
                    values[name].clear()
                    values[name].update(held)
            for buffer, held in contents:
                if not torch.equal(buffer, held):
                    buffer.copy_(held)


def embeddings(decoder: Module) -> list[tuple[str, Rotary]]:
    """All rotary embeddings of a stack of layers, each with the name of the rule that its frequencies follow; modules
    may hold several, one for each type of layer.
    """
    found = []
    for module in decoder.modules():
        for name, frequencies in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            prefix = name.removesuffix("inv_freq")
            kind: Any = getattr(module, "rope_type", "default")
            kind = kind.get(prefix.removesuffix("_"), "default") if isinstance(kind, dict) else kind
            scaling: Any = getattr(module, f"{prefix}attention_scaling", 1.0)
            found.append((kind, Rotary(frequencies.to(torch.float32, copy=True), float(scaling))))
    return found


def growing(model: Module) -> str | None:
    """The kind of a model's rotary embedding whose frequencies change with the length, None without any."""
    return next((kind for kind, _ in embeddings(model) if kind in GROWING), None)


def rotations(model: Module, layers: Iterable[int], halves: bool = False) -> dict[int, Rotary]:
    """How each of the layers turns its keys, found out by running the decoder on single tokens.

    The same tokens are read at position 0 and at position 7, and attention is given the same hidden states both times:
    what it caches differs by the rotation alone.

    Args:
        model: patched or not.  layers: indices of layers whose keys a stock cache keeps.
        halves: whether all have to be turned in halves over the whole head, as VECTOR's kernels read tables.
    Returns: layers that turn alike share one object.
    Raises: FastKVError if a layer turns its keys in a way that no embedding of the decoder explains, with frequencies
        that change with the length, or not in halves. The model is as it was in any case.
    """
    decoder = modules.decoder(model)
    with unchanged(model):
        _fix_inputs(decoder)
        first, later = _cached_at(decoder, 0), _cached_at(decoder, POSITION)
        known = embeddings(decoder)
    ways: dict[int, list[tuple[str, Rotary]]] = {}
    found = {}
    for layer in layers:
        before, after = _keys(first[layer], later[layer])
        dim, what = before.shape[-1], f"layer {layer} of {type(model).__name__}"
        if dim not in ways:  # it may turn all of a head, its first or its last dimensions, in either pairing, or none
            ways[dim] = [("default", Rotary(torch.zeros(dim // 2, device="cpu")))]
            for kind, rotary in known:
                starts = [0] if rotary.size == dim else [0, -rotary.size] if rotary.size < dim else []
                turns = [replace(rotary, interleaved=pairs, start=start) for start in starts for pairs in (False, True)]
                ways[dim] += [(kind, turn) for turn in turns]
        kind, rotary = _explained(what, before, after, ways[dim])
        if kind not in FIXED:
            raise FastKVError(
                f"the rotary embedding of {what} is of type {kind!r}, whose frequencies change with the length; "
                f"methods that undo the rotation work with {', '.join(FIXED)}"
            )
        if halves and not rotary.halves(dim):
            raise FastKVError(
                f"correction='vector' needs keys whose {dim} dimensions are turned in halves, got {rotary.size} turned "
                f"{'as neighbours' if rotary.interleaved else 'in halves'} in {what}; use another correction"
            )
        found[layer] = rotary
    return found


def with_rotations(config: Config, model: Module, found: Iterable[Any], otherwise: Config | None = None) -> Config:
    """The config with how the attention modules turn their keys, if it needs them as they were before.

    Args: otherwise: the config to take where that cannot be undone, if there is one.
    Raises: FastKVError as `rotations`. The model is as it was in any case.
    """
    if not config.undoes_rotation:
        return config
    readers = modules.sources(model)  # of the keys of other layers
    layers = [module.layer_idx for module in found if module.layer_idx not in readers]
    try:
        return replace(config, rotations=rotations(model, layers, halves=config.correction.key_only))
    except FastKVError:
        if otherwise is None:
            raise
        return with_rotations(otherwise, model, found)


def _fix_inputs(decoder: Module) -> None:
    """Give every attention module the hidden states of its first call in all later ones, too.

    They are nearly the same: attention over a single token is its value, wherever that stands. But sinks and learned
    positions (GPT-2) make a difference that is not the rotation's.
    """
    seen: dict[Module, Tensor] = {}

    def same_input(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": seen.setdefault(module, kwargs["hidden_states"])}
        return (seen.setdefault(module, args[0]), *args[1:]), kwargs

    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.register_forward_pre_hook(same_input, with_kwargs=True)


def _drawn(most: int, shape: tuple[int, int]) -> Tensor:
    """Random numbers below `most`, on the CPU whatever the default device: every device gets the same."""
    return torch.randint(most, shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _cached_at(decoder: Any, position: int) -> list[tuple[Any, Any]]:
    """Keys and values [ROWS, Hkv, 1, D] that each layer caches of tokens without a past; None for linear layers."""
    weight = decoder.get_input_embeddings().weight
    ids = _drawn(len(weight), (ROWS, 1)).to(weight.device)
    cache: Any = _empty_cache(decoder)
    decoder(input_ids=ids, position_ids=torch.full_like(ids, position), **{CACHE: cache}, use_cache=True)
    return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]


def _empty_cache(decoder: Any) -> DynamicCache:
    """A stock cache with the kinds of layers that the decoder has."""
    return DynamicCache(config=decoder.config.get_text_config(decoder=True))


def _keys(first: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The keys of what is cached at two positions. Values that are turned belong to them (latent attention)."""
    if torch.equal(first[1], later[1]):
        return first[0], later[0]
    return torch.cat(first, -1), torch.cat(later, -1)


def _explained(what: str, first: Tensor, later: Tensor, ways: list[tuple[str, Rotary]]) -> tuple[str, Rotary]:
    """The way that turns keys at position 0 into those at position 7, and its kind; of several the nearest."""
    errors = [_error(way, first, later) for _, way in ways]
    least, limit = min(errors), ROUNDING * _eps(first.dtype)
    if least > limit:
        raise FastKVError(
            f"no rotary embedding explains how the keys of {what} depend on their position: the nearest is off by "
            f"{least:.1e} of their length, expected at most {limit:.1e}; use a policy and correction without it"
        )
    return ways[errors.index(least)]


def _eps(dtype: torch.dtype) -> float:
    """Of a dtype, but no finer than that of fp32, in which angles and differences are computed."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _error(way: Rotary, first: Tensor, later: Tensor) -> float:
    """By how much keys differ after they are turned back, of the lengths of their pairs; the largest."""
    way = way.to(first.device)
    positions = torch.zeros(first.shape[:3], device=first.device)
    start, end = way.unrotate(first.float(), positions), way.unrotate(later.float(), positions + POSITION)
    length = way.radius(start).clamp(min=torch.finfo(first.dtype).tiny)
    return float(((end - start).abs() / length).nan_to_num(nan=torch.inf).max())


def check_agreement(model: Module, patch: Callable[[Config], None], config: Config) -> None:
    """Raise FastKVError unless the patched model, with room for every token, gives the logits of the stock model.

    Read are two rows of random tokens, one padded on the left, whole and in blocks, and two more tokens after them.
    Where transformers itself cannot go on from the state of a model but for single tokens (linear attention of some
    types, of more in earlier versions), blocks are compared only if the config asks for them, and then refused.

    Differences are relative, |logits - stock| / |stock - mean of stock|, and may be the root of the dtype's eps, half
    of its digits: attention is summed in another order, but nothing that a model means is so small. They are means over
    the prompt and over the decoded tokens of a row, because rounding may send one token to another expert.

    Args:
        model: which is as it was in any case.  patch: puts a config on it, whether it is patched or not.
        config: that it is to be patched with; backend, static and prefill_block count.
    """
    kind = type(model).__name__
    roomy = replace(
        config,
        policy=policies.get("streaming"),
        correction=corrections.NONE,
        budget=Budget(tokens=ROOM),
        vector=None,
        slots=PLAIN,  # rounded numbers would not agree
    )

    def read(how: str, size: int, cache: Any) -> Tensor:
        try:
            return _logits(model, ids, mask, cache, size)
        except FAILURES as error:
            raise FastKVError(
                f"{kind} fails on a short prompt {how} ({_said(error)}); use the model without fastkv"
            ) from error

    with unchanged(model):
        ids, mask = _prompt(model)
        stock = read("by itself", PROMPT, _empty_cache(modules.decoder(model)))
        limit = _eps(stock.dtype) ** 0.5
        problem = _why_not_in_parts(model, ids, mask, stock, limit)
        if problem and config.prefill_block is not None:
            raise FastKVError(
                f"{kind} of transformers {transformers.__version__} goes on from what it has read for single tokens "
                f"only: by itself, in parts, {problem}; use prefill_block=None or a newer transformers"
            )
        for how, block in (("whole", None), ("in blocks", BLOCK))[: 1 if problem else 2]:
            patch(replace(roomy, prefill_block=block))
            worst = _difference(read(f"read {how} when it is patched", PROMPT, None), stock, mask)
            if not worst <= limit:
                raise FastKVError(
                    f"with room for every token of a short prompt read {how}, the logits of {kind} change by "
                    f"{worst:.1e} of their norm when it is patched, expected at most {limit:.1e}; use the model "
                    "without fastkv"
                )


def _why_not_in_parts(model: Any, ids: Tensor, mask: Tensor, stock: Tensor, limit: float) -> str:
    """What is wrong when the stock model reads a prompt in parts, in a few words; empty if it does as it does whole."""
    try:
        worst = _difference(_logits(model, ids, mask, _empty_cache(modules.decoder(model)), BLOCK), stock, mask)
    except FAILURES as error:
        return _said(error)
    return "" if worst <= limit else f"its logits change by {worst:.1e} of their norm"


def _said(error: Exception) -> str:
    """What an error says on its first line, without what to do about it."""
    return f"{type(error).__name__}: " + str(error).partition("\n")[0].partition(";")[0]


def _prompt(model: Module) -> tuple[Tensor, Tensor]:
    """Random token ids and their mask, [2, PROMPT + DECODED]; none that the config gives a meaning, as of images."""
    weight: Any = modules.decoder(model).get_input_embeddings().weight  # type: ignore[operator]
    known: Any = model.config
    special = {
        number
        for config in (known, known.get_text_config(decoder=True))
        for name, number in vars(config).items()
        if name.endswith(("token_id", "token_index")) and isinstance(number, int)
    }
    plain = torch.tensor([number for number in range(len(weight)) if number not in special], device="cpu")
    ids = plain[_drawn(len(plain), (2, PROMPT + DECODED))].to(weight.device)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def _logits(model: Any, ids: Tensor, mask: Tensor, cache: Any, size: int) -> Tensor:
    """Logits [2, PROMPT + DECODED, vocabulary] of a prompt, fed in parts of `size`, and of tokens after it, one by one.

    Hidden states of a model without a head. Without a cache the model makes one. Positions are those that `generate`
    passes, where the model takes any.
    """
    rows = []
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    edges = [*range(0, PROMPT, size), *range(PROMPT, PROMPT + DECODED + 1)]
    for start, stop in pairwise(edges):
        given = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], CACHE: cache}
        if takes_positions:
            given["position_ids"] = positions[:, start:stop]
        out = model(**given, use_cache=True, return_dict=True)
        rows.append(out.logits if "logits" in out else out.last_hidden_state)
        cache = out[CACHE]
    return torch.cat(rows, 1)


def _difference(logits: Tensor, stock: Tensor, mask: Tensor) -> float:
    """By how much the logits [B, T, V] of prompts and decoded tokens are off; the largest, see `check_agreement`."""
    logits, stock, real = logits.float(), stock.float(), mask.to(stock.device).bool()
    spread = torch.linalg.vector_norm(stock - stock.mean(-1, keepdim=True), dim=-1)
    off = torch.linalg.vector_norm(logits - stock, dim=-1) / spread
    parts = [
        off[row, part][real[row, part]] for row in range(len(off)) for part in (slice(PROMPT), slice(PROMPT, None))
    ]
    return float(torch.stack([part.mean() for part in parts]).max())
