"""What README, changelog and docs point to is there: files, modules, make targets and commands."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import fastkv
from fastkv.lab.cli import build_parser

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "perf/README.md")
PAGES = [*[ROOT / name for name in TOP], *sorted(ROOT.glob("docs/*.md"))]
OURS = ("fastkv", "perf", "tests", "tools")

FILES = {path for name in OURS for path in (ROOT / name).rglob("*.py")}


def code(text):
    """Everything in backticks: blocks, then words within lines."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    return blocks + re.findall(r"`([^`\n]+)`", prose)


def links(text):
    """Targets of links and pictures that are no addresses, without anchors."""
    prose = re.sub(r"^```\w*\n.*?^```|`[^`\n]+`(?!\])", "", text, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


def paths(text):
    """Paths within the repository, a star for what stands for several."""
    found = re.findall(rf"(?<![\w/.-])((?:{'|'.join((*OURS, 'docs'))})/[\w./*<>-]*)", text)
    return [re.sub("<.*?>", "*", path.rstrip(".")) for path in found]


def commands(pattern, text):
    """What commands ask for: the group of the pattern, in backticks."""
    return {word for part in code(text) for word in re.findall(pattern, part, re.M)}


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_what_a_page_points_to_is_there(path):
    """Links lead to files, because a site has no page for a folder. What is used of fastkv is there after `import
    fastkv` alone, but for modules that are imported by themselves."""
    text = path.read_text()
    assert not [target for target in links(text) if not (path.parent / target).is_file()]
    assert not [name for name in paths(text) if not list(ROOT.glob(name.rstrip("/")))]
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert not commands(r"\bmake ([a-z][a-z-]*)", text) - set(rules)
    run = [name.split(".") for name in commands(r"python -m ([\w.]+)", text)]
    places = [ROOT.joinpath(*names) for names in run if names[0] in OURS]
    assert not [place for place in places if not {place.with_suffix(".py"), place / "__main__.py"} & FILES]
    (actions,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    assert not commands(r"^fastkv ([a-z]+)", text) - set(actions.choices)
    assert set(re.findall(r"(?<![\w/.[-])fastkv\.([A-Za-z_]\w*)", text)) <= {*fastkv.__all__, "lab", "pipeline"}


def test_the_layout_names_what_is_there():
    """Every module and folder at the top of the package has a line, and what is indented below a folder is in it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = next(part for part in code(page) if part.startswith("fastkv/__init__.py"))
    named, folder = set(), ROOT
    for line in block.splitlines():
        first = re.match(r"( *)([^\s,]+(?:, [^\s,]+)*)", line)
        for name in first[2].split(", "):
            place = (folder if first[1] else ROOT) / name
            assert place.exists(), line
            named.add(place)
        folder = folder if first[1] else place
    top = [place for place in (ROOT / "fastkv").iterdir() if place.suffix == ".py" or (place / "__init__.py").exists()]
    assert not set(top) - named


def test_architecture_names_what_is_there():
    """Names in backticks that look like ours are classes, functions, methods or modules of the package."""
    known = {"fastkv"}
    for file in ROOT.joinpath("fastkv").rglob("*.py"):
        known |= {file.stem, file.parent.name}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                known.add(node.name)
            if isinstance(node, (ast.Name, ast.Attribute, ast.arg)):
                known.add(getattr(node, "id", None) or getattr(node, "attr", None) or node.arg)
    text = (ROOT / "docs" / "architecture.md").read_text()
    words = [word for part in code(text) if "\n" not in part for word in re.findall(r"\b[A-Z]\w*[a-z]\w*\b", part)]
    assert not set(words) - known


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_readme_counts_the_models_that_were_tested():
    page = (ROOT / "docs" / "models.md").read_text()
    number = len(re.findall(r"^\| `", page.partition("\n## Tested\n")[2].partition("\n## ")[0], re.M))
    version = re.search(r"transformers (\d+\.\d+)", page)[1]
    assert f"{number} model types of transformers {version} work" in (ROOT / "README.md").read_text()


def test_the_site_has_every_page():
    named = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert not [name for name in named if not (ROOT / name).is_file()]
    others = (path for folder in ("fastkv", "perf") for path in (ROOT / folder).rglob("*.md"))
    assert {str(path.relative_to(ROOT)) for path in (*PAGES, *others)} == set(named)


VERSIONS = 'make test-matrix ARGS="--only triton-3.6.0 --only triton-3.9.0 --files 90"'
WHEEL = 'test "dist/fastkv_attn-${GITHUB_REF_NAME#v}-py3-none-any.whl"'
RUN = {"ci": [".ci/run", VERSIONS], "release": ["make smoke", WHEEL]}
ACTIONS = {"checkout@v4", "setup-python@v5", "upload-artifact@v4", "download-artifact@v4"}


@pytest.mark.parametrize("name", RUN)
def test_workflows_run_what_a_developer_runs(name):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"} and True in workflow  # YAML's name for "on"
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"].partition(" =")[0] for step in steps if "run" in step] == RUN[name]
    used = {step["uses"] for step in steps if "uses" in step}
    assert used <= {"pypa/gh-action-pypi-publish@release/v1", *(f"actions/{action}" for action in ACTIONS)}
