"""`fastkv inspect`: what the keys of a model look like.

Reads a text once with the stock model and measures the keys it leaves in the cache. Functions of a layer take one
sequence, [Hkv, N, D] in order of position, and answer for each KV head in float64.

Intrinsic dimension, of one head, says how many coordinates its cloud of keys needs (ManifoldKV, Appendix E). PCA counts
the directions of the flat space that holds the cloud. The two others look at nearest neighbours only, so they see the
dimension of a curved sheet inside that space. Everything repeats exactly.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from .. import reference
from ..integrations.transformers.calibrate import known_shares
from . import common, facts
from .fits import KEEP, picture

NOT_CALIBRATED = "what each head needs is not known yet: fastkv calibrate heads"
LEAST = 256  # tokens; fewer tell nothing about a cloud in 64 or more dimensions
MOST = 2048  # tokens of a longer text that are read unless --context says otherwise

MOST_POINTS = 2000  # all pairs of so many take 32 MB; the estimates then vary by about 2 %
NEIGHBOURS = range(10, 21)
VARIANCE, DISCARD = 0.95, 0.1  # as in the paper
ROUNDING = 1e-12  # of the variance; a sum of eigenvalues is not exact


def norms(rows: Tensor) -> dict[str, Tensor]:
    """Norms of keys or values [Hkv, N, D]: mean ("norm") and standard deviation over mean ("spread"), [Hkv] each; zeros
    where all rows are zero.
    """
    length = rows.double().norm(dim=-1)
    return {"norm": length.mean(-1), "spread": _variation(length)}


def dilution(keys: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """How much the mean key still says as the context grows: of the first n keys of [Hkv, N, D], for each of the P n in
    `lengths` (ManifoldKV, Sec. 3.2),

        pull     [P, Hkv], |mean of keys| / mean |key|: 1 if all keys are equal, 0 if they cancel
        spread   [P, Hkv], standard deviation over mean of the distances |k_i - mean|: what ManifoldKV ranks by.
                 Near 0 all tokens are equally far, and the ranking is noise
    """
    pull, spread = [], []
    for prefix in (keys[:, :length].double() for length in lengths):
        pull.append(prefix.mean(1).norm(dim=-1) / _positive(prefix.norm(dim=-1).mean(-1)))
        spread.append(_variation(reference.manifold_scores(prefix[None])[0]))
    return {"pull": torch.stack(pull), "spread": torch.stack(spread)}


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
    """Distances of different points [N, D] to their nearest others, ascending, [n, min(count, n - 1)] fp64. At most
    `MOST_POINTS` are used.
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


def mean(layer: dict[str, Any], name: str, prefix: int = -1) -> float:
    """Mean over KV heads of a measurement, at one prefix where it has several (default the whole context)."""
    numbers = layer[name]
    return fmean(numbers[prefix] if isinstance(numbers[0], list) else numbers)


COLUMNS: dict[str, tuple[str, Any, str]] = {
    "pca": ("PCA", "{:.0f}", "intrinsic dimension of the keys: components for 95% of variance"),
    "two_nn": ("2-NN", "{:.1f}", "the same as the two nearest neighbours see it: Two-NN"),
    "mle": ("MLE", "{:.1f}", "the same as near neighbours see it: Levina-Bickel"),
    "key_norm": ("|k|", "{:.3g}", "mean norm of the keys"),
    "key_spread": ("std", "{:.0%}", "standard deviation of |k|, relative to the mean"),
    "value_norm": ("|v|", "{:.3g}", "mean norm of the values"),
    "anchor": ("anchor", "{:.2f}", "mean cosine of the keys with their mean (KeyDiff)"),
    "pull": ("pull", "{:.2f}", "length of the mean key, relative to |k|"),
    "spread": ("spread", "{:.3f}", "of the distances from the mean key: std, relative to the mean (ManifoldKV)"),
}


def run(options: argparse.Namespace, console: Console | None = None) -> dict[str, Any]:
    """Print the table, and write inspect.json into `options.out`. Returns: what the file holds."""
    console = console or common.console_of()
    text = facts.read(options.text)
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("context", options.context or LEAST, model, options.model)
    most = options.context or min(common.longest_text(model), MOST)
    ids = torch.tensor(tokenizer(text, truncation=True, max_length=most).input_ids, dtype=torch.long)
    facts.check_tokens(options.text, len(ids), options.context or LEAST)
    doubled = (LEAST << step for step in range(len(ids).bit_length()))
    lengths = [*(length for length in doubled if length < len(ids)), len(ids)]
    cached = list(common.read_stock(model, ids[None]))
    with common.progress(console) as progress:
        tracked = progress.track(cached, description="measuring")
        layers = [measure_layer(index, keys[0], values[0], lengths) for index, keys, values in tracked]
    means = [{name: mean(layer, name) for name in COLUMNS} | {"layer": layer["layer"]} for layer in layers]
    report = {"model": options.model, "text": options.text, "tokens": len(ids), "lengths": lengths, "layers": layers}
    common.write_json(options.out / "inspect.json", {"versions": common.versions(), **report})
    common.show(console, common.table_of(means, (), {"layer": ("layer", "{}", "")} | COLUMNS))
    legend = common.legend(COLUMNS)
    console.print(f"\nMeans over the KV heads of a layer, {len(ids)} tokens of {options.text}.\n{legend}\n")
    for name in ("pull", "spread"):
        over = (fmean(mean(layer, name, place) for layer in layers) for place in range(len(lengths)))
        diluted = ", ".join(f"{number:.3f} after {length}" for number, length in zip(over, lengths))
        console.print(f"{name}, mean over layers: {diluted} tokens")
    shares = known_shares(model)
    console.print(NOT_CALIBRATED if shares is None else picture(shares.shares(KEEP)))
    console.print(f"{options.out / 'inspect.json'} written")
    return report


def measure_layer(index: int, keys: Tensor, values: Tensor, lengths: list[int]) -> dict[str, Any]:
    """All measurements of one layer from its keys [Hkv, N, D] and its values [Hkv, N, Dv].

    Returns: a number for each KV head, or a list of them for each prefix length, by name:
        layer: index in the model, a single number.
        pca, two_nn, mle: intrinsic dimension of the keys.
        key_norm, key_spread: mean norm, and its standard deviation over the mean; value_*: same.
        anchor: mean cosine of the keys with their mean (KeyDiff, Sec. 3.2).
        pull, spread: of each prefix, see `dilution`.
    """
    clouds = zip(*(dimensions(head) for head in keys))
    numbers: dict[str, Any] = {"layer": index, **{name: list(one) for name, one in zip(Dimensions._fields, clouds)}}
    several = {"key_": norms(keys), "value_": norms(values), "": dilution(keys, lengths)}
    numbers |= {f"{kind}{name}": one.tolist() for kind, found in several.items() for name, one in found.items()}
    return numbers | {"anchor": (-reference.keydiff_scores(keys.double()[None])[0].mean(-1)).tolist()}
