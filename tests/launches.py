"""Launches of kernels that do not run: how many there are, and how many compilations they need."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import fastkv.kernels
from fastkv.ops import operator

NOT_LAUNCHED = {*"empty empty_like new_empty empty_strided new_empty_strided lift_fresh detach sym_size".split()}


def reached(arguments):
    """Bytes of the tensors among the arguments of a kernel, by name, of pages those of the rows that do not return."""
    rows, page = arguments.get("rows_ptr"), arguments.get("page")
    total = 0
    for one in {id(t): t for t in tree_leaves(list(arguments.values())) if isinstance(t, torch.Tensor)}.values():
        paged = page is not None and one.dim() and one.stride(0) * one.itemsize == 16 * page
        total += one[0].nbytes * int((rows != 0).sum()) if paged else one.nbytes
    return total


def pytest_collection_modifyitems(items):
    """For plugins whose launches are compiled: what draws cases is slow."""
    for item in items:
        if getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker("slow")


def kernel_modules():
    """The modules of kernels."""
    names = (found.name for found in pkgutil.iter_modules(fastkv.kernels.__path__))
    return [importlib.import_module(f"fastkv.kernels.{name}") for name in names]


class Kernel:
    """Stands for a kernel: launches leave all tensors as they are."""

    def __init__(self, kernel, launches):
        options = getattr(kernel, "kwargs", {})  # of the interpreter's; the compiler's kernel knows them itself
        kernel = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **options)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.name, self.launches = f"{kernel.module}.{kernel.fn.__name__}", launches
        self.arguments = kernel.arg_names

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.nbytes += reached(dict(zip(self.arguments, arguments)))
            _, specialization, rest = self.bind(*arguments, **options)
            self.launches.append((self.name, str(specialization) + str(rest)))
            if self.launches.driver is not None:
                self.launches.devices.append(self.launches.driver.current)

        return launch


class Driver:
    """Stands for a driver of several GPUs, of which a process has one current.

    Attributes: current: its index.  changes: of it, so far.
    """

    def __init__(self, number):
        self.number, self.current, self.changes = number, 0, 0

    @contextmanager
    def device(self, device):
        """As `torch.cuda.device`."""
        before, self.current = self.current, device.index
        self.changes += 1
        try:
            yield
        finally:
            self.current = before

    def patch(self, patch):
        """Let torch ask this one."""
        patch.setattr(torch.cuda, "device_count", lambda: self.number)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "device", self.device)


class Launches(list):
    """(kernel, what it would be compiled for) of each launch.

    Attributes: driver: a `Driver`, or None.  devices: the one that was current at each launch, with a driver.
        nbytes: of the tensors that all of them were given, of pages those of the rows that are somebody's.
    """

    def __init__(self, driver=None):
        super().__init__()
        self.driver, self.devices, self.nbytes = driver, [], 0

    def compilations(self):
        """How many each kernel needs, by its name."""
        return Counter(name for name, _ in {*self})


@contextmanager
def recorded(driver=None):
    """No kernel runs; yields the launches."""
    launches = Launches(driver)
    with pytest.MonkeyPatch.context() as patch:
        for module in kernel_modules():
            for name, value in vars(module).copy().items():
                if name.endswith("_kernel"):
                    patch.setattr(module, name, Kernel(value, launches))
        yield launches


class Operators(TorchDispatchMode):
    """The torch operators that would each be a launch on a GPU, those inside fastkv's own included.

    Attributes: found: their names.  nbytes: of what all of them read and write; of chosen rows, of those alone.
    """

    def __init__(self):
        super().__init__()
        self.found, self.nbytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = torch.Tag.nondeterministic_seeded not in func.tags and func.is_view
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not views and name not in NOT_LAUNCHED:
            self.found.append(str(func))
            chosen = {"index_select": (out, out), "index_copy_": (args[-1], args[-1])}.get(name, (args, kwargs, out))
            self.nbytes += sum(t.nbytes for t in tree_leaves(chosen) if isinstance(t, torch.Tensor))
        return out

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(operator, "is_in_torch_dispatch_mode", lambda: False)
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)
