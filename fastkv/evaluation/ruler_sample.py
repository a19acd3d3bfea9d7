"""What a RULER text is, and how it gets its length: as many filler units as fit before the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from ..errors import FastKVError

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
    data: str | Path | None = None

    def rng(self, purpose: str = "") -> random.Random:
        """Random numbers that depend on task, length, seed, index and purpose only."""
        return random.Random(f"{self.task}/{self.length}/{self.seed}/{self.index}/{purpose}")


Draft: TypeAlias = Callable[[int], Sample]  # the sample with that many filler units


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """How many tokens a model reads for a text: start token and the like included."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return lambda text: len(tokenizer(text, verbose=False).input_ids)
    return tokenizer


def unknown_share(tokenizer: Tokenizer, text: str) -> float:
    """Share of the tokens of a text that stand for words the tokenizer does not know, 0 to 1."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or tokenizer.unk_token_id is None:
        return 0.0
    ids = tokenizer(text, verbose=False).input_ids
    return ids.count(tokenizer.unk_token_id) / len(ids)


def longest(draft: Draft, count: Callable[[str], int], length: int, least: int = 1) -> Sample:
    """The sample with most filler whose prompt and answer fit in `length` tokens; one unit more would not fit.

    Doubles the number of units, then closes in by linear interpolation: a handful of counts, because texts grow nearly
    linearly.
    Raises: FastKVError if not even `least` units fit, or if filler has no tokens.
    """
    low, best = least, draft(least)
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
