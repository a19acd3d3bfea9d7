"""With `-p tests.on_gpu`, pytest has launches of fastkv's kernels run on the GPU, wherever their tensors are.

Storages of the CPU are copied to it before a launch, and back after it. Tests that draw cases are slow: each would be
compiled.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported, which the next lines do

import pytest
import torch
import triton

from .launches import kernel_modules, pytest_collection_modifyitems  # noqa: F401

FIRST = 4  # of what a launcher is given are not arguments of the kernel


def carried(value, device, storages):
    """What the kernel is given for a value: tensors of the CPU with the offset and strides that they have, in copies of
    their storages, which are noted by address with the storages themselves."""
    if isinstance(value, tuple):
        members = [carried(one, device, storages) for one in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    home = value.untyped_storage()
    if home.data_ptr() not in storages:
        storages[home.data_ptr()] = home, torch.UntypedStorage(home.nbytes(), device=device).copy_(home)
    there = storages[home.data_ptr()][1]
    shape = value.storage_offset(), value.shape, value.stride()
    return torch.empty(0, dtype=value.dtype, device=device).set_(there, *shape)


def carrying(launcher, device):
    """The launcher's class, for tensors of the CPU too."""

    class Carrying(launcher):
        def __call__(self, x, y, z, stream, function, *rest):
            storages = {}
            given = [carried(one, device, storages) for one in rest[FIRST:]]
            super().__call__(x, y, z, stream, function, *rest[:FIRST], *given)
            for home, there in storages.values():
                home.copy_(there)

    return Carrying


@pytest.fixture(scope="session", autouse=True)
def launches_on_gpu():
    """Launchers carry, and kernels are those of the GPU."""
    driver, chip = triton.runtime.driver.active, "{}{}".format(*torch.cuda.get_device_capability())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastkv.backend.interpreted", lambda: True)  # tensors may be the CPU's
        patch.setattr(driver, "launcher_cls", carrying(driver.launcher_cls, "cuda"))
        for module in kernel_modules():
            if hasattr(module, "chip_of"):
                patch.setattr(module, "chip_of", lambda device: chip)
        yield
