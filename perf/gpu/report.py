"""The chapters of results/README.md on a GPU: targets, correctness and times, from gpu_*.json; and the targets as data.

Predictions were computed from bytes before anything was timed; until a row is measured they are shown as predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..tables import NONE, Answer, Target, table, targets
from .heads import LLAMA

DEFAULT, MOMENTS, PLAIN, COPY = "fastkv default", "fastkv moments", "fastkv no correction", "copy"
DECODE = """
## Decode attention

One layer, bf16, cold L2, medians of graph replays. fastkv appends the token and adds what its name says; "fastkv
default" is the default policy's step, with centroids and sums of attention. Everyone else attends to the same retained
tokens only, and "copy" moves as many bytes.

"""
Shape = tuple[str, int, int]  # heads, sequences, tokens


@dataclass
class Table:
    """All timed rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def us(self, op: str, batch: int, length: int, heads: str = LLAMA.name) -> float | None:
        """Median microseconds of a case, or None."""
        return self.at((heads, batch, length)).get(op, {}).get("median_us")

    def at(self, shape: Shape) -> dict[str, dict[str, Any]]:
        """Timed rows of a shape, by name."""
        return {r["op"]: r for r in self.rows if (r["heads"], r["batch"], r["length"]) == shape and r.get("median_us")}

    def shapes(self) -> Iterator[Shape]:
        """Where a step of fastkv was timed."""
        found = {(r["heads"], r["batch"], r["length"]) for r in self.rows if r.get("median_us") and mine(r["op"])}
        yield from sorted(found, reverse=True)


def mine(op: str) -> bool:
    """Whether it is fastkv's."""
    return op.startswith("fastkv")


def copy_share(table: Table) -> Answer | None:
    """The share of the copy bandwidth at B = 32, L = 4096."""
    share = table.at((LLAMA.name, 32, 4096)).get(MOMENTS, {}).get("of_copy")
    return None if share is None else (f"{share:.1%}", share >= 0.9)


def short(table: Table) -> Answer | None:
    """The default's step at B = 1, L = 1024."""
    time = table.us(DEFAULT, 1, 1024)
    return None if time is None else (f"{time:.2f} µs", time <= 10)


def cost(table: Table) -> Answer | None:
    """What the first-order correction adds to a step at L >= 1024, at worst."""
    pairs = [(table.us(MOMENTS, b, n, h), table.us(PLAIN, b, n, h), f"{h} B={b} L={n}") for h, b, n in table.shapes()]
    found = [(one / other - 1, where) for one, other, where in pairs if one and other and "L=" in where]
    found = [(more, where) for more, where in found if int(where.rpartition("=")[2]) >= 1024]
    return (f"worst {max(found)[0]:+.1%} ({max(found)[1]})", max(found)[0] <= 0.05) if found else None


def fastest(table: Table) -> Answer | None:
    """At how many shapes up to L = 4096 the default's step is faster than every peer timed there."""
    wins, lost = 0, []
    for heads, batch, length in table.shapes():
        rows = table.at((heads, batch, length))
        rivals = {op: row["median_us"] for op, row in rows.items() if not mine(op) and op != COPY}
        if not rivals or DEFAULT not in rows or length > 4096:
            continue
        best, own = min(rivals, key=lambda op: rivals[op]), rows[DEFAULT]["median_us"]
        wins += own < rivals[best]
        if own >= rivals[best]:
            lost.append(f"{heads} B={batch} L={length}: {best} {rivals[best]:.2f} against {own:.2f} µs")
    if not wins + len(lost):
        return None
    return f"fastest at {wins} of {wins + len(lost)} shapes" + "".join(f"; {line}" for line in lost[:3]), not lost


TARGETS = (
    Target("decode, share of copy bandwidth, B=32 L=4096 D=128", "≥ 90 %", "target", copy_share),
    Target("the default policy's step, B=1 L=1024 D=128", "≤ 10 µs", "prediction", short),
    Target("cost of the correction, L ≥ 1024", "≤ 5 %", "target", cost),
    Target("the default's step, L ≤ 4096, against every peer", "faster everywhere", "target", fastest),
)


def checks(file: dict[str, Any] | None) -> str:
    """Green and red checks of each operation."""
    rows = []
    for op in dict.fromkeys(row["op"] for row in file["rows"]) if file else ():
        some = [row for row in file["rows"] if row["op"] == op] if file else []
        red = [row["id"] for row in some if not row["passed"]]
        compared = sum(row["compared"] for row in some)
        rows.append((op, str(compared), str(len(some) - len(red)), ", ".join(red) or "none"))
    return table(("operation", "comparisons", "cases green", "cases red"), rows) or f"Checks on a GPU: {NONE}.\n"


def decode(timed: Table) -> str:
    """Every contender at every shape, fastkv's first."""
    lines = []
    for heads, batch, length in timed.shapes():
        for op, row in sorted(timed.at((heads, batch, length)).items(), key=lambda one: (not mine(one[0]), one[0])):
            times = f"{row['median_us']:.2f} ({row['p20_us']:.2f}-{row['p80_us']:.2f})"
            share = f"{row['of_copy']:.1%}" if row.get("of_copy") else NONE
            lines.append((heads, str(batch), str(length), op, times, f"{row['gbps']:.0f}", share))
    header = ("heads", "B", "L", "who", "µs a layer (p20-p80)", "GB/s of needed bytes", "of copy bandwidth")
    return table(header, lines) or f"Decode steps on a GPU: {NONE}.\n"


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
    """Targets, correctness, decode attention, and steps of a model."""
    rows = Table(files["gpu_timings"]["rows"] if "gpu_timings" in files else [])
    promised = "\n## Targets and predictions of single operations\n\n" + targets(rows, TARGETS)
    correct = "\n## Correctness on a GPU\n\n" + checks(files.get("gpu_checks"))
    whole = "\n## Steps of a whole model on a GPU\n\n" + steps(files.get("gpu_model"))
    return promised + correct + DECODE + decode(rows) + skipped(files) + whole
