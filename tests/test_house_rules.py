"""House rules, checked: flow order of imports, sourced policies, no side effects of importing."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from fastkv.policies import ALL

from . import mutations
from .processes import run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastkv"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# Rooms in the order of the flow: a module may import from rooms before its own, and from its own. Backends come before
# the operators that choose among them by name (`fastkv.backend`), and calibration (what files are like, and shares of
# heads) before the budget that these shares are a part of.
ROOMS = """
errors calibration backend budget rotary reference corrections cpu kernels ops policies calibration.fits config cache
integrations module api pipeline lab
""".split()
# Imports that would close a cycle at the top of a module, and why they may stand in a function.
LATE = {("fastkv.policies.values", "fastkv.policies"): "the base of CriticalKV is a policy, by name"}


def module_name(path):
    """As it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module):
    """The room of a module of the package, None for the package itself."""
    _, first, second = [*module.split("."), "", ""][:3]
    return "calibration.fits" if (first, second) == ("calibration", "fits") else first or None


MODULES = {module_name(path): path for path in FILES}


def imports(path):
    """What a module imports from the package, at its top or in functions: (module, name in it or None, whether at top).

    What is imported for annotations only is left out: a type checker reads it and Python does not."""
    tree, name = TREES[path], module_name(path)
    package = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    nodes = list(ast.walk(tree))
    guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unread = {id(node) for guard in guards for node in ast.walk(guard)}
    for node in nodes:
        if id(node) in unread:
            continue
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            wanted = [(target, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        else:
            continue
        for target, what in wanted:
            if f"{target}.{what}" in MODULES:
                yield f"{target}.{what}", None, node in tree.body
            elif target in MODULES:
                yield target, what, node in tree.body


def test_import_order_is_flow_order():
    for path in FILES:
        mine = room(module_name(path))
        if mine is None:
            continue
        assert mine in ROOMS, f"{mine} is a new room: give it a place in the flow"
        others = {room(target) for target, _, _ in imports(path)} - {None}
        later = sorted(other for other in others if ROOMS.index(other) > ROOMS.index(mine))
        assert not later, f"{path} imports {later}, which come after {mine}"


def cycles(graph):
    """Groups of modules of which each imports, directly or not, every other."""

    def reached(start):
        found, left = set(), [start]
        while left:
            for other in graph[left.pop()] - found:
                found.add(other)
                left.append(other)
        return found

    below = {module: reached(module) for module in graph}
    groups = {frozenset(other for other in below[module] if module in below[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def test_no_module_imports_itself_through_others():
    every = {module: set(imports(path)) for module, path in MODULES.items()}
    graph = {
        module: {target for target, _, _ in found if target != module and (module, target) not in LATE}
        for module, found in every.items()
    }
    assert cycles(graph) == []
    for module, target in LATE:  # none of them is at the top, and each is still needed
        assert [top for other, _, top in every[module] if other == target] == [False]
        assert cycles({**graph, module: graph[module] | {target}})


def test_private_names_stay_in_their_room():
    for path, (target, name, _) in [(one, found) for one in FILES for found in imports(one)]:
        words = [*target.split("."), name or ""]
        private = [word for word in words if word.startswith("_") and not word.startswith("__")]
        same = room(target) == room(module_name(path))
        assert not private or same, f"{path} imports {'.'.join(words)} of another room"


def test_the_top_of_the_package_can_be_seen_at_a_glance():
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def public_definitions(node):
    """Functions and classes that are not inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            yield child
        if not isinstance(child, ast.FunctionDef):
            yield from public_definitions(child)


CACHED = PACKAGE / "calibration" / "__init__.py"  # XDG_CACHE_HOME says where a user's caches are, nothing else


def test_files_are_documented_and_plain():
    for path, tree in TREES.items():
        text = path.read_text()
        assert ast.get_docstring(tree), f"{path} does not say what it is for"
        assert not [node.name for node in public_definitions(tree) if not ast.get_docstring(node)], path
        assert "utils" not in path.name and not re.search(r"\b(TODO|FIXME|XXX)\b", text), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type and ast.unparse(node.type) not in ("Exception", "BaseException"), path
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("os.environ", "os.getenv")):
                assert path == CACHED and text.count("os.environ") == 1, f"{path}: behaviour hangs on the environment"


HOT = {"ops", "cache", "kernels", "policies"}
SYNCS = {"item", "tolist", "cpu", "nonzero", "numpy"}


def test_no_host_sync_on_the_hot_path():
    for path in (path for path in FILES if room(module_name(path)) in HOT):
        calls = [node.func for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
        assert not SYNCS & {call.attr for call in calls if isinstance(call, ast.Attribute)}, path


def test_absent_tensors_of_a_kernel_stand_alone():
    """Triton 3.6 has no None in a tuple, nor can a function return an argument that is None by its name, nor a constant
    (`triton.constexpr_function` can)."""
    nodes = [n for path in sorted((PACKAGE / "kernels").glob("*.py")) for n in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    returns = {f.name: [n.value for n in ast.walk(f) if isinstance(n, ast.Return)] for f in functions}
    assert not [name for name, some in returns.items() for one in some if one and "tl.constexpr(" in ast.unparse(one)]
    maybe = {name for name, values in returns.items() if None in values and any(values)}  # a bare return and others
    assert {"_scales_of", "_biases"} <= maybe
    inside = [n for node in nodes if isinstance(node, ast.Tuple) for n in node.elts if isinstance(n, ast.Call)]
    assert not maybe & {ast.unparse(call.func) for call in inside}
    for branch in (node for node in nodes if isinstance(node, ast.If)):
        kept = {ast.unparse(n.value) for n in branch.body if isinstance(n, ast.Return) and n.value}
        assert not {f"{name} is None" for name in kept} & set(ast.unparse(branch.test).split(" or ")), kept


@pytest.mark.parametrize("policy", ALL, ids=lambda p: p.name)
def test_every_policy_names_its_source(policy):
    doc = inspect.getdoc(policy)
    assert "Source:" in doc
    for field in dataclasses.fields(policy):
        name = field.name
        assert re.search(rf"\b{name}:", doc), f"{policy.name} does not document {name}"
    hash(policy())  # frozen


def test_the_docs_have_a_row_for_every_policy():
    rows = re.findall(r'^\| `"([\w-]+)"` \| `(\w+)` \|', (ROOT / "docs" / "policies.md").read_text(), re.M)
    assert sorted(rows) == sorted((policy.name, policy.__name__) for policy in ALL)


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


def test_importing_changes_no_global_state(tmp_path):
    code, said, errors = run(IMPORT_PROBE, tmp_path)
    assert code == 0, errors
    assert said.split() == ["False", "False"], "plots and progress are imported where they are used"


def test_every_seeded_bug_has_its_place():
    """A bug whose code has moved would be seeded nowhere; its tests are there, too."""
    assert len(set(mutations.MUTATIONS)) == len(mutations.MUTATIONS)
    for one in mutations.MUTATIONS:
        assert (PACKAGE / one.file).read_text().count(one.original) == 1, one.what
        for test in one.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (PACKAGE.parent / file).read_text() or not name, test
