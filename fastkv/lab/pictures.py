"""The picture of `fastkv demo`: right answers and KL over the bytes of the caches; points have names, lines labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    from .demo import Row

SUFFIXES = (".png", ".svg")
FONT = 10


def write(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write right answers, and KL of the text that goes on, over bytes; the first row is the full cache."""
    full, compressed = rows[0], sorted(rows[1:], key=lambda row: row.nbytes)
    figure = common.figure(10, 4.2)
    answers, goes_on = figure.subplots(1, 2)
    draw(answers, compressed, lambda row: sum(row.right), (7, -13))
    answers.axhline(sum(full.right), **common.DASHED)
    answers.annotate(
        f"full cache, {full.nbytes / 2**20:.0f} MiB",
        (1, sum(full.right)),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=common.DASHED["color"],
        fontsize=FONT,
        horizontalalignment="right",
    )
    answers.set_ylim(-0.6, len(full.right) + 0.6)
    answers.yaxis.get_major_locator().set_params(integer=True)
    draw(goes_on, compressed, lambda row: row.kl, (7, 5))
    goes_on.set_ylim(0, 1.15 * max(row.kl or 0 for row in compressed) or 1)
    for axis, what in (
        (answers, f"right answers of {len(full.right)}"),
        (goes_on, "KL of the text that goes on, nats a token"),
    ):
        axis.set_title(what, loc="left", fontsize=FONT, pad=12)
        axis.set_xlabel("cache, MiB")
        axis.set_xlim(0, 1.1 * compressed[-1].nbytes / 2**20)
        common.finish(axis)
    common.save(figure, path, title)


def draw(axis: Any, rows: Sequence[Row], value: Callable[[Row], float | None], label: tuple[int, int]) -> None:
    """Draw a number of the rows over their bytes, each point with the name of its budget.

    Args: label: where the names stand, in points right of and above their points; off the line.
    """
    x, y = [row.nbytes / 2**20 for row in rows], [value(row) for row in rows]
    axis.plot(x, y, **common.style(0))
    for row, *place in zip(rows, x, y):
        axis.annotate(row.budget, place, label, textcoords="offset points", color=common.COLOURS[0], fontsize=FONT)
