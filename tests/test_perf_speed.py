"""Benchmarks of whole models as code: cases, the worker on toy models, runs that stop and go on, their report."""

import json
import sys
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf import engine, report, tables
from perf.engine import RESULTS, ROOT
from perf.speed import __main__ as command
from perf.speed import contenders, worker
from perf.speed import contenders as models
from perf.speed import report as speed_report
from perf.speed.cases import PARTS, Case, toy
from perf.speed.contenders import KVPress
from perf.speed.worker import decode, measure

CPU = torch.device("cpu")
TOY = Case("llama-toy", "full", 100, 2, samples=2, period=4, new=12, threads=1)
KEPT = replace(TOY, contender="fastkv", policy="keydiff", budget=40)
CAPTURED = replace(KEPT, step="captured")
FACTS = {"device": "cpu", "cpu": "CPU X", "threads": 2, "torch": "2.0", "transformers": "5.0", "commit": "abc"}


# Cases.


def test_cases_have_names_of_their_own_and_toys_too():
    for part, cases in PARTS.items():
        assert len({case.name for case in cases}) == len(cases) > 0, part
        assert len({toy(case).name for case in cases}) == len(cases), part
        for case in cases:
            assert (case.contender == "full") == (case.policy == "") == (case.budget == 0)
            assert case.contender != "kvpress" or (case.policy in contenders.PRESSES and case.block is None)
            assert case.contender != "full" or case.step != "captured"
            assert case.model in models.SHAPES and not toy(case).step != "eager"
            assert toy(case).budget == 0 or toy(case).budget > 36  # sinks and recent have to fit


# Models: the same numbers whatever builds them.


@pytest.mark.parametrize("name,tables", [("llama-toy", 1), ("gemma-3-toy", 0)])
def test_a_step_reads_all_weights_but_an_untied_embedding(name, tables):
    model = models.build(name, CPU, torch.float32)
    numbers = sum(weight.numel() for weight in dict(model.named_parameters()).values())
    assert models.weight_bytes(model) == 4 * (numbers - tables * 97 * 32)


# The worker.


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case", [TOY, KEPT, replace(KEPT, block=16), replace(KEPT, policy="momentkv"), CAPTURED], ids=lambda case: case.name
)
@torch.no_grad()
def test_stepping_and_generating_give_the_same_tokens(case):
    contender = contenders.CONTENDERS[case.contender](models.build(case.model, CPU, torch.float32), case)
    ids = models.prompt(case.model, case.batch, case.context, CPU)
    want = contender.generate(ids, case.new)[:, case.context :]
    cache = contender.new(case.context)
    token = contender.read(ids, cache)[:, -1:].argmax(-1)
    step, position, got = contender.step(cache, case.batch), torch.full((case.batch, 1), case.context), [token]
    for _ in range(case.new - 1):
        got.append(decode(step, got[-1], position, 1))
    assert torch.equal(torch.cat(got, 1), want)
    assert torch.equal(position, torch.full((case.batch, 1), case.context + case.new - 1))


def test_rows_of_the_worker(threads, monkeypatch):
    monkeypatch.setitem(worker.COPY_BYTES, "cpu", 1 << 20)
    row = measure(TOY)
    assert row["kept"] == 100
    # Two layers of two heads of 16, keys and values in fp32: prompt, two samples, and what came before them.
    assert row["cache_bytes"] == 2 * 2 * 2 * 16 * 2 * 4 * (100 + 4 + 1 + 2 * 4)
    assert row["tokens_per_s"] == pytest.approx(2e3 / ((row["ms"]["p20"] + row["ms"]["p80"]) / 2), rel=1e-6)
    assert row["versions"].keys() == {"torch", "transformers"} and row["copy_gbps"] > 0
    small = measure(KEPT)
    assert small["kept"] == 40 and small["checksum"] == row["checksum"]
    whole = measure(replace(KEPT, what="generate"))
    assert whole["generate_s"] > 0 and "ms" not in whole
    flat = measure(replace(KEPT, what="flat", context=4096, block=128, batch=1))["flat"]
    assert [point["seen"] for point in flat] == [128, 256, 512, 1024, 2048, 4096]
    assert flat[0]["over_first"] == 1 and all(point["over_first"] > 0 for point in flat)


@given(budget=st.integers(1, 4096), extra=st.integers(1, 200_000))
def test_kvpress_is_told_to_keep_exactly_the_budget(budget, extra):
    contender = KVPress.__new__(KVPress)
    contender.model, contender.case = None, replace(KEPT, budget=budget)
    contender.make = lambda ratio: lambda model: ratio
    length = budget + extra
    assert int(length * (1 - contender.pressed(length))) == budget


def test_kvpress_presses_the_prompt_and_not_the_steps(monkeypatch):
    kvpress, model, seen = mock.MagicMock(), mock.MagicMock(device=CPU), []
    monkeypatch.setitem(sys.modules, "kvpress", kvpress)
    press = kvpress.SnapKVPress.return_value.return_value  # on a model

    def forward(*arguments, **options):
        seen.append(press.__enter__.call_count - press.__exit__.call_count)
        return types.SimpleNamespace(logits=torch.zeros(2, 1, 5))

    model.side_effect = model.generate.side_effect = forward
    contender = KVPress(model, replace(KEPT, contender="kvpress", policy="snapkv"))
    ids = torch.zeros(2, 100, dtype=torch.long)
    contender.read(ids, None)
    contender.step(None, 2)(ids[:, :1], ids[:, :1])
    contender.generate(ids, 3)
    contender.read(ids[:, :40], None)  # everything fits: nothing to press
    assert seen == [1, 0, 1, 0]
    assert kvpress.SnapKVPress.call_args.kwargs.items() >= {"window_size": 32, "kernel_size": 7}.items()


# Runs.


def test_a_part_waits_for_kvpress_whose_logits_have_to_agree(tmp_path, monkeypatch):
    cases = [TOY, KEPT, replace(KEPT, contender="kvpress")]
    monkeypatch.setitem(PARTS, "cpu_three", cases)
    monkeypatch.setattr(command, "environment", lambda *arguments: dict(FACTS))
    asked, checksums = [], {"full": "same", "fastkv": "same", "kvpress": "other"}

    def measured(module, case, python):
        asked.append(case["contender"])
        assert python == ("elsewhere" if case["contender"] == "kvpress" else sys.executable)
        return {"checksum": checksums[case["contender"]], "ms": {"p50": 1.0}, "first_s": 1.0}

    def run(*flags):
        asked.clear()
        code = command.main(["--parts", "cpu_three", "--out", str(tmp_path), *flags])
        return code, asked, json.loads((tmp_path / "speed_cpu_three.json").read_text())

    monkeypatch.setattr(engine, "in_process", measured)
    code, asked, file = run()
    assert (code, asked, file["complete"]) == (engine.LEFT, ["full", "fastkv"], False)
    code, asked, file = run("--kvpress-python", "elsewhere")
    assert (code, asked, file["complete"]) == (engine.COMPLETE, ["kvpress"], True)
    assert "computes other logits" in file["rows"][2]["skipped"] and "skipped" not in file["rows"][1]
    checksums["kvpress"] = "same"
    code, asked, file = run("--kvpress-python", "elsewhere", "--retry-skipped")
    assert (code, asked) == (engine.COMPLETE, ["kvpress"])
    assert [row["id"] for row in file["rows"]] == [case.name for case in cases] and "skipped" not in file["rows"][2]
    assert run("--fresh", "--only=-full")[:2] == (engine.LEFT, ["full"])


# The report.


def test_pages_say_what_was_measured():
    """`python -m perf.report --readme` has been run since the last measurement of speed."""
    files = report.read(RESULTS)
    page, readme = ((ROOT / name).read_text() for name in (speed_report.PAGE, "README.md"))
    assert tables.between(page, speed_report.BEGIN, speed_report.END) == speed_report.section(files)
    assert tables.between(readme, speed_report.FRONT_BEGIN, speed_report.FRONT_END) == speed_report.front(files)
