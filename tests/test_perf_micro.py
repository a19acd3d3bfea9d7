"""perf/micro as code: every operator runs and is right, and the clock of a GPU divides by the launches of a graph."""

import json

from perf.engine import RESULTS
from perf.micro import __main__ as command

from .processes import of_module, run

SMALL = "(llama and 1024 and not 8-1024) or llama-3.1-8b-32 or keydiff_scores or (policy and keydiff)"


def test_operators_are_right_before_they_are_timed(tmp_path):
    """What `make bench` runs, on the smaller shapes, each once."""
    code, said, _ = run(of_module("pytest"), tmp_path, "perf/micro", "-q", "--benchmark-disable", "-k", SMALL)
    assert code == 0 and "passed" in said, said[-2000:]


def benchmark(name, median):
    stats = {"median": median, "q1": 0.9 * median, "q3": 1.1 * median, "rounds": 7, "mean": 1.0, "stddev": 1.0}
    return {"name": name, "stats": stats}


REPORT = {
    "benchmarks": [benchmark("test_evict[cpu-llama-1024]", 1e-3), benchmark("test_select", 2.5e-4)],
    "machine_info": {"node": "secret", "fastkv": {"cpu": "CPU X", "torch": "2.0", "commit": "abc"}},
    "datetime": "2026-01-02T03:04:05", "version": "5.0",
}  # fmt: skip


def test_the_report_has_medians_quartiles_machine_versions_and_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda only: (0, command.trimmed(REPORT) | {"load": [0.1, 1.0]}))
    assert command.main(["--out", str(tmp_path), "--only", "evict"]) == 0 and not list(tmp_path.iterdir())
    assert "| cpu-llama-1024 | 1000.0 | 900.0-1100.0 | 7 |" in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path)]) == 0
    file, text = json.loads((tmp_path / "micro.json").read_text()), (tmp_path / "micro.md").read_text()
    assert [row["median_us"] for row in file["rows"]] == [1000.0, 250.0] and "secret" not in json.dumps(file)
    assert "pytest-benchmark 5.0; cpu CPU X, torch 2.0, commit abc; load before and after 0.1 and 1.0." in text
    assert "## Evict" in text and "| all | 250.0 | 225.0-275.0 | 7 |" in text
    (tmp_path / "micro.md").unlink()
    assert command.main(["--out", str(tmp_path), "--report"]) == 0 and (tmp_path / "micro.md").read_text() == text


def test_the_committed_table_is_that_of_the_committed_numbers():
    """`python -m perf.micro --report` has been run since the last measurement."""
    path = RESULTS / command.NAME
    file = json.loads(path.read_text()) if path.exists() else None
    assert path.with_suffix(".md").read_text() == command.page(file)
