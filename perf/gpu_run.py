"""Everything that needs a GPU, in one command that can be stopped and continued: correctness first, then timings.

    python -m perf.gpu_run --minutes 9                     # all sections; call again until it says "complete"
    python -m perf.gpu_run --sections checks decode        # only these
    python -m perf.gpu_run --dry-run                       # no GPU: the same code on toy shapes, in the interpreter

Each section has one file, gpu_<section>.json, written after every case. A section whose file is complete is skipped; a
file from other sources, another GPU or other versions is started again. A section is not timed while a check of its
operations is red. Exit code: 0 complete, 1 something failed, 3 the time was over.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .environment import ROOT, gpu_environment
from .gpu_results import Deadline, Results, red_ops

if TYPE_CHECKING:
    from .gpu_checks_state import Place

OUT = Path(__file__).parent / "results"
SECTIONS = ("checks", "copy", "decode", "select", "evict", "scores", "prefill", "flex")
COMPLETE, FAILED, LATE = 0, 1, 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all, in order"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default perf/results; none in a dry run)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start nothing after this long (default %(default)s)"
    )
    parser.add_argument("--commit", help="the commit to name where there is no git")
    parser.add_argument("--fresh", action="store_true", help="do not continue earlier files")
    parser.add_argument("--retry-skipped", action="store_true", help="try peers again that could not run before")
    parser.add_argument("--dry-run", action="store_true", help="toy shapes in the interpreter; claims no timings")
    return parser.parse_args(arguments)


def run_section(section: str, place: Place, results: Results, checks: Results, deadline: Deadline) -> int:
    """Run what a section still lacks. Returns: COMPLETE, FAILED or LATE."""
    from .gpu_checks import run_checks

    if section == "checks":
        run_checks(place, results, deadline)
        red = [row["id"] for row in results.rows if not row["passed"]]
        print(f"checks: {len(results.rows) - len(red)} green, {len(red)} red", *red)
        return FAILED if red else COMPLETE if results.complete else LATE
    return time_section(section, place, results, checks, deadline)


def time_section(section: str, place: Place, results: Results, checks: Results, deadline: Deadline) -> int:
    """Time the cases of a section under pytest-benchmark, unless a check is red."""
    import pytest

    from . import gpu_timings
    from .gpu_timings_clock import copy_work, measure
    from .gpu_timings_ops import CHECKED, COPY_BYTES, cases

    red = red_ops(checks, CHECKED[section])
    if red:
        print(f"{section}: not timed, because the check of {', '.join(red)} is not green")
        return FAILED
    ceiling = None
    if not place.toy:
        ceiling = measure(copy_work(place, COPY_BYTES, 2), place, _plainly)["gbps"]
        torch.cuda.empty_cache()
    session = gpu_timings.Session(place, cases(section, place.toy), results, deadline, ceiling)
    options = ["-q", "-s", "--benchmark-disable-gc", "--benchmark-columns=median", "--timeout=0"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", "-W", "ignore"]
    code = 0
    if session.cases:
        registry = _Registered(session)
        code = pytest.main([str(Path(gpu_timings.__file__)), *options], plugins=[registry])
    if code:
        return FAILED
    if session.late:
        return LATE
    results.complete = True
    results.write()
    return COMPLETE


class _Registered:
    """Makes the session findable by name from inside pytest."""

    def __init__(self, session: object) -> None:
        self.session = session

    def pytest_configure(self, config: object) -> None:
        """Hook of pytest."""
        from .gpu_timings import PLUGIN

        config.pluginmanager.register(self.session, PLUGIN)  # type: ignore[attr-defined]


def _plainly(function, rounds: int, iterations: int, warmup_rounds: int = 0) -> None:
    """What `benchmark.pedantic` does with the function, without its bookkeeping."""
    for _ in range(rounds):
        function()


def main(arguments: list[str] | None = None) -> int:
    """Run the sections in order until done or late. Returns: the exit code."""
    options = parse(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run it where there is one, or try --dry-run")
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which happens below
        if options.out is None:
            options.out = Path(tempfile.mkdtemp(prefix="fastkv-dry-run-"))
        if options.out.resolve() == OUT.resolve():
            raise SystemExit("a dry run measures nothing and does not write into perf/results")
    from .gpu_checks_state import Place

    out = options.out or OUT
    place = Place(torch.device("cpu" if options.dry_run else "cuda"), toy=options.dry_run)
    environment = gpu_environment() | ({"commit": options.commit} if options.commit else {})
    environment |= {"dry_run": 1} if options.dry_run else {}
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    deadline, codes = Deadline(options.minutes), {}
    for section in sorted(options.sections, key=SECTIONS.index):
        results = Results.open(out / f"gpu_{section}.json", environment, options.fresh)
        checks = Results.open(out / "gpu_checks.json", environment)
        if options.retry_skipped:
            kept = [row for row in results.rows if "skipped" not in row]
            results.complete, results.rows = results.complete and len(kept) == len(results.rows), kept
        if results.complete:
            bad = section == "checks" and not all(row["passed"] for row in results.rows)
            print(f"{section}: complete already")
            codes[section] = FAILED if bad else COMPLETE
            continue
        codes[section] = LATE if deadline.over() else run_section(section, place, results, checks, deadline)
        words = {COMPLETE: "complete", FAILED: "failed", LATE: "not finished: call again"}
        print(f"{section}: {words[codes[section]]} ({len(results.rows)} rows)", flush=True)
    if FAILED in codes.values():
        return FAILED
    return LATE if LATE in codes.values() else COMPLETE


if __name__ == "__main__":
    sys.exit(main())
