"""The GPU scripts as code: a dry run in the interpreter, the gate before timings, and the report on made-up files."""

import json
import math
from dataclasses import replace

import pytest
import torch

from perf import engine, report
from perf.engine import RESULTS, Deadline, Results
from perf.gpu import __main__ as command
from perf.gpu import checks
from perf.gpu.clock import Work, measure, num_sets, passes
from perf.gpu.heads import GEMMA, LLAMA, TOY, decode_bytes, shapes
from perf.gpu.split_kv import choose_splits, split_kv_attention
from perf.gpu.state import Finding, Place, close, equal, in_order, ragged
from perf.gpu.targets import TARGETS, Table
from perf.gpu.timings import CHECKED, CODE, cases

CPU = Place(torch.device("cpu"), toy=True)
FACTS = {"device": "GPU X", "driver": "1.2", "torch": "2", "triton": "3", "commit": "abc", "source": "s0"}


def test_a_run_needs_a_gpu_and_a_dry_run_does_not_touch_the_results(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        command.main([])
    with pytest.raises(SystemExit, match="does not write into perf/results"):
        command.main(["--dry-run", "--out", str(RESULTS)])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs parts with these checks, in this process: the interpreter is on (conftest). Returns exit code and rows."""
    monkeypatch.setattr("perf.gpu.checks_device.DEVICE_CHECKS", {})
    monkeypatch.setattr("perf.gpu.checks_models.MODEL_CHECKS", {})

    def main(*parts, **some):
        monkeypatch.setattr(checks, "CHECKS", some)
        code = command.main(["--dry-run", "--out", str(tmp_path), "--minutes", "5", "--parts", *parts])
        files = {part: tmp_path / f"gpu_{part}.json" for part in parts}
        return code, [json.loads(file.read_text()) if file.exists() else None for file in files.values()]

    return main


def test_one_dry_check_and_one_dry_timing_end_to_end(run):
    one = {"prefill_attention": checks.CHECKS["prefill_attention"]}
    code, (found, timed, closed) = run("checks", "prefill", "select", **one)
    assert found["complete"] and [row["passed"] for row in found["rows"]] == [True]
    (row,) = timed["rows"]
    assert row["dry_run"] and row["median_us"] is None and row["needed_bytes"] > 0 and row["case"]["op"] == "prefill"
    assert code == engine.FAILED and closed is None, "no check of select is green"


def test_a_crash_or_a_wrong_result_is_red_and_closes_its_part(run):
    def crash(*arguments):
        raise RuntimeError("illegal memory access")

    wrong = {
        "evict": crash,
        "compact": lambda *a: [Finding("kept", 1.0)],
        "decode_step": lambda *a: [Finding("out", 0.1, 0.2)],
    }
    code, (found,) = run("checks", **wrong)
    assert code == engine.FAILED and [row["passed"] for row in found["rows"]] == [False, False, True]
    assert "illegal memory access" in found["rows"][0]["error"]
    assert checks.red(found["rows"], CHECKED["evict"]) == ["evict", "moment_scores"]
    assert checks.red(found["rows"], CHECKED["flex"]) == []


def test_a_peer_that_cannot_run_leaves_its_reason(tmp_path):
    def crash(case, place):
        raise ImportError("flashinfer is not installed")

    jobs = [
        command.timing(replace(case, build=crash), CPU) for case in cases("decode", toy=True) if case.op != "fastkv"
    ]
    results = Results.open(tmp_path / "gpu_decode.json", FACTS, jobs)
    assert engine.measure(jobs[-1:], results, Deadline(5)) == engine.LEFT
    assert results.rows[0]["skipped"] == "ImportError: flashinfer is not installed" and results.rows[0]["case"]
    assert engine.measure(jobs[:1], results, Deadline(5)) == engine.FAILED, "fastkv is no peer"


def test_parts_name_code_that_exists():
    assert CODE.keys() <= CHECKED.keys()
    for modules in CODE.values():
        assert engine.closure(*modules)


def test_findings_do_not_pass_nan():
    want = torch.tensor([1.0, 2.0, -math.inf], dtype=torch.float64)
    assert close("x", want.float(), want, want.float()).passed
    assert not close("x", want.float() + 1e-3, want, want.float()).passed
    assert not close("x", torch.tensor([1.0, math.nan, -math.inf]), want, want.float()).passed
    assert not close("x", torch.tensor([1.0, 2.0, 3.0]), want, want.float()).passed
    assert equal("x", want, want).passed and not equal("x", want, want + 1).passed


def test_states_account_for_every_token():
    state = ragged(CPU, TOY, torch.float16)
    assert torch.equal(state.stored + state.moments.count, state.seen[:, None].expand_as(state.stored))
    positions, keys, _, lengths = in_order(state)
    assert (lengths == 0).any() and (lengths == state.exact.limit - 1).any()
    assert keys.isfinite().all() and (positions < state.seen[:, None, None]).all()


def test_cases_are_named_once_and_start_with_the_important_ones():
    for part in CHECKED:
        names = [case.name for case in cases(part, toy=False)]
        assert len(names) == len(set(names)) > 0
    first = cases("decode", toy=False)[0]
    assert (first.op, first.heads, first.batch, first.length) == ("fastkv", LLAMA, 1, 1024)
    assert len(shapes()) == len(set(shapes())) == 24


def test_bytes_of_a_step():
    """The numbers of the floors: 2.39 MB a layer at L = 512 for Llama, 9.48 MB at 1024 for Gemma."""
    assert decode_bytes(LLAMA, 1, 512, 1) == pytest.approx(2.39e6, rel=0.01)
    assert decode_bytes(GEMMA, 1, 1024, 1) == pytest.approx(9.48e6, rel=0.01)


def test_a_dry_clock_runs_every_set_once_and_gives_no_time():
    seen = []
    work = Work(seen.append, 3, 100, reset=lambda: seen.append("reset"))
    row = measure(work, CPU)
    assert seen == ["reset", 0, 1, 2] and row["median_us"] is None
    assert passes(work) == 5 and passes(Work(print, 40, 1)) == 3 and passes(Work(print, 4, 1, once=True)) == 1


class FakeDevice:
    """A stand-in for what the clock asks of CUDA: graphs replay what was launched, every replay takes 2 ms."""

    total_memory, L2_cache_size = 100_000, 1000

    def __init__(self):
        self.replays = 0

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def replay(self):
        self.replays += 1

    def elapsed_time(self, other):
        return 2.0

    def __getattr__(self, name):
        return self


def test_the_clock_divides_by_launches_and_rotates_sets(monkeypatch):
    device = FakeDevice()
    for name in (
        "Stream",
        "stream",
        "current_stream",
        "synchronize",
        "CUDAGraph",
        "graph",
        "Event",
        "get_device_properties",
    ):
        monkeypatch.setattr(torch.cuda, name, device)
    place = Place(torch.device("cpu"))
    assert num_sets(place, 100) == 20 and num_sets(place, 10_000) == 4 and num_sets(place, 40_000) == 2
    seen = []
    row = measure(Work(seen.append, 20, 40_000), place)
    assert seen == [0, 0, 0, *list(range(20)) * 5]
    assert row["launches"] == 100 and row["median_us"] == row["p20_us"] == 20.0 and row["gbps"] == 2.0
    assert row["samples"] == 100 and device.replays == 103


@pytest.mark.parametrize("length,splits", [(1, 1), (37, 4), (64, 2), (5, 8)])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_baseline_is_attention(length, splits, groups):
    q, keys, values = torch.randn(2, 2 * groups, 16), torch.randn(2, 2, length, 16), torch.randn(2, 2, length, 16)
    wide = [t.repeat_interleave(groups, 1) for t in (keys, values)]
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], *wide, scale=0.3)[:, :, 0]
    torch.testing.assert_close(split_kv_attention(q, keys, values, 0.3, splits=splits), want, atol=1e-5, rtol=1e-5)


def test_the_baseline_splits_long_contexts_of_few_heads():
    assert choose_splits(8, 128) == 2 and choose_splits(8, 4096) == 32 and choose_splits(256, 4096) == 1


def timed_row(op, batch, length, median, heads=LLAMA.name, share=None):
    times = {"median_us": median, "p20_us": median - 0.1, "p80_us": median + 0.1, "gbps": 3500.0, "of_copy": share}
    shape = {"heads": heads, "batch": batch, "length": length}
    return {"id": f"{op}-{batch}-{length}", "op": op, **shape, **times}


def write_file(folder, name, rows, **changes):
    content = {"environment": FACTS, "complete": True, "rows": rows} | changes
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_report_of_nothing_says_so(tmp_path):
    text = report.write(tmp_path).read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    promised = [next(line for line in lines if line.startswith(f"| {target.what} |")) for target in TARGETS]
    assert all("| not measured |" in line and "(prediction)" in line for line in promised)
    assert "Nothing has been measured." in text
    assert not list(tmp_path.glob("*.png"))


def test_a_report_puts_measurements_beside_promises(tmp_path):
    rows = [
        timed_row("fastkv", 1, 1024, 4.5),
        timed_row("fastkv no correction", 1, 1024, 4.4),
        timed_row("split-KV Triton", 1, 1024, 7.5),
        timed_row("fastkv", 32, 4096, 150.0, share=0.85),
        timed_row("SDPA flash", 32, 4096, 140.0),
        {**timed_row("FlashInfer", 1, 1024, None or 1.0), "median_us": None, "skipped": "ImportError: not installed"},
    ]
    write_file(tmp_path, "gpu_decode", rows, complete=False)
    write_file(tmp_path, "gpu_select", [timed_row("select", 1, 1024, 16.0)])
    write_file(
        tmp_path, "gpu_scores", [timed_row("keydiff_scores", 1, 65536, 50.0)], environment=FACTS | {"dry_run": 1}
    )
    write_file(tmp_path, "gpu_checks", [{"id": "evict[x]", "op": "evict", "passed": False, "compared": 3}])
    report.main(["--results", str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    for line in (
        "| decode, B=1 L=1024 D=128 | ≤ 5 µs | 4.50 µs | yes |",
        "| decode, share of copy bandwidth, B=32 L=4096 D=128 | ≥ 90 % | 85.0% | no |",
        "| faster everywhere | fastest at 1 of 2 shapes against SDPA flash, split-KV Triton; ",
        "; llama-3.1-8b B=32 L=4096: SDPA flash 140.00 against 150.00 µs | no |",
        "| select + compact + moments of a block of 128, B=1 L=1024 D=128 | ≤ 15 µs | 16.00 µs | no |",
        "| scores of 64K keys, one layer, D=128 | < 100 µs each (prediction) | not measured |  |",
        "Files that are not finished: gpu_decode.",
        "| FlashInfer | ImportError: not installed | 1 |",
        "| evict | 3 | 0 | evict[x] |",
        "| 1 | 1024 | 4.50 (4.40-4.60) | not measured |",
        "GPU X",
    ):
        assert line in text, line
    for name in ("decode_llama-3.1-8b_b1", "bandwidth_llama-3.1-8b", "correction_llama-3.1-8b"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert Table([{"part": "decode", **row} for row in rows]).find("FlashInfer", LLAMA.name, 1, 1024) is None


def test_a_dry_run_of_whole_steps():
    """Captured and eager steps of whole models; kinds of caches take the interpreter minutes and run by hand."""
    from perf.gpu.checks_models import check_steps

    with torch.no_grad():
        findings = check_steps(CPU)
    assert len(findings) == 4 and all(finding.passed for finding in findings)
