"""The run as data: which checks and timings, in which order, what each waits for, and how long it is predicted to take.

What answers most comes first: a run that is stopped anywhere has measured what mattered most until then. Predictions
are for an H200 with 16 cores.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from .. import engine
from ..engine import Job, Row, source
from ..micro.states import GEMMA, LLAMA, Heads
from ..speed.cases import Case as Whole
from ..speed.cases import toy
from ..speed.worker import measure as measure_model
from . import checks, timings
from .clock import Case
from .place import Place

FILES = ("gpu_checks", "gpu_timings", "gpu_model")
MODEL, BATCHES, CONTEXT, BUDGET = "llama-3.1-8b", (1, 8, 32), 2048, 1024  # end to end
CONTENDERS = {("fastkv", "captured"): 30.0, ("full", "compiled"): 60.0, ("fastkv", "compiled"): 60.0}  # seconds
FASTDMS = "qwen3-8b", 8192, 8  # model, context and sequences that FastDMS reports


def planned(place: Place) -> dict[str, list[Job]]:
    """Everything, by section, the most important first."""
    timed = {name: [timing(place, case) for case in cases] for name, cases in timings.cases().items()}
    steps = partial(of_steps, place)
    first, *others = checks.KINDS
    once = [steps("llama", first, how) for how in ("captured", "generated", "compiled")]
    captured = [steps(family, kind, "captured") for kind in checks.KINDS for family in checks.FAMILIES]
    failed = check(place, "failed capture", {"op": "failed capture"}, checks.check_failed_capture, 10.0)
    compiled = [*(steps("llama", kind, "compiled") for kind in others), steps("gemma-3", first, "compiled")]
    return {
        "device": [*of_heads(place, LLAMA), *once, failed],
        "key": timed["key"],
        "model": [*wholes(place)],
        "prompt": timed["prompt"],
        "kernels": [check(place, "kernels", {"op": "kernels"}, checks.check_kernels, 300.0)],
        "steps": [*captured[1:], *compiled],
        "decode": [*of_heads(place, GEMMA), *timed["decode"]],
    }


def code_of(function: Callable[..., Any]) -> str:
    """Digest of the library, kernels included, and of the function that checks or times it."""
    return source(texts=(inspect.getsource(getattr(function, "func", function)),))  # of a partial one


def check(place: Place, name: str, case: Row, found: Callable[..., Any], seconds: float, **given: Any) -> Job:
    """A check; a crash is a failed check with its message."""
    run = partial(checks.row_of, partial(found, place, **given), place)
    return Job(name, case, run, code_of(found), seconds=seconds, file="gpu_checks")


def of_heads(place: Place, heads: Heads) -> Iterator[Job]:
    """Of the decode step, on a device."""
    for name, correction in product(checks.PER_HEADS, checks.CORRECTIONS):
        case, seconds = {"op": name, "heads": heads.name, "correction": correction}, 20.0 if name == "ticket" else 8.0
        given = {"heads": place.heads(heads), "correction": correction}
        yield check(place, f"{name}[{heads.name}-{correction}]", case, checks.PER_HEADS[name], seconds, **given)


def of_steps(place: Place, family: str, kind: tuple[str, str, str], how: str) -> Job:
    """Of whole steps of one model, captured or compiled."""
    case, seconds = {"op": how, "family": family, "kind": "-".join(kind)}, 40.0 if how == "compiled" else 10.0
    given = {"family": family, "kind": kind, "how": how}
    return check(place, f"{how}[{family}-{case['kind']}]", case, checks.check_steps, seconds, **given)


def wholes(place: Place) -> Iterator[Job]:
    """Steps of large models, as `perf.speed` measures them: in a process of its own, in a dry run in this one.

    Captured steps first, because a compiler takes its time; every batch of one contender before the next.
    """

    def run(case: Whole) -> Row:
        return measure_model(toy(case)) if place.toy else engine.in_process("perf.speed.worker", asdict(case))

    shapes = [FASTDMS, *((MODEL, CONTEXT, batch) for batch in BATCHES)]
    for ((who, step), seconds), (model, context, batch) in product(CONTENDERS.items(), shapes):
        kept: dict[str, Any] = {"policy": "fastkv", "budget": BUDGET} if who == "fastkv" else {}
        case = Whole(model, who, context, batch, step=step, device="cuda", dtype="bfloat16", **kept)
        needs = [f"{name}[{LLAMA.name}-centroids]" for name in checks.PER_HEADS] if kept else []
        needs += [f"{step}[llama-{'-'.join(checks.KINDS[0])}]"] if kept else []
        told = {"optional": not kept, "needs": tuple(needs), "seconds": seconds, "file": "gpu_model"}
        yield Job(case.name, {"part": "model", **case.as_row()}, partial(run, case), code_of(measure_model), **told)


def timing(place: Place, case: Case) -> Job:
    """Of one decode step: fastkv's waits for the checks on its heads."""
    needs = [f"{name}[{case.heads.name}-{case.memory}]" for name in checks.PER_HEADS] if case.memory else []
    told = {"optional": not case.memory, "needs": tuple(needs), "seconds": case.seconds, "file": "gpu_timings"}
    row = {"part": case.part, "op": case.op, "heads": case.heads.name, "batch": case.batch, "length": case.length}
    row |= {"head_dim": case.heads.head_dim}
    return Job(case.name, row, partial(timings.run, case, place), code_of(case.build), **told)
