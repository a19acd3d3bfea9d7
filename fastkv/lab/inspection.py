"""`fastkv inspect`: what the keys of a model look like.

Reads a text once with the stock model and measures the keys it leaves in the cache: a table and a picture. Functions
of a layer take one sequence, [Hkv, N, D] in order of position, and answer for each KV head in float64.

Intrinsic dimension, of one head, says how many coordinates its cloud of keys needs (ManifoldKV, Appendix E). PCA counts
the directions of the flat space that holds the cloud. The two others look at nearest neighbours only, so they see the
dimension of a curved sheet inside that space. Everything repeats exactly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import reference
from ..errors import FastKVError
from ..integrations.transformers import rotations
from ..integrations.transformers.calibrate import known_shares
from ..rotary import Rotary
from . import common
from .fit_heads import KEEP, picture

NOT_CALIBRATED = "what each head needs is not known yet: fastkv calibrate heads"
LEAST = 256  # tokens; fewer tell nothing about a cloud in 64 or more dimensions
MOST = 2048  # tokens of a longer text that are read unless --context says otherwise
ROOMY = 112  # columns of a table with spaces around

MOST_POINTS = 2000  # all pairs of so many take 32 MB; the estimates then vary by about 2 %
NEIGHBOURS = range(10, 21)
VARIANCE, DISCARD = 0.95, 0.1  # as in the paper
ROUNDING = 1e-12  # of the variance; a sum of eigenvalues is not exact
WINDOW = 4096  # of WindowedManifoldKV
TOP = 0.1  # share of the tokens whose leverage is added up


def norms(rows: Tensor) -> dict[str, Tensor]:
    """Norms of keys or values [Hkv, N, D]: mean ("norm"), standard deviation over mean ("spread"), largest over mean
    ("peak"), [Hkv] each; zeros where all rows are zero.
    """
    length = rows.double().norm(dim=-1)
    mean = length.mean(-1)
    return {"norm": mean, "spread": _variation(length), "peak": length.amax(-1) / _positive(mean)}


def anchor_similarity(keys: Tensor, anchor: str = "mean") -> Tensor:
    """Mean cosine of the keys [Hkv, N, D] with their anchor, [Hkv] (KeyDiff, Sec. 3.2).

    anchor: "mean" of the keys, or "normalized_mean", that of their directions (Eq. 8), for which the result is the
    length of that mean, and its square the mean cosine between two keys.
    """
    return -reference.keydiff_scores(keys.double()[None], anchor)[0].mean(-1)


def prefix_lengths(num: int) -> list[int]:
    """256, 512, ... and `num` itself."""
    doublings = (LEAST << step for step in count())
    return [*takewhile(lambda length: length < num, doublings), num]


def window_length(num: int) -> int:
    """Tokens of a window over a context of `num`: the paper's 4096, or a quarter of a shorter context."""
    return max(1, min(WINDOW, num // 4))


def dilution(keys: Tensor, lengths: list[int], window: int | None = None) -> dict[str, Tensor]:
    """How much a centroid still says as the context grows: of the first n keys of [Hkv, N, D], for each of the P n in
    `lengths` (ManifoldKV, Sec. 3.2 and App. F),

        pull     [P, Hkv], |mean of keys| / mean |key|: 1 if all keys are equal, 0 if they cancel
        spread   [P, Hkv], standard deviation over mean of the distances |k_i - centroid|: what ManifoldKV ranks by.
                 Near 0 all tokens are equally far, and the ranking is noise

    The centroid is the mean of the n keys or, given a window, of each `window` of them; the pull is then the mean over
    tokens of the pull of their window, and distances of all windows are compared with each other, as they are ranked.
    """
    keys = keys.double()
    pull, spread = [], []
    for length in lengths:
        prefix = keys[:, :length]
        windows = prefix.split(window or length, dim=1)
        centroids = torch.stack([part.mean(1).norm(dim=-1) * part.shape[1] / length for part in windows]).sum(0)
        pull.append(centroids / _positive(prefix.norm(dim=-1).mean(-1)))
        spread.append(_variation(reference.manifold_scores(prefix[None], window)[0]))
    return {"pull": torch.stack(pull), "spread": torch.stack(spread)}


def effective_rank(rows: Tensor) -> Tensor:
    """exp of the entropy of the singular values of [Hkv, N, D], scaled to sum to 1; [Hkv] (Roy and Vetterli 2007).

    Between 1 and D; 0 if all rows are zero. Rows are not centred, as in the leverage of Compactor.
    """
    sizes = torch.linalg.svdvals(rows.double())
    total = sizes.sum(-1, keepdim=True)
    return torch.special.entr(sizes / _positive(total)).sum(-1).exp() * (total[:, 0] > 0)


def leverage_share(pre_rope_keys: Tensor, top: float = TOP) -> Tensor:
    """Share of all leverage that the `top` share of the tokens of [Hkv, N, D] holds, [Hkv] (Compactor, Sec. 3.1).

    Exact leverage, no sketch. If every token had the same, the result would be `top`; 0 if all keys are zero.
    """
    scores = reference.leverage_scores(pre_rope_keys.double()[None], method="exact")[0]
    largest = scores.topk(max(1, round(top * scores.shape[-1]))).values.sum(-1)
    return largest / _positive(scores.sum(-1))


class Dimensions(NamedTuple):
    """The three estimates for one cloud: components of PCA, Two-NN, Levina-Bickel."""

    pca: int
    two_nn: float
    mle: float


def dimensions(points: Tensor) -> Dimensions:
    """All three estimates of `points` [N, D]; 0 for equal points, and for neighbours fewer than three."""
    nearest, dim = nearest_distances(points, max(NEIGHBOURS)), points.shape[1]
    if nearest.shape[1] < 2:
        return Dimensions(pca(points), 0.0, 0.0)
    return Dimensions(pca(points), two_nn(nearest, dim), levina_bickel(nearest, dim))


def pca(points: Tensor, variance: float = VARIANCE) -> int:
    """Principal components that explain a share of the variance (ManifoldKV, Eq. 15); 0 if all points are equal.

    min {k : sum of the k largest eigenvalues of the covariance >= variance * sum of all}. Unlike the other estimates
    this takes every point, as often as it occurs.
    """
    wide = points.double()
    wide = wide - wide[:1]  # equal points become exact zeros, which subtracting a rounded mean would not give
    wide = wide - wide.mean(0)
    eigenvalues = torch.linalg.eigvalsh(wide.T @ wide).flip(0).clamp(min=0)
    total = eigenvalues.sum()
    missing = eigenvalues.cumsum(0) < (variance - ROUNDING) * total
    return int(missing.sum()) + int(total > 0)


def two_nn(nearest: Tensor, dim: int, discard: float = DISCARD) -> float:
    """Dimension from the two nearest neighbours of each point (Facco et al. 2017; ManifoldKV, Eq. 16), at most `dim`.

    Where density hardly changes between them, log(mu_i) = log(r2_i / r1_i) is exponential with rate d. The largest
    `discard` of the n ratios, which break that first, count only as "at least this large", so that with m = n - discard
    n ratios in ascending order the maximum likelihood is

        d = m / (sum_{i <= m} log(mu_i) + (n - m) log(mu_m)),    which for discard = 0 is Eq. 16.

    Args: nearest: [n, >= 2] from `nearest_distances`.
    """
    ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
    num = len(ratios)
    kept = num - int(discard * num)
    total = ratios[:kept].sum() + (num - kept) * ratios[kept - 1]
    return min(float(dim), float(kept / total))  # equally far neighbours, as on a grid, read as infinitely many


def levina_bickel(nearest: Tensor, dim: int, counts: Sequence[int] = NEIGHBOURS) -> float:
    """Maximum likelihood dimension from k neighbours (Levina and Bickel 2004; ManifoldKV, Eq. 17), at most `dim`.

    With T_j the distance to the j-th neighbour, the mean of log(T_k / T_j) over the j < k and over all points estimates
    1/d: inverses are averaged, not estimates, as MacKay and Ghahramani (2005) advise. The result is the mean over k.

    Args: nearest: [n, K >= 2] from `nearest_distances`; counts: every k, at least 2; at most K of them count.
    """
    logs = nearest.log()
    usable = [min(count, nearest.shape[1]) for count in counts]
    inverses = [(logs[:, count - 1 : count] - logs[:, : count - 1]).mean() for count in usable]
    return min(float(dim), float((1 / torch.stack(inverses)).mean()))


def nearest_distances(points: Tensor, count: int) -> Tensor:
    """Distances of different points [N, D] to their nearest others, ascending, [n, min(count, n - 1)] fp64.

    At most `MOST_POINTS` are used.
    """
    sample = torch.unique(points, dim=0)
    if len(sample) > MOST_POINTS:
        chosen = torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))[:MOST_POINTS]
        sample = sample[chosen.to(sample.device)]
    # Differences are squared one by one: the product form would cancel for close neighbours.
    pairs = torch.cdist(sample.double(), sample.double(), compute_mode="donot_use_mm_for_euclid_dist")
    nearest = pairs.topk(min(count + 1, len(sample)), largest=False).values[:, 1:]  # the first is the point itself
    return nearest.clamp(min=torch.finfo(torch.float64).tiny)


def _variation(sizes: Tensor) -> Tensor:
    """Standard deviation over mean along the last dimension; 0 where the mean is 0."""
    return sizes.std(-1, correction=0) / _positive(sizes.mean(-1))


def _positive(number: Tensor) -> Tensor:
    """The number, or the smallest positive one, to divide a zero by."""
    return number.clamp(min=torch.finfo(number.dtype).tiny)


Layer: TypeAlias = dict[str, Any]  # what `measure_layer` returns


def mean(layer: Layer, name: str, prefix: int = -1) -> float:
    """Mean over KV heads of a measurement, at one prefix where it has several (default the whole context)."""
    numbers = layer[name]
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
        return fmean(mean(layer, name, prefix) for layer in self.layers)


COLUMNS: common.Columns = {
    "pca": ("PCA", "{:.0f}", "intrinsic dimension of the keys: components for 95% of variance"),
    "two_nn": ("2-NN", "{:.1f}", "the same as the two nearest neighbours see it: Two-NN"),
    "mle": ("MLE", "{:.1f}", "the same as near neighbours see it: Levina-Bickel"),
    "key_norm": ("|k|", "{:.3g}", "mean norm of the keys"),
    "key_spread": ("std", "{:.0%}", "standard deviation of |k|, relative to the mean"),
    "key_peak": ("max", "{:.2f}", "maximum of |k|, relative to the mean"),
    "value_norm": ("|v|", "{:.3g}", "mean norm of the values"),
    "anchor": ("anchor", "{:.2f}", "mean cosine of the keys with their mean"),
    "unit_anchor": ("unit", "{:.2f}", "mean cosine of the keys with the mean of their directions"),
    "pull": ("pull", "{:.2f}", "length of the mean key, relative to |k|"),
    "spread": ("spread", "{:.3f}", "of the distances from the mean key: std, relative to the mean"),
    "window_spread": ("window", "{:.3f}", "the same, with a mean key for every window"),
    "rank": ("rank", "{:.1f}", "effective rank of the keys before the rotary embedding"),
    "leverage": ("lever", "{:.0%}", "share of their leverage that the top tenth of the tokens holds"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv inspect`."""
    common.add_model(parser, "fastkv-inspect")
    common.option(parser, "--text", common.TEXT, common.TEXTS, "FILE")
    most = f"tokens to read (default: all of the text up to {MOST})"
    parser.add_argument("--context", type=int, metavar="N", help=most)


def run(options: argparse.Namespace, console: Console | None = None) -> Report:
    """Print the table, and write inspect.json and inspect.png into `options.out`."""
    console = console or common.console_of()
    if options.context is not None and options.context < LEAST:
        raise FastKVError(f"context must be at least {LEAST} tokens, got {options.context}; give a larger one")
    text = "".join(common.documents(options.text))
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("context", options.context or LEAST, model, options.model)
    ids = tokens_of(text, tokenizer, common.longest_text(model), options)
    report = measure(model, ids, options, console)
    console.print(table_of(report, roomy=console.width >= ROOMY))
    console.print(explain(report))
    shares = known_shares(model)
    console.print(NOT_CALIBRATED if shares is None else picture(shares.shares(KEEP)))
    record = {"versions": common.versions(), **vars(report)}
    common.write_json(options.out / "inspect.json", record)
    write_plot(report, options.out / "inspect.png")
    console.print(f"{options.out / 'inspect.png'} and {options.out / 'inspect.json'} written")
    return report


def tokens_of(text: str, tokenizer: Any, longest: int, options: argparse.Namespace) -> Tensor:
    """The first tokens of the text, [N]: `options.context` of them, or by default what the text and the model allow."""
    most = options.context or min(longest, MOST)
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
    lengths, window = prefix_lengths(len(ids)), window_length(len(ids))
    with common.progress(console) as progress:
        cached = list(read(model, ids))
        if not cached:
            raise FastKVError(
                f"{options.model} has no full-attention layer, all its layers have a bounded cache; there is nothing "
                "to compress in it"
            )
        turning, why = {}, None
        try:
            turning = rotations(model, [index for index, _, _ in cached])
        except FastKVError as error:
            why = str(error)
        shown = progress.track(cached, description="measuring")
        layers = [measure_layer(*layer, lengths, window, turning.get(layer[0])) for layer in shown]
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
    """All measurements of one layer from its keys [Hkv, N, D] at positions 0 to N - 1 and its values [Hkv, N, Dv].

    Returns: a number for each KV head, or a list of them for each prefix length, by name:
        layer: index in the model, a single number.
        pca, two_nn, mle: intrinsic dimension of the keys.
        key_norm, key_spread, key_peak: mean norm, its standard deviation and its maximum over the mean; value_*: same.
        anchor, unit_anchor: mean cosine with the mean key, and with the mean of the keys' directions.
        pull, spread: of each prefix, see `dilution`; window_*: with a centroid for each window.
        rank, leverage: effective rank and leverage share of the keys before the rotary embedding; None if unknown.
    """
    clouds = zip(*(dimensions(head) for head in keys))
    numbers: Layer = {"layer": index, **{name: list(one) for name, one in zip(Dimensions._fields, clouds)}}
    several = {"key_": norms(keys), "value_": norms(values)}
    several |= {"": dilution(keys, lengths), "window_": dilution(keys, lengths, window)}
    numbers |= {f"{kind}{name}": one for kind, found in several.items() for name, one in found.items()}
    numbers |= {"anchor": anchor_similarity(keys), "unit_anchor": anchor_similarity(keys, "normalized_mean")}
    numbers |= {"rank": None, "leverage": None}
    if rotary is not None:
        positions = torch.arange(keys.shape[1], device=keys.device).expand(1, *keys.shape[:2])
        before = rotary.to(keys.device).unrotate(keys.float()[None], positions)[0]
        numbers |= {"rank": effective_rank(before), "leverage": leverage_share(before)}
    return {name: n.tolist() if isinstance(n, Tensor) else n for name, n in numbers.items()}


def table_of(report: Report, *, roomy: bool = True) -> Table:
    """A row for each full-attention layer, means over its KV heads; 80 columns wide unless `roomy`."""
    table = common.table((), ("layer", *(title for title, _, _ in COLUMNS.values())), padding=(0, int(roomy)))
    for layer in report.layers:
        means = {name: None if layer[name] is None else mean(layer, name) for name in COLUMNS}
        table.add_row(str(layer["layer"]), *common.cells(means, COLUMNS))
    return table


def explain(report: Report) -> str:
    """What the columns are."""
    missing = "" if report.no_rotary is None else f"  -        not measured: {report.no_rotary}\n"
    return f"""
Means over the KV heads of a layer, {report.tokens} tokens of {report.text}, windows of {report.window}.
{common.legend(COLUMNS)}
{missing}"""


def write_plot(report: Report, path: Path) -> None:
    """Write a PNG of four panels: dimension, norms and anchor similarity by layer, dilution over the context."""
    figure = common.figure(10, 7.4)
    (dimension, norm), (similarity, length) = figure.subplots(2, 2)
    places = [layer["layer"] for layer in report.layers]

    def lines(axis: Any, title: str, names: dict[str, str], by_length: bool = False) -> None:
        for (label, name), colour, dash in zip(names.items(), common.COLOURS, ("-", "--", "-", "--")):
            y = [mean(layer, name) for layer in report.layers]
            if by_length:
                y = [report.mean(name, place) for place in range(len(report.lengths))]
            style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 4, "linewidth": 1.6}
            axis.plot(report.lengths if by_length else places, y, label=label, **style)
        common.finish(axis, title, legend=True, layers=not by_length)

    estimates = {"PCA, 95 % of the variance": "pca", "Levina-Bickel": "mle", "Two-NN": "two_nn"}
    lines(dimension, "intrinsic dimension of the keys", estimates)
    for kind, colour in zip(("key", "value"), common.COLOURS):
        both = [(mean(layer, f"{kind}_norm"), mean(layer, f"{kind}_spread")) for layer in report.layers]
        low, high = ([size * (1 + sign * spread) for size, spread in both] for sign in (-1, 1))
        norm.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    lines(norm, "norm, mean and standard deviation", {"keys": "key_norm", "values": "value_norm"})
    anchors = {"mean key": "anchor", "mean direction": "unit_anchor"}
    lines(similarity, "anchor similarity: mean cosine of the keys with", anchors)
    diluted = {
        "spread of distances from the mean key": "spread",
        f"the same in windows of {report.window}": "window_spread",
        "length of the mean key": "pull",
        "the same in windows": "window_pull",
    }
    lines(length, "dilution, mean over layers", diluted, by_length=True)
    common.ticks(length, report.lengths, base=2)
    common.from_zero(length)
    length.set_xlabel("context, tokens")
    common.save(figure, path, f"{report.model}: keys of {report.tokens} tokens")
