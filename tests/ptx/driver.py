"""A driver for Triton, so that launchers launch as they do on a GPU: grids, specialisations, strides and hints included.

    with executed() as driver:
        operations.select(...)       # tensors on the CPU; kernels are compiled for sm_80, and their PTX is executed

Triton's interpreter must be off when triton is imported. Compilation ends with PTX, which needs no assembler.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

import fastkv.kernels
from fastkv.ops import operator

from .launch import execute
from .memory import elements
from .parse import bits_of, parse
from .program import Executable

SM_80 = GPUTarget("cuda", 80, 32)
SHARED = 163 << 10  # bytes that a program may have
CACHE = "build/ptx"  # of compiled kernels, which other users of Triton's would take for machine code


class Unwritten(TorchDispatchMode):
    """Which bytes of memory that was allocated without numbers have been written since, while it is active.

    `known` maps the address of an allocation to [S] bool. Memory is kept until the end, so that no address comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, np.ndarray] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and note what it has written."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "empty" in func.overloadpacket.__name__:
            storage = result.untyped_storage()
            self.known[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
            self.kept.append(result)
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.write(args[number] if number < len(args) else kwargs.get(argument.name))
        return result

    def write(self, written: Any) -> None:
        """Note that these tensors are written."""
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage.data_ptr() not in self.known:
                continue
            known = self.known[storage.data_ptr()]
            if len(known) == storage.nbytes():
                elements(known, tensor)[...] = True
            else:  # it was resized, which moved it
                del self.known[storage.data_ptr()]


class Driver:
    """What Triton asks of a driver.

    Attributes:
        order: of the programs of the next launch, see `launch.execute`.  fixed: whether every launch has that order;
        else they follow each other.  launched: names of kernels, by launch.  change: what is done to PTX before it is
        read, for tests of what is found.
    """

    def __init__(self, unwritten: Unwritten) -> None:
        self.unwritten, self.order, self.fixed = unwritten, 0, False
        self.launched: list[str] = []
        self.change = str
        self.utils, self.launcher_cls = self, self.launcher

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return SM_80

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Bytes of shared memory."""
        return {"max_shared_mem": SHARED}

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple:
        """Module, function, registers, spills and the most threads; the function is an `Executable`."""
        return None, Executable(parse(self.change(ptx.decode()))), 0, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        """The function that launches a compiled kernel."""
        types = list(source.signature.items())

        def launch(x: int, y: int, z: int, stream: int, executable: Executable, *rest: Any) -> None:
            given = [(name, kind, one) for (name, kind), one in zip(types, rest[4:]) if kind != "constexpr"]
            names = [name for name, _ in executable.kernel.params]
            values = [_bits(kind, one) for _, kind, one in given]
            arguments = dict(zip(names, [*values, *[0] * (len(names) - len(values))]))
            tensors = {name: one for name, _, one in given if isinstance(one, torch.Tensor)}
            if x * y * z:
                self.launched.append(executable.kernel.name)
                execute(executable, (x, y, z), arguments, tensors, metadata.shared, self.order, self.unwritten.known)
                self.order += not self.fixed

        return launch


def _bits(kind: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return bits_of(value, int(kind[2:])) if kind.startswith("fp") else int(value)


@contextmanager
def executed(change: Any = str) -> Iterator[Driver]:
    """Kernels of fastkv that are launched are executed here, on tensors of the CPU; Triton is as before afterwards."""
    assert not triton.knobs.runtime.interpret
    unwritten = Unwritten()
    driver = Driver(unwritten)
    driver.change = change
    before = triton.runtime.driver._active
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), triton.knobs.cache.scope():
        patch.setattr(CUDABackend, "make_cubin", lambda self, source, *rest: source.encode())
        patch.setattr(operator, "is_in_torch_dispatch_mode", lambda: False)
        triton.knobs.cache.dir = CACHE
        for found in pkgutil.iter_modules(fastkv.kernels.__path__):
            module = importlib.import_module(f"fastkv.kernels.{found.name}")
            for name, value in vars(module).copy().items():
                if name == "chip_of":
                    patch.setattr(module, name, lambda device: "80")
                if name.endswith("_kernel"):
                    patch.setattr(value, "device_caches", type(value.device_caches)(value.create_binder))
        triton.runtime.driver.set_active(driver)
        try:
            with unwritten:
                yield driver
        finally:
            triton.runtime.driver._active = before
