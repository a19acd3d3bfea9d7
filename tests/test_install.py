"""What is installed: what the wheel holds and needs, one version, and what works without the extra `cli`."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fastkv

from .processes import run

ROOT = Path(__file__).parent.parent
INPUTS = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources, built by the setuptools that is here."""
    place = tmp_path_factory.mktemp("wheel")
    for name in INPUTS:
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "fastkv", place / "fastkv", ignore=shutil.ignore_patterns("__pycache__"))
    for other in ("tests", "perf", "tools"):
        (place / other).mkdir()
        (place / other / "__init__.py").touch()
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next((place / "dist").glob("*.whl"))


def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


def test_the_wheel_holds_what_a_user_needs(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if ".dist-info/" not in name]
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastkv").rglob("*.py")}
    data = {
        "fastkv/py.typed", "fastkv/lab/view.html", "fastkv/lab/flight.txt",
        "fastkv/integrations/transformers/families.json",
    }  # fmt: skip
    assert here | data <= set(names)
    assert any(name.startswith("fastkv/lab/tasks/") for name in names)
    assert all(name.startswith("fastkv/") for name in names)
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights and all(name.startswith("fastkv/calibration/known/") for name in weights)  # no model


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 2**20


def test_the_core_needs_six_packages(wheel):
    needs = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist")]
    core = {need.name for need in needs if "extra" not in str(need.marker)}
    assert core == {"torch", "transformers", "triton", "safetensors", "numpy", "packaging"}
    plots = {need.name for need in needs if need.marker and need.marker.evaluate({"extra": "cli"})} - core
    assert plots == {"rich", "matplotlib"}


def test_one_name_and_one_version(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("fastkv-attn", fastkv.__version__)
    places = [path for path in (ROOT / "fastkv").rglob("*.py") if f'"{fastkv.__version__}"' in path.read_text()]
    assert [path.name for path in places] == ["__init__.py"]


WITHOUT = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules["rich"] = sys.modules["matplotlib"] = None  # as if they were not installed

import torch
import fastkv
from fastkv.lab.cli import main
from transformers import LlamaConfig, LlamaForCausalLM

print(fastkv.__file__)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).eval()
ids = torch.randint(5, 90, (1, 200))
with fastkv.patched(model, "fastkv", 64):
    model.generate(ids, max_new_tokens=3, do_sample=False)
assert main(["doctor"]) == 0
for command in ("demo --quick", "calibrate vector", "eval --tasks arc_easy"):
    assert main(command.split()) == 2, command
"""


def test_the_wheel_works_without_the_extra(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code, output, errors = run(WITHOUT, tmp_path / "process", str(tmp_path))
    assert code == 0, errors
    assert Path(output.splitlines()[0]).parent == tmp_path / "fastkv"
    how = "rich and matplotlib are not installed (pip install 'fastkv-attn[cli]')"
    sentences = [line for line in errors.splitlines() if line.startswith("fastkv ")]
    names = "demo", "calibrate", "eval"
    assert sentences == [f"fastkv {name}: this command needs the extra cli: {how}" for name in names]
