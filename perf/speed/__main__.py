"""Speed of whole models: the full cache, fastkv and kvpress on random weights, each case in a process of its own.

    python -m perf.speed --list                                         # parts and their cases
    python -m perf.speed --parts cpu_context --kvpress-python PATH      # one part, at most 8 minutes
    python -m perf.speed                                                # every part, in turn
    python -m perf.speed --dry-run                                      # toy models; claims no timings

Each part has one file, speed_<part>.json, written after every case, so that a run may be stopped at any time and
continued by the same command. Exit code: 0 complete, 1 something failed, 3 cases are left because the time was over or
kvpress was not given.
"""

import argparse
import sys
import time
from dataclasses import asdict

from .. import engine
from ..engine import Job, Results, Row, Unmeasured, digest, source
from ..environment import environment
from .cases import PARTS, Case, toy

# What all contenders run.
RUN = (*(f"perf/speed/{name}.py" for name in ("worker", "contenders", "cases")), "fastkv/lab/timing.py")
SPARE = 45.0  # seconds that must be left when a case starts


def job(case: Case, python: str, checksums: dict[str, str], part: str) -> Job:
    """The case in a process of that interpreter. checksums: of the logits of each model, which all processes share."""

    def run() -> Row:
        row = engine.in_process("perf.speed.worker", asdict(case), python)
        if not row.get("out_of_memory") and checksums.setdefault(case.model, row["checksum"]) != row["checksum"]:
            raise Unmeasured("its model computes other logits than those of the cases before it")
        return row

    code = (source if case.contender == "fastkv" else digest)(*RUN)
    return Job(case.name, case.as_row(), run, code, case.contender == "kvpress", SPARE, file=part)


def run_part(part: str, options: argparse.Namespace, facts: Row) -> int:
    """Measure what a part still lacks. Returns: COMPLETE, FAILED or LEFT."""
    pythons, checksums = {"kvpress": options.kvpress_python or ""}, dict[str, str]()
    cases = [toy(case) if options.dry_run else case for case in PARTS[part]]
    planned = [job(case, pythons.get(case.contender, sys.executable), checksums, part) for case in cases]
    path = options.out / f"speed_{part}.json"
    results = Results.open(path, facts, planned, options.fresh, options.retry_skipped)
    checksums.update({row["case"]["model"]: row["checksum"] for row in results.rows if "checksum" in row})
    able = [one for one in planned if options.only in one.name and (options.kvpress_python or not one.optional)]
    code = engine.measure(able, {part: results}, time.monotonic() + 60 * options.minutes)
    missing = sum(one.optional for one in planned if not results.has(one.name)) if not options.kvpress_python else 0
    needed = f"; {missing} need --kvpress-python" if missing else ""
    print(f"{part}: {len(results.rows)} of {len(planned)} cases{needed}", flush=True)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in order. Returns: the worst exit code."""
    parser = engine.command("perf.speed", __doc__, minutes=8.0)
    names = {"choices": tuple(PARTS), "default": list(PARTS), "metavar": "PART"}
    parser.add_argument("--parts", nargs="+", **names, help="some of the parts; see --list")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--kvpress-python", metavar="PATH", help="interpreter of an environment with kvpress")
    options = parser.parse_args(arguments)
    if options.list:
        return engine.listed({part: [case.name for case in PARTS[part]] for part in options.parts})
    options.out = engine.folder(options)
    facts = environment(options.commit, options.dry_run)
    return engine.worst(run_part(part, options, facts | {"threads": PARTS[part][0].threads}) for part in options.parts)


if __name__ == "__main__":
    sys.exit(main())
