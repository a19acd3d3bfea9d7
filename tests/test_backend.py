"""Which backend runs, why one cannot, and that each runs what it says."""

import shutil
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from fastkv import backend, ops, reference
from fastkv import cpu as compiled
from fastkv.backend import BACKENDS, MODULES, check_backend, implementation, resolve, why_not
from fastkv.cpu import operations as cpu

from . import flash_attn
from .models import raises
from .processes import run
from .test_ops import CASES

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda"), torch.device("mps")


def test_auto_is_what_suits_the_device():
    assert [resolve("auto", device) for device in (CPU, CUDA, OTHER)] == ["cpu", "triton", "reference"]
    for name in MODULES:
        assert all(resolve(name, device) == name for device in (CPU, CUDA, OTHER))
    assert BACKENDS == ("auto", *MODULES)


def test_an_unknown_backend_is_refused():
    for ask in (lambda: resolve("cuda", CPU), lambda: implementation("compact", "cuda", "cpu")):
        raises("^backend must be one of auto, reference, cpu, triton, got 'cuda'$", ask)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_backend_lacks_the_reference_does(name):
    module = import_module(f"fastkv{MODULES[name]}")
    for function in ("decode_step", "prefill_attention", "compact", "remember", "select"):
        own = getattr(module, function, None) or getattr(reference, function)
        found = implementation(function, name, "cpu")
        assert found is own and callable(found)
    assert implementation("pool_scores", "cpu", "cpu") is reference.pool_scores
    assert implementation("compact", "auto", "cpu") is cpu.compact


def test_reasons(monkeypatch):
    import triton

    monkeypatch.setattr(backend, "why_no_triton", lambda: None)
    assert why_not("reference", OTHER, torch.float64, 12, 99) is None
    assert why_not("cpu", CPU, torch.float64, 12, 99) is None
    assert why_not("cpu", CUDA) == "the model is on cuda"
    assert why_not("triton", CUDA) is None
    for options, reason in (
        ({"dtype": torch.float64}, "not torch.float64"),
        *(({"head_dim": dim}, f"head_dim must be a multiple of 16 up to 512, got {dim}") for dim in (24, 528)),
        ({"head_dim": 272, "dtype": torch.float32}, "head_dim may be at most 256 in float32, got 272"),
        ({"head_dim": 192, "value_dim": 128}, "keys and values must be equally wide, got 192 and 128"),
        ({"groups": 17}, "at most 16 query heads may share a KV head, got 17"),
    ):
        assert why_not("triton", CUDA, **options).endswith(reason)
    half = {"head_dim": 512, "value_dim": 512, "dtype": torch.bfloat16}
    for edge in ({"head_dim": 256}, half, {"head_dim": 16}, {"groups": 16}):
        assert why_not("triton", CUDA, **edge) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert why_not("triton", CUDA, **half) == "head_dim may be at most 256 on AMD, got 512"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert why_not("triton", CPU) is None
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "Triton's interpreter, which is off" in why_not("triton", CPU)
    raises("cannot run: on cpu they need", backend.implementation.__wrapped__, "z_scores", "triton", "cpu")
    monkeypatch.setattr(backend, "why_no_triton", lambda: "triton is not installed")
    assert why_not("triton", CUDA) == "triton is not installed"


def test_a_backend_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "why_no_triton", lambda: None)
    sizes = torch.float32, 64, 4
    check_backend("auto", CPU, *sizes)
    said = "^backend='cpu' cannot run: the model is on cuda; use backend='reference'$"
    raises(said, check_backend, "cpu", CUDA, *sizes)
    why = "^the Triton kernels cannot run: at most 16 query heads may share a KV head, got 17; use backend='reference'$"
    raises(why, check_backend, "auto", CUDA, torch.float32, 64, 17)


@pytest.fixture
def gpu(monkeypatch):
    """A function that says which flash-attn runs on a GPU of that generation, with these packages."""

    def served(capability, **packages):
        for name in backend.FLASH:
            monkeypatch.setitem(sys.modules, name, packages.get(name))  # None: there is none
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        backend.flash_attention.cache_clear()
        return backend.flash_attention(CUDA)

    yield served
    backend.flash_attention.cache_clear()


def test_the_newest_flash_attn_that_serves_a_gpu(gpu, monkeypatch):
    two, three = flash_attn.package("flash_attn"), flash_attn.package("flash_attn_interface")
    two.flash_attn_varlen_func, three.flash_attn_varlen_func = (lambda: 2), (lambda: 3)
    both = {"flash_attn": two, "flash_attn_interface": three}
    for capability, packages, number in (
        *(((9, 0), both, 3), ((8, 9), both, 2), ((10, 0), both, 2), ((7, 5), both, None), ((9, 0), {}, None)),
        *(((9, 0), {"flash_attn": two}, 2), ((9, 0), {"flash_attn_interface": three}, 3)),
        ((8, 0), {"flash_attn_interface": three}, None),
        ((9, 0), {"flash_attn": ModuleType("flash_attn")}, None),  # of flash-attn 4 alone
    ):
        found = gpu(capability, **packages)
        assert (found and found()) == number, (capability, number)
    two.__version__ = "2.5.9"
    assert gpu((8, 0), **both) is None
    two.__version__ = "2.8.3"
    assert gpu((8, 0), **both) is not None
    assert backend.flash_attention(CPU) is None and backend.flash_attention(OTHER) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu((9, 4), **both) is None


@pytest.fixture
def poisoned(monkeypatch):
    """Functions of a module raise when they are called; what was looked up before is forgotten."""

    def poison(module):
        for name, value in vars(module).items():
            if callable(value) and getattr(value, "__module__", None) == module.__name__:
                monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))

    implementation.cache_clear()
    yield poison
    implementation.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_the_reference_calls_no_other_backend(name, poisoned):
    from fastkv.kernels import operations

    poisoned(cpu)
    poisoned(operations)
    arguments, options = CASES[name]("reference")
    getattr(ops, name.split()[0])(*arguments, **options)


COMPILER = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), "")


@pytest.mark.parametrize("name", ["slots", "joins", "most_attended"])
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_what_is_compiled_for_a_cpu_compiles(name):
    """Else all goes on without it and its tests are skipped. As C++17, which torch 2.11 asks for; later ones, C++20."""
    assert compiled.available(name), compiled.library(name)
    source = "".join((compiled.HERE / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-march=native", "-fopenmp", "-x", "c++", "-"]
    subprocess.run(command, input=source, text=True, check=True)


IMPORTS = """
import sys
from fastkv import backend, ops
from fastkv.backend import implementation
for name in ("decode_step", "prefill_attention", "compact", "remember", "select"):
    implementation(name, "reference", "cpu")
print([name for name in ("fastkv.cpu", "fastkv.kernels") if name in sys.modules])
implementation("compact", "auto", "cpu")
print("fastkv.cpu.operations" in sys.modules)
"""


def test_a_backend_is_imported_on_first_use(tmp_path):
    code, said, errors = run(IMPORTS, tmp_path)
    assert code == 0, errors
    assert said.splitlines()[:2] == ["[]", "True"]
