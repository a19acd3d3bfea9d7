"""Speed of whole models: the full cache, fastkv and kvpress on random weights, each case in a process of its own.

    python -m perf.speed_run --list                                         # parts and their cases
    python -m perf.speed_run --parts cpu_context --kvpress-python PATH      # one part, at most 8 minutes
    python -m perf.speed_run                                                # every part for this device, in turn
    python -m perf.speed_run --dry-run                                      # toy models; claims no timings

Each part has one file, speed_<part>.json, written after every case, so that a run may be stopped at any time and
continued by the same command. A file from other sources, another device or other versions is started again. Exit code:
0 complete, 1 something failed, 3 cases are left because the time was over or kvpress was not given.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from .environment import ROOT, speed_environment
from .gpu_results import Deadline, Results
from .speed_cases import PARTS, toy

OUT = Path(__file__).parent / "results"
COMPLETE, FAILED, LATE = 0, 1, 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.speed_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "gpu" if torch.cuda.is_available() else "cpu"
    mine = [name for name in PARTS if name.startswith(device)]
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help="see --list; default: all for here")
    parser.add_argument("--kvpress-python", metavar="PATH", help="interpreter of an environment with kvpress")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each part (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (default perf/results; none in a dry run)")
    parser.add_argument("--commit", help="the commit to name where there is no git")
    parser.add_argument("--fresh", action="store_true", help="do not continue earlier files")
    parser.add_argument("--retry-skipped", action="store_true", help="measure again what could not be measured before")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print parts and cases, measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="toy models on this CPU; claims no timings")
    options = parser.parse_args(arguments)
    options.parts = options.parts or (list(PARTS) if options.list else mine)
    return options


def run_part(part: str, options: argparse.Namespace, environment: dict[str, str | int]) -> int:
    """Measure what a part still lacks. Returns: COMPLETE, FAILED or LATE."""
    import pytest

    from . import speed_timings

    every = [toy(case) for case in PARTS[part]] if options.dry_run else PARTS[part]
    results = Results.open(options.out / f"speed_{part}.json", environment, options.fresh)
    if options.retry_skipped:
        results.rows = [row for row in results.rows if "skipped" not in row]
    chosen = [case for case in every if options.only in case.name]
    session = speed_timings.Session(chosen, results, Deadline(options.minutes), options.kvpress_python)
    code = 0
    if session.cases:
        # Without the project's own configuration, whose options need more plug-ins than a measurement does.
        flags = ["-q", "-s", "--benchmark-disable-gc", "--benchmark-columns=median", "--no-header", "-W", "ignore"]
        flags += ["-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main([speed_timings.__file__, *flags], plugins=[session])
    results.complete = all(results.has(case.name) for case in every)
    results.write()
    missing = f"; {session.missing} need --kvpress-python" if session.missing else ""
    print(f"{part}: {len(results.rows)} of {len(every)} cases{missing}", flush=True)
    if code or session.red:
        return FAILED
    return COMPLETE if results.complete else LATE


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in order. Returns: the worst exit code."""
    options = parse(arguments)
    if options.list:
        for part in options.parts:
            print(part, *(f"\n  {case.name}" for case in PARTS[part]))
        return COMPLETE
    if options.dry_run:
        options.out = options.out or Path(tempfile.mkdtemp(prefix="fastkv-dry-run-"))
        if options.out.resolve() == OUT.resolve():
            raise SystemExit("a dry run measures nothing and does not write into perf/results")
    elif not torch.cuda.is_available() and any(part.startswith("gpu") for part in options.parts):
        raise SystemExit("no CUDA device: run GPU parts where there is one, or try --dry-run")
    options.out = options.out or OUT
    environment = speed_environment() | ({"commit": options.commit} if options.commit else {})
    environment |= {"dry_run": 1} if options.dry_run else {}
    codes = []
    for part in options.parts:
        threads = {"threads": PARTS[part][0].threads}
        codes.append(run_part(part, options, environment | threads))
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
