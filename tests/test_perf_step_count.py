"""Counting what inductor leaves of a decode step: the count itself, and the counts that are published."""

import json
import re

import pytest

from perf import report
from perf.engine import RESULTS
from perf.step_count import BATCHES, LAUNCHED, MODELS, WAYS, Count, layers_of, over_floor

from .processes import of_module, run

CODE = '''
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', """ triton_poi_fused_add_0.run(""")
        triton_poi_fused_add_0.run(arg0_1, buf1, 4, stream=raw_streamNone)
        extern_kernels.mm(reinterpret_tensor(buf1, (1, 512), (0, 1), 0), arg1_1, out=buf2)
        buf13 = torch.ops.fastkv.decode_step.default(buf11, buf12)
        assert_size_stride(buf25, (1, 8, 64), (512, 64, 1), 'torch.ops.fastkv.decode_step.default')
        # buffer buf25 (op: torch.ops.fastkv.decode_step.default) is assumed to be not aligned
        torch.ops.fastkv.evict.default(buf13)
'''


def test_launches_are_found_in_generated_code():
    found = [one["fused"] or one["extern"] or one["op"] for one in LAUNCHED.finditer(CODE)]
    assert found == ["triton", "mm", "fastkv.decode_step", "fastkv.evict"]


def test_layers_of_a_kind():
    assert layers_of("qwen3-4b") == {"full_attention": 36}
    assert layers_of("gemma-3-12b") == {"full_attention": 8, "sliding_attention": 40}


def test_more_sequences_share_weights_and_launches():
    step = Count(0, 100e6 + 7e6)
    assert over_floor(step, 100_000_000, 7_000_000, 8) == pytest.approx(1)
    slow = Count(100, 107e6)
    ratios = [over_floor(slow, 100_000_000, 7_000_000, batch) for batch in BATCHES]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 1


def test_published_counts():
    """Inductor leaves less than a third of the launches, and no byte that need not move."""
    file = json.loads((RESULTS / "step_count.json").read_text())
    found = {(row["model"], row["way"]): row for row in file["rows"]}
    assert found.keys() == {(model, way) for model in MODELS for way in ("captured", *WAYS)}
    for model in MODELS:
        assert found[model, "combo kernels"]["launches"] < found[model, "captured"]["launches"] / 3
        assert found[model, "frozen"]["launches"] < found[model, "combo kernels"]["launches"] * 0.9
        assert all(found[model, way]["bytes_over_floor"] < 1.01 for way in WAYS)
    within = {model for model in MODELS if max(found[model, "frozen"]["predicted_over_floor"].values()) <= 1.35}
    assert within == {"llama-3.1-8b", "qwen3-8b", "gemma-3-12b"}  # as the report says
    assert len(re.findall(r"^\| .*prediction", report.counted(file), re.M)) == len(found)


@pytest.mark.slow
def test_counting_a_small_model(tmp_path):
    path = tmp_path / "count.json"
    asked = ("--models", "llama-toy", "--ways", "captured", "inductor", "--out", str(path))
    code, _, errors = run(of_module("perf.step_count"), tmp_path, *asked)
    assert code == 0, errors
    captured, compiled = json.loads(path.read_text())["rows"]
    layer = compiled["layer"]["full_attention"]
    assert layer["kernels"]["mm"] == 7 and layer["kernels"]["fastkv.decode_step"] == 1 and layer["launches"] <= 15
    evicting = compiled["layer_that_evicts"]["full_attention"]["launches"]
    assert layer["launches"] < evicting < captured["layer"]["full_attention"]["launches"]
