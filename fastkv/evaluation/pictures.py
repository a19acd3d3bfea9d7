"""The pictures of `fastkv demo`: right answers and error over bytes, memory over context; labels stand at the lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from . import common
from .comparison import Row
from .story import NAMES, Memory

TITLES = {
    "whole": "the question is in the prompt",
    "context": "the text is compressed before the question is known",
}
LABELLED = ("fastkv", "snapkv", "h2o", "streaming", "keydiff")  # with the full cache, the six lines that have a name
COLOURS = ("#d1495b", "#00798c", "#5f4b8b", "#b36a00", "#3a7d44")
GREY = "#c9c9c9"
DARK: str = common.DASHED["color"]  # the full cache
FONT = 10
GAP = 1.35  # from one label to the next, in heights of their letters


@dataclass(frozen=True)
class End:
    """The last point of a line, and how it is called."""

    x: float
    y: float
    name: str
    color: str


def labelled(policies: Sequence[str]) -> list[str]:
    """The policies whose lines have a name and a colour: those of `LABELLED`, then the first."""
    ranked = sorted(policies, key=lambda one: LABELLED.index(one) if one in LABELLED else len(LABELLED))
    return ranked[: len(LABELLED)]


def write_answers(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: right answers and error of attention over bytes, a row of two for each way to read prompts."""
    full, compressed = rows[0], rows[1:]
    modes, policies = (list(dict.fromkeys(getattr(row, of) for row in compressed)) for of in ("prefill", "policy"))
    named, highest = labelled(policies), max(row.error for row in compressed)
    figure = common.figure(11.5, 1.1 + 3.6 * len(modes))
    axes = figure.subplots(len(modes), 2, sharex=True, squeeze=False)
    for (accuracy, error), mode in zip(axes, modes):
        lines = {one: [row for row in compressed if (row.policy, row.prefill) == (one, mode)] for one in policies}
        accuracy.set_ylim(-4, 104)
        error.set_ylim(0, 1.06 * highest)
        right = draw(accuracy, lines, named, lambda row: 100 * row.accuracy)
        accuracy.axhline(100 * full.accuracy, **common.DASHED)
        wrong = draw(error, lines, named, lambda row: row.error)
        reach = max(end.x for end in right)
        for axis, ends in (
            (accuracy, [End(reach, 100 * full.accuracy, NAMES[full.policy], DARK), *right]),
            (error, wrong),
        ):
            ticks(axis, compressed)
            axis.tick_params(labelbottom=True)
            axis.set_xlabel(f"cache, KiB per sequence (full cache: {full.nbytes / 2**10:.0f})")
            common.finish(axis)
            label_ends(axis, ends)
        how = TITLES.get(mode, f"prompts are read in blocks of {mode} tokens")
        accuracy.set_title(f"right answers, %: {how}", loc="left", fontsize=FONT, pad=12)
        error.set_title("error of attention's output, |o - full| / |full|", loc="left", fontsize=FONT, pad=12)
    grey = [one for one in policies if one not in named]
    if grey:
        figure.supxlabel(f"grey: {', '.join(grey)}", fontsize=FONT - 1, color="#777777")
    common.save(figure, path, title)


def draw(axis: Any, lines: dict[str, list[Row]], named: Sequence[str], value: Callable[[Row], float]) -> list[End]:
    """Draw a number of the rows of every policy over their bytes; returns the ends of the lines that have a name."""
    ends = []
    for policy, rows in lines.items():
        rows = sorted(rows, key=lambda row: row.nbytes)
        x, y = [row.nbytes / 2**10 for row in rows], [value(row) for row in rows]
        if not rows or policy not in named:
            axis.plot(x, y, color=GREY, marker=".", linewidth=1.2, zorder=2)
            continue
        place = named.index(policy)
        color, width = COLOURS[place], 2.6 if place == 0 else 1.7
        axis.plot(x, y, color=color, marker=common.MARKERS[place], markersize=6, linewidth=width, zorder=20 - place)
        ends.append(End(x[-1], y[-1], policy, color))
    return ends


def ticks(axis: Any, rows: Sequence[Row]) -> None:
    """A logarithmic x axis with the bytes of every size, and below them the share that was asked for."""
    sizes = {row.budget: row.nbytes / 2**10 for row in rows}
    common.ticks(axis, list(sizes.values()), base=2)
    shares = [f"\n{size}" if isinstance(size, Fraction) else "" for size in sizes]
    axis.set_xticks(list(sizes.values()), [f"{kib:.0f}{share}" for kib, share in zip(sizes.values(), shares)])


def label_ends(axis: Any, ends: Sequence[End]) -> None:
    """Write the names to the right of the axis, each at the height of its line's end, or as near as others let it.

    Of lines that end at the same height the first has the highest name.
    """
    axis.figure.draw_without_rendering()  # gives the axis its height
    low, high = axis.get_ylim()
    gap = GAP * FONT / 72 * axis.figure.dpi / axis.get_window_extent().height
    ends = sorted(reversed(ends), key=lambda end: end.y)
    heights = spread([(end.y - low) / (high - low) for end in ends], gap)
    for end, height in zip(ends, heights):
        axis.annotate(
            end.name,
            (end.x, end.y),
            (1.04, height),
            textcoords="axes fraction",
            color=end.color,
            fontsize=FONT,
            fontweight="bold" if end.name == LABELLED[0] else "normal",
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "linestyle": ":", "color": end.color, "shrinkA": 1, "shrinkB": 5},
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted heights between 0 and 1, moved apart until neighbours have the gap between them."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = 1.0 + gap
    for index in reversed(range(len(placed))):
        ceiling = placed[index] = min(placed[index], ceiling - gap)
    return placed


def write_memory(held: Sequence[Memory], path: Path) -> None:
    """Write a PNG: bytes of each cache while a text is read in blocks."""
    figure = common.figure(7.5, 4)
    axis = figure.subplots()
    ends = []
    for one, color in zip(held, (DARK, COLOURS[0])):
        mib = [nbytes / 2**20 for nbytes in one.nbytes]
        axis.plot(one.tokens, mib, color=color, marker=".", linewidth=2.2)
        ends.append(End(one.tokens[-1], mib[-1], f"{NAMES.get(one.policy, one.policy)}, {mib[-1]:.1f} MiB", color))
    axis.set_xlim(0, None)
    axis.set_ylim(0, None)
    axis.set_xlabel("tokens read")
    common.finish(axis)
    label_ends(axis, ends)
    common.save(figure, path, "memory of the cache while a text is read, MiB per sequence")
