"""House rules, checked: flow order of imports, sourced policies, no side effects of importing."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastkv
from fastkv.policies import ALL

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastkv"
FILES = sorted(PACKAGE.rglob("*.py"))


def each_file(keep=lambda path: True):
    """Parametrise over the package's files, with readable ids."""
    files = [path for path in FILES if keep(path)]
    return pytest.mark.parametrize("path", files, ids=[str(path.relative_to(ROOT)) for path in files])


# Import order is flow order: a module may import only from rooms that come before its own (or its own).
ROOMS = [
    "errors",
    "backend",
    "budget",
    "reference",
    "corrections",
    "cpu",
    "parallel",
    "rotary",
    "kernels",
    "ops",
    "policies",
    "calibration",
    "config",
    "cache",
    "integrations",
    "module",
    "api",
    "demo",
    "evaluation",
    "calibration.fit_context",  # the core reads the files of calibration; what measures with it writes them
    "calibration.fit_vector",
    "cli",
]


def room_of(parts):
    """The room of a module, its name without fastkv in parts."""
    return ".".join(parts[:2]) if ".".join(parts[:2]) in ROOMS else parts[0]


def room(path):
    return room_of(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_rooms(path):
    """Rooms that a file imports, at the top or inside functions."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                target = [*base, *(node.module.split(".") if node.module else [])]
            else:
                target = (node.module or "").split(".")
            names = [[*target, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "fastkv" and len(name) > 1 and name[1] in ROOMS:
                yield room_of(name[1:])


@each_file(lambda path: path != PACKAGE / "__init__.py")
def test_import_order_is_flow_order(path):
    mine = room(path)
    assert mine in ROOMS, f"{mine} is a new room: give it a place in the flow"
    later = [other for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(mine)]
    assert not later, f"{path.name} imports {later}, which come after {mine}"


@each_file()
def test_files_are_documented_and_plain(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a file says what it is for"
    assert "utils" not in path.name
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None and ast.unparse(node.type) not in ("Exception", "BaseException")
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("os.environ", "os.getenv")):
            raise AssertionError("behaviour does not hang on environment variables")
        if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            raise AssertionError("no eval")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


HOT = {"ops", "cache", "kernels", "policies"}
SYNCS = {"item", "tolist", "cpu", "nonzero", "numpy"}


@each_file(lambda path: room(path) in HOT)
def test_no_host_sync_on_the_hot_path(path):
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not SYNCS & {call.attr for call in calls if isinstance(call, ast.Attribute)}


@pytest.mark.parametrize("policy", ALL, ids=lambda p: p.name)
def test_every_policy_names_its_source(policy):
    doc = inspect.getdoc(policy)
    assert "Source:" in doc
    module = inspect.getsourcefile(policy)
    assert Path(module).stem == policy.name or policy.name.startswith(Path(module).stem)
    for field in dataclasses.fields(policy):
        name = field.name
        assert re.search(rf"\b{name}:", doc), f"{policy.name} does not document {name}"
    hash(policy())  # frozen


def test_the_readme_names_policies_that_exist():
    rows = re.findall(r'^\| `"([\w-]+)"` \| `(\w+)` \|', (ROOT / "README.md").read_text(), re.M)
    assert rows and set(rows) <= {(policy.name, policy.__name__) for policy in ALL}


def public_definitions(node):
    """Functions and classes that are not inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            yield child
        if not isinstance(child, ast.FunctionDef):
            yield from public_definitions(child)


@each_file()
def test_every_public_function_is_documented(path):
    missing = [node.name for node in public_definitions(ast.parse(path.read_text())) if not ast.get_docstring(node)]
    assert not missing


def test_public_names():
    for name in ("patch", "unpatch", "patched", "Budget", "FastKVCache", "FastKVError", "policies", "reference", "ops"):
        assert hasattr(fastkv, name)
    assert fastkv.policies.names()[0] == "momentkv"


IMPORT_PROBE = """
import torch, transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
import transformers.models.llama.modeling_llama as llama

def state():
    return (
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping), dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        dict(vars(llama)), dict(vars(llama.LlamaAttention)), dict(vars(torch.nn.Module)), dict(vars(torch.Tensor)),
        dict(vars(transformers.cache_utils)), torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.random.get_rng_state().tolist(),
    )

before = state()
import fastkv

assert state() == before
import sys
print("matplotlib" in sys.modules, "rich" in sys.modules)
"""


def test_importing_changes_no_global_state():
    result = subprocess.run([sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", "False"], "plots and progress are imported where they are used"
