"""What `fastkv inspect` tells: a table, two or three sentences of advice, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

# Thresholds of the advice: rules of thumb on means over all layers and heads, not results of the papers.
ALIGNED = 0.3  # anchor similarity from which keys share a direction; the bundled model has 0.37, and keydiff fits it
EVEN = 0.15  # spread of key norms up to which they are even: most keys are within 15 % of the mean length
FALLING = 0.9  # spread of the distances, relative to the shortest prefix, below which the centroid is diluted
REGAINED = 1.05  # spread with windows, relative to that without, from which windows help
SINGULAR = 0.2  # leverage of the top tenth of the tokens that is twice what equal tokens would have
LENGTHS = 3  # prefixes that a statement about length needs


@dataclass(frozen=True)
class Layer:
    """One full-attention layer: a number for each KV head, or a list of them for each prefix length.

    Attributes:
        layer: index in the model.
        pca, two_nn, mle: intrinsic dimension of the keys.
        key_norm, key_spread, key_peak: mean norm, its standard deviation and its maximum over the mean; value_*: same.
        anchor, unit_anchor: mean cosine with the mean key, and with the mean of the keys' directions.
        pull, spread: of each prefix, see `geometry.Dilution`; window_*: with a centroid for each window.
        rank, leverage: effective rank and leverage share of the keys before the rotary embedding; None if unknown.
    """

    layer: int
    pca: list[int]
    two_nn: list[float]
    mle: list[float]
    key_norm: list[float]
    key_spread: list[float]
    key_peak: list[float]
    value_norm: list[float]
    value_spread: list[float]
    value_peak: list[float]
    anchor: list[float]
    unit_anchor: list[float]
    pull: list[list[float]]
    spread: list[list[float]]
    window_pull: list[list[float]]
    window_spread: list[list[float]]
    rank: list[float] | None
    leverage: list[float] | None

    def mean(self, name: str, prefix: int = -1) -> float:
        """Mean over KV heads of an attribute, at one prefix where it has several (default the whole context)."""
        numbers = getattr(self, name)
        return fmean(numbers[prefix] if isinstance(numbers[0], list) else numbers)


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        model, text: as given on the command line.
        tokens: of the text that were read.  lengths: of the prefixes.  window: tokens of a window.
        layers: measurements.  no_rotary: why there is nothing about keys before the rotary embedding, if so.
    """

    model: str
    text: str
    tokens: int
    lengths: list[int]
    window: int
    layers: list[Layer]
    no_rotary: str | None = None

    def mean(self, name: str, prefix: int = -1) -> float:
        """Mean over layers and KV heads."""
        return fmean(layer.mean(name, prefix) for layer in self.layers)


COLUMNS = {  # attribute: title and format
    "pca": ("PCA", "{:.0f}"),
    "two_nn": ("2-NN", "{:.1f}"),
    "mle": ("MLE", "{:.1f}"),
    "key_norm": ("|k|", "{:.3g}"),
    "key_spread": ("std", "{:.0%}"),
    "key_peak": ("max", "{:.2f}"),
    "value_norm": ("|v|", "{:.3g}"),
    "anchor": ("anchor", "{:.2f}"),
    "unit_anchor": ("unit", "{:.2f}"),
    "pull": ("pull", "{:.2f}"),
    "spread": ("spread", "{:.3f}"),
    "window_spread": ("window", "{:.3f}"),
    "rank": ("rank", "{:.1f}"),
    "leverage": ("lever", "{:.0%}"),
}


def table_of(report: Report, *, roomy: bool = True) -> Table:
    """A row for each full-attention layer, means over its KV heads; 80 columns wide unless `roomy`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, int(roomy)), show_edge=False)
    for title in ("layer", *(title for title, _ in COLUMNS.values())):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in report.layers:
        cells = ["-" if getattr(layer, n) is None else form.format(layer.mean(n)) for n, (_, form) in COLUMNS.items()]
        table.add_row(str(layer.layer), *cells)
    return table


def explain(report: Report) -> str:
    """What the columns are."""
    lines = f"""
Means over the KV heads of a layer, {report.tokens} tokens of {report.text}.
  PCA          intrinsic dimension of the keys: components for 95% of variance
  2-NN, MLE    the same as near neighbours see it: Two-NN, Levina-Bickel
  |k|, |v|     mean norm of the keys, of the values
  std, max     standard deviation and maximum of |k|, relative to the mean
  anchor       mean cosine of the keys with their mean
  unit         mean cosine of the keys with the mean of their directions
  pull         length of the mean key, relative to |k|
  spread       of the distances from the mean key: std, relative to the mean
  window       the same, with a mean key for every {report.window} tokens
  rank         effective rank of the keys before the rotary embedding
  lever        share of their leverage that the top tenth of the tokens holds
"""
    return lines + ("" if report.no_rotary is None else f"  -            not measured: {report.no_rotary}\n")


def advice(report: Report) -> list[str]:
    """Sentences derived from the means over all layers and heads; see the thresholds at the top of this file."""
    anchor, norms = report.mean("anchor"), report.mean("key_spread")
    if norms > EVEN:
        first = (
            f"Key norms vary (std {norms:.0%} of the mean), which a cosine does not see: try manifold, which ranks by "
            "distance, and knorm."
        )
    elif anchor >= ALIGNED:
        first = (
            f"Keys share a direction (anchor similarity {anchor:.2f}) and their norms are even (std {norms:.0%}), so a "
            "key differs from the others by its direction: try keydiff."
        )
    else:
        first = (
            f"Keys point in many directions (anchor similarity {anchor:.2f}) and their norms are even (std "
            f"{norms:.0%}), so the mean key says little about any of them: try policies that look at attention, "
            "momentkv or snapkv."
        )
    caution = "This is a hint from the geometry of one text; fastkv eval measures what a policy costs."
    return [first, _about_length(report), *_about_leverage(report), caution]


def _about_length(report: Report) -> str:
    before, whole, windowed = report.mean("spread", 0), report.mean("spread"), report.mean("window_spread")
    if len(report.lengths) < LENGTHS:
        return f"{report.tokens} tokens are too few to see whether the centroid dilutes; try a longer --context."
    seen = f"from {before:.3f} at {report.lengths[0]} tokens to {whole:.3f} at {report.tokens}"
    if whole >= FALLING * before:
        return f"Distances from the mean key do not even out with length (spread {seen}): no windows needed so far."
    if windowed >= REGAINED * whole:
        return (
            f"Distances from the mean key even out with length (spread {seen}), less so in windows of {report.window} "
            f"({windowed:.3f}): give manifold a window."
        )
    return (
        f"Distances from the mean key even out with length (spread {seen}), in windows of {report.window} as well "
        f"({windowed:.3f}): a window would not help manifold here."
    )


def _about_leverage(report: Report) -> list[str]:
    if report.no_rotary is not None:
        return []
    leverage = report.mean("leverage")
    held = f"A tenth of the tokens holds {leverage:.0%} of the leverage"
    if leverage >= SINGULAR:
        return [f"{held}, so some keys are unlike any mixture of the others: compactor can tell them apart."]
    return [f"{held}, little more than an even share: leverage alone tells compactor little."]


COLOURS = ("#d1495b", "#00798c", "#edae49", "#5f4b8b")
DASHES = ("-", "--", "-", "--")  # lines may lie on each other


def write_plot(report: Report, path: Path) -> None:
    """Write a PNG of four panels: dimension, norms and anchor similarity by layer, dilution over the context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    figure = Figure(figsize=(10, 7.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    (dimension, norm), (similarity, length) = figure.subplots(2, 2)
    places = [layer.layer for layer in report.layers]

    def by_layer(name: str) -> list[float]:
        return [layer.mean(name) for layer in report.layers]

    def by_length(name: str) -> list[float]:
        return [report.mean(name, place) for place in range(len(report.lengths))]

    def lines(axis: Any, x: Sequence[int], named: dict[str, list[float]]) -> None:
        for (label, y), colour, dash in zip(named.items(), COLOURS, DASHES):
            axis.plot(x, y, label=label, color=colour, linestyle=dash, marker="o", markersize=4, linewidth=1.6)

    estimates = {"PCA, 95 % of the variance": "pca", "Levina-Bickel": "mle", "Two-NN": "two_nn"}
    lines(dimension, places, {label: by_layer(name) for label, name in estimates.items()})
    dimension.set_title("intrinsic dimension of the keys")
    lines(norm, places, {"keys": by_layer("key_norm"), "values": by_layer("value_norm")})
    for kind, colour in zip(("key", "value"), COLOURS):
        means, spreads = by_layer(f"{kind}_norm"), by_layer(f"{kind}_spread")
        low = [mean * (1 - spread) for mean, spread in zip(means, spreads)]
        high = [mean * (1 + spread) for mean, spread in zip(means, spreads)]
        norm.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    norm.set_title("norm, mean and standard deviation")
    lines(similarity, places, {"mean key": by_layer("anchor"), "mean direction": by_layer("unit_anchor")})
    similarity.set_title("anchor similarity: mean cosine of the keys with")
    shown = {
        "spread of distances from the mean key": by_length("spread"),
        f"the same in windows of {report.window}": by_length("window_spread"),
        "length of the mean key": by_length("pull"),
        "the same in windows": by_length("window_pull"),
    }
    lines(length, report.lengths, shown)
    length.set_title("dilution, mean over layers")
    length.set_xscale("log", base=2)
    length.set_xticks(report.lengths, [str(number) for number in report.lengths])
    length.xaxis.set_minor_locator(NullLocator())
    for axis in (dimension, norm, similarity, length):
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        axis.set_xlabel("context, tokens" if axis is length else "layer")
        if axis is not length:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{report.model}: keys of {report.tokens} tokens", fontsize=12)
    figure.savefig(path)
