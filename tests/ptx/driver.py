"""A driver for Triton, so that launchers launch as they do on a GPU, with grids, specialisations, strides and hints.

    with installed(Driver()):
        kernel[grid](...)       # tensors on the CPU; kernels are compiled for sm_80, and their PTX is executed

Triton's interpreter must be off when triton is imported. Compilation ends with PTX, which needs no assembler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from .launch import execute
from .parse import parse
from .program import Executable

SHARED = 163 << 10  # bytes that a program may have
CACHE = "build/ptx"  # of compiled kernels: others would take what it holds for machine code


class Driver:
    """What stands in for a GPU of sm_80.

    Attributes: change: what is done to PTX before it is read, for tests of what is found.  order: of the programs of
        the next launch, see `execute`; each launch adds `step`.  unwritten: see `Global`.
    """

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self.change, self.order, self.step = change, 0, 1
        self.unwritten: Mapping[int, np.ndarray] = {}
        limits = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED}, load_binary=self.load)
        self.for_triton = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 80, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 0, launcher_cls=self.launcher, utils=limits,
        )  # fmt: skip

    def load(self, name: str, ptx: bytes, shared: int, device: int) -> tuple:
        """Module, function, registers, spills and the most threads; the function is an `Executable`."""
        return None, Executable(parse(self.change(ptx.decode()))), 0, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The function that launches a compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, executable: Executable, *rest: Any) -> None:
            passed = zip(source.signature.items(), rest[4:])
            given = [one for (name, kind), value in passed for one in _members(name, kind, value)]
            bits = [struct.unpack("<I", struct.pack("<f", one))[0] if kind == "fp32" else one for _, kind, one in given]
            arguments = dict(zip(executable.kernel.params, [*bits, 0, 0]))  # and scratch that nobody asks for
            tensors = {name: value for name, _, value in given if isinstance(value, torch.Tensor)}
            if x * y * z:
                with np.errstate(all="ignore"):
                    execute(executable, (x, y, z), arguments, tensors, metadata.shared, self.order, self.unwritten)
                self.order += self.step

        return launch


def _members(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Names, types and values of what an argument becomes: nothing of a constant, all members of a tuple."""
    if isinstance(kind, tuple):
        for number, (one, part) in enumerate(zip(kind, value)):
            yield from _members(f"{name}.{getattr(kind, '_fields', range(len(kind)))[number]}", one, part)
    elif kind != "constexpr":
        yield name, kind, value


@contextmanager
def installed(driver: Driver) -> Iterator[None]:
    """Triton compiles and launches with this driver; it is as before afterwards."""
    assert not triton.knobs.runtime.interpret
    before = triton.runtime.driver._active
    with pytest.MonkeyPatch.context() as patch, triton.knobs.cache.scope():
        patch.setattr(CUDABackend, "make_cubin", lambda self, source, *rest: source.encode())
        triton.knobs.cache.dir = CACHE
        triton.runtime.driver.set_active(driver.for_triton)
        try:
            yield
        finally:
            triton.runtime.driver._active = before
