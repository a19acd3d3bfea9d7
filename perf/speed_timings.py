"""Timings of whole models by pytest-benchmark; `python -m perf.speed_run` starts them and hands over the cases.

Not named test_*: a plain pytest run does not collect it. One test is one case in a process of its own; its row goes to
`extra_info` and, at once, to the JSON file of its part. The statistics of pytest-benchmark itself are the time of the
whole process and are not reported.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from .environment import ROOT
from .gpu_results import Deadline, Results, Row
from .speed_cases import Case

LONGEST = 45  # seconds that must be left when a case starts
LIMIT = 900  # seconds after which a case is given up
MOST = 4096  # sequences; doubling ends here at the latest
Worker = Callable[[Case], Row]


def run_worker(case: Case, python: str) -> Row:
    """Measure a case in a fresh process of that interpreter. A row with "skipped" says why there is no measurement."""
    command = [python, "-m", "perf.speed_worker", json.dumps(asdict(case))]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not finished after {LIMIT} seconds"}
    if result.returncode == -signal.SIGKILL:
        return {"out_of_memory": True}
    if result.returncode:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        return {"skipped": last[:200]}
    return json.loads(result.stdout.splitlines()[-1])


def largest(case: Case, worker: Worker) -> Row:
    """The row of the largest batch that fits: doubled until it does not, or halved until it does."""
    best: Row = {"out_of_memory": True}
    batch, tried = case.batch, []
    while 1 <= batch <= MOST:
        row = worker(replace(case, what="decode", batch=batch))
        tried.append(batch)
        fits = not row.get("out_of_memory") and "skipped" not in row
        if fits:
            best = row | {"batch": batch}
        if not fits and (best.get("batch") or "skipped" in row):
            return (best if best.get("batch") else row) | {"tried": tried}
        if fits and batch < case.batch:
            break  # came down to here, the next larger one did not fit
        batch = 2 * batch if fits else batch // 2
    return best | {"tried": tried}


class Session:
    """What one part needs; given to pytest as a plug-in.

    Attributes:
        cases: those without a row yet.  results: the part's file.  deadline: when to start nothing new.
        pythons: the interpreter of each contender; a contender without one is left out and stays unmeasured.
        late, missing: cases not started because the time was over, or for want of an interpreter.
        red: cases of fastkv or the full cache that failed.
    """

    def __init__(self, cases: list[Case], results: Results, deadline: Deadline, kvpress: str | None) -> None:
        self.cases = [case for case in cases if not results.has(case.name)]
        self.results, self.deadline = results, deadline
        self.pythons = {"full": sys.executable, "fastkv": sys.executable, "kvpress": kvpress}
        self.late = self.missing = self.red = 0

    def run(self, case: Case) -> Row:
        """Measure a case and keep its row; pytest skips it if it cannot be measured now."""
        python = self.pythons[case.contender]
        if python is None:
            self.missing += 1
            pytest.skip("no interpreter with kvpress; pass --kvpress-python")
        if self.deadline.over(LONGEST):
            self.late += 1
            pytest.skip("the time is over")
        worker = lambda one: run_worker(one, python)  # noqa: E731
        row = largest(case, worker) if case.what == "largest" else worker(case)
        row = case.as_row() | row
        if "skipped" not in row and not row.get("out_of_memory"):
            row |= self.same_model(case, row)
        self.red += "skipped" in row and case.contender != "kvpress"
        self.results.add(row)
        if "skipped" in row:
            pytest.skip(row["skipped"])
        return row

    def same_model(self, case: Case, row: Row) -> Row:
        """Whether this process computed the same logits as the others of that model did; if not, it does not count."""
        known = {
            r["checksum"]: r["id"]
            for r in self.results.rows
            if r["model"] == case.model and "checksum" in r and "skipped" not in r
        }
        if known and row["checksum"] not in known:
            return {"skipped": f"its model computes other logits than that of {next(iter(known.values()))}"}
        return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the plug-in; none without it."""
    sessions = [p for p in metafunc.config.pluginmanager.get_plugins() if isinstance(p, Session)]
    cases = [(one, case) for one in sessions for case in one.cases]
    metafunc.parametrize("session,case", cases, ids=[case.name for _, case in cases])


def test_speed(benchmark: Any, session: Session, case: Case) -> None:
    """Measure, keep, tell."""
    row = benchmark.pedantic(session.run, (case,), rounds=1, iterations=1)
    benchmark.extra_info.update(row)
    told = {"ms_p50": row.get("ms", {}).get("p50"), **{k: row.get(k) for k in ("first_s", "generate_s", "batch")}}
    print(f"\n{case.name}:", *(f"{k}={v:.4g}" for k, v in told.items() if v is not None), flush=True)
