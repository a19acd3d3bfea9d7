"""`fastkv bench`: rounds in which every cache has its turn, then a table and bench.json.

Of each cache, context and batch: time to the first token, milliseconds per further token, and memory. A sample of
decoding is a whole eviction period, so that every sample pays for its evictions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from rich.console import Console

from ..config import EVICT_EVERY
from ..errors import FastKVError, out_of_memory
from . import common
from .common import FULL
from .timing import Compressed, Full, Timed, timed

SAMPLES = 4  # of decode steps in one measurement, each of `EVICT_EVERY` steps
ROOM = (SAMPLES + 1) * EVICT_EVERY + 1  # tokens that are decoded after a prompt
WARM = 1024  # tokens of the prompt that is read before the clock starts, at most


@dataclass
class Case:
    """A cache that reads prompts of `context` tokens, `batch` of them at once.

    Attributes: found: one measurement a round.  left_out: why there are no more.  took: seconds of the last one.
    """

    cache: common.Cache
    context: int
    batch: int
    found: list[Timed] = field(default_factory=list)
    left_out: str = ""
    took: float = 0.0


@torch.no_grad()
def measured(model: Any, cache: common.Cache, ids: torch.Tensor, graphs: bool, warm: bool) -> Timed:
    """Time a cache once on prompts [B, N]; warm: whether kernels were compiled by an earlier call."""
    kind, step = (Full, "compiled") if cache.policy == FULL else (Compressed, "captured")
    with cache.of(model):
        mine = kind(model, step if graphs else "eager", ROOM)
        if not warm:  # kernels are compiled and chosen before a clock runs
            first = mine.new(WARM)
            mine.read(ids[:, :WARM], first)
            mine.read(ids[:, :1], first)
        return timed(mine, ids, SAMPLES, EVICT_EVERY)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print the table, and write bench.json into `options.out`. Returns: its rows, see `COLUMNS`."""
    began, console = time.monotonic(), common.console_of(112)
    if options.graphs and not torch.cuda.is_available():
        raise FastKVError("--graphs needs a CUDA device, got none; leave it out")
    caches = common.caches_of(options, static=True if options.graphs else None)
    with console.status("loading the model"):
        model, _ = common.load(options.model)
    common.check_length("context and its answer", max(options.contexts) + ROOM, model, options.model)
    for cache in caches:  # what a policy refuses is refused now and not after minutes
        with cache.of(model):
            common.check_first(model)
    common.make_folder(options.out)
    threads, weights = torch.get_num_threads(), sum(weight.nbytes for weight in model.parameters())
    where = f"CPU, {threads} threads" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    console.print(f"{options.model} on {where}: weights {weights / 2**30:.2f} GiB, {str(model.dtype)[6:]}")
    cases = [Case(one, *size) for size in product(options.contexts, options.batch) for one in caches]
    left = rounds(model, cases, options, began + 60 * options.minutes, console)
    rows = rows_of(cases)
    chosen = "contexts budgets batch policies prefill_block slots rounds minutes graphs".split()
    record = {"versions": common.versions(), "model": options.model, "device": where, "dtype": str(model.dtype)}
    record |= {"weights": weights, "settings": {one: getattr(options, one) for one in chosen}, "rows": rows}
    common.write_json(options.out / "bench.json", record)
    common.show(console, common.table_of(rows, ("cache", "context", "batch"), COLUMNS, ("context", "batch")))
    for case in cases:
        if case.left_out:
            why = f"was left out: {case.left_out}"
            console.print(f"{case.cache.name}, {case.context} tokens, batch {case.batch}, {why}.")
    block = {"auto": "blocks", None: "one piece"}.get(options.prefill_block, f"blocks of {options.prefill_block}")
    console.print(
        f"\nEach cache in turn, {options.rounds} rounds at most, {SAMPLES} samples of {EVICT_EVERY} tokens a round; "
        "compilation and warm-up are not timed.\n"
        f"The full cache reads its prompt in one piece, the others in {block}.\n{common.legend(COLUMNS)}\n"
    )
    if left:
        console.print(f"Time was over after {options.minutes:g} min: {left}; --minutes gives more.")
    console.print(f"{options.out / 'bench.json'} written")
    return rows


def rounds(model: Any, cases: Sequence[Case], options: argparse.Namespace, end: float, console: Console) -> str:
    """Measure each case `options.rounds` times, all of a round before the next, until the `end`, as `time.monotonic`
    counts. Returns: what is left, in words.
    """
    most = max(options.batch), max(options.contexts)
    words = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, words, most, generator=torch.Generator().manual_seed(0)).to(model.device)
    turns = list(product(range(1, options.rounds + 1), cases))
    with common.progress(console) as progress:
        bar = progress.add_task("", total=len(turns))
        for done, (turn, case) in enumerate(turns):
            start = time.monotonic()
            if start + case.took > end:
                return f"{len(turns) - done} of {len(turns)} measurements are left"
            where = f"round {turn}, {case.context} tokens, batch {case.batch}, {case.cache.name}"
            progress.update(bar, description=where, completed=done)
            if case.left_out:
                continue
            try:
                here = ids[: case.batch, : case.context]
                case.found.append(measured(model, case.cache, here, options.graphs, warm=bool(case.found)))
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                case.left_out = "out of memory"
                torch.cuda.empty_cache()
            case.took = time.monotonic() - start
        progress.update(bar, description="done", completed=len(turns))
    return ""


def rows_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each case: medians over its rounds, and ranges over them or over all samples; or why there is none."""
    rows, full = [], None
    for case in cases:
        cache, found = case.cache, case.found
        named: dict[str, Any] = {"cache": cache.name, "policy": cache.policy, "budget": cache.budget}
        named |= {"context": case.context, "batch": case.batch, "rounds": len(found)}
        steps = [step for one in found for step in one.steps]
        step = statistics.median(steps) if steps else None
        full = step if cache.policy == FULL else full
        if step is None:
            rows.append({**named, **dict.fromkeys(COLUMNS), "left_out": case.left_out or "no time left"})
            continue
        firsts, tenths = [one.first for one in found], statistics.quantiles(steps, n=10, method="inclusive")
        peaks = [one.peak for one in found if one.peak is not None]
        named |= {"first": statistics.median(firsts), "first_range": (min(firsts), max(firsts)), "step": step}
        named |= {"step_range": (tenths[1], tenths[7]), "tokens_per_second": 1e3 * case.batch / step}
        named |= {"speedup": full and full / step, "peak": max(peaks, default=None)}
        rows.append({**named, "resident": found[-1].resident, "kept": found[-1].kept})
    return rows


COLUMNS: common.Columns = {
    "kept": ("kept", "{}", "tokens per KV head in the cache after the prompt, mean"),
    "first": ("first s", "{:.2f}", "time to the first token: the whole prompt"),
    "step": ("ms/token", "{:.2f}", "milliseconds per further token of every sequence, evictions included"),
    "step_range": ("p20-p80", "{0[0]:.1f}-{0[1]:.1f}", "of the samples, each a whole eviction period"),
    "tokens_per_second": ("tok/s", "{:.0f}", "decoded, all sequences together"),
    "speedup": ("vs full", "{:.1f}x", "how many times faster than the full cache a token is decoded"),
    "peak": ("peak", common.mebibytes, "MiB above the weights at the worst moment, prompt included"),
    "resident": ("resident", common.mebibytes, "MiB that the cache holds on to"),
}
