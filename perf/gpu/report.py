"""The chapters of results/README.md on single operations: targets, correctness, tables and plots of gpu_*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..tables import NONE, plot, table, targets
from .heads import SAME_HEADS, shapes
from .targets import HEADS, LLAMA, PUBLISHED, TARGETS, Table, correction_cost, floor_us, predicted_us

DECODE = """
## Decode attention

One layer, bf16, cold L2, medians of graph replays. fastkv appends the token and adds the first-order moments, or what
its name says; "fastkv default" is the default policy's step, with centroids and sums of attention. Everyone else
attends to the same retained tokens only, and "copy" moves as many bytes. The floor is the bytes at 4.3 TB/s.
"""


def us(row: dict[str, Any] | None, spread: bool = False) -> str:
    """A median in microseconds, with p20 to p80 if asked for."""
    if row is None:
        return NONE
    text = f"{row['median_us']:.2f}"
    return f"{text} ({row['p20_us']:.2f}-{row['p80_us']:.2f})" if spread else text


def checks(file: dict[str, Any] | None) -> str:
    """Green and red checks of each operation."""
    if file is None:
        return f"Checks on a GPU: {NONE}.\n"
    rows = []
    for op in dict.fromkeys(row["op"] for row in file["rows"]):
        mine = [row for row in file["rows"] if row["op"] == op]
        red = [row["id"] for row in mine if not row["passed"]]
        rows.append(
            (op, str(sum(row["compared"] for row in mine)), str(len(mine) - len(red)), ", ".join(red) or "none")
        )
    return table(("operation", "comparisons", "cases green", "cases red"), rows)


def decode(timed: Table, heads: str) -> str:
    """Microseconds of every contender at every shape, and of fastkv as predicted from bytes."""
    others = [op for op in timed.ops() if op != "fastkv"]
    rows = []
    for batch, length in sorted(shapes()):
        mine = timed.find("fastkv", heads, batch, length)
        share = f"{mine['of_copy']:.1%}" if mine and mine.get("of_copy") else NONE
        peers = [us(timed.find(op, heads, batch, length)) for op in others]
        predicted = f"{predicted_us(heads, batch, length):.1f} (prediction)"
        floor = f"{floor_us(heads, batch, length):.1f} (prediction)"
        published = PUBLISHED.get((batch, length), "") if heads == LLAMA.name else ""
        rows.append((str(batch), str(length), us(mine, spread=True), share, predicted, floor, published, *peers))
    header = ("B", "L", "fastkv (p20-p80)", "of copy bandwidth", "fastkv, predicted", "floor", "peers, as published")
    header += tuple(others)
    return f"\n### {' and '.join(SAME_HEADS[heads])} heads, µs per layer\n\n" + table(header, rows)


def skipped(files: dict[str, dict[str, Any]]) -> str:
    """Who could not run, and why."""
    found: dict[tuple[str, str], int] = {}
    for name, file in files.items():
        for row in file["rows"] if name.startswith("gpu_") else ():
            if "skipped" in row:
                who = row.get("op") or row["cache"]
                found[who, row["skipped"]] = found.get((who, row["skipped"]), 0) + 1
    rows = [(op, why.replace("|", "/"), str(count)) for (op, why), count in found.items()]
    return "\nNot run:\n\n" + table(("who", "why", "shapes"), rows) if rows else ""


def others(timed: Table) -> str:
    """Every other operation, one row a case."""
    rows = [
        (r["op"], r["heads"], str(r["batch"]), str(r["length"]), us(r, spread=True), f"{r['gbps']:.0f}", _percent(r))
        for r in timed.rows
        if r["part"] not in ("decode", "flex", "checks") and r.get("median_us")
    ]
    header = ("operation", "heads", "B", "L", "µs (p20-p80)", "GB/s of needed bytes", "of copy bandwidth")
    return table(header, rows) or f"Eviction, prompt blocks, scores, selection: {NONE}.\n"


def _percent(row: dict[str, Any]) -> str:
    return f"{row['of_copy']:.1%}" if row.get("of_copy") else NONE


def plots(folder: Path, timed: Table) -> str:
    """Time over L for each model and batch; the share of the copy bandwidth; the cost of the correction."""
    text = ""
    for heads in HEADS:
        measured = timed.shapes(heads)
        model = SAME_HEADS[heads][0]
        over: dict[str, list[tuple[float, float]]] = {}
        cost: dict[str, list[tuple[float, float]]] = {}
        shares: dict[float, float] = {}  # of bytes; the same for every batch
        for batch in sorted({b for b, _ in measured}):
            lengths = [n for b, n in measured if b == batch]
            lines = {
                op: [(n, t) for n in lengths if (t := timed.us(op, batch, n, heads)) is not None] for op in timed.ops()
            }
            title = f"Decode attention, {model} heads, B={batch}"
            text += plot(folder, f"decode_{heads}_b{batch}", title, ("tokens kept", "µs per layer"), lines, log=True)
            found = [(n, timed.find("fastkv", heads, batch, n)) for n in lengths]
            over[f"fastkv B={batch}"] = [(n, 100 * row["of_copy"]) for n, row in found if row and row.get("of_copy")]
            pairs = [(n, correction_cost(timed, heads, batch, n)) for n in lengths]
            cost[f"fastkv B={batch}"] = [(n, 100 * pair[0]) for n, pair in pairs if pair]
            shares |= {n: 100 * pair[1] for n, pair in pairs if pair}
        labels = ("tokens kept", "% of copy bandwidth")
        text += plot(folder, f"bandwidth_{heads}", f"Bandwidth reached, {model} heads", labels, over)
        labels = ("tokens kept", "% more time")
        text += plot(
            folder,
            f"correction_{heads}",
            f"Cost of the correction, {model} heads",
            labels,
            cost | {"share of bytes": [*shares.items()]},
        )
    return text


def steps(file: dict[str, Any] | None) -> str:
    """Decode steps of a whole model, by batch, the full cache first."""
    rows = [row for row in file["rows"] if "ms" in row] if file else []
    if not rows:
        return f"Steps of a whole model: {NONE}.\n"
    found = [
        (
            f"{row['cache']}, {row['budget']} tokens kept" if row["budget"] else row["cache"],
            *(row["model"], str(row["batch"]), str(row["context"])),
            f"{row['ms']['p50']:.2f} ({row['ms']['p20']:.2f}-{row['ms']['p80']:.2f})",
            *(f"{row['tokens_per_s']:.0f}", f"{row['first_s']:.2f}", f"{row['cache_bytes'] / 2**30:.2f}"),
        )
        for row in sorted(rows, key=lambda row: (row["batch"], row["cache"]))
    ]
    return table(("cache", "model", "B", "prompt", "ms a step (p20-p80)", "tokens/s", "first token, s", "GiB"), found)


def timed(files: dict[str, dict[str, Any]]) -> Table:
    """All timed rows."""
    return Table(
        [
            {"part": name.removeprefix("gpu_"), **row}
            for name, file in files.items()
            if name.startswith("gpu_") and name not in ("gpu_checks", "gpu_model")
            for row in file["rows"]
        ]
    )


def promises(files: dict[str, dict[str, Any]]) -> str:
    """Targets and predictions."""
    return "\n## Targets and predictions of single operations\n\n" + targets(timed(files), TARGETS)


def chapters(files: dict[str, dict[str, Any]]) -> str:
    """Correctness, decode attention, and the other operations."""
    rows = timed(files)
    parts = ["\n## Correctness on the GPU\n\n", checks(files.get("gpu_checks")), DECODE]
    parts += [*(decode(rows, heads) for heads in HEADS), skipped(files)]
    parts += [
        "\n## Steps of a whole model\n\n",
        steps(files.get("gpu_model")),
        "\n## Other operations\n\n",
        others(rows),
    ]
    return "".join(parts)
