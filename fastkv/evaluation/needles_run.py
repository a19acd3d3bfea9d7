"""`fastkv needles`: where in a text, and in how long a text, a compressed cache still finds what it is asked for.

Each finished cache is a JSON file and a heat map in `--out`; the same command, given again, goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import FastKVError, patched
from ..demo.measure import cache_bytes
from ..demo.run import policy_of
from ..inspection.run import FOREIGN, load
from . import budgets
from .budgets import listed
from .equal_bytes import assert_equal_bytes
from .needles import TASKS, Grid, grid, needle, write_plot
from .results import FULL, name_of
from .ruler_sample import unknown_share

DEMO, DEMO_TASK, TASK = "demo", "facts", "niah_single_2"


@dataclass(frozen=True)
class Row:
    """One cache: its policy and budget as on the command line, the largest of a sequence in bytes, what it found."""

    policy: str
    budget: str
    nbytes: int
    found: Grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv needles`."""

    def numbers(kind: type) -> Any:
        def parse(text: str) -> tuple[Any, ...]:
            try:
                return tuple(kind(part) for part in text.split(",") if part.strip())
            except ValueError:
                raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {text!r}") from None

        return parse

    add = parser.add_argument
    add("--model", default=DEMO, metavar="PATH", help="a transformers model, or demo, the bundled one (the default)")
    add(
        "--task",
        choices=TASKS,
        metavar="NAME",
        help=f"what is hidden and asked for: {', '.join(TASKS)} (default: {TASK}; {DEMO_TASK} for the bundled model, "
        "which knows only the words of the last three)",
    )
    add(
        "--policies",
        "--policy",
        default="momentkv,keydiff,snapkv",
        metavar="NAME,...",
        help="policies (default: %(default)s)",
    )
    budgets.add_arguments(parser)
    add("--lengths", type=numbers(int), default=(512, 1024, 2048), metavar="N,...", help="default: 512,1024,2048")
    add(
        "--depths",
        type=numbers(float),
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        metavar="X,...",
        help="places of the needle, 0 to 1 (default: 0,0.25,0.5,0.75,1)",
    )
    add("--samples", type=int, default=5, metavar="N", help="texts for each length and depth (default: 5)")
    add("--seed", type=int, default=0, metavar="N", help="of the texts (default: 0)")
    add(
        "--haystack", metavar="DIR", help="file or folder of .txt and .md files to hide needles in (default: generated)"
    )
    add("--out", type=Path, default=Path("fastkv-needles"), metavar="DIR", help="default: fastkv-needles")


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Measure the full cache and every cache that has no file yet, and print the table.

    Raises: FastKVError if the model, the task, a policy, a budget, a length, a depth or the directory cannot be used,
        if the tokenizer does not know the words, or if the directory holds results of other settings.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 100)
    task = options.task or (DEMO_TASK if options.model == DEMO else TASK)
    names, sizes = listed("policies", options.policies), listed("budgets", options.budgets)
    for name in names:
        policy_of(name)
    for size in sizes:
        budgets.wanted(size, options)
    caches = [(FULL, ""), *((name, size) for name in names for size in sizes)]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {options.out} ({error.strerror}); choose another directory") from error
    settings = settings_of(options, task)
    done = {cache: saved(*cache, settings, options.out) for cache in caches}
    model, tokenizer = load(options.model)
    check(model, tokenizer, task, options)
    for cache in caches:
        check_bytes(model, *cache, options)  # what cannot be used is refused before anything slow

    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for cache in caches:
            row, name = done[cache], name_of(*cache)
            bar = progress.add_task(name, total=len(options.lengths) * len(options.depths) * options.samples)
            if row is None:
                with fitted(model, *cache, options):
                    row = measured(
                        model,
                        tokenizer,
                        task,
                        cache,
                        options,
                        lambda at, _, bar=bar: progress.update(bar, completed=at),
                    )
                save(row, settings, options.out)
            progress.update(bar, completed=progress.tasks[bar].total)
            rows.append(row)
    console.print(table_of(rows))
    console.print(
        f"Share of {task} needles found, {options.samples} texts for each length and depth; KiB is the largest cache "
        f"of one sequence, everything counted.\n{len(rows)} heat maps and JSON files in {options.out}",
        highlight=False,
    )
    return rows


def check(model: Any, tokenizer: Any, task: str, options: argparse.Namespace) -> None:
    """Raise FastKVError for texts that cannot be written, or that this model cannot read."""
    if not options.lengths or not options.depths or options.samples < 1:
        raise FastKVError("needles need at least one length, one depth and one sample; add some")
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    if max(options.lengths) > longest:
        raise FastKVError(
            f"lengths must be at most {longest} tokens for {options.model}, got {max(options.lengths)}; give a smaller "
            "one"
        )
    for length in options.lengths:
        for depth in options.depths:
            sample = needle(task, tokenizer, length, depth, options.seed, 0, options.haystack)
    unknown = unknown_share(tokenizer, sample.prompt)
    if unknown > FOREIGN:
        raise FastKVError(
            f"the tokenizer of {options.model} does not know {unknown:.0%} of the words of {task}, at most "
            f"{FOREIGN:.0%} make sense; choose another model, or --task {DEMO_TASK} for the bundled one"
        )


def fitted(model: Any, policy: str, budget: str, options: argparse.Namespace) -> Any:
    """The model with one cache, as a context manager."""
    if policy == FULL:
        return nullcontext(model)
    return patched(
        model,
        policy_of(policy) if options.model == DEMO else policy,
        budgets.given(budget, options, model),
        prefill_block=options.prefill_block,
        evict_every=options.evict_every,
        correction=options.correction,
    )


@torch.no_grad()
def check_bytes(model: Any, policy: str, budget: str, options: argparse.Namespace) -> None:
    """Raise FastKVError if the model cannot have the cache, or if that does not use the bytes of its budget."""
    with fitted(model, policy, budget, options):
        first = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True).past_key_values
    bound = budgets.given(budget, options, model).bytes if budget else None
    if bound is not None:
        assert_equal_bytes({name_of(policy, budget): first}, bound)


def measured(
    model: Any, tokenizer: Any, task: str, cache: tuple[str, str], options: argparse.Namespace, progress: Any
) -> Row:
    """The row of the cache that the model has."""
    sizes = [0]

    def note(module: Any, args: Any, output: Any) -> None:
        sizes[0] = max(sizes[0], cache_bytes(output.past_key_values) // len(output.logits))

    hook = model.register_forward_hook(note)
    try:
        found = grid(
            model,
            tokenizer,
            options.lengths,
            options.depths,
            options.samples,
            options.seed,
            task,
            text=options.haystack,
            progress=progress,
        )
    finally:
        hook.remove()
    return Row(*cache, sizes[0], found)


def settings_of(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """What results must share to stand in one table."""
    names = ("model", "equal", "sinks", "recent", "layers", "heads", "prefill_block", "evict_every", "correction")
    texts = ("samples", "seed", "haystack")
    numbers = {"lengths": list(options.lengths), "depths": list(options.depths)}
    return {"task": task, **{name: getattr(options, name) for name in (*names, *texts)}, **numbers}


def save(row: Row, settings: dict[str, Any], directory: Path) -> None:
    """Write heat map and JSON file of one cache; the file last, and whole, so that it stands for both."""
    name = name_of(row.policy, row.budget)
    write_plot(row.found, directory / f"{name}.png", f"{row.found.task}: {name}")
    unfinished = directory / f"{name}.part"
    unfinished.write_text(json.dumps({"settings": settings, **asdict(row)}, indent=2) + "\n")
    unfinished.replace(directory / f"{name}.json")


def saved(policy: str, budget: str, settings: dict[str, Any], directory: Path) -> Row | None:
    """The row of a cache that was measured before, or None. Raises FastKVError if that was with other settings."""
    path = directory / f"{name_of(policy, budget)}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    for name, now in settings.items():
        before = record.get("settings", {}).get(name)
        if before != now:
            raise FastKVError(
                f"{path} was written with {name} {before}, this run has {now}; choose another --out or delete the file"
            )
    return Row(policy, budget, record["nbytes"], Grid.of(record["found"]))


def table_of(rows: list[Row]) -> Table:
    """The rows as a table: bytes, and accuracy over all depths, of all lengths and of each."""
    lengths = rows[0].found.lengths
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("policy", no_wrap=True)
    for title in ("budget", "KiB", "found", *(f"{length:,}" for length in lengths)):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        marks = [sum(column) / len(column) for column in zip(*row.found.accuracy)]
        means = [sum(marks) / len(marks), *marks]
        table.add_row(row.policy, row.budget, f"{row.nbytes / 2**10:.0f}", *(f"{mean:.0%}" for mean in means))
    return table
