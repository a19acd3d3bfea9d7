"""Quality of every policy, budget and ablation on the bundled model: measures what is missing, writes tables and plots.

    python -m perf.quality                          # everything; stop at any time, the same command goes on
    python -m perf.quality --parts keydiff vector   # some parts
    python -m perf.quality --minutes 10             # as many cases as fit, then the report of what is there
    python -m perf.quality --report                 # only the report, from perf/results/evaluation/*.json

Each part has one file, written after every case; the page for choosing, docs/choosing.md, is written from all of them.
Exit code: 0 complete, 1 something failed, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import fastkv
from fastkv import FastKVError
from fastkv.demo import MODEL_DIR
from tools import language_model

from .. import engine
from ..engine import COMPLETE, REFUSED, Deadline, Job, OtherSettings, Results, Row
from ..environment import environment, source
from .cases import FULL, LANGUAGE, Case
from .measure import Bench, LanguageBench, Settings
from .page import PAGE, write_page
from .parts import parts
from .report import write_report

OUT = engine.RESULTS / "evaluation"


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = engine.command("perf.quality", __doc__, tuple(parts()), minutes=float("inf"), out=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--seeds", type=int, default=default.seeds, help="groups of texts (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=default.texts, help="of a task in a group (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/choosing.md")
    options = parser.parse_args(words)
    options.out = engine.folder(options, OUT)
    return options


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = arguments(words)
    chosen = {name: cases for name, cases in parts().items() if name in (options.parts or parts())}
    if options.list:
        return engine.listed({name: [case.id for case in cases] for name, cases in chosen.items()})
    code = COMPLETE
    try:
        if not options.report:
            code = measure_parts(chosen, Settings(seeds=options.seeds, texts=options.texts), options)
        write_report(options.out)
        write_page(options.out, options.page)
    except (FastKVError, OtherSettings) as error:
        print(f"perf.quality: {error}", file=sys.stderr)
        return REFUSED
    return code


def measure_parts(chosen: dict[str, list[Case]], settings: Settings, options: argparse.Namespace) -> int:
    """Measure the cases without a result. Returns: the worst exit code.

    Raises: OtherSettings if a file holds results of other settings.
    """
    benches = cache(lambda: Bench(settings)), cache(lambda: LanguageBench(settings, language_model.FOLDER))
    facts, deadline = environment(options.commit), Deadline(options.minutes)
    again = {"fresh": options.fresh, "retry": options.retry_skipped}
    files = {}
    for part, cases in chosen.items():
        planned = [job(part, case, benches[part == LANGUAGE]) for case in cases]
        known = facts | models(MODEL_DIR)
        if part == LANGUAGE:
            known = facts | models(MODEL_DIR, language=language_model.FOLDER)
            known["held-out text"] = language_model.held_out_digest()
        files[part] = Results.open(options.out / f"{part}.json", known, planned, asdict(settings), **again)
    only = {part: [one for one in file.planned if options.only in one.name] for part, file in files.items()}
    return engine.worst([engine.measure(only[part], file, deadline) for part, file in files.items()])


def job(part: str, case: Case, bench: Callable[[], Bench]) -> Job:
    """A case; the bench is made when the first one needs it."""
    code = source("perf.quality.measure", policy="" if case.policy == FULL else case.policy)
    return Job(case.id, case.record(), lambda: bench().run(part, case), code)


def models(bundled: Path, second: Path | None = None, language: Path | None = None) -> Row:
    """The library's version, and the weights that all numbers depend on."""
    folders = {"model": bundled, "second model": second, "language model": language}
    return {"fastkv": fastkv.__version__} | {name: weights_of(one) for name, one in folders.items() if one}


def weights_of(folder: Path) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    raise SystemExit(main())
