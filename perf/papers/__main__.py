"""Measure every row that has no result yet, then write docs/papers.md and its pictures.

python -m perf.papers [--quick] [--only NAME,...] [--again]
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from fastkv.calibration import replace_file
from fastkv.lab import pretrained
from perf.engine import ROOT, parser_of
from perf.environment import environment

from . import geometry, moments, page, tasks
from .bench import Bench
from .row import Row, listed

RESULTS, PAGE, PICTURES = "perf/results/papers", "docs/papers.md", "docs/pictures/papers"
MODEL = "smollm2"
ROWS = listed(geometry, moments, tasks)


def measure(row: Row, bench: Bench, file: Path, settings: dict[str, Any]) -> None:
    """Measure one row and write its JSON, whole or not at all."""
    start = time.perf_counter()
    with torch.no_grad():
        numbers = row.measure(bench)
    facts = {"row": row.name, **settings, "seconds": round(time.perf_counter() - start, 1)}
    facts |= {"environment": environment(), "numbers": page.rounded(numbers)}
    content = json.dumps(facts, separators=(",", ":"))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (content + "\n").encode())


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("perf.papers", __doc__)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, into build/papers: to try the command")
    parser.add_argument("--only", default="", help="rows to measure, separated by commas (default: all)")
    parser.add_argument("--again", action="store_true", help="measure rows that have a result, too")
    parser.add_argument("--pages", action="store_true", help="measure nothing, write the page from what is there")
    options = parser.parse_args(arguments)
    root = ROOT / "build" / "papers" if options.quick else ROOT
    files = {row: root / RESULTS / f"{row.name}.json" for row in ROWS if row.measure}
    asked = set(filter(None, options.only.split(",")))
    if asked - {row.name for row in files}:
        parser.error(f"--only knows {', '.join(row.name for row in files)}")
    missing = [row for row in files if (row.name in asked or not asked) and (options.again or not files[row].exists())]
    if missing and not options.pages:
        torch.manual_seed(0)
        bench, settings = Bench(*pretrained.load(MODEL), options.quick), {"model": MODEL, "quick": options.quick}
        for row in track(missing, "rows of papers"):
            if options.again or not files[row].exists():  # another process was faster
                measure(row, bench, files[row], settings)
    page.write(ROWS, root / RESULTS, root / PAGE, root / PICTURES)
    print(f"{root / PAGE} written")


if __name__ == "__main__":
    main()
