"""A driver for Triton, so that launchers launch as they do on a GPU, with grids, specialisations, strides and hints.

    with executed() as driver:
        operations.select(...)       # tensors on the CPU; kernels are compiled for sm_80, and their PTX is executed

Triton's interpreter must be off when triton is imported. Compilation ends with PTX, which needs no assembler.
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import fastkv.kernels
import numpy as np
import pytest
import torch
import triton
from fastkv.ops import operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from .launch import execute
from .memory import elements
from .parse import parse
from .program import Executable

SHARED = 163 << 10  # bytes that a program may have
CACHE = "build/ptx"  # of compiled kernels: others would take what it holds for machine code


class Unwritten(TorchDispatchMode):
    """Which bytes of memory that was allocated without numbers have been written since, while it is active.

    `known` maps the address of an allocation to [S] bool. Memory is kept until the end, so that no address comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, np.ndarray] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "empty" in func.overloadpacket.__name__:
            self.known[result.untyped_storage().data_ptr()] = np.zeros(result.untyped_storage().nbytes(), bool)
            self.kept.append(result)
        elif all(one.alias_info is None for one in func._schema.returns):
            for tensor in tree_leaves(result):
                self.write(tensor)
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(written):
                    self.write(tensor)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operators of torch are noticed, those inside of fastkv's own included."""
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(operator, "is_in_torch_dispatch_mode", lambda: False)
            self.known, self.kept = {}, []
            yield

    def write(self, tensor: Any) -> None:
        """Note that a tensor is written."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        known = self.known.get(storage.data_ptr())
        if known is not None and len(known) == storage.nbytes():
            elements(known, tensor)[...] = True
        else:  # what was here has moved, as its size changed
            self.known.pop(storage.data_ptr(), None)


class Driver:
    """What stands in for a GPU of sm_80.

    Attributes:
        order: of the programs of the next launch, see `execute`; each launch adds `step`.  launched: names of
        kernels.  change: what is done to PTX before it is read, for tests of what is found.
    """

    def __init__(self, change: Callable[[str], str]) -> None:
        self.change, self.order, self.step, self.unwritten = change, 0, 1, Unwritten()
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED}, load_binary=self.load_binary
        )
        self.for_triton = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 80, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 0, launcher_cls=self.launcher, utils=self.utils,
        )  # fmt: skip

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple:
        """Module, function, registers, spills and the most threads; the function is an `Executable`."""
        return None, Executable(parse(self.change(ptx.decode()))), 0, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The function that launches a compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, executable: Executable, *rest: Any) -> None:
            given = [(*one, value) for one, value in zip(source.signature.items(), rest[4:]) if one[1] != "constexpr"]
            bits = [_bits(kind, value) for _, kind, value in given] + [
                0,
                0,
            ]  # scratch of Triton's own that nobody asks for
            tensors = {name: value for name, _, value in given if isinstance(value, torch.Tensor)}
            if x * y * z:
                self.launched.append(executable.kernel.name)
                arguments, known = dict(zip(executable.kernel.params, bits)), self.unwritten.known
                with np.errstate(all="ignore"):
                    execute(executable, (x, y, z), arguments, tensors, metadata.shared, self.order, known)
                self.order += self.step

        return launch


def _bits(kind: str, value: Any) -> int:
    """Of what is passed as a parameter."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int.from_bytes(struct.pack("<f", value), "little") if kind == "fp32" else int(value)


@contextmanager
def installed(change: Callable[[str], str] = str) -> Iterator[Driver]:
    """Kernels of fastkv that are launched are executed here, on tensors of the CPU; Triton is as before afterwards."""
    assert not triton.knobs.runtime.interpret
    driver, before = Driver(change), triton.runtime.driver._active
    with pytest.MonkeyPatch.context() as patch, triton.knobs.cache.scope():
        patch.setattr(CUDABackend, "make_cubin", lambda self, source, *rest: source.encode())
        triton.knobs.cache.dir = CACHE
        for found in pkgutil.iter_modules(fastkv.kernels.__path__):
            module = importlib.import_module(f"fastkv.kernels.{found.name}")
            for name, value in vars(module).copy().items():
                if name == "chip_of":
                    patch.setattr(module, name, lambda device: "80")
                if name.endswith("_kernel"):
                    patch.setattr(value, "device_caches", type(value.device_caches)(value.create_binder))
        triton.runtime.driver.set_active(driver.for_triton)
        try:
            yield driver
        finally:
            triton.runtime.driver._active = before


@contextmanager
def executed(change: Callable[[str], str] = str) -> Iterator[Driver]:
    """`installed`, and it is known what memory has been written."""
    with installed(change) as driver, driver.unwritten.watching():
        yield driver
