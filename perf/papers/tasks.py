"""Rows about answers: facts in real text, compressed before any question is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch

from fastkv import Budget, corrections, reference
from fastkv.calibration.quality import keep_for
from fastkv.lab import facts, fit_context, fits
from fastkv.policies import Compactor, KeyDiff, Leverage, Manifold, NonCausal

from .bench import Asked, Bench, Text
from .row import AGREES, DIFFERS, UNTRIED, Judged, Measured, error, mean, number, percent

KEEPS = (0.75, 0.5, 0.25, 0.1, 0.05)
BLOCK = 128
FEWEST = 30  # questions that a verdict rests on


@dataclass(frozen=True)
class Cache:
    """A way to compress: policy, how the budget is shared, in blocks or whole, and correction with its maps.

    halves: whether a quarter of the room holds tokens with one of key and value, twice as many.
    """

    policy: Any
    heads: str = "uniform"
    layers: str = "uniform"
    block: int | None = None
    correction: Any = "none"
    vector: Any = None
    halves: bool = False


def asked_texts(bench: Bench, texts: int, length: int, make: Any = facts.sample) -> Iterator[tuple[Text, list[Asked]]]:
    """Texts that are read, and the questions that the full cache answers."""
    for seed in range(texts):
        sample = make(bench.tokenizer, length, seed)
        reading = Text(bench, torch.tensor([sample.prefix]))
        yield reading, bench.ask(sample, reading)


def answered(
    bench: Bench, caches: Mapping[str, Cache], keeps: Sequence[float], texts: int, length: int,
    make: Any = facts.sample, halve: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Right answers of every cache at every share of tokens, by text; questions are later.

    Args: halve: given a cache, its text, a number of tokens and the name, leaves these tokens one of key and value.
    Returns: nll: of the right answers' tokens with the full cache first; text_nll: of the text itself.
    """
    length, texts = bench.size(length, 160), bench.size(texts, 1)
    cells: dict[str, dict[str, list[Any]]] = {}
    count, full, own, depths = [], [], [], []
    for reading, asked in asked_texts(bench, texts, length, make):
        count.append(len(asked))
        full.append(bench.answers(reading.full(), asked).nll)
        own.append(reading.nll)
        depths.append([one.depth for one in asked])
        for name, one in caches.items():
            for keep in keeps:
                room = max(math.ceil(keep * reading.ids.shape[1]), 40)
                halves = 2 * (room // 4) if one.halves else 0
                budget = Budget(tokens=room + halves // 2, heads=one.heads, layers=one.layers)
                given = reading if one.block is None else reading.ids
                settings = {"correction": one.correction, "prefill_block": one.block, "vector": one.vector}
                with bench.cache(given, one.policy, budget, **settings) as cache:
                    if halves:
                        halve(cache, reading, halves, name)
                    got = bench.answers(cache, asked)
                cell = cells.setdefault(f"{name} {keep}", {"right": [], "nll": []})
                cell["right"].append(got.right)
                cell["nll"].append(got.nll)
                bench.tick(1 / texts / len(caches) / len(keeps))
    return {"cells": cells, "caches": list(caches), "keeps": list(keeps), "texts": texts, "length": length,
            "questions": sum(count), "full_nll": full, "text_nll": own, "depths": depths}  # fmt: skip


def share(n: dict[str, Any], name: str, keep: float) -> float | None:
    """Right answers of a cell, as a share of the questions that the full cache answers."""
    return mean([float(x) for text in n["cells"][f"{name} {keep}"]["right"] for x in text])


def spread(n: dict[str, Any]) -> float:
    """The largest standard error over texts of any cell."""
    errors = [error([mean(map(float, text)) for text in cell["right"]]) for cell in n["cells"].values()]
    return max((one for one in errors if one is not None), default=0.0)


def nll(n: dict[str, Any], name: str, keep: float) -> float | None:
    """Mean NLL of the values' tokens."""
    return mean(n["cells"][f"{name} {keep}"]["nll"])


def over_shares(n: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By cache, right answers and NLL of the answers, mean over the shares of tokens that stay."""
    read = (share, nll)
    return tuple({name: mean(one(n, name, keep) for keep in n["keeps"]) for name in n["caches"]} for one in read)


def answers_table(n: dict[str, Any], paper: Mapping[str, Sequence[float | None]] = {}) -> list[list[str]]:
    """Rows are caches, columns shares of tokens that stay; the paper's numbers in brackets."""
    rows = [["kept", *(f"{keep:.0%}" for keep in n["keeps"])]]
    for name in n["caches"]:
        known = [*paper.get(name, ()), *[None] * len(n["keeps"])]
        rows.append([name, *(percent(share(n, name, keep)) + (f" ({told})" if told is not None else "")
                             for keep, told in zip(n["keeps"], known))])  # fmt: skip
    return rows


def basis(n: dict[str, Any]) -> str:
    """What the numbers rest on."""
    return (f"{n['questions']} questions that the full cache answers, of {n['texts']} texts of {n['length']} tokens; "
            f"standard errors are at most {spread(n):.2f}.")  # fmt: skip


def draw_answers(axes: Any, n: dict[str, Any]) -> None:
    """Right answers over the share kept, a line a cache."""
    for name in n["caches"][:7]:
        line = [100 * (share(n, name, keep) or 0) for keep in n["keeps"]]
        axes[0].plot([100 * keep for keep in n["keeps"]], line, marker="o", ms=4, label=name)
    axes[0].set(xlabel="tokens kept, %", ylabel="right, % of the full cache's", ylim=(-3, 103))


# Compactor.

FIG5 = {
    "compactor": Cache(Compactor(sketch=32)),
    "snapkv": Cache("snapkv"),
    "h2o": Cache("h2o"),
    "pyramidkv": Cache("snapkv", layers="pyramid"),
    "random": Cache("random"),
}
PAPER5 = {"compactor": (93.8, 87.4, 77.5, 59.5, 43.1)}


def judge_fig5(n: dict[str, Any]) -> Judged:
    """Compactor degrades most gracefully where the question comes later."""
    ours = [share(n, "compactor", keep) for keep in n["keeps"]]
    others = [max(share(n, name, keep) or 0 for name in n["caches"][1:]) for keep in n["keeps"]]
    ahead = all(one >= other - spread(n) for one, other in zip(ours, others))
    close = all(abs(100 * one - paper) < 15 for one, paper in zip(ours[:3], PAPER5["compactor"]))
    lost = next(
        (keep for keep, one, paper in zip(n["keeps"], ours, PAPER5["compactor"]) if paper - 100 * one >= 15), None
    )
    said = f" From {lost:.0%} on it loses more than in the paper, by the model or the task." if lost else ""
    return Judged(
        AGREES if ahead and close else DIFFERS,
        "Compactor " + "/".join(f"{100 * one:.0f}" for one in ours) + " %, best other "
        + "/".join(f"{100 * one:.0f}" for one in others) + " %",
        f"{basis(n)} Within a standard error Compactor {'is' if ahead else 'is not'} ahead of the others at every "
        f"share.{said}",
        answers_table(n, PAPER5),
    )  # fmt: skip


VARIANTS = {
    "Cholesky (default)": Cache(Compactor(sketch=32, blend=0.35)),
    "SVD": Cache(Compactor(sketch=32, blend=0.35, method="svd")),
    "QR": Cache(Compactor(sketch=32, blend=0.35, method="qr")),
    "SRHT": Cache(Compactor(sketch=32, blend=0.35, method="srht")),
    "exact": Cache(Compactor(sketch=None, blend=0.35, method="exact")),
    "attention only": Cache(NonCausal()),
    "leverage only": Cache(Leverage(sketch=32)),
}
PAPER_VARIANTS = {
    "Cholesky (default)": (86.8, 58.2),  # its Gram matrix by eigenvalues
    "SVD": (87.4, 59.5),
    "QR": (87.2, 59.8),
    "SRHT": (87.8, 59.9),
    "exact": (88.1, 59.4),
    "leverage only": (81.7, 34.7),
}


def variants(bench: Bench) -> dict[str, Any]:
    """Answers, and by how much the routes to leverage differ as numbers."""
    found = answered(bench, VARIANTS, (0.5, 0.1), texts=6, length=1024)
    reading = Text(bench, bench.stretch(bench.size(1024, 160), 3))
    most, condition = 0.0, []
    for index in range(len(reading.layers)):
        keys = reading.pre_rope(index)
        svd = reference.leverage_scores(keys, 32, "svd")
        for method in ("qr", "cholesky"):
            most = max(most, ((reference.leverage_scores(keys, 32, method) - svd).abs() / svd).max().item())
        condition.append(torch.linalg.cond(keys[0].double()).max().item())
    return {**found, "difference": most, "condition": max(condition)}


def judge_variants(n: dict[str, Any]) -> Judged:
    """Routes to leverage are alike; what is blended matters."""
    names = ("SVD", "QR", "Cholesky (default)")
    apart = max(abs(share(n, a, keep) - share(n, b, keep)) for a in names for b in names for keep in n["keeps"])
    parts = [over_shares(n)[0][name] for name in ("SVD", "attention only", "leverage only")]
    good = apart <= 0.03 and parts[0] >= parts[2]
    return Judged(
        AGREES if good else DIFFERS,
        f"SVD, QR and Cholesky differ by at most {100 * apart:.0f} points; blend {percent(parts[0])}, attention only "
        f"{percent(parts[1])}, leverage only {percent(parts[2])} (mean of two shares)",
        f"{basis(n)} The three routes give the same leverage to {n['difference']:.1e} of it, although keys of a "
        f"head have condition numbers up to {n['condition']:.0f}: fastkv's Gram matrix is in float64. The paper's gap "
        "of 1 to 2 points between SVD and Eig is not seen. The paper's numbers in the row of Cholesky are those of its "
        "eigendecomposition. For the blend see Eq. 5.",
        answers_table(n, PAPER_VARIANTS),
    )


ATTENTION = {
    "as the authors' code": Cache(Compactor(sketch=32)),
    "norm of v after pooling": Cache(Compactor(sketch=32, values_first=False)),
    "with 1/√d": Cache(Compactor(sketch=32, scaled=True)),
    "centred keys": Cache(Compactor(sketch=32, centred=True)),
    "leverage only": Cache(Leverage(sketch=32)),
}


def judge_attention(n: dict[str, Any]) -> Judged:
    """Whether attention helps beside leverage, and what of its form matters."""
    told, lost = over_shares(n)
    ours, scaled, without = told["as the authors' code"], told["with 1/√d"], told["leverage only"]
    return Judged(
        AGREES if ours > without else DIFFERS,
        f"with attention as the authors' code has it {percent(ours)}, with logits divided by √d {percent(scaled)}, "
        f"without any {percent(without)} (mean of two shares)",
        f"{basis(n)} NLL of the answers: " + ", ".join(f"{name} {one:.2f}" for name, one in lost.items()) + ".",
        answers_table(n),
    )


def nll_ratios(bench: Bench) -> dict[str, Any]:
    """NLL of answers over the share kept, and what calibration makes of it (Figs. 6 and 7)."""
    caches = {name: FIG5[name] for name in ("compactor", "snapkv", "pyramidkv", "random")}
    return answered(bench, caches, (0.75, 0.5, 0.25, 0.1), 6, 1024, partial(facts.sample, split="tuning"))


def kept_at(n: dict[str, Any], name: str, quality: float = 0.95) -> float:
    """Share of tokens that the fitted curve keeps for a quality, mean over the texts."""
    told = [
        fit_context.Triple(keep, nll, min(max(full, fit_context.FLOOR) / max(got, fit_context.FLOOR), 1.0))
        for keep in n["keeps"]
        for nll, full, got in zip(n["text_nll"], n["full_nll"], n["cells"][f"{name} {keep}"]["nll"])
        if full is not None and got is not None
    ]
    alpha, beta = fit_context.fit(told)
    return keep_for(quality, alpha * torch.tensor(n["text_nll"]).double() + beta).mean().item()


PAPER7 = {"compactor": 0.38, "snapkv": 0.72, "pyramidkv": 0.75, "random": 0.90}


def judge_kept(n: dict[str, Any]) -> Judged:
    """Compactor needs the fewest tokens, random eviction the most."""
    kept = {name: kept_at(n, name) for name in n["caches"]}
    ordered = kept["compactor"] == min(kept.values())
    good = ordered and kept["compactor"] < 0.6
    ratio = {
        name: mean(min(max(full, 0.05) / max(got, 0.05), 1.0)
                   for full, got in zip(n["full_nll"], n["cells"][f"{name} 0.5"]["nll"]) if full is not None)
        for name in n["caches"]
    }  # fmt: skip
    return Judged(
        AGREES if good else DIFFERS,
        ", ".join(f"{name} {percent(one)}" for name, one in kept.items()),
        f"{basis(n)} With half of the tokens Compactor leaves {number(ratio['compactor'], 2)} of the answers' quality, "
        f"SnapKV {number(ratio['snapkv'], 2)} (NLL ratio): the order is {'the same' if ordered else 'another'}, the "
        f"shares are not. The full cache has {number(mean(n['full_nll']), 3)} nats a token on these values, which it "
        f"copies, so a ratio of .95 allows {number((mean(n['full_nll']) or 0) / 19, 3)} nats, far less than one lost "
        "value costs. The task resembles the paper's UUIDs, which it calls incompressible, and not its LongBench.",
        (("policy", "paper, kept at τ = .95", "ours"),
         *((name, percent(PAPER7[name]), percent(one)) for name, one in kept.items())),
    )  # fmt: skip


def draw_ratios(axes: Any, n: dict[str, Any]) -> None:
    """NLL ratio over the share kept."""
    for name in n["caches"]:
        line = [mean(min(full / got, 1.0) for full, got in zip(n["full_nll"], n["cells"][f"{name} {keep}"]["nll"])
                     if full is not None and got) for keep in n["keeps"]]  # fmt: skip
        axes[0].plot([100 * keep for keep in n["keeps"]], [one or 0 for one in line], marker="o", ms=4, label=name)
    axes[0].set(xlabel="tokens kept, %", ylabel="NLL ratio of the answers", ylim=(0, 1.03))


# KeyDiff and ManifoldKV.

BLOCKS = {
    f"{name}, {how}": Cache(policy, block=block)
    for name, policy in (("KeyDiff", "keydiff"), ("TOVA", "tova"), ("SnapKV", "snapkv"))
    for how, block in (("whole", None), (f"blocks of {BLOCK}", BLOCK))
}
PAPER9 = {"KeyDiff": (49.07, 48.14), "TOVA": (49.25, 41.12), "SnapKV": (49.41, 44.46)}


def judge_blocks(n: dict[str, Any]) -> Judged:
    """Reading in blocks costs KeyDiff least."""
    (keep,) = n["keeps"]
    ours = {name: (share(n, f"{name}, whole", keep), share(n, f"{name}, blocks of {BLOCK}", keep)) for name in PAPER9}
    lost = {
        name: (nll(n, f"{name}, blocks of {BLOCK}", keep) or 0) - (nll(n, f"{name}, whole", keep) or 0)
        for name in PAPER9
    }
    best = max(ours, key=lambda name: ours[name][1])
    falls = {name: whole - blocks for name, (whole, blocks) in ours.items()}
    good = best == "KeyDiff" and falls["KeyDiff"] <= min(falls.values())
    return Judged(
        AGREES if good else DIFFERS,
        "; ".join(f"{name} {percent(a)} whole, {percent(b)} in blocks" for name, (a, b) in ours.items()),
        f"{basis(n)} Blocks add " + ", ".join(f"{value:+.2f} for {name}" for name, value in lost.items())
        + f" to the answers' NLL. In blocks {best} is best, as in the paper; that it loses least is not seen. Our "
        "question comes after the text, so SnapKV and TOVA cannot use it even where the text is read "
        "whole, and have less to lose than in the paper.",
        (("policy", "paper, whole", "paper, blocks", "ours, whole", "ours, blocks"),
         *((name, *map(str, PAPER9[name]), *map(percent, ours[name])) for name in ours)),
    )  # fmt: skip


ANCHORS = {
    "mean": Cache(KeyDiff()),
    "normalized mean": Cache(KeyDiff(anchor="normalized_mean")),
    "pairwise": Cache(KeyDiff(anchor="pairwise")),
    "median": Cache(KeyDiff(anchor="median")),
    "dot": Cache(KeyDiff(distance="dot")),
    "Euclidean": Cache(KeyDiff(distance="euclidean")),
}
PAPER14 = {"normalized mean": 40.28, "pairwise": 40.61, "median": 40.67, "dot": 38.01, "Euclidean": 21.06}


def judge_anchors(n: dict[str, Any]) -> Judged:
    """Anchors do not matter; cosine before dot product before Euclidean distance."""
    told, lost = over_shares(n)
    anchors, losses = [*told.values()][:4], [*lost.values()][:4]
    apart = max(losses) - min(losses)
    alike, ordered = apart <= 0.1, lost["mean"] < lost["dot"] < lost["Euclidean"]
    return Judged(
        AGREES if alike and ordered else DIFFERS,
        f"anchors {percent(min(anchors))} to {percent(max(anchors))}; cosine {percent(told['mean'])}, dot "
        f"{percent(told['dot'])}, Euclidean {percent(told['Euclidean'])}",
        f"{basis(n)} NLL of the answers: cosine {lost['mean']:.2f}, dot {lost['dot']:.2f}, Euclidean "
        f"{lost['Euclidean']:.2f}; mean over the shares. Anchors differ by {apart:.2f}, and cosine "
        f"is best, both as in the paper; Euclidean distance is no worse than the dot product here. Euclidean keeps the "
        "keys farthest from their mean, which is ManifoldKV's rule; its Table 7 says the contrary.",
        [*[[*row, number(lost[row[0]], 2) if row[0] in lost else "NLL", str(PAPER14.get(row[0], "")) if row[0] in lost
            else "paper, LongBench at 4K"] for row in answers_table(n)]],
    )  # fmt: skip


METRICS = {
    f"{name}{', heads share' * shared}": Cache(policy, heads="adaptive" if shared else "uniform")
    for shared in (False, True)
    for name, policy in (("L2", Manifold()), ("L1", Manifold(metric="l1")), ("L∞", Manifold(metric="linf")),
                         ("cosine", Manifold(metric="cosine")))
    if not shared or name in ("L2", "cosine")
}  # fmt: skip


def many_keys(tokenizer: Any, length: int, seed: int) -> facts.Sample:
    """A text that is needles and nothing else, as RULER's multikey 2: words and numbers of seven digits, four asked."""
    draw = Random(f"needles {seed}")
    first = "amber brisk calm dusty eager faint giant hasty icy jolly keen lucky mellow noble olive proud quiet rusty"
    second = "anchor basket candle dragon engine feather garden hammer island jacket kettle lantern mirror needle otter"
    names = [f"{a}-{b}" for a in first.split() for b in second.split()]
    draw.shuffle(names)
    head, _ = facts.around(tokenizer, "x")
    ids, needles = list(head), []
    for name in names:
        text = f"One of the special magic numbers for {name} is: {draw.randrange(10**6, 10**7)}.\n"
        more = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) + len(more) > length:
            break
        ids += more
        needles.append((name, text.strip()))
    questions = []
    for name, text in draw.sample(needles, min(4, len(needles))):
        asks = f"What is the special magic number for {name} mentioned in the text?"
        after = facts.around(tokenizer, asks)[1]
        questions.append(facts.Question("number", text, asks, text[-8:-1], after, False))
    return facts.Sample(ids, questions, [])


def judge_multikey(n: dict[str, Any]) -> Judged:
    """Only with enough questions that the full cache answers."""
    asked = 4 * n["texts"]
    if n["questions"] < FEWEST:
        return Judged(UNTRIED, f"the full cache answers {n['questions']} of {asked} questions")
    return judge_metrics(n)


def judge_metrics(n: dict[str, Any]) -> Judged:
    """Length matters: L2 before the others, cosine last."""
    told, lost = over_shares(n)
    good = told["L2"] > max(told["L1"], told["L∞"], told["cosine"]) and lost["L2"] < lost["cosine"]
    return Judged(
        AGREES if good else DIFFERS,
        f"heads share: L2 {percent(told['L2, heads share'])}, cosine {percent(told['cosine, heads share'])}; not: L2 "
        f"{percent(told['L2'])}, L1 {percent(told['L1'])}, L∞ {percent(told['L∞'])}, cosine {percent(told['cosine'])}",
        f"{basis(n)} NLL of the answers: " + ", ".join(f"{name} {value:.2f}" for name, value in lost.items()) + ". The "
        "four scores are the same function with another norm (`manifold_scores`), on the same keys, so the "
        "model is the cause. KeyDiff's own Table 15 has cosine ahead of Euclidean distance, too: the two papers "
        "contradict each other.",
        answers_table(n),
    )  # fmt: skip


# VECTOR.


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PAPER_SWEEP = {0.5: ("43.6", "", "45.5", "", "41.8"), 0.25: ("42.9", "", "", "44.3 at .8", "41.6"),
               0.1: ("", "", "40.5", "", "")}  # fmt: skip


def sweep(bench: Bench) -> dict[str, Any]:
    """KeyDiff with more and more tokens that keep only their key, at equal memory."""
    batches = [
        bench.stretch(bench.size(1024, 128), 500 + i, ("topics", "code")[i % 2]) for i in range(bench.size(12, 3))
    ]
    fitted = fits.fit_vector(bench.model, batches, held_out=0.25 if not bench.quick else 0.4)
    caches = {
        f"p_a = {pairs} (1 - p_c)": Cache("keydiff", correction=corrections.get("vector", share=pairs), vector=fitted)
        if pairs
        else Cache("keydiff")
        for pairs in SHARES
    }
    found = answered(bench, caches, (0.5, 0.25, 0.1), 6, 1024)
    usable = [one for layer in fitted.weights for one in fitted.usable(layer)]
    return {**found, "usable": sum(usable), "heads": len(usable)}


def judge_sweep(n: dict[str, Any]) -> Judged:
    """The best p_a lies between nothing and everything."""
    lines = {keep: [share(n, name, keep) for name in n["caches"]] for keep in n["keeps"]}
    lost = {keep: [nll(n, name, keep) for name in n["caches"]] for keep in n["keeps"]}
    best = {keep: min(range(len(SHARES)), key=lambda i, keep=keep: lost[keep][i]) for keep in n["keeps"]}
    inside = [keep for keep, index in best.items() if 0 < index < len(SHARES) - 1]
    gain = {keep: lost[keep][2] - lost[keep][0] for keep in n["keeps"]}
    rows = [
        (f"{1 - keep:.2f}", *(f"{percent(one)} {number(two, 2)}" + (f" ({told})" if told else "")
                               for one, two, told in zip(lines[keep], lost[keep], PAPER_SWEEP[keep])))
        for keep in n["keeps"]
    ]  # fmt: skip
    return Judged(
        AGREES if len(inside) >= 2 and all(value < 0 for value in gain.values()) else DIFFERS,
        "best NLL at p_a = "
        + ", ".join(f"{SHARES[best[keep]]:.2f} (1 - p_c) for p_c = {1 - keep:.2f}" for keep in best),
        f"{basis(n)} At half of (1 - p_c), the paper's rule, the answers' NLL changes by "
        + ", ".join(f"{value:+.2f}" for value in gain.values()) + f" for the three p_c. Only {n['usable']} of "
        f"{n['heads']} heads have a map good enough to drop values; the others evict plainly, so the curve is "
        "flat. The paper's map reads all heads of a layer and is fitted on 40 million tokens; this map reads one head "
        "and is fitted on 9,000. "
        + by_depth(n),
        (("p_c", *(f"p_a = {pairs} (1 - p_c)" for pairs in SHARES)), *rows),
    )  # fmt: skip


ONE_OF_TWO = {name: Cache("keydiff", halves=name != "plain") for name in ("plain", "V-only", "K-only")}
PAPER5_VECTOR = {  # mean of four LongBench tasks at p_c = .25, .5, .75, .9
    "plain": (47.6, 44.1, 37.0, 24.8), "V-only": (47.7, 48.4, 42.2, 31.3), "K-only": (47.5, 44.4, 39.5, 26.1),
}  # fmt: skip


def values_or_keys(bench: Bench) -> dict[str, Any]:
    """KeyDiff where a quarter of the room holds tokens with one of key and value, made of the other by a linear map.

    What a map makes stands in the place of the key or the value itself, so that nothing else differs. Maps are of all
    heads of a layer, as in the paper, and read what the other heads once had for a token, kept or not.
    """
    sums: dict[tuple[int, str], fits.PairSums] = {}
    for i in range(bench.size(12, 3)):
        ids = bench.stretch(bench.size(1024, 128), 700 + i, ("topics", "code")[i % 2])
        for layer, *pairs in fits.pre_rope_pairs(bench.model, bench.rotary, ids):
            k, v = map(fits.side_by_side, pairs)
            for kind, known, wanted in (("V-only", k, v), ("K-only", v, k)):
                sums.setdefault((layer, kind), fits.PairSums(known, wanted)).add(known, wanted)
    maps = {key: fits.each_head(one.solve().float(), bench.heads) for key, one in sums.items()}
    return answered(bench, ONE_OF_TWO, (0.5, 0.25), 4, 1024, halve=partial(stand_in, bench, maps))


def stand_in(
    bench: Bench, maps: Mapping[tuple[int, str], torch.Tensor], cache: Any, reading: Text, halves: int, name: str
) -> None:
    """Put what maps make in the place of the values or keys of `halves` tokens a head, those where they err least."""
    budget, length = cache.config.budget, reading.ids.shape[1]
    for index, layer in enumerate(cache.compressed):
        slots, rotary = layer.state.exact, bench.rotary[index]
        raw, values = reading.pre_rope(index), reading.layers[index][2]
        known, wanted = (raw, values) if name == "V-only" else (values, raw)
        made = reference.predicted_values(known, maps[index, name])
        held = slots["positions"].long()
        errors = (made - wanted).square().sum(-1).gather(2, held)
        always = (held < budget.sinks) | (held >= length - budget.recent)
        chosen = errors.masked_fill(always, math.inf).argsort(-1)[..., :halves]
        if name == "K-only":
            made = rotary.ahead(made, torch.arange(length).expand(made.shape[:3]), torch.zeros(1))
        rows = made.gather(2, held.gather(2, chosen)[..., None].expand(-1, -1, -1, made.shape[-1]))
        slab = slots.values if name == "V-only" else slots.keys
        slab.scatter_(2, chosen[..., None].expand_as(rows), rows.to(slab.dtype))


def judge_one_of_two(n: dict[str, Any]) -> Judged:
    """Values may be made of keys, keys should not be made of values."""
    lost = {name: [nll(n, name, keep) or 0 for keep in n["keeps"]] for name in ONE_OF_TWO}
    gained = {name: [plain - own for plain, own in zip(lost["plain"], lost[name])] for name in lost}
    better = all(v > k for v, k in zip(gained["V-only"], gained["K-only"]))
    told = ", ".join(f"{name} {', '.join(number(one, 2) for one in lost[name])}" for name in ONE_OF_TWO)
    return Judged(
        AGREES if better and min(gained["V-only"]) > 0 else DIFFERS,
        f"NLL of the answers at p_c = .5 and .75: {told}",
        f"{basis(n)} Values made from keys {'' if better else 'do not always '}lose less than keys made from values, "
        f"and {'' if min(gained['V-only']) > 0 else 'not at both shares '}less than plain eviction. fastkv drops "
        "values only.",
        answers_table(n, {name: PAPER5_VECTOR[name][1:3] for name in ONE_OF_TWO}),
    )


def by_depth(n: dict[str, Any]) -> str:
    """Right answers by third of the text, without VECTOR and by the paper's rule, at the smallest cache (Fig. 4)."""
    told = []
    for third in range(3):
        pair = []
        for name in (n["caches"][0], n["caches"][2]):
            right = n["cells"][f"{name} {n['keeps'][-1]}"]["right"]
            flat = [(depth, good) for text, more in zip(n["depths"], right) for depth, good in zip(text, more)]
            pair.append(mean(float(good) for depth, good in flat if third <= 3 * depth < third + 1))
        told.append(f"{percent(pair[0])} and {percent(pair[1])}")
    return (
        f"By depth of the fact, as in its Fig. 4, at p_c = {1 - n['keeps'][-1]:.2f}, without and with VECTOR: in the "
        f"first third of the text {told[0]}, in the second {told[1]}, in the last {told[2]} are right."
    )


def draw_sweep(axes: Any, n: dict[str, Any]) -> None:
    """NLL of the answers over p_a."""
    for keep in n["keeps"]:
        axes[0].plot(
            SHARES, [nll(n, name, keep) or 0 for name in n["caches"]], marker="o", ms=4, label=f"p_c = {1 - keep:.2f}"
        )
    axes[0].set(xlabel="p_a / (1 - p_c)", ylabel="NLL of the answers, nats")


def of(caches: Mapping[str, Cache], keeps: Sequence[float], texts: int = 6, make: Any = facts.sample) -> Any:
    """What `answered` says of texts of 1,024 tokens."""
    return lambda bench: answered(bench, caches, keeps, texts, 1024, make)


MEASURED: dict[str, Measured] = {
    "compactor_ruler": (of(FIG5, KEEPS, 7), judge_fig5, draw_answers),
    "compactor_variants": (variants, judge_variants),
    "compactor_attention": (of(ATTENTION, (0.5, 0.1)), judge_attention),
    "compactor_kept": (nll_ratios, judge_kept, draw_ratios),
    "keydiff_blocks": (of(BLOCKS, (0.25,)), judge_blocks),
    "keydiff_anchors": (of(ANCHORS, (0.5, 0.25)), judge_anchors),
    "manifold_multikey": (of(METRICS, (0.6, 0.5), 8, make=many_keys), judge_multikey),
    "manifold_metrics": (of(METRICS, (0.5, 0.25)), judge_metrics),
    "vector_sweep": (sweep, judge_sweep, draw_sweep),
    "vector_keys": (values_or_keys, judge_one_of_two),
}
