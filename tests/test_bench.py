"""`fastkv bench`: what is timed and counted, rounds and their limit, models that do not fit, and the command."""

import json
import time
import types
from functools import partial

import pytest
import torch

import fastkv
from fastkv import FastKVError
from fastkv.lab import bench as command
from fastkv.lab.bench import Bench, Case, Settings, checked, contender
from fastkv.lab.cli import build_parser, main
from fastkv.lab.common import FULL
from fastkv.lab.shapes import SHAPES, Memory, Shape, Timed, fitting, timed, warm_up, working_bytes

CPU = torch.device("cpu")
TOY = Shape("llama", (97, 32, 48, 2, 4, 2, 16), (("tie_word_embeddings", False),))
QUICK = Settings(block=32, samples=2, period=4)


@pytest.fixture(scope="module")
def toy():
    return TOY.build(CPU, torch.float32)


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(0))


def options_of(*arguments):
    return checked(build_parser().parse_args(["bench", *arguments]), CPU)


@pytest.fixture
def bench(toy):
    options = options_of("--contexts=60,100", "--budgets=40", "--batch=2", "--policies=keydiff", "--rounds=2")
    found = Bench(toy, options, time.monotonic())
    found.settings = QUICK
    return found


# One measurement.


def test_what_is_measured(toy, ids):
    with contender(toy, FULL, 0, QUICK) as mine:
        warm_up(mine, ids)
        found = timed(mine, ids, QUICK.samples, QUICK.period)
    seen = 100 + QUICK.room
    assert found.kept == 100
    assert found.resident == 2 * 2 * 2 * 2 * 16 * 4 * seen  # layers, sequences, keys and values, heads, fp32
    assert found.first > 0 and len(found.steps) == 2 and min(found.steps) > 0 and found.peak >= 0
    with contender(toy, "keydiff", 40, QUICK) as mine:
        small = timed(mine, ids, QUICK.samples, QUICK.period)
        cache = fastkv.FastKVCache(toy)
        toy(ids, past_key_values=cache)
        assert small.resident == cache.nbytes() and small.kept == 40
        for token in ids[:, : QUICK.period].split(1, 1):
            toy(token, past_key_values=cache)
        assert mine.kept(cache) == 40  # every sample ends with an eviction
    assert not any("fastkv" in name for name in vars(toy))  # the model is as it was


def test_peaks_see_what_was_freed_and_start_at_zero():
    before = torch.ones(64 << 18)  # 64 MiB
    del before
    memory = Memory(CPU)
    early = memory.peak()
    torch.ones(64 << 18)
    assert early < 16 << 20 and 56 << 20 < memory.peak() < 128 << 20


def test_a_system_that_does_not_say_has_no_peak(monkeypatch):
    monkeypatch.setattr("fastkv.lab.shapes.forget_peak", lambda: False)
    assert Memory(CPU).peak() is None


# Rounds.


def test_every_cache_has_its_turn_in_every_round(bench, monkeypatch):
    turns = []
    monkeypatch.setattr(bench, "take", turns.append)
    assert bench.run(command.common.console_of()) == ""
    assert turns == 2 * bench.cases
    assert bench.cases == [Case(policy, kept, n, 2) for n in (60, 100) for policy, kept in ((FULL, 0), ("keydiff", 40))]


def test_medians_over_rounds(bench):
    full, kept, *_ = cases = bench.cases
    bench.warm = dict.fromkeys(cases, 0.5)
    bench.timed[full] = [Timed(3.0, [8.0, 10.0], 700, 90, 60), Timed(1.0, [12.0, 90.0], 900, 90, 60)]
    bench.timed[kept] = [Timed(2.0, [2.0, 2.0], None, 30, 40)]
    one, two, *rest = bench.rows()
    assert [row.case for row in (one, two, *rest)] == cases and {row.left_out for row in rest} == {"no time left"}
    assert (one.first, one.first_range, one.step, one.rounds) == (2.0, (1.0, 3.0), 11.0, 2)
    assert one.step_range == pytest.approx((9.2, 43.2)) and one.speedup == 1
    assert (two.speedup, two.tokens_per_second) == (5.5, 1000.0)
    assert (one.peak, two.peak, two.resident, two.kept, two.warm_up) == (900, None, 30, 40, 0.5)


def test_nothing_starts_that_would_not_be_finished(bench, monkeypatch):
    """Each of four cases takes 10 s, and the command may take 65: the first round and half of the second."""
    now = [0.0]
    monkeypatch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(bench, "take", lambda case: now.__setitem__(0, now[0] + 10))
    bench.end = 65
    assert bench.run(command.common.console_of()) == "2 of 8 measurements are left"
    assert now == [60]


def test_what_does_not_fit_is_left_out(bench, monkeypatch):
    monkeypatch.setattr(command, "free_bytes", lambda device: 1000)
    bench.cases = bench.cases[:2]
    for case in bench.cases:
        bench.take(case)
    full, kept = bench.rows()
    assert full.left_out.startswith("needs 0.0 GiB") and kept.rounds == 1 and kept.speedup is None

    def without_memory(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(command, "timed", without_memory)
    bench.timed = {}
    bench.take(kept.case)
    assert bench.row(kept.case).left_out == "out of memory"


# Shapes.


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-12b"])
def test_as_many_layers_as_fit(name):
    whole, tokens, dtype = SHAPES[name], 4096, torch.bfloat16
    assert fitting(name, 1 << 40, tokens, dtype) == whole

    def need(layers):
        kept = 2 * whole.sizes[5] * whole.sizes[6] * layers * tokens
        numbers = whole.with_layers(layers).parameters() + kept
        return 2 * numbers + working_bytes(whole.config(), tokens, dtype)

    assert fitting(name, need(7), tokens, dtype).layers == 7
    assert fitting(name, need(7) - 1, tokens, dtype).layers == 6
    with pytest.raises(FastKVError, match="one layer of"):
        fitting(name, need(1) - 1, tokens, dtype)


def test_numbers_of_llama():
    assert SHAPES["llama-3.1-8b"].parameters() == 8_030_261_248


# The command.


def test_table_file_and_picture(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "Settings", partial(Settings, samples=2))
    out = tmp_path / "bench"
    arguments = ["--contexts=96", "--budgets=40", "--policies=keydiff", "--rounds=1", "--prefill-block=64"]
    assert main(["bench", *arguments, "--out", str(out)]) == 0
    text, record = capsys.readouterr().out, json.loads((out / "bench.json").read_text())
    full, kept = record["rows"]
    assert [full["case"]["policy"], kept["case"]["policy"]] == ["full", "keydiff"]
    assert full["resident"] > kept["resident"] > 0 and kept["kept"] == 40
    assert record["model"] == "llama-small, random weights" and record["settings"]["prefill_block"] == 64
    lines = [line.split() for line in text.splitlines()]
    assert ["full", "96", "1", "96"] in [line[:4] for line in lines]
    assert any(line[:4] == ["keydiff", "40", "96", "1"] for line in lines)
    assert "llama-small" in text
