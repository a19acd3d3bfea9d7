"""Plots of the evaluation: answers over cache size, and attention error against next tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fastkv.evaluation.common import COLOURS, MARKERS

from .ablations import share
from .cases import BUDGETS, FIDELITY, READS
from .results import Mean, Results


def styles(results: Results) -> dict[str, dict[str, Any]]:
    """Colour and marker of every policy, the same in all plots."""
    names = dict.fromkeys(row.name for part, rows in results.rows.items() if is_policy(part) for row in rows)
    return {
        name: {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "label": name}
        for index, name in enumerate(names)
    }


def is_policy(part: str) -> bool:
    """Whether the rows of a part are policies and not variants of one."""
    return part == FIDELITY or part.startswith("tasks_")


def plot_tasks(results: Results, path: Path) -> None:
    """Answers right with standard errors over KiB, a column for each way of reading; nothing without rows."""
    reads = [read for read in READS if results.of(f"tasks_{read}")]
    if not reads:
        return
    look = styles(results)
    figure = Figure(figsize=(5.2 * len(reads), 5.6), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    for axis, read in zip(figure.subplots(1, len(reads), sharey=True, squeeze=False)[0], reads):
        rows = results.of(f"tasks_{read}")
        if results.full:
            axis.axhline(
                100 * Mean.of(results.full.answers).value, color="#444444", ls="--", lw=1.2, label="full cache"
            )
        for name in dict.fromkeys(row.name for row in rows):
            line = [row for row in rows if row.name == name]
            means = [Mean.of(row.answers) for row in line]
            spread = [100 * (mean.error or 0) for mean in means]
            sizes = [row.nbytes / 2**10 for row in line]
            axis.errorbar(sizes, [100 * mean.value for mean in means], spread, lw=1.4, ms=5, capsize=2, **look[name])
        axis.set_title(READS[read], fontsize=10)
        ticks = sorted({row.tokens: row.nbytes / 2**10 for row in rows}.values())
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{size:.0f}" for size in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(xlabel="cache, KiB per sequence", ylim=(-4, 104))
        tidy(axis)
    first = figure.axes[0]
    first.set_ylabel("answers right, %")
    figure.legend(*longest_legend(figure), loc="outside lower center", ncols=min(6, 3 * len(reads)), frameon=False)
    figure.savefig(path)


def longest_legend(figure: Figure) -> tuple[list[Any], list[str]]:
    """Handles and labels of all columns, each once."""
    known: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            known.setdefault(label, handle)
    return list(known.values()), list(known)


def plot_fidelity(results: Results, path: Path) -> None:
    """Attention error against KL of next tokens, a column for each budget; nothing without rows."""
    budgets = [tokens for tokens in BUDGETS if results.of(FIDELITY, tokens=tokens)]
    if not budgets:
        return
    look = styles(results)
    figure = Figure(figsize=(5.2 * len(budgets), 4.8), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    for axis, tokens in zip(figure.subplots(1, len(budgets), squeeze=False)[0], budgets):
        places: dict[tuple[float, float], list[str]] = {}
        for row in results.of(FIDELITY, tokens=tokens):
            error, kl = Mean.of(row.fidelity["error"]), Mean.of(row.fidelity["kl"])
            spread = {"xerr": error.error, "yerr": kl.error}
            axis.errorbar(error.value, kl.value, **spread, ls="", ms=6, capsize=2, lw=1, **look[row.name])
            places.setdefault((error.value, kl.value), []).append(row.name)
        for place, names in places.items():
            axis.annotate(", ".join(names), place, xytext=(5, 4), textcoords="offset points", fontsize=7)
        axis.set_title(f"{share(tokens)} of the tokens", fontsize=10)
        axis.set(xlabel="attention outputs, relative error", xlim=(0, None), ylim=(0, None))
        tidy(axis)
    figure.axes[0].set_ylabel("next token, KL from the full cache, nats")
    figure.savefig(path)


def tidy(axis: Axes) -> None:
    """A light grid and no frame."""
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
