"""What a text of RULER is, what it hides things in, and how it gets its length: as many filler units as fit.

Filler is one line over and over, generated prose, or the user's own files, sentence by sentence.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import FastKVError
from .common import documents

T = TypeVar("T")

NOISE = "The kettle is warm. The window is open. The street is quiet. Off we walk. Nobody waits."
TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}  # of the answers, by the first part of a task's name
LONGEST = 60  # words of one unit of a file; tables and code have no sentences

# Of which generated texts are made: names of things that are hidden, and the words and forms of sentences around them.
TOLD = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
SENTENCES: list[str] = TOLD.pop("sentences")
WORDS: dict[str, list[str]] = {name: words.split() for name, words in TOLD.items()}


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


def essays(source: str | Path, rng: random.Random) -> Iterator[str]:
    """The sentences of a file, or of the .txt and .md files of a folder, over and over from a random one on."""
    sentences = _sentences(str(source))
    start = rng.randrange(len(sentences))
    return chain(sentences[start:], cycle(sentences))


def scatter(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`units` with every needle behind round(depth * len(units)) of them; equally deep needles keep their order.

    Raises: FastKVError for a depth that is no place in a text.
    """
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise FastKVError(f"the depth of a needle must be from 0 to 1, got {wrong[0]}; pass a share of the text")
    places = [(round(depth * len(units)), 0) for depth in depths] + [(place, 1) for place in range(len(units))]
    ordered = sorted(zip(places, [*needles, *units]), key=lambda placed: placed[0])
    return [line for _, line in ordered]


@lru_cache(maxsize=4)
def _sentences(source: str) -> tuple[str, ...]:
    found = []
    for text in documents(source):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            words = sentence.split()
            found += [" ".join(words[at : at + LONGEST]) for at in range(0, len(words), LONGEST)]
    if not found:
        raise FastKVError(f"expected text in {source}, got files without words; choose others, or the generated text")
    return tuple(found)


Tokenizer: TypeAlias = Callable[[str], int] | PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One prompt and what its answer must contain.

    Attributes:
        task: its name.  prompt: what the model reads; ends with `question`.
        context: the part of the prompt in which the answers are, without instructions and worked example.
        question: the last part of the prompt, with the words that lead to the answer.
        answers: reference strings.  tokens_to_generate: room that was left for the answer, in tokens.
        metadata: what the text was made of: `units` of filler, and the `needles` and their `depths` (0 to 1), or the
            `counts` of words.
    """

    task: str
    prompt: str
    context: str
    question: str
    answers: tuple[str, ...]
    tokens_to_generate: int
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The sample that is wanted: arguments of `ruler.generate`."""

    task: str
    length: int
    seed: int
    index: int
    depth: float | None = None
    text: str | Path | None = None

    def rng(self, purpose: str = "") -> random.Random:
        """Random numbers that depend on task, length, seed, index and purpose only."""
        return random.Random(f"{self.task}/{self.length}/{self.seed}/{self.index}/{purpose}")


Writer: TypeAlias = Callable[[int], tuple[str, dict[str, Any]]]  # the context with that many filler units, metadata
Draft: TypeAlias = Callable[[int], Sample]  # the sample with that many filler units


def hidden(filler: Units[str], between: str, needles: Sequence[str], depths: Sequence[float]) -> Writer:
    """How to write a context of so many units of filler with the needles in it, and its metadata."""
    known = {"needles": tuple(needles), "depths": tuple(depths)}
    return lambda units: (between.join(scatter(filler.take(units), needles, depths)), known)


def drafted(request: Request, write: Writer, *, before: str, question: str, answers: tuple[str, ...]) -> Draft:
    """How to make the sample from what `write` makes of a number of units: the context and its metadata."""
    tokens = TOKENS[request.task.partition("_")[0]]

    def draft(units: int) -> Sample:
        context, metadata = write(units)
        prompt = f"{before}\n\n{context}\n\n{question}"
        return Sample(request.task, prompt, context, question, answers, tokens, {"units": units, **metadata})

    return draft


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """How many tokens a model reads for a text: start token and the like included."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return lambda text: len(tokenizer(text, verbose=False).input_ids)
    return tokenizer


def longest(draft: Draft, tokenizer: Tokenizer, length: int, least: int = 1) -> Sample:
    """The sample with most filler whose prompt and answer fit in `length` tokens; one unit more would not fit.

    Doubles the number of units, then closes in by linear interpolation, because texts grow nearly linearly.
    """
    count, low, best = counter(tokenizer), least, draft(least)
    room, low_tokens = length - best.tokens_to_generate, count(best.prompt)
    if low_tokens > room:
        raise FastKVError(
            f"{best.task} needs at least {low_tokens + best.tokens_to_generate} tokens with this tokenizer, got length "
            f"{length}; choose a longer one"
        )
    high = high_tokens = 0  # not yet known
    while high - low != 1:
        if not high:
            middle = 2 * low
        else:
            share = (room - low_tokens) / (high_tokens - low_tokens)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        sample = draft(middle)
        tokens = count(sample.prompt)
        if tokens > room:
            high, high_tokens = middle, tokens
        elif middle > room:
            raise FastKVError(f"{middle} filler units must have as many tokens, got {tokens}; check the tokenizer")
        else:
            low, low_tokens, best = middle, tokens, sample
    return best
