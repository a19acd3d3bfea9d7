"""perf.quality.slots: slots of 16, 8 and 4 bits measured in the same bytes."""

import json
import shutil

import pytest
import torch

from perf import report, slot_steps
from perf.engine import RESULTS, Unmeasured
from perf.quality import slots as measured
from perf.quality.slots import LANGUAGE, LANGUAGE_MODEL, OUT, QUANTIZED, SHARES, Bench, Case, Settings, write_report


@pytest.fixture(scope="module")
def bench():
    return Bench(LANGUAGE_MODEL, Settings(seeds=2, context=160, continued=2), asks=False)


def test_a_case_has_a_number_for_each_seed(bench):
    plain, same, more = (
        bench.run(Case(LANGUAGE, "snapkv", 48, slots, same))
        for slots, same in (("auto", False), ("int8", True), ("int8", False))
    )
    assert plain["kept"] == same["kept"] < more["kept"]
    assert same["bytes"] < more["bytes"] <= plain["bytes"]
    for row in (plain, same, more):
        assert len(row["kl"]) == len(row["error"]) == 2 and min(row["error"]) > 0


def test_shares_are_of_equal_bytes(bench):
    rows = [bench.run(Case(SHARES, "fastkv", 48, "int8", share=share)) for share in (0, 32, 8)]
    kept, held = zip(*((row["kept"], row["bytes"]) for row in rows))
    assert sorted(kept, reverse=True) == list(kept) and len(set(kept)) == 3
    assert max(held) <= bench.bound(Case(LANGUAGE, "fastkv", 48, "auto")).bytes < min(held) * 1.02


def test_a_quantized_cache_without_its_library_is_refused(bench, monkeypatch):
    def missing(*given, **more):
        raise ImportError("no such library")

    monkeypatch.setattr(measured.transformers, "QuantizedCache", missing)
    with pytest.raises(Unmeasured, match="needs hqq, which is not installed: no such library"):
        bench.run(Case(QUANTIZED, "hqq", 0, "auto", beside=(4, 64)))


def test_bytes_beside_a_quantized_cache_are_its_codes_scales_and_last_tokens(bench):
    config, (bits, group) = bench.model.config, (4, 64)
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    want = numbers * (160 * bits / 8 + 160 / group * 2 * 2 + 2 * 2)
    assert bench.bound(Case(QUANTIZED, "fastkv", 0, "auto", beside=(bits, group))).bytes == want
    codes, scale = torch.zeros(32, dtype=torch.uint8), torch.zeros(2, dtype=torch.bfloat16)
    assert measured.nbytes({"keys": (codes, {"scale": scale, "axis": 1, "packing": "4bit_u8"}), "length": 9}) == 36


def test_the_page_is_written_from_the_results(tmp_path):
    for file in OUT.glob("*.json"):
        shutil.copy(file, tmp_path)
    write_report(tmp_path)
    assert (tmp_path / "README.md").read_text() == (OUT / "README.md").read_text()


def test_steps_of_formats_take_turns(capsys):
    threads = str(torch.get_num_threads())
    assert slot_steps.main(["--shapes", "b1-h2-d64-256-float32", "--rounds", "2", "--threads", threads]) == 0
    said = capsys.readouterr().out
    rows = json.loads(said[said.index("[\n") :])
    assert [row["policy"] for row in rows] == list(slot_steps.POLICIES)
    assert all(set(row["step"]) == {"int8", "fp8", "int4"} and row["step_us"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        slot_steps.main(["--shapes", "b9"])
    assert "no shape contains 'b9'; there are b1-h2-d64-256-float32" in capsys.readouterr().err


def test_published_steps_are_of_every_shape():
    file = json.loads((RESULTS / "slot_steps.json").read_text())
    cases = [(shape.name, policy) for shape in slot_steps.SHAPES for policy in slot_steps.POLICIES]
    assert [(slot_steps.Shape(**row["shape"]).name, row["policy"]) for row in file["rows"]] == cases
    assert report.coded(file) in (RESULTS / "README.md").read_text()
