"""How results look: progress on a terminal, tables, the style of pictures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

COLOURS = ("#d1495b", "#00798c", "#edae49", "#5f4b8b", "#8d99ae", "#3a7d44", "#b56576", "#2f4858")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h", "<", ">")  # with the colours, forty different pairs
DASHED: dict[str, Any] = {"color": "#444444", "linestyle": (0, (4, 3)), "linewidth": 1.2}  # what others compare with


def console_of(width: int = 100, **options: Any) -> Console:
    """The terminal, or `width` columns where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else width, **options)


def progress(console: Console) -> Progress:
    """Bars that say what is done, how many of how many, and for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def table(left: Sequence[str], right: Sequence[str], **options: Any) -> Table:
    """An empty table with words on the left and numbers on the right; options: of rich."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, **options)
    for title in left:
        made.add_column(title, no_wrap=True)
    for title in right:
        made.add_column(title, justify="right", no_wrap="\n" not in title)
    return made


def cells(numbers: Mapping[str, float | None], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """The named numbers in the format of their columns (title, format), - for None."""
    known = ((numbers[name], form) for name, (_, form) in columns.items())
    return ["-" if number is None else form.format(number) for number, form in known]


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches, without any global state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(made)
    return made


def style(index: int) -> dict[str, Any]:
    """How the line of that number is drawn; the first is the thickest."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.4 if index == 0 else 1.6,
        "markersize": 7 if index == 0 else 6,
        "zorder": 30 - index,
    }


def finish(axis: Any, *, legend: bool = False) -> None:
    """A light grid and no frame."""
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        axis.legend(frameon=False, fontsize=9)


def of_layers(axis: Any) -> None:
    """Layers along the axis, whole numbers only; zero is always in sight."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    from_zero(axis)


def from_zero(axis: Any) -> None:
    """Stretch the axis until zero is in sight."""
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0), max(high, 0))


def ticks(axis: Any, places: Sequence[float], base: float = 10) -> None:
    """A logarithmic x axis that is labelled at these places only."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=base)
    axis.set_xticks(places, [f"{place:.0f}" for place in places])
    axis.xaxis.set_minor_locator(NullLocator())


def save(figure: Any, path: Any, title: str, *, legend_of: Any = None, columns: int = 3) -> None:
    """Write the picture, with the legend of one axis below all of them."""
    if legend_of is not None:
        handles, labels = legend_of.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False, fontsize=9
        )
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
