"""Nothing is run that a file or the network brought: no sockets, no pickles, no evaluated text, no other programs."""

import ast
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fastkv
from fastkv.calibration.fits import QualityCurve, VectorMap

from .models import build, raises
from .processes import run
from .toy import MODEL

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "fastkv").rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "subprocess", "pty"}
MODULES |= {"socket", "ssl", "http", "urllib", "requests", "httpx", "ftplib", "smtplib", "telnetlib", "code", "codeop"}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
CALLS = {"os.system", "os.popen", "os.fork", "torch.load", "torch.save", "torch.jit.load", "torch.hub.load"}
CALLS |= {"numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "torch.package.PackageImporter"}
PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn", "pickle.", "torch.hub.")
KEYWORDS = {"trust_remote_code", "allow_pickle", "weights_only", "shell"}


def forbidden(text):
    """What a source file does that could run or fetch something, as `line: what`."""
    for node in ast.walk(ast.parse(text)):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in whole if name.split(".")[0] in MODULES or name in CALLS]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found = [node.id]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found = [name] if name in CALLS or name.startswith(PREFIXES) else []
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            found = [node.arg]
        yield from (f"{getattr(node, 'lineno', '?')}: {one}" for one in found)


def test_the_package_runs_and_fetches_nothing():
    assert [(path.name, *found) for path in FILES if (found := list(forbidden(path.read_text())))] == []


def test_the_scan_finds_what_it_looks_for():
    for text in (
        *("import urllib.request", "from pickle import loads", "from os import system", "os.execv('x', [])"),
        *("run = exec", "torch.load('x')", "f(trust_remote_code=True)"),
    ):
        assert len(list(forbidden(text))) == 1, text


def test_dynamic_imports_name_modules_of_the_package():
    """Public names, backends and commands are imported late, by names that are written in the file that does it."""
    texts = {path.relative_to(ROOT / "fastkv").as_posix(): path.read_text() for path in FILES}
    late = [name for name, text in texts.items() if "import_module" in text]
    assert late == ["__init__.py", "backend.py", "lab/cli.py"]
    assert all(name.startswith(".") for name in fastkv.backend.MODULES.values())
    assert fastkv.PLACES.keys() <= set(fastkv.__all__)
    calls = [node for node in ast.walk(ast.parse(texts["lab/cli.py"])) if isinstance(node, ast.Call)]
    given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "module"]
    assert given and all(isinstance(one, ast.Constant) and one.value.startswith(".") for one in given)


OFFLINE = """
import socket, sys
import torch, transformers, safetensors.torch
from transformers.models.llama import modeling_llama

WATCHED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.", "urllib.", "http.")
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(WATCHED) else None)

import fastkv, fastkv.lab.cli
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
ids = tokenizer("the code of amber ferret is 84 36 92 . " * 12, return_tensors="pt").input_ids
budget = fastkv.Budget(tokens=48, sinks=2, recent=8)
fastkv.patch(model, "momentkv", budget)
out = model.generate(ids, max_new_tokens=40, return_dict_in_generate=True)
assert (out.past_key_values.moments(0).count > 0).all()
out.past_key_values.save(sys.argv[1])
fastkv.FastKVCache.load(sys.argv[1], model)
fastkv.patch(model, "keydiff", budget, correction="vector")
model.generate(ids, max_new_tokens=5)
fastkv.patch(model, "keydiff", fastkv.Budget(quality=0.9, sinks=2, recent=8))
model.generate(ids, max_new_tokens=5)
fastkv.unpatch(model)
found = list(seen)
socket.socket().close()
assert "socket.__new__" in seen, "the hook works"
print(found)
"""


def test_importing_and_generating_open_no_socket_and_start_no_program(tmp_path):
    code, said, errors = run(OFFLINE, tmp_path / "probe", str(tmp_path / "cache.fastkv"), MODEL)
    assert code == 0, errors[-3000:]
    assert said.splitlines()[-1] == "[]"


class Bomb:
    """What a pickle would run when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path(BOMB),)


BOMB = ""


@pytest.fixture
def bomb(tmp_path, monkeypatch):
    """Files, by kind, that create `exploded` if anything in them is run; and that path."""
    monkeypatch.setattr(sys.modules[__name__], "BOMB", str(tmp_path / "exploded"))
    code = f"__import__('pathlib').Path({BOMB!r}).touch()"
    torch.save({"x": Bomb()}, tmp_path / "torch.bin")
    (tmp_path / "pickle.bin").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "code.bin").write_text(code)
    (tmp_path / "json.bin").write_text(json.dumps({"__class__": "pathlib.Path", "__reduce__": code, "points": code}))
    header = {"format": code, "fastkv": code, "header": code}
    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "safetensors.bin", metadata=header)
    return sorted(tmp_path.glob("*.bin")), tmp_path / "exploded"


def test_the_bomb_works(bomb):
    files, exploded = bomb
    pickle.loads(next(path for path in files if path.name == "pickle.bin").read_bytes())
    assert exploded.exists()


READERS = {
    "saved cache": lambda path, model: fastkv.FastKVCache.load(path, model),
    "vector map": lambda path, model: VectorMap.load(path, model.config),
    "quality curve": lambda path, model: QualityCurve.load(path, model.config, "keydiff"),
    "vector argument": lambda path, model: fastkv.patch(model, "keydiff", 64, correction="vector", vector=path),
    "calibration": lambda path, model: fastkv.patch(model, "keydiff", fastkv.Budget(quality=0.9, calibration=path)),
    "pattern": lambda path, model: fastkv.policies.get("duoattention", pattern=str(path)).check([2, 2, 2, 2]),
}


@pytest.mark.parametrize("reader", READERS)
def test_files_are_refused_and_never_run(reader, bomb):
    files, exploded = bomb
    assert len(files) == 5
    model = fastkv.patch(build(), budget=fastkv.Budget(tokens=20, sinks=2, recent=4))
    for path in files:
        raises(path.name, READERS[reader], path, model)
        assert not exploded.exists(), path.name


def test_versions_are_pinned_one_by_one():
    """.ci/constraints.txt names one version of every package, so that what is audited is what is installed."""
    lines = [line for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    assert len(lines) > 80
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][0-9a-z.]*(; .+)?", line)] == []
    names = [line.split("==")[0] for line in lines]
    assert len(names) == len(set(names))
    assert {"torch", "transformers", "triton", "safetensors", "numpy"} <= set(names)
