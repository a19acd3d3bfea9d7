"""The run as data: which checks and timings, in which order, what each waits for, and how long it is predicted to take.

What answers most comes first: a run that is stopped anywhere has measured what mattered most until then. Predictions
are for an H200 with 16 cores and a filled compile cache; see `calls` for how they add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..engine import Job, Row
from . import checks, checks_device, checks_models, model_steps, timings
from .clock import Case
from .heads import GEMMA, LLAMA, ODD, Heads
from .models import FAMILIES, KINDS, Kind
from .operations import OPERATIONS, code_of, whole
from .place import Place
from .state import Finding

CORES, START, IMPORT = 16, 20.0, 12.0  # processes that compile, seconds until this one begins, and until they do
LIMIT = 150.0  # seconds after which the run does not wait for them
FILES = ("gpu_checks", "gpu_timings", "gpu_model")


@dataclass(frozen=True)
class Task:
    """A check or a timing.

    Attributes:
        file: of its row.  job: measures it.  seconds: predicted, with everything compiled.
        needs: checks, by name, without which it does not begin.
        warm: compiles what it needs, in another process; None if that is nothing.  compiling: seconds that takes.
        group: what is compiled by one process after another.
    """

    file: str
    job: Job
    seconds: float
    needs: tuple[str, ...] = ()
    warm: Callable[[], Any] | None = None
    compiling: float = 0.0
    group: str = ""


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
    bf16, brief = torch.bfloat16, Place(place.device, place.toy, place.interpret, brief=True)
    here = Plan(place, brief)
    first, *others = KINDS
    heads = [here.check(op, h, bf16) for h in (GEMMA, *ODD) for op in checks.CHECKS if applies(op, h)]
    heads += [here.device(name, GEMMA, c) for name in checks_device.PER_HEADS for c in checks_device.CORRECTIONS]
    heads += [here.check(op, LLAMA, torch.float16) for op in checks.CHECKS if op not in checks.CODED]
    steps = [here.steps(family, kind, "captured") for kind in KINDS for family in FAMILIES][1:]
    steps += [here.steps("llama", kind, "compiled") for kind in others] + [here.steps("gemma3", first, "compiled")]
    found = [
        Section("llama", "checks on Llama's heads", [here.check(op, LLAMA, bf16) for op in checks.CHECKS]),
        Section(
            "device",
            "tickets, graphs, syncs, a captured model",
            [here.device(name, LLAMA, c) for name in checks_device.PER_HEADS for c in checks_device.CORRECTIONS]
            + [here.sync(policy) for policy in ("fastkv", "momentkv")]
            + [here.steps("llama", first, how) for how in ("captured", "compiled")],
        ),
        Section("key", "copy; the default's decode step and its peers", here.timed(timings.key_cases())),
        Section("model", "steps of an 8B model", [here.model(case) for case in model_steps.cases()]),
        Section("steps", "other models: captured, compiled", steps),
        Section("kinds", "kinds of caches: kernels beside the reference", [here.kinds(kind) for kind in KINDS]),
        Section("heads", "checks on other heads, and in fp16", heads),
        Section("decode", "other decode steps and peers", here.timed(timings.other_decode_cases())),
    ]
    for part in ("evict", "select", "scores", "prefill"):
        found.append(Section(part, f"timings of {part}", here.timed(timings.other_cases(part))))
    return [*found, Section("flex", "FlexAttention, tuned", here.timed(timings.flex_cases()))]


def applies(op: str, heads: Heads) -> bool:
    """Whether the baseline, which knows powers of two, is asked for these heads; everything else always is."""
    return op != "split_kv_baseline" or heads.head_dim & (heads.head_dim - 1) == 0


@dataclass(frozen=True)
class Plan:
    """Makes tasks for a place; `brief` is that place for processes that only compile."""

    place: Place
    brief: Place

    def task(
        self, name: str, case: Row, check: Callable[[Place], list[Finding]], code: str, seconds: float, compiling: float
    ) -> Task:
        """A check; a crash is a failed check with its message."""
        job = Job(name, case, lambda: checks.row_of(lambda: check(self.place), self.place), code)
        warm = partial(checks.row_of, lambda: check(self.brief), self.brief)
        return Task("gpu_checks", job, seconds, warm=warm, compiling=compiling, group=name)

    def check(self, op: str, heads: Heads, dtype: torch.dtype) -> Task:
        """Of an operation, on heads."""
        kind, function = str(dtype).removeprefix("torch."), checks.CHECKS[op]

        def run(place: Place) -> list[Finding]:
            return function(place, place.heads(heads), place.dtype(dtype))

        case = {"op": op, "heads": heads.name, "dtype": kind}
        code = code_of(op if op in OPERATIONS else "", function)
        if op == "layer_centroids":
            code = whole("fastkv", "auto", function)
        return self.task(f"{op}[{heads.name}-{kind}]", case, run, code, 2.0, 12.0)

    def device(self, name: str, heads: Heads, correction: str) -> Task:
        """Of the decode step, on a device."""
        function = checks_device.PER_HEADS[name]

        def run(place: Place) -> list[Finding]:
            return function(place, place.heads(heads), correction)

        case = {"op": name, "heads": heads.name, "correction": correction}
        code = code_of("decode_centroids" if correction == "centroids" else "decode_step", function)
        seconds = 14.0 if name == "ticket" else 2.0
        return self.task(f"{name}[{heads.name}-{correction}]", case, run, code, seconds, 6.0)

    def sync(self, policy: str) -> Task:
        """Of a patched model."""
        case = {"op": "sync", "policy": policy}
        run = partial(checks_device.check_sync, policy=policy)
        return self.task(f"sync[{policy}]", case, run, whole(policy, "auto", run.func), 4.0, 12.0)

    def steps(self, family: str, kind: Kind, how: str) -> Task:
        """Of whole steps of one model, captured or compiled."""
        case = {"op": how, "family": family, "kind": kind.name}
        run = partial(checks_models.check_steps, family=family, kind=kind, how=how)
        code = whole(kind.policy, kind.correction, run.func)
        seconds, compiling = (12.0, 30.0) if how == "compiled" else (4.0, 12.0)
        return self.task(f"{how}[{family}-{kind.name}]", case, run, code, seconds, compiling)

    def kinds(self, kind: Kind) -> Task:
        """Of a kind of cache."""
        run = partial(checks_models.check_kinds, kind=kind)
        code = whole(kind.policy, kind.correction, run.func)
        return self.task(f"kinds[{kind.name}]", {"op": "kinds", "kind": kind.name}, run, code, 5.0, 12.0)

    def model(self, case: Any) -> Task:
        """Steps of a large model. All cases of one contender share a process that compiles, and its memory."""
        mine = case.contender == "fastkv"
        needs = [f"{op}[{LLAMA.name}-bfloat16]" for op in ("decode_centroids", "layer_centroids")]
        needs += [
            *OPERATIONS["decode_centroids"].checks(LLAMA.name)[1:],
            "sync[fastkv]",
            f"{case.step}[llama-fastkv-auto-uniform]",
        ]
        seconds = model_steps.SECONDS[case.contender, case.step]
        warm = partial(model_steps.step_times, model_steps.sized(case, self.brief), self.brief)
        group = f"model-{case.contender}-{case.step}"
        job = model_steps.job(case, self.place)
        return Task("gpu_model", job, seconds, tuple(needs) if mine else (), warm, 3 * seconds, group)

    def timed(self, cases: Iterable[Case]) -> list[Task]:
        """Of single operations: each waits for the checks of its operation on its heads."""
        return [self.timing(case) for case in cases]

    def timing(self, case: Case) -> Task:
        """Of one operation."""
        job, heads = timings.job(case, self.place), case.heads.name
        needs = OPERATIONS[case.operation].checks(heads) if case.operation else ()
        if case.op == "split-KV Triton":
            needs = (f"split_kv_baseline[{heads}-bfloat16]",)
        warm = partial(timings.warm, case, self.brief) if case.compiling else None
        group = case.name if case.part == "flex" else f"{case.op}[{heads}]"
        return Task("gpu_timings", job, case.seconds, needs, warm, case.compiling, group)


def groups(tasks: Iterable[Task]) -> list[list[Task]]:
    """At most 16 lists of about equal length to compile at the same time; a group stays in one of them.

    Every list is in the order of the plan: what is not done in time is what is needed last.
    """
    wanted = [task for task in tasks if task.warm is not None]
    place = {task.job.name: number for number, task in enumerate(wanted)}
    together: dict[str, list[Task]] = {}
    for task in wanted:
        together.setdefault(task.group, []).append(task)
    lists: list[list[Task]] = [[] for _ in range(min(CORES, len(together)))]
    for some in sorted(together.values(), key=compiling, reverse=True):
        min(lists, key=compiling).extend(some)
    return [sorted(some, key=lambda task: place[task.job.name]) for some in lists]


def compiling(tasks: Sequence[Task]) -> float:
    """Predicted seconds to compile a list in one process; after the first of a group most is there."""
    first = {task.group: task for task in reversed(tasks)}
    return sum(task.compiling if task is first[task.group] else 0.1 * task.compiling for task in tasks)


def warming(tasks: Sequence[Task]) -> float:
    """Predicted seconds until everything that the tasks need is compiled."""
    lists = groups(tasks)
    return min(IMPORT + max(map(compiling, lists)), LIMIT) if lists else 0.0


def calls(tasks: Sequence[Task], minutes: float) -> list[list[Task]]:
    """What each of several calls is predicted to get done; a task that does not fit is left for the next.

    A task that fits into no call has one of its own, so that more calls than minutes allow show that.
    """
    found, waiting = [], list(tasks)
    while waiting:
        left, done = 60 * minutes - START - warming(waiting), []
        for task in waiting:
            if task.seconds <= left:
                left -= task.seconds
                done.append(task)
        found.append(done or waiting[:1])
        names = {task.job.name for task in found[-1]}
        waiting = [task for task in waiting if task.job.name not in names]
    return found
