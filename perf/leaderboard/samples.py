"""RULER's tasks that SmolLM2 can do, as texts with questions like `facts.sample`'s."""

import random
from functools import partial
from typing import Any

from fastkv.lab import facts, ruler

RULER = ("niah_single_1", "niah_single_2", "niah_multikey_1")  # others it cannot do, or says in more than 24 tokens


def retrieval(tokenizer: Any, length: int, seed: int, both: bool = True) -> facts.Sample:
    """One of RULER's retrieval tasks in turn, its haystack read before the question; prose goes on after it."""
    task = RULER[seed % len(RULER)]
    made = ruler.generate(task, tokenizer, length, seed=seed)
    asks, _, lead = made.question.partition("\nAnswer: ")
    encode = partial(tokenizer, add_special_tokens=False)
    head, ids = facts.around(tokenizer, asks)
    ids = ids + encode(lead)["input_ids"]  # the reply begins with these words
    prefix = head + encode(made.prompt.removesuffix(made.question).rstrip())["input_ids"]
    goes_on = facts.stretch(tokenizer, "library", facts.GOES_ON, random.Random(seed))
    question = facts.Question(task, made.context, asks, made.answers[0], ids, reworded=False)
    return facts.Sample(prefix, [question], goes_on)
