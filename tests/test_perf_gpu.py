"""The GPU scripts as code: a dry run in the interpreter, the gate before timings, and the report on made-up files."""

import json
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from perf import engine, report
from perf.engine import RESULTS, Results
from perf.gpu import __main__ as command
from perf.gpu import checks, plan, timings
from perf.gpu.clock import Work, layer, measure, num_sets, samples
from perf.gpu.place import Place, StandIn
from perf.micro.states import GEMMA, LLAMA
from perf.speed import worker

CPU = Place(torch.device("cpu"), toy=True)
GPU = Place(torch.device("cpu"))  # plans only
FACTS = {"device": "GPU X", "driver": "1.2", "torch": "2", "triton": "3", "commit": "abc", "source": "s0"}
MINUTES = 9.0


def test_a_run_needs_a_gpu_and_a_dry_run_does_not_touch_the_results(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        command.main([])
    with pytest.raises(SystemExit, match="does not write into perf/results"):
        command.main(["--dry-run", "--out", str(RESULTS)])


# The plan.


@pytest.fixture(scope="module")
def whole():
    """Every section, as on a GPU."""
    return plan.planned(GPU)


def jobs_of(sections, *names):
    return [job for name, jobs in sections.items() if not names or name in names for job in jobs]


def test_the_plan_is_in_order_and_fits_into_half_an_hour(whole):
    assert tuple(whole) == tuple(command.SECTIONS)
    names = [job.name for job in jobs_of(whole)]
    assert len(names) == len(set(names))
    assert sum(job.seconds for job in jobs_of(whole)) < 1800
    assert sum(job.seconds for job in jobs_of(whole, "device", "key")) < 60 * MINUTES, "in the first call"
    assert max(job.seconds for job in jobs_of(whole)) < 60 * MINUTES


def test_a_timing_waits_for_checks_of_its_own_heads_before_it(whole):
    jobs = jobs_of(whole)
    order = {job.name: number for number, job in enumerate(jobs)}
    for number, job in enumerate(jobs):
        assert all(order[name] < number for name in job.needs), job.name
        if job.file == "gpu_timings":
            assert all(job.case["heads"] in name for name in job.needs)
            assert job.needs or job.optional


# Runs.


@pytest.mark.slow
def test_a_dry_run_walks_every_check_and_every_timing(tmp_path, capsys, whole, monkeypatch):
    monkeypatch.setitem(worker.COPY_BYTES, "cpu", 1 << 20)
    words = ["--dry-run", "--out", str(tmp_path), "--minutes", str(MINUTES)]
    assert command.main(words) == engine.COMPLETE
    for name, jobs in whole.items():
        assert f"\n{name:8s} {len(jobs):4d} rows" in capsys.readouterr().out
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == sorted(f"{name}.json" for name in plan.FILES)
    found = {row["id"]: row for path in files for row in json.loads(path.read_text())["rows"]}
    assert found.keys() == {job.name for job in jobs_of(whole)}
    for job in jobs_of(whole):
        row = found[job.name]
        assert "skipped" not in row, row
        if job.file == "gpu_checks":
            assert row["passed"], row
        elif job.file == "gpu_timings":
            assert row["dry_run"] and row["median_us"] is None and row["samples"] and row["needed_bytes"] > 0
        else:
            assert row["ms"]["p50"] > 0 and row["cache_bytes"] > 0
    assert command.main(words) == engine.COMPLETE, "nothing is done twice"
    report.main(["--results", str(tmp_path)])
    assert "Nothing has been measured." in (tmp_path / "README.md").read_text()


@pytest.fixture
def go(tmp_path):
    """Runs these jobs. Returns: the exit code, and the rows of each file."""

    def main(*jobs, minutes=5.0):
        of = {name: [job for job in jobs if job.file == name] for name in plan.FILES}
        files = {name: Results(tmp_path / f"{name}.json", FACTS, own) for name, own in of.items()}
        code = engine.measure(jobs, files, time.monotonic() + 60 * minutes)
        return code, {name: results.rows for name, results in files.items()}

    return main


def check(name, found=None, place=CPU, seconds=1.0):
    """A check that finds this, or crashes."""

    def run(place):
        if found is None:
            raise RuntimeError("illegal memory access")
        assert found < 0.5

    return plan.check(place, name, {"op": name}, run, seconds)


def timing(name, *needs):
    return engine.Job(name, {"op": name}, lambda: {"median_us": 1.0}, "s0", needs=needs, file="gpu_timings")


def test_a_red_check_blocks_only_the_timings_that_need_it(go, capsys):
    jobs = check("a", 1.0), check("b", 0.1), check("c"), timing("ta", "a"), timing("tb", "b"), timing("td", "b", "d")
    code, rows = go(*jobs)
    assert code == engine.FAILED
    assert [row["passed"] for row in rows["gpu_checks"]] == [False, True, False]
    assert "illegal memory access" in rows["gpu_checks"][2]["error"]
    assert [row["id"] for row in rows["gpu_timings"]] == ["tb"]
    assert "1 not measured, because a is not green: ta" in capsys.readouterr().out


def test_a_lost_device_ends_the_run_and_what_it_says_is_not_written(go, monkeypatch, tmp_path):
    lost = mock.Mock(side_effect=RuntimeError("unspecified launch failure"))
    monkeypatch.setattr(StandIn, "synchronize", lost, raising=False)
    with pytest.raises(checks.DeviceLost, match="illegal memory access"):
        go(check("a", 0.1), check("b"), check("c", 0.1))
    assert [row["id"] for row in json.loads((tmp_path / "gpu_checks.json").read_text())["rows"]] == ["a"]
    case = timings.cases()["key"][0]
    with pytest.raises(checks.DeviceLost):
        timings.run(replace(case, build=lambda *a: 1 / torch.zeros(1, 2) @ torch.zeros(1)), CPU)


def test_what_is_wrong_is_not_timed(monkeypatch):
    """A step that differs from the reference leaves the reason, and fails, because it is no peer's."""
    case = timings.cases()["key"][0]
    assert engine.row_of(plan.timing(CPU, case))["error"] < 1e-2
    stock = timings.ops.decode_step
    monkeypatch.setattr(timings.ops, "decode_step", lambda *cell: (2 * stock(*cell)[0],))
    assert "wrong result: relative error 1" in engine.row_of(plan.timing(CPU, case))["skipped"]


@pytest.mark.parametrize("harm", ["an eviction that does nothing", "an eviction of somebody else"])
def test_what_happens_in_the_wrong_page_is_a_finding(harm, monkeypatch):
    stock = checks.ops.compact

    def compact(*chosen, state, rule):
        if state.rows is None or "somebody else" in harm:
            stock(*chosen, state, rule)
        if state.rows is not None and "somebody else" in harm:
            stock(*chosen, state.at(torch.where(state.rows == 3, 5, 0)), rule)

    def pages():
        return checks.check_replays(CPU, CPU.heads(LLAMA), "moments", paged=True)

    assert checks.row_of(pages, CPU)["passed"]
    monkeypatch.setattr(checks.ops, "compact", lambda *given: compact(*given[:-2], state=given[-2], rule=given[-1]))
    row = checks.row_of(pages, CPU)
    assert not row["passed"] and row["error"].startswith("AssertionError: from ")
    assert ("others'" in row["error"]) == ("somebody else" in harm)


# What checks and the clock are made of.


def test_bytes_of_a_step():
    """The numbers of the floors: 2.39 MB a layer at L = 512 for Llama, 9.48 MB at 1024 for Gemma."""
    for heads, length, nbytes in ((LLAMA, 512, 2.39e6), (GEMMA, 1024, 9.48e6)):
        state = layer(GPU, heads, 1, length, "moments", free=timings.FREE)
        assert timings.needed_bytes(state, heads, length) == pytest.approx(nbytes, rel=0.01)


class FakeDevice(StandIn):
    """Graphs replay what was launched, every replay takes 2 ms."""

    total_memory, L2_cache_size, replays = 100_000, 1000, 0

    def replay(self):
        self.replays += 1


def test_the_clock_divides_by_launches_and_rotates_sets(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(Place, "cuda", device)
    place = Place(torch.device("cpu"))
    assert num_sets(place, 100) == 20 and num_sets(place, 10_000) == 4 and num_sets(place, 40_000) == 2
    seen = []
    row = measure(Work(seen.append, 20, 40_000), place)
    assert seen == [0, 0, 0, *list(range(20)) * 5]
    assert row["launches"] == 100 and row["median_us"] == row["p20_us"] == 20.0 and row["gbps"] == 2.0
    assert row["samples"] == 100 and device.replays == 103
    for sets, once, launches in ((40, False, 120), (300, False, 300), (4, True, 4)):
        assert samples(Work(seen.append, sets, 1, once=once), place)[1] == launches
