"""Rows about answers: facts in real text, compressed before any question is known."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from fastkv import Budget, corrections, reference
from fastkv.calibration.fits import keep_for
from fastkv.lab import facts, fits

from .bench import Asked, Bench, Cache, Text, caches
from .row import PLAIN, Judged, error, mean

FEWEST = 30  # questions that a verdict rests on


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
        full.append(bench.answers(reading.full(), asked)[1])
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
                    right, lost = bench.answers(cache, asked)
                cell = cells.setdefault(f"{name} {keep}", {"right": [], "nll": []})
                cell["right"].append(right)
                cell["nll"].append(lost)
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


def judged(n: dict[str, Any], agrees: bool, **facts: Any) -> Judged:
    """Of a row about answers. Its words know `told` and `lost`, see `over_shares`, what both rest on, and `share` and
    `nll` of each cell.
    """
    told, lost = over_shares(n)
    basis = (f"{n['questions']} questions that the full cache answers, of {n['texts']} texts of {n['length']} tokens; "
             f"standard errors are at most {spread(n):.2f}.")  # fmt: skip
    cells = {"share": partial(share, n), "nll": partial(nll, n)}
    return Judged(agrees, {"told": told, "lost": lost, "basis": basis, **cells, **facts})


def draw_compactor_ruler(axes: Any, n: dict[str, Any]) -> None:
    """Right answers over the share kept, a line a cache."""
    for name in n["caches"][:7]:
        line = [100 * (share(n, name, keep) or 0) for keep in n["keeps"]]
        axes[0].plot([100 * keep for keep in n["keeps"]], line, marker="o", ms=4, label=name)
    axes[0].set(xlabel="tokens kept, %", ylabel="right, % of the full cache's", ylim=(-3, 103))


# Compactor.


def judge_compactor_ruler(n: dict[str, Any]) -> Judged:
    """Compactor degrades most gracefully where the question comes later."""
    ours = [share(n, "compactor", keep) for keep in n["keeps"]]
    others = [max(share(n, name, keep) or 0 for name in n["caches"][1:]) for keep in n["keeps"]]
    ahead = all(one >= other - spread(n) for one, other in zip(ours, others))
    paper = PLAIN["compactor_ruler"].published["compactor"]
    short = [told - 100 * one for one, told in zip(ours, paper)]  # points
    facts = {"ours": ours, "others": others, "ahead": ahead}
    facts["worse_from"] = next((keep for keep, points in zip(n["keeps"], short) if points >= 15), None)
    good = ahead and all(abs(points) < 15 for points in short[:3])
    return judged(n, good, **facts)


def measure_compactor_variants(bench: Bench) -> dict[str, Any]:
    """Answers, and by how much the routes to leverage differ as numbers."""
    found = of("compactor_variants")(bench)
    reading = Text(bench, bench.stretch(bench.size(1024, 160), 3))
    most, condition = 0.0, []
    for index in range(len(reading.layers)):
        keys = reading.pre_rope(index)
        svd = reference.leverage_scores(keys, 32, "svd")
        for method in ("qr", "cholesky"):
            most = max(most, ((reference.leverage_scores(keys, 32, method) - svd).abs() / svd).max().item())
        condition.append(torch.linalg.cond(keys[0].double()).max().item())
    return {**found, "difference": most, "condition": max(condition)}


def judge_compactor_variants(n: dict[str, Any]) -> Judged:
    """Routes to leverage are alike; what is blended matters."""
    names = ("SVD", "QR", "Cholesky (default)")
    apart = max(abs(share(n, a, keep) - share(n, b, keep)) for a in names for b in names for keep in n["keeps"])
    told = over_shares(n)[0]
    return judged(n, apart <= 0.03 and told["SVD"] >= told["leverage only"], apart=apart)


def judge_compactor_attention(n: dict[str, Any]) -> Judged:
    """Whether attention helps beside leverage, and what of its form matters."""
    told = over_shares(n)[0]
    return judged(n, told["as the authors' code"] > told["leverage only"])


def triples(n: dict[str, Any], name: str, keep: float) -> list[fits.Triple]:
    """Of each text with answers: share of tokens, NLL of the text, and the quality that is left."""
    texts = zip(n["text_nll"], n["full_nll"], n["cells"][f"{name} {keep}"]["nll"])
    known = [(own, max(full, fits.FLOOR), got) for own, full, got in texts if full is not None and got is not None]
    return [fits.Triple(keep, own, min(full / max(got, fits.FLOOR), 1.0)) for own, full, got in known]


def kept_at(n: dict[str, Any], name: str, quality: float = 0.95) -> float:
    """Share of tokens that the fitted curve keeps for a quality, mean over the texts."""
    alpha, beta = fits.fit_curve([one for keep in n["keeps"] for one in triples(n, name, keep)])
    return keep_for(quality, alpha * torch.tensor(n["text_nll"]).double() + beta).mean().item()


def judge_compactor_kept(n: dict[str, Any]) -> Judged:
    """Compactor needs the fewest tokens, random eviction the most."""
    kept = {name: kept_at(n, name) for name in n["caches"]}
    ordered = kept["compactor"] == min(kept.values())
    ratio = {name: mean(one.quality for one in triples(n, name, 0.5)) for name in n["caches"]}
    return judged(n, ordered and kept["compactor"] < 0.6, kept=kept, ratio=ratio, ordered=ordered)


def draw_compactor_kept(axes: Any, n: dict[str, Any]) -> None:
    for name in n["caches"]:
        line = [mean(min(full / got, 1.0) for full, got in zip(n["full_nll"], n["cells"][f"{name} {keep}"]["nll"])
                     if full is not None and got) for keep in n["keeps"]]  # fmt: skip
        axes[0].plot([100 * keep for keep in n["keeps"]], [one or 0 for one in line], marker="o", ms=4, label=name)
    axes[0].set(xlabel="tokens kept, %", ylabel="NLL ratio of the answers", ylim=(0, 1.03))


# KeyDiff and ManifoldKV.


def judge_keydiff_blocks(n: dict[str, Any]) -> Judged:
    """Reading in blocks costs KeyDiff least."""
    (keep,), ways, names = n["keeps"], ("whole", "blocks of 128"), ("KeyDiff", "TOVA", "SnapKV")
    ours = {name: [share(n, f"{name}, {way}", keep) for way in ways] for name in names}
    losses = {name: [nll(n, f"{name}, {way}", keep) or 0 for way in ways] for name in names}
    best = max(ours, key=lambda name: ours[name][1])
    falls = {name: whole - blocks for name, (whole, blocks) in ours.items()}
    good = best == "KeyDiff" and falls["KeyDiff"] <= min(falls.values())
    return judged(n, good, ours=ours, best=best, added={name: b - a for name, (a, b) in losses.items()})


def judge_keydiff_anchors(n: dict[str, Any]) -> Judged:
    """Anchors do not matter; cosine before dot product before Euclidean distance."""
    told, lost = over_shares(n)
    anchors, losses = [*told.values()][:4], [*lost.values()][:4]
    apart = max(losses) - min(losses)
    good = apart <= 0.1 and lost["mean"] < lost["dot"] < lost["Euclidean"]
    return judged(n, good, anchors=anchors, apart=apart)


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


def judge_manifold_multikey(n: dict[str, Any]) -> Judged:
    """Only with enough questions that the full cache answers."""
    return Judged(None) if n["questions"] < FEWEST else judge_manifold_metrics(n)


def judge_manifold_metrics(n: dict[str, Any]) -> Judged:
    """Length matters: L2 before the others, cosine last."""
    told, lost = over_shares(n)
    return judged(n, told["L2"] > max(told["L1"], told["L∞"], told["cosine"]) and lost["L2"] < lost["cosine"])


# VECTOR.


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def fitting(bench: Bench, seed: int) -> list[torch.Tensor]:
    """Texts [1, N] that maps are fitted to, from this seed on."""
    length, num = bench.size(1024, 128), bench.size(12, 3)
    return [bench.stretch(length, seed + i, ("topics", "code")[i % 2]) for i in range(num)]


def measure_vector_sweep(bench: Bench) -> dict[str, Any]:
    """KeyDiff with more and more tokens that keep only their key, at equal memory."""
    fitted = fits.fit_vector(bench.model, fitting(bench, 500), held_out=0.25 if not bench.quick else 0.4)
    caches = {"p_a = 0.0 (1 - p_c)": Cache("keydiff")}
    for pairs in SHARES[1:]:
        correction = corrections.get("vector", share=pairs)
        caches[f"p_a = {pairs} (1 - p_c)"] = Cache("keydiff", correction=correction, vector=fitted)
    found = answered(bench, caches, (0.5, 0.25, 0.1), 6, 1024)
    usable = [one for layer in fitted.weights for one in fitted.usable(layer)]
    return {**found, "usable": sum(usable), "heads": len(usable)}


def judge_vector_sweep(n: dict[str, Any]) -> Judged:
    """The best p_a lies between nothing and everything."""
    lost = {keep: [nll(n, name, keep) for name in n["caches"]] for keep in n["keeps"]}
    best = {keep: min(range(len(SHARES)), key=losses.__getitem__) for keep, losses in lost.items()}
    inside = [keep for keep, index in best.items() if 0 < index < len(SHARES) - 1]
    gain = [losses[2] - losses[0] for losses in lost.values()]
    facts = {"best": {keep: SHARES[index] for keep, index in best.items()}, "gain": gain, "depths": by_depth(n)}
    good = len(inside) >= 2 and all(value < 0 for value in gain)
    return judged(n, good, **facts)


def measure_vector_keys(bench: Bench) -> dict[str, Any]:
    """KeyDiff where a quarter of the room holds tokens with one of key and value, made of the other by a linear map.

    What a map makes stands in the place of the key or the value itself, so that nothing else differs. Maps are of all
    heads of a layer, as in the paper, and read what the other heads once had for a token, kept or not.
    """
    sums: dict[tuple[int, str], fits.PairSums] = {}
    for ids in fitting(bench, 700):
        for layer, *pairs in fits.pre_rope_pairs(bench.model, bench.rotary, ids):
            k, v = map(fits.side_by_side, pairs)
            for kind, known, wanted in (("V-only", k, v), ("K-only", v, k)):
                sums.setdefault((layer, kind), fits.PairSums(known, wanted)).add(known, wanted)
    heads = bench.model.config.num_key_value_heads
    maps = {key: fits.each_head(one.solve().float(), heads) for key, one in sums.items()}
    return answered(bench, caches("vector_keys"), (0.5, 0.25), 4, 1024, halve=partial(stand_in, bench, maps))


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


def judge_vector_keys(n: dict[str, Any]) -> Judged:
    """Values may be made of keys, keys should not be made of values."""
    losses = {name: [nll(n, name, keep) or 0 for keep in n["keeps"]] for name in n["caches"]}
    gained = {name: [plain - own for plain, own in zip(losses["plain"], one)] for name, one in losses.items()}
    better, less = all(v > k for v, k in zip(gained["V-only"], gained["K-only"])), min(gained["V-only"]) > 0
    return judged(n, better and less, losses=losses, better=better, less=less)


def by_depth(n: dict[str, Any]) -> list[list[float | None]]:
    """Right answers by third of the text, without VECTOR and by the paper's rule, at the smallest cache (Fig. 4)."""
    told = []
    for third in range(3):
        pair = []
        for name in (n["caches"][0], n["caches"][2]):
            right = n["cells"][f"{name} {n['keeps'][-1]}"]["right"]
            flat = [(depth, good) for text, more in zip(n["depths"], right) for depth, good in zip(text, more)]
            pair.append(mean(float(good) for depth, good in flat if third <= 3 * depth < third + 1))
        told.append(pair)
    return told


def draw_vector_sweep(axes: Any, n: dict[str, Any]) -> None:
    for keep in n["keeps"]:
        line = [nll(n, name, keep) or 0 for name in n["caches"]]
        axes[0].plot(SHARES, line, marker="o", ms=4, label=f"p_c = {1 - keep:.2f}")
    axes[0].set(xlabel="p_a / (1 - p_c)", ylabel="NLL of the answers, nats")


def of(name: str, make: Any = facts.sample) -> Any:
    """What `answered` says of the caches of a row, and texts of 1,024 tokens."""
    row = PLAIN[name]
    return lambda bench: answered(bench, caches(name), row.keeps, row.texts, 1024, make)


measure_compactor_ruler = of("compactor_ruler")
measure_compactor_attention = of("compactor_attention")
# NLL of answers over the share kept, and what calibration makes of it (Figs. 6 and 7).
measure_compactor_kept = of("compactor_kept", partial(facts.sample, split="tuning"))
measure_keydiff_blocks = of("keydiff_blocks")
measure_keydiff_anchors = of("keydiff_anchors")
measure_manifold_multikey = of("manifold_multikey", many_keys)
measure_manifold_metrics = of("manifold_metrics")
