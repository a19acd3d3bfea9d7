"""fastkv's kernels launched with the driver, and what torch has written of the memory that they are given."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastkv.ops import operator

from ..launches import kernel_modules
from .driver import installed
from .memory import elements


class Unwritten(TorchDispatchMode):
    """Which bytes of memory that torch allocated without numbers have been written since, while it is active.

    `known` maps the address of an allocation to [S] bool. Memory is kept until the end, so that no address comes back.
    """

    def __init__(self):
        super().__init__()
        self.known, self.kept = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, func._schema
        result = func(*args, **kwargs)
        given = {**dict(zip((one.name for one in schema.arguments), args)), **kwargs}
        for one in schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                self.note(given.get(one.name))
        if "empty" in func.overloadpacket.__name__:
            storage = result.untyped_storage()
            self.known[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
            self.kept.append(result)
        elif all(one.alias_info is None for one in schema.returns):
            self.note(result)
        return result

    def note(self, written):
        """All tensors in this are written."""
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self.known.get(storage.data_ptr())
                if known is not None and len(known) == storage.nbytes():
                    elements(known, tensor)[...] = True
                else:  # what was here has moved, as its size changed
                    self.known.pop(storage.data_ptr(), None)


@contextmanager
def executed(driver):
    """Kernels of fastkv are launched with this driver, as on the GPU that it stands for."""
    with installed(driver), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastkv.backend.interpreted", lambda: True)  # it runs them on the CPU, too
        for module in kernel_modules():
            for name, value in vars(module).copy().items():
                if name == "chip_of":
                    patch.setattr(module, name, lambda device: "80")
                if name.endswith("_kernel"):  # no other driver has loaded it
                    patch.setattr(value, "device_caches", type(value.device_caches)(value.create_binder))
        yield driver


@contextmanager
def watched(driver):
    """The driver is told what memory has been written. Operators of fastkv are functions, so that all of torch's are
    noticed."""
    with pytest.MonkeyPatch.context() as patch, Unwritten() as unwritten:
        patch.setattr(operator, "is_in_torch_dispatch_mode", lambda: False)
        driver.unwritten = unwritten.known
        yield driver
