"""Some launch of every compiled kernel file is executed every day; all are by `make test-ptx`."""

import re
from importlib.metadata import version

import pytest
from packaging.version import Version

from .processes import begin, of_module

ORDERS = "decode decode-rows vector evict evict-rows evict-int4 compact".split()
SAMPLES = {
    "orders": [
        f"tests/ptx/test_launches.py::test_any_order_of_programs_gives_the_same_bits[{name}]" for name in ORDERS
    ],
    "kernels": [
        "tests/ptx/test_launches.py::test_bugs_are_reported[a ticket that orders nothing]",
        "tests/ptx/test_launches.py::test_bugs_are_reported[a barrier is missing in select]",
        "tests/ptx/test_launches.py::test_bugs_are_reported[a store has no mask]",
        "tests/test_kernels_decode.py::test_decode_variants_with_centroids[None-True-1]",
        "tests/test_kernels_codes.py::test_decode_variants[int8-None-None-True-True-1]",
        "tests/test_kernels_decode.py::test_shapes[group7-bfloat16-moments]",
        "tests/test_kernels_decode.py::test_decode_attention_variants[1-3.0-True-True-4]",
        "tests/test_kernels_decode.py::test_shapes[group8-float16-keys alone]",
        "tests/test_kernels_evict.py::test_evict_without_slope",
        "tests/test_kernels_evict.py::test_moment_scores_shapes[llama-float32]",
        "tests/test_kernels_prefill.py::test_centroids[(128, 48, 1, 17, torch.float32)-None-float32]",
        "tests/test_kernels_remember.py::test_an_eviction[64-float32]",
        "tests/test_rows.py::test_copies_of_rows[tokens1-int4]",
        "tests/test_ops.py::test_backends_agree[candidates]",
        "tests/test_kernels_scores.py::test_keydiff[cosine-mean-float32-halves]",
        "tests/test_kernels_scores.py::test_masks[ahead-left]",
        "tests/test_kernels_scores.py::test_masks[kept-left]",
        "tests/test_kernels_scores.py::test_leverage[False-none-float32]",
        "tests/test_kernels_scores.py::test_groups[mass-1-float32]",
        "tests/test_kernels_scores.py::test_groups[peaks-1-float32]",
        "tests/test_kernels_scores.py::test_groups[window-1-float32]",
        "tests/test_kernels_select.py::test_compact[a full cache and a block-float32]",
        "tests/test_kernels_select.py::test_select_is_exact[7-ties]",
        "tests/test_kernels_evict.py::test_slot_signals",
    ],
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_of_executed_kernels(sample, tmp_path):
    arguments = "-p", "tests.ptx.plugin", "-q", "--durations=0", *SAMPLES[sample]
    told = {"TRITON_DISABLE_LINE_INFO": "0"}  # which compiling ahead of time, in another test, goes without
    if Version(version("triton")) >= Version("3.8"):  # see docs/ptx.md
        told["TRITON_DEFAULT_FP_FUSION"] = "0"
    code, said, errors = begin(of_module("pytest"), tmp_path, *arguments, env=told).ended(timeout=550)
    assert code == 0 and re.search(rf"^{len(SAMPLES[sample])} passed", said, re.M), said + errors
