"""Set-up: one process, one thread, the bundled model in float32, and what `fastkv.patch` makes of each prompt alone."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that a test can stop between its steps
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}

import gc

import pytest
import torch

from .engine import FITTED


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The bundled model's directory without calibration files, which vLLM would read as weights."""
    made = tmp_path_factory.mktemp("model")
    for file in FITTED.iterdir():
        if file.suffix != ".safetensors" or file.name == "model.safetensors":
            (made / file.name).symlink_to(file)
    return str(made)


@pytest.fixture(autouse=True, scope="session")
def heads_alike():
    """`fastkv.patch` lets all heads keep the same, as pages do, and calibrates none."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("fastkv.api.shares_for", lambda model, wanted: "uniform")
        yield


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield
    gc.collect()  # engines of earlier tests
