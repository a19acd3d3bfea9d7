"""Generate far more tokens than the cache holds: do memory, step time and counters stay what they were?

    python -m perf.long_run                                    100,000 tokens, 256 kept per head, one CPU thread
    python -m perf.long_run --tokens 5000 --out long-run       a short one
    python -m perf.long_run --plot-only                        the picture again, from the JSON

The bundled model was trained on 8192 positions, so what it writes beyond them means nothing. What is measured does not
depend on it: the resident set, the time of a step and the counters. Time is CPU time of the one thread, which a busy
machine disturbs least; wall time is recorded beside it. Exits with 1 if a step counts wrong, if memory grows by more
than 2 MiB and a fiftieth of what a full cache would add, or if the last tenth of the forwards takes 15 % longer than
the first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import StoppingCriteria

import fastkv
from fastkv.demo import load
from fastkv.demo.tasks import generate as make_task

from .engine import RESULTS
from .environment import environment

OUT = RESULTS / "long_run"
SLOWER = 1.15  # forwards of the last tenth may take this many times as long as those of the first
SHARE = 0.02  # of what a full cache would grow by, and no less than
SLACK = 2.0  # MiB


@dataclass(frozen=True)
class Settings:
    """What is run: `tokens` generated after `prompt` tokens, `budget` kept per KV head, a sample every `every` tokens,
    `minutes` at most.
    """

    tokens: int = 100_000
    budget: int = 256
    prompt: int = 512
    every: int = 500
    minutes: float | None = None
    policy: str = "momentkv"


@dataclass
class Sample:
    """The state of things after `tokens` generated ones; times are means over the tokens since the sample before.

    Attributes:
        resident: bytes of the process.  cache: bytes of the cache.
        forward: CPU milliseconds of the patched model.  step, wall: CPU and wall milliseconds of a step of `generate`,
            which also copies a growing list of tokens and a growing mask.
    """

    tokens: int
    resident: int
    cache: int
    forward: float
    step: float
    wall: float


def resident_bytes() -> int:
    """Resident set of this process, from /proc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Watch(StoppingCriteria):
    """Sees every step of `generate`; samples some of them, and checks that nothing was miscounted in any.

    Attributes:
        positions: the last that the rotary embedding was asked for.  faults: what was found wrong.
    """

    cache: fastkv.FastKVCache
    settings: Settings
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    position: int = -1
    forwards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bar = self.progress.add_task("tokens", total=self.settings.tokens)
        self.begun, self.cpu, self.wall = time.monotonic(), time.thread_time(), time.perf_counter()

    def attach(self, model: Any) -> list[Any]:
        """Hooks that time forwards and read the positions they are given."""
        return [
            model.register_forward_pre_hook(lambda *_: setattr(self, "entered", time.thread_time())),
            model.register_forward_hook(lambda *_: self.forwards.append(time.thread_time() - self.entered)),
            model.get_decoder().rotary_emb.register_forward_pre_hook(self.read_position, with_kwargs=True),
        ]

    def read_position(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Positions of the new tokens continue where the last ones ended."""
        given: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        expected = torch.arange(self.position + 1, self.position + 1 + given.shape[1])
        if not torch.equal(given.cpu(), expected.expand_as(given)):
            self.faults.append(f"positions {given.tolist()} after {self.position}")
        self.position += given.shape[1]

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """transformers asks after every token whether to stop."""
        self.tokens += 1
        seen = input_ids.shape[1] - 1  # the newest token has not been fed yet
        if seen != self.position + 1 or self.cache.get_seq_length() != seen:
            self.faults.append(f"{seen} tokens, position {self.position}, length {self.cache.get_seq_length()}")
        if self.tokens % self.settings.every == 0:
            self.faults += count_faults(self.cache, seen)
            self.sample()
        late = self.settings.minutes is not None and time.monotonic() - self.begun > 60 * self.settings.minutes
        return torch.full((len(input_ids),), late, dtype=torch.bool)

    def sample(self) -> None:
        """Remember where things stand, and start a new stretch."""
        cpu, wall, every = time.thread_time(), time.perf_counter(), self.settings.every
        self.samples.append(
            Sample(
                tokens=self.tokens,
                resident=resident_bytes(),
                cache=self.cache.nbytes(),
                forward=1e3 * mean(self.forwards[-every:]),
                step=1e3 * (cpu - self.cpu) / every,
                wall=1e3 * (wall - self.wall) / every,
            )
        )
        self.forwards.clear()
        self.progress.update(self.bar, completed=self.tokens)
        self.cpu, self.wall = time.thread_time(), time.perf_counter()


def count_faults(cache: fastkv.FastKVCache, seen: int) -> list[str]:
    """What is wrong with the counters of a cache of one sequence that has seen so many tokens; nothing, one hopes."""
    faults = []
    for index, layer in enumerate(cache.compressed):
        state, config = layer.state, layer.cache.config
        assert state is not None
        count, stored = state.moments.count, state.stored
        if (state.seen.dtype, count.dtype) != (torch.int64, torch.int64):
            faults.append(f"layer {index}: counters are {state.seen.dtype} and {count.dtype}")
        if state.seen.tolist() != [seen]:
            faults.append(f"layer {index}: seen {state.seen.tolist()} of {seen}")
        if not torch.equal(stored + count, torch.full_like(count, seen)):
            faults.append(f"layer {index}: {stored.tolist()} stored and {count.tolist()} evicted of {seen}")
        if state.exact.limit > config.budget.tokens + config.evict_every:
            faults.append(f"layer {index}: {state.exact.limit} slots")
        held = torch.where(state.exact.valid, state.exact["positions"], -1)
        for head, length in zip(held[0], stored[0].tolist()):
            places = head[head >= 0].sort().values
            protected = set(range(config.budget.sinks)) | set(range(seen - config.budget.recent, seen))
            distinct = len(places) == length and bool((places.diff() > 0).all())
            if not distinct or not protected <= set(places.tolist()):
                faults.append(f"layer {index}: positions {places.tolist()} at {seen}")
    return faults


def run(settings: Settings) -> dict[str, Any]:
    """Generate, and return what was measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load()
    fastkv.patch(model, policy=settings.policy, budget=settings.budget)
    text = make_task("facts", length=settings.prompt, seed=0).context
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    cache = fastkv.FastKVCache(model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        watch = Watch(cache, settings, progress)
        hooks = watch.attach(model)
        try:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                do_sample=True,
                max_new_tokens=settings.tokens,
                min_new_tokens=settings.tokens,
                stopping_criteria=[watch],
            )
        finally:
            for hook in hooks:
                hook.remove()
    config = model.config
    pair = 2 * config.head_dim * config.num_key_value_heads * config.num_hidden_layers * model.dtype.itemsize
    facts = {
        "settings": asdict(settings),
        "environment": environment(),
        "prompt": ids.shape[1],
        "tokens": watch.tokens,
        "trained_positions": config.max_position_embeddings,
        "full_cache_bytes_per_token": pair,
        "faults": watch.faults[:20],
        "samples": [asdict(sample) for sample in watch.samples],
    }
    return {**facts, "summary": summarise(watch.samples, pair)}


def summarise(samples: list[Sample], pair: int) -> dict[str, float]:
    """First against last tenth: medians of times in ms, and memory in MiB with what a full cache would have added."""
    tenth = max(len(samples) // 10, 1)
    first, last = samples[:tenth], samples[-tenth:]
    found: dict[str, float] = {}
    for name in ("forward", "step", "wall"):
        before, after = (median(getattr(one, name) for one in part) for part in (first, last))
        found |= {f"{name}_first_ms": before, f"{name}_last_ms": after, f"{name}_ratio": after / before}
    grown = median(one.resident for one in last) - median(one.resident for one in first)
    between = median(one.tokens for one in last) - median(one.tokens for one in first)
    found |= {"resident_growth_mib": grown / 2**20, "full_cache_growth_mib": pair * between / 2**20}
    found["cache_kib"] = last[-1].cache / 2**10
    found["cache_growth_bytes"] = last[-1].cache - first[0].cache
    return found


def failures(facts: dict[str, Any]) -> list[str]:
    """What did not stay flat or did not count, in sentences."""
    summary, found = facts["summary"], list(facts["faults"])
    if summary["cache_growth_bytes"] != 0:
        found.append(f"the cache grew by {summary['cache_growth_bytes']} bytes")
    if summary["resident_growth_mib"] > max(SHARE * summary["full_cache_growth_mib"], SLACK):
        found.append(f"the resident set grew by {summary['resident_growth_mib']:.1f} MiB")
    if summary["forward_ratio"] > SLOWER:
        found.append(f"forwards became {summary['forward_ratio']:.2f} times as slow")
    return found


def write_plot(facts: dict[str, Any], path: Path) -> None:
    """Write a PNG: resident set and time of a step over generated tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples = facts["samples"]
    tokens = [one["tokens"] for one in samples]
    resident = [one["resident"] / 2**20 for one in samples]
    full = [resident[0] + facts["full_cache_bytes_per_token"] * (at - tokens[0]) / 2**20 for at in tokens]
    figure = Figure(figsize=(8, 6.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    memory, speed = figure.subplots(2, 1, sharex=True)
    memory.plot(tokens, full, color="#8d99ae", linestyle="--", label="with the pairs of a full cache, computed")
    memory.plot(tokens, resident, color="#d1495b", linewidth=2, label=f"measured, {facts['settings']['policy']}")
    memory.set_ylabel("resident set, MiB")
    memory.set_ylim(bottom=0)
    for name, colour, label in (
        ("step", "#8d99ae", "step of generate"),
        ("forward", "#d1495b", "forward of the patched model"),
    ):
        speed.plot(tokens, [one[name] for one in samples], color=colour, linewidth=1.5, label=label)
    speed.axvline(facts["trained_positions"], color="#444444", linestyle=":", label="end of the trained positions")
    speed.set_ylabel("CPU time, ms per token")
    speed.set_ylim(bottom=0)
    speed.set_xlabel(f"generated tokens ({facts['settings']['budget']} kept per KV head)")
    for axis in (memory, speed):
        axis.grid(color="#dddddd", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Returns: 1 if something failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.long_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="to generate (default %(default)s)")
    parser.add_argument("--budget", type=int, default=Settings.budget, help="kept per KV head (default %(default)s)")
    parser.add_argument("--every", type=int, default=Settings.every, help="tokens per sample (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after so many (default: never)")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of long_run.json and long_run.png")
    parser.add_argument("--plot-only", action="store_true", help="draw what the JSON has")
    options = vars(parser.parse_args(arguments))
    out, plot_only = options.pop("out"), options.pop("plot_only")
    if plot_only:
        facts = json.loads((out / "long_run.json").read_text())
    else:
        facts = run(Settings(**options))
        out.mkdir(parents=True, exist_ok=True)
        (out / "long_run.json").write_text(json.dumps(facts, indent=1) + "\n")
    write_plot(facts, out / "long_run.png")
    found = failures(facts)
    print(json.dumps({"tokens": facts["tokens"], **facts["summary"]}, indent=1), *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
