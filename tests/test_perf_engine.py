"""The engine of perf/: result files that go on and start again, digests, processes, exit codes."""

import json
import subprocess
import time
import types

import pytest

from perf import engine
from perf.engine import Job, Results, Unmeasured, digest

FACTS = {"device": "GPU X", "driver": "1.2", "torch": "2", "triton": "3", "commit": "abc"}


def job(name, number=1.0, source="s0", **rest):
    def run():
        if isinstance(number, str):
            raise Unmeasured(number)
        return {"ms": number}

    return Job(name, {"of": name, "sizes": (1, 2)}, run, source, **rest)


def opened(path, *jobs, facts=FACTS, **rest):
    return Results.open(path, facts, jobs, **rest)


def measured(results, seconds=300.0):
    return engine.measure(results.planned, {"": results}, time.monotonic() + seconds)


@pytest.fixture
def path(tmp_path):
    """A file with rows of two jobs."""
    path = tmp_path / "some.json"
    assert measured(opened(path, job("a"), job("b"))) == engine.COMPLETE
    return path


def test_a_file_says_what_was_measured_and_where(path):
    file = json.loads(path.read_text())
    assert file["complete"] and file["environment"] == FACTS
    assert file["rows"][0]["case"] == {"of": "a", "sizes": [1, 2]}
    assert [(row["id"], row["ms"], row["source"]) for row in file["rows"]] == [("a", 1.0, "s0"), ("b", 1.0, "s0")]
    assert all(row["case"]["of"] == row["id"] and row["seconds"] >= 0 for row in file["rows"])
    assert [file.name for file in path.parent.iterdir()] == ["some.json"]


def test_a_file_goes_on_with_what_is_missing(path):
    results = opened(path, job("a"), job("b"), job("c"))
    assert results.has("a") and not results.has("c") and not results.complete
    assert measured(results, 0) == engine.LEFT
    assert measured(results) == engine.COMPLETE
    assert [row["id"] for row in json.loads(path.read_text())["rows"]] == ["a", "b", "c"]


@pytest.mark.parametrize("change", ["device", "driver", "torch", "triton"])
def test_another_machine_starts_again(path, change):
    assert not opened(path, job("a"), job("b"), facts=FACTS | {change: "other"}).rows
    assert len(opened(path, job("a"), job("b"), facts=FACTS | {"commit": "other"}).rows) == 2


def test_a_changed_job_is_measured_again_and_only_it(path, capsys):
    other = Job("b", {"of": "b", "sizes": (1, 3)}, job("b").run, "s0")
    for jobs in ((job("a"), job("b", source="s1")), (job("a"), other), (job("a"),)):
        assert [row["id"] for row in opened(path, *jobs).rows] == ["a"]
        assert "1 of 2 rows" in capsys.readouterr().out
    assert not opened(path, job("a"), fresh=True).rows
    assert len(json.loads(path.read_text())["rows"]) == 2, "nothing is lost before something new is measured"


def test_what_fails_is_named_and_can_be_tried_again(tmp_path, capsys):
    path, peer = tmp_path / "some.json", job("peer", "not installed", optional=True)
    jobs = job("a"), peer
    assert measured(opened(path, *jobs)) == engine.COMPLETE
    assert opened(path, *jobs).rows[1]["skipped"] == "not installed"
    assert [row["id"] for row in opened(path, *jobs, retry=True).rows] == ["a"]
    jobs = job("a", "broken", source="s1"), peer
    assert measured(opened(path, *jobs)) == engine.FAILED
    assert "a: broken" in capsys.readouterr().out
    assert measured(opened(tmp_path / "checks.json", Job("check", {}, lambda: {"passed": False}))) == engine.FAILED


def test_a_digest_changes_with_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "ROOT", tmp_path)
    (tmp_path / "lib" / "kinds").mkdir(parents=True)
    for name in ("lib/core.py", "lib/code.cpp", "lib/kinds/one.py", "lib/notes.md", "work.py"):
        (tmp_path / name).write_text("")

    def found():
        return digest("lib", "work.py", without=("lib/kinds",)), digest("lib"), digest("work.py", texts=("a",))

    before = found()
    assert len(set(before)) == 3 and before == found()
    for name, same in (("lib/notes.md", 3), ("lib/kinds/one.py", 2), ("lib/code.cpp", 1), ("work.py", 1)):
        (tmp_path / name).write_text("changed")
        now = found()
        assert sum(one == other for one, other in zip(before, now)) == same, name
        before = now


def test_a_process_that_fails_says_why(monkeypatch):
    def ends(code, stderr=""):
        result = types.SimpleNamespace(returncode=code, stderr=stderr, stdout='noise\n{"kept": 1}\n')
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
        return engine.in_process("perf.speed.worker", {}, "python")

    assert ends(0) == {"kept": 1}
    with pytest.raises(Unmeasured, match="No module named 'kvpress'"):
        ends(1, "Traceback\nModuleNotFoundError: No module named 'kvpress'\n")
    assert ends(-9) == {"out_of_memory": True}
    monkeypatch.undo()
    monkeypatch.setattr(engine, "LIMIT", 0.01)
    with pytest.raises(Unmeasured, match="not finished"):
        engine.in_process("perf.speed.worker", {})
