"""Every kernel compiles ahead of time for sm_90 within its limits of registers, spills, loads and shared memory."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastkv.kernels

ROOT = Path(__file__).parent.parent
MODULES = [
    module.name
    for module in pkgutil.iter_modules(fastkv.kernels.__path__)
    if getattr(importlib.import_module(f"fastkv.kernels.{module.name}"), "AOT", [])
]


def compile_ahead(*arguments):
    # The compiler needs real kernels: a process in which Triton's interpreter is off.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "perf.aot", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", MODULES)
def test_within_limits_on_sm_90(module):
    result = compile_ahead("--arch", "90", "--kernel", module)
    assert result.returncode == 0, result.stdout + result.stderr
    variants = [v for v in importlib.import_module(f"fastkv.kernels.{module}").AOT if not v.arches or "90" in v.arches]
    assert variants and sum(line.endswith(" ok") for line in result.stdout.splitlines()) == len(variants)


def test_the_kernels_of_the_issue_are_there():
    wanted = {"decode_attention", "vector_decode", "evict", "moment_scores", "prefill_attention", "key_scores"}
    wanted |= {"window_scores", "noncausal_mass", "leverage", "select", "compact", "centroids"}
    assert wanted <= set(MODULES)


def test_an_unknown_kernel_is_an_error():
    result = compile_ahead("--kernel", "nothing")
    assert result.returncode != 0
    assert "nothing" in result.stdout + result.stderr
