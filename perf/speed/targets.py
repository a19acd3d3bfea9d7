"""What was promised of whole models, as data, and how the measured rows answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..tables import Answer, Target
from .results import FIRST, PEAK, STEP, WHOLE, Metric, Pair, Speed

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


def flat(speed: Speed) -> Answer | None:
    """The largest deviation of a step from the step after the shortest context, which is 4096 tokens."""
    found = []
    for row in speed.all(what="flat"):
        worst = max(row["flat"], key=lambda point: abs(point["over_first"] - 1))
        deviation = worst["over_first"] - 1
        found.append((abs(deviation), f"{row['cache']} {deviation:+.1%} at {worst['seen']}"))
    if not found:
        return None
    return "; ".join(text for _, text in found), max(found)[0] <= 0.03


LONG = {"context": 16_384, "batch": 4, "budget": 512, "part": "cpu_context"}
GENERATE = {"part": "cpu_generate", "budget": 512}
SPEED_TARGETS = (
    Target(
        "16K seen, batch 4, 512 kept: step against the full cache", "≥ 20x", "target", faster("full", STEP, 20, **LONG)
    ),
    Target("the same: step over kvpress's", "≤ 1x", "target", at_most("kvpress", STEP, 1.0, **LONG)),
    Target(
        "8K: first token in blocks over kvpress's",
        "≤ 0.5x",
        "target",
        at_most("kvpress", FIRST, 0.5, blocks=True, **LONG | {"context": 8192}),
    ),
    # Both read the prompt whole: then the prompt, which takes the same time in both, is most of the call.
    Target("8K: generate in blocks against kvpress", "≥ 2x", "target", faster("kvpress", WHOLE, 2, True, **GENERATE)),
    Target(
        "8K: peak memory of generate in blocks over kvpress's",
        "≤ 1x",
        "target",
        at_most("kvpress", PEAK, 1.0, True, **GENERATE),
    ),
    Target("step from 4K to 128K seen", "± 3 %", "target", flat),
)
