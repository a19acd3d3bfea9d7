"""`fastkv bench`: rounds in which every cache has its turn, then a table, bench.json and bench.png.

Of each cache at each shape: time to the first token, milliseconds per further token, and memory. A sample of decoding
is a whole eviction period, so that every sample pays for its evictions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL = "llama-small"  # what a CPU measures where nothing else is asked for
DEFAULTS: dict[str, dict[str, tuple[int, ...]]] = {  # by device
    "cpu": {"contexts": (2048, 8192), "budgets": (512,)},
    "cuda": {"contexts": (4096, 16_384), "budgets": (1024,)},
}
USABLE = 0.9  # of the memory that is free
MIB, GIB = 2**20, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv bench`."""
    add, option = parser.add_argument, partial(common.option, parser)
    add("--model", metavar="PATH", help=f"{common.MODEL} (default: random weights)")
    known = ", ".join(SHAPES)
    small = f"default: {SMALL} on a CPU, llama-3.1-8b on a GPU"
    add("--shape", metavar="NAME", help=f"random weights in the shape of {known}, as many layers as fit ({small})")
    for name, what in (("context", "tokens of a prompt"), ("budget", "tokens per KV head")):
        cpu, gpu = (",".join(map(str, DEFAULTS[kind][f"{name}s"])) for kind in ("cpu", "cuda"))
        what = f"{what} (default: {cpu} on a CPU, {gpu} on a GPU)"
        add(f"--{name}s", f"--{name}", type=common.listed(int), metavar="N,...", help=what)
    option("--batch", (1,), "sequences")
    option("--policies --policy", ("fastkv", "momentkv", "keydiff"), "policies to compare", "NAME")
    blocks = "tokens of a block in which compressed caches read a prompt, auto, or whole (default: auto)"
    add("--prefill-block", default="auto", metavar="N", help=blocks)
    add("--dtype", choices=tuple(DTYPES), help="of the weights (default: the checkpoint's; float32 on a CPU)")
    add("--graphs", action="store_true", help="decode steps as CUDA graphs, of the full cache, too")
    common.add_slots(parser)
    option("--rounds", 3, "how often every cache is measured")
    option("--minutes", 0.9, "stop after about so many minutes", "M")
    option("--out", Path("fastkv-bench"), "directory to write to", "DIR")


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
    """Measure, print the table, and write bench.json and bench.png into `options.out`."""
    began, console = time.monotonic(), console or common.console_of(112)
    device = torch.device(common.default_device())
    options = checked(options, device)
    with console.status("making the model"):
        model, name = load(options, device)
    common.check_length("context and its answer", max(options.contexts) + options.settings.room, model, name)
    cases = cases_of(options)
    check(model, options)
    common.make_folder(options.out)
    weights = sum(weight.nbytes for weight in model.parameters())
    console.print(f"{name} on {device_name(device)}: weights {weights / GIB:.2f} GiB, {str(model.dtype)[6:]}")
    bench = Bench(model, options, began)
    left = bench.run(cases, console)
    rows = bench.rows(cases)
    console.print(table_of(rows))
    for case, why in bench.refused.items():
        console.print(f"{label(case)}, {case.context} tokens, batch {case.batch}, was left out: {why}.")
    console.print(explain(options))
    if left:
        console.print(f"Time was over after {options.minutes:g} min: {left}; --minutes gives more.")
    chosen = ("contexts", "budgets", "batch", "policies", "prefill_block", "slots", "rounds", "minutes", "graphs")
    record = {"versions": common.versions(), "model": name, "device": device_name(device), "dtype": str(model.dtype)}
    record |= {"weights": weights, "settings": {one: getattr(options, one) for one in chosen}}
    common.write_json(options.out / "bench.json", {**record, "rows": [asdict(row) for row in rows]})
    write_plot(rows, options.out / "bench.png", name)
    console.print(f"{options.out / 'bench.png'} and {options.out / 'bench.json'} written")
    return rows


def checked(options: argparse.Namespace, device: torch.device) -> argparse.Namespace:
    """The options with all defaults, and `settings`. Raises FastKVError for what is wrong before a model is made."""
    options = argparse.Namespace(**vars(options))
    if options.model and options.shape:
        raise FastKVError(f"give --model or --shape, got {options.model} and {options.shape}")
    for name, values in DEFAULTS[device.type].items():
        if getattr(options, name) is None:
            setattr(options, name, values)
    for name in ("contexts", "budgets", "batch", "policies"):
        common.check_some(name, getattr(options, name))
    for name, least in (("contexts", 2), ("batch", 1)):
        if min(getattr(options, name)) < least:
            raise FastKVError(f"{name} must be at least {least}, got {min(getattr(options, name))}")
    if options.rounds < 1 or not options.minutes > 0:
        raise FastKVError(f"rounds and minutes must be positive, got {options.rounds} and {options.minutes:g}")
    for policy in options.policies:
        policies.get(policy)
    for tokens in options.budgets:
        Budget(tokens=tokens)
    if options.graphs and device.type != "cuda":
        raise FastKVError("--graphs needs a CUDA device, got none; leave it out")
    heads = "calibrated" if options.model else "uniform"
    options.settings = Settings(
        block_of(options.prefill_block), graphs=options.graphs, slots=options.slots, heads=heads
    )
    return options


def block_of(text: str) -> int | str | None:
    """What --prefill-block says, as `fastkv.patch` takes it."""
    if text in ("auto", "whole"):
        return "auto" if text == "auto" else None
    if not text.isdecimal() or int(text) < 1:
        raise FastKVError(f"prefill-block must be auto, whole or a number of tokens, got {text!r}")
    return int(text)


def load(options: argparse.Namespace, device: torch.device) -> tuple[Any, str]:
    """The model, and what it is called. Raises FastKVError if there is none, or if it does not fit."""
    if options.model:
        return common.load(options.model, str(device), DTYPES.get(options.dtype, "auto"))[0], options.model
    name = options.shape or (SMALL if device.type == "cpu" else "llama-3.1-8b")
    dtype = DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    free = int(USABLE * free_bytes(device))
    shape = fitting(name, free, max(options.contexts) * max(options.batch), dtype)
    whole = SHAPES[name].layers
    cut = (
        "" if shape.layers == whole else f", {shape.layers} of {whole} layers, which is what fits {free / GIB:.1f} GiB"
    )
    return shape.build(device, dtype), f"{name}, random weights{cut}"


def device_name(device: torch.device) -> str:
    """In words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Every shape, the full cache first."""
    caches = [(FULL, 0), *product(options.policies, options.budgets)]
    shapes = product(options.contexts, options.batch)
    return [Case(*cache, context, batch) for context, batch in shapes for cache in caches]


def check(model: Any, options: argparse.Namespace) -> None:
    """Raise FastKVError now and not after minutes if a policy refuses the model."""
    for name in options.policies:
        with contender(model, name, options.budgets[0], options.settings):
            pass


class Bench:
    """Measurements as they come in.

    Args: began: by the clock of `time.monotonic`, from which the minutes count.
    Attributes: timed: of each case, one per round.  warm: of each case, seconds before its clock ran.  refused: why a
        case is not measured.
    """

    def __init__(self, model: Any, options: argparse.Namespace, began: float) -> None:
        self.model, self.options, self.settings = model, options, options.settings
        self.end = began + 60 * options.minutes
        self.timed: dict[Case, list[Timed]] = {}
        self.warm: dict[Case, float] = {}
        self.refused: dict[Case, str] = {}
        words = model.config.get_text_config(decoder=True).vocab_size
        most = max(options.batch), max(options.contexts)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, words, most, generator=generator).to(model.device)

    def run(self, cases: list[Case], console: Console) -> str:
        """All rounds, as far as there is time. Returns: what is left, in words."""
        took: dict[Case, float] = {}
        turns = [(turn, case) for turn in range(self.options.rounds) for case in cases]
        with common.progress(console) as progress:
            bar = progress.add_task("warming up", total=len(turns))
            for done, (turn, case) in enumerate(turns):
                start = time.monotonic()
                if start + took.get(case, 0) > self.end:
                    left = len(turns) - done
                    return f"{left} of {len(turns)} measurements are left"
                where = f"{case.context} tokens, batch {case.batch}"
                progress.update(bar, description=f"round {turn + 1}, {where}, {case.policy} {case.budget or ''}")
                if case not in self.refused:
                    self.take(case)
                    took[case] = time.monotonic() - start
                progress.advance(bar)
            progress.update(bar, description="done")
        return ""

    def take(self, case: Case) -> None:
        """One more measurement of a case, or the reason why there is none."""
        why = self.too_large(case)
        if why:
            self.refused[case] = why
            return
        try:
            with contender(self.model, case.policy, case.budget, self.settings) as mine:
                if case not in self.warm:
                    start = time.perf_counter()
                    warm_up(mine, self.prompt(case)[:, : 2 * max(case.budget, 512)])
                    self.warm[case] = time.perf_counter() - start
                found = timed(mine, self.prompt(case), self.settings.samples, self.settings.period)
                self.timed.setdefault(case, []).append(found)
        except torch.OutOfMemoryError:
            self.refused[case] = "out of memory"
            torch.cuda.empty_cache()

    def prompt(self, case: Case) -> Tensor:
        """Its tokens [B, N]."""
        return self.ids[: case.batch, : case.context]

    def too_large(self, case: Case) -> str:
        """Why a full cache is not even tried: a CPU that is out of memory ends the process."""
        if case.policy != FULL:
            return ""
        config, dtype = self.model.config, self.model.dtype
        cache = equal_bytes(config, Budget(tokens=case.context, sinks=0, recent=0), dtype).bytes or 0
        need = case.batch * cache + working_bytes(config, case.batch * case.context, dtype)
        free = free_bytes(self.model.device)
        return "" if need < free else f"needs {need / GIB:.1f} GiB, {free / GIB:.1f} are free"

    def rows(self, cases: Sequence[Case]) -> list[Row]:
        """One for every case."""
        return list(self._rows(cases))

    def _rows(self, cases: Sequence[Case]) -> Iterator[Row]:
        full = {(case.context, case.batch): steps_of(self.timed.get(case, [])) for case in cases if case.policy == FULL}
        for case in cases:
            timed = self.timed.get(case, [])
            if not timed:
                yield Row(case, 0, left_out=self.refused.get(case, "no time left"))
                continue
            firsts, steps = [one.first for one in timed], steps_of(timed)
            step, beside = statistics.median(steps), full[case.context, case.batch]
            peaks = [one.peak for one in timed if one.peak is not None]
            tenths = statistics.quantiles(steps, n=10, method="inclusive")
            yield Row(
                case,
                len(timed),
                warm_up=self.warm[case],
                first=statistics.median(firsts),
                first_range=(min(firsts), max(firsts)),
                step=step,
                step_range=(tenths[1], tenths[7]),
                tokens_per_second=1e3 * case.batch / step,
                speedup=statistics.median(beside) / step if beside else None,
                peak=max(peaks, default=None),
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
        named = (label(case), str(case.context), str(case.batch))
        if row.left_out:
            table.add_row(*named, *["-"] * len(COLUMNS))
            continue
        numbers: dict[str, Any] = {**vars(row), "spread": "{:.2f}-{:.2f}".format(*(row.step_range or (0, 0)))}
        for name in ("peak", "resident"):
            numbers[name] = None if numbers[name] is None else numbers[name] / MIB
        table.add_row(*named, *common.cells(numbers, COLUMNS))
    return table


def label(case: Case) -> str:
    """A cache, in a word."""
    return case.policy if case.policy == FULL else f"{case.policy} {case.budget}"


def explain(options: argparse.Namespace) -> str:
    """What the columns are."""
    settings = options.settings
    block = {"auto": "blocks", None: "one piece"}.get(settings.block, f"blocks of {settings.block}")
    return f"""
Each cache in turn, {options.rounds} rounds at most, {settings.samples} samples of {settings.period} tokens a round; \
compilation and warm-up are not timed.
The full cache reads its prompt in one piece, the others in {block}.
{common.legend(COLUMNS)}
"""


METRICS = (
    ("first", "to the first token, s", 1.0),
    ("step", "per further token, ms", 1.0),
    ("peak", "peak above the weights, MiB", MIB),
)


def write_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: time to the first token, time per token and peak memory over the context, a row for each batch."""
    batches = list(dict.fromkeys(row.case.batch for row in rows))
    labels = list(dict.fromkeys(label(row.case) for row in rows))
    contexts = sorted({row.case.context for row in rows})
    figure = common.figure(13, 3.6 * len(batches) + 0.9)
    axes = figure.subplots(len(batches), len(METRICS), squeeze=False)
    for panels, batch in zip(axes, batches):
        for axis, (metric, name, unit) in zip(panels, METRICS):
            for index, one in enumerate(labels):
                mine = [row for row in rows if (label(row.case), row.case.batch) == (one, batch)]
                points = {row.case.context: getattr(row, metric) for row in mine}
                known = {x: y / unit for x, y in points.items() if y is not None}
                style = {**common.DASHED, "marker": "o"} if one == FULL else common.style(index - 1)
                axis.plot(known.keys(), known.values(), label=one, **style)
            common.ticks(axis, contexts, base=2)
            common.from_zero(axis)
            axis.set_xlabel("context, tokens")
            common.finish(axis, f"{name}, batch {batch}")
    common.save(figure, path, title, legend_of=axes[0][0], columns=6)
