"""Every kernel compiles ahead of time for sm_90 within its limits of registers, spills, loads and shared memory."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastkv.kernels
from perf.aot import CHIPS, faults, variants
from perf.variants import AOT

ROOT = Path(__file__).parent.parent


def compile_ahead(*arguments):
    # The compiler needs real kernels: a process in which Triton's interpreter is off.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "perf.aot", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


def lines_of(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.endswith(" ok")]


def test_one_variant_of_every_kernel_function_on_sm_90():
    wanted = {v.kernel for v in variants(None) if not v.arches or "90" in v.arches}
    assert len(lines_of(compile_ahead("--arch", "90", "--sample"))) == len(wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", AOT)
def test_all_variants_on_sm_90(module):
    lines = lines_of(compile_ahead("--arch", "90", "--kernel", module))
    wanted = [v for v in variants(module) if not v.arches or "90" in v.arches]
    assert wanted and len(lines) == len(wanted)


def test_every_kernel_has_variants():
    wanted = {}
    for module in pkgutil.iter_modules(fastkv.kernels.__path__):
        source = inspect.getsource(importlib.import_module(f"fastkv.kernels.{module.name}"))
        kernels = set(re.findall(r"^def (_\w+_kernel)\(", source, re.M))
        wanted |= {module.name: kernels} if kernels else {}
    assert wanted == {name: {one.kernel.__name__ for one in some} for name, some in AOT.items()}


@pytest.mark.parametrize(
    "what,given",
    {
        None: {},
        "spills 24 B": {"spill": 24},
        "2 2-byte loads": {"more": ["LDG.E.U16"] * 2},
        "no 16-byte loads": {"loads": "LDG.E.64"},
        "a ticket without a barrier": {"races": 1},
        "shared memory above 232448": {"shared": 1 << 20},
        "only 10 instructions": {"size": 10},
    }.items(),
)
def test_limits(what, given):
    names = [given.get("loads", "LDG.E.128")] * given.get("size", 100) + given.get("more", [])
    found = faults(True, CHIPS["90"], given.get("spill", 16), names, given.get("races", 0), given.get("shared", 0))
    assert found == ([] if what is None else [what])


def test_an_unknown_kernel_is_an_error():
    result = compile_ahead("--kernel", "nothing")
    assert result.returncode != 0
    assert "nothing" in result.stdout + result.stderr
