"""Every sentence that the default must hold, answered from the verdict's results: met or missed, and by how much."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkv import FastKVError

from ..results import Mean, check_bytes, difference, versions_of
from .cases import (
    ALONE,
    BUNDLED,
    CONTESTANTS,
    FASTKV,
    GEOMETRIES,
    LATER,
    LENGTHS,
    MOMENTKV,
    READS,
    SHARES,
    TRAINED,
    WHOLE,
)

LOWER, SLACK, WANTED = 0.08, 0.02, 2  # so much below MomentKV for so many budgets, never so much above more tokens
SELECTIONS = {"snapkv": ALONE[0], "manifold": ALONE[1], "fastkv": ALONE[1]}  # the same choice, and nothing else


@dataclass(frozen=True)
class Place:
    """A cell of the verdict: a geometry, a way of reading, and the tokens that MomentKV keeps."""

    geometry: str
    read: str
    tokens: int

    def __str__(self) -> str:
        where = f", {READS[self.read]}" if self.geometry in TRAINED else ""
        return f"{self.geometry}{where}, L = {self.tokens}"


@dataclass(frozen=True)
class Results:
    """The file of the verdict.

    rows: by geometry, tokens and name; the full cache has 0 tokens.  planned: how many cases there should be.
    """

    settings: dict[str, Any]
    versions: list[dict[str, str]]
    rows: dict[tuple[str, int, str], dict[str, Any]]
    planned: int

    def names(self) -> list[str]:
        """Of the contestants, in the order of the file."""
        return list(dict.fromkeys(name for _, tokens, name in self.rows if tokens))

    def seeds(self, measure: str, place: Place, name: str) -> list[float] | None:
        """A number of each seed: "error", "kl" or "right"; None if it was not measured."""
        row = self.rows.get((place.geometry, place.tokens, name), {})
        found: list[float] | None = row.get(measure, {}).get(place.read)
        return found

    def places(self, measure: str = "error") -> list[Place]:
        """Where MomentKV was measured."""
        every = [Place(one, read, tokens) for one in GEOMETRIES for read in READS for tokens in LENGTHS]
        return [place for place in every if self.seeds(measure, place, MOMENTKV)]


@dataclass(frozen=True)
class Comparison:
    """Two caches in one cell. mine, theirs: over seeds; apart: mine minus theirs, paired."""

    place: Place
    rival: str
    mine: Mean
    theirs: Mean
    apart: Mean

    @property
    def above(self) -> float:
        """By what share mine is above theirs."""
        return self.mine.value / self.theirs.value - 1


@dataclass(frozen=True)
class Judgement:
    """One sentence. missed: the cells that break it, worst first; total: cells; met: whether it holds.

    note: by how much, in words.
    """

    sentence: str
    missed: list[Comparison]
    total: int
    met: bool
    note: str


def load(path: Path) -> Results:
    """Read the file.

    Raises: FastKVError if there is none, or if contestants of a geometry do not hold equal bytes.
    """
    if not path.is_file():
        raise FastKVError(f"{path} is missing; measure it with python -m perf.quality.verdict")
    file = json.loads(path.read_text())
    for geometry in GEOMETRIES:
        check_bytes(row for row in file["rows"] if row["case"]["geometry"] == geometry)
    rows = {(row["case"]["geometry"], row["case"]["tokens"], row["case"]["name"]): row for row in file["rows"]}
    return Results(file["settings"], versions_of(file), rows, len(file["planned"]))


def compare(results: Results, measure: str, name: str, rivals: Sequence[str]) -> list[Comparison]:
    """The contestant with the best of the rivals, in every cell where all were measured."""
    found, smallest = [], measure != "right"
    for place in results.places(measure):
        mine, others = results.seeds(measure, place, name), {one: results.seeds(measure, place, one) for one in rivals}
        known = {one: seeds for one, seeds in others.items() if seeds}
        if mine is None or len(known) < len(rivals):
            continue
        rival = (min if smallest else max)(known, key=lambda one: Mean.of(known[one]).value)
        theirs = known[rival]
        found.append(Comparison(place, rival, Mean.of(mine), Mean.of(theirs), difference(mine, theirs)))
    return found


def at_most(sentence: str, cells: list[Comparison], slack: float) -> Judgement:
    """Whether errors are nowhere more than `slack` above the rival's."""
    missed = sorted((one for one in cells if one.above > slack), key=lambda one: -one.above)
    if not cells:
        return Judgement(sentence, [], 0, False, "not measured")
    worst = max(cells, key=lambda one: one.above)
    note = f"largest: {100 * worst.above:+.1f} % against {worst.rival} ({worst.place})"
    return Judgement(sentence, missed, len(cells), not missed, note)


def well_below(sentence: str, cells: list[Comparison], share: float, wanted: int) -> Judgement:
    """Whether errors are at least `share` below the rival's for `wanted` budgets on the bundled model, however read."""
    mine = [one for one in cells if one.place.geometry == BUNDLED]
    notes, met = [], bool(mine)
    for read in (WHOLE, LATER):
        line = [one for one in mine if one.place.read == read]
        low = sum(one.above <= -share for one in line)
        met &= low >= wanted
        each = ", ".join(f"{100 * one.above:+.0f} %" for one in line)
        notes.append(f"{READS[read]}: {low} of {len(line)} budgets ({each})")
    missed = sorted((one for one in mine if one.above > -share), key=lambda one: -one.above)
    return Judgement(sentence, missed, len(mine), met, "; ".join(notes))


def not_lower(sentence: str, cells: list[Comparison]) -> Judgement:
    """Whether answers are nowhere lower by more than the standard error of the paired difference."""

    def lacks(one: Comparison) -> float:
        return -one.apart.value - (one.apart.error or 0)

    missed = sorted((one for one in cells if lacks(one) > 1e-9), key=lambda one: -lacks(one))
    if not cells:
        return Judgement(sentence, [], 0, False, "not measured")
    low = min(cells, key=lambda one: one.apart.value)
    note = f"lowest: {low.apart.percent} points against {low.rival} ({low.place})"
    return Judgement(sentence, missed, len(cells), not missed, note)


def judged(results: Results, name: str = FASTKV) -> list[Judgement]:
    """All sentences for a contestant."""
    policy = next((one.policy for one in (*CONTESTANTS, *SHARES) if one.name == name), "")
    same = SELECTIONS.get(policy) if name not in ALONE else None

    def cells(measure: str, *rivals: str) -> list[Comparison]:
        return compare(results, measure, name, rivals)

    found = [
        at_most("error at most MomentKV's, every geometry and L", cells("error", MOMENTKV), 0.0),
        well_below(
            f"error at least {LOWER:.0%} below MomentKV's for {WANTED} budgets on the bundled model",
            cells("error", MOMENTKV),
            LOWER,
            WANTED,
        ),
    ]
    if same:
        sentence = f"error never more than {SLACK:.0%} above more tokens of the same selection"
        found.append(at_most(sentence, cells("error", same), SLACK))
    return [
        *found,
        at_most(
            f"error never more than {SLACK:.0%} above more tokens of the better selection",
            cells("error", *ALONE),
            SLACK,
        ),
        not_lower("answers not below MomentKV's beyond the standard error", cells("right", MOMENTKV)),
        *([not_lower("answers not below more tokens of the same selection", cells("right", same))] if same else []),
        not_lower("answers not below more tokens of the better selection", cells("right", *ALONE)),
    ]


def ratio(cells: Sequence[Comparison]) -> float | None:
    """Geometric mean of mine / theirs."""
    return math.exp(sum(math.log1p(one.above) for one in cells) / len(cells)) if cells else None
