"""Rows about what eviction costs within a layer, and what moments of the evicted tokens give back (MomentKV)."""

from typing import Any

import torch
from torch import Tensor

from fastkv import Budget
from fastkv.lab.fidelity import Full, Witness, distance, feed

from .bench import Bench, Text, caches
from .row import Judged, mean

BUDGETS = (128, 256, 512)


def fed(bench: Bench, tokens: Tensor, steps: int) -> tuple[Text, Full]:
    """All but the last tokens [1, N] read, and the full cache's attention and predictions for these, one at a time."""
    reading = Text(bench, tokens[:, :-steps])
    attention, log_probs = feed(bench.model, tokens[:, -steps:], reading.full())
    return reading, Full(attention, log_probs, 0)


def evicted(
    bench: Bench, reading: Text, tokens: Tensor, full: Full, policy: Any, budget: Budget, correction: str
) -> dict[str, Any]:
    """What eviction does to the fed tokens: means over steps and heads, by layer, as in `fastkv.lab.fidelity`.

    own: |o - f| / |f| with f attention over all pairs; mass: w_E; cosine: of f_E with f_R; estimate: of f_E with its
    estimate; error: |o - o_full| / |o_full| against the run of the full cache; kl: of the next token, nats.
    """
    with bench.cache(reading, policy, budget, correction=correction, evict_every=1) as cache:
        witnesses = [Witness(layer) for layer in cache.compressed]
        for witness, (_, k, v, _) in zip(witnesses, reading.layers):
            witness.keys, witness.values, witness.comparing = k, v, True
        attention, log_probs = feed(bench.model, tokens, cache)
    layers = [[step for step in witness.compared] for witness in witnesses]

    def of(name: str) -> list[float]:
        return [torch.stack([getattr(step, name) for step in steps]).nanmean().item() for steps in layers]

    heads = layers[0][0].mass.shape[-1]
    against = [
        distance(*(run[index].double().unflatten(-1, (heads, -1)) for run in (attention, full.attention))).mean().item()
        for index in attention
    ]
    kl = (full.log_probs.exp() * (full.log_probs - log_probs)).sum(-1).mean().item()
    names = {"own": "own_error", "mass": "mass", "cosine": "retained_cosine", "estimate": "cosine"}
    return {**{name: of(field) for name, field in names.items()}, "error": against, "kl": kl}


def least_mass(reading: Text, tokens: int) -> list[float]:
    """By layer, the share of attention outside the `tokens` best keys of each single query of the last 32, mean.

    No selection can evict less, as it would have to serve every query with its own best keys.
    """
    found = []
    for q, k, _, scale in reading.layers:
        grouped = q[:, :, -32:].reshape(1, k.shape[1], -1, q.shape[-1])
        p = (scale * grouped @ k.mT).softmax(-1)  # of the last queries: what they do not see is a few keys of many
        found.append(1 - p.topk(min(tokens, p.shape[-1]), -1).values.sum(-1).mean().item())
    return found


def measure_momentkv_error(bench: Bench) -> dict[str, Any]:
    """Mass, angle and error of eviction by H2O (Fig. 2)."""
    steps, whole = bench.size(16, 4), bench.size(4096, 256)
    found = []
    plan = [(whole, tokens) for tokens in (128, 256, 512, 1024)] + [(whole // 2, 128), (whole // 4, 128)]
    plan = [(whole, 64), (whole // 2, 64)] if bench.quick else plan
    done: dict[int, Any] = {}
    for context, tokens in plan:
        if context not in done:
            text = bench.stretch(context, 7)
            done = {context: (text, *fed(bench, text, steps))}
        text, reading, full = done[context]
        budget = Budget(tokens=tokens, sinks=0, recent=1)
        one = evicted(bench, reading, text[:, -steps:], full, "h2o", budget, "none")
        found.append({"context": context, "tokens": tokens, **one, "least": least_mass(reading, tokens)})
    values = [v[0] for _, _, v, _ in reading.layers]
    common = [(v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)).mean().item() for v in values]
    return {"caches": found, "steps": steps, "common_value": common}


def judge_momentkv_error(n: dict[str, Any]) -> Judged:
    """Little mass is evicted, nearly orthogonal to what stays, and the error is large all the same."""
    first = {name: mean(n["caches"][0][name]) for name in ("mass", "cosine", "own", "least")}
    return Judged(first["mass"] < 0.1 and abs(first["cosine"]) < 0.1 and first["own"] > 0.2, {"first": first})


def draw_momentkv_error(axes: Any, n: dict[str, Any]) -> None:
    first = n["caches"][0]
    for axis, name, title in zip(axes, ("mass", "cosine", "own"), ("evicted mass", "cos(f_E, f_R)", "relative error")):
        axis.plot(first[name], label=f"L = {first['tokens']}, mean {mean(first[name]):.3f}")
        axis.axhline({"mass": 0.08, "cosine": 0.0, "own": 0.2}[name], color="#444444", ls="--", label="the paper")
        axis.set(xlabel="layer", ylabel=title)


def measure_momentkv_components(bench: Bench) -> dict[str, Any]:
    """Error and KL of each component at equal tokens (Fig. 3, Tables 3 and 4)."""
    steps, texts = bench.size(20, 4), bench.size(2, 1)
    context, budgets = bench.size(4096, 256), (64,) if bench.quick else BUDGETS
    found: dict[str, dict[str, list[Any]]] = {}
    for seed in range(texts):
        text = bench.stretch(context, 20 + seed)
        reading, full = fed(bench, text, steps)
        for tokens in budgets:
            for name, one in caches("momentkv_components").items():
                budget = Budget(tokens=tokens, sinks=1, recent=32, heads="adaptive")
                one = evicted(bench, reading, text[:, -steps:], full, one.policy, budget, one.correction)
                cell = found.setdefault(f"{name} {tokens}", {"own": [], "kl": [], "error": [], "layers": []})
                for key in ("own", "error"):
                    cell[key].append(mean(one[key]))
                cell["kl"].append(one["kl"])
                cell["layers"].append([one["own"], one["estimate"]])
    return {"caches": found, "budgets": list(budgets), "context": context, "steps": steps, "texts": texts}


def judge_momentkv_components(n: dict[str, Any]) -> Judged:
    """Correction helps several times as much as its eviction rule, first order more than zeroth."""
    least, parts = n["budgets"][0], ("MI", "NC", "both", "order 0", "chunks")

    def gains(what: str) -> dict[str, float]:
        """What each component takes off SnapKV's error or KL, as a share of it."""
        base, *rest = (mean(n["caches"][f"{name} {least}"][what]) for name in ("SnapKV", *parts))
        return {name: 1 - one / base for name, one in zip(parts, rest)}

    own, close = gains("own"), mean(mean(layers[1]) for layers in n["caches"][f"both {least}"]["layers"])
    facts = {"least": least, "own": own, "kl": gains("kl"), "close": close}
    return Judged(own["NC"] > 2 * max(own["MI"], 0) and own["both"] > own["order 0"] > 0, facts)


def draw_momentkv_components(axes: Any, n: dict[str, Any]) -> None:
    """Error over layers without and with moments, and how close the estimate is; as Fig. 3."""
    least = n["budgets"][0]
    for name in ("SnapKV", "order 0", "both"):
        layers = [one[0] for one in n["caches"][f"{name} {least}"]["layers"]]
        axes[0].plot([mean(column) for column in zip(*layers)], label=name)
    axes[0].set(xlabel="layer", ylabel=f"relative error, L = {least}")
    layers = [one[1] for one in n["caches"][f"both {least}"]["layers"]]
    axes[1].plot([mean(column) for column in zip(*layers)], label="cos(f_E, its estimate)")
    axes[1].set(xlabel="layer", ylabel="cosine", ylim=(0, 1))
