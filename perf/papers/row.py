"""One figure or table of a paper: what it says, how it is measured here, and what the numbers make of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import yaml

VERDICTS = {True: "agrees", False: "differs", None: "cannot be tested here"}
PAPERS = {
    "VECTOR": "arXiv:2605.23258",
    "ManifoldKV": "arXiv:2602.08343",
    "KeyDiff": "arXiv:2504.15364",
    "MomentKV": "arXiv:2606.01563",
    "Compactor": "arXiv:2507.08143",
}


@dataclass(frozen=True)
class Judged:
    """What a row's numbers say.

    Attributes: agrees: whether the paper's statement holds; None if that cannot be tested.  facts: what the row's words
        and its table name besides its numbers.
    """

    agrees: bool | None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the page.

    Attributes:
        name: of its JSON and picture.  paper, place: where the number stands.  claim: what the paper reports.
        setting: the paper's settings and what had to differ.
        here: the number to compare, in words.  evidence: sentences that say why, with measured numbers.  table: beside
            what the paper has.
        measure: Bench -> numbers that JSON can hold.  judge: those numbers -> `Judged`.  draw: axes and numbers.
        panels: of the picture, side by side.  why: of a row that cannot be tried.
        keeps, texts, caches, published: see rows.yaml.
    """

    paper: str
    place: str
    claim: str
    name: str = ""
    setting: str = ""
    here: str = ""
    evidence: str = ""
    table: str = ""
    measure: Callable[[Any], dict[str, Any]] | None = None
    judge: Callable[[dict[str, Any]], Judged] | None = None
    draw: Callable[[Any, dict[str, Any]], None] | None = None
    panels: int = 1
    why: str = ""
    keeps: Sequence[float] = ()
    texts: int = 6
    caches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: Mapping[Any, Any] = field(default_factory=dict)


TOLD = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"))  # the rows, in order
PLAIN = {row["name"]: Row(**row) for row in TOLD if "name" in row}  # without functions


def listed(*modules: ModuleType) -> tuple[Row, ...]:
    """The rows of rows.yaml, in the order of the page, with the functions of modules that are named after them:
    `measure_NAME`, `judge_NAME` and, if it has a picture, `draw_NAME`.
    """
    known = {name: one for module in modules for name, one in vars(module).items()}
    ways = [{way: known.get(f"{way}_{row.get('name')}") for way in ("measure", "judge", "draw")} for row in TOLD]
    return tuple(Row(**row, **way) for row, way in zip(TOLD, ways))


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None where none is."""
    known = [value for value in values if value is not None and value == value]
    return fmean(known) if known else None


def error(values: Iterable[float | None]) -> float | None:
    """Standard error of the mean; None for fewer than two values."""
    known = [value for value in values if value is not None and value == value]
    return stdev(known) / len(known) ** 0.5 if len(known) > 1 else None


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, unit: str = " %") -> str:
    return "-" if value is None else f"{100 * value:.0f}{unit}"


FILTERS = {"mean": mean, "number": number, "percent": percent, "form": format}
