"""End to end: decode steps of a model with the shape of Llama-3.1-8B and random weights, in bf16, prompt included.

Measured as `perf.speed` does it, in this process: the full cache compiled, fastkv's default policy captured and
compiled, beside each other at several batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import fastkv

from ..engine import Job, Row, Unmeasured
from ..speed import models
from ..speed.cases import Case
from ..speed.contenders import CONTENDERS
from ..speed.worker import measure_decode
from .checks import CRASHES, still_there
from .operations import whole
from .place import Place, forget_compiled

MODEL, BATCHES = "llama-3.1-8b", (1, 8, 32)
CONTEXT, BUDGET = 2048, 1024
POLICY = "fastkv"
SECONDS = {("fastkv", "captured"): 10.0, ("full", "compiled"): 25.0, ("fastkv", "compiled"): 30.0}  # predicted


def cases() -> list[Case]:
    """Captured steps first, because a compiler takes its time; every batch of one contender before the next."""
    found = []
    for who, step in SECONDS:
        kept: dict[str, Any] = {"policy": POLICY, "budget": BUDGET} if who == "fastkv" else {}
        found += [Case(MODEL, who, CONTEXT, b, step=step, device="cuda", dtype="bfloat16", **kept) for b in BATCHES]
    return found


def sized(case: Case, place: Place) -> Case:
    """The case, or in a dry run a tiny one in its place; where kernels are only compiled, with few samples."""
    samples = 2 if place.toy or place.brief else case.samples
    if not place.toy:
        return replace(case, samples=samples)
    budget = min(case.budget, 40)
    return replace(case, model="llama-toy", context=64, batch=min(case.batch, 2), budget=budget, period=4, samples=2)


@cache
def model_of(name: str, place: Place) -> Any:
    """The model, once for all cases."""
    return models.build(name, place.device, torch.bfloat16)


@torch.no_grad()
def step_times(case: Case, place: Place) -> Row:
    """Time to the first token, milliseconds of a step with its evictions, bytes."""
    forget_compiled()
    model = model_of(case.model, place)
    torch.manual_seed(0)
    with place.stance:
        try:
            found = measure_decode(
                CONTENDERS[case.contender](model, case),
                models.prompt(case.model, case.batch, case.context, place.device),
            )
        finally:
            if case.contender == "fastkv":
                fastkv.unpatch(model)
            place.cuda.empty_cache()
    return found | {"weight_bytes": models.weight_bytes(model)}


def job(case: Case, place: Place) -> Job:
    """A case as a job."""

    def run() -> Row:
        try:
            return step_times(sized(case, place), place)
        except CRASHES as reason:
            still_there(place, reason)
            raise Unmeasured(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}") from reason

    code = whole(POLICY, "auto", measure_decode) if case.contender == "fastkv" else ""
    return Job(case.name, {"part": "model", **case.as_row()}, run, code, optional=case.contender != "fastkv")
