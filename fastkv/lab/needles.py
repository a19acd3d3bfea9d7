"""`fastkv needles`: accuracy over the depth of a needle and the length of the text, as a table and heat maps.

The tasks are RULER's needles. The text is read before the question is known, or together with it. A JSON file and a
heat map of each finished cache stay in `--out`; the same command goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..api import patched
from ..errors import FastKVError
from ..integrations.transformers.stock import CACHE
from ..prefix import answers
from . import common, reading, ruler
from .reading import cache_bytes
from .ruler import KINDS, Sample, Tokenizer

TASKS = tuple(KINDS)
TASK = "niah_single_2"


@dataclass(frozen=True)
class Grid:
    """What was found where.

    Attributes:
        accuracy: [depths][lengths], mean score of `samples` texts, 0 to 1.
        depths: 0 to 1.  lengths: in tokens, with the answer.  task, samples, seed: as passed to `grid`.
    """

    task: str
    lengths: list[int]
    depths: list[float]
    samples: int
    seed: int
    accuracy: list[list[float]]


@dataclass(frozen=True)
class Row:
    """One cache: its policy and budget as on the command line, the largest of a sequence in bytes, what it found."""

    policy: str
    budget: str
    nbytes: int
    found: Grid


@torch.no_grad()
def grid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 10,
    seed: int = 0,
    task: str = TASK,
    *,
    text: str | Path | None = None,
    question: str = "later",
    progress: Callable[[], None] | None = None,
) -> Grid:
    """Ask the model, patched or not, for needles at every depth of texts of every length; greedy, one text at a time.

    All depths of a length have the same texts but for the place of the needle, and so have all models.

    Args: task: one of `TASKS`.  text: as in `ruler.generate`.  question: "later" for texts that are read, and
        compressed, before it is known, "seen" for prompts that are read whole.  progress: called after each text.
    """
    if not lengths or not depths or samples < 1:
        raise FastKVError(
            f"a grid needs at least one length, depth and sample, got {lengths}, {depths} and {samples}; add some"
        )

    def found(depth: float, length: int, index: int) -> float:
        sample = needle(task, tokenizer, length, depth, seed, index, text)
        mark = ruler.score(sample, answer(model, tokenizer, sample, question))
        if progress is not None:
            progress()
        return mark

    accuracy = [[fmean(found(depth, length, i) for i in range(samples)) for length in lengths] for depth in depths]
    return Grid(task, list(lengths), list(depths), samples, seed, accuracy)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, question: str = "later") -> str:
    """What greedy decoding writes behind the prompt, at most `sample.tokens_to_generate` tokens."""
    if question == "later":
        text, asked = reading.split(tokenizer, sample.prompt, sample.question)
        cache, tokens = reading.read(model, text), sample.tokens_to_generate
        written = answers(model, tokenizer, cache, text, asked.tolist(), tokens)
        return str(tokenizer.decode(written[0], skip_special_tokens=True))
    read = tokenizer(sample.prompt, return_tensors="pt", verbose=False).to(model.device)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
    generate: Any = model.generate
    whole = generate(**inputs, max_new_tokens=sample.tokens_to_generate, do_sample=False, pad_token_id=padding)
    return str(tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def needle(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    depth: float,
    seed: int = 0,
    index: int = 0,
    text: str | Path | None = None,
) -> Sample:
    """A sample of `task` with the needles that are asked for at `depth`. Raises: FastKVError as `grid` does."""
    if task not in TASKS:
        raise FastKVError(f"expected one of the tasks {', '.join(TASKS)}, got {task!r}; choose one of them")
    return ruler.generate(task, tokenizer, length, seed, index, depth=depth, text=text)


def write_plot(found: Grid, path: str | Path, title: str = "") -> None:
    """Write the heat map as a PNG: lengths to the right, depths downwards, accuracy in every cell."""
    columns, rows = len(found.lengths), len(found.depths)
    figure = common.figure(2.6 + 0.8 * columns, 1.8 + 0.45 * rows)
    axis = figure.subplots()
    image = axis.imshow(found.accuracy, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, marks in enumerate(found.accuracy):
        for column, mark in enumerate(marks):
            colour = "black" if mark > 0.5 else "white"
            axis.text(column, row, f"{mark:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(columns), [f"{length:,}" for length in found.lengths])
    axis.set_yticks(range(rows), [f"{depth:.0%}" for depth in found.depths])
    axis.set(xlabel="tokens of text, question and answer", ylabel="depth of the needle")
    axis.set_title(title or found.task, fontsize=11)
    figure.colorbar(image, ax=axis, label=f"accuracy, {found.samples} texts a cell")
    figure.savefig(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv needles`."""
    option = partial(common.option, parser)
    common.add_model(parser, "fastkv-needles")
    task = f"what is hidden and asked for: {', '.join(TASKS)} (default: {TASK})"
    parser.add_argument("--task", choices=TASKS, default=TASK, metavar="NAME", help=task)
    parser.add_argument(
        "--question", choices=reading.QUESTION, default="later", help=f"{reading.HELP} (default: later)"
    )
    common.add_caches(parser)
    option("--lengths", (512, 1024, 2048), "tokens of the texts")
    option("--depths", (0.0, 0.25, 0.5, 0.75, 1.0), "places of the needle, 0 to 1", "X")
    option("--samples", 5, "texts for each length and depth")
    option("--seed", 0, "seed of the texts")
    haystack = "file or folder of .txt and .md files to hide needles in (default: generated)"
    parser.add_argument("--haystack", metavar="DIR", help=haystack)


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Measure the full cache and every cache that has no file yet, and print the table."""
    console = console or common.console_of()
    task = options.task
    shared = ("task", "question", "model", "samples", "seed", "haystack", "lengths", "depths")
    plan = common.planned(options, {name: getattr(options, name) for name in shared})
    model, tokenizer = common.load(options.model)
    check(model, tokenizer, task, options)
    caches = [common.arguments(one, options, model) for one in plan]
    for one, cache in zip(plan, caches):  # what cannot be used is refused before anything slow
        with fitted(model, cache):
            common.check_first(one.name, model, cache["budget"])
    rows, total = [], len(options.lengths) * len(options.depths) * options.samples
    with common.progress(console) as progress:
        for one, cache in zip(plan, caches):
            bar = progress.add_task(one.name, total=total)
            if one.record is None:
                with fitted(model, cache):
                    nbytes, found = measured(model, tokenizer, task, options, partial(progress.advance, bar))
                write_plot(found, one.file.with_suffix(".png"), f"{task}: {one.name}")
                rows.append(Row(one.policy, one.budget, nbytes, found))
                one.keep(vars(rows[-1]))
            else:
                rows.append(Row(one.policy, one.budget, one.record["nbytes"], Grid(**one.record["found"])))
                progress.update(bar, completed=total)
    console.print(table_of(rows))
    console.print(
        f"Share of {task} needles found, {options.samples} texts for each length and depth; KiB is the largest cache "
        f"of one sequence, everything counted.\n{len(rows)} heat maps and JSON files in {options.out}"
    )
    return rows


def fitted(model: Any, cache: dict[str, Any]) -> AbstractContextManager[Any]:
    """The model with one cache of `common.arguments`."""
    return nullcontext() if cache["policy"] == common.FULL else patched(model, **cache)


def check(model: Any, tokenizer: Any, task: str, options: argparse.Namespace) -> None:
    """Raise FastKVError for texts that cannot be written, or that this model cannot read."""
    if not options.lengths or not options.depths or options.samples < 1:
        raise FastKVError("needles need at least one length, one depth and one sample; add some")
    common.check_length("lengths", max(options.lengths), model, options.model)
    for length in options.lengths:
        for depth in options.depths:
            sample = needle(task, tokenizer, length, depth, options.seed, 0, options.haystack)
    ids = tokenizer(sample.prompt, verbose=False).input_ids
    common.check_known(tokenizer, ids, options.model, task, "choose another model")


def measured(
    model: Any, tokenizer: Any, task: str, options: argparse.Namespace, progress: Callable[[], None]
) -> tuple[int, Grid]:
    """Bytes of the largest cache of a sequence, and what was found, with the cache that the model has."""
    sizes = [0]

    def note(module: Any, args: Any, output: Any) -> None:
        sizes.append(cache_bytes(output[CACHE]) // len(output.logits))

    hook = model.register_forward_hook(note)
    texts = options.lengths, options.depths, options.samples, options.seed, task
    try:
        found = grid(model, tokenizer, *texts, text=options.haystack, question=options.question, progress=progress)
    finally:
        hook.remove()
    return max(sizes), found


def table_of(rows: list[Row]) -> Table:
    """The rows as a table: bytes, and accuracy over all depths, of all lengths and of each."""
    lengths = rows[0].found.lengths
    table = common.table(("policy",), ("budget", "KiB", "found", *(f"{length:,}" for length in lengths)))
    for row in rows:
        marks = [fmean(column) for column in zip(*row.found.accuracy)]
        means = (f"{mean:.0%}" for mean in (fmean(marks), *marks))
        table.add_row(row.policy, row.budget, f"{row.nbytes / 2**10:.0f}", *means)
    return table
