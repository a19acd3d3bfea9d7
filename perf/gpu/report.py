"""The chapters of results/README.md on a GPU: correctness, decode steps beside their peers, steps of a whole model."""

from __future__ import annotations

from typing import Any

from ..tables import NONE, table

DECODE = """
## Decode attention

One layer, bf16, cold L2, medians of graph replays. Steps of fastkv include the append, and what their names say;
"fastkv default" is the default policy's step, with centroids and sums of attention. The others attend to the same
retained tokens only. "copy" moves the same number of bytes.

"""


def mine(op: str) -> bool:
    """Whether it is fastkv's."""
    return op.startswith("fastkv")


def checks(file: dict[str, Any] | None) -> str:
    """Green and red checks of each operation."""
    rows = []
    for op in dict.fromkeys(row["op"] for row in file["rows"]) if file else ():
        some = [row for row in file["rows"] if row["op"] == op] if file else []
        red = [row["id"] for row in some if not row["passed"]]
        compared = sum(row["compared"] for row in some)
        rows.append((op, str(compared), str(len(some) - len(red)), ", ".join(red) or "none"))
    return table(("operation", "comparisons", "cases green", "cases red"), rows) or f"Checks on a GPU: {NONE}.\n"


PROMPT = """
## Blocks of prompts

One layer, bf16. A block attends to 1,024 slots of each head, to the evicted tokens and to itself; "itself alone" omits
the first two.

"""


def timed(rows: list[dict[str, Any]], part: str, what: str) -> str:
    """Every contender at every shape, fastkv's first. The floor is what the bytes take at the rate of a large copy."""
    lines = []
    timed = [row for row in rows if row.get("median_us") and row["part"] == part]
    for row in sorted(
        timed, key=lambda row: (row["heads"], row["batch"], row["length"], not mine(row["op"]), row["op"])
    ):
        times = f"{row['median_us']:.2f} ({row['p20_us']:.2f}-{row['p80_us']:.2f})"
        share = f"{row['of_copy']:.1%}" if row.get("of_copy") else NONE
        floor = f"{row['median_us'] * row['of_copy']:.2f}" if row.get("of_copy") else NONE
        shape = row["heads"], str(row["batch"]), str(row["length"])
        lines.append((*shape, row["op"], times, floor, f"{row['gbps']:.0f}", share))
    header = (
        "heads",
        "B",
        "L",
        "who",
        "µs a layer (p20-p80)",
        "floor, µs",
        "GB/s of needed bytes",
        "of copy bandwidth",
    )
    return table(header, lines) or f"{what} on a GPU: {NONE}.\n"


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


def steps(file: dict[str, Any] | None) -> str:
    """Decode steps of a whole model, by batch, the full cache first."""
    found = [
        (
            f"{row['cache']}, {row['budget']} tokens kept" if row["budget"] else row["cache"],
            *(row["model"], str(row["batch"]), str(row["context"])),
            f"{row['ms']['p50']:.2f} ({row['ms']['p20']:.2f}-{row['ms']['p80']:.2f})",
            *(f"{row['tokens_per_s']:.0f}", f"{row['first_s']:.2f}", f"{row['cache_bytes'] / 2**30:.2f}"),
        )
        for row in sorted(file["rows"] if file else [], key=lambda row: (row["batch"], row["cache"]))
        if "ms" in row
    ]
    header = ("cache", "model", "B", "prompt", "ms a step (p20-p80)", "tokens/s", "first token, s", "GiB")
    return table(header, found) or f"Steps of a whole model: {NONE}.\n"


def chapters(files: dict[str, dict[str, Any]]) -> str:
    """Correctness, decode attention, and steps of a model."""
    rows = files["gpu_timings"]["rows"] if "gpu_timings" in files else []
    correct = "\n## Correctness on a GPU\n\n" + checks(files.get("gpu_checks"))
    whole = "\n## Steps of a whole model on a GPU\n\n" + steps(files.get("gpu_model"))
    steps_alone = DECODE + timed(rows, "decode", "Decode steps")
    return correct + steps_alone + PROMPT + timed(rows, "prompt", "Blocks of prompts") + skipped(files) + whole
