"""What was promised of whole models, as data, and how the measured rows answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..tables import Answer, Target
from .results import FIRST, PEAK, STEP, WHOLE, Metric, Pair, Speed, floor_ms, gbps

Measured = Callable[[Speed], Answer | None]


def verdict(found: Iterable[tuple[str, float]], limit: float, upper: bool, unit: str = "x") -> Answer | None:
    """All numbers in words, and whether each keeps the limit; if not, by how much the worst misses it."""
    found = list(found)
    if not found:
        return None
    text = "; ".join(f"{name} {number:.3g}{unit}" for name, number in found)
    worst = max(n for _, n in found) if upper else min(n for _, n in found)
    met = worst <= limit if upper else worst >= limit
    missed = abs(worst - limit) / limit
    return text + ("" if met else f"; missed by {missed:.0%}"), met


def label(pair: Pair) -> str:
    """The cache of fastkv, without its name."""
    return pair.mine["cache"].removeprefix("fastkv ")


def found(speed: Speed, rival: str, metric: Metric, blocks: bool, wanted: dict[str, Any]) -> list[tuple[str, float]]:
    """fastkv's number over the rival's. blocks: only where it reads the prompt in blocks."""
    pairs = speed.pairs(rival, what=metric.what, **wanted)
    return [(label(pair), pair.ratio(metric)) for pair in pairs if pair.mine["block"] or not blocks]


def faster(rival: str, metric: Metric, limit: float, blocks: bool = False, **wanted: Any) -> Measured:
    """fastkv is at least `limit` times faster (or smaller) than the rival."""
    return lambda speed: verdict(
        [(name, 1 / ratio) for name, ratio in found(speed, rival, metric, blocks, wanted)], limit, False
    )


def at_most(rival: str, metric: Metric, limit: float, blocks: bool = False, **wanted: Any) -> Measured:
    """fastkv needs at most `limit` times what the rival needs."""
    return lambda speed: verdict(found(speed, rival, metric, blocks, wanted), limit, True)


def flat(device: str) -> Measured:
    """The largest deviation of a step from the step after the shortest context, which is 4096 tokens."""

    def answer(speed: Speed) -> Answer | None:
        found = []
        for row in speed.all(what="flat", device=device):
            worst = max(row["flat"], key=lambda point: abs(point["over_first"] - 1))
            deviation = worst["over_first"] - 1
            found.append((abs(deviation), f"{row['cache']} {deviation:+.1%} at {worst['seen']}"))
        if not found:
            return None
        return "; ".join(text for _, text in found), max(found)[0] <= 0.03

    return answer


def near_floor(speed: Speed) -> Answer | None:
    """Captured steps over the time to read weights and cache once."""
    parts = [part for part in speed.parts() if part.startswith("gpu_llama_3_1_8b")]
    found = []
    for part in parts:
        rows = speed.all(part=part, what="decode")
        bandwidth = gbps(rows) if rows else 0.0
        for row in rows:
            if row["contender"] == "fastkv" and row["step"] != "eager":
                found.append((row["ms"]["p50"] / floor_ms(row, bandwidth), row))
    if not found:
        return None
    worst, row = max(found, key=lambda one: one[0])
    text = f"worst {worst:.2f}x ({row['cache']}, {row['context']} tokens, batch {row['batch']}; {len(found)} shapes)"
    return text, worst <= 1.25


def at_largest(speed: Speed) -> Answer | None:
    """Steps of fastkv at the largest batch that the full cache fits."""
    largest = speed.all(part="gpu_llama_3_1_8b_largest", contender="full")
    if not largest:
        return None
    full = largest[0]
    same = {"model": full["model"], "context": full["context"], "batch": full["batch"], "contender": "fastkv"}
    rows = [row for row in speed.all(what="decode", **same) if row["step"] != "eager"]
    found = [(f"{row['cache']} at batch {full['batch']}", STEP.read(full) / STEP.read(row)) for row in rows]
    return verdict(found, 7.0, upper=False)


def promised(what: str, wanted: str, answer: Measured) -> Target:
    """A target."""
    return Target(what, wanted, "target", answer)  # type: ignore[arg-type]


LONG = {"context": 16_384, "batch": 4, "budget": 512, "part": "cpu_context"}
GENERATE = {"part": "cpu_generate", "budget": 512}
EIGHT = {"model": "llama-3.1-8b", "context": 32_768, "batch": 8, "budget": 1024}
SPEED_TARGETS = (
    promised(
        "CPU, 16K seen, batch 4, 512 kept: step against the full cache", "≥ 20x", faster("full", STEP, 20, **LONG)
    ),
    promised("CPU, the same: step over kvpress's", "≤ 1x", at_most("kvpress", STEP, 1.0, **LONG)),
    promised(
        "CPU, 8K: first token in blocks over kvpress's",
        "≤ 0.5x",
        at_most("kvpress", FIRST, 0.5, blocks=True, **LONG | {"context": 8192}),
    ),
    # Both read the prompt whole: then the prompt, which takes the same time in both, is most of the call.
    promised("CPU, 8K: generate in blocks against kvpress", "≥ 2x", faster("kvpress", WHOLE, 2, True, **GENERATE)),
    promised(
        "CPU, 8K: peak memory of generate in blocks over kvpress's",
        "≤ 1x",
        at_most("kvpress", PEAK, 1.0, True, **GENERATE),
    ),
    promised("CPU: step from 4K to 128K seen", "± 3 %", flat("cpu")),
    promised(
        "GPU, Llama-3.1-8B, 32K, batch 8, 1024 kept: step against the compiled full cache",
        "≥ 2.6x",
        faster("full", STEP, 2.6, part="gpu_llama_3_1_8b_batch", **EIGHT),
    ),
    promised("GPU, the same at the largest batch the full cache fits", "≥ 7x", at_largest),
    promised("GPU, Llama-3.1-8B: captured step over the byte floor", "≤ 1.25x", near_floor),
    promised(
        "GPU, Llama-3.1-8B, 128K: first token in blocks over the full cache's",
        "≤ 0.8x",
        at_most("full", FIRST, 0.8, blocks=True, part="gpu_llama_3_1_8b_eager", context=131_072),
    ),
    promised("GPU: step from 4K to 128K seen", "± 3 %", flat("cuda")),
)
