"""Fill the compile cache by up to 16 processes at once, before anything is measured.

    python -m perf.gpu.warmup '["decode_centroids[llama-3.1-8b-bfloat16]"]'      # what one of them does

Each process launches its checks and timings once, briefly, on the same shapes. What Triton compiles hangs on more than
the variants of `perf.variants`: on which numbers are multiples of 16 or one, and on launch options; only a launch asks
for exactly what the run will ask for. A crash in such a process harms no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ..engine import ROOT
from .checks import CRASHES
from .place import Place
from .plan import LIMIT, Task, groups, sections


def command(tasks: Sequence[Task]) -> list[str]:
    """What warms these up in another process."""
    return [sys.executable, "-m", "perf.gpu.warmup", json.dumps([task.job.name for task in tasks])]


def warm_up(tasks: Sequence[Task], limit: float = LIMIT) -> None:
    """Start the processes and wait for them; those that are late are ended."""
    begun, lists = time.monotonic(), groups(tasks)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen(command(some), cwd=ROOT, env=environment, stdout=quiet, stderr=quiet) for some in lists]
    late = 0
    for process in running:
        try:
            process.wait(max(begun + limit - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    failed = sum(process.returncode != 0 for process in running) - late
    print(
        f"warm-up: {len(running)} processes, {time.monotonic() - begun:.0f} s, {late} ended late, {failed} gave up",
        flush=True,
    )


def launch(tasks: Sequence[Task]) -> None:
    """Launch each once. What crashes is met again by the run, which says so; a lost device ends this process."""
    for task in tasks:
        assert task.warm is not None
        try:
            task.warm()
        except CRASHES as crash:
            print(f"{task.job.name}: {type(crash).__name__}: {crash}", flush=True)


def main() -> None:
    """Launch what is named on the command line."""
    wanted = json.loads(sys.argv[1])
    known = {task.job.name: task for section in sections(Place(torch.device("cuda"))) for task in section.tasks}
    launch([known[name] for name in wanted])


if __name__ == "__main__":
    main()
