"""A GPU in half an hour: checks, then timings, the most important first, in calls that go on with each other's files.

    python -m perf.gpu --minutes 9                       # again, until it says "complete"
    python -m perf.gpu --only device key                 # some sections; --list names them
    python -m perf.gpu --dry-run                         # no GPU: every line on toy shapes, with stand-ins

A timing of fastkv waits for the checks at its head shape and is compared with the reference before it is timed. An
error that breaks the device ends the run; what it would have said of later rows is not written. Exit code: 0 complete,
1 something failed, 3 the time was over.
"""

import os
import sys
import time

import torch

from .. import engine
from ..engine import COMPLETE, FAILED, LEFT, Results
from ..environment import environment

SECTIONS = {
    "device": "tickets, graphs, pages, syncs, a captured model",
    "key": "the default's decode step and its peers",
    "model": "steps of an 8B model",
    "prompt": "blocks of prompts, with flash-attn",
    "kernels": "the kernels' own tests",
    "steps": "other models and caches: captured, compiled",
    "decode": "other heads, steps and shapes",
}
SAID = {COMPLETE: "complete", FAILED: "something failed", LEFT: "not finished: call again"}


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of the plan until done or late. Returns: the exit code."""
    parser = engine.command("perf.gpu", __doc__, minutes=9.0)
    sections = {"choices": tuple(SECTIONS), "default": tuple(SECTIONS), "metavar": "SECTION"}
    parser.add_argument("--only", nargs="+", **sections, help="some sections; see --list")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="no cases that contain one of these")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which happens below
    elif not options.list and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run it where there is one, or try --dry-run")
    folder = engine.folder(options)
    from .checks import DeviceLost
    from .place import Place
    from .plan import FILES, planned

    plan = planned(Place(torch.device("cpu" if options.dry_run or options.list else "cuda"), options.dry_run))
    if options.list:
        return engine.listed({name: [job.name for job in plan[name]] for name in options.only})
    facts = environment(options.commit, options.dry_run)
    print(" ".join(f"{key}={value}" for key, value in facts.items()), flush=True)
    for name in options.only:
        minutes = sum(job.seconds for job in plan[name]) / 60
        print(f"{name:8s} {len(plan[name]):4d} rows {minutes:5.1f} minutes: {SECTIONS[name]}")
    files = {}
    for name in FILES:
        own = [job for jobs in plan.values() for job in jobs if job.file == name]
        files[name] = Results.open(folder / f"{name}.json", facts, own, options.fresh, options.retry_skipped)
    chosen = [job for name in SECTIONS if name in options.only for job in plan[name] if options.match in job.name]
    chosen = [job for job in chosen if not any(one in job.name for one in options.skip)]
    try:
        code = engine.measure(chosen, files, deadline)
    except DeviceLost as lost:
        print(f"\nthe device is lost: {lost}; the rows so far are stored, and --skip goes on without the cause")
        return FAILED
    print(SAID[code], flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
