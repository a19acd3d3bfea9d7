"""`fastkv demo`: the bundled model answers questions over long texts with the full cache and with compressed ones."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel

from .. import Budget, FastKVError, __version__, patched, policies
from . import MODEL_DIR, load
from .equal_bytes import EVICT_EVERY, assert_equal_bytes, equal_bytes
from .heads import PATTERN
from .measure import Measured, Questions, make_questions, measure, relative_error
from .plot import write_plot
from .tasks import TASKS

MIN_CONTEXT = 96
PREFILLS = ("whole", "context", "blocks")


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        context: tokens of a prompt with its answer.
        budgets: tokens per KV head that a cache without moments keeps.
        equal: "bytes": every policy gets the bytes of such a cache; "tokens": every policy keeps that many tokens.
        policies: names.  tasks: names.  samples: texts for each task.  seed: of the first text.
        prefill: "whole": the prompt is read at once; "context": the text is read, and compressed, before the question;
            "blocks": the prompt is read in blocks.  blocks: tokens of a block.
        sinks, recent: tokens that are never evicted, as in `Budget`.
        out: directory for demo.json and demo.png.
    """

    context: int = 1024
    budgets: tuple[int, ...] = (128, 256)
    equal: str = "bytes"
    policies: tuple[str, ...] = ()
    tasks: tuple[str, ...] = TASKS
    samples: int = 6
    seed: int = 0
    prefill: tuple[str, ...] = ("whole", "blocks")
    blocks: int = 256
    sinks: int = 4
    recent: int = 16
    out: Path = Path("fastkv-demo")

    @classmethod
    def make(cls, *, quick: bool = False, **chosen: Any) -> Settings:
        """The given settings; the defaults for the others, smaller ones if `quick`. Raises FastKVError for bad ones."""
        small = {"context": 512, "budgets": (64, 128), "policies": ("momentkv", "streaming"), "samples": 2}
        defaults: dict[str, Any] = {"policies": tuple(policies.names()), **(small if quick else {})}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
        settings = cls(**{**defaults, **given})
        for name, least in (("context", MIN_CONTEXT), ("samples", 1), ("blocks", 1)):
            if getattr(settings, name) < least:
                raise FastKVError(f"{name} must be at least {least}, got {getattr(settings, name)}")
        for name in ("budgets", "policies", "tasks", "prefill"):
            if not getattr(settings, name):
                raise FastKVError(f"{name} must name at least one, got none; leave it out to use the default")
        for name, chosen_ones, known in (("task", settings.tasks, TASKS), ("prefill", settings.prefill, PREFILLS)):
            unknown = [one for one in chosen_ones if one not in known]
            if unknown:
                raise FastKVError(f"unknown {name} {unknown[0]!r}; choose from {', '.join(known)}")
        for policy in settings.policies:
            policy_of(policy)
        for tokens in settings.budgets:
            Budget(tokens=tokens, sinks=settings.sinks, recent=settings.recent)
        return settings


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


def run(settings: Settings, console: Console | None = None) -> list[Row]:
    """Measure every cache, print the table and write demo.json and demo.png into `settings.out`."""
    started = time.perf_counter()
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 100)
    if not (MODEL_DIR / "config.json").is_file():
        raise FastKVError(
            f"the bundled model is missing, {MODEL_DIR} has no config.json; install fastkv again or train it with "
            "python -m fastkv.demo.train"
        )
    transformers.utils.logging.disable_progress_bar()  # loading takes no time
    model, tokenizer = load()
    transformers.utils.logging.enable_progress_bar()
    longest = model.config.max_position_embeddings
    if settings.context > longest:
        raise FastKVError(f"context must be at most {longest} tokens for the bundled model, got {settings.context}")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {settings.out} ({error.strerror}); choose another directory") from error
    asked = [
        make_questions(tokenizer, task, settings.context, settings.samples, settings.seed) for task in settings.tasks
    ]
    rows = list(compare(model, asked, settings, console))
    console.print(table_of(rows, settings.tasks, roomy=console.width >= 112))
    console.print(explain(settings), highlight=False)
    write_json(rows, settings)
    title = f"{', '.join(settings.tasks)} over {settings.context} tokens, {settings.samples} texts each"
    write_plot(rows, settings.out / "demo.png", title)
    console.print(
        f"{settings.out / 'demo.png'} and {settings.out / 'demo.json'} written; "
        f"{time.perf_counter() - started:.0f} s in all",
        highlight=False,
    )
    return rows


def compare(model: PreTrainedModel, asked: list[Questions], settings: Settings, console: Console) -> Iterator[Row]:
    """The full cache first, then every policy at every budget in both prefill modes."""
    caches = [
        (policy, prefill, budget)
        for prefill in settings.prefill
        for policy in settings.policies
        for budget in settings.budgets
        if prefill != "blocks" or not policy_of(policy).rereads
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("full cache", total=1 + len(caches))
        full = [measure(model, questions, timed=place == 0) for place, questions in enumerate(asked)]
        yield summarise(("full", "whole", settings.context), asked, full, full)
        progress.advance(bar)
        for policy, prefill, tokens in caches:
            block = settings.blocks if prefill == "blocks" else None
            progress.update(bar, description=f"{policy}, {prefill}, {tokens}")
            budget = budget_of(model, tokens, settings)
            with patched(model, policy_of(policy), budget, prefill_block=block, evict_every=EVICT_EVERY):
                if budget.bytes is not None:
                    with torch.no_grad():
                        first = model(asked[0].prompts[:1, :1], use_cache=True).past_key_values
                    assert_equal_bytes({policy: first}, budget.bytes)
                measured = [
                    measure(model, questions, timed=place == 0, question_later=prefill == "context")
                    for place, questions in enumerate(asked)
                ]
            yield summarise((policy, str(block or prefill), tokens), asked, measured, full)
            progress.advance(bar)
        progress.update(bar, description="done")


def policy_of(name: str) -> policies.Policy:
    """The policy with its defaults; DuoAttention with the pattern of the bundled model."""
    return policies.get(name, **({"pattern": str(PATTERN)} if name == "duoattention" else {}))


def budget_of(model: PreTrainedModel, tokens: int, settings: Settings) -> Budget:
    """`tokens` per KV head, or the bytes of a cache without moments that keeps so many."""
    budget = Budget(tokens=tokens, sinks=settings.sinks, recent=settings.recent)
    return budget if settings.equal == "tokens" else equal_bytes(model.config, budget, model.dtype)


def summarise(
    name: tuple[str, str, int], asked: list[Questions], measured: list[Measured], full: list[Measured]
) -> Row:
    """One row from the measurements of a cache and of the full cache, one of each for every task."""
    right = {one.task: got.right.float().mean().item() for one, got in zip(asked, measured)}
    errors = [relative_error(got.attention, exact.attention) for got, exact in zip(measured, full)]
    speed, kept = measured[0].tokens_per_second, measured[0].kept
    assert speed is not None
    policy, prefill, budget = name
    return Row(
        policy=policy,
        prefill=prefill,
        budget=budget,
        kept=float(budget) if kept is None else kept,
        accuracy=sum(right.values()) / len(right),
        accuracy_of=right,
        nbytes=max(got.nbytes for got in measured),
        share=max(got.nbytes for got in measured) / max(exact.nbytes for exact in full),
        tokens_per_second=speed,
        error=sum(errors) / len(errors),
    )


def table_of(rows: list[Row], tasks: tuple[str, ...], *, roomy: bool = True) -> Table:
    """The rows as a table; accuracy over all tasks and for each. It is 80 columns wide unless `roomy`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, int(roomy)), show_edge=False)
    for name in ("policy", "prefill"):
        table.add_column(name, no_wrap=True)
    for name in ("budget", "kept", "right", *tasks, "KiB", "share", "tok/s", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for before, row in zip([rows[0], *rows], rows):
        if (row.policy == "full", row.prefill) != (before.policy == "full", before.prefill):
            table.add_section()
        table.add_row(
            row.policy,
            row.prefill,
            str(row.budget),
            f"{row.kept:.0f}",
            f"{row.accuracy:.0%}",
            *(f"{row.accuracy_of[task]:.0%}" for task in tasks),
            f"{row.nbytes / 2**10:.0f}",
            f"{row.share:.1%}",
            f"{row.tokens_per_second:.0f}",
            f"{row.error:.3f}",
        )
    return table


def explain(settings: Settings) -> str:
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


def write_json(rows: list[Row], settings: Settings) -> None:
    """demo.json: versions, settings and rows."""
    record = {
        "versions": {"fastkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "settings": {**asdict(settings), "out": str(settings.out)},
        "rows": [asdict(row) for row in rows],
    }
    (settings.out / "demo.json").write_text(json.dumps(record, indent=2) + "\n")
