"""Single operations on a GPU, in one command that can be stopped and continued: correctness first, then timings.

    python -m perf.gpu --minutes 9                       # everything; call again until it says "complete"
    python -m perf.gpu --parts checks decode             # only these
    python -m perf.gpu --dry-run                         # no GPU: the same code on toy shapes, in the interpreter

Each part has one file, gpu_<part>.json, written after every case. A part is not timed while a check of its operations
is red. Exit code: 0 complete, 1 something failed, 3 the time was over.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from .. import engine
from ..engine import FAILED, Deadline, Job, Results, Row, Unmeasured, closure, digest
from ..environment import environment

if TYPE_CHECKING:
    from .clock import Case
    from .state import Place

PARTS = ("checks", "copy", "decode", "select", "evict", "scores", "prefill", "flex")
SPARE = 45  # seconds that must be left when a case starts: compiling a peer takes most of them
SAID = {0: "complete", 1: "failed", 3: "not finished: call again"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = engine.command("perf.gpu", __doc__, PARTS, minutes=9.0)
    parser.add_argument("--dry-run", action="store_true", help="toy shapes in the interpreter; claims no timings")
    options = parser.parse_args(arguments)
    options.parts = sorted(options.parts or PARTS, key=PARTS.index)
    return options


def timing(case: Case, place: Place) -> Job:
    """A case as a job. What crashes leaves its reason; a peer may, anything else has then failed."""
    from .checks import CRASHES
    from .clock import measure
    from .timings import CODE

    def run() -> Row:
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                work = case.build(case, place)
                work.launch(0)  # compile
                work.reset()
                row = measure(work, place)
        except CRASHES as reason:
            if not place.toy:
                torch.cuda.synchronize()  # a broken device raises here and ends the run
            raise Unmeasured(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}") from reason
        share = row["gbps"] / ceiling(place) if row["gbps"] else None
        work = None
        gc.collect()
        if not place.toy:
            torch.cuda.empty_cache()
        return row | {"copy_gbps": ceiling(place), "of_copy": share}

    heads = case.heads
    row = {"op": case.op, "heads": heads.name, "batch": case.batch, "length": case.length, "head_dim": heads.head_dim}
    code = digest(closure("perf.gpu.timings", rooms=("perf",)) | closure(*CODE.get(case.part, ())))
    return Job(case.name, row, run, code, optional=case.peer)


@cache
def ceiling(place: Place) -> float | None:
    """GB/s of a large device copy in this run; None in a dry one."""
    from .clock import COPY_BYTES, copy_work, measure

    found = None if place.toy else measure(copy_work(place, COPY_BYTES, 2), place)["gbps"]
    if not place.toy:
        torch.cuda.empty_cache()
    return found


def run_part(part: str, options: argparse.Namespace, place: Place, facts: Row, deadline: Deadline) -> int:
    """Run what a part still lacks. Returns: COMPLETE, FAILED or LEFT."""
    from . import checks
    from .timings import CHECKED, cases

    again = {"fresh": options.fresh, "retry": options.retry_skipped}
    if part == "checks":
        planned = checks.jobs(place)
    else:
        planned = [timing(case, place) for case in cases(part, place.toy)]
        known = Results.open(options.out / "gpu_checks.json", facts, checks.jobs(place))
        red = checks.red(known.rows, CHECKED[part])
        if red:
            print(f"{part}: not timed, because the check of {', '.join(red)} is not green")
            return FAILED
        if not deadline.over:
            ceiling(place)
    results = Results.open(options.out / f"gpu_{part}.json", facts, planned, **again)
    code = engine.measure([job for job in planned if options.only in job.name], results, deadline)
    print(f"{part}: {SAID[code]} ({len(results.rows)} of {len(planned)} rows)", flush=True)
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in order until done or late. Returns: the exit code."""
    options = parse(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which happens below
    elif not options.list and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run it where there is one, or try --dry-run")
    options.out = engine.folder(options)
    from . import checks
    from .state import Place
    from .timings import cases

    place = Place(torch.device("cpu" if options.dry_run or options.list else "cuda"), toy=options.dry_run)
    if options.list:
        jobs = {part: checks.jobs(place) if part == "checks" else cases(part, False) for part in options.parts}
        return engine.listed({part: [job.name for job in some] for part, some in jobs.items()})
    facts = environment(options.commit, options.dry_run)
    print(" ".join(f"{key}={value}" for key, value in facts.items()), flush=True)
    deadline = Deadline(options.minutes, 0 if place.toy else SPARE)
    return engine.worst([run_part(part, options, place, facts, deadline) for part in options.parts])


if __name__ == "__main__":
    sys.exit(main())
