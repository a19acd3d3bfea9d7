"""Texts to fit on: token sequences of the user's text, and contexts with questions, from repetitive to random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, cycle

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...demo.tasks import ADJECTIVES, NOUNS, PLACES, TASKS, TRANSITIVE, Sample, generate, max_questions
from ...errors import FastKVError
from ...evaluation import common

FILLERS = ("varied", "repeated", "random")
QUESTIONS = 4  # at most, for each text; they share its compressed context
FACT_EVERY, MOST_FACTS = 96, 48  # tokens of an English text for each fact; no adjective or noun is used twice


def sequences(source: str, tokenizer: PreTrainedTokenizerBase, length: int, tokens: int) -> Iterator[Tensor]:
    """Token ids of the text, [1, length] int64 each, until there are `tokens` of them or the text ends.

    Documents are packed one after the other, as in pre-training, and cut into sequences; each starts with the
    tokenizer's start token if it has the habit of adding one. The last, shorter rest is dropped.

    Args: source: a file, a folder whose .txt and .md files are read in order of their paths, "-" for standard input, or
        "demo" for the texts of `fastkv.demo.tasks`, drawn from seeds that neither its training nor its evaluation uses.
    Raises: FastKVError if the text cannot be read, or if it is shorter than one sequence.
    """
    if length < 2 or tokens < length:
        raise FastKVError(
            f"calibration needs sequences of at least 2 tokens and at least one of them, got length {length} and "
            f"{tokens} tokens; choose a larger number"
        )
    start = [] if tokenizer.bos_token_id not in tokenizer("").input_ids else [tokenizer.bos_token_id]
    step = length - len(start)
    waiting: list[int] = []
    made = 0
    for text in _generated(length) if source == common.DEMO else common.documents(source):
        waiting += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        while len(waiting) >= step and made + length <= tokens:
            yield torch.tensor([start + waiting[:step]])
            waiting, made = waiting[step:], made + length
        if made + length > tokens:
            return
    if not made:
        raise FastKVError(
            f"{source} has {len(waiting)} tokens, but expected at least one sequence of {length}; use more text or a "
            "smaller length"
        )


def _generated(length: int) -> Iterator[str]:
    """Texts of every task in turn, with their question and answer; negative seeds are nobody else's."""
    if length < common.SHORTEST:
        raise FastKVError(
            f"generated texts have at least {common.SHORTEST} tokens, got length {length}; choose a larger one"
        )
    for index in count():
        yield common.demo_text(TASKS[index % len(TASKS)], length, seed=-1 - index)


def demo_text(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Sample:
    """A text of the bundled model's own language, about `length` tokens with one question and answer.

    The tasks take turns; in every second round the filler is two sentences over and over, which are easy to predict.
    """
    task = TASKS[seed % len(TASKS)]
    sample = generate(task, length, seed, min(QUESTIONS, max_questions(task, length)))
    if seed // len(TASKS) % 2 == 0:
        return sample
    sentences = [f"{sentence} ." for sentence in sample.context.removesuffix(" .").split(" . ")]
    stated = [_is_fact(sentence) for sentence in sentences]
    filler = [sentence for sentence, fact in zip(sentences, stated) if not fact]
    middle = len(filler) // 2
    again = cycle(sorted(filler, key=len)[middle : middle + 2])  # of middle length, which keeps that of the text
    words = " ".join(sentence if fact else next(again) for sentence, fact in zip(sentences, stated))
    return Sample(words, sample.questions, sample.answers)


def english_text(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Sample:
    """Facts in English prose, about `length` tokens by this tokenizer, for any model.

    Filler takes turns: `varied` sentences, two `repeated` ones, or log lines of `random` digits.
    """
    rng = random.Random(f"{length}/{seed}")
    kind = FILLERS[seed % len(FILLERS)]
    count = max(2, min(length // FACT_EVERY, MOST_FACTS))
    owners = [f"{adjective} {noun}" for adjective, noun in zip(rng.sample(ADJECTIVES, count), rng.sample(NOUNS, count))]
    codes = [f"{rng.randrange(1000, 10000)}-{rng.randrange(1000, 10000)}" for _ in owners]
    facts = [f"The access code of the {owner} is {code}." for owner, code in zip(owners, codes)]
    again = cycle([_prose(rng), _prose(rng)])
    filler = {"varied": lambda: _prose(rng), "repeated": lambda: next(again), "random": lambda: _log(rng)}[kind]

    sentences = list(facts)
    room = length - sum(_tokens(tokenizer, sentence) for sentence in facts)
    while room > 0:
        sentences.append(filler())
        room -= _tokens(tokenizer, sentences[-1])
    rng.shuffle(sentences)
    asked = rng.sample(range(count), min(QUESTIONS, count))
    questions = [f"Question: What is the access code of the {owners[one]}? Answer:" for one in asked]
    return Sample(" ".join(sentences), tuple(questions), tuple(f"{codes[one]}." for one in asked))


TEXTS: dict[str, Callable[[PreTrainedTokenizerBase, int, int], Sample]] = {"demo": demo_text, "english": english_text}


def _is_fact(sentence: str) -> bool:
    """Whether a sentence of the bundled model's language states something that may be asked for."""
    return sentence.startswith(("the code of", "the friend of", "the box of"))


def _tokens(tokenizer: PreTrainedTokenizerBase, sentence: str) -> int:
    return len(tokenizer(f" {sentence}", add_special_tokens=False).input_ids)


def _prose(rng: random.Random) -> str:
    """A sentence that could stand in a story."""
    who, what = (f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2))
    return f"{who.capitalize()} {rng.choice(TRANSITIVE)} {what} in the {rng.choice(PLACES)}."


def _log(rng: random.Random) -> str:
    """A line that nobody could predict."""
    return f"Entry {rng.randrange(10**6):06d} reads {' '.join(str(rng.randrange(10, 100)) for _ in range(8))}."
