"""Measure one case in a process of its own, so that peaks of memory are its own: a JSON case in, a JSON row out.

    python -m perf.speed.worker '{"model": "llama-small", "contender": "full", "context": 2048, "batch": 1}'

Runs under the interpreter of the contender: fastkv's, or that of an environment with kvpress, of which the library
only has the clock.
"""

import json
import statistics
import sys
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor

from fastkv.lab.timing import Memory, decode, now, timed

from .cases import Case
from .contenders import CONTENDERS, Generates, build, checksum, prompt, weight_bytes

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


def copy_gbps(device: torch.device) -> float:
    """Bytes read plus bytes written per second of a large copy, the best of seven, in GB/s."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(7):
        start = now()
        target.copy_(source)
        times.append(now() - start)
    return 2 * source.nbytes / min(times) / 1e9


def spread(samples: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p20": tenths[1], "p50": tenths[4], "p80": tenths[7], "mean": statistics.fmean(samples)}


def measure_decode(contender: Generates, ids: Tensor) -> dict[str, Any]:
    """Time to the first token, milliseconds per further step, memory."""
    case = contender.case
    found = timed(contender, ids, case.samples, case.period)
    row = {"first_s": found.first, "ms": spread(found.steps)}
    row |= {"tokens_per_s": case.batch / statistics.median(found.steps) * 1e3}
    return row | {"peak_bytes": found.peak, "cache_bytes": found.resident, "kept": found.kept}


def measure_generate(contender: Generates, ids: Tensor) -> dict[str, Any]:
    """Seconds of a whole `generate`, and its peak of memory."""
    memory = Memory(ids.device)
    start = now()
    out = contender.generate(ids, contender.case.new)
    seconds = now() - start
    assert out.shape[1] == ids.shape[1] + contender.case.new
    made = contender.case.batch * contender.case.new
    return {"generate_s": seconds, "tokens_per_s": made / seconds, "peak_bytes": memory.peak()}


def measure_flat(contender: Generates, ids: Tensor) -> dict[str, Any]:
    """Milliseconds per step after 1/32, 1/16 ... all of the context, sampled in turn, so that drifts hit all alike; and
    "over_first", the median over the turns of a sample over that after the shortest context.
    """
    case = contender.case
    cache: Any = contender.new(ids.shape[1])
    marks = [case.context >> shift for shift in (5, 4, 3, 2, 1, 0)]
    at, copies = 0, []
    for mark in marks:
        token = contender.read(ids[:, at:mark], cache)[:, -1:].argmax(-1)
        at, twin = mark, cache.clone()
        position = torch.full_like(token, mark)
        step = contender.step(twin, case.batch)
        copies.append((step, decode(step, token, position, case.period + 1), position))
    samples: list[list[float]] = [[] for _ in marks]
    for _ in range(case.samples):
        for (step, token, position), mine in zip(copies, samples):
            start = now()
            decode(step, token, position, case.period)
            mine.append((now() - start) / case.period * 1e3)
    ratios = [statistics.median(one / first for one, first in zip(mine, samples[0])) for mine in samples]
    points = zip(marks, samples, ratios)
    return {"flat": [{"seen": mark, "ms": spread(mine), "over_first": ratio} for mark, mine, ratio in points]}


MEASURES = {"decode": measure_decode, "generate": measure_generate, "flat": measure_flat}


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    """The row of a case; {"out_of_memory": True} if it does not fit on the device."""
    device = torch.device(case.device)
    torch.set_num_threads(case.threads)
    model = build(case.model, device, getattr(torch, case.dtype))
    facts = {"checksum": checksum(model, case.model), "weight_bytes": weight_bytes(model)}
    try:
        contender = CONTENDERS[case.contender](model, case)
        ids = prompt(case.model, case.batch, case.context, device)
        warm = min(case.context, case.warm)
        contender.read(ids[:, :warm], contender.new(warm))
        row = MEASURES[case.what](contender, ids)
    except torch.OutOfMemoryError:
        return facts | {"out_of_memory": True}
    packages = ("torch", "transformers", *(["kvpress"] if case.contender == "kvpress" else []))
    return facts | row | {"copy_gbps": copy_gbps(device), "versions": {name: version(name) for name in packages}}


def main(argument: str) -> None:
    transformers.logging.set_verbosity_error()
    print(json.dumps(measure(Case(**json.loads(argument)))))


if __name__ == "__main__":
    main(sys.argv[1])
