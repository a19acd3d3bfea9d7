"""Speed of whole models in reports, from perf/results/speed_*.json: tables, plots, and the page on performance."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine import ROOT
from ..tables import NONE, Row, chosen, plot, table, write_section

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
WHERE = ("model", "tokens seen", "batch", "cache")
DECODED = (*WHERE, "kept", "first token (s)", "ms per step (p20-p80)", "tokens/s", "byte floor (ms)", "against full")
MADE = ("model", "prompt", "batch", "cache", "budget", "new tokens", "generate, s", "new tokens/s")
MEMORY = ("peak, MiB", "cache, MiB", "rounds")
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


def command(part: str) -> str:
    return f"`python -m perf.speed --parts {part} --kvpress-python PATH`"


def _mib(number: int) -> str:
    return f"{number / MIB:.1f}"


def decode_table(speed: Speed, rows: list[Row]) -> str:
    """One line per decode row, beside the full cache of its shape."""
    ratios = {id(mine): f"{1 / STEP.ratio(mine, rival):.1f}x" for mine, rival in speed.pairs("full", what="decode")}
    lines = []
    for row in rows:
        ms, copied = row["ms"], statistics.median(one["copy_gbps"] for one in rows)  # each process measured its own
        line = [row["model"], row["context"], row["batch"], row["cache"], row["kept"], f"{row['first_s']:.2f}"]
        line += [f"{ms['p50']:.2f} ({ms['p20']:.2f}-{ms['p80']:.2f})", f"{row['tokens_per_s']:.0f}"]
        floor = (row["weight_bytes"] + row["cache_bytes"]) / copied / 1e6  # everything is read once
        line += [f"{floor:.2f}", ratios.get(id(row), "")]
        lines.append([*line, _mib(row["peak_bytes"]), _mib(row["cache_bytes"]), row["rounds"]])
    return table((*DECODED, *MEMORY), lines)


def part_table(speed: Speed, rows: list[Row]) -> str:
    wholes, flats = [], []
    for row in rows:
        if "generate_s" in row:
            line = [row["model"], row["context"], row["batch"], row["cache"], row["budget"] or "all", row["new"]]
            line += [f"{row['generate_s']:.2f}", f"{row['tokens_per_s']:.0f}", _mib(row["peak_bytes"]), row["rounds"]]
            wholes.append(line)
        for point in row.get("flat", ()):
            numbers = [f"{point['ms']['p50']:.3f}", f"{point['over_first'] - 1:+.1%}"]
            flats.append([row["model"], row["cache"], int(point["seen"]), *numbers])
    text = decode_table(speed, [row for row in rows if "ms" in row])
    text += table((*MADE, MEMORY[0], MEMORY[2]), wholes)
    return text + table(("model", "cache", "tokens seen", "ms per step", "against the first"), flats)


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


def figures(parts: dict[str, list[Row]], folder: str, draw: Path | None = None) -> str:
    """Markdown of the plots of these parts: throughput and memory over context, steps over batch or tokens seen.

    Args: folder: of the PNGs, as the page sees it.  draw: where they are drawn, if they are.
    """
    text = ""
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
            text += f"![{title}]({folder}{name}.png)\n\n{command(part)}\n\n"
    return text


def slower(speed: Speed) -> str:
    """Where fastkv loses: of every rival and number, at how many shapes, and the worst of them."""
    text = ""
    for rival, name in (("full", "the full cache"), ("kvpress", "kvpress")):
        for metric in (STEP, FIRST, WHOLE, PEAK):
            found = [(metric.ratio(*pair), pair[0]) for pair in speed.pairs(rival, what=metric.what)]
            if not found:
                continue
            lost, (ratio, row) = sum(ratio > 1 for ratio, _ in found), max(found, key=lambda one: one[0])
            where = f"{row['cache']} {row['budget']}, {row['model']}, {row['context']} tokens, batch {row['batch']}"
            more = f"more at {lost} of {len(found)}; worst {ratio:.2f}x ({where}; `{row['part']}`)"
            said = more if lost else f"less everywhere ({len(found)} comparisons)"
            text += f"- {metric.name}, against {name}: {said}.\n"
    return text or f"{NONE.capitalize()}.\n"


def chapter(files: dict[str, Row], folder: Path) -> str:
    """The chapter of results/README.md; draws the plots into the folder."""
    speed = Speed(files)
    parts = speed.parts().items()
    text = "".join(f"\n### {part}\n\n{command(part)}\n\n{part_table(speed, rows)}" for part, rows in parts)
    drawn = figures(speed.parts(), "", folder)
    why = [(r["part"], r["id"], (r.get("skipped") or "out of memory").replace("|", "/")) for r in speed.failed]
    failures = "\nNot measured:\n\n" + table(("part", "case", "why"), why) if why else ""
    return f"\n## End to end\n\nWhere fastkv needs more:\n\n{slower(speed)}{text}{failures}\n{drawn}"


def machine(file: Row) -> str:
    facts = file["environment"]
    device = facts["device"] if facts["device"] != "cpu" else f"{facts['threads']} threads of {facts['cpu']}"
    return f"{device}; torch {facts['torch']}, transformers {facts['transformers']}"


def headline(files: dict[str, Row]) -> tuple[Speed, list[Row]]:
    """What was measured, and the rows of the pages' tables."""
    speed = Speed(files)
    return speed, chosen(speed.rows, part=HEADLINE, context=CONTEXT, what="decode")


def section(files: dict[str, Row], folder: str = "../perf/results") -> str:
    """What stands between the markers of docs/performance.md, markers included."""
    speed, rows = headline(files)
    if not rows:
        return f"{BEGIN}\n\nNot measured yet; `make perf` measures it.\n\n{END}"
    file = files[PREFIX + HEADLINE]
    peers = sorted({f"kvpress {r['versions']['kvpress']}" for r in rows if r["contender"] == "kvpress"})
    text = f"{_title(rows[0])}, random weights, {rows[0]['dtype']}; {', '.join([machine(file), *peers])}; "
    text += f"commit {file['environment']['commit']}. {command(HEADLINE)}:\n\n{decode_table(speed, rows)}\n"
    text += figures({part: rows for part, rows in speed.parts().items() if part in SHOWN}, f"{folder}/")
    text += f"Where fastkv needs more:\n\n{slower(speed)}"
    return f"{BEGIN}\n\n{text}\nEverything measured: [perf/results/README.md]({folder}/README.md).\n\n{END}"


def front(files: dict[str, Row]) -> str:
    """The README's table between its markers, markers included: time and memory beside the full cache."""
    _, rows = headline(files)
    lines = []
    for row in rows:
        times = f"{row['first_s']:.1f}", f"{row['ms']['p50']:.1f}"
        lines.append([row["cache"], row["kept"], *times, _mib(row["cache_bytes"]), f"{row['peak_bytes'] / MIB:.0f}"])
    header = ("cache", "tokens kept", "first token, s", "ms per step", "cache, MiB", "peak above the model, MiB")
    text = f"Time and memory after {CONTEXT:,} tokens, batch {rows[0]['batch']}: {_title(rows[0])}, random "
    text += f"weights, {rows[0]['dtype']};\n{machine(files[PREFIX + HEADLINE])} (`make perf`):\n\n"
    return f"{FRONT_BEGIN}\n\n{text}{table(header, lines)}\n{FRONT_END}"


def write_sections(files: dict[str, Row], root: Path = ROOT) -> None:
    """Replace what stands between the markers of docs/performance.md and of the README."""
    write_section(root / PAGE, BEGIN, END, section(files))
    write_section(root / "README.md", FRONT_BEGIN, FRONT_END, front(files))
