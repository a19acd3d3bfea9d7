"""The picture of the demo: accuracy and attention error over cache bytes, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Row

COLOURS = ("#d1495b", "#00798c", "#edae49", "#5f4b8b", "#8d99ae", "#3a7d44", "#b56576", "#2f4858")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h", "<", ">")  # with the colours, forty different pairs
TITLES = {"whole": "prompt read whole", "context": "text compressed before the question"}


def write_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: a column for each prefill mode, accuracy above, mean relative attention-output error below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    full = next(row for row in rows if row.policy == "full")
    compressed = [row for row in rows if row is not full]
    modes = list(dict.fromkeys(row.prefill for row in compressed))
    policies = list(dict.fromkeys(row.policy for row in compressed))
    ticks = sorted({row.budget: row.nbytes for row in compressed if row.policy == policies[-1]}.values())

    figure = Figure(figsize=(4.6 * len(modes) + 0.8, 7.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(modes), sharex=True, sharey="row", squeeze=False)
    for column, mode in enumerate(modes):
        accuracy, error = axes[0][column], axes[1][column]
        accuracy.set_title(TITLES.get(mode, f"prompt read in blocks of {mode} tokens"), fontsize=11)
        accuracy.axhline(100 * full.accuracy, color="#444444", linestyle=(0, (4, 3)), linewidth=1.2, label="full cache")
        for index, policy in enumerate(policies):
            line = sorted((r for r in compressed if (r.policy, r.prefill) == (policy, mode)), key=lambda r: r.nbytes)
            style = {
                "color": COLOURS[index % len(COLOURS)],
                "marker": MARKERS[index % len(MARKERS)],
                "linewidth": 2.4 if index == 0 else 1.6,
                "markersize": 7 if index == 0 else 6,
                "label": policy,
                "zorder": 10 - index,
            }
            sizes = [row.nbytes / 2**10 for row in line]
            accuracy.plot(sizes, [100 * row.accuracy for row in line], **style)
            error.plot(sizes, [row.error for row in line], **style)
        error.set_xscale("log")
        error.set_xticks([size / 2**10 for size in ticks], [f"{size / 2**10:.0f}" for size in ticks])
        error.xaxis.set_minor_locator(NullLocator())
        error.set_xlabel(f"cache, KiB per sequence (full cache: {full.nbytes / 2**10:.0f})")
        accuracy.set_ylim(-4, 104)
        error.set_ylim(0, 1.06 * max(row.error for row in compressed))
        for axis in (accuracy, error):
            axis.grid(color="#dddddd", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("answers right, %")
    axes[1][0].set_ylabel("attention output,\nmean relative error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3 * len(modes)), frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
