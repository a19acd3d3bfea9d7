"""Speed of whole models: the full cache, fastkv and kvpress on random weights, each case in a process of its own.

    python -m perf.speed --list                                         # parts and their cases
    python -m perf.speed --parts cpu_context --kvpress-python PATH      # one part, at most 8 minutes
    python -m perf.speed                                                # every part, in turn
    python -m perf.speed --dry-run                                      # toy models; claims no timings

Each part has one file, speed_<part>.json, written after every case, so that a run may be stopped at any time and
continued by the same command. Exit code: 0 complete, 1 something failed, 3 cases are left because the time was over or
kvpress was not given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from .. import engine
from ..engine import Deadline, Job, Results, Row, Unmeasured, digest
from ..environment import environment, source
from .cases import Case, toy
from .parts import PARTS

RUN = tuple(f"perf/speed/{name}.py" for name in ("worker", "contenders", "models", "cases"))
RUN += ("fastkv/lab/shapes.py",)  # what all contenders run
SPARE = 45  # seconds that must be left when a case starts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = engine.command("perf.speed", __doc__, tuple(PARTS), minutes=8.0)
    parser.add_argument("--kvpress-python", metavar="PATH", help="interpreter of an environment with kvpress")
    parser.add_argument("--dry-run", action="store_true", help="toy models on this CPU; claims no timings")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    return options


def job(case: Case, python: str, checksums: dict[str, str]) -> Job:
    """The case in a process of that interpreter. checksums: of the logits of each model, which all processes share."""

    def run() -> Row:
        row = engine.in_process("perf.speed.worker", asdict(case), python)
        if not row.get("out_of_memory") and checksums.setdefault(case.model, row["checksum"]) != row["checksum"]:
            raise Unmeasured("its model computes other logits than those of the cases before it")
        return row

    code = (source if case.contender == "fastkv" else digest)(*RUN)
    return Job(case.name, case.as_row(), run, code, optional=case.contender == "kvpress")


def run_part(part: str, options: argparse.Namespace, facts: Row) -> int:
    """Measure what a part still lacks. Returns: COMPLETE, FAILED or LEFT."""
    cases = [toy(case) for case in PARTS[part]] if options.dry_run else PARTS[part]
    pythons = {"kvpress": options.kvpress_python or ""}
    checksums: dict[str, str] = {}
    planned = [job(case, pythons.get(case.contender, sys.executable), checksums) for case in cases]
    path = options.out / f"speed_{part}.json"
    results = Results.open(path, facts, planned, fresh=options.fresh, retry=options.retry_skipped)
    checksums.update({row["case"]["model"]: row["checksum"] for row in results.rows if "checksum" in row})
    able = [one for one in planned if options.only in one.name and (options.kvpress_python or not one.optional)]
    code = engine.measure(able, results, Deadline(options.minutes, SPARE))
    missing = sum(one.optional for one in planned if not results.has(one.name)) if not options.kvpress_python else 0
    needed = f"; {missing} need --kvpress-python" if missing else ""
    print(f"{part}: {len(results.rows)} of {len(planned)} cases{needed}", flush=True)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in order. Returns: the worst exit code."""
    options = parse(arguments)
    if options.list:
        return engine.listed({part: [case.name for case in PARTS[part]] for part in options.parts})
    options.out = engine.folder(options)
    facts = environment(options.commit, options.dry_run)
    return engine.worst(run_part(part, options, facts | {"threads": PARTS[part][0].threads}) for part in options.parts)


if __name__ == "__main__":
    sys.exit(main())
