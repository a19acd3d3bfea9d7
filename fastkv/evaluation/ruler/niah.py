"""RULER's retrieval (arXiv:2404.06654, section 3): eight ways to hide numbers, and variable tracking.

Variable tracking hides the assignments that hand a value from variable to variable.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from string import ascii_uppercase
from typing import Any

from ...demo.tasks import ADJECTIVES, KEY_FIRST, KEY_SECOND, NOUNS
from ...errors import FastKVError
from .text import NOISE, Draft, Request, Units, drafted, from_files, prose, scatter

TOKENS, TRACKED_TOKENS = 128, 30  # of the answers
DEPTHS = 40  # places a needle may have, evenly from the start of the text to its end
HOPS = 4  # from variable to variable
LETTERS = 5  # of a variable's name
EXAMPLE_UNITS = 5  # lines of noise in the worked example

TRACKING = (
    "The text below sets variables, each to a number or to the value of another variable. Follow the assignments and "
    "find every variable that ends up with the number asked for."
)


@dataclass(frozen=True)
class Kind:
    """What a task hides, and in what.

    Attributes:
        haystack: "noise" (one line repeated), "essay" (prose) or "needles" (needles that nobody asks for).
        keys: "words" or "uuids".  values: "numbers" of 7 digits, or "uuids".
        num_keys: needles with different keys.  num_values: needles for each key.  num_queries: keys that are asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", values="uuids"),
    "niah_multikey_1": Kind("essay", num_keys=4),
    "niah_multikey_2": Kind("needles"),
    "niah_multikey_3": Kind("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Kind("essay", num_values=4),
    "niah_multiquery": Kind("essay", num_keys=4, num_queries=4),
}


def niah(request: Request) -> Draft:
    """Needles at random depths, those asked for at `request.depth` if it is given; keys and values are all different.

    Raises: FastKVError for a depth outside of 0 to 1.
    """
    kind, rng = KINDS[request.task], request.rng()
    keys = _different(kind.keys, rng, kind.num_keys)
    values = _different(kind.values, rng, kind.num_keys * kind.num_values)
    pairs = [(key, values[i * kind.num_values + j]) for i, key in enumerate(keys) for j in range(kind.num_values)]
    asked = keys[: kind.num_queries]
    answers = tuple(value for key, value in pairs if key in asked)
    needles = [_needle(kind, key, value) for key, value in pairs]
    depths = [place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), len(needles))]
    if request.depth is not None:
        if not 0 <= request.depth <= 1:
            raise FastKVError(
                f"the depth of a needle must be from 0 to 1, got {request.depth}; pass a share of the text"
            )
        depths = [request.depth if key in asked else depth for depth, (key, _) in zip(depths, pairs)]

    filler = Units(_filler(kind, request, {*keys, *values}))
    between = " " if kind.haystack == "essay" else "\n"
    told = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    what, verb = (kind.values, "are") if len(answers) > 1 else (kind.values.removesuffix("s"), "is")
    question = (
        f"Question: which secret {what} did the text give for {told}?\n"
        f"Answer: for {told}, the secret {what} in the text {verb}"
    )
    task = (
        f"The text below hides secret {kind.values}, each with the name it belongs to. Read it with care and remember "
        f"the {kind.values}, because a question about them follows."
    )

    def write(units: int) -> tuple[str, dict[str, Any]]:
        context = between.join(scatter(filler.take(units), needles, depths))
        return context, {"needles": tuple(needles), "depths": tuple(depths)}

    return drafted(request, write, before=task, question=question, answers=answers, tokens=TOKENS)


def tracking(request: Request) -> Draft:
    """One chain of `HOPS` hops in noise, its assignments in order at random depths, after a short worked example."""
    rng = request.rng()
    names = _different("variables", rng, 2 * (HOPS + 1))
    shown, asked = names[: HOPS + 1], names[HOPS + 1 :]
    shown_value, value = rng.sample(range(10_000, 100_000), 2)
    filler = Units(repeat(NOISE))
    shown_text = scatter(filler.take(EXAMPLE_UNITS), _statements(shown, shown_value), _depths(rng))
    example = "\n".join([TRACKING, "", *shown_text, "", f"{_question(shown_value)} {', '.join(shown)}."])
    statements, depths, question = _statements(asked, value), _depths(rng), _question(value)

    def write(units: int) -> tuple[str, dict[str, Any]]:
        context = "\n".join(scatter(filler.take(units), statements, depths))
        return context, {"needles": tuple(statements), "depths": tuple(depths)}

    before, answers = f"{example}\n\n{TRACKING}", tuple(asked)
    return drafted(request, write, before=before, question=question, answers=answers, tokens=TRACKED_TOKENS)


def _needle(kind: Kind, key: str, value: str) -> str:
    return f"One secret {kind.values.removesuffix('s')} of {key} is {value}."


def _filler(kind: Kind, request: Request, taken: set[str]) -> Iterator[str]:
    rng = request.rng("filler")
    if kind.haystack == "noise":
        return repeat(NOISE)
    if kind.haystack == "needles":
        return _distractors(kind, rng, taken)
    return prose(rng) if request.text is None else from_files(request.text, rng)


def _distractors(kind: Kind, rng: random.Random, taken: set[str]) -> Iterator[str]:
    """Needles without end whose keys and values are not `taken`."""
    while True:
        key, value = MAKE[kind.keys](rng), MAKE[kind.values](rng)
        if key not in taken and value not in taken:
            yield _needle(kind, key, value)


def _different(kind: str, rng: random.Random, number: int) -> list[str]:
    """`number` different keys, values or variables, in the order in which they were drawn."""
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        drawn[MAKE[kind](rng)] = None
    return list(drawn)


def _words(rng: random.Random) -> str:
    return f"{rng.choice((*ADJECTIVES, *KEY_FIRST))}-{rng.choice((*NOUNS, *KEY_SECOND))}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _variable(rng: random.Random) -> str:
    return "".join(rng.choices(ascii_uppercase, k=LETTERS))


MAKE = {"words": _words, "numbers": _number, "uuids": _uuid, "variables": _variable}


def _statements(names: Sequence[str], value: int) -> list[str]:
    """The first variable gets the value, every other one that of the variable before it."""
    return [f"SET {name} = {given}" for name, given in zip(names, [value, *names])]


def _depths(rng: random.Random) -> list[float]:
    return sorted(rng.random() for _ in range(HOPS + 1))


def _question(value: int) -> str:
    return (
        f"Question: which variables have the value {value} in the end?\n"
        f"Answer: in the text above, {HOPS + 1} variables get the value {value}, namely"
    )
