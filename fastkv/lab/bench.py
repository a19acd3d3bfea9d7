"""`fastkv bench`: rounds in which every cache has its turn, then a table and bench.json.

Of each cache at each shape: time to the first token, milliseconds per further token, and memory. A sample of decoding
is a whole eviction period, so that every sample pays for its evictions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import policies
from ..api import patched
from ..budget import Budget
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..policies import Policy
from . import common
from .common import FULL
from .equal_bytes import equal_bytes
from .shapes import SHAPES, Compressed, Full, Timed, fitting, timed, warm_up, working_bytes

# One measurement.


@dataclass(frozen=True)
class Settings:
    """What all caches of a run share.

    Attributes:
        block: a compressed cache reads its prompt in blocks of that many tokens; "auto", or None for all at once.
        samples: of decode steps in one measurement.  period: steps of a sample, and between evictions.
        graphs: whether decode steps are CUDA graphs, on both sides.  slots: how compressed caches store pairs.
        heads: how many tokens each keeps, as in `fastkv.Budget`; of random weights none needs more than others.
    """

    block: int | str | None = "auto"
    samples: int = 4
    period: int = EVICT_EVERY
    graphs: bool = False
    slots: str = "auto"
    heads: str = "uniform"

    @property
    def room(self) -> int:
        """Tokens that are decoded after the prompt."""
        return (self.samples + 1) * self.period + 1


@dataclass(frozen=True)
class Case:
    """A cache at a shape: `FULL` and no budget, or a policy and tokens per KV head."""

    policy: str
    budget: int
    context: int
    batch: int

    @property
    def name(self) -> str:
        """Of the cache."""
        return self.policy if self.policy == FULL else f"{self.policy} {self.budget}"


@contextmanager
def contender(model: Any, policy: str | Policy, budget: int, settings: Settings) -> Iterator[Full]:
    """The model with that cache, for the length of a with block. Raises FastKVError if the model is refused."""
    if policy == FULL:
        yield Full(model, "compiled" if settings.graphs else "eager", settings.room)
        return
    static = True if settings.graphs else None
    how = {"prefill_block": settings.block, "evict_every": settings.period, "slots": settings.slots}
    with patched(model, policy, Budget(tokens=budget, heads=settings.heads), static=static, **how):
        yield Compressed(model, "captured" if settings.graphs else "eager")


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on the device; on a CPU those that the system says it can give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


# The command.

SMALL = "llama-small"  # what a CPU measures where nothing else is asked for
DEFAULTS: dict[str, dict[str, tuple[int, ...]]] = {  # by device
    "cpu": {"contexts": (2048, 8192), "budgets": (512,)},
    "cuda": {"contexts": (4096, 16_384), "budgets": (1024,)},
}
USABLE = 0.9  # of the memory that is free
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Row:
    """One cache at one shape, medians over the rounds.

    Attributes:
        case, rounds: what, and how often.  first: seconds to the first token, and their range over the rounds.
        step: milliseconds per token, median, 20th and 80th percentile of all samples.
        tokens_per_second: all sequences together.  speedup: step of the full cache of that shape over this one.
        peak, resident: bytes above the weights, see `Timed`.  warm_up: seconds before the clock ran.
        left_out: why it was not measured, in words.
    """

    case: Case
    rounds: int
    warm_up: float = 0.0
    first: float | None = None
    first_range: tuple[float, float] | None = None
    step: float | None = None
    step_range: tuple[float, float] | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    peak: int | None = None
    resident: int | None = None
    kept: int | None = None
    left_out: str = ""


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Measure, print the table, and write bench.json into `options.out`."""
    began, console = time.monotonic(), console or common.console_of(112)
    device = torch.device(common.default_device())
    options = checked(options, device)
    with console.status("making the model"):
        model, name = load(options, device)
    bench = Bench(model, options, began)
    common.check_length("context and its answer", max(options.contexts) + bench.settings.room, model, name)
    for policy in options.policies:  # what a policy refuses is refused now and not after minutes
        with contender(model, policy, options.budgets[0], bench.settings):
            pass
    common.make_folder(options.out)
    weights = sum(weight.nbytes for weight in model.parameters())
    where = f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    console.print(f"{name} on {where}: weights {weights / GIB:.2f} GiB, {str(model.dtype)[6:]}")
    left = bench.run(console)
    rows = bench.rows()
    console.print(table_of(rows))
    for case, why in bench.refused.items():
        console.print(f"{case.name}, {case.context} tokens, batch {case.batch}, was left out: {why}.")
    block = {"auto": "blocks", None: "one piece"}.get(options.prefill_block, f"blocks of {options.prefill_block}")
    console.print(
        f"\nEach cache in turn, {options.rounds} rounds at most, {bench.settings.samples} samples of "
        f"{bench.settings.period} tokens a round; compilation and warm-up are not timed.\n"
        f"The full cache reads its prompt in one piece, the others in {block}.\n{common.legend(COLUMNS)}\n"
    )
    if left:
        console.print(f"Time was over after {options.minutes:g} min: {left}; --minutes gives more.")
    chosen = ("contexts", "budgets", "batch", "policies", "prefill_block", "slots", "rounds", "minutes", "graphs")
    record = {"versions": common.versions(), "model": name, "device": where, "dtype": str(model.dtype)}
    record |= {"weights": weights, "settings": {one: getattr(options, one) for one in chosen}}
    common.write_json(options.out / "bench.json", {**record, "rows": [asdict(row) for row in rows]})
    console.print(f"{options.out / 'bench.json'} written")
    return rows


def checked(options: argparse.Namespace, device: torch.device) -> argparse.Namespace:
    """The options with all defaults. Raises FastKVError for what is wrong before a model is made."""
    given = {name: value for name, value in vars(options).items() if value is not None or name not in DEFAULTS["cpu"]}
    options = argparse.Namespace(**{**DEFAULTS[device.type], **given})
    if options.model and options.shape:
        raise FastKVError(f"give --model or --shape, got {options.model} and {options.shape}")
    if options.graphs and device.type != "cuda":
        raise FastKVError("--graphs needs a CUDA device, got none; leave it out")
    for policy in options.policies:
        policies.get(policy)
    for tokens in options.budgets:
        Budget(tokens=tokens)
    return options


def load(options: argparse.Namespace, device: torch.device) -> tuple[Any, str]:
    """The model, and what it is called. Raises FastKVError if there is none, or if it does not fit."""
    if options.model:
        return common.load(options.model, str(device), options.dtype or "auto")[0], options.model
    name = options.shape or (SMALL if device.type == "cpu" else "llama-3.1-8b")
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    free = int(USABLE * free_bytes(device))
    shape = fitting(name, free, max(options.contexts) * max(options.batch), dtype)
    whole = SHAPES[name].layers
    cut = (
        "" if shape.layers == whole else f", {shape.layers} of {whole} layers, which is what fits {free / GIB:.1f} GiB"
    )
    return shape.build(device, dtype), f"{name}, random weights{cut}"


class Bench:
    """Measurements as they come in.

    Args: began: by the clock of `time.monotonic`, from which the minutes count.
    Attributes: timed: of each case, one per round.  warm: of each case, seconds before its clock ran.  refused: why a
        case is not measured.
    """

    def __init__(self, model: Any, options: argparse.Namespace, began: float) -> None:
        self.model, self.options = model, options
        heads = "calibrated" if options.model else "uniform"
        self.settings = Settings(options.prefill_block, graphs=options.graphs, slots=options.slots, heads=heads)
        self.end = began + 60 * options.minutes
        self.timed: dict[Case, list[Timed]] = {}
        self.warm: dict[Case, float] = {}
        self.refused: dict[Case, str] = {}
        caches = [(FULL, 0), *product(options.policies, options.budgets)]
        shapes = product(options.contexts, options.batch)
        self.cases = [Case(*cache, context, batch) for context, batch in shapes for cache in caches]
        words = model.config.get_text_config(decoder=True).vocab_size
        most = max(options.batch), max(options.contexts)
        self.ids = torch.randint(3, words, most, generator=torch.Generator().manual_seed(0)).to(model.device)

    def run(self, console: Console) -> str:
        """All rounds, as far as there is time. Returns: what is left, in words."""
        took: dict[Case, float] = {}
        turns = [(turn, case) for turn in range(self.options.rounds) for case in self.cases]
        with common.progress(console) as progress:
            bar = progress.add_task("warming up", total=len(turns))
            for done, (turn, case) in enumerate(turns):
                start = time.monotonic()
                if start + took.get(case, 0) > self.end:
                    return f"{len(turns) - done} of {len(turns)} measurements are left"
                where = f"{case.context} tokens, batch {case.batch}"
                progress.update(bar, description=f"round {turn + 1}, {where}, {case.name}", completed=done)
                if case not in self.refused:
                    self.take(case)
                    took[case] = time.monotonic() - start
            progress.update(bar, description="done", completed=len(turns))
        return ""

    def take(self, case: Case) -> None:
        """One more measurement of a case, or the reason why there is none."""
        why = self.too_large(case)
        if why:
            self.refused[case] = why
            return
        try:
            with contender(self.model, case.policy, case.budget, self.settings) as mine:
                ids = self.ids[: case.batch, : case.context]
                if case not in self.warm:
                    start = time.perf_counter()
                    warm_up(mine, ids[:, : 2 * max(case.budget, 512)])
                    self.warm[case] = time.perf_counter() - start
                found = timed(mine, ids, self.settings.samples, self.settings.period)
                self.timed.setdefault(case, []).append(found)
        except torch.OutOfMemoryError:
            self.refused[case] = "out of memory"
            torch.cuda.empty_cache()

    def too_large(self, case: Case) -> str:
        """Why a full cache is not even tried: a CPU that is out of memory ends the process."""
        if case.policy != FULL:
            return ""
        config, dtype = self.model.config, self.model.dtype
        cache = equal_bytes(config, Budget(tokens=case.context, sinks=0, recent=0), dtype).bytes or 0
        need = case.batch * cache + working_bytes(config, case.batch * case.context, dtype)
        free = free_bytes(self.model.device)
        return "" if need < free else f"needs {need / GIB:.1f} GiB, {free / GIB:.1f} are free"

    def rows(self) -> list[Row]:
        """One for every case."""
        return list(map(self.row, self.cases))

    def row(self, case: Case) -> Row:
        """Medians of a case."""
        timed = self.timed.get(case, [])
        if not timed:
            return Row(case, 0, left_out=self.refused.get(case, "no time left"))
        firsts, steps = [one.first for one in timed], steps_of(timed)
        step, beside = statistics.median(steps), steps_of(self.timed.get(replace(case, policy=FULL, budget=0), []))
        tenths = statistics.quantiles(steps, n=10, method="inclusive")
        return Row(
            case,
            len(timed),
            warm_up=self.warm[case],
            first=statistics.median(firsts),
            first_range=(min(firsts), max(firsts)),
            step=step,
            step_range=(tenths[1], tenths[7]),
            tokens_per_second=1e3 * case.batch / step,
            speedup=statistics.median(beside) / step if beside else None,
            peak=max((one.peak for one in timed if one.peak is not None), default=None),
            resident=timed[-1].resident,
            kept=timed[-1].kept,
        )


def steps_of(timed: Sequence[Timed]) -> list[float]:
    """Milliseconds per token, all samples of all rounds."""
    return [step for one in timed for step in one.steps]


COLUMNS: common.Columns = {
    "kept": ("kept", "{}", "tokens per KV head in the cache after the prompt"),
    "first": ("first s", "{:.2f}", "time to the first token: the whole prompt"),
    "step": ("ms/token", "{:.2f}", "milliseconds per further token of every sequence, evictions included"),
    "spread": ("p20-p80", "{}", "of the samples, each a whole eviction period"),
    "tokens_per_second": ("tok/s", "{:.0f}", "decoded, all sequences together"),
    "speedup": ("vs full", "{:.1f}x", "how many times faster than the full cache a token is decoded"),
    "peak": ("peak", "{:.1f}", "MiB above the weights at the worst moment, prompt included"),
    "resident": ("resident", "{:.1f}", "MiB that the cache holds on to"),
}


def table_of(rows: Sequence[Row]) -> Table:
    """A row for each cache, a section for each shape."""
    table = common.table(("cache",), ("context", "batch", *(title for title, _, _ in COLUMNS.values())))
    for before, row in zip([rows[0], *rows], rows):
        case = row.case
        if (before.case.context, before.case.batch) != (case.context, case.batch):
            table.add_section()
        named = (case.name, str(case.context), str(case.batch))
        if row.left_out:
            table.add_row(*named, *["-"] * len(COLUMNS))
            continue
        numbers: dict[str, Any] = {**vars(row), "spread": "{:.2f}-{:.2f}".format(*(row.step_range or (0, 0)))}
        for name in ("peak", "resident"):
            numbers[name] = None if numbers[name] is None else numbers[name] / MIB
        table.add_row(*named, *common.cells(numbers, COLUMNS))
    return table
