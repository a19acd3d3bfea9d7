"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results build/run    # the files of another run
    python -m perf.report --readme              # and docs/performance.md, and the README's table

Writes README.md and PNG plots beside the files. Tables that were not measured say so. Files of dry runs are ignored.
"""

import argparse
from pathlib import Path

from .engine import RESULTS
from .gpu.report import chapters
from .speed.report import chapter, write_sections
from .tables import Row, read, table

HEADER = """# Measurements

Written by `python -m perf.report` from the JSON files beside it; do not edit. How: [../README.md](../README.md).
"""
FACTS = ("device", "cpu", "driver", "cuda", "torch", "triton", "transformers", "python", "threads", "commit", "source")


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
    left = ", ".join(name for name, file in files.items() if file.get("complete") is False)
    unfinished = f"\nFiles that are not finished: {left}.\n" if left else ""
    measured = f"\n## Measured on\n\n{environments(files)}"
    path = folder / "README.md"
    path.write_text(HEADER + chapter(files, folder) + unfinished + measured + chapters(files))
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


if __name__ == "__main__":
    main()
