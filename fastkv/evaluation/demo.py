"""`fastkv demo`: the bundled model answers questions over long texts with the full cache and with compressed ones."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from .. import Budget, FastKVError, patched, policies
from ..demo import MODEL_DIR, policy_of
from ..demo.measure import Measured, Questions, make_questions, measure, relative_error
from ..demo.tasks import TASKS
from . import common
from .equal_bytes import EVICT_EVERY, equal_bytes

PREFILLS = ("whole", "context", "blocks")
TITLES = {"whole": "prompt read whole", "context": "text compressed before the question"}
OPTIONS: dict[str, tuple[Any, str, str]] = {  # default, help and what it is called there
    "context": (1024, "tokens of a prompt and its answer", "N"),
    "budgets": ((128, 256), "sizes of the cache, tokens per KV head", "N"),
    "policies": (tuple(policies.names()), "policies to compare", "NAME"),
    "tasks": (TASKS, "kinds of questions", "NAME"),
    "samples": (6, "texts for each task", "N"),
    "seed": (0, "of the first text; the others follow it", "N"),
    "prefill": (("whole", "blocks"), "prompt at once (whole), text before the question (context), or blocks", "MODE"),
    "blocks": (256, "tokens of a block when the prompt is read in blocks", "N"),
    "out": (Path("fastkv-demo"), "where the files go", "DIR"),
}
FIXED = {"sinks": 4, "recent": 16}  # tokens that are never evicted: the first and the last
QUICK = {"context": 512, "budgets": (64, 128), "policies": ("momentkv", "streaming"), "samples": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv demo`; those that are not given are `QUICK` or `OPTIONS`."""
    for name, described in OPTIONS.items():
        common.option(parser, f"--{name}", *described).default = argparse.SUPPRESS
    parser.add_argument("--equal", choices=("bytes", "tokens"), default="bytes", help=common.EQUAL)
    parser.add_argument("--quick", action="store_true", help="a few seconds: two policies, two budgets, short texts")


def settings_of(options: argparse.Namespace) -> argparse.Namespace:
    """The options with all defaults. Raises FastKVError if something cannot be compared."""
    defaults = {name: default for name, (default, _, _) in OPTIONS.items()}
    given = {name: value for name, value in vars(options).items() if name in (*defaults, "equal")}
    chosen = argparse.Namespace(**{**defaults, **FIXED, **(QUICK if options.quick else {}), **given})
    for name, least in (("context", common.SHORTEST), ("samples", 1), ("blocks", 1)):
        if getattr(chosen, name) < least:
            raise FastKVError(f"{name} must be at least {least}, got {getattr(chosen, name)}")
    for name, known in (("budgets", None), ("policies", None), ("tasks", TASKS), ("prefill", PREFILLS)):
        common.check_some(name, getattr(chosen, name), known)
    for policy in chosen.policies:
        policy_of(policy)
    for tokens in chosen.budgets:
        Budget(tokens=tokens, sinks=chosen.sinks, recent=chosen.recent)
    return chosen


@dataclass(frozen=True)
class Row:
    """One cache. Bytes and kept tokens are per sequence; `prefill` is "whole", "context" or the block length."""

    policy: str
    prefill: str
    budget: int
    kept: float
    accuracy: float
    accuracy_of: dict[str, float]
    nbytes: int
    share: float
    tokens_per_second: float
    error: float


def run(options: argparse.Namespace) -> list[Row]:
    """Measure every cache, print the table and write demo.json and demo.png."""
    started, console, settings = time.perf_counter(), common.console_of(), settings_of(options)
    if not (MODEL_DIR / "config.json").is_file():
        raise FastKVError(f"the bundled model is missing, {MODEL_DIR} has no config.json; install fastkv again")
    model, tokenizer = common.load(common.DEMO, device="cpu")
    common.check_length("context", settings.context, model, "the bundled model")
    common.make_folder(settings.out)
    texts = settings.context, settings.samples, settings.seed
    rows = list(compare(model, [make_questions(tokenizer, task, *texts) for task in settings.tasks], settings, console))
    console.print(table_of(rows, settings.tasks, roomy=console.width >= 112))
    console.print(explain(settings))
    record = {"versions": common.versions(), "threads": torch.get_num_threads(), "settings": vars(settings)}
    common.write_json(settings.out / "demo.json", {**record, "rows": rows})
    title = f"{', '.join(settings.tasks)} over {settings.context} tokens, {settings.samples} texts each"
    write_plot(rows, settings.out / "demo.png", title)
    seconds = f"{time.perf_counter() - started:.0f} s in all"
    console.print(f"{settings.out / 'demo.png'} and {settings.out / 'demo.json'} written; {seconds}")
    return rows


def compare(
    model: PreTrainedModel, asked: list[Questions], settings: argparse.Namespace, console: Console
) -> Iterator[Row]:
    """The full cache first, then every policy at every budget in both prefill modes."""
    caches = [
        (policy, prefill, budget)
        for prefill in settings.prefill
        for policy in settings.policies
        for budget in settings.budgets
        if prefill != "blocks" or not policy_of(policy).rereads
    ]

    def answers(later: bool = False) -> list[Measured]:
        return [measure(model, one, timed=one is asked[0], question_later=later) for one in asked]

    with common.progress(console) as progress:
        bar = progress.add_task("full cache", total=1 + len(caches))
        full = answers()
        yield summarise(("full", "whole", settings.context), asked, full, full)
        progress.advance(bar)
        for policy, prefill, tokens in caches:
            block = settings.blocks if prefill == "blocks" else None
            progress.update(bar, description=f"{policy}, {prefill}, {tokens}")
            budget = Budget(tokens=tokens, sinks=settings.sinks, recent=settings.recent)
            if settings.equal == "bytes":
                budget = equal_bytes(model.config, budget, model.dtype)
            with patched(model, policy_of(policy), budget, prefill_block=block, evict_every=EVICT_EVERY):
                common.check_first(policy, model, budget)
                measured = answers(later=prefill == "context")
            yield summarise((policy, str(block or prefill), tokens), asked, measured, full)
            progress.advance(bar)
        progress.update(bar, description="done")


def summarise(
    name: tuple[str, str, int], asked: list[Questions], measured: list[Measured], full: list[Measured]
) -> Row:
    """One row from the measurements of a cache and of the full cache, one of each for every task."""
    right = {one.task: got.right.float().mean().item() for one, got in zip(asked, measured)}
    kept, speed = measured[0].kept, measured[0].tokens_per_second
    nbytes, whole = (max(one.nbytes for one in caches) for caches in (measured, full))
    errors = [relative_error(got.attention, exact.attention) for got, exact in zip(measured, full)]
    assert speed is not None
    kept = float(name[2]) if kept is None else kept
    return Row(*name, kept, fmean(right.values()), right, nbytes, nbytes / whole, speed, fmean(errors))


def table_of(rows: list[Row], tasks: Sequence[str], *, roomy: bool = True) -> Table:
    """The rows as a table; accuracy over all tasks and for each. It is 80 columns wide unless `roomy`."""
    numbers = ("budget", "kept", "right", *tasks, "KiB", "share", "tok/s", "error")
    table = common.table(("policy", "prefill"), numbers, padding=(0, int(roomy)))
    for before, row in zip([rows[0], *rows], rows):
        if (row.policy == "full", row.prefill) != (before.policy == "full", before.prefill):
            table.add_section()
        accuracy = (f"{one:.0%}" for one in (row.accuracy, *(row.accuracy_of[task] for task in tasks)))
        speed = f"{row.tokens_per_second:.0f}"
        cells = (*accuracy, f"{row.nbytes / 2**10:.0f}", f"{row.share:.1%}", speed, f"{row.error:.3f}")
        table.add_row(row.policy, row.prefill, str(row.budget), f"{row.kept:.0f}", *cells)
    return table


def explain(settings: argparse.Namespace) -> str:
    """What the table shows."""
    share = "bytes" if settings.equal == "bytes" else "kept tokens"
    return f"""
One question to each of {settings.samples} texts a task, {settings.context} tokens each.
  budget   tokens per KV head that a cache without moments keeps; all policies get equal {share}
  prefill  the prompt is read whole, or the text before the question is known (context), or in blocks of so
           many tokens; kvzip does without blocks, because it needs the whole context before it evicts
  kept     tokens per KV head that this cache keeps
  right    answers that greedy decoding gives exactly
  KiB      cache of one sequence, everything counted; share: of the full cache
  tok/s    decoded, {settings.samples} sequences together, evictions included
  error    of attention outputs against the full cache: mean |o - full| / |full|
"""


def write_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: a column for each prefill mode, accuracy above, mean relative attention-output error below."""
    full, compressed = rows[0], rows[1:]
    modes = list(dict.fromkeys(row.prefill for row in compressed))
    policies = list(dict.fromkeys(row.policy for row in compressed))
    sizes = sorted({row.budget: row.nbytes / 2**10 for row in compressed if row.policy == policies[-1]}.values())
    figure = common.figure(4.6 * len(modes) + 0.8, 7.4)
    axes = figure.subplots(2, len(modes), sharex=True, sharey="row", squeeze=False)
    for (accuracy, error), mode in zip(axes.T, modes):
        accuracy.set_title(TITLES.get(mode, f"prompt read in blocks of {mode} tokens"), fontsize=11)
        accuracy.axhline(100 * full.accuracy, label="full cache", **common.DASHED)
        for index, policy in enumerate(policies):
            line = sorted((r for r in compressed if (r.policy, r.prefill) == (policy, mode)), key=lambda r: r.nbytes)
            style, x = common.style(index), [row.nbytes / 2**10 for row in line]
            accuracy.plot(x, [100 * row.accuracy for row in line], label=policy, **style)
            error.plot(x, [row.error for row in line], **style)
        common.ticks(error, sizes)
        error.set_xlabel(f"cache, KiB per sequence (full cache: {full.nbytes / 2**10:.0f})")
        accuracy.set_ylim(-4, 104)
        error.set_ylim(0, 1.06 * max(row.error for row in compressed))
        common.finish(accuracy)
        common.finish(error)
    axes[0][0].set_ylabel("answers right, %")
    axes[1][0].set_ylabel("attention output,\nmean relative error")
    common.save(figure, path, title, legend_of=axes[0][0], columns=3 * len(modes))
