"""Some launch of every compiled kernel file is executed every day; all are by `make test-ptx`."""

import re
from importlib.metadata import version

from packaging.version import Version

from .processes import begin, of_module

SCORES = "keydiff lever window ahead expected mass attended pooled".split()
SAMPLE = [
    *(f"tests/ptx/test_launches.py::test_any_order_of_programs_gives_the_same_bits[{name}]"
      for name in ("decode", "decode-rows", "vector", "evict", "evict-rows", "evict-int4", "compact")),
    *(f"tests/test_kernels_scores.py::test_head_dims[{name}-16]" for name in SCORES),
    "tests/ptx/test_launches.py::test_bugs_are_reported[a barrier is missing in select]",
    "tests/ptx/test_launches.py::test_bugs_are_reported[a store has no mask]",
    "tests/test_kernels_decode.py::test_shapes[group8-bfloat16-moments]",
    "tests/test_kernels_evict.py::test_moment_scores_shapes[all-float32]",
    "tests/test_kernels_evict.py::test_slot_signals",
    "tests/test_kernels_prefill.py::test_centroids[(128, 48, 1, 17, torch.float32)-None-float32]",
    "tests/test_kernels_remember.py::test_an_eviction[64-float32]",
    "tests/test_kernels_scores.py::test_keydiff[cosine-mean-float32-halves]",
    "tests/test_kernels_scores.py::test_z_scores[one]",
    "tests/test_ops.py::test_backends_agree[candidates]",
    "tests/test_rows.py::test_copies_of_rows[tokens1-int4]",
    "tests/test_kernels_select.py::test_select_of_heads_that_keep_their_own_number[7]",
]  # fmt: skip


def test_a_sample_of_executed_kernels(tmp_path):
    arguments = "-p", "tests.ptx.plugin", "-q", "-x", *SAMPLE
    told = {"TRITON_DISABLE_LINE_INFO": "0"}  # which compiling ahead of time, in another test, goes without
    if Version(version("triton")) >= Version("3.8"):  # see docs/ptx.md
        told["TRITON_DEFAULT_FP_FUSION"] = "0"
    code, said, errors = begin(of_module("pytest"), tmp_path, *arguments, env=told).ended(timeout=550)
    assert code == 0 and re.search(rf"^{len(SAMPLE)} passed", said, re.M), said + errors
