"""The run as data: which checks and timings, in which order, what each waits for, and how long it is predicted to take.

What answers most comes first: a run that is stopped anywhere has measured what mattered most until then. Predictions
are for an H200 with 16 cores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

from .. import engine
from ..engine import Job, Row
from ..environment import source
from ..speed.cases import Case as Whole
from ..speed.cases import toy
from ..speed.worker import measure as measure_model
from . import checks, timings
from .clock import Case
from .heads import GEMMA, LLAMA, Heads
from .place import Place

FILES = ("gpu_checks", "gpu_timings", "gpu_model")
MODEL, BATCHES, CONTEXT, BUDGET = "llama-3.1-8b", (1, 8, 32), 2048, 1024  # end to end
CONTENDERS = {("fastkv", "captured"): 30.0, ("full", "compiled"): 60.0, ("fastkv", "compiled"): 60.0}  # seconds
FASTDMS = "qwen3-8b", 8192, 8  # model, context and sequences that FastDMS reports


@dataclass(frozen=True)
class Task:
    """A check or a timing: the file of its row, the job, predicted seconds, and the checks, by name, that it needs."""

    file: str
    job: Job
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Tasks that belong together: `--only NAME` runs it."""

    name: str
    title: str
    tasks: list[Task] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Predicted."""
        return sum(task.seconds for task in self.tasks)


def sections(place: Place) -> list[Section]:
    """Everything, the most important first."""
    first, *others = checks.KINDS
    device = [device_check(place, LLAMA, name, c) for name in checks.PER_HEADS for c in checks.CORRECTIONS]
    device += [steps_check(place, "llama", first, how) for how in ("captured", "compiled")]
    device += [served_check(place, first)]
    steps = [steps_check(place, family, kind, "captured") for kind in checks.KINDS for family in checks.FAMILIES][1:]
    steps += [steps_check(place, "llama", kind, "compiled") for kind in others]
    steps += [steps_check(place, "gemma-3", first, "compiled")]
    steps += [served_check(place, kind) for kind in others]
    heads = [device_check(place, GEMMA, name, c) for name in checks.PER_HEADS for c in checks.CORRECTIONS]
    kernels = check(place, "kernels", {"op": "kernels"}, checks.check_kernels, 300.0)
    return [
        Section("device", "tickets, graphs, pages, syncs, a captured model", device),
        Section("key", "copy; the default's decode step and its peers", [timed(place, c) for c in timings.key_cases()]),
        Section("model", "steps of an 8B model", [whole(place, case) for case in whole_cases()]),
        Section("prompt", "blocks of prompts, with flash-attn", [timed(place, c) for c in timings.prompt_cases()]),
        Section("kernels", "the kernels' own tests", [kernels]),
        Section("steps", "other models and caches: captured, compiled", steps),
        Section("decode", "other heads, steps and shapes", [*heads, *(timed(place, c) for c in timings.other_cases())]),
    ]


@cache
def code_of(*functions: Callable[..., Any]) -> str:
    """Digest of the library, kernels included, and of the functions that check or time it."""
    return source(texts=tuple(inspect.getsource(function) for function in functions))


def check(place: Place, name: str, case: Row, found: Callable[..., Any], seconds: float, **given: Any) -> Task:
    """A check; a crash is a failed check with its message."""
    run = partial(checks.row_of, lambda: found(place, **given), place)
    return Task("gpu_checks", Job(name, case, run, code_of(found)), seconds)


def device_check(place: Place, heads: Heads, name: str, correction: str) -> Task:
    """Of the decode step, on a device."""
    case = {"op": name, "heads": heads.name, "correction": correction}
    given = {"heads": place.heads(heads), "correction": correction}
    seconds = 20.0 if name == "ticket" else 8.0
    return check(place, f"{name}[{heads.name}-{correction}]", case, checks.PER_HEADS[name], seconds, **given)


def steps_check(place: Place, family: str, kind: checks.Kind, how: str) -> Task:
    """Of whole steps of one model, captured or compiled."""
    name, seconds = f"{how}[{family}-{kind.name}]", 40.0 if how == "compiled" else 10.0
    case = {"op": how, "family": family, "kind": kind.name}
    return check(place, name, case, checks.check_steps, seconds, family=family, kind=kind, how=how)


def served_check(place: Place, kind: checks.Kind) -> Task:
    """Of a layer of a serving engine."""
    case = {"op": "served", "heads": LLAMA.name, "kind": kind.name}
    return check(
        place, f"served[{kind.name}]", case, checks.check_served, 10.0, heads=place.heads(LLAMA), kind=kind
    )  # fmt: skip


def whole_cases() -> list[Whole]:
    """Captured steps first, because a compiler takes its time; every batch of one contender before the next."""
    found = []
    for who, step in CONTENDERS:
        kept: dict[str, Any] = {"policy": "fastkv", "budget": BUDGET} if who == "fastkv" else {}
        how = {"step": step, "device": "cuda", "dtype": "bfloat16", **kept}
        found += [Whole(MODEL, who, CONTEXT, b, **how) for b in BATCHES]
        if step == "captured" or who == "full":
            model, context, batch = FASTDMS
            found.append(Whole(model, who, context, batch, **how))
    return found


def whole(place: Place, case: Whole) -> Task:
    """Steps of a large model, as `perf.speed` measures them: in a process of its own, in a dry run in this one."""

    def run() -> Row:
        if not place.toy:
            return engine.in_process("perf.speed.worker", asdict(case))
        return measure_model(toy(case))

    mine = case.contender == "fastkv"
    needs = [f"{name}[{LLAMA.name}-centroids]" for name in checks.PER_HEADS]
    needs += [f"{case.step}[llama-{checks.KINDS[0].name}]"]
    job = Job(case.name, {"part": "model", **case.as_row()}, run, code_of(measure_model), optional=not mine)
    return Task("gpu_model", job, CONTENDERS[case.contender, case.step], tuple(needs) if mine else ())


def timed(place: Place, case: Case) -> Task:
    """Of one decode step: fastkv's waits for the checks on its heads."""
    needs = [f"{name}[{case.heads.name}-{case.memory}]" for name in checks.PER_HEADS] if case.memory else []
    job = Job(case.name, timings.row_of(case), partial(timings.run, case, place), code_of(case.build), case.peer)
    return Task("gpu_timings", job, case.seconds, tuple(needs))
