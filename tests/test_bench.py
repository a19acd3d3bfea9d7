"""`fastkv bench`: what is timed and counted, rounds and their limit, what does not fit, and the command."""

import json
import types

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastkv
from fastkv.lab import bench as command
from fastkv.lab import common
from fastkv.lab.bench import Case, measured, rounds, rows_of
from fastkv.lab.cli import build_parser, main
from fastkv.lab.timing import Memory, Timed

from .toy import MODEL

CPU = torch.device("cpu")
ROOM = 2 * 4 + 4 + 1  # tokens that are decoded after a prompt: two samples, and what comes before them


@pytest.fixture(scope="module")
def toy():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()  # heads of 8


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def options():
    words = ["--contexts=60,100", "--budgets=40", "--batch=2", "--policies=keydiff", "--rounds=2", "--prefill-block=32"]
    return build_parser().parse_args(["bench", *words])


@pytest.fixture
def cases(options):
    return [Case(one, context, 2) for context in options.contexts for one in common.caches_of(options, evict_every=4)]


@pytest.fixture
def short(monkeypatch):
    """Fewer and shorter samples."""
    monkeypatch.setattr(command, "SAMPLES", 2)
    monkeypatch.setattr(command, "EVICT_EVERY", 4)
    monkeypatch.setattr(command, "ROOM", ROOM)


def test_what_is_measured(toy, ids, cases, short):
    full, kept = (case.cache for case in cases[:2])
    found = measured(toy, full, ids, graphs=False, warm=False)
    assert found.kept == 100
    assert found.resident == 2 * 2 * 2 * 2 * 8 * 4 * (100 + ROOM)  # layers, sequences, keys and values, heads, fp32
    assert found.first > 0 and len(found.steps) == 2 and min(found.steps) > 0 and found.peak >= 0
    small = measured(toy, kept, ids, graphs=False, warm=True)
    with kept.of(toy):
        cache = fastkv.FastKVCache(toy)
        toy(ids, past_key_values=cache)
        assert small.resident == cache.nbytes() and small.kept == 40
    assert not any("fastkv" in name for name in vars(toy))  # the model is as it was


def test_peaks_see_what_was_freed_and_start_at_zero():
    before = torch.ones(64 << 18)  # 64 MiB
    del before
    memory = Memory(CPU)
    early = memory.peak()
    torch.ones(64 << 18)
    assert early < 16 << 20 and 56 << 20 < memory.peak() < 128 << 20


def test_medians_over_rounds(cases):
    full, kept, *rest = cases
    rest[1].left_out = "out of memory"
    full.found = [Timed(3.0, [8.0, 10.0], 700, 90, 60), Timed(1.0, [12.0, 90.0], 900, 90, 60)]
    kept.found = [Timed(2.0, [2.0, 2.0], None, 30, 40)]
    one, two, *others = rows_of(cases)
    assert [row["left_out"] for row in others] == ["no time left", "out of memory"]
    assert (two["policy"], two["budget"], two["context"], two["batch"]) == ("keydiff", "40", 60, 2)
    assert (one["first"], one["first_range"], one["step"], one["rounds"]) == (2.0, (1.0, 3.0), 11.0, 2)
    assert one["step_range"] == pytest.approx((9.2, 43.2)) and one["speedup"] == 1
    assert (two["speedup"], two["tokens_per_second"]) == (5.5, 1000.0)
    assert (one["peak"], two["peak"], two["resident"], two["kept"]) == (900, None, 30, 40)


def test_every_cache_has_its_turn_in_every_round_that_would_be_finished(toy, options, cases, monkeypatch):
    """Each of four cases takes 10 s, and the command may take 65: the first round and half of the second."""
    now, turns = [0.0], []

    def take(model, cache, ids, graphs, warm):
        turns.append((cache.policy, *ids.shape, warm))
        now[0] += 10
        return True

    monkeypatch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(command, "measured", take)
    left = rounds(toy, cases, options, 65, common.console_of(quiet=True))
    assert left == "2 of 8 measurements are left" and now == [60]
    order = [(policy, 2, context, False) for context in (60, 100) for policy in ("full", "keydiff")]
    assert turns == [*order, *((*one[:3], True) for one in order[:2])]


def no_room(*arguments, **options):
    torch.empty(1 << 60, dtype=torch.uint8)


def test_what_does_not_fit_is_left_out(toy, options, cases, monkeypatch):
    monkeypatch.setattr(command, "measured", no_room)
    assert not rounds(toy, cases, options, float("inf"), common.console_of(quiet=True))
    assert all(case.left_out == "out of memory" and not case.found for case in cases)


def test_no_room_for_the_prompts_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "rounds", no_room)
    assert main(["bench", "--model", MODEL, "--contexts=96", "--out", str(tmp_path / "a" / "b")]) == 2
    assert capsys.readouterr().err == "fastkv bench: out of memory; ask for less or choose a smaller model\n"
    assert not [*tmp_path.iterdir()]  # the folders were made


def test_table_and_file(capsys, tmp_path, short):
    out = tmp_path / "bench"
    arguments = ["--model", MODEL, "--contexts=96", "--budgets=40", "--policies=keydiff", "--rounds=1"]
    assert main(["bench", *arguments, "--prefill-block=64", "--out", str(out)]) == 0
    text, record = capsys.readouterr().out, json.loads((out / "bench.json").read_text())
    full, kept = record["rows"]
    assert [full["policy"], kept["policy"]] == ["full", "keydiff"]
    assert full["resident"] > kept["resident"] > 0 and kept["kept"] == 40
    assert record["model"] == MODEL and record["settings"]["prefill_block"] == 64
    lines = [line.split() for line in text.splitlines()]
    assert ["full", "96", "1", "96"] in [line[:4] for line in lines]
    assert ["keydiff-40", "96", "1", "40"] in [line[:4] for line in lines]
