"""Text to hide things in: one line over and over, generated prose, or the user's own files; sentence by sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Generic, TypeVar

from ..demo.tasks import ADJECTIVES, ADVERBS, INTRANSITIVE, NOUNS, PLACES, PLURALS, PREPOSITIONS, TIMES, TRANSITIVE
from ..errors import FastKVError

T = TypeVar("T")

NOISE = "The kettle is warm. The window is open. The street is quiet. Off we walk. Nobody waits."
LONGEST = 60  # words of one unit of a file; tables and code have no sentences

WORDS = {
    "adjective": ADJECTIVES,
    "adverb": ADVERBS,
    "did": TRANSITIVE,
    "moved": INTRANSITIVE,
    "near": PREPOSITIONS,
    "noun": NOUNS,
    "place": PLACES,
    "plural": PLURALS,
    "time": TIMES,
}
SENTENCES = (
    "It took me years to see why the {noun} {did} the {adjective} {noun}.",
    "Most {plural} that we meet in life are neither {adjective} nor {adjective}.",
    "When the {noun} {moved} {near} the {place}, people began to talk about the {noun} instead.",
    "My first idea was to ask the {noun}, but the {noun} {moved} {adverb}.",
    "What makes the {noun} so {adjective} is that nobody ever {did} it in the {time}.",
    "There is a difference between {adjective} {plural} and {plural} that only look {adjective}.",
    "One {time} the {adjective} {noun} {did} some {plural} {near} the {place}.",
    "You could say the same of {plural}, and of every {adjective} {noun} too.",
    "I used to think that {plural} were {adjective}, until the {noun} {did} the {noun}.",
    "The {noun} {moved}, and {adverb} the whole {place} was {adjective} again.",
    "If the {plural} never {moved} {near} the {noun}, this would be a {adjective} story.",
    "People who work with {plural} learn to be {adjective}, which is harder than it sounds.",
    "The {noun} {near} the {noun} taught me more about {plural} than any {noun} did.",
    "So the question is not whether the {noun} was {adjective}, but who {did} it.",
)


class Units(Generic[T]):
    """The items of an iterator, made when they are needed and kept, so that a longer text starts as the shorter one."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._made: list[T] = []

    def take(self, number: int) -> list[T]:
        """The first `number` items."""
        self._made += islice(self._source, max(0, number - len(self._made)))
        return self._made[:number]


def prose(rng: random.Random) -> Iterator[str]:
    """English sentences without end, each makes sense and all of them together do not; no digits, no hyphens."""
    while True:
        yield re.sub(r"\{(\w+)\}", lambda slot: rng.choice(WORDS[slot[1]]), rng.choice(SENTENCES))


def from_files(source: str | Path, rng: random.Random) -> Iterator[str]:
    """The sentences of a file, or of the .txt and .md files of a folder, over and over from a random one on.

    Raises: FastKVError if nothing can be read there, or no words.
    """
    sentences = _sentences(str(source))
    start = rng.randrange(len(sentences))
    return chain(sentences[start:], cycle(sentences))


def scatter(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`units` with every needle behind round(depth * len(units)) of them; equally deep needles keep their order.

    Args: depths: one for each needle, 0 for the start and 1 for the end of the text.
    """
    lines = list(units)
    placed = sorted(((round(depth * len(lines)), needle) for depth, needle in zip(depths, needles)), key=lambda p: p[0])
    for place, needle in reversed(placed):
        lines.insert(place, needle)
    return lines


@lru_cache(maxsize=4)
def _sentences(source: str) -> tuple[str, ...]:
    from ..calibration.corpus import documents

    found = []
    for text in documents(source, length=1024):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            words = sentence.split()
            found += [" ".join(words[at : at + LONGEST]) for at in range(0, len(words), LONGEST)]
    if not found:
        raise FastKVError(f"expected text in {source}, got files without words; choose others, or the generated text")
    return tuple(found)
