"""A GPU in half an hour: checks, then timings, the most important first, in calls that go on with each other's files.

    python -m perf.gpu --minutes 9                       # again, until it says "complete"
    python -m perf.gpu --only device key                 # some sections; --list names them
    python -m perf.gpu --dry-run                         # no GPU: every line on toy shapes, with stand-ins

A timing of fastkv waits for the checks at its head shape and is compared with the reference before it is timed. An
error that breaks the device ends the run; what it would have said of later rows is not written. Exit code: 0 complete,
1 something failed, 3 the time was over.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import engine
from ..engine import COMPLETE, FAILED, LEFT, Deadline, Results, Row
from ..environment import environment

if TYPE_CHECKING:
    from .plan import Section, Task

SECTIONS = ("device", "key", "model", "prompt", "kernels", "steps", "decode")
SAID = {COMPLETE: "complete", FAILED: "something failed", LEFT: "not finished: call again"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="some sections; see --list")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="no cases that contain one of these")
    parser.add_argument("--dry-run", action="store_true", help="toy shapes and stand-ins on a CPU; claims no timings")
    engine.add_options(parser, minutes=9.0)
    return parser.parse_args(arguments)


class Run:
    """The files, and what is done with the tasks.

    Args: folder: of the files.  facts: of the machine.  sections: the whole plan, of which a call may do some.
    """

    def __init__(self, folder: Path, facts: Row, sections: Sequence[Section], fresh: bool, retry: bool) -> None:
        from .plan import FILES

        planned = [task for section in sections for task in section.tasks]
        self.files = {
            name: Results.open(
                folder / f"{name}.json", facts, [t.job for t in planned if t.file == name], fresh=fresh, retry=retry
            )
            for name in FILES
        }
        self.blocked: dict[str, list[str]] = {}

    def lacks(self, task: Task) -> bool:
        """Whether it has no row yet."""
        return not self.files[task.file].has(task.job.name)

    def go(self, tasks: Sequence[Task], deadline: Deadline) -> None:
        """Do what fits, in order. Raises: DeviceLost, with everything before it stored."""
        for number, task in enumerate(tasks, 1):
            green = {row["id"] for row in self.files["gpu_checks"].rows if row.get("passed")}
            red = [name for name in task.needs if name not in green]
            if red:
                self.blocked.setdefault(", ".join(red), []).append(task.job.name)
            elif deadline.left >= task.seconds:
                row = engine.row_of(task.job)
                self.files[task.file].add(row)
                state = row.get("skipped") or ("RED" if row.get("passed") is False else "")
                name = f"{deadline.elapsed:.0f} s {number}/{len(tasks)} {task.job.name}"
                print(f"{name} {row['seconds']:.1f} s, predicted {task.seconds:.1f} {state}".rstrip(), flush=True)

    def concluded(self) -> int:
        """Say what failed and what was blocked. Returns: the exit code."""
        code = engine.worst([engine.concluded(results) for results in self.files.values()])
        for red, names in self.blocked.items():
            print(f"{len(names)} not timed, because {red} is not green: {names[0]} ...")
        return FAILED if self.blocked else code


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of the plan until done or late. Returns: the exit code."""
    options = parse(arguments)
    deadline = Deadline(options.minutes)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which happens below
    elif not options.list and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run it where there is one, or try --dry-run")
    options.out = engine.folder(options)
    from .checks import DeviceLost
    from .place import Place
    from .plan import sections

    everything = sections(Place(torch.device("cpu" if options.dry_run or options.list else "cuda"), options.dry_run))
    chosen = [section for section in everything if section.name in (options.only or SECTIONS)]
    if options.list:
        return engine.listed({section.name: [task.job.name for task in section.tasks] for section in chosen})
    facts = environment(options.commit, options.dry_run)
    print(" ".join(f"{key}={value}" for key, value in facts.items()), flush=True)
    for section in chosen:
        print(f"{section.name:8s} {len(section.tasks):4d} rows {section.seconds / 60:5.1f} minutes: {section.title}")
    run = Run(options.out, facts, everything, options.fresh, options.retry_skipped)
    named = [task for section in chosen for task in section.tasks if options.match in task.job.name]
    tasks = [task for task in named if run.lacks(task) and not any(one in task.job.name for one in options.skip)]
    try:
        run.go(tasks, deadline)
    except DeviceLost as lost:
        print(f"the device is lost: {lost}; the rows so far are stored, and --skip goes on without the cause")
        return FAILED
    code = run.concluded()
    print(SAID[code], flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
