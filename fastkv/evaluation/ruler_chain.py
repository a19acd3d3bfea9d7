"""RULER's variable tracking: a value handed from variable to variable through a long text (arXiv:2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import repeat
from string import ascii_uppercase

from .haystack import NOISE, Units, scatter
from .ruler_sample import Draft, Request, Sample

TOKENS = 30  # of the answer
HOPS = 4
LETTERS = 5  # of a variable's name
EXAMPLE_UNITS = 5  # lines of noise in the worked example

TASK = (
    "The text below sets variables, each to a number or to the value of another variable. Follow the assignments and "
    "find every variable that ends up with the number asked for."
)


def tracking(request: Request) -> Draft:
    """One chain of `HOPS` hops in noise, its assignments in order at random depths, after a short worked example."""
    rng = request.rng()
    names = _names(rng, 2 * (HOPS + 1))
    shown, asked = names[: HOPS + 1], names[HOPS + 1 :]
    shown_value, value = rng.sample(range(10_000, 100_000), 2)
    filler = Units(repeat(NOISE))
    shown_text = scatter(filler.take(EXAMPLE_UNITS), _statements(shown, shown_value), _depths(rng))
    example = "\n".join([TASK, "", *shown_text, "", f"{_question(shown_value)} {', '.join(shown)}."])
    statements, depths, question = _statements(asked, value), _depths(rng), _question(value)

    def draft(units: int) -> Sample:
        context = "\n".join(scatter(filler.take(units), statements, depths))
        return Sample(
            task=request.task,
            prompt=f"{example}\n\n{TASK}\n\n{context}\n\n{question}",
            context=context,
            question=question,
            answers=tuple(asked),
            tokens_to_generate=TOKENS,
            metadata={"units": units, "needles": tuple(statements), "depths": tuple(depths)},
        )

    return draft


def _names(rng: random.Random, number: int) -> list[str]:
    """Different names of capital letters."""
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        drawn["".join(rng.choices(ascii_uppercase, k=LETTERS))] = None
    return list(drawn)


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
