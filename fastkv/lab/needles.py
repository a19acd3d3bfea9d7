"""`fastkv needles`: accuracy over the depth of a needle and the length of the text, as a table and heat maps.

The tasks are RULER's needles. The text is read before the question is known, or together with it. A JSON file and a
heat map of each finished cache stay in `--out`; the same command goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..api import GREEDY
from ..integrations.transformers.stock import CACHE
from . import common, reading, ruler
from .reading import cache_bytes
from .ruler import Sample


@torch.no_grad()
def grid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 10,
    seed: int = 0,
    task: str = "niah_single_2",
    *,
    question: str = "later",
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ask the model, patched or not, for needles at every depth of texts of every length; greedy, one text at a time.

    All depths of a length have the same texts but for the place of the needle, and so have all models.

    Args: task: of `ruler.KINDS`.  question: "later" for texts that are read, and compressed, before it is known, "seen"
        for prompts that are read whole.  progress: called after each text.
    Returns: accuracy: [depths][lengths], mean score of so many texts, 0 to 1.  nbytes: of the largest cache of a
        sequence.
    """
    sizes = [0]

    def note(module: Any, args: Any, output: Any) -> None:
        sizes.append(cache_bytes(output[CACHE]) // len(output.logits))

    def found(depth: float, length: int, index: int) -> float:
        sample = ruler.generate(task, tokenizer, length, seed, index, depth=depth)
        mark = ruler.string_match_all(answer(model, tokenizer, sample, question), sample.answers)
        progress()
        return mark

    hook = model.register_forward_hook(note)
    try:
        accuracy = [[fmean(found(depth, length, i) for i in range(samples)) for length in lengths] for depth in depths]
    finally:
        hook.remove()
    return {"accuracy": accuracy, "nbytes": max(sizes)}


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, question: str = "later") -> str:
    """What greedy decoding writes behind the prompt, at most `sample.tokens_to_generate` tokens."""
    if question == "later":
        written = reading.answered(model, tokenizer, sample.prompt, sample.question, sample.tokens_to_generate)
    else:
        read = tokenizer(sample.prompt, return_tensors="pt", verbose=False).to(model.device)
        inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
        how = {"max_new_tokens": sample.tokens_to_generate, "pad_token_id": tokenizer.eos_token_id} | GREEDY
        written = model.generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :]  # type: ignore[operator]
    return str(tokenizer.decode(written, skip_special_tokens=True))


def write_plot(accuracy: Sequence[Sequence[float]], options: argparse.Namespace, name: str, path: Path) -> None:
    """Write the heat map as a PNG: lengths to the right, depths downwards, accuracy in every cell."""
    columns, rows = len(options.lengths), len(options.depths)
    figure = common.figure(2.6 + 0.8 * columns, 1.8 + 0.45 * rows)
    axis = figure.subplots()
    image = axis.imshow(accuracy, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, marks in enumerate(accuracy):
        for column, mark in enumerate(marks):
            colour = "black" if mark > 0.5 else "white"
            axis.text(column, row, f"{mark:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(columns), [f"{length:,}" for length in options.lengths])
    axis.set_yticks(range(rows), [f"{depth:.0%}" for depth in options.depths])
    axis.set(
        title=f"{options.task}: {name}", xlabel="tokens of text, question and answer", ylabel="depth of the needle"
    )
    figure.colorbar(image, ax=axis, label=f"accuracy, {options.samples} texts a cell")
    figure.savefig(path)


def run(options: argparse.Namespace, console: Console | None = None) -> list[dict[str, Any]]:
    """Measure the full cache and every cache that has no file yet, and print the table.

    Returns: of each cache its policy and budget as on the command line, and what `grid` found.
    """
    console = console or common.console_of()
    common.caches_of(options)
    model, tokenizer = common.load(options.model)
    caches = common.caches_of(options, model)
    results = common.Results(options, "task question model samples seed lengths depths", caches, model)
    common.check_length("lengths", max(options.lengths), model, options.model)
    for length, depth in product(options.lengths, options.depths):  # texts that cannot be written are refused now
        ruler.generate(options.task, tokenizer, length, options.seed, depth=depth)
    rows, total = [], len(options.lengths) * len(options.depths) * options.samples
    for cache, advance in common.each(model, caches, console, total):
        record = results.known.get(cache.name)
        if record is None:
            texts = options.lengths, options.depths, options.samples, options.seed, options.task
            found = grid(model, tokenizer, *texts, question=options.question, progress=advance)
            write_plot(found["accuracy"], options, cache.name, results.file(cache, ".png"))
            record = results.keep(cache, found)
        rows.append({name: record[name] for name in ("policy", "budget", "accuracy", "nbytes")})
    common.show(console, table_of(rows, options.lengths))
    console.print(
        f"Share of {options.task} needles found, {options.samples} texts for each length and depth; KiB is the largest "
        f"cache of one sequence, everything counted.\n{len(rows)} heat maps and JSON files in {options.out}"
    )
    return rows


def table_of(rows: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Table:
    """The rows as a table: bytes, and accuracy over all depths, of all lengths and of each."""
    columns: dict[str, tuple[str, Any, str]] = {"nbytes": ("KiB", common.kibibytes, "")}
    columns |= {name: (name, "{:.0%}", "") for name in ("found", *(f"{length:,}" for length in lengths))}
    told = []
    for row in rows:
        marks = [fmean(column) for column in zip(*row["accuracy"])]
        told.append({**row, **dict(zip([*columns][1:], (fmean(marks), *marks)))})
    return common.table_of(told, ("policy", "budget"), columns)
