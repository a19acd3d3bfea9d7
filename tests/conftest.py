"""Shared set-up: kernels run in the Triton interpreter where there is no GPU, and everything is seeded and quiet."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest
import transformers
from hypothesis import settings

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # pytest-xdist runs one process per core
settings.register_profile("fastkv", deadline=None, derandomize=True)
settings.load_profile("fastkv")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state and does not leak gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
