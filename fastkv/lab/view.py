"""`fastkv view`: a text is read with every policy at every budget, and what became of it is written as a page.

What became of every token is read off a cache while a model runs. The page is one HTML file with everything in it.

Numbers travel compressed, in base64, and lie where the compression finds what they have in common: those of one token
side by side, because most heads evict a token at about the same time, and first bytes apart from second ones, most of
which are 0. Errors would take most of the page, so they have few levels.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import check_writable, replace_file
from ..errors import FastKVError
from ..integrations.transformers import modules
from ..integrations.transformers.cache import FastKVCache
from ..integrations.transformers.layer import FastKVLayer
from ..integrations.transformers.stock import CACHE
from ..reference import LayerState
from . import common, facts
from .fidelity import stored_tokens
from .reading import cache_bytes, kept_tokens, record_attention, stored_bytes

FACTS = "facts"  # the text that is read where none is given
LONGEST = 4096  # tokens of a text that are read unless more are asked for
PIECE = 256  # tokens of a block
FED = 32  # last tokens of a text that are fed one at a time
REMEMBERS = {  # what of an evicted token there still is, by correction
    "none": "nothing of it is remembered",
    "moments": "it is part of the mean and the covariance of all evicted tokens",
    "centroids": "it is part of a centroid",
    "matching": "biases and values of what stayed were fitted to its attention",
}


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Write the page. Returns: what it holds."""
    console = common.console_of()
    common.caches_of(options)
    common.make_folder(options.out.parent)
    check_writable(options.out)
    block = PIECE if options.prefill_block == "auto" else options.prefill_block
    model, tokenizer = common.load(options.model)
    if options.context is not None:
        common.check_length("context", options.context, model, options.model)
    text = text_of(tokenizer, options, options.context or min(LONGEST, common.longest_text(model)))
    steps, num = options.steps or text.answer or FED, text.ids.shape[1]
    if steps >= num - 1:
        raise FastKVError(f"steps must be fewer than the {num} tokens of the text less one, got {steps}")
    if block is not None and (num - steps) % block == 1:
        steps += 1  # a block of one token that is left over is fed like those after it
    reading = Reading(text.ids.to(model.device), block, steps)
    traces = []
    for cache, _ in common.each(model, common.caches_of(options, model, static=False), console):
        if cache.policy == common.FULL:
            full = read_full(model, reading)
        else:
            traces.append((cache, trace(model, reading, full), model._fastkv_config.correction.name))
    data = page_of(text, reading, options, full, traces, tokenizer)
    written(data, options.out)
    console.print(f"{options.out} written, {options.out.stat().st_size / 1024:.0f} KiB; open it in a browser")
    return data


def text_of(tokenizer: Any, options: argparse.Namespace, context: int) -> Text:
    """The first `context` tokens of the text. Raises FastKVError if it is too short, or foreign to the tokenizer."""
    if options.text == FACTS:
        return with_facts(tokenizer, options, context)
    whole = facts.read(options.text)
    encoded = tokenizer(whole, truncation=True, max_length=context, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded.input_ids
    facts.check_tokens(options.text, len(ids), common.SHORTEST)
    pieces = pieces_of(tokenizer, whole, ids, encoded.get("offset_mapping"))
    return Text(torch.tensor([ids]), pieces, Path(options.text).name, 0, 0)


def with_facts(tokenizer: Any, options: argparse.Namespace, context: int) -> Text:
    """A real text with facts in it that ends with a question and its answer, all of it `context` tokens."""
    sample, rest = facts.with_question(tokenizer, context, options.seed, "topics", answered=True)
    ids, answer = sample.prefix + rest, len(rest) - len(sample.questions[0].ids)
    pieces = pieces_of(tokenizer, "", ids, None)
    return Text(torch.tensor([ids]), pieces, f"topics with facts, seed {options.seed}", answer, found(pieces, answer))


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


def page_of(
    text: Text,
    reading: Reading,
    options: argparse.Namespace,
    full: Full,
    traces: Sequence[tuple[common.Cache, dict[str, Any], str]],
    tokenizer: Any,
) -> dict[str, Any]:
    """What the page holds, see `view.html`. Args: traces: of every cache, with the name of its correction."""
    numbers, starts = packed([array for _, one, _ in traces for array in (one["gone"], coded(one["error"]))])
    caches = [
        {
            "policy": cache.policy,
            "budget": cache.budget,
            "remembers": REMEMBERS[correction],
            **{name: one[name] for name in ("kept", "bytes", "slot", "events")},
            "said": words(tokenizer, one["said"]),
            "gone": gone,
            "error": error,
        }
        for (cache, one, correction), gone, error in zip(traces, starts[::2], starts[1::2])
    ]
    block = "in one piece" if reading.block is None else f"in blocks of {reading.block} tokens"
    first = traces[0][1]
    return {
        "model": Path(options.model).name,
        "text": text.name,
        "read": f"Read {block}, the last {reading.steps} one at a time.",
        "tokens": text.pieces,
        "first": text.first,
        "answer": text.answer if reading.steps >= text.answer else 0,
        **common.SHARES,
        "layers": first["layers"],
        "heads": first["gone"].shape[1],
        "bytes": full.nbytes,
        "slots": first["slots"],
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


@torch.no_grad()
def read_full(model: Any, reading: Reading) -> Full:
    """Run the stock model over the whole text. Raises FastKVError if its attention cannot be recorded."""
    with record_attention(model) as recorded:
        out = model(reading.ids, use_cache=True, logits_to_keep=reading.steps + 1)
    attention = {layer: outputs[0][0] for layer, outputs in recorded.items()}
    return Full(attention, out.logits[0, :-1].argmax(-1), cache_bytes(out[CACHE]))


@torch.no_grad()
def trace(model: Any, reading: Reading, full: Full) -> dict[str, Any]:
    """Run the patched model over a text of N tokens, and look at its cache after every forward.

    Returns: as in the page but for tensors:
        layers: indices in the model of the L compressed ones.
        events: tokens seen when something was evicted, in order.
        gone: [L, Hkv, N] int64, the number of the event, from 1, in which a token was evicted; 0 if it is still there.
        error: [L, Hkv, N], |o - full| / |full| of the attention output for each token, mean over the query heads of a
            KV head.
        said: as of `Full`.  kept: tokens per KV head, mean.  bytes: of the compressed layers.
        slot: bytes of a token in the slots of a head, mean over layers.  slots: how its keys and values are stored.
    """
    cache, num = FastKVCache(model), reading.ids.shape[1]
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}
    attending = modules.attentions(model)
    groups = {index: modules.Sizes.of(attending[index]).groups for index in layers}
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
    slots = [state.exact for state in states]
    sizes = [sum(part.nbytes for part in one.moving().values()) / one.keys[..., 0].numel() for one in slots]
    plain = slots[0].format.plain
    return {
        "layers": list(layers),
        "events": events,
        "gone": torch.stack([one.cpu() for one in gone]),
        "error": torch.cat(errors, -1),
        "said": torch.stack(said[-reading.steps - 1 : -1]),
        "kept": kept_tokens(cache),
        "bytes": stored_bytes(cache),
        "slot": sum(sizes) / len(sizes),
        "slots": str(slots[0].dtype).rpartition(".")[2] if plain else slots[0].format.name,
    }


def error(attention: Tensor, full: Tensor, heads: int, groups: int) -> Tensor:
    """[heads, T], relative distance of attention outputs [T, Hq * Dv], mean over the query heads of a KV head."""
    ours, theirs = (one.double().unflatten(-1, (heads, groups, -1)) for one in (attention, full))
    relative = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
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


# The page.

TEMPLATE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/"
TOP, LEVELS = 4.0, 31  # errors are stored as logarithms of 1 + error / FINE, from 0 to TOP
FINE = 0.01
SPEED = 6  # of the compression: higher ones take several times as long for a few percent


def packed(arrays: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Arrays [layers, heads, N] of whole numbers from 0 to 65535 as text, and where each begins once it is read. The
    text is that of all first bytes, then all second bytes; arrays follow each other as [N, layers * heads].
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
