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

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # its own kernels need Triton: here, its interpreter
    os.environ["TRITON_INTERPRET"] = "1"
    from types import SimpleNamespace

    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))

import gc

import pytest
import torch

import fastkv

from .engine import FITTED, loaded


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The bundled model's directory without calibration files, which vLLM would read as weights."""
    made = tmp_path_factory.mktemp("model")
    for file in FITTED.iterdir():
        if file.suffix != ".safetensors" or file.name == "model.safetensors":
            (made / file.name).symlink_to(file)
    return str(made)


@pytest.fixture(autouse=True, scope="session")
def calibrated(tmp_path_factory):
    """What is found out about the heads of a model stays among the tests, servers included."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def heads_of_the_model(model, calibrated):
    """Calibrated, as vLLM cannot do it."""
    fastkv.patch(loaded(model))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield
    gc.collect()  # engines of earlier tests
