"""What the README shows of the results: two tables, a picture and the times of commands; no number is typed.

`python -m perf.report --readme` writes them, and the times into the page on getting started as well. The full cache and
the policies of `NAMED` have labels at their lines in the picture, everything else that was measured is grey.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .engine import RESULTS, ROOT
from .quality.ablations import share
from .quality.cases import BUDGETS, CONTEXT
from .quality.plots import tidy
from .quality.results import Mean, Results, load
from .speed.models import SHAPES
from .speed.report import HEADLINES, MIB, current, machine
from .speed.results import PREFIX, Row, Speed
from .tables import read, table

BEGIN = "<!-- what you get: written by `python -m perf.report --readme` from perf/results, do not edit -->"
END = "<!-- what you get: end -->"
TIMES_BEGIN = "<!-- times: written by `python -m perf.report --readme` from perf/results/commands.json, do not edit -->"
TIMES_END = "<!-- times: end -->"
PICTURE = "front.png"
STARTED = "docs/getting-started.md"
NAMED = {"fastkv": "#d1495b", "manifold": "#00798c", "snapkv": "#5f4b8b", "momentkv": "#b8860b", "streaming": "#2f4858"}
GREY, BLACK = "#c9ced6", "#222222"
QUESTION = {"context": "question later", "whole": "question in view"}
SMALLEST_GAP = 0.06  # of the height, between two labels
COMMAND = re.compile(r"^((?:pip|fastkv|make) .*?)(  +# )(?:[\d.]+ (?:s|min): )?(.*)$", re.M)  # with a comment in a page
MINUTES = 100  # seconds from which times are minutes


def section(files: dict[str, Row], results: Results) -> str:
    """The part of the README between its markers, markers included."""
    return f"{BEGIN}\n\n{answers(results)}\n{speeds(files)}\n{END}"


def answers(results: Results) -> str:
    """Right answers of the bundled model at equal bytes."""
    assert results.full is not None
    shown = [(tokens, kind) for tokens in BUDGETS[:2] for kind in QUESTION]
    lines = [("full cache", *[f"{Mean.of(results.full.answers).percent}"] * len(shown))]
    for name in NAMED:
        cells = []
        for tokens, kind in shown:
            row = next((row for row in results.of(f"tasks_{kind}", tokens=tokens) if row.name == name), None)
            cells.append("" if row is None else Mean.of(row.answers).percent)
        lines.append((f'`"{name}"`', *cells))
    settings = results.settings
    return (
        f"Right answers in %, ± standard error over {settings['seeds']} seeds, of the bundled model over texts of "
        f"{CONTEXT} tokens, all caches of a column\nin equal bytes; once with the question known only after the text "
        "was compressed (`make eval-report`):\n\n"
        + table(("policy", *[f"{share(tokens)}, {QUESTION[kind]}" for tokens, kind in shown]), lines)
    )


def speeds(files: dict[str, Row]) -> str:
    """Time and memory beside the full cache at the longest measured context, a table for each device."""
    speed, text = Speed(files), ""
    for part, context in HEADLINES.items():
        rows = speed.all(part=part, context=context, what="decode")
        if not rows:
            continue
        lines = [
            (
                row["cache"],
                str(row["kept"]),
                f"{row['first_s']:.1f}",
                f"{row['ms']['p50']:.1f}",
                f"{row['cache_bytes'] / MIB:.1f}",
                f"{row['peak_bytes'] / MIB:.0f}",
            )
            for row in rows
        ]
        text += (
            f"Time and memory after {context} tokens, batch {rows[0]['batch']}: {SHAPES[rows[0]['model']].title}, "
            f"random weights, {rows[0]['dtype']};\n{machine(files[PREFIX + part])} (`make perf`):\n\n"
        )
        header = ("cache", "tokens kept", "first token, s", "ms per step", "cache, MiB", "peak above the model, MiB")
        text += table(header, lines)
    return text


def timed(page: str, commands: Row) -> str:
    """A page with the measured times before what it says of its commands, and on what they were measured."""
    seconds = {row["command"]: row["seconds"] for row in commands["rows"]}

    def line(found: re.Match[str]) -> str:
        command, gap, text = found.groups()
        return f"{command}{gap}{duration(seconds[command])}: {text}" if command in seconds else f"{command}{gap}{text}"

    where = (
        f"{TIMES_BEGIN}\n\nTimes: first calls in a new clone and environment; "
        f"{machine(commands)} (`python -m perf.commands`).\n\n{TIMES_END}"
    )
    return COMMAND.sub(line, page.replace(current(page, TIMES_BEGIN, TIMES_END), where))


def duration(seconds: float) -> str:
    """In words."""
    return f"{seconds:.0f} s" if seconds < MINUTES else f"{seconds / 60:.1f} min"


def draw(files: dict[str, Row], results: Results, path: Path) -> None:
    """Answers over bytes beside the time of a step over the context."""
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    draw_answers(left, results)
    draw_steps(right, Speed(files))
    figure.savefig(path)


def draw_answers(axis: Axes, results: Results) -> None:
    """Right answers over KiB when the question comes after compression."""
    assert results.full is not None
    rows = results.of("tasks_context")
    full = 100 * Mean.of(results.full.answers).value
    axis.axhline(full, color=BLACK, ls="--", lw=1.2)
    ends = {"full cache": (full, BLACK)}
    for name in dict.fromkeys(row.name for row in rows):
        line = [(row.nbytes / 2**10, 100 * Mean.of(row.answers).value) for row in rows if row.name == name]
        axis.plot(
            *zip(*line), marker="o", ms=4, lw=2 if name in NAMED else 1, color=NAMED.get(name, GREY), zorder=style(name)
        )
        if name in NAMED:
            ends[name] = (line[0][1], NAMED[name])
    sizes = sorted({row.tokens: row.nbytes / 2**10 for row in rows}.values())
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(ylim=(-4, 104), xlabel=f"cache, KiB per sequence (full: {results.full.nbytes / 2**10:.0f})")
    axis.set_title("right answers, %, question known only after compression", fontsize=10)
    tidy(axis)
    label(axis, ends, at="left")


def draw_steps(axis: Axes, speed: Speed) -> None:
    """Milliseconds of a step over the tokens seen, of the CPU's headline."""
    part = next(iter(HEADLINES))
    rows = [row for row in speed.all(part=part, what="decode") if row["contender"] == "full" or row["block"]]
    ends = {}
    for name in dict.fromkeys(row["cache"] for row in rows):
        line = sorted((row["context"], row["ms"]["p50"]) for row in rows if row["cache"] == name)
        policy = name.removeprefix("fastkv ").removesuffix(", blocks")
        colour = BLACK if name == "full" else NAMED.get(policy, "#00798c")
        axis.plot(*zip(*line), marker="o", ms=4, lw=2, ls="--" if name == "full" else "-", color=colour)
        ends["full cache" if name == "full" else policy] = (line[-1][1], colour)
    contexts = sorted({row["context"] for row in rows})
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="tokens seen")
    axis.set_title(f"ms per decoded token, batch {rows[0]['batch']}, {rows[-1]['kept']} kept", fontsize=10)
    tidy(axis)
    label(axis, ends, at="right")


def style(name: str) -> int:
    """What lies on top: the first of the named."""
    return 30 - list(NAMED).index(name) if name in NAMED else 1


def label(axis: Axes, ends: dict[str, tuple[float, Any]], at: str) -> None:
    """Names beside the axis at the heights of the lines' ends, moved apart where they would touch."""
    to_axis = axis.transData + axis.transAxes.inverted()
    x = axis.get_xlim()[0]
    heights = {name: float(to_axis.transform((x, value))[1]) for name, (value, _) in ends.items()}
    for name, height in zip(sorted(heights, key=heights.__getitem__), apart(sorted(heights.values()))):
        place = (1.02, height) if at == "right" else (-0.02, height)
        axis.annotate(
            name,
            place,
            xycoords="axes fraction",
            ha="left" if at == "right" else "right",
            va="center",
            color=ends[name][1],
            fontsize=9,
            annotation_clip=False,
        )
    if at == "left":
        axis.yaxis.tick_right()
        axis.spines["left"].set_visible(False)


def apart(heights: Sequence[float]) -> list[float]:
    """Ascending heights, each lifted to at least the smallest gap above the one before."""
    lifted: list[float] = []
    for height in heights:
        lifted.append(max(height, lifted[-1] + SMALLEST_GAP) if lifted else height)
    return lifted


def write(readme: Path = ROOT / "README.md", folder: Path = RESULTS) -> None:
    """Renew the tables between the README's markers, and the picture. Raises SystemExit without the markers."""
    files, results = read(folder), load(folder / "evaluation")
    text = readme.read_text()
    readme.write_text(text.replace(current(text, BEGIN, END), section(files, results)))
    for page in (readme, readme.parent / STARTED):
        page.write_text(timed(page.read_text(), files["commands"]))
    draw(files, results, folder / PICTURE)
