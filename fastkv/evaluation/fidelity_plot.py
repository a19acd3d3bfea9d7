"""The pictures of `fastkv fidelity`: errors of every layer, and analogues of Figures 2 and 3 of arXiv:2606.01563."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..demo.plot import COLOURS, MARKERS
from .fidelity_report import Row


def write_errors(rows: Sequence[Row], path: Path) -> None:
    """A column for each budget, a line for each policy: errors of every layer, below without those of lower layers."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    figure = blank(4.6 * len(budgets) + 0.8, 7.4)
    axes = figure.subplots(2, len(budgets), sharex=True, sharey="row", squeeze=False)
    for column, budget in enumerate(budgets):
        shown = [row for row in rows if row.budget == budget]
        for axis, name in zip(axes[:, column], ("error", "own_error")):
            for index, row in enumerate(shown):
                axis.plot(row.layers, by_layer(row, name), label=row.policy, **style(index))
            finish(axis)
        size = max(row.nbytes for row in shown) / 2**10
        axes[0][column].set_title(f"cache of {size:.0f} KiB, {budget} tokens without moments", fontsize=11)
        of_layers(axes[1][column], shown[0])
    axes[0][0].set_ylabel("against the full cache")
    axes[1][0].set_ylabel("against the layer's own pairs")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 3 * len(budgets)), frameon=False, fontsize=9
    )
    figure.suptitle(f"attention output after up to {rows[0].context} tokens, mean relative error", fontsize=12)
    figure.savefig(path)


def write_figure_2(rows: Sequence[Row], path: Path) -> None:
    """Why eviction errs: how much attention is lost, and in which direction it would have pointed. As Figure 2."""
    longest, smallest = max(row.context for row in rows), min(row.budget for row in rows)
    one = next(row for row in rows if (row.context, row.budget) == (longest, smallest))
    figure = blank(13, 7)
    (mass, cosine, away), (error, masses, errors) = figure.subplots(2, 3)
    for axis, name, title in (
        (mass, "mass", "(a) evicted mass"),
        (cosine, "retained_cosine", "(b) cosine of evicted and retained output"),
        (error, "own_error", "(d) relative error"),
    ):
        with_spread(axis, one, name, 0)
        mean = getattr(one, name)
        if mean is not None:
            axis.axhline(mean, color="#444444", linestyle=(0, (4, 3)), linewidth=1.2, label=f"mean {mean:.3f}")
        axis.set_title(f"{title}, {smallest} of {longest} tokens", fontsize=10)
        axis.legend(frameon=False, fontsize=9)
    away.plot(one.layers, [1 - value for value in by_layer(one, "retained_cosine")], **style(0))
    away.set_title(f"(c) 1 - cosine, {smallest} of {longest} tokens", fontsize=10)
    for index, context in enumerate(sorted({row.context for row in rows})):
        line = sorted((row for row in rows if row.context == context), key=lambda row: row.budget)
        budgets = [row.budget for row in line]
        masses.plot(budgets, [row.mass for row in line], label=f"{context} tokens", **style(index))
    masses.set_xscale("log", base=2)
    masses.set_xticks(ticks := sorted({row.budget for row in rows}), [str(tick) for tick in ticks])
    masses.set_xlabel("budget, tokens per head")
    masses.set_title("(e) evicted mass", fontsize=10)
    for index, row in enumerate(sorted((row for row in rows if row.context == longest), key=lambda row: row.budget)):
        errors.plot(row.layers, by_layer(row, "own_error"), label=f"budget {row.budget}", **style(index))
    errors.set_title(f"(f) relative error, {longest} tokens", fontsize=10)
    for axis in (masses, errors):
        axis.legend(frameon=False, fontsize=9)
    for axis in (mass, cosine, away, error, masses, errors):
        finish(axis)
        if axis is not masses:
            of_layers(axis, one)
    figure.suptitle(f"what eviction by {one.policy} costs within a layer; bands span the heads", fontsize=12)
    figure.savefig(path)


def write_figure_3(rows: Sequence[Row], path: Path) -> None:
    """How much of the first policy's error the second recovers. As Figure 3."""
    base, better = rows
    figure = blank(13, 4)
    samples, layers, cosine = figure.subplots(1, 3)
    pairs = base.by_text["own_error"], better.by_text["own_error"]
    samples.scatter(*pairs, color=COLOURS[0], s=28, zorder=3)
    end = 1.08 * max(max(pairs[0]), max(pairs[1]), 1e-12)
    samples.plot([0, end], [0, end], color="#444444", linestyle=(0, (4, 3)), linewidth=1.2)
    samples.set(xlim=(0, end), ylim=(0, end), xlabel=base.policy, ylabel=better.policy)
    samples.set_title("(a) relative error of each text", fontsize=10)
    before, after = by_layer(base, "own_error"), by_layer(better, "own_error")
    for index, (row, line) in enumerate(((base, before), (better, after))):
        layers.plot(row.layers, line, label=row.policy, **style(index))
    for place, old, new in zip(base.layers, before, after):
        if old > max(before) / 100:  # the change of next to nothing says nothing
            layers.annotate(
                f"{new / old - 1:+.0%}", (place, max(old, new)), (0, 6), textcoords="offset points", ha="center"
            )
    layers.set_title("(b) relative error of each layer, and its change", fontsize=10)
    layers.margins(y=0.15)
    layers.legend(frameon=False, fontsize=9)
    with_spread(cosine, better, "cosine", 1)
    cosine.set_ylim(top=1.02)
    cosine.set_title(f"(c) cosine of evicted output and estimate, {better.policy}", fontsize=10)
    for axis in (samples, layers, cosine):
        finish(axis)
    of_layers(layers, base)
    of_layers(cosine, better)
    figure.suptitle(
        f"{better.policy} against {base.policy} over {base.context} tokens, each in the bytes of {base.budget} tokens",
        fontsize=12,
    )
    figure.savefig(path)


PICTURES = {None: write_errors, 2: write_figure_2, 3: write_figure_3}  # by number of the paper's figure


def by_layer(row: Row, name: str, reduce: Callable[[Iterable[float]], float] = fmean) -> list[float]:
    """One number for each layer, over its heads; NaN, which is not drawn, where none is known."""
    layers = [[head for head in layer if head is not None] for layer in row.by_head[name]]
    return [reduce(heads) if heads else float("nan") for heads in layers]


def with_spread(axis: Any, row: Row, name: str, index: int) -> None:
    """The mean of every layer in a band from its lowest to its highest head."""
    low, high = by_layer(row, name, min), by_layer(row, name, max)
    axis.fill_between(row.layers, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)
    axis.plot(row.layers, by_layer(row, name), **style(index))


def style(index: int) -> dict[str, Any]:
    """How the line of that number is drawn."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.2 if index == 0 else 1.6,
        "markersize": 5,
        "zorder": 30 - index,
    }


def blank(width: float, height: float) -> Any:
    """An empty figure, without any global state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure


def of_layers(axis: Any, row: Row) -> None:
    """Layers along the axis, whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer")
    axis.set_xlim(row.layers[0] - 0.4, row.layers[-1] + 0.4)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def finish(axis: Any) -> None:
    """A light grid and no frame; zero is always in sight."""
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0), max(high, 0))
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
