"""Measure what has no result yet, and write tables, plots and the page for choosing.

    python -m perf.evaluation                          # everything; stop at any time, the same command goes on
    python -m perf.evaluation --parts keydiff vector   # some parts
    python -m perf.evaluation --minutes 10             # as many cases as fit, then the report of what is there
    python -m perf.evaluation --report                 # only the report, from perf/results/evaluation/*.json

Each part has one file, rewritten after every case. Exit code: 0 complete, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastkv import FastKVError

from .cases import Case, parts
from .measure import Bench, Settings, versions
from .page import PAGE, write_page
from .report import write_report

OUT = Path(__file__).parent.parent / "results" / "evaluation"


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m perf.evaluation", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=tuple(parts()), help="default: all")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--fresh", action="store_true", help="measure the parts again")
    parser.add_argument("--seeds", type=int, default=default.seeds, help="groups of texts (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=default.texts, help="of a task in a group (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="default: perf/results/evaluation")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/choosing.md")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = arguments(words)
    left = 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if not options.report:
            settings = Settings(seeds=options.seeds, texts=options.texts)
            chosen = {name: cases for name, cases in parts().items() if name in (options.parts or parts())}
            left = measure_parts(chosen, settings, options.out, options.minutes, options.fresh)
        write_report(options.out)
        write_page(options.out, options.page)
    except FastKVError as error:
        print(f"perf.evaluation: {error}", file=sys.stderr)
        return 2
    return 3 if left else 0


def measure_parts(
    chosen: dict[str, list[Case]], settings: Settings, out: Path, minutes: float, fresh: bool = False
) -> int:
    """Measure the cases without a result. Returns how many are left when the minutes are over.

    Raises: FastKVError if a file holds results of other settings.
    """
    files = {name: prepared(out / f"{name}.json", cases, settings, fresh) for name, cases in chosen.items()}
    there = {name: [row["case"] for row in file["rows"]] for name, file in files.items()}
    waiting = [(name, case) for name, cases in chosen.items() for case in cases if case.record() not in there[name]]
    if not waiting:
        return 0
    deadline = time.monotonic() + 60 * minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(width=None if sys.stdout.isatty() else 100)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("full cache", total=len(waiting))
        bench = Bench(settings)
        for place, (name, case) in enumerate(waiting):
            if time.monotonic() >= deadline:
                return len(waiting) - place
            progress.update(bar, description=f"{name}: {case.id}")
            files[name]["rows"].append(bench.run(name, case))
            save(files[name], out / f"{name}.json")
            progress.advance(bar)
    return 0


def prepared(path: Path, cases: list[Case], settings: Settings, fresh: bool) -> dict[str, Any]:
    """The file of a part with the rows that still belong to it, and the cases that it should have."""
    asked, now = asdict(settings), versions()
    records = [case.record() for case in cases]
    rows, known = [], []
    if path.is_file() and not fresh:
        old = json.loads(path.read_text())
        if old["settings"] != asked or old["versions"][0]["model"] != now["model"]:
            raise FastKVError(
                f"{path} holds results of other settings or of another model; measure all again with --fresh, or give "
                "another --out"
            )
        rows = [row for row in old["rows"] if row["case"] in records]
        known = [one for one in old["versions"] if rows and one != now]
    file = {"settings": asked, "versions": [*known, now], "planned": records, "rows": rows}
    save(file, path)
    return file


def save(file: dict[str, Any], path: Path) -> None:
    """Write the file, whole or not at all."""
    unfinished = path.with_suffix(".part")
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in file["rows"])
    planned = ",\n".join(json.dumps(case) for case in file["planned"])
    head = {name: file[name] for name in ("settings", "versions")}
    unfinished.write_text(f'{json.dumps(head)[:-1]},\n"planned": [\n{planned}\n],\n"rows": [\n{rows}\n]}}\n')
    unfinished.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
