"""What README and docs print can be typed: Python is run, command lines are read by the parsers that they go to.

The blocks of a page run one after another in one namespace. A checkpoint is the bundled model, whatever its name, and
vLLM, which is not installed, a stand-in that checks what it is told of fastkv.
"""

import ast
import json
import re
import shlex
import sys
import types
from functools import cache

import pytest
import torch
import transformers

import fastkv
from fastkv.integrations.vllm import settings
from fastkv.lab.cli import build_parser

from .test_docs import OURS, PAGES, ROOT, code
from .toy import generate, load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

PYTHON = {path: re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S) for path in PAGES}
SHELL = re.compile(r"^(?:\$ )?((?:fastkv|python -m|pip install|python -m pip install) .*)", re.M)
RUNS = [path for path, blocks in PYTHON.items() if blocks]


def name(path):
    return str(path.relative_to(ROOT))


class LLM:
    """vLLM's, as far as fastkv is concerned."""

    def __init__(self, model, additional_config):
        check_settings(additional_config)

    def generate(self, prompts, sampling):
        return []


def check_settings(additional):
    """What vLLM is told is what `fastkv.patch` takes. Raises FastKVError for what it does not."""
    (asked,) = additional.values()
    assert list(additional) == [settings.KEY] and set(asked) <= set(settings.DEFAULTS)
    hyper = asked["policy"] if isinstance(asked["policy"], dict) else {"name": asked["policy"]}
    budget = asked["budget"] if isinstance(asked["budget"], dict) else {"tokens": asked["budget"]}
    policy, block = fastkv.policies.get(**hyper), asked.get("prefill_block")
    fastkv.patch(load()[0], policy, fastkv.Budget(**budget), prefill_block=block)


@pytest.fixture
def reader(bundled, monkeypatch, tmp_path):
    """The names that pages leave to their reader; checkpoints need no network and steps no compiler."""
    model, tokenizer = bundled
    sample = generate("facts", 200, 0)

    def from_pretrained(name, tp_plan=None, **options):
        if tp_plan is not None:  # transformers joins the processes of torchrun, here one
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **options: tokenizer)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=dict))
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.chdir(tmp_path)
    given = {"model": model, "tokenizer": tokenizer, "long_text": sample.context, "question": sample.questions[0]}
    yield {"__name__": "page", **given}
    fastkv.unpatch(model)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", RUNS, ids=map(name, RUNS))
def test_python_runs(path, reader):
    for number, block in enumerate(PYTHON[path]):
        exec(compile(block, f"{name(path)}, block {number + 1}", "exec"), reader)


def lines(text):
    """Command lines of blocks and of words in backticks, without comments and what a shell would put in."""
    found = [line for part in code(text) for line in SHELL.findall(part)]
    return [re.sub(r"\$\(.*?\)", "x", line).partition("  #")[0].strip() for line in found]


LINES = [(path, line) for path in PAGES for line in lines(path.read_text())]
FASTKV = sorted({line for _, line in LINES if line.startswith("fastkv ") and "-" in line})


@pytest.mark.parametrize("line", FASTKV)
def test_the_command_line_is_understood(line):
    try:
        build_parser().parse_args(shlex.split(line)[1:])
    except SystemExit as stop:
        assert stop.code == 0, line  # --help


@cache
def known_options(module):
    """Options that the sources of a module of ours, or the engine of measurements, have as text."""
    place = ROOT.joinpath(*module.split("."))
    files = [place.with_suffix(".py"), *place.glob("*.py"), ROOT / "perf" / "engine.py"]
    nodes = [node for file in files if file.is_file() for node in ast.walk(ast.parse(file.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {word for text in texts for word in text.split() if word.startswith("--")} | {"--help"}


MODULES = sorted({line for _, line in LINES if line.startswith("python -m") and line.split()[2].split(".")[0] in OURS})


@pytest.mark.parametrize("line", MODULES)
def test_the_options_of_a_module_exist(line):
    module, *words = line.split()[2:]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known_options(module)


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [re.findall(r"(fastkv[\w-]*|\.)\[(\w+)\]", line) for _, line in LINES if " install " in line]
    found = {pair for pairs in asked for pair in pairs}
    assert {extra for _, extra in found} <= set(project["optional-dependencies"]) and len(found) > 1
    assert {where for where, _ in found} <= {".", project["name"]}
    ours = {word for _, line in LINES if " install " in line for word in shlex.split(line) if word.startswith("fastkv")}
    assert {word.partition("[")[0] for word in ours} <= {project["name"]}  # another name is another project


def test_settings_of_vllm_can_be_used():
    text = (ROOT / "docs" / "serving.md").read_text()
    found = re.findall(r"--additional-config '(\{.*\})'", text) + re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert len(found) > 1
    for one in found:
        check_settings(json.loads(one))
