"""End-to-end speed in reports: tables, plots, and the page on performance, from perf/results/speed_*.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..engine import ROOT
from ..tables import NONE, plot, table
from .models import TITLES
from .results import METRICS, PREFIX, Metric, Row, Speed, floor_ms, gbps

BEGIN = "<!-- how fast: written by `python -m perf.report --readme` from perf/results, do not edit -->"
END = "<!-- how fast: end -->"
FRONT_BEGIN = "<!-- time: written by `python -m perf.report --readme` from perf/results, do not edit -->"
FRONT_END = "<!-- time: end -->"
PAGE = "docs/performance.md"
HEADLINE, CONTEXT = "cpu_context", 16_384  # part and context of the pages' tables
SHOWN = (HEADLINE, "cpu_batch", "cpu_flat")  # figures there
HEADER = "model, tokens seen, batch, cache, kept, first token (s), ms per step (p20-p80), tokens/s, byte floor (ms)"
COLUMNS = (*HEADER.split(", "), "against full", "peak, MiB", "cache, MiB", "rounds")
MIB = 2**20
AXES = {"context": "prompt tokens", "batch": "sequences", "seen": "tokens seen"}


def command(part: str) -> str:
    """What was run for a part."""
    return f"`python -m perf.speed --parts {part} --kvpress-python PATH`"


def decode_table(speed: Speed, rows: list[Row]) -> str:
    """One line per decode row, beside the full cache of its shape."""
    ratios = {id(pair.mine): 1 / pair.ratio(METRICS[0]) for pair in speed.pairs("full", what="decode")}
    lines = []
    for row in rows:
        ms = row["ms"]
        against = f"{ratios[id(row)]:.1f}x" if id(row) in ratios else ""
        line = [row["model"], row["context"], row["batch"], row["cache"], row["kept"], f"{row['first_s']:.2f}"]
        line += [f"{ms['p50']:.2f} ({ms['p20']:.2f}-{ms['p80']:.2f})", f"{row['tokens_per_s']:.0f}"]
        line += [f"{floor_ms(row, gbps(rows)):.2f}", against, _mib(row["peak_bytes"]), _mib(row["cache_bytes"])]
        line += [row["rounds"]]
        lines.append([str(word) for word in line])
    return table(COLUMNS, lines)


def _mib(number: int) -> str:
    return f"{number / MIB:.1f}"


def part_table(speed: Speed, part: str) -> str:
    """Everything measured in a part."""
    rows = speed.all(part=part)
    text = decode_table(speed, [row for row in rows if "ms" in row])
    wholes, flats = [], []
    for row in rows:
        if "generate_s" in row:
            words = [row["model"], row["context"], row["batch"], row["cache"], row["budget"] or "all", row["new"]]
            words += [f"{row['generate_s']:.2f}", f"{row['tokens_per_s']:.0f}", _mib(row["peak_bytes"]), row["rounds"]]
            wholes.append([str(word) for word in words])
        for point in row.get("flat", ()):
            numbers = [f"{point['ms']['p50']:.3f}", f"{point['over_first'] - 1:+.1%}"]
            flats.append([row["model"], row["cache"], str(point["seen"]), *numbers])
    made = ("budget", "new tokens", "generate, s", "new tokens/s")
    header = ("model", "prompt", "batch", "cache", *made, "peak, MiB", "rounds")
    text += table(header, wholes)
    return text + table(("model", "cache", "tokens seen", "ms per step", "against the first"), flats)


def _title(rows: Sequence[Row]) -> str:
    return TITLES.get(rows[0]["model"], rows[0]["model"])


def figures(speed: Speed, parts: Sequence[str], folder: str, draw: Path | None = None) -> str:
    """Markdown of the plots of these parts: throughput and memory over context, steps over batch or tokens seen.

    Args: folder: of the PNGs, as the page sees it.  draw: where they are drawn, if they are.
    """
    text = ""
    for part in parts:
        rows = speed.all(part=part)
        title, name = _title(rows), f"{PREFIX}{part}"
        if part.endswith("_context"):
            title += f", batch {rows[0]['batch']}"
            drawn = [(name, "Throughput", "tokens per second", "context", lambda row: row["tokens_per_s"])]
            drawn += [(f"{name}_memory", "Memory", "peak above the model, MiB", "context", _peak)]
        elif part.endswith("_batch"):
            title += f", {rows[0]['context']} tokens"
            drawn = [(name, "Step", "ms per step", "batch", lambda row: row["ms"]["p50"])]
        elif part.endswith("_flat"):
            rows = [{"cache": row["cache"], **point} for row in rows for point in row["flat"]]
            drawn = [(name, "Step", "ms per step", "seen", lambda row: row["ms"]["p50"])]
        else:
            continue
        for file, what, unit, over, value in drawn:
            if draw is not None:
                lines: dict[str, list[tuple[float, float]]] = {}
                for row in rows:
                    lines.setdefault(row["cache"], []).append((row[over], value(row)))
                plot(draw, file, f"{what}, {title}", (AXES[over], unit), lines, log=True)
            text += f"![{what}, {title}]({folder}{file}.png)\n\n{command(part)}\n\n"
    return text


def _peak(row: Row) -> float:
    return row["peak_bytes"] / MIB


def slower(speed: Speed) -> str:
    """Where fastkv loses: of every rival and number, at how many shapes, and the worst of them."""
    lines = [line for rival in ("full", "kvpress") for metric in METRICS if (line := _loses(speed, rival, metric))]
    return "".join(f"- {line}\n" for line in lines) or f"{NONE.capitalize()}.\n"


def _loses(speed: Speed, rival: str, metric: Metric) -> str:
    pairs = [(pair.ratio(metric), pair) for pair in speed.pairs(rival, what=metric.what)]
    if not pairs:
        return ""
    lost = [one for one in pairs if one[0] > 1]
    head = f"{metric.name}, against {'the full cache' if rival == 'full' else rival}: "
    if not lost:
        return head + f"less everywhere ({len(pairs)} comparisons)."
    ratio, worst = max(lost, key=lambda one: one[0])
    return head + f"more at {len(lost)} of {len(pairs)}; worst {ratio:.2f}x ({worst.where}; `{worst.mine['part']}`)."


def failures(speed: Speed) -> str:
    """What could not be measured, and why."""
    rows = [(r["part"], r["id"], (r.get("skipped") or "out of memory").replace("|", "/")) for r in speed.failed]
    return "\nNot measured:\n\n" + table(("part", "case", "why"), rows) if rows else ""


def chapter(files: dict[str, Row], folder: Path) -> str:
    """The chapter of results/README.md; draws the plots into the folder."""
    speed = Speed(files)
    parts = "".join(f"\n### {part}\n\n{command(part)}\n\n{part_table(speed, part)}" for part in speed.parts())
    drawn = figures(speed, speed.parts(), "", folder)
    return f"\n## End to end\n\nWhere fastkv needs more:\n\n{slower(speed)}{parts}{failures(speed)}\n{drawn}"


def machine(file: Row) -> str:
    """What the results of a file were measured on."""
    facts = file["environment"]
    device = facts["device"] if facts["device"] != "cpu" else f"{facts['threads']} threads of {facts['cpu']}"
    return "; ".join([device, ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers"))])


def section(files: dict[str, Row], folder: str = "../perf/results") -> str:
    """What stands between the markers of docs/performance.md, markers included."""
    speed = Speed(files)
    rows = speed.all(part=HEADLINE, context=CONTEXT, what="decode")
    if not rows:
        return f"{BEGIN}\n\nNot measured yet; `make perf` measures it.\n\n{END}"
    file = files[PREFIX + HEADLINE]
    peers = sorted({f"kvpress {r['versions']['kvpress']}" for r in rows if r["contender"] == "kvpress"})
    text = f"{_title(rows)}, random weights, {rows[0]['dtype']}; {', '.join([machine(file), *peers])}; "
    text += f"commit {file['environment']['commit']}. {command(HEADLINE)}:\n\n{decode_table(speed, rows)}\n"
    text += figures(speed, [part for part in speed.parts() if part in SHOWN], f"{folder}/")
    text += f"Where fastkv needs more:\n\n{slower(speed)}"
    return f"{BEGIN}\n\n{text}\nEverything measured: [perf/results/README.md]({folder}/README.md).\n\n{END}"


def front(files: dict[str, Row]) -> str:
    """The README's table between its markers, markers included: time and memory beside the full cache."""
    rows = Speed(files).all(part=HEADLINE, context=CONTEXT, what="decode")
    lines = [
        (
            *(row["cache"], str(row["kept"]), f"{row['first_s']:.1f}", f"{row['ms']['p50']:.1f}"),
            *(f"{row['cache_bytes'] / MIB:.1f}", f"{row['peak_bytes'] / MIB:.0f}"),
        )
        for row in rows
    ]
    header = ("cache", "tokens kept", "first token, s", "ms per step", "cache, MiB", "peak above the model, MiB")
    text = (
        f"Time and memory after {CONTEXT:,} tokens, batch {rows[0]['batch']}: {_title(rows)}, random "
        f"weights, {rows[0]['dtype']};\n{machine(files[PREFIX + HEADLINE])} (`make perf`):\n\n{table(header, lines)}"
    )
    return f"{FRONT_BEGIN}\n\n{text}\n{FRONT_END}"


def current(text: str, begin: str = BEGIN, end: str = END) -> str:
    """What a page has between its markers now, markers included. Raises SystemExit without the markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"the page needs these two lines, once, around the section to write:\n{begin}\n{end}")
    return text[text.index(begin) : text.index(end) + len(end)]


def write_sections(files: dict[str, Row], root: Path = ROOT) -> None:
    """Replace what stands between the markers of docs/performance.md and of the README."""
    for path, begin, end, text in (
        (root / PAGE, BEGIN, END, section(files)),
        (root / "README.md", FRONT_BEGIN, FRONT_END, front(files)),
    ):
        page = path.read_text()
        path.write_text(page.replace(current(page, begin, end), text))
