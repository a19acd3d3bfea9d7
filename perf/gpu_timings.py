"""Timings by pytest-benchmark; started by `python -m perf.gpu_run`, which hands over the cases as a plug-in.

Not named test_*: a plain pytest run does not collect it. One test is one case; its numbers go to `extra_info` and, at
once, to the section's JSON file. The statistics of pytest-benchmark itself are host times of whole graph replays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .gpu_checks import CRASHES
from .gpu_checks_state import Place
from .gpu_results import Deadline, Results, Row
from .gpu_timings_clock import Case, measure

PLUGIN = "fastkv-gpu-timings"
LONGEST = 45  # seconds that may be left when a case starts: compiling a peer takes most of them


class Session:
    """What one section needs; registered with pytest as a plug-in.

    Attributes:
        place: device.  cases: of the section, the most important first.  results: its file.
        ceiling: GB/s of a large device copy in this run.  late: cases not started because the time was over.
    """

    def __init__(
        self, place: Place, cases: list[Case], results: Results, deadline: Deadline, ceiling: float | None
    ) -> None:
        self.place, self.results, self.deadline, self.ceiling = place, results, deadline, ceiling
        self.cases = [case for case in cases if not results.has(case.name)]
        self.late = 0

    def run(self, case: Case, pedantic: Callable[..., Any]) -> Row:
        """Time a case; a skip with the reason if it is too late, or if a peer cannot run here."""
        if self.deadline.over(0 if self.place.toy else LONGEST):
            self.late += 1
            pytest.skip("the time is over")
        torch.manual_seed(0)
        try:
            work = case.build(case, self.place)
            work.launch(0)  # compile
            work.reset()
            return measure(work, self.place, pedantic)
        except CRASHES as reason:
            if not self.place.toy:
                torch.cuda.synchronize()  # a broken device raises here and ends the run
            if not case.peer:
                raise
            text = f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"
            self.results.add(self.facts(case) | {"skipped": text})
            pytest.skip(text)

    def facts(self, case: Case) -> Row:
        """The columns that name a case."""
        shape = {"heads": case.heads.name, "batch": case.batch, "length": case.length}
        return {"id": case.name, "op": case.op, **shape, "head_dim": case.heads.head_dim}

    def finish(self, case: Case, row: Row) -> Row:
        """Add the share of the copy bandwidth and keep the row."""
        share = row["gbps"] / self.ceiling if row.get("gbps") and self.ceiling else None
        row = self.facts(case) | row | {"copy_gbps": self.ceiling, "of_copy": share}
        self.results.add(row)
        return row


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the plug-in; none without it."""
    session = metafunc.config.pluginmanager.get_plugin(PLUGIN)
    cases = session.cases if session is not None else []
    metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@torch.no_grad()
def test_timing(benchmark: Any, case: Case, pytestconfig: pytest.Config) -> None:
    """Build, time, keep."""
    session: Session = pytestconfig.pluginmanager.get_plugin(PLUGIN)
    row = session.run(case, benchmark.pedantic)
    benchmark.extra_info.update(session.finish(case, row))
    median = row["median_us"]
    print(f"\n{case.name}: {'no time in a dry run' if median is None else f'{median:.2f} us'}", flush=True)
    gc.collect()
    if not session.place.toy:
        torch.cuda.empty_cache()
