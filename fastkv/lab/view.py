"""`fastkv view`: a text is read with every policy at every budget, and what became of it is written as a page.

What became of every token is read off a cache while a model runs.

The page is one HTML file with everything in it. Numbers travel compressed, in base64.

They lie where the compression finds what they have in common: those of one token side by side, because most heads evict
a token at about the same time, and first bytes apart from second ones, most of which are 0. Errors would take most of
the page, so they have few levels.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from .. import policies
from ..api import patched
from ..budget import Budget
from ..cache.layer import LayerCache
from ..calibration.files import replace_file
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..integrations.transformers import modules
from ..integrations.transformers.cache import FastKVCache
from ..integrations.transformers.layer import FastKVLayer
from ..integrations.transformers.stock import CACHE
from ..ops.operator import ATTRIBUTES
from ..reference import Centroids, LayerState
from ..reference.centroids import BLOCK
from . import common, facts
from .equal_bytes import equal_bytes, stored_bytes
from .fidelity import stored_tokens
from .reading import cache_bytes, kept_tokens, record_attention

SINKS, RECENT = 4, 16  # tokens that are never evicted, as in `fastkv demo`
FACTS = "facts"  # the text that is read where none is given
LONGEST = 4096  # tokens of a text that are read unless more are asked for
FED = 32  # last tokens of a text that are fed one at a time
REMEMBERS = {  # what of an evicted token there still is, by correction
    "none": "nothing of it is remembered",
    "moments": "it is part of the mean and the covariance of all evicted tokens",
    "centroids": "it is part of a centroid",
    "matching": "biases and values of what stayed were fitted to its attention",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv view`."""
    add, option = parser.add_argument, partial(common.option, parser)
    common.add_model(parser, "fastkv-view.html", "page to write", "FILE")
    option("--text", FACTS, f"{common.TEXTS}, or {FACTS}, {common.TEXT} with facts, a question and its answer", "FILE")
    option("--seed", 0, "seed of the facts")
    add("--answer", type=int, default=0, metavar="N", help="number of last tokens of your text that are an answer")
    add("--context", type=int, metavar="N", help=f"tokens of the text (default: all of it, at most {LONGEST})")
    option("--policies --policy", ("fastkv", "momentkv", "snapkv", "keydiff", "streaming"), "policies", "NAME")
    option("--budgets --budget", (128, 256, 512), "sizes of the cache, tokens per KV head")
    add("--equal", choices=("bytes", "tokens"), default="bytes", help=common.EQUAL)
    common.add_slots(parser)
    option("--prefill-block", "256", "tokens of a block, or whole")
    fed = f"last tokens that are fed one at a time (default: the answer, {FED} without one)"
    add("--steps", type=int, metavar="N", help=fed)


@dataclass(frozen=True)
class Text:
    """What is read.

    Attributes: ids [1, N].  pieces: of the text, one for each token.  name: where it is from.  answer: last tokens that
        answer a question, 0 for none.  first: the token that the page begins with.
    """

    ids: Tensor
    pieces: list[str]
    name: str
    answer: int
    first: int


def run(options: argparse.Namespace, console: Console | None = None) -> dict[str, Any]:
    """Write the page. Returns: what it holds."""
    console = console or common.console_of()
    checked(options)
    model, tokenizer = common.load(options.model)
    if options.context is not None:
        common.check_length("context", options.context, model, options.model)
    text = text_of(tokenizer, options, options.context or min(LONGEST, common.longest_text(model)))
    steps = options.steps or text.answer or FED
    num = text.ids.shape[1]
    if not 1 <= steps < num - 1:
        raise FastKVError(f"steps must be at least 1 and fewer than the {num} tokens of the text less one, got {steps}")
    block = None if options.prefill_block == "whole" else int(options.prefill_block)
    if block is not None and (num - steps) % block == 1:
        steps += 1  # a block of one token that is left over is fed like those after it
    reading = Reading(text.ids.to(model.device), block, steps)
    common.make_folder(options.out.parent)
    full, traces = traced(model, reading, options, console)
    data = page_of(text, reading, options, full, traces, tokenizer)
    written(data, options.out)
    console.print(f"{options.out} written, {options.out.stat().st_size / 1024:.0f} KiB; open it in a browser")
    return data


def checked(options: argparse.Namespace) -> None:
    """Raise FastKVError for what is wrong before a model is loaded."""
    common.check_some("policies", options.policies)
    common.check_some("budgets", options.budgets)
    chosen = [policies.get(name) for name in options.policies]
    for tokens in options.budgets:
        Budget(tokens=tokens, sinks=SINKS, recent=RECENT)
    if options.context is not None and options.context < common.SHORTEST:
        raise FastKVError(f"context must be at least {common.SHORTEST} tokens, got {options.context}")
    block = options.prefill_block
    if block != "whole" and not (block.isdecimal() and int(block) > 1):
        raise FastKVError(f"prefill-block must be whole or a number of at least 2 tokens, got {block!r}")
    twice = next((policy.name for policy in chosen if policy.second_reading), None)
    if twice and block != "whole":
        raise FastKVError(f"policy {twice!r} reads twice, got blocks of {block} tokens; add --prefill-block whole")
    if options.steps is not None and options.steps < 1:
        raise FastKVError(f"steps must be at least 1, got {options.steps}")


def text_of(tokenizer: Any, options: argparse.Namespace, context: int) -> Text:
    """The first `context` tokens of the text. Raises FastKVError if it is too short, or foreign to the tokenizer."""
    if options.text == FACTS:
        return with_facts(tokenizer, options, context)
    whole, name, answer = "".join(common.documents(options.text)), Path(options.text).name, options.answer
    encoded = tokenizer(whole, truncation=True, max_length=context, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded.input_ids
    if len(ids) < common.SHORTEST:
        raise FastKVError(
            f"the text {options.text} is too short, expected at least {common.SHORTEST} tokens, got {len(ids)}; give a "
            "longer one"
        )
    common.check_known(tokenizer, ids, options.model, options.text, "give a text in its vocabulary")
    pieces = pieces_of(tokenizer, whole, ids, encoded.get("offset_mapping"))
    return Text(torch.tensor([ids]), pieces, name, answer, found(pieces, answer) if answer else 0)


def with_facts(tokenizer: Any, options: argparse.Namespace, context: int) -> Text:
    """A real text with facts in it that ends with a question and its answer, all of it `context` tokens."""
    question = facts.sample(tokenizer, context, options.seed, common.TEXT).questions[0]
    answer = tokenizer(question.answer, add_special_tokens=False).input_ids
    rest = question.ids + answer
    ids = facts.sample(tokenizer, context - len(rest), options.seed, common.TEXT).prefix + rest
    common.check_known(tokenizer, ids, options.model, options.text, "give a text in its vocabulary")
    name = f"{common.TEXT} with facts, seed {options.seed}"
    pieces = pieces_of(tokenizer, "", ids, None)
    return Text(torch.tensor([ids]), pieces, name, len(answer), found(pieces, len(answer)))


def found(pieces: Sequence[str], answer: int) -> int:
    """The token where the text first says what its last `answer` tokens say, in any case; else the first of them."""
    start = len(pieces) - answer
    text, words = ("".join(part).lower() for part in (pieces[:start], pieces[start:]))
    place = text.find(words.strip())
    ends = accumulate(len(piece.lower()) for piece in pieces)
    return start if place < 0 else next(token for token, end in enumerate(ends) if end > place)


def pieces_of(tokenizer: Any, text: str, ids: list[int], places: Sequence[tuple[int, int]] | None) -> list[str]:
    """What each token stands for, blanks before it included; a dot for one that goes on within a letter.

    Args: places: of each token in the text, first and last character; None for a tokenizer that does not know.
    """
    if places is None:
        return [tokenizer.decode([one]) for one in ids]
    pieces, end = [], 0
    special = set(tokenizer.all_special_ids)
    for one, (_, stop) in zip(ids, places):
        pieces.append(text[end:stop] or (tokenizer.convert_ids_to_tokens(one) if one in special else "·"))
        end = max(end, stop)
    return pieces


def traced(
    model: Any, reading: Reading, options: argparse.Namespace, console: Console
) -> tuple[Full, list[tuple[str, int, Trace, str]]]:
    """The stock model, and every policy at every budget with the name of its correction."""
    caches = [(policy, tokens) for policy in options.policies for tokens in options.budgets]
    settings = {"prefill_block": reading.block, "evict_every": EVICT_EVERY, "static": False, "slots": options.slots}
    found = []
    with common.progress(console) as progress:
        bar = progress.add_task("full cache", total=1 + len(caches))
        full = read_full(model, reading)
        progress.advance(bar)
        for name, tokens in caches:
            progress.update(bar, description=f"{name}, {tokens}")
            budget = Budget(tokens=tokens, sinks=SINKS, recent=RECENT)
            if options.equal == "bytes":
                budget = equal_bytes(model.config, budget, model.dtype)
            with patched(model, name, budget, **settings, backend=backend_of(name)):
                correction = model._fastkv_config.correction.name
                found.append((name, tokens, trace(model, reading, full), correction))
            progress.advance(bar)
        progress.update(bar, description="done")
    return full, found


def backend_of(policy: str) -> str:
    """The fastest there is; where there are centroids the reference, with which `trace` can follow them."""
    return "reference" if policies.get(policy).correction == "centroids" else "auto"


def page_of(
    text: Text,
    reading: Reading,
    options: argparse.Namespace,
    full: Full,
    traces: Sequence[tuple[str, int, Trace, str]],
    tokenizer: Any,
) -> dict[str, Any]:
    """What the page holds, see `page.html`."""
    arrays, places = [], []
    for _, _, one, _ in traces:
        here = {"gone": one.gone, "error": coded(one.error), "centroid": one.centroid}
        places.append([name for name, array in here.items() if array is not None])
        arrays += [array for array in here.values() if array is not None]
    numbers, starts = packed(arrays)
    begins = iter(starts)
    caches = []
    for (policy, tokens, one, correction), names in zip(traces, places):
        found = {name: next(begins) for name in names}
        caches.append(
            {
                "policy": policy,
                "budget": tokens,
                "remembers": REMEMBERS[correction],
                "kept": one.kept,
                "bytes": one.nbytes,
                "slot": one.slot,
                "events": one.events,
                "said": words(tokenizer, one.said),
                "centroid": None,
                **found,
            }
        )
    block = "in one piece" if reading.block is None else f"in blocks of {reading.block} tokens"
    first = traces[0][2]
    return {
        "model": Path(options.model).name,
        "text": text.name,
        "read": f"Read {block}, the last {reading.steps} one at a time.",
        "tokens": text.pieces,
        "first": text.first,
        "answer": text.answer if reading.steps >= text.answer else 0,
        "sinks": SINKS,
        "recent": RECENT,
        "layers": first.layers,
        "heads": first.gone.shape[1],
        "bytes": full.nbytes,
        "slots": traces[0][2].stored,
        "said": words(tokenizer, full.said),
        "policies": list(options.policies),
        "budgets": list(options.budgets),
        "caches": caches,
        "numbers": numbers,
    }


def words(tokenizer: Any, ids: Tensor) -> list[str]:
    """Tokens as text, each with a blank before it where the tokenizer has words."""
    return [f" {tokenizer.decode([one]).strip()}" for one in ids.tolist()]


# What became of every token.


@dataclass(frozen=True)
class Reading:
    """How a text is read: its first tokens in blocks, the last `steps` one at a time.

    Attributes: ids [1, N].  block: tokens of a block, None for one piece.
    """

    ids: Tensor
    block: int | None
    steps: int

    def parts(self) -> Iterator[Tensor]:
        """What is given to the model, one forward after the other."""
        prompt = self.ids.shape[1] - self.steps
        yield from self.ids[:, :prompt].split(self.block or prompt, 1)
        yield from self.ids[:, prompt:].split(1, 1)


@dataclass(frozen=True)
class Full:
    """What the stock model makes of a text.

    Attributes:
        attention: by index of the layer [N, Hq * Dv].
        said: [steps], the tokens that it finds most likely where the last `steps` tokens of the text stand.
        nbytes: of its cache.
    """

    attention: dict[int, Tensor]
    said: Tensor
    nbytes: int


@dataclass(frozen=True)
class Trace:
    """What a cache did with a text of N tokens.

    Attributes:
        layers: indices in the model of the L compressed ones.
        events: tokens seen when something was evicted, in order.
        gone: [L, Hkv, N] int64, the number of the event, from 1, in which a token was evicted; 0 if it is still there.
        centroid: [L, Hkv, N] int64, the centroid, from 1, that an evicted token is part of; 0 for none. None if the
            cache has no centroids.
        error: [L, Hkv, N], |o - full| / |full| of the attention output for each token, mean over the query heads of a
            KV head.
        said: as of `Full`.  kept: tokens per KV head, mean.  nbytes: of the compressed layers.
        slot: bytes of a token in the slots of a head, mean over layers.  stored: how its keys and values are stored.
    """

    layers: list[int]
    events: list[int]
    gone: Tensor
    centroid: Tensor | None
    error: Tensor
    said: Tensor
    kept: float
    nbytes: int
    slot: float
    stored: str


@torch.no_grad()
def read_full(model: Any, reading: Reading) -> Full:
    """Run the stock model over the whole text. Raises FastKVError if its attention cannot be recorded."""
    with record_attention(model) as recorded:
        out = model(reading.ids, use_cache=True, logits_to_keep=reading.steps + 1)
    attention = {layer: outputs[0][0] for layer, outputs in recorded.items()}
    return Full(attention, out.logits[0, :-1].argmax(-1), cache_bytes(out[CACHE]))


@torch.no_grad()
def trace(model: Any, reading: Reading, full: Full) -> Trace:
    """Run the patched model over the text, and look at its cache after every forward.

    Centroids are followed where the backend is the reference; others may join tokens without `Centroids.add`.
    """
    cache, num = FastKVCache(model), reading.ids.shape[1]
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}
    attending = modules.attentions(model)
    groups = {index: modules.Sizes.of(attending[index]).groups for index in layers}
    for layer in layers.values():
        track(layer.cache, num)
    gone: list[Tensor] = []
    events: list[int] = []
    errors: list[Tensor] = []
    said, seen = [], 0
    with record_attention(model) as recorded:
        for part in reading.parts():
            before, seen = seen, seen + part.shape[1]
            logits = model(part, **{CACHE: cache}, logits_to_keep=1).logits
            said.append(logits[0, -1].argmax(-1))
            states, heads = states_of(model, layers.values())
            gone = gone or [state.seen.new_zeros(heads, num) for state in states]
            lost = [~stored_tokens(state, num)[0] & (one == 0) for state, one in zip(states, gone)]
            if any(bool(mask.any()) for mask in lost):
                events.append(seen)
                for one, mask in zip(gone, lost):
                    one[mask] = len(events)
            # A text that is read twice has a second output, of the same tokens, which is left out.
            outputs = ((index, recorded[index][0][0], full.attention[index][before:seen]) for index in layers)
            errors.append(torch.stack([error(ours, theirs, heads, groups[index]) for index, ours, theirs in outputs]))
            for outputs_of_layer in recorded.values():
                outputs_of_layer.clear()
    kept = kept_tokens(cache)
    assert kept is not None
    parts = [state.parts for state in states if isinstance(state.parts, Tracked)]
    slots = [state.exact for state in states]
    sizes = [sum(part.nbytes for part in one.moving().values()) / one.keys[..., 0].numel() for one in slots]
    plain = slots[0].format.plain
    return Trace(
        list(layers),
        events,
        torch.stack([one.cpu() for one in gone]),
        torch.stack([one.centroid(left) for one, left in zip(parts, gone)]) if len(parts) == len(gone) else None,
        torch.cat(errors, -1),
        torch.stack(said[-reading.steps - 1 : -1]),
        kept,
        stored_bytes(cache) - sum(one.place.nbytes for one in parts),
        sum(sizes) / len(sizes),
        str(slots[0].dtype).rpartition(".")[2] if plain else slots[0].format.name,
    )


def error(attention: Tensor, full: Tensor, heads: int, groups: int) -> Tensor:
    """[heads, T], relative distance of attention outputs [T, Hq * Dv], mean over the query heads of a KV head."""
    ours, theirs = (one.double().unflatten(-1, (heads, groups, -1)) for one in (attention, full))
    length = theirs.norm(dim=-1)
    relative = (ours - theirs).norm(dim=-1) / length.clamp(min=torch.finfo(torch.float32).tiny)
    return relative.mean(-1).T.float().cpu()


def states_of(model: Any, layers: Iterable[FastKVLayer]) -> tuple[list[LayerState], int]:
    """Of the layers of a cache that was filled, and how many heads each has. Raises FastKVError unless equally many."""
    states = [layer.state for layer in layers if layer.state is not None]
    heads = sorted({state.heads for state in states})
    if len(heads) > 1:
        raise FastKVError(
            f"view draws layers with equally many KV heads, got {type(model).__name__} with {heads}; try another model"
        )
    return states, heads[0]


@dataclass
class Tracked(Centroids):
    """Centroids that know where each token went.

    A tensor, so that it goes wherever the state goes, through operators as well.

    Attributes: place: [B, Hkv, N + 1] int64, the centroid that the first, second, ... token to leave a head is part of
        now, -1 while there is none; the last column always is -1.
    """

    place: Tensor

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tracked:
        """As of `Centroids`."""
        inside = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device) if mask is None else mask
        arrived = (self.place >= 0).sum(-1, keepdim=True)
        last = self.place.shape[-1] - 1
        nth = torch.where(inside, arrived + inside.cumsum(-1) - 1, last)
        place, parts, blocks = self.place, Centroids(*self.tensors()[:4]), iter(nth.split(BLOCK, -1))
        for after, target, order in self.steps(keys, values, mask):
            if target is None:  # a block of tokens lines up behind the centroids
                block = next(blocks)
                behind = parts.num + torch.arange(block.shape[-1], device=block.device)
                place = place.scatter(-1, block, behind.expand_as(block))
                place[..., last] = -1
                total = parts.num + block.shape[-1]
            else:
                place = moved(place, target)
                total = target.shape[-1]
            here = torch.arange(order.shape[-1], device=order.device).expand_as(order)
            place = moved(place, here.new_zeros(*order.shape[:2], total).scatter_(-1, order, here))
            parts = after
        return Tracked(parts.count, parts.keys, parts.values, parts.spread, place)

    def centroid(self, gone: Tensor) -> Tensor:
        """[Hkv, N], as in `Trace`, of a single sequence whose `gone` that is."""
        place = self.place[0, :, :-1]
        inside = (place >= 0).to(self.count.dtype)
        members = torch.zeros_like(self.count[0]).scatter_add_(-1, place.clamp(min=0), inside)
        assert torch.equal(members, self.count[0]), "every token that left is in one centroid"
        # Tokens leave by event, those of one event in order of age.
        order = torch.where(gone > 0, gone, gone.shape[1] + 1).argsort(dim=-1, stable=True)
        return torch.zeros_like(place).scatter_(-1, order, place + 1).cpu()


ATTRIBUTES[Tracked] = tuple(one.name for one in fields(Tracked))  # so that operators take it apart


def moved(place: Tensor, target: Tensor) -> Tensor:
    """What was at place m is now at place target[..., m], [B, Hkv, M]."""
    return torch.where(place >= 0, target.gather(-1, place.clamp(min=0)), -1)


def track(layer: LayerCache, num: int) -> None:
    """Let the layer, still empty, know of `num` tokens in which of its centroids they are, if it comes to have any."""
    allocate = layer.allocate

    def tracking(*sizes: Any, **options: Any) -> None:
        allocate(*sizes, **options)
        assert layer.state is not None
        parts = layer.state.parts
        if isinstance(parts, Centroids):
            nowhere = parts.count.new_full((*parts.count.shape[:2], num + 1), -1, dtype=torch.int64)
            layer.state.parts = Tracked(parts.count, parts.keys, parts.values, parts.spread, nowhere)

    layer.allocate = tracking  # type: ignore[method-assign]


# The page.

TEMPLATE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/"
TOP, LEVELS = 4.0, 31  # errors are stored as logarithms of 1 + error / FINE, from 0 to TOP
FINE = 0.01
SPEED = 6  # of the compression: higher ones take several times as long for a few percent


def packed(arrays: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Arrays [layers, heads, N] of whole numbers from 0 to 65535 as text, and where each begins once it is read.

    The text is that of all first bytes, then all second bytes; arrays follow each other as [N, layers * heads].
    """
    flat = [array.flatten(0, 1).T.flatten().numpy().astype("<u2") for array in arrays]
    starts = [0, *accumulate(len(one) for one in flat)][:-1]
    planes = np.concatenate(flat).view(np.uint8).reshape(-1, 2).T
    return base64.b64encode(zlib.compress(planes.tobytes(), SPEED)).decode(), starts


def coded(error: Tensor) -> Tensor:
    """Relative errors as whole numbers from 0 to `LEVELS`, finer where they are small."""
    return (LEVELS * (error.clamp(0, TOP) / FINE).log1p() / math.log1p(TOP / FINE)).round()


def written(data: dict[str, Any], path: Path) -> None:
    """Write the page of that data; no text in it can end the script that it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    replace_file(path, TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text).encode())
