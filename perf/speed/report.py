"""Speed of whole models in reports, from perf/results/speed_*.json: comparisons, plots, and what the pages
say; their words and tables: page.jinja, front.jinja, and report.jinja.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tables import Row, chosen, filled, plot

PREFIX = "speed_"
MEASURED = ("first_s", "generate_s", "tokens_per_s", "peak_bytes", "ms", "flat")  # of which rounds have a median
TITLES = {
    "llama-small": "Llama, 4 layers of 256",
    "qwen3-small": "Qwen3, 4 layers of 256",
    "gemma-3-small": "Gemma 3, 6 layers of 256",
}
BEGIN = "<!-- how fast: written by `python -m perf.report --readme` from perf/results, do not edit -->"
END = "<!-- how fast: end -->"
FRONT_BEGIN = "<!-- time: written by `python -m perf.report --readme` from perf/results, do not edit -->"
FRONT_END = "<!-- time: end -->"
PAGE = "docs/performance.md"
HEADLINE, CONTEXT = "cpu_context", 16_384  # part and context of the pages' tables
SHOWN = (HEADLINE, "cpu_batch", "cpu_flat")  # figures there
MIB = 2**20


@dataclass(frozen=True)
class Metric:
    """A number of a row, where less is better: its name in words, which measurements have it, and how it is read."""

    name: str
    what: str
    read: Callable[[Row], float]

    def ratio(self, mine: Row, rival: Row) -> float:
        """Of fastkv to a rival; below 1 is better."""
        return self.read(mine) / self.read(rival)


STEP = Metric("time per step", "decode", lambda row: row["ms"]["p50"])
FIRST = Metric("time to first token", "decode", lambda row: row["first_s"])
WHOLE = Metric("whole generate", "generate", lambda row: row["generate_s"])
PEAK = Metric("peak memory of generate", "generate", lambda row: row["peak_bytes"])


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

    def pairs(self, rival: str, **wanted: Any) -> Iterator[tuple[Row, Row]]:
        """Every row of fastkv with these values beside its rival, "full" or "kvpress", where both were measured: of the
        same part, model, context and batch, and of the same policy and budget if the rival has one.

        Eager steps meet eager steps, compiled and captured ones meet compiled ones. kvpress has only eager ones; its
        `generate` meets every other.
        """
        shape = ("part", "model", "context", "batch", "what")
        shape += ("policy", "budget") if rival == "kvpress" else ()
        for mine in chosen(self.rows, contender="fastkv", **wanted):
            eager = mine["step"] == "eager" or (rival == "kvpress" and mine["what"] == "generate")
            same = {key: mine[key] for key in shape}
            for other in chosen(self.rows, contender=rival, step="eager" if eager else "compiled", **same):
                yield mine, other

    def decoded(self, rows: list[Row]) -> list[Row]:
        """Those with decode steps; with the time of their bytes, "floor" in ms, and how many times as fast they are as
        the full cache of their shape, "against", None where that was not measured.
        """
        against = {id(mine): 1 / STEP.ratio(mine, rival) for mine, rival in self.pairs("full", what="decode")}
        copies: dict[str, list[float]] = {}  # of all processes of a part, each of which measured its own
        for row in self.rows:
            if "ms" in row:
                copies.setdefault(row["part"], []).append(row["copy_gbps"])
        found = []
        for row in rows:
            if "ms" in row:  # everything is read once
                floor = (row["weight_bytes"] + row["cache_bytes"]) / statistics.median(copies[row["part"]]) / 1e6
                found.append(row | {"floor": floor, "against": against.get(id(row))})
        return found


def _title(row: Row) -> str:
    return TITLES.get(row["model"], row["model"])


# What is drawn of a part, by the end of its name: what its title adds; suffix of the file, title, unit, value and, over
# what it is drawn, key and name.
MS: tuple[str, str, str, Callable[[Row], float]] = ("", "Step", "ms per step", lambda row: row["ms"]["p50"])
OVER_CONTEXT = ("context", "prompt tokens")
DRAWN = {
    "_context": (", batch {batch}", [
        ("", "Throughput", "tokens per second", lambda row: row["tokens_per_s"], *OVER_CONTEXT),
        ("_memory", "Memory", "peak above the model, MiB", lambda row: row["peak_bytes"] / MIB, *OVER_CONTEXT),
    ]),
    "_batch": (", {context} tokens", [(*MS, "batch", "sequences")]),
    "_flat": ("", [(*MS, "seen", "tokens seen")]),
}  # fmt: skip


def figures(parts: dict[str, list[Row]], draw: Path | None = None) -> list[Row]:
    """Plots of these parts: throughput and memory over context, steps over batch or tokens seen.

    Args: draw: folder where they are drawn, if they are.
    """
    found = []
    for part, rows in parts.items():
        more, drawn = DRAWN.get(f"_{part.rpartition('_')[2]}", ("", []))
        for suffix, what, unit, value, over, label in drawn:
            name, title = f"{PREFIX}{part}{suffix}", f"{what}, {_title(rows[0])}{more.format(**rows[0])}"
            if draw is not None:
                lines: dict[str, list[tuple[float, float]]] = {}
                for row in rows:
                    for point in row.get("flat", [row]):
                        lines.setdefault(row["cache"], []).append((point[over], value(point)))
                plot(draw, name, title, (label, unit), lines)
            found.append({"part": part, "name": name, "title": title})
    return found


def slower(speed: Speed) -> list[Row]:
    """Where fastkv loses: of every rival and number, at how many shapes, and the worst of them."""
    found = []
    for rival, name in (("full", "the full cache"), ("kvpress", "kvpress")):
        for metric in (STEP, FIRST, WHOLE, PEAK):
            unlike = "block" if metric is FIRST else ""  # a full cache that was read in blocks
            pairs = [both for both in speed.pairs(rival, what=metric.what) if not both[1].get(unlike)]
            ratios = [(metric.ratio(*both), both[0]) for both in pairs]
            if ratios:
                worst, row = max(ratios, key=lambda one: one[0])
                lost = {"lost": sum(ratio > 1 for ratio, _ in ratios), "of": len(ratios), "worst": worst, "row": row}
                found.append({"metric": metric.name, "rival": name, **lost})
    return found


def chapter(files: dict[str, Row], folder: Path) -> Row:
    """What the chapter of results/README.md tells; draws the plots into the folder."""
    speed = Speed(files)
    parts = {part: {"all": rows, "decoded": speed.decoded(rows)} for part, rows in speed.parts().items()}
    told = {"parts": parts, "failed": speed.failed, "slower": slower(speed)}
    return {**told, "drawn": figures(speed.parts(), folder)}


def machine(file: Row) -> str:
    facts = file["environment"]
    device = facts["device"] if facts["device"] != "cpu" else f"{facts['threads']} threads of {facts['cpu']}"
    return f"{device}; torch {facts['torch']}, transformers {facts['transformers']}"


def headline(files: dict[str, Row]) -> tuple[Speed, Row]:
    """What was measured, and what the pages' tables are made of."""
    speed = Speed(files)
    rows = speed.decoded(chosen(speed.rows, part=HEADLINE, context=CONTEXT, what="decode"))
    facts = {"rows": rows, "part": HEADLINE}
    if rows:
        file = files[PREFIX + HEADLINE]
        facts |= {"model": _title(rows[0]), "machine": machine(file), "commit": file["environment"]["commit"]}
    return speed, facts


def section(files: dict[str, Row], folder: str = "../perf/results") -> str:
    """What stands between the markers of docs/performance.md, markers included."""
    speed, facts = headline(files)
    peers = {f"kvpress {row['versions']['kvpress']}" for row in facts["rows"] if row["contender"] == "kvpress"}
    drawn = figures({part: rows for part, rows in speed.parts().items() if part in SHOWN})
    facts |= {"peers": sorted(peers), "drawn": drawn, "slower": slower(speed), "folder": folder}
    return f"{BEGIN}\n\n{filled(Path(__file__).with_name('page.jinja'), **facts)}\n\n{END}"


def front(files: dict[str, Row]) -> str:
    """The README's table between its markers, markers included: time and memory beside the full cache."""
    text = filled(Path(__file__).with_name("front.jinja"), **headline(files)[1])
    return f"{FRONT_BEGIN}\n\n{text}\n\n{FRONT_END}"
