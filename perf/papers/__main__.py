"""Measure every row that has no result yet, then write docs/papers.md and its pictures.

python -m perf.papers [--quick] [--only NAME,...] [--text FILE] [--again]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastkv.calibration.files import replace_file
from fastkv.lab import common, pretrained
from perf.engine import ROOT
from perf.environment import environment

from . import geometry, moments, page, tasks
from .bench import Bench
from .row import Row, listed

RESULTS, PAGE, PICTURES = "perf/results/papers", "docs/papers.md", "docs/pictures/papers"
MODEL = "smollm2"
ROWS = listed(geometry.MEASURED | moments.MEASURED | tasks.MEASURED)


def measure(row: Row, bench: Bench, folder: Path, settings: dict[str, Any]) -> None:
    """Measure one row and write its JSON, whole or not at all."""
    assert row.measure is not None
    start = time.perf_counter()
    with torch.no_grad():
        numbers = row.measure(bench)
    seconds = round(time.perf_counter() - start, 1)
    facts = {"row": row.name, **settings, "seconds": seconds, "environment": environment()}
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**facts, "numbers": page.rounded(numbers)}, separators=(",", ":"))
    replace_file(folder / f"{row.name}.json", (content + "\n").encode())


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m perf.papers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smallest sizes, into build/papers: to try the command")
    parser.add_argument("--only", default="", help="rows to measure, separated by commas (default: all)")
    parser.add_argument("--text", default="topics", help="text for statistics: topics, library, code or a file")
    parser.add_argument("--again", action="store_true", help="measure rows that have a result, too")
    parser.add_argument("--pages", action="store_true", help="measure nothing, write the page from what is there")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    root = ROOT / "build" / "papers" if options.quick else ROOT
    folder = root / RESULTS
    asked = set(filter(None, options.only.split(",")))
    if asked - {row.name for row in ROWS}:
        parser.error(f"--only knows {', '.join(row.name for row in ROWS if row.measure)}")
    missing = [
        row
        for row in ROWS
        if row.measure and (row.name in asked or not asked)
        if options.again or not (folder / f"{row.name}.json").exists()
    ]
    if missing and not options.pages:
        torch.manual_seed(0)
        model, tokenizer = pretrained.load(MODEL)
        bench = Bench(model, tokenizer, text=options.text, quick=options.quick)
        # A file is named by what it is: nothing else of it stands in a result.
        source = options.text if options.text in ("topics", "library", "code") else "a given file"
        with common.progress(console) as shown:
            bar = shown.add_task("", total=len(missing))
            for done, row in enumerate(missing):
                if not options.again and (folder / f"{row.name}.json").exists():  # another process was faster
                    continue
                shown.update(bar, description=f"{row.paper}, {row.place}", completed=done)
                bench.tick = lambda share: shown.advance(bar, share)
                measure(row, bench, folder, {"model": MODEL, "text": source, "quick": options.quick})
                console.print(f"{time.strftime('%H:%M:%S')} {row.name} measured")
            shown.update(bar, description="measured", completed=len(missing))
    page.write(ROWS, folder, root / PAGE, root / PICTURES)
    console.print(f"{root / PAGE} written")


if __name__ == "__main__":
    main()
