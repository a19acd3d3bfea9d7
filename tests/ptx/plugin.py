"""With `-p tests.ptx.plugin`, pytest has launches of fastkv's kernels executed from their PTX, not interpreted."""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported, which the next line does

import pytest

from .driver import executed


@pytest.fixture(autouse=True)
def launches():
    """The driver, for tests that want more of it."""
    with executed() as driver:
        yield driver
