"""Which cache to choose: answers, next tokens and fidelity at equal bytes on seven geometries of keys.

    python -m perf.quality.verdict                  # minutes of one core; stop at any time and go on
    python -m perf.quality.verdict --minutes 10     # as many cases as fit, then the report of what is there
    python -m perf.quality.verdict --report         # only the report, from perf/results/verdict/verdict.json

The file is rewritten after every case. Without a second model in build/second_model, one is trained first, 7 minutes
of one core. Exit code: 0 complete, 1 something failed, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from fastkv import FastKVError
from fastkv.demo import MODEL_DIR
from tools import language_model, second_model

from ... import engine
from ...engine import COMPLETE, REFUSED, Deadline, Job, OtherSettings, Results, Row
from ...environment import environment, source
from ..__main__ import models
from .cases import BUNDLED, FULL, GEOMETRIES, LANGUAGE, TRAINED, Case, cases
from .language import LanguageBench
from .report import write_report
from .synthetic import SyntheticBench
from .trained import Settings, TrainedBench

OUT = engine.RESULTS / "verdict"


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = engine.command("perf.quality.verdict", __doc__, tuple(GEOMETRIES), minutes=float("inf"), out=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--seeds", type=int, default=default.seeds, help="groups of texts (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=default.texts, help="of a task in a group (default: %(default)s)")
    parser.add_argument("--stretches", type=int, default=default.stretches, help="of prose in a group (%(default)s)")
    parser.add_argument("--language", type=Path, default=language_model.FOLDER, help="default: perf/language_model")
    parser.add_argument("--second", type=Path, default=second_model.FOLDER, help="default: build/second_model")
    options = parser.parse_args(words)
    options.out, options.parts = engine.folder(options, OUT), options.parts or tuple(GEOMETRIES)
    return options


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = arguments(words)
    if options.list:
        return engine.listed({part: [one.id for one in cases() if one.geometry == part] for part in options.parts})
    path, code = options.out / "verdict.json", COMPLETE
    try:
        if not options.report:
            code = measure(path, settings_of(options), options)
        write_report(path)
    except (FastKVError, OtherSettings) as error:
        print(f"perf.quality.verdict: {error}", file=sys.stderr)
        return REFUSED
    return code


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line says of the results."""
    return Settings(seeds=options.seeds, texts=options.texts, stretches=options.stretches)


def measure(path: Path, settings: Settings, options: argparse.Namespace) -> int:
    """Measure the cases without a result. Returns: the exit code.

    Raises: OtherSettings if the file holds results of other settings.
    """
    if not (options.second / "model.safetensors").is_file():
        second_model.train(options.second, seed=0)

    @lru_cache(maxsize=1)
    def bench(geometry: str) -> TrainedBench | LanguageBench | SyntheticBench:
        if geometry == LANGUAGE:
            return LanguageBench(options.language, settings)
        if geometry in TRAINED:
            return TrainedBench(MODEL_DIR if geometry == BUNDLED else options.second, settings)
        return SyntheticBench(geometry, [settings.first + seed for seed in range(settings.seeds)])

    def job(case: Case) -> Job:
        room = "language" if case.geometry == LANGUAGE else "trained" if case.geometry in TRAINED else "synthetic"
        code = source(f"perf.quality.verdict.{room}", policy="" if case.policy == FULL else case.policy)
        return Job(case.id, case.record(), lambda: bench(case.geometry).run(case), code)

    facts: Row = environment(options.commit) | models(MODEL_DIR, options.second, options.language)
    facts["held-out text"] = language_model.held_out_digest()
    planned = {one.id: one for one in cases()}
    jobs = [job(one) for one in planned.values()]
    again = {"fresh": options.fresh, "retry": options.retry_skipped}
    results = Results.open(path, facts, jobs, asdict(settings), **again)
    chosen = [one for one in jobs if planned[one.name].geometry in options.parts and options.only in one.name]
    return engine.measure(chosen, results, Deadline(options.minutes))


if __name__ == "__main__":
    raise SystemExit(main())
