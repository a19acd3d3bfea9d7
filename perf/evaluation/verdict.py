"""What to remember of evicted tokens, decided: fidelity and answers at equal bytes on six geometries of keys.

    python -m perf.evaluation.verdict                  # about 40 minutes of one core; stop at any time and go on
    python -m perf.evaluation.verdict --minutes 10     # as many cases as fit, then the report of what is there
    python -m perf.evaluation.verdict --report         # only the report, from perf/results/verdict/verdict.json

The file is rewritten after every case. Without a second model in build/second_model, one is trained first, 7 minutes
of one core. Exit code: 0 complete, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastkv import FastKVError
from fastkv.demo import MODEL_DIR
from tools import second_model

from .__main__ import save
from .measure import versions
from .verdict_cases import BUNDLED, TRAINED, Case, cases
from .verdict_measure import Settings, TrainedBench
from .verdict_report import write_report
from .verdict_synthetic import SyntheticBench

OUT = Path(__file__).parent.parent / "results" / "verdict"


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m perf.evaluation.verdict", description=__doc__.split("\n")[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--geometries", nargs="+", default=None, metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=default.seeds, help="groups of texts (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=default.texts, help="of a task in a group (default: %(default)s)")
    parser.add_argument("--second", type=Path, default=second_model.FOLDER, help="default: build/second_model")
    parser.add_argument("--out", type=Path, default=OUT, help="default: perf/results/verdict")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = arguments(words)
    path, left = options.out / "verdict.json", 0
    try:
        if not options.report:
            options.out.mkdir(parents=True, exist_ok=True)
            planned = [case for case in cases() if case.geometry in (options.geometries or [case.geometry])]
            settings = Settings(seeds=options.seeds, texts=options.texts)
            left = measure(planned, settings, path, options.second, options.minutes, options.fresh)
        write_report(path)
    except FastKVError as error:
        print(f"perf.evaluation.verdict: {error}", file=sys.stderr)
        return 2
    return 3 if left else 0


def measure(planned: list[Case], settings: Settings, path: Path, second: Path, minutes: float, fresh: bool) -> int:
    """Measure the cases without a result. Returns how many are left when the minutes are over.

    Raises: FastKVError if the file holds results of other settings or models.
    """
    if not (second / "model.safetensors").is_file():
        second_model.train(second, seed=0)
    file = prepared(path, settings, second, fresh)
    there = [row["case"] for row in file["rows"]]
    waiting = [case for case in planned if case.record() not in there]
    deadline, geometry, bench = time.monotonic() + 60 * minutes, "", None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(width=None if sys.stdout.isatty() else 100)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(waiting))
        for place, case in enumerate(waiting):
            if time.monotonic() >= deadline:
                return len(waiting) - place
            progress.update(bar, description=case.id)
            if bench is None or case.geometry != geometry:
                geometry, bench = case.geometry, bench_of(case.geometry, settings, second)
            started = time.perf_counter()
            row = {"case": case.record(), **bench.run(case)}
            file["rows"].append(row | {"seconds": round(time.perf_counter() - started, 2)})
            save(file, path)
            progress.advance(bar)
    return 0


def bench_of(geometry: str, settings: Settings, second: Path) -> TrainedBench | SyntheticBench:
    """What measures the cases of a geometry."""
    if geometry in TRAINED:
        return TrainedBench(MODEL_DIR if geometry == BUNDLED else second, settings)
    return SyntheticBench(geometry, [settings.first + seed for seed in range(settings.seeds)])


def prepared(path: Path, settings: Settings, second: Path, fresh: bool) -> dict[str, Any]:
    """The file with the rows that still belong to it, and the cases that it should have."""
    weights = hashlib.sha256((second / "model.safetensors").read_bytes()).hexdigest()
    asked, now, records = asdict(settings), versions() | {"second model": weights}, [one.record() for one in cases()]
    rows, known = [], []
    if path.is_file() and not fresh:
        old = json.loads(path.read_text())
        models = [{one[name] for name in ("model", "second model")} for one in (old["versions"][0], now)]
        if old["settings"] != asked or models[0] != models[1]:
            raise FastKVError(
                f"{path} holds results of other settings or of other models; measure all again with --fresh, or give "
                "another --out"
            )
        rows = [row for row in old["rows"] if row["case"] in records]
        known = [one for one in old["versions"] if rows and one != now]
    file = {"settings": asked, "versions": [*known, now], "planned": records, "rows": rows}
    save(file, path)
    return file


if __name__ == "__main__":
    raise SystemExit(main())
