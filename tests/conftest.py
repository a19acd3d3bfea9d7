"""Shared set-up: kernels run in the Triton interpreter unless a plugin says otherwise; all is seeded and quiet."""

import gc
import itertools
import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import pytest
import transformers
from hypothesis import Phase, settings

gc.disable()  # until all tests have been imported
collect_ignore = ["vllm"]  # it has an environment of its own: make test-vllm
transformers.logging.set_verbosity_error()
if os.environ.get("TRITON_INTERPRET") == "1":
    from . import interpreter

    interpreter.patch_once()
    interpreter.remember_types()
    interpreter.skip_overflow_sums()
torch.set_num_threads(1)  # pytest-xdist runs one process per core
FULL = 100  # examples of a test that does not say how many
settings.register_profile("full", deadline=None, derandomize=True, max_examples=FULL)
settings.register_profile("fastkv", settings.get_profile("full"), max_examples=FULL // 16)  # every day
# The first failing case is enough for tests.mutations, nobody reads the smallest.
settings.register_profile("mutations", settings.get_profile("fastkv"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("fastkv")


def examples(full):
    """How many examples a test that deserves `full` of them draws in the active profile."""
    return max(full * settings.default.max_examples // FULL, 5)


def pytest_collection_finish(session):
    """What has been imported stays: the collector need not look at torch and transformers again and again."""
    gc.freeze()
    gc.enable()
    if session.items and not any(item.get_closest_marker("real") for item in session.items):
        read_few_modules()


def read_few_modules():
    """Texts that Python brings are of the first of its modules: to parse all of them takes seconds."""
    from fastkv.lab import facts

    modules = facts._modules
    facts._modules = lambda: itertools.islice(modules(), 60)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state and does not leak gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def bundled():
    """The toy model and its tokenizer."""
    from .toy import load

    return load()


@pytest.fixture
def unwritten_is_nan():
    """Outputs and scratch of kernels start as NaN, or as a large wrong number: an element nobody writes shows."""
    from .states import uninitialised_is_nan

    with uninitialised_is_nan():
        yield


@pytest.fixture(autouse=True, scope="session")
def heads_alike():
    """Heads are alike unless a test says otherwise: models of tests are not calibrated for each."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("fastkv.api.shares_for", only_from_files)
        yield


@pytest.fixture(autouse=True)
def heads_as_for_a_user(request, monkeypatch):
    """Tests that are marked "calibrated" get what a user gets; files are read for all."""
    from fastkv.integrations.transformers.calibrate import shares_for

    marked = request.node.get_closest_marker("calibrated") is not None
    monkeypatch.setattr("fastkv.api.shares_for", shares_for if marked else only_from_files)


def only_from_files(model, wanted):
    from fastkv.integrations.transformers.calibrate import shares_for

    return "uniform" if wanted == "calibrated" else shares_for(model, wanted)
