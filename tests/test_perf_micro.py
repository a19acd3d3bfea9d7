"""perf/micro as code: every operator runs and is right, and the clock of a GPU divides by the launches of a graph."""

import json

import pytest
import torch

from fastkv import corrections
from perf.engine import RESULTS
from perf.micro import __main__ as command
from perf.micro import conftest, states, test_layers

from .processes import of_module, run

SMALL = "(llama and 1024 and not 8-1024) or llama-3.1-8b-32 or keydiff_scores or (policy and keydiff)"


def test_operators_are_right_before_they_are_timed(tmp_path):
    """What `make bench` runs, on the smaller shapes, each once."""
    code, said, _ = run(of_module("pytest"), tmp_path, "perf/micro", "-q", "--benchmark-disable", "-k", SMALL)
    assert code == 0 and "passed" in said, said[-2000:]


def test_what_is_wrong_is_not_timed():
    want = torch.ones(10)
    conftest.check(want, want.double())
    with pytest.raises(AssertionError, match="relative error"):
        conftest.check(want + 1e-3, want)


def test_a_gpu_benchmark_is_timed_over_many_copies(monkeypatch):
    """The clock of pytest-benchmark then says what graph replays took."""
    launched, seconds = [], []

    class Benchmark:
        extra_info: dict = {}  # noqa: RUF012

        def pedantic(self, call, rounds):
            seconds.extend(-conftest.CLOCK() + conftest.CLOCK() for _ in range(rounds))

    def samples(work, place):
        work.reset()
        for index in range(work.sets):
            work.launch(index)
        return [3.0, 5.0], work.sets

    monkeypatch.setattr(conftest, "num_sets", lambda place, size: 3)
    monkeypatch.setattr(conftest, "samples", samples)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    cells = iter("abcd")
    conftest.Timed(Benchmark(), torch.device("cuda"))(lambda: (next(cells),), launched.append)
    assert launched == ["a", "a", "b", "c"] and Benchmark.extra_info == {"launches": 3}
    assert sorted(seconds) == pytest.approx([3e-6, 5e-6])


@pytest.mark.parametrize("correction", corrections.names())
def test_layers_hold_what_they_say(correction):
    state = states.filled(2, 3, 16, 64, free=4, correction=correction, attention=True)
    pairs = 64 if state.approx is None else 64 - state.approx.keys.shape[2] // 2
    assert state.exact.keys.shape == (2, 3, pairs + 4, 16) and (state.exact.lengths == pairs).all()
    assert (state.approx is not None) == (state.recovery is not None) == corrections.get(correction).key_only
    assert (state.seen[:, None] == state.stored + state.moments.count).all()
    assert all(
        tensor.any() for name, tensor in state.named_tensors() if name != "exact.attention" and "approx.att" not in name
    )


@pytest.mark.parametrize("policy", test_layers.POLICIES)
def test_every_layer_that_is_timed_can_be_made(policy, monkeypatch):
    monkeypatch.setattr(test_layers, "KEPT", 64)
    monkeypatch.setattr(test_layers, "PROMPT", 80)
    corrected = test_layers.CORRECTIONS if policy == "snapkv" else ["auto"]
    for correction in corrected:
        assert test_layers.steps(policy, correction=correction)[0].stored().max() <= 64


# The committed report.


def benchmark(name, median):
    stats = {"median": median, "q1": 0.9 * median, "q3": 1.1 * median, "rounds": 7, "mean": 1.0, "stddev": 1.0}
    return {"name": name, "stats": stats}


REPORT = {
    "benchmarks": [benchmark("test_evict[cpu-llama-1024]", 1e-3), benchmark("test_select", 2.5e-4)],
    "machine_info": {"node": "secret", "fastkv": {"cpu": "CPU X", "torch": "2.0", "commit": "abc"}},
    "datetime": "2026-01-02T03:04:05",
    "version": "5.0",
}


def test_the_report_has_medians_quartiles_machine_versions_and_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda only: (0, command.trimmed(REPORT) | {"load": [0.1, 1.0]}))
    assert command.main(["--out", str(tmp_path), "--only", "evict"]) == 0 and not list(tmp_path.iterdir())
    assert "| cpu-llama-1024 | 1000.0 | 900.0-1100.0 | 7 |" in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path)]) == 0
    file, text = json.loads((tmp_path / "micro.json").read_text()), (tmp_path / "micro.md").read_text()
    assert [row["median_us"] for row in file["rows"]] == [1000.0, 250.0] and "secret" not in json.dumps(file)
    for line in (
        "pytest-benchmark 5.0; cpu CPU X, torch 2.0, commit abc; load before and after 0.1 and 1.0.",
        "## Evict",
    ):
        assert line in text, line
    assert "| all | 250.0 | 225.0-275.0 | 7 |" in text
    (tmp_path / "micro.md").unlink()
    assert command.main(["--out", str(tmp_path), "--report"]) == 0 and (tmp_path / "micro.md").read_text() == text


def test_a_run_that_fails_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda only: (1, None))
    assert command.main(["--out", str(tmp_path)]) == 1 and not list(tmp_path.iterdir())
    assert "nothing is written" in capsys.readouterr().out


def test_the_committed_table_is_that_of_the_committed_numbers():
    """`python -m perf.micro --report` has been run since the last measurement."""
    path = RESULTS / command.NAME
    file = json.loads(path.read_text()) if path.exists() else None
    assert path.with_suffix(".md").read_text() == command.page(file)


@pytest.mark.slow
def test_a_benchmark_is_measured():
    code, file = command.measure("test_select and not compact and 1024 and llama")
    assert code == 0 and file["rows"] and all(row["median_us"] > 0 for row in file["rows"])
    assert {"cpu", "torch", "commit"} <= file["environment"].keys()
