"""What `fastkv demo` measures: answers of the bundled model with the full cache and with compressed ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .. import Budget, FastKVError, patched
from ..demo import policy_of
from ..demo.measure import Measured, Questions, cache_bytes, measure, relative_error
from . import common
from .equal_bytes import EVICT_EVERY, equal_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One cache. Bytes and kept tokens are per sequence; `prefill` is "whole", "context" or the block length.

    `budget` is what was asked for: tokens per KV head, or a share of the full cache.
    """

    policy: str
    prefill: str
    budget: int | Fraction
    kept: float
    accuracy: float
    accuracy_of: dict[str, float]
    nbytes: int
    share: float
    tokens_per_second: float
    error: float


def size(text: str) -> int | Fraction:
    """A cache's size on a command line: "128" tokens per KV head, or "1/8" of the full cache; ValueError if neither."""
    try:
        number = Fraction(text)
    except ZeroDivisionError as error:
        raise ValueError(f"{text} is no number") from error
    return number.numerator if number.denominator == 1 else number


def tokens_of(asked: int | Fraction, context: int) -> int:
    """A size in tokens per KV head; shares are of a context of so many tokens."""
    if isinstance(asked, int):
        return asked
    if not 0 < asked < 1:
        raise FastKVError(f"budgets must be tokens per KV head or shares of the full cache, got {asked}; try 1/8")
    return int(asked * context)


def budget_of(
    asked: int | Fraction, settings: argparse.Namespace, config: PretrainedConfig, dtype: torch.dtype, whole: int
) -> Budget:
    """A size as a budget. whole: bytes of the full cache, of which a share is taken.

    With settings.equal "bytes" all policies get the bytes that a cache without moments takes for so many tokens.
    """
    budget = Budget(tokens=tokens_of(asked, settings.context), sinks=settings.sinks, recent=settings.recent)
    if settings.equal == "tokens":
        return budget
    if isinstance(asked, int):
        return equal_bytes(config, budget, dtype)
    return replace(budget, tokens=None, bytes=int(whole * asked))


def cached(
    model: PreTrainedModel, policy: str, budget: Budget | None, slots: str, block: int | None = None
) -> AbstractContextManager[PreTrainedModel]:
    """The model with the cache of a policy while the context lasts; with its own if there is no budget.

    Args: slots: how the cache stores keys and values.  block: tokens of a block of the prompt.
    """
    if budget is None:
        return nullcontext(model)
    return patched(model, policy_of(policy), budget, prefill_block=block, evict_every=EVICT_EVERY, slots=slots)


@torch.no_grad()
def full_bytes(model: PreTrainedModel, asked: list[Questions]) -> int:
    """Bytes of the full cache after the longest text, its question and its answer, of which budgets may be shares."""
    one = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    return max(part.prompts.shape[1] + part.answers.shape[1] - 1 for part in asked) * cache_bytes(one)


def caches_of(settings: argparse.Namespace) -> list[tuple[str, str, int | Fraction]]:
    """Every policy, prefill mode and size that are compared."""
    return [
        (policy, prefill, size)
        for prefill in settings.prefill
        for policy in settings.policies
        for size in settings.budgets
        if prefill != "blocks" or not policy_of(policy).rereads
    ]


def check(model: PreTrainedModel, settings: argparse.Namespace, whole: int) -> None:
    """Raise FastKVError now and not after minutes if a cache is refused; a size can be too small for one policy alone.

    whole: as in `budget_of`.
    """
    for policy, prefill, wanted in caches_of(settings):
        budget = budget_of(wanted, settings, model.config, model.dtype, whole)
        with cached(model, policy, budget, settings.slots, settings.blocks if prefill == "blocks" else None):
            common.check_first(policy, model, budget)


def compare(
    model: PreTrainedModel, asked: list[Questions], settings: argparse.Namespace, whole: int, console: Console
) -> Iterator[Row]:
    """The full cache first, then every policy at every budget in each prefill mode.

    whole: as in `budget_of`.
    """
    caches = caches_of(settings)

    def answers(later: bool = False) -> list[Measured]:
        return [measure(model, one, timed=one is asked[0], question_later=later) for one in asked]

    with common.progress(console) as progress:
        bar = progress.add_task("full cache", total=1 + len(caches))
        full = answers(later=settings.prefill[0] == "context")
        yield summarise(("full", "whole", settings.context), asked, full, full)
        progress.advance(bar)
        for policy, prefill, wanted in caches:
            block = settings.blocks if prefill == "blocks" else None
            progress.update(bar, description=f"{policy}, {prefill}, {wanted}")
            budget = budget_of(wanted, settings, model.config, model.dtype, whole)
            with cached(model, policy, budget, settings.slots, block):
                measured = answers(later=prefill == "context")
            yield summarise((policy, str(block or prefill), wanted), asked, measured, full)
            progress.advance(bar)
        progress.update(bar, description="done")


def summarise(
    name: tuple[str, str, int | Fraction], asked: list[Questions], measured: list[Measured], full: list[Measured]
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
    sequences = settings.samples * settings.questions
    return f"""
Texts of {settings.context} tokens, {settings.samples} for each task; questions to each text: {settings.questions}.
  budget   tokens per KV head that a cache without moments keeps, or a share of the full cache;
           all policies get equal {share}
  prefill  the prompt is read whole, or the text before the question is known (context), or in
           blocks of so many tokens; kvzip does without blocks, because it needs the whole
           context before it evicts
  kept     tokens per KV head that this cache keeps
  right    answers that greedy decoding gives exactly
  KiB      cache of one sequence, everything counted; share: of the full cache
  tok/s    decoded, {sequences} sequences together, evictions included
  error    of attention outputs against the full cache: mean |o - full| / |full|
"""
