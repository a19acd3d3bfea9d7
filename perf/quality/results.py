"""Result files, the check that caches hold equal bytes, and means with standard errors over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkv import FastKVError

from ..engine import MODELS
from .cases import FULL

# Two-sided 95 % quantiles of Student's t by degrees of freedom; the last one serves for more.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error (None for one seed)."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of one number for each seed."""
        number = len(values)
        mean = sum(values) / number
        if number == 1:
            return cls(mean, None)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (number - 1))
        return cls(mean, spread / math.sqrt(number))

    def show(self, form: str = "{:.2f}", times: float = 1) -> str:
        """The number as `mean ± standard error`."""
        tail = "" if self.error is None else f" ± {form.format(times * self.error)}"
        return form.format(times * self.value) + tail

    @property
    def percent(self) -> str:
        """In percent."""
        return self.show("{:.0f}", 100)


@dataclass(frozen=True)
class Row:
    """One measured cache; numbers by seed.

    Attributes:
        name: in tables.  policy, read, tokens: of the case.  kept: tokens per KV head.  nbytes: per sequence.
        right, error: by task.  fidelity: error, own_error, kl and agreement.  extra: means that have no seeds.
    """

    name: str
    policy: str
    read: str
    tokens: int
    kept: float | None
    nbytes: int
    right: dict[str, list[float]]
    error: dict[str, list[float]]
    fidelity: dict[str, list[float]]
    extra: dict[str, float | None]

    @property
    def answers(self) -> list[float]:
        """Share of right answers of each seed, all tasks alike."""
        return [sum(seed) / len(seed) for seed in zip(*self.right.values())]

    @property
    def errors(self) -> list[float]:
        """Attention error of each seed while answering, all tasks alike."""
        return [sum(seed) / len(seed) for seed in zip(*self.error.values())]


@dataclass(frozen=True)
class Results:
    """All files of a folder.

    Attributes:
        settings: of all files.  versions: under which they were measured.  rows: by part, in the order of the plan.
        planned: name and tokens of the cases of each part.  refused: (part, name, tokens, reason).
    """

    settings: dict[str, Any]
    versions: list[dict[str, str]]
    rows: dict[str, list[Row]]
    planned: dict[str, list[tuple[str, int]]]
    refused: list[tuple[str, str, int, str]]

    def of(self, part: str, read: str | None = None, tokens: int | None = None) -> list[Row]:
        """Rows of a part, of one way of reading and one budget where given."""
        rows = self.rows.get(part, [])
        return [row for row in rows if (read in (None, row.read)) and (tokens in (None, row.tokens))]

    def complete(self, part: str, tokens: int) -> bool:
        """Whether all cases of a part at a budget were measured or refused, so that the best of them is known."""
        refused = sum((one, budget) == (part, tokens) for one, _, budget, _ in self.refused)
        planned = sum(budget == tokens for _, budget in self.planned.get(part, []))
        return 0 < planned == len(self.of(part, tokens=tokens)) + refused

    @property
    def full(self) -> Row | None:
        """The full cache."""
        return next(iter(self.rows.get(FULL, [])), None)


def load(folder: Path) -> Results:
    """Read every part.

    Raises: FastKVError if the caches of a budget do not hold equal bytes, or if files were made with other settings.
    """
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not files:
        raise FastKVError(f"{folder} has no results; measure some with python -m perf.quality")
    check_bytes(row for file in files.values() for row in file["rows"])
    settings = [file["settings"] for file in files.values()]
    other = next((one for one in settings if one != settings[0]), None)
    if other is not None:
        raise FastKVError(f"{folder} mixes results of {settings[0]} and {other}; measure all again with --fresh")
    rows, refused = {}, []
    for part, file in files.items():
        places = {json.dumps(case): place for place, case in enumerate(file["planned"])}
        found = sorted(file["rows"], key=lambda row: places[json.dumps(row["case"])])
        rows[part] = [to_row(row) for row in found if "refused" not in row]
        refused += [
            (part, row["case"]["name"], row["case"]["tokens"], row["refused"]) for row in found if "refused" in row
        ]
    versions = [one for file in files.values() for one in versions_of(file)]
    return Results(
        settings=settings[0],
        versions=[one for place, one in enumerate(versions) if one not in versions[:place]],
        rows=rows,
        planned={part: [(case["name"], case["tokens"]) for case in file["planned"]] for part, file in files.items()},
        refused=refused,
    )


def versions_of(file: dict[str, Any]) -> list[dict[str, str]]:
    """Under which the rows of a file were measured, models by the digests of their weights."""
    facts = file.get("environment", {})
    return file.get("versions") or [{name: facts[name] for name in VERSIONS if name in facts}]


def to_row(row: dict[str, Any]) -> Row:
    """A row of a file."""
    case, held = row["case"], row["bytes"]
    extra = {name: number for name, number in row.items() if name in EXTRA}
    return Row(
        name=case["name"],
        policy=case["policy"],
        read=case["read"],
        tokens=case["tokens"],
        kept=row.get("kept"),
        nbytes=held.get("stored") or held["total"],
        right=row.get("right", {}),
        error=row.get("error", {}),
        fidelity=row.get("by_seed", {}),
        extra=extra,
    )


VERSIONS = ("fastkv", "commit", "python", "torch", "transformers", *MODELS)
EXTRA = ("cosine", "mass", "estimated_mass", "gap", "perplexity_ratio")


def check_bytes(rows: Iterable[dict[str, Any]]) -> None:
    """Check that all caches of a budget were given the same bytes and hold them, up to one token per head.

    Args: rows: of files, with what `nbytes()` said of each cache without the parts that no budget changes.
    Raises: FastKVError naming the first that does not.
    """
    bounds: dict[int, int] = {}
    for row in rows:
        case = row["case"]
        if case["policy"] == FULL or "refused" in row:
            continue
        held, bound = row["bytes"], bounds.setdefault(case["tokens"], row["bytes"]["bound"])
        if held["bound"] != bound or not bound - held["token"] < held["stored"] <= bound:
            raise FastKVError(
                f"caches of {case['tokens']} tokens must hold more than {bound - held['token']} and at most {bound} "
                f"bytes, got {held['stored']} of {held['bound']} for {case['name']}; measure it again"
            )


def difference(one: Sequence[float], other: Sequence[float]) -> Mean:
    """Mean over seeds of one minus other; both saw the same texts."""
    return Mean.of([a - b for a, b in zip(one, other)])


def on_par(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the seeds cannot tell the two apart: a paired t-test at 95 %."""
    apart = difference(best, other)
    if apart.error is None:
        return apart.value == 0
    return abs(apart.value) <= STUDENT[min(len(best), len(STUDENT) + 1) - 2] * apart.error


def leaders(rows: Sequence[Row], numbers: str, *, smallest: bool = False) -> list[Row]:
    """The best row, and those that the seeds cannot tell from it, best first.

    numbers: "answers", or the name of a fidelity number.
    """
    ranked = ranking(rows, numbers, smallest=smallest)
    return [row for row in ranked if on_par(seeds(ranked[0], numbers), seeds(row, numbers))]


def ranking(rows: Sequence[Row], numbers: str, *, smallest: bool = False) -> list[Row]:
    """Rows by their mean, best first."""
    return sorted(rows, key=lambda row: Mean.of(seeds(row, numbers)).value, reverse=not smallest)


def seeds(row: Row, numbers: str) -> list[float]:
    """A number of each seed."""
    return row.answers if numbers == "answers" else row.fidelity[numbers]


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of ranks, equal numbers sharing the mean of theirs; None where one side is constant."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    a, b = ranks(one), ranks(other)
    middle = (len(a) - 1) / 2
    cross = sum((x - middle) * (y - middle) for x, y in zip(a, b))
    power = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return cross / power if power else None
