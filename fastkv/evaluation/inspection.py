"""`fastkv inspect`: what the keys of a model look like, so that a user can see which policy suits it.

Reads a text once with the stock model and measures the keys it leaves in the cache: a table, two or three sentences of
advice, a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..errors import FastKVError
from ..rotary import Rotary
from . import common, geometry, looks

LEAST = geometry.SHORTEST  # tokens; fewer tell nothing about a cloud in 64 or more dimensions
MOST = 4096  # tokens of a longer text that are read unless --context says otherwise
DEMO_CONTEXT = 2048
ROOMY = 112  # columns of a table with spaces around

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv inspect`."""
    common.add_model(parser)
    common.option(parser, "--text", common.DEMO, "a text in UTF-8, - for standard input, or demo, generated", "FILE")
    most = f"tokens to read (default: {DEMO_CONTEXT} of demo, all of another text up to {MOST})"
    parser.add_argument("--context", type=int, metavar="N", help=most)
    common.add_out(parser, "fastkv-inspect")


def run(options: argparse.Namespace, console: Console | None = None) -> Report:
    """Print the table and the advice, and write inspect.json and inspect.png into `options.out`.

    Raises: FastKVError if the model, the text, the context or the directory cannot be used.
    """
    console = console or looks.console_of()
    if options.context is not None and options.context < LEAST:
        raise FastKVError(f"context must be at least {LEAST} tokens, got {options.context}; give a larger one")
    generated = options.text == common.DEMO
    words = options.context or DEMO_CONTEXT
    text = common.demo_text("facts", words, 0) if generated else "".join(common.documents(options.text))
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("context", options.context or LEAST, model, options.model)
    ids = tokens_of(text, tokenizer, common.longest_text(model), options)
    report = measure(model, ids, options, console)
    console.print(table_of(report, roomy=console.width >= ROOMY))
    console.print(explain(report), highlight=False)
    console.print("\n".join(advice(report)), highlight=False)
    record = {"versions": common.versions(), **asdict(report), "advice": advice(report)}
    common.write_json(options.out / "inspect.json", record)
    write_plot(report, options.out / "inspect.png")
    console.print(f"{options.out / 'inspect.png'} and {options.out / 'inspect.json'} written", highlight=False)
    return report


def tokens_of(text: str, tokenizer: Any, longest: int, options: argparse.Namespace) -> Tensor:
    """The first tokens of the text, [N]: `options.context` of them, or by default what the text and the model allow."""
    most = options.context or min(longest, DEMO_CONTEXT if options.text == common.DEMO else MOST)
    least = options.context or LEAST
    ids = torch.tensor(tokenizer(text, truncation=True, max_length=most).input_ids, dtype=torch.long)
    if len(ids) < least:
        raise FastKVError(
            f"the text {options.text} is too short, expected at least {least} tokens, got {len(ids)}; give a longer one"
            + (f" or a --context down to {LEAST}" if len(ids) >= LEAST else "")
        )
    common.check_known(tokenizer, ids, options.model, options.text, "give a text in its vocabulary")
    return ids


def measure(model: Any, ids: Tensor, options: argparse.Namespace, console: Console) -> Report:
    """Run the model over tokens [N] and measure each full-attention layer."""
    lengths, window = geometry.prefix_lengths(len(ids)), geometry.window_length(len(ids))
    with looks.progress(console) as progress:
        bar = progress.add_task("reading", total=None)
        cached = list(read(model, ids))
        if not cached:
            raise FastKVError(
                f"{options.model} has no full-attention layer, all its layers have a bounded cache; there is nothing "
                "to compress in it"
            )
        rotary = why = None
        try:
            rotary = Rotary.of(model).to(model.device)
        except FastKVError as error:
            why = str(error)
        progress.update(bar, description="measuring", total=len(cached))
        layers = []
        for index, keys, values in cached:
            layers.append(measure_layer(index, keys, values, lengths, window, rotary))
            progress.advance(bar)
        progress.update(bar, description="done")
    return Report(options.model, options.text, len(ids), lengths, window, layers, why)


def read(model: Any, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Index, keys and values [Hkv, N, D] of the full-attention layers of a stock model after tokens [N]."""
    for index, keys, values in common.read_stock(model, ids[None]):
        if not (keys.isfinite().all() and values.isfinite().all()):
            raise FastKVError(
                f"keys and values must be finite, got NaN or infinity in layer {index}; load the model in another dtype"
            )
        yield index, keys[0], values[0]


def measure_layer(
    index: int, keys: Tensor, values: Tensor, lengths: list[int], window: int, rotary: Rotary | None
) -> Layer:
    """All measurements of one layer from its keys [Hkv, N, D] at positions 0 to N - 1 and its values [Hkv, N, Dv]."""
    clouds = [geometry.dimensions(head) for head in keys]
    numbers: dict[str, Any] = {name: [getattr(cloud, name) for cloud in clouds] for name in ("pca", "two_nn", "mle")}
    for kind, rows in (("key", keys), ("value", values)):
        numbers |= {f"{kind}_{name}": number for name, number in vars(geometry.norms(rows)).items()}
    numbers["anchor"] = geometry.anchor_similarity(keys)
    numbers["unit_anchor"] = geometry.anchor_similarity(keys, "normalized_mean")
    numbers |= vars(geometry.dilution(keys, lengths))
    numbers |= {f"window_{name}": number for name, number in vars(geometry.dilution(keys, lengths, window)).items()}
    numbers |= {"rank": None, "leverage": None}
    if rotary is not None:
        positions = torch.arange(keys.shape[1], device=keys.device).expand(1, *keys.shape[:2])
        before = rotary.unrotate(keys.float()[None], positions)[0]
        numbers |= {"rank": geometry.effective_rank(before), "leverage": geometry.leverage_share(before)}
    return Layer(index, **{name: n.tolist() if isinstance(n, Tensor) else n for name, n in numbers.items()})


def table_of(report: Report, *, roomy: bool = True) -> Table:
    """A row for each full-attention layer, means over its KV heads; 80 columns wide unless `roomy`."""
    table = looks.table((), ("layer", *(title for title, _ in COLUMNS.values())), padding=(0, int(roomy)))
    for layer in report.layers:
        means = {name: None if getattr(layer, name) is None else layer.mean(name) for name in COLUMNS}
        table.add_row(str(layer.layer), *looks.cells(means, COLUMNS))
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


def write_plot(report: Report, path: Path) -> None:
    """Write a PNG of four panels: dimension, norms and anchor similarity by layer, dilution over the context."""
    figure = looks.figure(10, 7.4)
    (dimension, norm), (similarity, length) = figure.subplots(2, 2)
    places = [layer.layer for layer in report.layers]

    def lines(axis: Any, title: str, names: dict[str, str], by_length: bool = False) -> None:
        for (label, name), colour, dash in zip(names.items(), looks.COLOURS, ("-", "--", "-", "--")):
            y = [layer.mean(name) for layer in report.layers]
            if by_length:
                y = [report.mean(name, place) for place in range(len(report.lengths))]
            style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 4, "linewidth": 1.6}
            axis.plot(report.lengths if by_length else places, y, label=label, **style)
        axis.set_title(title)
        looks.finish(axis, legend=True)

    estimates = {"PCA, 95 % of the variance": "pca", "Levina-Bickel": "mle", "Two-NN": "two_nn"}
    lines(dimension, "intrinsic dimension of the keys", estimates)
    lines(norm, "norm, mean and standard deviation", {"keys": "key_norm", "values": "value_norm"})
    for kind, colour in zip(("key", "value"), looks.COLOURS):
        both = [(layer.mean(f"{kind}_norm"), layer.mean(f"{kind}_spread")) for layer in report.layers]
        low, high = ([mean * (1 + sign * spread) for mean, spread in both] for sign in (-1, 1))
        norm.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    anchors = {"mean key": "anchor", "mean direction": "unit_anchor"}
    lines(similarity, "anchor similarity: mean cosine of the keys with", anchors)
    diluted = {
        "spread of distances from the mean key": "spread",
        f"the same in windows of {report.window}": "window_spread",
        "length of the mean key": "pull",
        "the same in windows": "window_pull",
    }
    lines(length, "dilution, mean over layers", diluted, by_length=True)
    looks.ticks(length, report.lengths, base=2)
    looks.from_zero(length)
    length.set_xlabel("context, tokens")
    for axis in (dimension, norm, similarity):
        looks.of_layers(axis)
    looks.save(figure, path, f"{report.model}: keys of {report.tokens} tokens")
