"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results build/run    # the files of another run
    python -m perf.report --readme              # and docs/performance.md, and the README's table

Writes README.md and PNG plots beside the files. Tables that were not measured say so. Files of dry runs are ignored.
"""

from collections import Counter
from pathlib import Path

from .engine import RESULTS, ROOT, parser_of
from .speed import report as speed
from .tables import NONE, Row, chosen, filled, plot, read, table, write_section

# Shown on the page, at the shapes of the second.
PEERS = (
    "copy", "fastkv default", "fastkv moments", "SDPA cuDNN", "SDPA flash", "flash-attn 3", "FlashInfer",
    "FlashInfer tensor cores", "FlexAttention",
)  # fmt: skip
OWN = tuple(f"fastkv {what}" for what in "with sums,in pages,unequal heads,int8,fp8,int4,k8v4".split(","))
LLAMA, LENGTH, DRAWN = "llama-3.1-8b", 4096, "gpu_decode"
BEGIN = "<!-- on a GPU: written by `python -m perf.report --readme` from perf/results, do not edit -->"
END = "<!-- on a GPU: end -->"


def timed(rows: list[Row], part: str) -> list[Row]:
    """Every contender at every shape, fastkv's first."""

    def place(row: Row) -> tuple:
        return row["heads"], row["batch"], row["length"], not row["op"].startswith("fastkv"), row["op"]

    return sorted((row for row in chosen(rows, part=part) if row.get("median_us")), key=place)


def skipped(files: dict[str, Row]) -> Counter[tuple[str, str]]:
    """Who could not run, and why."""
    rows = [row for name, file in files.items() if name.startswith("gpu_") for row in file["rows"] if "skipped" in row]
    return Counter((row.get("op") or row["cache"], row["skipped"].replace("|", "/")) for row in rows)


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


def of_gpu(files: dict[str, Row]) -> list[list[Row]]:
    """Checks, timings and steps of whole models."""
    return [files.get(f"gpu_{name}", {"rows": []})["rows"] for name in ("checks", "timings", "model")]


def on_gpu(files: dict[str, Row]) -> str:
    """What stands between the markers of docs/performance.md, markers included."""
    _, rows, whole = of_gpu(files)
    facts: Row = {"rows": rows, "drawn": DRAWN, "steps": whole}
    if rows:
        facts |= {"peers": beside(rows, PEERS), "own": beside(rows, OWN)}
        file = files["gpu_timings"]
        facts |= {"machine": speed.machine(file), "environment": file["environment"]}
    return f"{BEGIN}\n\n{filled(Path(__file__).parent / 'gpu' / 'page.jinja', **facts)}\n\n{END}"


def write(folder: Path) -> Path:
    """Write the report of the folder's files. Returns its path."""
    files = read(folder)
    checks, rows, whole = of_gpu(files)
    copies = [row["gbps"] for row in chosen(rows, op="copy") if row.get("gbps")]
    facts = {**speed.chapter(files, folder), "files": files, "checks": checks, "skipped": skipped(files)}
    facts |= {"best": max(copies, default=None), "steps": whole}
    facts |= {part: timed(rows, part) for part in ("decode", "prompt")}
    beside(rows, PEERS, folder)
    path = folder / "README.md"
    path.write_text(filled(Path(__file__).with_suffix(".jinja"), **facts) + "\n")
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("perf.report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and write (default perf/results)")
    parser.add_argument("--readme", action="store_true", help="write docs/performance.md and the README's table, too")
    options = parser.parse_args(arguments)
    print(write(options.results))
    if options.readme:
        files = read(options.results)
        write_section(ROOT / speed.PAGE, speed.BEGIN, speed.END, speed.section(files))
        write_section(ROOT / "README.md", speed.FRONT_BEGIN, speed.FRONT_END, speed.front(files))
        write_section(ROOT / speed.PAGE, BEGIN, END, on_gpu(files))


if __name__ == "__main__":
    main()
