"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results build/run    # the files of another run
    python -m perf.report --readme              # and docs/performance.md, and the README's table

Writes README.md and PNG plots beside the files. Tables that were not measured say so. Files of dry runs are ignored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .engine import RESULTS
from .gpu import report as gpu
from .speed.report import chapter, write_sections
from .tables import read, table

HEADER = """# Measurements

Written by `python -m perf.report` from the JSON files beside it; do not edit. How: [../README.md](../README.md).
"""
FACTS = ("device", "cpu", "driver", "cuda", "torch", "triton", "transformers", "python", "threads", "commit", "source")


def environments(files: dict[str, dict[str, Any]]) -> str:
    """What each file was measured on."""
    known = {}
    for name, file in files.items():
        if "environment" in file:
            code = ", ".join(dict.fromkeys(row["source"] for row in file["rows"] if "source" in row))
            known[name] = {"source": code, **file["environment"]}
    rows = [[f"{name}.json", *(str(facts.get(fact, "")) for fact in FACTS)] for name, facts in known.items()]
    return table(("file", *FACTS), rows) or "Nothing has been measured.\n"


def write(folder: Path) -> Path:
    """Write the report of the folder's files. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    files = read(folder)
    unfinished = [name for name, file in files.items() if file.get("complete") is False]
    parts = [
        HEADER,
        chapter(files, folder),
        f"\nFiles that are not finished: {', '.join(unfinished)}.\n" if unfinished else "",
        "\n## Measured on\n\n",
        environments(files),
        gpu.chapters(files),
    ]
    path = folder / "README.md"
    path.write_text("".join(parts))
    return path


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and write (default perf/results)")
    parser.add_argument(
        "--readme", action="store_true", help="write docs/performance.md and the README's table as well"
    )
    options = parser.parse_args(arguments)
    print(write(options.results))
    if options.readme:
        write_sections(read(options.results))


if __name__ == "__main__":
    main()
