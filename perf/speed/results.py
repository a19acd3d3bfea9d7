"""Measured rows of whole models: finding them, pairing fastkv with its rivals, the byte floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..tables import Row, chosen

PREFIX = "speed_"
MEASURED = ("first_s", "generate_s", "tokens_per_s", "peak_bytes", "ms", "flat")  # of which rounds have a median


@dataclass(frozen=True)
class Metric:
    """A number of a row, where less is better: its name in words, which measurements have it, and how it is read."""

    name: str
    what: str
    read: Callable[[Row], float]


STEP = Metric("time per step", "decode", lambda row: row["ms"]["p50"])
FIRST = Metric("time to first token", "decode", lambda row: row["first_s"])
WHOLE = Metric("whole generate", "generate", lambda row: row["generate_s"])
PEAK = Metric("peak memory of generate", "generate", lambda row: row["peak_bytes"])
METRICS = (STEP, FIRST, WHOLE, PEAK)


@dataclass(frozen=True)
class Pair:
    """fastkv beside a rival of the same part, model, context and batch; of the same policy and budget if it has one."""

    mine: Row
    rival: Row

    def ratio(self, metric: Metric) -> float:
        """fastkv's number over the rival's; below 1 is better."""
        return metric.read(self.mine) / metric.read(self.rival)

    @property
    def where(self) -> str:
        """The shape, in words."""
        row = self.mine
        return f"{row['cache']} {row['budget']}, {row['model']}, {row['context']} tokens, batch {row['batch']}"


def medians(rows: list[Row]) -> list[Row]:
    """One row for the rounds of a case: medians of what was measured, and "rounds", how many there were."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["part"], row["id"].removesuffix(f"-round{row.get('round', 1)}")), []).append(row)
    return [
        group[0]
        | {name: median([row[name] for row in group]) for name in MEASURED if name in group[0]}
        | {"rounds": len(group)}
        for group in groups.values()
    ]


def median(values: list[Any]) -> Any:
    """Of numbers, and of those in the same places of dicts and lists."""
    if isinstance(values[0], dict):
        return {key: median([one[key] for one in values]) for key in values[0]}
    return [median([*same]) for same in zip(*values)] if isinstance(values[0], list) else statistics.median(values)


class Speed:
    """All measured rows; one that could not be measured is in `failed`.

    Attributes:
        rows: with "part", the name of their file without prefix; one for all rounds of a case.
        failed: skipped or out of memory.
    """

    def __init__(self, files: dict[str, Row]) -> None:
        named = {name.removeprefix(PREFIX): file for name, file in files.items() if name.startswith(PREFIX)}
        every = [{"part": part, **row} for part, file in named.items() for row in file["rows"]]
        self.failed = [row for row in every if row.get("skipped") or row.get("out_of_memory")]
        failed = set(map(id, self.failed))
        self.rows = medians([row for row in every if id(row) not in failed])

    def parts(self) -> dict[str, list[Row]]:
        """Parts with their rows, in the order of their files."""
        return {part: chosen(self.rows, part=part) for part in dict.fromkeys(row["part"] for row in self.rows)}

    def pairs(self, rival: str, **wanted: Any) -> Iterator[Pair]:
        """Every row of fastkv with these values beside its rival, "full" or "kvpress", where both were measured.

        Eager steps meet eager steps, compiled and captured ones meet compiled ones. kvpress has only eager ones; its
        `generate` meets every other.
        """
        shape = ("part", "model", "context", "batch", "what")
        shape += ("policy", "budget") if rival == "kvpress" else ()
        for mine in chosen(self.rows, contender="fastkv", **wanted):
            eager = mine["step"] == "eager" or (rival == "kvpress" and mine["what"] == "generate")
            same = {key: mine[key] for key in shape}
            for other in chosen(self.rows, contender=rival, step="eager" if eager else "compiled", **same):
                yield Pair(mine, other)


def floor_ms(row: Row, bandwidth: float) -> float:
    """Milliseconds to read the weights and the cache once, at `bandwidth` GB/s."""
    return (row["weight_bytes"] + row["cache_bytes"]) / bandwidth / 1e6
