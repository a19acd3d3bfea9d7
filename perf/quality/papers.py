"""What the papers' ablations report, with the table of each number, beside the cases that ask the same question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ablation:
    """One table of a paper and its counterpart.

    Attributes:
        part: whose cases answer.  read: how the prompts were read; None for all ways.  title: of the section.
        source: the paper and its table.  measured: what the paper's numbers are.
        columns: of the paper's table.  numbers: paper's, by row; None where a cell is missing.
        rows: names of the cases, in the order of the table.  method: the row that is the policy's default.
        differs: one sentence on what the two measurements do not have in common.
    """

    part: str
    read: str | None
    title: str
    source: str
    measured: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    method: str
    differs: str
    numbers: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


MOMENTKV: dict[str, Any] = dict(
    part="momentkv",
    source="MomentKV, arXiv:2606.01563",
    measured="LongBench average, Llama-3.1-8B-Instruct, tokens per head",
    columns=("L = 128", "L = 256", "L = 512"),
    method="both (chunk 4)",
)
COMPONENTS: dict[str, Any] = dict(
    title="MomentKV: components and order",
    rows=(
        "SnapKV",
        "moment-informed only",
        "correction only",
        "both (chunk 4)",
        "SnapKV + mean (order 0)",
        "order 0 in score and correction",
        "attention in chunks, corrected",
        "both, chunk 1",
        "both, chunk 8",
        "both, heads share (the paper's protocol)",
    ),
    numbers={
        "SnapKV": (43.21, 45.50, 47.29),
        "moment-informed only": (43.78, 45.85, 47.52),
        "correction only": (45.62, 47.05, 47.98),
        "both (chunk 4)": (46.38, 47.59, 48.27),
        "SnapKV + mean (order 0)": (44.15, None, None),
    },
)
KEYDIFF: dict[str, Any] = dict(
    part="keydiff",
    read=None,
    measured="LongBench average, Llama-3.2-3B-Instruct, blocks of 128 unless the row says otherwise",
    columns=("2K", "4K", "6K", "8K"),
    method="mean",
)
COMPACTOR: dict[str, Any] = dict(
    part="compactor",
    read="context",
    measured="mean of the 13 RULER tasks, Llama 3.1, share of tokens kept",
    columns=("50 %", "25 %", "10 %"),
    method="λ = 0.3",
)
ABLATIONS = (
    Ablation(
        **MOMENTKV,
        **COMPONENTS,
        read="whole",
        differs=(
            "The paper compares at equal tokens, so its moments cost nothing, and its contexts are long beside the "
            "budget; here every row has the same bytes, so a row with moments of order 1 keeps fewer tokens, and an "
            "answer needs exact tokens."
        ),
    ),
    Ablation(
        **MOMENTKV,
        **COMPONENTS,
        read="context",
        differs=(
            "The paper always has the question in its observation window; here it comes after the text is compressed, "
            "which a score from the last queries cannot foresee."
        ),
    ),
    Ablation(
        **KEYDIFF,
        title="KeyDiff: anchor",
        source="KeyDiff, arXiv:2504.15364, Table 14 (its appendix G names the mean of the normalised keys as default)",
        rows=("mean", "normalized mean", "median", "pairwise"),
        numbers={
            "normalized mean": (35.09, 40.28, 41.88, 42.40),
            "pairwise": (35.24, 40.61, 41.87, 42.45),
            "median": (35.43, 40.67, 41.89, 42.26),
        },
        differs="The paper averages 21 tasks of long texts; here a small model answers one question a text.",
    ),
    Ablation(
        **KEYDIFF,
        title="KeyDiff: distance",
        source="KeyDiff, arXiv:2504.15364, Table 15",
        rows=("mean", "dot product", "Euclidean"),
        numbers={
            "mean": (35.09, 40.28, 41.88, 42.40),
            "dot product": (30.14, 38.01, 41.09, 42.23),
            "Euclidean": (13.68, 21.06, 25.91, 29.53),
        },
        differs=(
            "The Euclidean row keeps the keys that are farthest from the mean, which is ManifoldKV's rule, and the two "
            "papers contradict each other about it; lengths of keys mean something else in every model."
        ),
    ),
    Ablation(
        **{**KEYDIFF, "method": "mean"},
        title="KeyDiff: block size",
        source="KeyDiff, arXiv:2504.15364, Tables 10 and 12",
        rows=("64", "mean", "256", "whole"),
        numbers={
            "64": (34.79, 40.33, 41.85, 42.23),
            "mean": (35.09, 40.28, 41.88, 42.40),
            "256": (35.52, 40.20, 41.77, 42.35),
        },
        differs=(
            "The row `mean` is blocks of 128; the paper's prompts have many more blocks than the 4 to 16 here, and its "
            "unblocked average (Table 9) leaves out a task, so it is not comparable."
        ),
    ),
    Ablation(
        part="manifold",
        read="context",
        title="ManifoldKV: windows",
        source="ManifoldKV, arXiv:2602.08343, Table 2",
        measured="RULER accuracy at 64K, Llama-3.1-8B, 25 % removed, %; windows as shares of the text",
        columns=("64K",),
        rows=(
            "L2, global",
            "L2, windows of 256 (1/4)",
            "L2, windows of 128 (1/8)",
            "L2, windows of 64 (1/16)",
            "L2, windows of 32 (1/32)",
        ),
        method="L2, global",
        numbers={
            "L2, global": (35.2,),
            "L2, windows of 256 (1/4)": (82.4,),
            "L2, windows of 128 (1/8)": (83.9,),
            "L2, windows of 64 (1/16)": (84.3,),
            "L2, windows of 32 (1/32)": (83.8,),
        },
        differs=(
            "The paper's collapse of a single mean key shows at 64K tokens of many topics; 1024 tokens of one kind are "
            "far below the length where it begins."
        ),
    ),
    Ablation(
        part="manifold",
        read="context",
        title="ManifoldKV: distance",
        source="ManifoldKV, arXiv:2602.08343, Table 7",
        measured="RULER accuracy, Llama-3.1-8B, without shared heads, %",
        columns=("accuracy",),
        rows=("cosine", "L1", "L∞", "L2, global"),
        method="L2, global",
        numbers={"cosine": (52.8,), "L1": (78.5,), "L∞": (71.2,), "L2, global": (92.7,)},
        differs=(
            "The paper's numbers come from long texts and do not name the share that was removed; here at least three "
            "quarters of a short text go."
        ),
    ),
    Ablation(
        **COMPACTOR,
        title="Compactor: blend and attention",
        source="Compactor, arXiv:2507.08143, Table 2",
        rows=(
            "λ = 0.15",
            "λ = 0.2",
            "λ = 0.3",
            "λ = 0.35",
            "λ = 0.4",
            "exact leverage, λ = 0.35",
            "no attention",
            "no leverage (λ = 0)",
        ),
        numbers={
            "λ = 0.35": (87.4, 77.5, 59.5),
            "exact leverage, λ = 0.35": (88.1, 77.5, 59.4),
            "λ = 0.15": (87.8, 77.2, 60.1),
            "λ = 0.2": (86.4, 77.6, 58.6),
            "λ = 0.4": (88.2, 77.8, 58.8),
            "no attention": (81.7, 60.2, 34.7),
        },
        differs=(
            "The paper's 13 tasks mix needles with aggregation over the whole text; here every answer is a few rare "
            "words among filler, which favours leverage over attention inside a chunk."
        ),
    ),
    Ablation(
        **{**COMPACTOR, "method": "λ = 0.35"},
        title="Compactor: sketch and method",
        source="Compactor, arXiv:2507.08143, Tables 3 and 4 (SVD is the paper's default)",
        rows=(
            "λ = 0.35",
            "exact leverage, λ = 0.35",
            "sketch 32, λ = 0.35",
            "sketch 16, λ = 0.35",
            "sketch 32, QR",
            "sketch 32, SVD",
            "sketch 32, SRHT",
        ),
        numbers={
            "sketch 32, SVD": (87.4, 77.5, 59.5),
            "sketch 32, QR": (87.2, 76.9, 59.8),
            "sketch 32, SRHT": (87.8, 77.4, 59.9),
        },
        differs=(
            "The paper sketches heads of 128 to 64 columns; heads here have 64, so the default sketch is none, and "
            "methods are compared at 32."
        ),
    ),
    Ablation(
        part="vector",
        read="context",
        title="VECTOR: share of tokens without values",
        source="VECTOR, arXiv:2605.23258, Sec. 5.3 and Fig. 3",
        measured="mean LongBench score, Llama-3.1-8B-Instruct, two tasks, KeyDiff and KVzip, %; share p_c removed",
        columns=("p_c = 0.5", "p_c = 0.75", "p_c = 0.9"),
        rows=(
            "p_a = 0 (KeyDiff)",
            "p_a = 0.25 (1 - p_c)",
            "p_a = 0.5 (1 - p_c)",
            "p_a = 0.75 (1 - p_c)",
            "p_a = 1.0 (1 - p_c)",
        ),
        method="p_a = 0.5 (1 - p_c)",
        numbers={
            "p_a = 0 (KeyDiff)": (43.6, 42.9, None),
            "p_a = 0.5 (1 - p_c)": (45.5, None, 40.5),
            "p_a = 1.0 (1 - p_c)": (41.8, 41.6, None),
        },
        differs=(
            "The map is fitted on the bundled model's own kind of text, and the first and latest tokens always keep "
            "their values, so the last row stops short of dropping all of them; at p_c = 0.75 the paper's best is "
            "p_a = 0.8 (1 - p_c), 44.3."
        ),
    ),
)
