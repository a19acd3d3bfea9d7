"""Rows about keys, queries and values themselves: one reading of a text, no cache is compressed."""

from typing import Any

import torch
from torch import Tensor

from fastkv import reference
from fastkv.calibration.fits import required_r2
from fastkv.lab.fits import PairSums, pre_rope_pairs, side_by_side
from fastkv.lab.inspection import dimensions

from .bench import Bench, Text
from .row import Judged, mean

SINKS = 4  # first tokens


def measure_vector_r2(bench: Bench) -> dict[str, Any]:
    """R^2 on held-out text of three maps from keys before the rotation to values (VECTOR, Sec. 3.1).

    joint: one least-squares map a layer, of all heads together; by head: one a KV head; inverse: the Moore-Penrose
    pseudo-inverse V = W_V W_K^+ K, the values of the shortest hidden state that explains the keys, fitted to nothing.
    """
    length, fitted, held = bench.size(2048, 128), bench.size(16, 3), bench.size(4, 2)
    found: dict[str, list[Any]] = {"joint": [], "by_head": [], "inverse": [], "unseen_joint": []}
    sums: dict[tuple[int, str, str], PairSums] = {}
    for seed in range(fitted + 2 * held):
        part = "fit" if seed < fitted else "held" if seed < fitted + held else "unseen"
        # Sequences of the language reference in turn; the last ones are of another source, which no map was fitted to.
        ids = bench.stretch(length, 1000 + seed, "code" if part == "unseen" else ("topics", "library")[seed % 2])
        for layer, k, v in pre_rope_pairs(bench.model, bench.rotary, ids):
            for kind in ("joint", "by_head"):
                pairs = (side_by_side(k), side_by_side(v)) if kind == "joint" else (k, v)
                sums.setdefault((layer, part, kind), PairSums(*pairs)).add(*pairs)
    for layer in range(bench.model.config.num_hidden_layers):
        joint = sums[layer, "fit", "joint"].solve()
        found["joint"].append(sums[layer, "held", "joint"].r2(joint).item())
        found["unseen_joint"].append(sums[layer, "unseen", "joint"].r2(joint).item())
        by_head = sums[layer, "held", "by_head"]
        found["by_head"].append(by_head.r2(sums[layer, "fit", "by_head"].solve()).tolist())
        attention = bench.model.model.layers[layer].self_attn
        to_keys, to_values = (one.weight.double() for one in (attention.k_proj, attention.v_proj))
        inverse = (to_values @ torch.linalg.pinv(to_keys)).mT[None]
        found["inverse"].append(sums[layer, "held", "joint"].r2(inverse).item())
    return {**found, "tokens": fitted * length, "held_out": held * length, "threshold": required_r2()}


def judge_vector_r2(n: dict[str, Any]) -> Judged:
    """One map a layer explains as much as in the paper, and is positive everywhere."""
    good = mean(n["joint"]) >= 0.6 and min(n["joint"]) > 0 and mean(n["joint"]) > mean(n["inverse"])
    heads = [r2 for layer in n["by_head"] for r2 in layer]
    return Judged(good, {"heads": heads})


def draw_vector_r2(axes: Any, n: dict[str, Any]) -> None:
    axes[0].plot(n["joint"], label="one map a layer")
    axes[0].plot([mean(layer) for layer in n["by_head"]], label="one map a KV head")
    axes[0].plot([max(value, -1) for value in n["inverse"]], label="pseudo-inverse (cut at -1)")
    axes[0].axhspan(0.686, 0.939, color="#dddddd", label="the paper's five models")
    axes[0].set(xlabel="layer", ylabel="held-out R²")


def attention_received(q: Tensor, k: Tensor, scale: float, queries: int | None) -> Tensor:
    """Mean causal attention that each key gets from those of the last `queries` that see it, [1, Hkv, N]; None: all."""
    num, step = k.shape[2], 256
    total = torch.zeros(k.shape[:3])
    first = 0 if queries is None else num - queries
    for start in range(first, num, step):
        part = torch.arange(start, min(start + step, num))
        seen = (torch.arange(num) <= part[:, None])[None, None]
        total += reference.window_attention(q[:, :, part], k, scale, visible=seen) * len(part)
    return total / (num - torch.arange(num).clamp(min=first))


def measure_manifold_correlation(bench: Bench) -> dict[str, Any]:
    """Pearson and Spearman correlation of scores and of attention received, mean over heads (ManifoldKV, Table 18)."""
    texts, length = bench.size(2, 1), bench.size(2048, 160)
    found: dict[str, list[float]] = {}
    for seed in range(texts):
        reading = Text(bench, bench.stretch(length, seed))
        for q, k, _, scale in reading.layers:
            told = {
                "manifold": reference.manifold_scores(k)[0],
                "keydiff": reference.keydiff_scores(k)[0],
                "attention": attention_received(q, k, scale, None)[0],
                "window": attention_received(q, k, scale, 32)[0],
            }
            for a, b in (("manifold", "attention"), ("keydiff", "attention"), ("manifold", "keydiff"),
                         ("manifold", "window"), ("keydiff", "window")):  # fmt: skip
                for name, x, y in (
                    ("pearson", told[a], told[b]),
                    ("spearman", _ranks(told[a]), _ranks(told[b])),
                    ("without", told[a][:, SINKS:], told[b][:, SINKS:]),
                ):
                    found.setdefault(f"{a} {b} {name}", []).extend(_correlation(x, y).tolist())
    return {"tokens": length, "texts": texts, **{name: mean(values) for name, values in found.items()}}


def _ranks(x: Tensor) -> Tensor:
    return x.argsort(-1).argsort(-1).float()


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = (one.double() - one.double().mean(-1, keepdim=True) for one in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=1e-30)


def judge_manifold_correlation(n: dict[str, Any]) -> Judged:
    """Both scores are nearly unrelated to attention, KeyDiff's more related, and they are related to each other."""
    pairs = ("manifold attention", "keydiff attention", "manifold keydiff")
    manifold, keydiff, each = (n[f"{pair} pearson"] for pair in pairs)
    return Judged(manifold < keydiff < each and manifold < 0.3 and each > 0.5, {"sinks": SINKS})


def measure_manifold_dimension(bench: Bench) -> dict[str, Any]:
    """Intrinsic dimension of the cached keys of every head (ManifoldKV, Eqs. 15 to 17)."""
    length = bench.size(2048, 160)
    reading = Text(bench, bench.stretch(length, 0))
    layers = [[list(map(float, dimensions(head))) for head in k[0]] for _, k, *_ in reading.layers]
    return {"tokens": length, "head_dim": reading.layers[0][1].shape[-1], "layers": layers}


def judge_manifold_dimension(n: dict[str, Any]) -> Judged:
    """Two-NN near nine, and PCA at two thirds of the head's size."""
    pca, two, mle = (mean(head[index] for layer in n["layers"] for head in layer) for index in range(3))
    early, late = (mean(head[1] for layer in part for head in layer) for part in (n["layers"][:5], n["layers"][-5:]))
    share = pca / n["head_dim"]
    facts = {"pca": pca, "two": two, "mle": mle, "share": share, "early": early, "late": late}
    return Judged(6 <= two <= 11 and 0.5 <= share <= 0.8, facts)


def draw_manifold_dimension(axes: Any, n: dict[str, Any]) -> None:
    for index, name in enumerate(("PCA, 95 % of the variance", "Two-NN", "maximum likelihood")):
        axes[0].plot([mean(head[index] for head in layer) for layer in n["layers"]], label=name)
    axes[0].set(xlabel="layer", ylabel="intrinsic dimension")


def measure_keydiff_cosines(bench: Bench) -> dict[str, Any]:
    """Cosine of keys and of queries with their mean, both means, and KeyDiff's first choice (Figs. 13, 14, 16)."""
    length = bench.size(2048, 160)
    reading = Text(bench, bench.stretch(length, 0))
    found: dict[str, list[Any]] = {"keys": [], "queries": [], "means": [], "chosen": []}
    for q, k, *_ in reading.layers:
        groups = q.shape[1] // k.shape[1]
        found["keys"].append((-reference.keydiff_scores(k)).mean(-1)[0].tolist())
        found["queries"].append((-reference.keydiff_scores(q)).mean(-1)[0].tolist())
        asked, held = q.mean(2)[0], k.mean(2)[0].repeat_interleave(groups, 0)
        found["means"].append(torch.cosine_similarity(asked, held, dim=-1).tolist())
        best = reference.keydiff_scores(k).argmax(-1)[0]
        chosen = k[0, torch.arange(k.shape[1]), best].repeat_interleave(groups, 0)
        found["chosen"].append(torch.cosine_similarity(asked, chosen, dim=-1).tolist())
    return {"tokens": length, **found}


def judge_keydiff_cosines(n: dict[str, Any]) -> Judged:
    """Keys are collinear; in every head the mean query points away from the mean key."""
    flat = {name: [x for layer in n[name] for x in layer] for name in ("keys", "queries", "means", "chosen")}
    facts = {
        "flat": flat,
        "negative": sum(x < 0 for x in flat["means"]),
        "closer": sum(a > b for a, b in zip(flat["chosen"], flat["means"])),
        "layers": sum(max(layer) >= 0 for layer in n["means"]),
    }
    return Judged(mean(flat["keys"]) > 0.5 and facts["negative"] == len(flat["means"]), facts)


def draw_keydiff_cosines(axes: Any, n: dict[str, Any]) -> None:
    """Collinearity over layers; cosine of the means, a point a head."""
    for name in ("keys", "queries"):
        axes[0].plot([mean(layer) for layer in n[name]], label=f"{name} and their mean")
    axes[0].set(xlabel="layer", ylabel="cosine, mean over heads", ylim=(0, 1))
    points = [(index, x) for index, layer in enumerate(n["means"]) for x in layer]
    axes[1].scatter(*zip(*points), s=8, label="mean key and mean query, a query head")
    axes[1].axhline(0, color="#444444", linewidth=0.8)
    axes[1].set(xlabel="layer", ylabel="cosine")
