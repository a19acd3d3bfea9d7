"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results /tmp/run    # the files of another run
    python -m perf.report --readme              # and the section "How fast" of the project's README.md

Writes README.md and PNG plots beside the files. What was not measured says so; its target is then marked as such and
its prediction as a prediction. Files of dry runs are ignored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .gpu_results import SAME_HEADS, shapes
from .report_parts import NONE, plot, read, table
from .report_targets import HEADS, TARGETS, Table, correction_cost, predicted_us
from .speed_report import chapter, targets, write_section

HEADER = """# Measurements

Written by `python -m perf.report` from the JSON files beside it; do not edit. How: [../README.md](../README.md).
"""
DECODE = """
## Decode attention

One layer, bf16, cold L2, medians of graph replays. fastkv appends the token and, unless it says otherwise, adds the
first-order moments; everyone else attends to the same retained tokens only, and "copy" moves as many bytes.
"""
FACTS = ("device", "cpu", "driver", "cuda", "torch", "triton", "transformers", "python", "threads", "commit", "source")


def us(row: dict[str, Any] | None, spread: bool = False) -> str:
    """A median in microseconds, with p20 to p80 if asked for."""
    if row is None:
        return NONE
    text = f"{row['median_us']:.2f}"
    return f"{text} ({row['p20_us']:.2f}-{row['p80_us']:.2f})" if spread else text


def environments(files: dict[str, dict[str, Any]]) -> str:
    """What each file was measured on."""
    known = {name: file["environment"] for name, file in files.items() if "environment" in file}
    rows = [[f"{name}.json", *(str(facts.get(fact, "")) for fact in FACTS)] for name, facts in known.items()]
    return table(("file", *FACTS), rows) or "Nothing has been measured.\n"


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
        rows.append((str(batch), str(length), us(mine, spread=True), share, predicted, *peers))
    header = ("B", "L", "fastkv (p20-p80)", "of copy bandwidth", "fastkv, predicted", *others)
    return f"\n### {' and '.join(SAME_HEADS[heads])} heads, µs per layer\n\n" + table(header, rows)


def skipped(files: dict[str, dict[str, Any]]) -> str:
    """Who could not run, and why."""
    found: dict[tuple[str, str], int] = {}
    for name, file in files.items():
        for row in file["rows"] if name.startswith("gpu_") else ():
            if "skipped" in row:
                found[row["op"], row["skipped"]] = found.get((row["op"], row["skipped"]), 0) + 1
    rows = [(op, why.replace("|", "/"), str(count)) for (op, why), count in found.items()]
    return "\nNot run:\n\n" + table(("who", "why", "shapes"), rows) if rows else ""


def others(timed: Table) -> str:
    """Every other operation, one row a case."""
    rows = [
        (r["op"], r["heads"], str(r["batch"]), str(r["length"]), us(r, spread=True), f"{r['gbps']:.0f}", _percent(r))
        for r in timed.rows
        if r["section"] not in ("decode", "flex", "checks") and r.get("median_us")
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


def write(folder: Path) -> Path:
    """Write the report of the folder's files. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    files = read(folder)
    rows = [
        {"section": name.removeprefix("gpu_"), **row}
        for name, file in files.items()
        if name.startswith("gpu_") and name != "gpu_checks"
        for row in file["rows"]
    ]
    timed = Table(rows)
    unfinished = [name for name, file in files.items() if file.get("complete") is False]
    parts = [
        HEADER,
        chapter(files, folder),
        "\n## Targets and predictions of single operations\n\n",
        targets(timed, TARGETS),
        f"\nFiles that are not finished: {', '.join(unfinished)}.\n" if unfinished else "",
        "\n## Measured on\n\n",
        environments(files),
        "\n## Correctness on the GPU\n\n",
        checks(files.get("gpu_checks")),
        DECODE,
        *(decode(timed, heads) for heads in HEADS),
        skipped(files),
        "\n## Other operations\n\n",
        others(timed),
    ]
    drawn = plots(folder, timed)
    path = folder / "README.md"
    path.write_text("".join(parts) + (f"\n## Plots\n\n{drawn}" if drawn else ""))
    return path


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=default, help="folder to read and write (default perf/results)")
    parser.add_argument("--readme", action="store_true", help='write the section "How fast" of README.md as well')
    options = parser.parse_args(arguments)
    print(write(options.results))
    if options.readme:
        write_section(read(options.results))


if __name__ == "__main__":
    main()
