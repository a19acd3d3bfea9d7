"""The eleven tasks of RULER (arXiv:2404.06654) that need no data, written for any tokenizer and any length.

    from fastkv.lab import ruler

    sample = ruler.generate("niah_multikey_1", tokenizer, length=4096, seed=0, index=7)
    ruler.string_match_all(what_the_model_wrote, sample.answers)

Tasks, kinds of text, numbers and metrics are those of the benchmark; the wording is fastkv's own, so results compare
policies with each other, not with published tables. What they hide things in is one line over and over, generated
prose; as many of these units as fit the length.
"""

from __future__ import annotations

import heapq
import json
import random
import re
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count, islice, repeat
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any, TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from ..errors import FastKVError

T = TypeVar("T")

NOISE = "The kettle is warm. The window is open. The street is quiet. Off we walk. Nobody waits."
TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}  # of the answers, by the first part of a task's name

# Of which generated texts are made: names of things that are hidden, and the words and forms of sentences around them.
TOLD = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
SENTENCES: list[str] = TOLD.pop("sentences")
PROMPTS: dict[str, str] = TOLD.pop("prompts")  # what a model reads before and after a text
WORDS: dict[str, list[str]] = {name: words.split() for name, words in TOLD.items()}


def taken(source: Iterator[T]) -> Callable[[int], list[T]]:
    """Takes the first so many items, made when they are needed and kept: a longer text starts as the shorter one."""
    made: list[T] = []

    def take(number: int) -> list[T]:
        made.extend(islice(source, max(0, number - len(made))))
        return made[:number]

    return take


def prose(rng: random.Random) -> Iterator[str]:
    """English sentences without end, each makes sense and all of them together do not; no digits, no hyphens."""
    while True:
        yield re.sub(r"\{(\w+)\}", lambda slot: rng.choice(WORDS[slot[1]]), rng.choice(SENTENCES))


def scatter(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`units` with every needle behind round(depth * len(units)) of them; equally deep needles keep their order.
    Raises FastKVError for a depth that is no place in a text.
    """
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise FastKVError(f"the depth of a needle must be from 0 to 1, got {wrong[0]}; pass a share of the text")
    places = [(round(depth * len(units)), 0) for depth in depths] + [(place, 1) for place in range(len(units))]
    ordered = sorted(zip(places, [*needles, *units]), key=lambda placed: placed[0])
    return [line for _, line in ordered]


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

    def rng(self, purpose: str = "") -> random.Random:
        """Random numbers that depend on task, length, seed, index and purpose only."""
        return random.Random(f"{self.task}/{self.length}/{self.seed}/{self.index}/{purpose}")


@dataclass(frozen=True)
class Draft:
    """A prompt but for how much filler it has; `write` makes a context with so many units of it, and its metadata."""

    task: str
    before: str
    question: str
    answers: tuple[str, ...]
    write: Callable[[int], tuple[str, dict[str, Any]]]

    def __call__(self, units: int) -> Sample:
        """The sample with that many units."""
        context, metadata = self.write(units)
        prompt, tokens = f"{self.before}\n\n{context}\n\n{self.question}", TOKENS[self.task.partition("_")[0]]
        return Sample(self.task, prompt, context, self.question, self.answers, tokens, {"units": units, **metadata})


def hidden(
    filler: Iterator[str], between: str, needles: Sequence[str], depths: Sequence[float]
) -> Callable[[int], tuple[str, dict[str, Any]]]:
    """How to write a context of so many units of filler with the needles in it, and its metadata."""
    take, known = taken(filler), {"needles": tuple(needles), "depths": tuple(depths)}
    return lambda number: (between.join(scatter(take(number), needles, depths)), known)


def longest(draft: Callable[[int], Sample], tokenizer: Tokenizer, length: int, least: int = 1) -> Sample:
    """The sample with most filler, at least so many units, whose prompt and answer fit in `length` tokens."""
    count: Callable[[str], int] = tokenizer
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        count = lambda text: len(tokenizer(text, verbose=False).input_ids)  # noqa: E731

    def tokens(units: int) -> int:
        sample = draft(units)
        return count(sample.prompt) + sample.tokens_to_generate

    if tokens(least) > length:
        raise FastKVError(
            f"{draft(least).task} needs at least {tokens(least)} tokens with this tokenizer, got length {length}; "
            "choose a longer one"
        )
    most = 2 * least
    while tokens(most) <= length:
        if most > length:
            raise FastKVError(f"{most} filler units must have as many tokens, got fewer; check the tokenizer")
        most *= 2
    return draft(bisect_right(range(most), length, most // 2, key=tokens) - 1)


# The tasks.

CONTROL = re.compile(r"[\x00-\x1f]")
DEPTHS = 40  # places a needle may have, evenly from the start of the text to its end
HOPS = 4  # of variable tracking, from variable to variable
NAME = 5  # letters of a variable
EXAMPLE_UNITS = 5  # lines of noise in the worked example
COMMON = 10  # words that are asked for
SHORT = 4096  # tokens; a shorter list repeats its words less often
LETTERS = 6  # of a coded word
SHORTEST = 5  # letters of an English word of a list
TOKENS_PER_ENTRY = 2  # at least: a number and a word
ALPHA = 2.0  # of the zeta distribution: the word of rank k comes 1 / k^alpha as often as the first
ASKED = 3  # frequent words that are asked for
DOTS = "..."  # the word of rank 1, which does not count
FREQUENT_LEAST = 46  # words of a coded text; from here on the first five ranks are never equally frequent


# Retrieval: eight ways to hide numbers, and assignments that hand a value from variable to variable.


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
    """Needles at random depths, those asked for at `request.depth` if it is given; keys and values all differ."""
    kind, rng = KINDS[request.task], request.rng()
    keys = _different(kind.keys, rng, kind.num_keys)
    values = _different(kind.values, rng, kind.num_keys * kind.num_values)
    pairs = [(key, values[i * kind.num_values + j]) for i, key in enumerate(keys) for j in range(kind.num_values)]
    asked = keys[: kind.num_queries]
    answers = tuple(value for key, value in pairs if key in asked)
    needles = [_needle(kind, key, value) for key, value in pairs]
    depths = [place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), len(needles))]
    if request.depth is not None:
        depths = [request.depth if key in asked else depth for depth, (key, _) in zip(depths, pairs)]

    between = " " if kind.haystack == "essay" else "\n"
    told = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    what, verb = (kind.values, "are") if len(answers) > 1 else (kind.values.removesuffix("s"), "is")
    question = PROMPTS["niah question"].format(kind=what, names=told, verb=verb)
    task = PROMPTS["niah"].format(kind=kind.values)
    write = hidden(_filler(kind, request, {*keys, *values}), between, needles, depths)
    return Draft(request.task, task, question, answers, write)


def tracking(request: Request) -> Draft:
    """One chain of `HOPS` hops in noise, its assignments in order at random depths, after a short worked example."""
    rng = request.rng()
    names = _different("variables", rng, 2 * (HOPS + 1))
    shown, asked = names[: HOPS + 1], names[HOPS + 1 :]
    shown_value, value = rng.sample(range(10_000, 100_000), 2)
    shown_text = scatter([NOISE] * EXAMPLE_UNITS, _statements(shown, shown_value), _depths(rng))
    task, question = PROMPTS["vt"], partial(PROMPTS["vt question"].format, number=HOPS + 1)
    example = "\n".join([task, "", *shown_text, "", f"{question(value=shown_value)} {', '.join(shown)}."])
    write = hidden(repeat(NOISE), "\n", _statements(asked, value), _depths(rng))
    return Draft(request.task, f"{example}\n\n{task}", question(value=value), tuple(asked), write)


def _needle(kind: Kind, key: str, value: str) -> str:
    return PROMPTS["niah needle"].format(kind=kind.values.removesuffix("s"), key=key, value=value)


def _filler(kind: Kind, request: Request, taken: set[str]) -> Iterator[str]:
    rng = request.rng("filler")
    if kind.haystack == "noise":
        return repeat(NOISE)
    if kind.haystack == "needles":
        pairs = ((MAKE[kind.keys](rng), MAKE[kind.values](rng)) for _ in count())
        return (_needle(kind, *pair) for pair in pairs if not taken.intersection(pair))
    return prose(rng)


def _drawn(kind: str, rng: random.Random) -> Iterator[str]:
    """Different keys, values, variables or coded words without end."""
    taken: set[str] = set()
    while True:
        word = MAKE[kind](rng)
        if word not in taken:
            taken.add(word)
            yield word


def _different(kind: str, rng: random.Random, number: int) -> list[str]:
    return list(islice(_drawn(kind, rng), number))


def _either(rng: random.Random, one: str, other: str) -> str:
    return rng.choice((*WORDS[one], *WORDS[other]))


MAKE: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{_either(rng, 'adjectives', 'key_first')}-{_either(rng, 'nouns', 'key_second')}",
    "numbers": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "variables": lambda rng: "".join(rng.choices(ascii_uppercase, k=NAME)),
    "codes": lambda rng: "".join(rng.choices(ascii_lowercase, k=LETTERS)),
}


def _statements(names: Sequence[str], value: int) -> list[str]:
    """The first variable gets the value, every other one that of the variable before it."""
    return [f"SET {name} = {given}" for name, given in zip(names, [value, *names])]


def _depths(rng: random.Random) -> list[float]:
    return sorted(rng.random() for _ in range(HOPS + 1))


# Counting: the common words of a list, the frequent words of a coded text.


def common_words(request: Request) -> Draft:
    """A shuffled list of ten common words, 30 times each, and others, 3 times each, after a short worked example. Lists
    of less than `SHORT` tokens have them 6 times and once. The words are English, and random letters where those do not
    suffice; none is part of another, so that finding a word in an answer means that it was given.
    """
    rng = request.rng()
    often, seldom = (30, 3) if request.length >= SHORT else (6, 1)
    shown_often, shown_seldom, shown_others = (10, 3, 20) if request.length >= SHORT else (3, 1, 10)
    words = _vocabulary(rng, request.length // (TOKENS_PER_ENTRY * seldom))
    asked, shown, others = (list(islice(words, number)) for number in (COMMON, COMMON, shown_others))
    shown_list = _numbered(_placed(shown, shown_often, rng) + _placed(others, shown_seldom, rng))
    task, question = PROMPTS["cwe"], PROMPTS["cwe question"].format(number=COMMON)
    example = f"{task}\n\n{shown_list}\n\n{question} {', '.join(shown)}."
    common = _placed(asked, often, rng)
    filler = taken((word, _placed([word], seldom, rng)) for word in words)

    def write(units: int) -> tuple[str, dict[str, Any]]:
        uncommon = dict(filler(units))
        context = _numbered(common + [one for placed in uncommon.values() for one in placed])
        return context, {"counts": {**dict.fromkeys(asked, often), **dict.fromkeys(uncommon, seldom)}}

    return Draft(request.task, f"{example}\n\n{task}", question, tuple(asked), write)


def frequent_words(request: Request) -> Draft:
    """Coded words in random order with frequencies of a zeta distribution; rank 1 are dots, the next three the answers.
    A unit is one word. There is a word for every 50 tokens of the length, as in RULER.
    """
    rng = request.rng()
    words = [DOTS, *islice(_drawn("codes", rng), max(ASKED + 1, request.length // 50))]
    ranks, order = taken(_zeta(len(words))), taken(iter(rng.random, None))

    def write(units: int) -> tuple[str, dict[str, Any]]:
        drawn = [words[rank] for rank in ranks(units)]
        context = " ".join(word for _, word in sorted(zip(order(units), drawn)))
        return context, {"counts": dict(Counter(drawn))}

    question = PROMPTS["fwe question"].format(dots=DOTS)
    return Draft(request.task, PROMPTS["fwe"], question, tuple(words[1 : ASKED + 1]), write)


def _placed(words: Sequence[str], times: int, rng: random.Random) -> list[tuple[float, str]]:
    """Every word so many times, with random places that do not change when more words come."""
    return [(rng.random(), word) for word in words for _ in range(times)]


def _numbered(placed: Sequence[tuple[float, str]]) -> str:
    return " ".join(f"{number}. {word}" for number, (_, word) in enumerate(sorted(placed), 1))


def _vocabulary(rng: random.Random, number: int) -> Iterator[str]:
    """Different words without end, none part of another; English and coded ones are mixed in the first `number`. A list
    takes no more than those, so its common words are no more English than the others: only counting finds them.
    """
    english = set(english_words())
    coded = (word for word in _drawn("codes", rng) if not english & {word[1:], word[:-1], word})
    pool = [*english_words(), *islice(coded, max(0, number - len(english)))]
    rng.shuffle(pool)
    return chain(pool, coded)


@cache
def english_words() -> tuple[str, ...]:
    """The English words that are long enough and have no other one in them."""
    kinds = "adjectives adverbs intransitive key_first key_second nouns places transitive".split()
    every = {word for kind in kinds for word in WORDS[kind]}
    words = sorted(word for word in every if len(word) >= SHORTEST)
    return tuple(word for word in words if not any(other in word for other in words if other != word))


def _zeta(words: int) -> Iterator[int]:
    """Ranks (from 0) one by one, so that at every time t rank k - 1 has come floor(t / k^alpha) times."""
    due = [((rank + 1) ** ALPHA, rank, 1) for rank in range(words)]
    while True:
        _, rank, times = due[0]
        yield rank
        heapq.heapreplace(due, ((times + 1) * (rank + 1) ** ALPHA, rank, times + 1))


# Marks, and all of it.


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """RULER's mark of what a model wrote: the share of the reference strings that occur in it, 0 to 1. Case does not
    matter, and control characters separate words.
    """
    text = CONTROL.sub("\n", prediction).lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


TASKS = {**dict.fromkeys(KINDS, niah), "vt": tracking, "cwe": common_words, "fwe": frequent_words}


def generate(
    task: str, tokenizer: Tokenizer, length: int, seed: int = 0, index: int = 0, *, depth: float | None = None
) -> Sample:
    """One sample of `task`; the same arguments always give the same one.

    The prompt and `tokens_to_generate` together have at most `length` tokens, and with one more unit of filler (a
    sentence, a line, a word and its repetitions, a document) they would have more.

    Args:
        task: one of `TASKS`.
        tokenizer: of the model, special tokens included as it adds them; or a function that counts a text's tokens.
        length: tokens.  seed, index: of the set of samples, and in it.
        depth: where to put the needles that are asked for, 0 to 1; at random places if None. For niah tasks.
    """
    if task not in TASKS:
        raise FastKVError(f"expected one of the tasks {', '.join(TASKS)}, got {task!r}; choose one of them")
    if depth is not None and task not in KINDS:
        raise FastKVError(f"{task} has no depth, got depth={depth!r}; leave it out or choose another task")
    draft = TASKS[task](Request(task, length, seed, index, depth))
    return longest(draft, tokenizer, length, FREQUENT_LEAST if task == "fwe" else 1)
