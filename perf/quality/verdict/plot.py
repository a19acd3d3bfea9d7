"""KL over L where there are next tokens, else attention error: a panel for each geometry and way of reading."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fastkv.evaluation.common import COLOURS, MARKERS

from ..plots import longest_legend, tidy
from ..results import Mean
from .cases import FASTKV, READS, RIVALS, STEPS, TRAINED, TWICE, lengths
from .judge import Place, Results

COLUMNS = 3
NAMES = (FASTKV, *RIVALS, *(one.name for one in TWICE))


def plot_verdict(results: Results, path: Path) -> None:
    """Means with standard errors of the default, its rivals and a second reading; nothing without results."""
    panels = list(dict.fromkeys((place.geometry, place.read) for place in results.places()))
    if not panels:
        return
    height = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 3.2 * height + 0.6), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, COLUMNS, squeeze=False).ravel()
    for axis, (geometry, read) in zip(axes, panels):
        measure = "error" if read == STEPS else "kl"
        for index, name in enumerate(NAMES):
            points = [
                (tokens, Mean.of(seeds))
                for tokens in lengths(geometry)
                if (seeds := results.seeds(measure, Place(geometry, read, tokens), name))
            ]
            look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "label": name}
            wide = 2.4 if name == FASTKV else 1.2
            xs, means = [tokens for tokens, _ in points], [mean for _, mean in points]
            spread = [mean.error or 0 for mean in means]
            axis.errorbar(xs, [mean.value for mean in means], spread, lw=wide, ms=4, capsize=2, **look)
        axis.set_title(f"{geometry}\n{READS[read]}" if geometry in TRAINED else geometry, fontsize=9)
        axis.set_xscale("log")
        axis.set_xticks(lengths(geometry), [str(tokens) for tokens in lengths(geometry)])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("error of attention outputs" if measure == "error" else "KL of next tokens, nats", fontsize=9)
        axis.set_ylim(0, None)
        tidy(axis)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[len(panels) - COLUMNS : len(panels)]:
        axis.set_xlabel("L, tokens that MomentKV keeps", fontsize=9)
    figure.legend(*longest_legend(figure), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path)
