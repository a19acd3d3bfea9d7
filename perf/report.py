"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results build/run    # the files of another run
    python -m perf.report --readme              # and docs/performance.md, and the README's table

Writes README.md and PNG plots beside the files. Tables that were not measured say so. Files of dry runs are ignored.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from .engine import RESULTS, ROOT
from .speed.report import PAGE, chapter, machine, write_sections
from .tables import NONE, Row, chosen, filled, plot, read, table, write_section

FACTS = ("device", "cpu", "driver", "cuda", "torch", "triton", "transformers", "python", "threads", "commit", "source")
SHAPE = ("heads", "batch", "length", "op")
TIMED = ("heads", "B", "L", "who", "µs a layer (p20-p80)", "floor, µs", "GB/s of needed bytes", "of copy bandwidth")
# Shown on the page, at the shapes of the second.
PEERS = (
    "copy", "fastkv default", "fastkv moments", "SDPA cuDNN", "SDPA flash", "flash-attn 3", "FlashInfer",
    "FlashInfer tensor cores",
)  # fmt: skip
KINDS = ("", "int8 ", "fp8 ", "int4 ", "k8v4 ", "unequal heads ", "in pages ")
OWN = tuple(f"fastkv {kind}with sums" for kind in KINDS)
PARTS = "gpu_ablations.jsonl"  # steps with parts left out: of all, sums of attention, the default's is left
LLAMA, LENGTH, DRAWN = "llama-3.1-8b", 4096, "gpu_decode"
BEGIN = "<!-- on a GPU: written by `python -m perf.report --readme` from perf/results, do not edit -->"
END = "<!-- on a GPU: end -->"
STEPS = ("cache", "model", "B", "prompt", "ms a step (p20-p80)", "tokens/s", "first token, s", "GiB")


def checks(rows: list[Row]) -> str:
    """Green and red checks of each operation."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        some = chosen(rows, op=op)
        red = [row["id"] for row in some if not row["passed"]]
        lines.append((op, len(some) - len(red), ", ".join(red) or "none"))
    return table(("operation", "cases green", "cases red"), lines) or f"Checks on a GPU: {NONE}.\n"


def timed(rows: list[Row], part: str, what: str) -> str:
    """Every contender at every shape, fastkv's first. The floor is the time of the bytes in the fastest copy."""
    lines = []
    best = max((row["gbps"] for row in chosen(rows, op="copy") if row.get("gbps")), default=None)
    for row in chosen(rows, part=part):
        if row.get("median_us"):
            times = f"{row['median_us']:.2f} ({row['p20_us']:.2f}-{row['p80_us']:.2f})"
            gbps, floor, rate = row["gbps"], NONE, NONE
            if best:
                floor, rate = f"{row['needed_bytes'] / best / 1e3:.2f}", f"{gbps / best:.1%}"
            lines.append([*(row[name] for name in SHAPE), times, floor, f"{gbps:.0f}", rate])
    lines.sort(key=lambda line: (line[:3], not line[3].startswith("fastkv"), line[3]))
    return table(TIMED, lines) or f"{what} on a GPU: {NONE}.\n"


def skipped(files: dict[str, Row]) -> str:
    """Who could not run, and why."""
    rows = [row for name, file in files.items() if name.startswith("gpu_") for row in file["rows"] if "skipped" in row]
    found = Counter((row.get("op") or row["cache"], row["skipped"].replace("|", "/")) for row in rows)
    return table(("who", "why", "shapes"), [(*one, num) for one, num in found.items()])


def of_parts(file: Path) -> list[Row]:
    """The default's steps of Llama's heads among those with parts left out, as rows of timings; none without the file.

    These were measured before several programs shared the centroids of a head.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()[1:]] if file.exists() else []
    found = chosen(lines, correction="centroids", attention=False, append=True, changed={})
    return [{"part": "decode", "heads": LLAMA, "op": "fastkv default"} | row for row in found]


def beside(rows: list[Row], shown: tuple[str, ...], drawn: Path | None = None) -> str:
    """Microseconds of decode steps, a column for each who is shown. drawn: folder for a plot at one LENGTH."""
    measured = [row for row in chosen(rows, part="decode", heads=LLAMA) if row.get("median_us")]
    of = {(row["batch"], row["length"], row["op"]): row["median_us"] for row in measured}
    shapes = sorted({place[:2] for place in of if place[2] == shown[1]})
    if drawn is not None and of:
        held = [one for one in shapes if one[1] == LENGTH]
        lines = {op: [(one[0], of[(*one, op)]) for one in held if (*one, op) in of] for op in shown}
        lines = {op: points for op, points in lines.items() if points}
        plot(drawn, DRAWN, f"Decode step of a layer, {LENGTH:,} tokens", ("sequences", "microseconds"), lines)
    times = {place: f"{time:.1f}" for place, time in of.items()}
    cells = [[*one, *(times.get((*one, op), NONE) for op in shown)] for one in shapes]
    return table(("sequences", "tokens kept", *shown), cells)


def on_gpu(folder: Path) -> str:
    """What stands between the markers of docs/performance.md, markers included, from the files of a folder."""
    files = read(folder)
    rows, whole = (files.get(f"gpu_{name}", {"rows": []})["rows"] for name in ("timings", "model"))
    if not rows:
        return f"{BEGIN}\n\nNot measured yet; `python -m perf.gpu` measures it.\n\n{END}"
    file = files["gpu_timings"]
    where = f"{machine(file)}, triton {file['environment']['triton']}; commit {file['environment']['commit']}"
    text = f"Microseconds for one layer of Llama's heads, bf16; {where}; `python -m perf.gpu`:\n\n"
    text += f"{beside([*of_parts(folder / PARTS), *rows], PEERS)}\n![Decode steps](../perf/results/{DRAWN}.png)\n\n"
    text += "The default's step with sums of attention, over other slots and heads, and in pages:\n\n"
    text += f"{beside(rows, OWN)}\n"
    return f"{BEGIN}\n\n{text}Whole models, random weights, bf16:\n\n{steps(whole)}\n{END}"


def steps(rows: list[Row]) -> str:
    """Decode steps of a whole model, by batch, the full cache first."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["batch"], row["cache"])):
        if "ms" in row:
            ms, kept = row["ms"], f", {row['budget']} tokens kept" if row["budget"] else ""
            line = [row["cache"] + kept, row["model"], row["batch"], row["context"]]
            line += [f"{ms['p50']:.2f} ({ms['p20']:.2f}-{ms['p80']:.2f})", f"{row['tokens_per_s']:.0f}"]
            lines.append([*line, f"{row['first_s']:.2f}", f"{row['cache_bytes'] / 2**30:.2f}"])
    return table(STEPS, lines) or f"Steps of a whole model: {NONE}.\n"


def environments(files: dict[str, Row]) -> str:
    rows = []
    for name, file in files.items():
        code = ", ".join(dict.fromkeys(row["source"] for row in file["rows"] if "source" in row))
        facts = {"source": code, **file["environment"]}
        rows.append([f"{name}.json", *(facts.get(fact, "") for fact in FACTS)])
    return table(("file", *FACTS), rows) or "Nothing has been measured.\n"


def write(folder: Path) -> Path:
    """Write the report of the folder's files. Returns its path."""
    files = read(folder)
    checked, rows, whole = (files.get(f"gpu_{name}", {"rows": []})["rows"] for name in ("checks", "timings", "model"))
    facts = {"chapter": chapter(files, folder), "machines": environments(files), "checks": checks(checked)}
    facts |= {"decode": timed(rows, "decode", "Decode steps"), "prompt": timed(rows, "prompt", "Blocks of prompts")}
    facts |= {"skipped": skipped(files), "steps": steps(whole)}
    beside([*of_parts(folder / PARTS), *rows], PEERS, folder)
    left = [name for name, file in files.items() if file.get("complete") is False]
    path = folder / "README.md"
    path.write_text(filled(Path(__file__).with_suffix(".jinja").read_text(), left=left, **facts) + "\n")
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and write (default perf/results)")
    parser.add_argument("--readme", action="store_true", help="write docs/performance.md and the README's table, too")
    options = parser.parse_args(arguments)
    print(write(options.results))
    if options.readme:
        write_sections(read(options.results))
        write_section(ROOT / PAGE, BEGIN, END, on_gpu(options.results))


if __name__ == "__main__":
    main()
