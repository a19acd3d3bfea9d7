"""With `-p tests.ptx.plugin`, pytest has launches of fastkv's kernels executed from their PTX, not interpreted.

The order of programs is drawn from a test's name. Tests that draw cases are slow: each would be compiled.
"""

import os
import zlib

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported, which the next lines do

import pytest

from ..launches import pytest_collection_modifyitems  # noqa: F401
from .driver import Driver
from .harness import executed, watched


@pytest.fixture(scope="session")
def driver():
    """The driver of all tests."""
    with executed(Driver()) as driver:
        yield driver


@pytest.fixture(autouse=True)
def launches(driver, request):
    """The driver, for tests that want more of it."""
    driver.order = zlib.crc32(request.node.nodeid.encode())
    with watched(driver):
        yield driver
