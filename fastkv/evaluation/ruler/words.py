"""RULER's two counting tasks: the common words of a list, the frequent words of a coded text (arXiv:2404.06654)."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice
from string import ascii_lowercase
from typing import Any

from ...demo.tasks import ADJECTIVES, ADVERBS, INTRANSITIVE, KEY_FIRST, KEY_SECOND, NOUNS, PLACES, TRANSITIVE
from .text import Draft, Request, Units, drafted

COMMON_TOKENS, FREQUENT_TOKENS = 120, 50  # of the answers
COMMON = 10  # words that are asked for
SHORT = 4096  # tokens; a shorter list repeats its words less often
LETTERS = 6  # of a coded word
SHORTEST = 5  # letters of an English word of a list
TOKENS_PER_ENTRY = 2  # at least: a number and a word
ALPHA = 2.0  # of the zeta distribution: the word of rank k comes 1 / k^alpha as often as the first
ASKED = 3  # frequent words that are asked for
DOTS = "..."  # the word of rank 1, which does not count
FREQUENT_LEAST = 46  # words; from here on the first five ranks are never equally frequent

COMMON_TASK = (
    "Below is a numbered list of words. Some words are in it many times, most only a few times. Remember those that "
    "are in the list most often."
)
COMMON_QUESTION = (
    f"Question: which {COMMON} words are in the list most often?\nAnswer: the {COMMON} words that are in the list most "
    "often are"
)
FREQUENT_TASK = (
    "Below is a text in a code of made-up words. Count how often each word is in it, and remember the three most "
    "frequent ones."
)
FREQUENT_QUESTION = (
    f"Question: which three coded words are the most frequent? Give only the words; the dots {DOTS} are no word.\n"
    "Answer: the three most frequent words of the coded text are"
)


def common_words(request: Request) -> Draft:
    """A shuffled list of ten common words, 30 times each, and others, 3 times each, after a short worked example.

    Lists of less than `SHORT` tokens have them 6 times and once. The words are English, and random letters where those
    do not suffice; none is part of another, so that finding a word in an answer means that it was given.
    """
    rng = request.rng()
    often, seldom = (30, 3) if request.length >= SHORT else (6, 1)
    shown_often, shown_seldom, shown_others = (10, 3, 20) if request.length >= SHORT else (3, 1, 10)
    words = _vocabulary(rng, request.length // (TOKENS_PER_ENTRY * seldom))
    asked, shown, others = (list(islice(words, number)) for number in (COMMON, COMMON, shown_others))
    shown_list = _numbered(_placed(shown, shown_often, rng) + _placed(others, shown_seldom, rng))
    example = f"{COMMON_TASK}\n\n{shown_list}\n\n{COMMON_QUESTION} {', '.join(shown)}."
    common = _placed(asked, often, rng)
    filler = Units((word, _placed([word], seldom, rng)) for word in words)

    def write(units: int) -> tuple[str, dict[str, Any]]:
        uncommon = dict(filler.take(units))
        context = _numbered(common + [one for placed in uncommon.values() for one in placed])
        return context, {"counts": {**dict.fromkeys(asked, often), **dict.fromkeys(uncommon, seldom)}}

    before, answers = f"{example}\n\n{COMMON_TASK}", tuple(asked)
    return drafted(request, write, before=before, question=COMMON_QUESTION, answers=answers, tokens=COMMON_TOKENS)


def frequent_words(request: Request) -> Draft:
    """Coded words in random order with frequencies of a zeta distribution; rank 1 are dots, the next three the answers.

    A unit is one word. There is a word for every 50 tokens of the length, as in RULER.
    """
    rng = request.rng()
    words = [DOTS, *islice(_coded(rng), max(ASKED + 1, request.length // 50))]
    ranks, order = Units(_zeta(len(words))), Units(iter(rng.random, None))

    def write(units: int) -> tuple[str, dict[str, Any]]:
        drawn = [words[rank] for rank in ranks.take(units)]
        context = " ".join(word for _, word in sorted(zip(order.take(units), drawn)))
        return context, {"counts": dict(Counter(drawn))}

    answers = tuple(words[1 : ASKED + 1])
    return drafted(
        request, write, before=FREQUENT_TASK, question=FREQUENT_QUESTION, answers=answers, tokens=FREQUENT_TOKENS
    )


def _placed(words: Sequence[str], times: int, rng: random.Random) -> list[tuple[float, str]]:
    """Every word so many times, with random places that do not change when more words come."""
    return [(rng.random(), word) for word in words for _ in range(times)]


def _numbered(placed: Sequence[tuple[float, str]]) -> str:
    return " ".join(f"{number}. {word}" for number, (_, word) in enumerate(sorted(placed), 1))


def _vocabulary(rng: random.Random, number: int) -> Iterator[str]:
    """Different words without end, none part of another; English and coded ones are mixed in the first `number`.

    A list takes no more than those, so its common words are no more English than the others: only counting finds them.
    """
    english = set(_english())
    coded = (word for word in _coded(rng) if not english & {word[1:], word[:-1], word})
    pool = [*_english(), *islice(coded, max(0, number - len(english)))]
    rng.shuffle(pool)
    return chain(pool, coded)


@cache
def _english() -> tuple[str, ...]:
    """The English words that are long enough and have no other one in them."""
    every = {*ADJECTIVES, *ADVERBS, *INTRANSITIVE, *KEY_FIRST, *KEY_SECOND, *NOUNS, *PLACES, *TRANSITIVE}
    words = sorted(word for word in every if len(word) >= SHORTEST)
    return tuple(word for word in words if not any(other in word for other in words if other != word))


def _coded(rng: random.Random) -> Iterator[str]:
    """Different random words of `LETTERS` letters without end."""
    taken: set[str] = set()
    while True:
        word = "".join(rng.choices(ascii_lowercase, k=LETTERS))
        if word not in taken:
            taken.add(word)
            yield word


def _zeta(words: int) -> Iterator[int]:
    """Ranks (from 0) one by one, so that at every time t rank k - 1 has come floor(t / k^alpha) times."""
    due = [((rank + 1) ** ALPHA, rank, 1) for rank in range(words)]
    while True:
        _, rank, times = due[0]
        yield rank
        heapq.heapreplace(due, ((times + 1) * (rank + 1) ** ALPHA, rank, times + 1))
