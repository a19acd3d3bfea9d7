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
from .cases import ALONE, FASTKV, GEOMETRIES, LANGUAGE, MOMENTKV, PROSE, READS, RIVALS, TRAINED, lengths

NEAR, SLACK = 0.05, 0.02  # so much above the best rival's KL, and above the error of more tokens
BEYOND = 2  # standard errors of a paired difference
HALF, WANTED, LONGER = 0.5, 2, 2.6  # of a second reading: KL for so many budgets, and its time over that of one


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
        """A number of each seed: "right", "kl", "excess" or "error"; None if it was not measured."""
        row = self.rows.get((place.geometry, place.tokens, name), {})
        found: list[float] | None = row.get(measure, {}).get(place.read)
        return found

    def places(self, measure: str = "error") -> list[Place]:
        """Where MomentKV was measured."""
        every = [Place(one, read, tokens) for one in GEOMETRIES for read in READS for tokens in lengths(one)]
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
    """Whether numbers are nowhere more than `slack` above the rival's."""
    missed = sorted((one for one in cells if one.above > slack), key=lambda one: -one.above)
    if not cells:
        return Judgement(sentence, [], 0, False, "not measured")
    worst = max(cells, key=lambda one: one.above)
    note = f"largest: {100 * worst.above:+.1f} % against {worst.rival} ({worst.place})"
    if missed:
        sure = sum(one.apart.value > BEYOND * (one.apart.error or 0) for one in missed)
        note += f"; {sure} of the {len(missed)} missed cells are above the rival by more than {BEYOND} standard errors"
    return Judgement(sentence, missed, len(cells), not missed, note)


def halved(sentence: str, cells: list[Comparison]) -> Judgement:
    """Whether numbers are at most half of the rival's for as many budgets as wanted, however the text is read."""
    missed = sorted((one for one in cells if one.above > HALF - 1), key=lambda one: -one.above)
    if not cells:
        return Judgement(sentence, [], 0, False, "not measured")
    each = ", ".join(f"{1 + one.above:.2f} x at L = {one.place.tokens}" for one in cells)
    return Judgement(sentence, missed, len(cells), len(cells) - len(missed) >= WANTED, each)


def not_longer(sentence: str, results: Results, name: str) -> Judgement:
    """Whether a second reading takes at most `LONGER` times the default's CPU time, all budgets together."""
    both = [[results.rows.get((LANGUAGE, tokens, one)) for one in (name, FASTKV)] for tokens in lengths(LANGUAGE)]
    seconds = [[row["prompt_seconds"] for row in pair if row] for pair in both if all(pair)]
    if not seconds:
        return Judgement(sentence, [], 0, False, "not measured")
    twice, once = map(sum, zip(*seconds))
    longer = twice / once
    return Judgement(sentence, [], 1, longer <= LONGER, f"{longer:.2f} x")


def not_lower(sentence: str, cells: list[Comparison]) -> Judgement:
    """Whether answers are nowhere lower by more than `BEYOND` standard errors of the paired difference."""

    def lacks(one: Comparison) -> float:
        return -one.apart.value - BEYOND * (one.apart.error or 0)

    missed = sorted((one for one in cells if lacks(one) > 1e-9), key=lambda one: -lacks(one))
    if not cells:
        return Judgement(sentence, [], 0, False, "not measured")
    low = min(cells, key=lambda one: one.apart.value)
    note = f"lowest: {low.apart.percent} points against {low.rival} ({low.place})"
    return Judgement(sentence, missed, len(cells), not missed, note)


def judged(results: Results, name: str = FASTKV) -> list[Judgement]:
    """What the default, or another contestant, must hold: first what users see, then what layers do."""

    def cells(measure: str, *rivals: str) -> list[Comparison]:
        return compare(results, measure, name, rivals)

    best = "the best of SnapKV, ManifoldKV, MomentKV and KeyDiff"
    return [
        not_lower(f"answers never below {best} beyond {BEYOND} standard errors", cells("right", *RIVALS)),
        at_most(f"KL at most {1 + NEAR:.2f} x that of {best}", cells("kl", *RIVALS), NEAR),
        at_most("error at most MomentKV's", cells("error", MOMENTKV), 0.0),
        at_most(
            f"error never more than {SLACK:.0%} above more tokens of the better selection",
            cells("error", *ALONE),
            SLACK,
        ),
    ]


def judged_twice(results: Results, name: str) -> list[Judgement]:
    """What a second reading of the prompt must hold against the default, on the language model."""
    kl = [one for one in compare(results, "kl", name, [FASTKV]) if one.place.read == PROSE]
    return [
        halved(f"{name}: KL at most half of the default's for {WANTED} budgets", kl),
        not_longer(f"{name}: CPU time of prompts at most {LONGER} x the default's", results, name),
    ]


def ratio(cells: Sequence[Comparison]) -> float | None:
    """Geometric mean of mine / theirs."""
    return math.exp(sum(math.log1p(one.above) for one in cells) / len(cells)) if cells else None
