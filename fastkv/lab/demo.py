"""`fastkv demo`: a model reads a document once; six questions go to its full cache and to smaller ones.

The document, `flight.txt`, is a history of the first aeroplanes that was written for this. Its questions were chosen
with the full cache of SmolLM2 alone: of `TRIED` these are some that the full cache answers and the model without the
document does not. So small a model answers few questions about thousands of tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from .. import FastKVError, patch, patched
from ..api import answers
from ..calibration import check_writable
from ..config import POLICY
from ..integrations.transformers.stock import CACHE
from . import common, facts
from .reading import Reading, cache_bytes, read

DOCUMENT = Path(__file__).with_name("flight.txt")
TITLE = "The First Years of Flight"
TRIED = 120  # questions from which those of the document were chosen
WORDS = 20  # tokens of an answer, at most
QUICK = 1024  # tokens that a shorter run reads
SUFFIXES = (".png", ".svg")
RED = "#d1495b"  # of the smaller caches in the picture
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@dataclass(frozen=True)
class Question:
    """A question, what has to be in the answer as whole words, and where the document says so, if that is known."""

    text: str
    answer: str
    fact: str = ""

    def answered_by(self, said: str) -> bool:
        """Whether the answer is among the words that a model wrote; case and punctuation aside."""
        return f" {plain(self.answer)} " in f" {plain(said)} "


QUESTIONS = tuple(Question(*one) for one in json.loads(DOCUMENT.with_suffix(".json").read_text(encoding="utf-8")))


@dataclass
class Row:
    """One cache.

    Attributes:
        budget: as `fastkv.patch` takes it; "full" for the stock cache.  nbytes: after the document.
        made: seconds of the reading, or of what makes a smaller cache of what was read.
        answers: what was written after each question.  right: of each, whether that is the answer.
        answering: seconds of all answers.  kl: of the tokens that go on in the document, nats a token.
        The last two are None until they are known.
    """

    budget: str
    nbytes: int
    made: float
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    answering: float | None = None
    kl: float | None = None


@dataclass(frozen=True)
class Task:
    """What is read and asked.

    Attributes:
        name: of the document.  ids: [1, N] int64, the beginning of a chat turn, with the document.
        head: tokens of the turn before the document.  goes_on: [1, T] int64, the tokens after those that are read.
        questions: asked.  asked: of each, the tokens from there to where the answer begins.
    """

    name: str
    ids: Tensor
    head: int
    goes_on: Tensor
    questions: list[Question]
    asked: list[list[int]]


class Written(BaseStreamer):
    """Hands on what `generate` has written after each prompt of a batch, token by token."""

    def __init__(self, tokenizer: Any, write: Callable[[list[str]], None]) -> None:
        self.decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
        self.write = write
        self.steps: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        """Called by transformers with the prompts [B, N], then with a token of each [B]."""
        if value.ndim == 1:
            self.steps.append(value)
            self.write(self.decode(torch.stack(self.steps, 1)))

    def end(self) -> None:
        """Called by transformers after the last token."""


def plain(text: str) -> str:
    """The words of a text in lower case with single spaces; of numbers the digits and the decimal point."""
    return " ".join(re.findall(r"\w+(?:\.\d+)?", text.lower().replace(",", "")))


def check(options: argparse.Namespace) -> None:
    """Raise FastKVError for what cannot be used before a model is loaded."""
    for budget in options.budgets:
        if common.to_budget(budget).quality is not None:
            raise FastKVError(f"the demo needs budgets that are known beforehand, got {budget}; give 8x, for example")
    if options.text is not None and not options.ask:
        raise FastKVError(
            f"the demo has no questions about {options.text}, expected --ask QUESTION ANSWER, got none; or leave "
            "--text out"
        )
    for question, answer in options.ask:
        if not plain(answer):
            raise FastKVError(f"an answer must have a word in it, got {answer!r} for {question!r}")
    if options.picture.suffix not in SUFFIXES:
        raise FastKVError(f"picture must end with {' or '.join(SUFFIXES)}, got {options.picture}")


def task_of(tokenizer: Any, options: argparse.Namespace) -> Task:
    """The document and its questions. Raises FastKVError if it is too short, or has no answer in what is read."""
    name, source = (TITLE, str(DOCUMENT)) if options.text is None else (options.text,) * 2
    text = tokenizer(facts.read(source), add_special_tokens=False, verbose=False)["input_ids"]
    head, _ = facts.around(tokenizer, "")
    room = min(options.context - len(head), len(text) - facts.GOES_ON)
    facts.check_tokens(name, len(text), common.SHORTEST + facts.GOES_ON)
    if room < 1:
        raise FastKVError(f"{len(head)} tokens come before the document, got --context {options.context}; give more")
    own = [Question(*pair) for pair in options.ask] or QUESTIONS
    seen = tokenizer.decode(text[:room])
    questions = [one for one in own if one.fact in seen]
    if not questions:
        raise FastKVError(
            f"none of the questions is about the first {options.context} tokens of {name}; give a larger --context "
            "or --ask"
        )
    asked = [facts.around(tokenizer, f"{one.text} Answer in a few words.")[1] for one in questions]
    rest = text[room : room + facts.GOES_ON]
    return Task(name, torch.tensor([head + text[:room]]), len(head), torch.tensor([rest]), questions, asked)


def run(options: argparse.Namespace) -> list[Row]:
    """Read, ask every cache, show the answers as they are written, and draw the picture."""
    started, console = time.perf_counter(), common.console_of()
    check(options)
    keep_freed_memory()
    budgets = options.budgets
    if options.quick:
        options, budgets = argparse.Namespace(**{**vars(options), "context": min(options.context, QUICK)}), budgets[:1]
    model, tokenizer = common.load(options.model)
    task = task_of(tokenizer, options)
    longest = task.ids.shape[1] + max(task.goes_on.shape[1], *(len(one) + WORDS for one in task.asked))
    common.check_length("document and question", longest, model, options.model)
    for budget in budgets:  # what cannot be used is refused before anything slow
        with patched(model, POLICY, common.to_budget(budget)):
            common.check_first(model)
    common.make_folder(options.picture.parent)
    check_writable(options.picture)
    chosen = (
        f"They are of {TRIED} that were tried with SmolLM2 before any smaller cache was asked: its full cache answers "
        "them, and without the document it does not. "
    )
    console.print(
        f"{options.model} reads {task.ids.shape[1]} tokens of {task.name}. Then come the questions, each to a copy of "
        f"a cache that was made before. {'' if options.ask else chosen}The full cache is in {str(model.dtype)[6:]}; "
        "sizes as 4x are of one in 16 bits.\n"
    )
    rows = compared(model, tokenizer, task, budgets, console)
    if not console.is_terminal:
        console.line()  # rich ends a live table with a new line on terminals alone
    console.print(f"\n{sentence(rows)}", soft_wrap=True)
    write_picture(rows, options.picture, f"{Path(options.model).name}, {task.ids.shape[1]} tokens of {task.name}")
    console.print(f"{options.picture} written; {time.perf_counter() - started:.0f} s in all", soft_wrap=True)
    return rows


def keep_freed_memory() -> None:
    """Let glibc keep memory that is freed. The full cache is copied at every step; from the kernel, which clears every
    page that it gives, that takes as long again as the step itself.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        libc.mallopt(MMAP_THRESHOLD, 1 << 25)  # the most that glibc takes
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def sentence(rows: Sequence[Row]) -> str:
    """What was seen."""
    full, smaller = rows[0], rows[1:]
    stay = ", ".join(f"{sum(a and b for a, b in zip(full.right, row.right))} at {row.budget}" for row in smaller)
    diverges = ", ".join(f"{row.kl:.4f}" for row in smaller)
    return (
        f"Of {sum(full.right)} answers that are right with the full cache, still right are {stay}; the next "
        f"{facts.GOES_ON} tokens of the document diverge by {diverges} nats a token."
    )


@torch.no_grad()
def compared(model: Any, tokenizer: Any, task: Task, budgets: tuple[str, ...], console: Console) -> list[Row]:
    """Every cache, the full one first, in a table that grows while answers are written; the model is patched after."""
    before = task.ids[0, : task.head].tolist()
    alone, without = replace(task, ids=task.ids[:, :0], asked=[before + ids for ids in task.asked]), Row("", 0, 0.0)
    answer(model, tokenizer, DynamicCache(), alone, without)
    console.print(f"Without the document the model answers {sum(without.right)} of {len(task.questions)}.\n")
    start = time.perf_counter()
    with console.status("reading"):
        try:
            reading = Reading.of(model, task.ids.to(model.device))
            cache: Any = reading.full()
        except FastKVError as error:
            console.print(f"Every cache reads the document for itself: {error}.\n")
            reading, cache = None, read(model, task.ids)
    rows, full = [Row(common.FULL, cache_bytes(cache), time.perf_counter() - start)], None
    with Live(console=console, auto_refresh=False) as live:

        def show() -> None:
            live.update(table_of(rows, task), refresh=console.is_terminal)

        for budget in ("", *budgets):
            if budget:
                start = time.perf_counter()
                size = common.to_budget(budget)
                if reading is not None:
                    cache = reading.compressed(POLICY, size)
                else:
                    cache = read(patch(model, POLICY, size), task.ids)
                rows.append(Row(budget, cache_bytes(cache), time.perf_counter() - start))
            answer(model, tokenizer, cache, task, rows[-1], show)
            logits = model(task.goes_on.to(model.device), **{CACHE: cache}).logits[0].double().log_softmax(-1)
            full = logits if full is None else full
            rows[-1].kl = (full.exp() * (full - logits)).sum(-1).mean().item()
            show()
    return rows


def answer(
    model: Any, tokenizer: Any, cache: Any, task: Task, row: Row, show: Callable[[], None] | None = None
) -> None:
    """Fill in what is written after each question, from copies of a cache of the task's tokens; call `show` whenever a
    token is written.
    """
    start = time.perf_counter()

    def write(answers: list[str]) -> None:
        row.answers = answers
        if show is not None:
            show()

    said = answers(model, tokenizer, cache, task.ids, task.asked, WORDS, Written(tokenizer, write))
    row.answers = [tokenizer.decode(one) for one in said]
    row.right = [question.answered_by(one) for question, one in zip(task.questions, row.answers)]
    row.answering = time.perf_counter() - start


def table_of(rows: Sequence[Row], task: Task) -> Table:
    """A column for each cache, a row for each question with its answer in brackets, then numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("question (answer)", ratio=3)
    for row in rows:
        table.add_column("full cache" if row.budget == common.FULL else row.budget, ratio=2)
    for place, question in enumerate(task.questions):
        asks = Text(f"{question.text} ({question.answer})")
        table.add_row(asks, *(cell(row, place) for row in rows), end_section=question is task.questions[-1])
    numbers: dict[str, Callable[[Row], str]] = {
        "right": lambda row: f"{sum(row.right)} of {len(task.questions)}",
        "cache, MiB": lambda row: f"{row.nbytes / 2**20:.1f}",
        "read or compressed in, s": lambda row: f"{row.made:.1f}",
        "answered in, s": lambda row: "" if row.answering is None else f"{row.answering:.1f}",
        f"KL of the next {facts.GOES_ON} tokens, nats": lambda row: "" if row.kl is None else f"{row.kl:.4f}",
    }
    for name, number in numbers.items():
        table.add_row(name, *map(number, rows))
    return table


def cell(row: Row, place: int) -> Text:
    """What was written after the question of that number, so far, and a mark once it is known to be right or wrong."""
    said = Text(" ".join(" ".join(row.answers[place : place + 1]).split()))
    marks = [("✓ ", "green") if right else ("✗ ", "red") for right in row.right[place : place + 1]]
    return Text.assemble(*marks, said)


def write_picture(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write right answers, and KL of the text that goes on, over bytes; the first row is the full cache."""
    full, *smaller = rows
    smaller.sort(key=lambda row: row.nbytes)
    figure = common.figure(10, 4.2)
    answers, goes_on = figure.subplots(1, 2)
    panels: tuple[tuple[Any, str, Callable[[Row], Any], int], ...] = (
        (answers, f"right answers of {len(full.right)}", lambda row: sum(row.right), -13),
        (goes_on, "KL of the text that goes on, nats a token", lambda row: row.kl, 5),
    )
    for axis, what, value, above in panels:
        points = [(row.nbytes / 2**20, value(row)) for row in smaller]
        axis.plot(*zip(*points), color=RED, marker="o", linewidth=2.4, markersize=7)
        for row, point in zip(smaller, points):  # names beside the points, off the line
            axis.annotate(row.budget, point, (7, above), textcoords="offset points", color=RED)
        axis.set_xlim(0, 1.1 * points[-1][0])
        common.finish(axis, what, "cache, MiB")
    line = f"full cache, {full.nbytes / 2**20:.0f} MiB"
    answers.axhline(sum(full.right), label=line, color="#444444", linestyle=(0, (4, 3)), linewidth=1.2)
    answers.set_ylim(-0.6, len(full.right) + 0.6)
    answers.yaxis.get_major_locator().set_params(integer=True)
    answers.legend(frameon=False, loc="lower right")
    goes_on.set_ylim(0, 1.15 * max(row.kl or 0 for row in smaller) or 1)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
