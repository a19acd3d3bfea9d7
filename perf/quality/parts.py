"""A case for each cache, in parts that each have one file. Nothing is measured here."""

from __future__ import annotations

from typing import Any

from fastkv import policies

from .cases import BLOCK, BUDGETS, CONTEXT, FIDELITY, FULL, LANGUAGE, TIGHT, Case


def grid(rows: dict[str, dict[str, Any]], reads: tuple[str, ...], budgets: tuple[int, ...] = TIGHT) -> list[Case]:
    """Every row at every budget, one way of reading after the other."""
    return [
        Case(**{"name": name, "read": read, "tokens": tokens, **row})
        for read in reads
        for tokens in budgets
        for name, row in rows.items()
    ]


def every_policy(read: str) -> list[Case]:
    """All registered policies that can read this way, at all budgets."""
    fit = [name for name in policies.names() if not (read.isdigit() and policies.get(name).rereads)]
    return grid({name: {"policy": name} for name in fit}, (read,), BUDGETS)


MOMENTKV: dict[str, dict[str, Any]] = {
    "SnapKV": {"policy": "snapkv"},
    "moment-informed only": {"policy": "momentkv", "correction": "none"},
    "correction only": {"policy": "snapkv", "correction": "moments"},
    "both (chunk 4)": {"policy": "momentkv"},
    "SnapKV + mean (order 0)": {"policy": "snapkv", "correction": "mean"},
    "order 0 in score and correction": {
        "policy": "momentkv",
        "hyper": {"residual_order": 0},
        "correction": "mean",
    },
    "attention in chunks, corrected": {"policy": "momentkv", "hyper": {"informed": False}},
    "both, chunk 1": {"policy": "momentkv", "hyper": {"chunk": 1}},
    "both, chunk 8": {"policy": "momentkv", "hyper": {"chunk": 8}},
    "both, heads share (the paper's protocol)": {
        "policy": "momentkv",
        "heads": "adaptive",
        "sinks": 1,
        "recent": 32,
        "evict_every": 1,
    },
}
KEYDIFF: dict[str, dict[str, Any]] = {
    "mean": {"policy": "keydiff"},
    **{
        anchor.replace("_", " "): {"policy": "keydiff", "hyper": {"anchor": anchor}}
        for anchor in ("normalized_mean", "median", "pairwise")
    },
    "dot product": {"policy": "keydiff", "hyper": {"distance": "dot"}},
    "Euclidean": {"policy": "keydiff", "hyper": {"distance": "euclidean"}},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "64": {"policy": "keydiff", "read": "64"},
    "256": {"policy": "keydiff", "read": "256"},
    "whole": {"policy": "keydiff", "read": "whole"},
}
MANIFOLD: dict[str, dict[str, Any]] = {
    "L2, global": {"policy": "manifold"},
    **{
        f"L2, windows of {CONTEXT // parts} (1/{parts})": {"policy": "manifold", "hyper": {"window": CONTEXT // parts}}
        for parts in (4, 8, 16, 32)
    },
    "L1": {"policy": "manifold", "hyper": {"metric": "l1"}},
    "L∞": {"policy": "manifold", "hyper": {"metric": "linf"}},
    "cosine": {"policy": "manifold", "hyper": {"metric": "cosine"}},
}
COMPACTOR: dict[str, dict[str, Any]] = {
    **{f"λ = {blend}": {"policy": "compactor", "hyper": {"blend": blend}} for blend in (0.15, 0.2, 0.3, 0.35, 0.4)},
    "no leverage (λ = 0)": {"policy": "compactor", "hyper": {"blend": 0.0}},
    "no attention": {"policy": "leverage"},
    "exact leverage, λ = 0.35": {"policy": "compactor", "hyper": {"blend": 0.35, "sketch": None, "method": "exact"}},
    **{
        f"sketch {columns}, λ = 0.35": {"policy": "compactor", "hyper": {"blend": 0.35, "sketch": columns}}
        for columns in (16, 32)
    },
    **{
        f"sketch 32, {method.upper()}": {
            "policy": "compactor",
            "hyper": {"blend": 0.35, "sketch": 32, "method": method},
        }
        for method in ("qr", "svd", "srht")
    },
}
VECTOR: dict[str, dict[str, Any]] = {
    "p_a = 0 (KeyDiff)": {"policy": "keydiff"},
    **{
        f"p_a = {share} (1 - p_c)": {"policy": "keydiff", "correction": "vector", "keys_only": share}
        for share in (0.25, 0.5, 0.75, 1.0)
    },
}


def parts() -> dict[str, list[Case]]:
    """The cases of every part, in the order in which they are measured."""
    return {
        FULL: [Case(FULL, FULL, CONTEXT, "whole")],
        "tasks_context": every_policy("context"),
        "tasks_whole": every_policy("whole"),
        FIDELITY: every_policy("whole"),
        LANGUAGE: [case for case in every_policy("whole") if case.policy != "duoattention"],  # no pattern of its heads
        "momentkv": grid(MOMENTKV, ("whole", "context")),
        "manifold": grid(MANIFOLD, ("context",)),
        "compactor": grid(COMPACTOR, ("context",)),
        "vector": grid(VECTOR, ("context",), BUDGETS),
        "keydiff": grid(KEYDIFF, ("128",)) + grid(BLOCKS, ("",)),
        f"tasks_{BLOCK}": every_policy(BLOCK),
    }
