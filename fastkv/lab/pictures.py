"""The pictures of `fastkv demo`: right answers and KL over bytes, memory over tokens; labels stand at the lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    from .demo import Row

NAMES = {common.FULL: "full cache"}  # of caches, where they differ from the policy's
LABELLED = (
    "kvzip",
    "fastkv",
    "compactor",
    "streaming",
    "snapkv",
)  # with the full cache, the lines with a name
COLOURS = ("#d1495b", "#00798c", "#5f4b8b", "#b36a00", "#3a7d44")
GREY = "#c9c9c9"
DARK: str = common.DASHED["color"]  # the full cache
FONT = 10
GAP = 1.35  # from one label to the next, in heights of their letters


@dataclass(frozen=True)
class Memory:
    """Bytes of one cache after each number of tokens."""

    policy: str
    tokens: Sequence[int]
    nbytes: Sequence[int]


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
    """Write a PNG: right answers, and KL of the text that goes on, over bytes; the first row is the full cache."""
    full, compressed = rows[0], rows[1:]
    policies = list(dict.fromkeys(row.policy for row in compressed))
    named, asked = labelled(policies), len(full.answers)
    lines = {one: [row for row in compressed if row.policy == one] for one in policies}
    figure = common.figure(11.5, 4.7)
    answers, goes_on = figure.subplots(1, 2)
    right = draw(answers, lines, named, lambda row: row.right)
    answers.axhline(full.right, **common.DASHED)
    wrong = draw(goes_on, lines, named, lambda row: row.kl)
    answers.set_ylim(-0.3, asked + 0.3)
    goes_on.set_ylim(0, 1.06 * max(row.kl for row in compressed) or 1)
    reach = max(end.x for end in right)
    for axis, ends in ((answers, [End(reach, full.right, NAMES[full.policy], DARK), *right]), (goes_on, wrong)):
        ticks(axis, compressed)
        axis.set_xlabel(f"cache, MiB (full cache: {full.nbytes / 2**20:.1f})")
        common.finish(axis)
        label_ends(axis, ends)
    answers.set_title(f"right answers of {asked}", loc="left", fontsize=FONT, pad=12)
    goes_on.set_title("KL of the text that goes on, nats per token", loc="left", fontsize=FONT, pad=12)
    common.save(figure, path, title)


def draw(axis: Any, lines: dict[str, list[Row]], named: Sequence[str], value: Callable[[Row], float]) -> list[End]:
    """Draw a number of the rows of every policy over their bytes; returns the ends of the lines that have a name."""
    ends = []
    for policy, rows in lines.items():
        rows = sorted(rows, key=lambda row: row.nbytes)
        x, y = [row.nbytes / 2**20 for row in rows], [value(row) for row in rows]
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
    sizes = {row.budget: row.nbytes / 2**20 for row in rows}
    common.ticks(axis, list(sizes.values()), base=2)
    shares = [f"\n{size}" if isinstance(size, Fraction) else "" for size in sizes]
    axis.set_xticks(list(sizes.values()), [f"{mib:.2g}{share}" for mib, share in zip(sizes.values(), shares)])


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
