"""The lists that results are written to: `families.json` of the package, which makes `TESTED`, and docs/models.md."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fastkv.integrations import transformers as engine

from .checks import CHECKS
from .examine import FAILS, REFUSED, UNBUILT, WORKS

ROOT = Path(__file__).parent.parent.parent
PAGE, FILE = ROOT / "docs" / "models.md", engine.FOUND
ALL = "all features"
KINDS = {
    "FastKVLayer": "full attention", "HybridLayer": "full attention", "DynamicSlidingWindowLayer": "sliding windows",
    "WindowLayer": "sliding windows", "DynamicChunkedLayer": "chunked attention",
    "LinearAttentionLayer": "linear attention", "DummyLayer": "layers without a cache",
    "DynamicLayer": "attention to images",
}  # fmt: skip
TESTED = """## Tested

Every type in the table passed all of these checks, except for those in its last column:

{checks}
| model type | compressed | left to transformers | limits |
|---|---|---|---|
{works}
"""
REASONS = """## {title}

{words}

| model type | {what} |
|---|---|
{rows}
"""
REFUSES = "`fastkv.patch` refuses these types with this reason and leaves the model as it was."
UNTRIED = "No tiny model of these types could be built and run."


@dataclass
class Row:
    """One model type with its variants."""

    name: str
    results: list

    @property
    def status(self):
        """Of the type as it usually is, unless a variant fails."""
        return FAILS if any(result.status == FAILS for result in self.results) else self.results[0].status

    @property
    def reason(self):
        return next(result.reason for result in self.results if result.status == self.status)

    @property
    def limits(self):
        """What is refused or was not checked, by a word for it; a variant that is refused counts."""
        usual, *variants = self.results
        return usual.limits | {one.name.partition(":")[2]: one.reason for one in variants if one.status != WORKS}

    @property
    def summary(self):
        """For `TESTED`."""
        return summary(self.limits)


def summary(limits):
    """What `TESTED` says of a type with these limits."""
    return f"{ALL} but {', '.join(limits)}" if limits else ALL


def rows(results):
    """One row per model type, from results by name."""
    types = {}
    for name in sorted(results):
        types.setdefault(name.partition(":")[0], []).append(results[name])
    return [Row(name, found) for name, found in types.items() if ":" not in found[0].name]


def cell(text):
    """Text within a table: model types and names of code stay as they are."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def page(found, before):
    """docs/models.md for these rows, of which the words before the tables stay as they were."""
    groups = {status: [row for row in found if row.status == status] for status in (WORKS, REFUSED, FAILS, UNBUILT)}
    works = ""
    for row in groups[WORKS]:
        kinds = dict.fromkeys(KINDS.get(kind, kind) for result in row.results for kind in result.layers)
        left = ", ".join(kind for kind in kinds if kind != KINDS["FastKVLayer"]) or "nothing"
        limits = "<br>".join(cell(f"{what}: {why}") for what, why in row.limits.items()) or "none"
        works += f"| `{row.name}` | {KINDS['FastKVLayer']} | {left} | {limits} |\n"

    def reasons(status, title, words, what="why"):
        listed = "".join(f"| `{row.name}` | {cell(row.reason)} |\n" for row in groups[status])
        return REASONS.format(title=title, words=words, what=what, rows=listed) if listed else ""

    checks = "".join(f"- `{name}`: {check.__doc__.splitlines()[0]}\n" for name, check in CHECKS.items())
    version = next(row.results[0].transformers for row in found)
    words = re.sub(r"transformers \S+ that", f"transformers {version} that", before.partition("## Tested")[0])
    text = words + TESTED.format(checks=checks, works=works) + reasons(REFUSED, "Refused", REFUSES)
    text += reasons(FAILS, "Wrong or failing", "Not to be used with fastkv.", "what failed")
    text += reasons(UNBUILT, "Not tried", UNTRIED)
    return text.rstrip() + "\n"


def tested(found):
    """What `families.json` holds for these rows: transformers, and names of types by what works."""
    groups = {}
    for row in found:
        if row.status == WORKS:
            groups.setdefault(row.summary, []).append(row.name)
    types = {what: " ".join(names) for what, names in sorted(groups.items())}
    return {"transformers": next(row.results[0].transformers for row in found), "types": types}


def write(results):
    """Write both lists, from results by name."""
    found = rows(results)
    PAGE.write_text(page(found, PAGE.read_text()))
    FILE.write_text(json.dumps(tested(found), indent=2) + "\n")


def table(text, title):
    """Rows of the table below a heading of the page: {model type: its cells}."""
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("| `")]
    return {first.strip().strip("`"): [one.strip() for one in rest] for first, *rest in cells}
