"""Measured rows of whole models: finding them, pairing fastkv with its rivals, the byte floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PREFIX = "speed_"


@dataclass(frozen=True)
class Metric:
    """A number of a row, where less is better.

    Attributes:
        name: in words.  what: which measurements have it.  read: takes it from a row.
    """

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
    return [_median(group) for group in groups.values()]


def _median(rows: list[Row]) -> Row:
    one = dict(rows[0])
    for name in ("first_s", "generate_s", "tokens_per_s", "peak_bytes"):
        if name in one:
            one[name] = statistics.median(row[name] for row in rows)
    if "ms" in one:
        one["ms"] = _spread([row["ms"] for row in rows])
    if "flat" in one:
        one["flat"] = [
            {
                "seen": same[0]["seen"],
                "ms": _spread([point["ms"] for point in same]),
                "over_first": statistics.median(point["over_first"] for point in same),
            }
            for same in zip(*(row["flat"] for row in rows))
        ]
    return one | {"rounds": len(rows)}


def _spread(times: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(time[key] for time in times) for key in times[0]}


class Speed:
    """All measured rows; one that could not be measured is in `failed`.

    Attributes:
        rows: with "part", the name of their file without prefix; one for all rounds of a case.
        failed: skipped or out of memory.
    """

    def __init__(self, files: dict[str, Row]) -> None:
        every = [
            {"part": name.removeprefix(PREFIX), **row}
            for name, file in files.items()
            if name.startswith(PREFIX)
            for row in file["rows"]
        ]
        self.rows = medians([row for row in every if not row.get("skipped") and not row.get("out_of_memory")])
        self.failed = [row for row in every if row.get("skipped") or row.get("out_of_memory")]

    def all(self, **wanted: Any) -> list[Row]:
        """Rows with these values, in the order of their files."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def parts(self) -> list[str]:
        """Parts with rows, in order."""
        return list(dict.fromkeys(row["part"] for row in self.rows))

    def pairs(self, rival: str, **wanted: Any) -> Iterator[Pair]:
        """Every row of fastkv with these values beside its rival, "full" or "kvpress", where both were measured.

        Eager steps meet eager steps, compiled and captured ones meet compiled ones. kvpress has only eager ones; its
        `generate` meets every other.
        """
        shape = ("part", "model", "context", "batch", "what")
        shape += ("policy", "budget") if rival == "kvpress" else ()
        for mine in self.all(contender="fastkv", **wanted):
            eager = mine["step"] == "eager" or (rival == "kvpress" and mine["what"] == "generate")
            step = "eager" if eager else "compiled"
            same = {key: mine[key] for key in shape}
            for other in self.all(contender=rival, step=step, **same):
                yield Pair(mine, other)


def gbps(rows: list[Row]) -> float:
    """Copy bandwidth: the median over the rows, because each process measured its own."""
    return statistics.median(row["copy_gbps"] for row in rows)


def floor_ms(row: Row, bandwidth: float) -> float:
    """Milliseconds to read the weights and the cache once, at `bandwidth` GB/s."""
    return (row["weight_bytes"] + row["cache_bytes"]) / bandwidth / 1e6
