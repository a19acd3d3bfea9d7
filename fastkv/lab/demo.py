"""`fastkv demo`: a model reads a real text once; then come six questions, to its full cache and to smaller ones."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import Budget, FastKVError, patched, policies
from . import asking, common, facts, pictures, texts
from .equal_bytes import equal_bytes
from .recording import cache_bytes

SHARES: dict[str, Any] = {"sinks": 4, "recent": 32}  # tokens that are never evicted: the first and the last
BLOCK = 256  # tokens that are read between two looks at the memory
AROUND = 60  # characters of the text on either side of a fact
QUICK = {"context": 512, "policies": ("kvzip", "streaming"), "budgets": (Fraction(1, 4),)}


@dataclass(frozen=True)
class Row:
    """One cache.

    Attributes:
        policy: "full" for the stock cache.
        budget: what was asked for, a share of the full cache or tokens per KV head.
        right: number of right answers.  answers: what the model wrote.
        kl: of 64 tokens of the text that goes on, nats.
        nbytes: after the text.  seconds: of reading, and of answering all questions.
    """

    policy: str
    budget: int | Fraction
    right: int
    answers: list[str]
    kl: float
    nbytes: int
    seconds: tuple[float, float]


def size(text: str) -> int | Fraction:
    """A cache's size on a command line: "128" tokens per KV head, or "1/8" of the full cache; ValueError if neither."""
    try:
        number = Fraction(text)
    except ZeroDivisionError as error:
        raise ValueError(f"{text} is no number") from error
    return number.numerator if number.denominator == 1 else number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv demo`."""
    add, option = parser.add_argument, partial(common.option, parser)
    common.add_model(parser, "fastkv-demo")
    option("--text", common.TEXT, f"{', '.join(texts.SOURCES)} of Python, or a file in UTF-8", "FILE")
    option("--context", 1024, "tokens that are read: the text with six facts in it")
    option("--policies", ("fastkv", "kvzip", "streaming"), "policies to compare", "NAME")
    sizes = "shares of the full cache, or tokens per KV head"
    option("--budgets", (Fraction(1, 4), Fraction(1, 8)), sizes).type = common.listed(size)
    option("--words", 24, "tokens of an answer, at most")
    option("--seed", 6, "of the facts and their places")
    add("--equal", choices=("bytes", "tokens"), default="bytes", help=common.EQUAL)
    common.add_slots(parser, "auto")
    add("--quick", action="store_true", help="a shorter run: two policies, one budget, 512 tokens")


def settings_of(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with those of `QUICK` where asked for. Raises FastKVError if something cannot be compared."""
    chosen = argparse.Namespace(**{**vars(options), **(QUICK if options.quick else {})})
    for name, least in (("context", common.SHORTEST), ("words", 1)):
        if getattr(chosen, name) < least:
            raise FastKVError(f"{name} must be at least {least}, got {getattr(chosen, name)}")
    for name in ("budgets", "policies"):
        common.check_some(name, getattr(chosen, name))
    for policy in chosen.policies:
        policies.get(policy)
    for asked in chosen.budgets:
        Budget(tokens=tokens_of(asked, chosen.context), **SHARES)
    return chosen


def tokens_of(asked: int | Fraction, context: int) -> int:
    """A size in tokens per KV head; shares are of a context of so many tokens."""
    if isinstance(asked, int):
        return asked
    if not 0 < asked < 1:
        raise FastKVError(f"budgets must be tokens per KV head or shares of the full cache, got {asked}; try 1/8")
    return int(asked * context)


def budget_of(asked: int | Fraction, settings: argparse.Namespace, model: Any, whole: int) -> Budget:
    """A size as a budget, in bytes unless the options share tokens. whole: bytes of the full cache."""
    budget = Budget(tokens=tokens_of(asked, settings.context), **SHARES)
    if settings.equal == "tokens":
        return budget
    if isinstance(asked, int):
        return equal_bytes(model.config, budget, model.dtype)
    return replace(budget, tokens=None, bytes=int(whole * asked))


def cached(
    model: Any, policy: str, budget: Budget | None, slots: str, block: int | None = None
) -> AbstractContextManager:
    """The model with the cache of a policy while the context lasts; with its own if there is no budget."""
    return nullcontext(model) if budget is None else patched(model, policy, budget, prefill_block=block, slots=slots)


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Ask with every cache, print the answers, and write demo.json, demo.png and demo-memory.png."""
    started, console, settings = time.perf_counter(), console or common.console_of(), settings_of(options)
    model, tokenizer = common.load(settings.model)
    common.check_length("context", settings.context + settings.words, model, settings.model)
    sample = facts.sample(tokenizer, settings.context, settings.seed, settings.text, "tuning")
    ids = torch.tensor([sample.prefix])
    whole = ids.shape[1] * cache_bytes(asking.read(model, ids[:, :1]))
    caches = [(policy, asked) for asked in settings.budgets for policy in settings.policies]
    budgets = [budget_of(asked, settings, model, whole) for _, asked in caches]
    for (policy, _), budget in zip(caches, budgets):  # what cannot be used is refused before anything slow
        with cached(model, policy, budget, settings.slots):
            common.check_first(policy, model, budget)
    common.make_folder(settings.out)
    tell(model, tokenizer, sample, settings, console)
    rows = []
    every = zip([(common.FULL, settings.context), *caches], [None, *budgets])
    for row in measured(model, tokenizer, sample, settings, every):
        show(row, sample, whole, console)
        rows.append(row)
    held = memories(model, ids, settings, whole)
    files = [settings.out / name for name in ("demo.png", "demo-memory.png", "demo.json")]
    title = f"{Path(settings.model).name}: six questions about {ids.shape[1]} tokens of {Path(settings.text).name}"
    pictures.write_answers(rows, files[0], f"{title}, read before they were known")
    pictures.write_memory(held, files[1])
    record = {"versions": common.versions(), "threads": torch.get_num_threads(), "settings": vars(settings)}
    common.write_json(files[2], {**record, "questions": sample.questions, "memory": held, "rows": rows})
    seconds = f"{time.perf_counter() - started:.0f} s in all"
    console.print(f"{', '.join(map(str, files))} written; {seconds}")
    return rows


def tell(model: Any, tokenizer: Any, sample: facts.Sample, settings: argparse.Namespace, console: Console) -> None:
    """What is read, one of the facts in it, and all questions."""
    first, text = sample.questions[0], tokenizer.decode(sample.prefix)
    before, _, after = (" ".join(part.split()) for part in text.partition(first.fact))
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(
        f"{settings.model} reads {len(sample.prefix)} tokens of {settings.text} once, with six facts in them. Each "
        f"cache is cut to its size; only then come the questions. The full cache is in {dtype}.\n"
    )
    console.print(f"  ... {before[-AROUND:]} [{first.fact}] {after[:AROUND]} ...\n", markup=False)
    for number, question in enumerate(sample.questions, 1):
        console.print(f"  {number} {question.text}  ({question.answer})", markup=False)
    console.print()


def show(row: Row, sample: facts.Sample, whole: int, console: Console) -> None:
    """What one cache answered."""
    name = "full cache" if row.policy == common.FULL else f"{row.policy}, {row.budget}"
    reading, answering = row.seconds
    console.print(
        f"[bold]{name:<22}[/bold]{row.right} of {len(row.answers)} right, {row.nbytes / 2**20:6.1f} MiB "
        f"({row.nbytes / whole:.0%}), KL of the text that goes on {row.kl:.3f}, read in {reading:.1f} s, answered in "
        f"{answering:.1f} s",
        soft_wrap=True,
    )
    for number, (question, said) in enumerate(zip(sample.questions, row.answers), 1):
        mark = "[green]✓[/green]" if question.answered_by(said) else "[red]✗[/red]"
        console.print(f"  {mark} {number} ", end="")
        console.print(" ".join(said.split()), markup=False, no_wrap=True, overflow="ellipsis")


@torch.no_grad()
def measured(
    model: Any,
    tokenizer: Any,
    sample: facts.Sample,
    settings: argparse.Namespace,
    caches: Iterable[tuple[tuple[str, int | Fraction], Budget | None]],
) -> Iterator[Row]:
    """Each cache: the text is read once, and every question goes on from a copy. The full cache comes first."""
    questions = [question.ids for question in sample.questions]
    ids, goes_on, full = torch.tensor([sample.prefix]), torch.tensor([sample.continuation]), None
    for (policy, asked), budget in caches:
        with cached(model, policy, budget, settings.slots):
            start = time.perf_counter()
            cache = asking.read(model, ids)
            reading, nbytes = time.perf_counter() - start, cache_bytes(cache)
            start = time.perf_counter()
            said = asking.answers(model, tokenizer, cache, ids, questions, settings.words)
            answering = time.perf_counter() - start
            mine = model(goes_on.to(model.device), past_key_values=cache).logits[0].double().log_softmax(-1)
        full = mine if full is None else full
        kl = (full.exp() * (full - mine)).sum(-1).mean().item()
        answers = [tokenizer.decode(words) for words in said]
        right = sum(question.answered_by(one) for question, one in zip(sample.questions, answers))
        yield Row(policy, asked, right, answers, kl, nbytes, (reading, answering))


@torch.no_grad()
def memories(model: Any, ids: Tensor, settings: argparse.Namespace, whole: int) -> list[pictures.Memory]:
    """Bytes of the full cache and of the first policy's that can read in blocks, while a text is read in blocks."""
    seen = [*range(BLOCK, ids.shape[1], BLOCK), ids.shape[1]]
    held = [pictures.Memory(common.FULL, seen, [whole * tokens // ids.shape[1] for tokens in seen])]  # grows evenly
    policy = next((name for name in settings.policies if not policies.get(name).rereads), None)
    if policy is not None:
        cache, nbytes = None, []
        budget = budget_of(settings.budgets[0], settings, model, whole)
        with cached(model, policy, budget, settings.slots, BLOCK):
            for block in ids.to(model.device).split(BLOCK, 1):
                cache = model(block, past_key_values=cache, logits_to_keep=1, use_cache=True).past_key_values
                nbytes.append(cache_bytes(cache))
        held.append(pictures.Memory(policy, seen, nbytes))
    return held
