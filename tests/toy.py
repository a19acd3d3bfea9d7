"""The toy: a small Llama in `fixtures/model` and its language, facts in filler and questions about them.

It is quick, and it finds what it is asked for as long as its cache has it, so tests can tell one cache from another.

Everything is drawn from `random.Random(seed)` over a closed vocabulary of words separated by single spaces, so the same
arguments always give the same text and a word-level tokenizer gives exactly one token per word.

    facts   the code of amber falcon is 48 27 93 .
            question : what is the code of amber falcon ? answer : the code of amber falcon is | 48 27 93 .
    pairs   the same facts
            question : what are the codes of amber falcon and silver otter ?
            answer : amber falcon is | 48 27 93 and silver otter is 11 62 50 .
    hops    the friend of Tilo is Mara . the box of Mara holds 48 27 93 .
            question : what does the box of the friend of Tilo hold ?
            answer : the friend of Tilo is | Mara and the box of Mara holds 48 27 93 .

The bar separates `Sample.questions` from `Sample.answers`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from fastkv.lab import ruler
from fastkv.lab.fits import Sample

NAMES_OF_THINGS = ("key_first", "key_second", "nouns", "plurals", "places", "adjectives", "times")
KEY_FIRST, KEY_SECOND, NOUNS, PLURALS, PLACES, ADJECTIVES, TIMES = map(ruler.WORDS.get, NAMES_OF_THINGS)
OTHERS = ("adverbs", "intransitive", "transitive", "prepositions", "pronouns", "conjunctions")
ADVERBS, INTRANSITIVE, TRANSITIVE, PREPOSITIONS, PRONOUNS, CONJUNCTIONS = map(ruler.WORDS.get, OTHERS)

MODEL_DIR = Path(__file__).parent / "fixtures" / "model"
MODEL = str(MODEL_DIR)  # on a command line

TASKS: tuple[str, ...] = ("facts", "pairs", "hops")

NAMES = (
    "Mara Tilo Anka Bero Cira Dano Elka Faro Gita Hugo Inka Jaro Kira Lino Mika Nilo Olga Pavo Rena Sami Tara Ugo "
    "Vera Wim Xena Yara Zeno Alma Boris Clara Diego Edda Felix Greta Hanna Ivo Jonas Klara Lukas Marta Nadia Oskar "
    "Petra Quinn Rosa Simon Thea Urs Viola Wanda Yuri Zora Arno Berta Cosmo Doris Emil Flora Gero Hilda Igor Julia "
    "Karl Lydia Milan Nora Otto Paula Rafael Selma Timo Ulla Viktor Willa Xaver Yvonne Anton Bruna Carlo Dina Erik "
    "Frida Guido Helga Ines Jakob Kaja Leon Mona Niko Orla Piet Ronja Sven Tessa Vito"
).split()

VALUE_WORDS = 3  # numbers per value
FACTS_PER_1024 = {"facts": 24, "pairs": 24, "hops": 12}  # two statements each for hops
MAX_FACTS = {"facts": 48, "pairs": 48, "hops": 24}  # longer contexts become sparser; bounded by the number of names
SHORTEST_SENTENCE = 3  # words


def generate(task: str, length: int, seed: int, questions: int = 1) -> Sample:
    """A text of `task` with `questions` different questions.

    The token `<bos>`, the context, any one question and its answer together are exactly `length` tokens: all questions
    of one task are equally long, and so are their answers. Facts stand at uniformly random places among the filler
    sentences, and questions ask for facts chosen uniformly; no fact is asked for twice. There are 24 facts per 1024
    tokens (12 chains for `hops`), at least 2 and at most 48 (24).

    Args: task: one of `TASKS`; length: tokens, at least 96; seed: any int; questions: how many, at most as many as
    there are facts to ask for, or half of them for `pairs`.
    """
    facts, rng = num_facts(task, length), random.Random(f"{task}/{length}/{seed}")
    statements, asked, answers = _hops(rng, facts) if task == "hops" else _facts(rng, facts, paired=task == "pairs")
    budget = length - 1 - len(asked[0].split()) - len(answers[0].split())
    context = _scatter(rng, statements, budget)
    return Sample(context, tuple(asked[:questions]), tuple(answers[:questions]))


def num_facts(task: str, length: int) -> int:
    """How many facts (chains for `hops`) a text of `length` tokens holds."""
    return max(2, min(MAX_FACTS[task], FACTS_PER_1024[task] * length // 1024))


def _facts(rng: random.Random, count: int, paired: bool) -> tuple[list[str], list[str], list[str]]:
    """Statements, questions and answers of `facts` or `pairs`; every fact is asked for once, in random order."""
    places = rng.sample(range(len(KEY_FIRST) * len(KEY_SECOND)), count)
    keys = [f"{KEY_FIRST[i % len(KEY_FIRST)]} {KEY_SECOND[i // len(KEY_FIRST)]}" for i in places]
    values = [_value(rng) for _ in keys]
    statements = [f"the code of {key} is {value} ." for key, value in zip(keys, values)]
    if not paired:
        asked = [f"question : what is the code of {key} ? answer : the code of {key} is" for key in keys]
        return _shuffled(rng, statements), asked, [f"{value} ." for value in values]
    asked, answers = [], []
    for one, two, value_one, value_two in zip(keys[::2], keys[1::2], values[::2], values[1::2]):
        asked.append(f"question : what are the codes of {one} and {two} ? answer : {one} is")
        answers.append(f"{value_one} and {two} is {value_two} .")
    return _shuffled(rng, statements), asked, answers


def _hops(rng: random.Random, count: int) -> tuple[list[str], list[str], list[str]]:
    """Statements, questions and answers of `hops`; nobody has both a friend and a box, so both hops are needed."""
    names = rng.sample(NAMES, 2 * count)
    friends, owners = names[:count], names[count:]
    values = [_value(rng) for _ in owners]
    statements = [f"the friend of {friend} is {owner} ." for friend, owner in zip(friends, owners)]
    statements += [f"the box of {owner} holds {value} ." for owner, value in zip(owners, values)]
    question = "question : what does the box of the friend of {0} hold ? answer : the friend of {0} is"
    answers = [f"{owner} and the box of {owner} holds {value} ." for owner, value in zip(owners, values)]
    return _shuffled(rng, statements), [question.format(friend) for friend in friends], answers


def _scatter(rng: random.Random, statements: list[str], budget: int) -> str:
    """`statements`, in the given order, at uniformly random places among filler; `budget` words in all."""
    room = budget - sum(len(statement.split()) for statement in statements)
    filler: list[str] = []
    while room:
        sentence = _sentence(rng)
        rest = room - len(sentence.split())
        if rest == 0 or rest >= SHORTEST_SENTENCE:
            filler.append(sentence)
            room = rest
    is_fact = _shuffled(rng, [True] * len(statements) + [False] * len(filler))
    sources = {True: iter(statements), False: iter(filler)}
    return " ".join(next(sources[flag]) for flag in is_fact)


def _sentence(rng: random.Random) -> str:
    """A filler sentence of 3 to about 25 words."""
    return rng.choice(_SENTENCES)(rng) + " ."


def _clause(rng: random.Random) -> str:
    subject = rng.choice((_noun_phrase, _noun_phrase, _noun_phrase, lambda rng: rng.choice(PRONOUNS)))(rng)
    if rng.random() < 0.4:
        verb = rng.choice(INTRANSITIVE)
        tail = (_place(rng), rng.choice(ADVERBS), "")[rng.randrange(3)]
    else:
        verb = f"{rng.choice(TRANSITIVE)} {_noun_phrase(rng)}"
        tail = (_place(rng), rng.choice(ADVERBS), "", "")[rng.randrange(4)]
    return f"{subject} {verb} {tail}".strip()


def _noun_phrase(rng: random.Random) -> str:
    adjective = rng.choice(ADJECTIVES) + " " if rng.random() < 0.5 else ""
    kind = rng.random()
    if kind < 0.55:
        return f"the {adjective}{rng.choice(NOUNS)}"
    if kind < 0.65:
        return f"{rng.choice(('some', 'many', 'few', 'all'))} {adjective}{rng.choice(PLURALS)}"
    if kind < 0.75:
        return f"{rng.randrange(2, 10)} {adjective}{rng.choice(PLURALS)}"
    return f"{adjective}{rng.choice(PLURALS)}"


def _place(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"in the {rng.choice(PLACES)}"
    return f"{rng.choice(PREPOSITIONS)} the {rng.choice((*NOUNS, *PLACES))}"


_SENTENCES: tuple[Callable[[random.Random], str], ...] = (
    *(_clause, _clause, _clause),
    lambda rng: f"{rng.choice(PLURALS)} {rng.choice(INTRANSITIVE)}",
    lambda rng: f"it was {rng.choice(('', 'very '))}{rng.choice(ADJECTIVES)} in the {rng.choice((*TIMES, *PLACES))}",
    lambda rng: f"there were {rng.randrange(2, 10)} {rng.choice(ADJECTIVES)} {rng.choice(PLURALS)} {_place(rng)}",
    lambda rng: f"in the {rng.choice(TIMES)} , {_clause(rng)}",
    lambda rng: f"{_clause(rng)} {rng.choice(CONJUNCTIONS)} {_clause(rng)}",
)


def _value(rng: random.Random) -> str:
    return " ".join(str(rng.randrange(10, 100)) for _ in range(VALUE_WORDS))


def _shuffled(rng: random.Random, items: list) -> list:
    return rng.sample(items, len(items))


def load(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The toy in eval mode on the CPU and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    return cast(LlamaForCausalLM, model.eval()), cast(PreTrainedTokenizerFast, tokenizer)


def write(path: Path, texts: int, tokens: int = 512) -> str:
    """Write a file with so many texts of all tasks in turn, and return its path."""
    path.write_text("\n".join(told(TASKS[index % len(TASKS)], tokens, -1 - index) for index in range(texts)))
    return str(path)


PLACE = tempfile.TemporaryDirectory(prefix="fastkv-toy-")  # until the process ends


@cache
def text() -> str:
    """The path of a file of 9000 tokens in the toy's language."""
    return write(Path(PLACE.name) / "toy.txt", 18)


def told(task: str, tokens: int, seed: int) -> str:
    """A text of so many tokens that ends with a question and its answer."""
    sample = generate(task, tokens, seed)
    return f"{sample.context} {sample.questions[0]} {sample.answers[0]}"


def calibration_text(tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> Sample:
    """A text for `make_triples`, about `length` tokens with one question and answer.

    The tasks take turns; in every second round the filler is two sentences over and over, which are easy to predict."""
    task = TASKS[seed % len(TASKS)]
    sample = generate(task, length, seed, 4)
    if seed // len(TASKS) % 2 == 0:
        return sample
    sentences = [f"{sentence} ." for sentence in sample.context.removesuffix(" .").split(" . ")]
    stated = [sentence.startswith(("the code of", "the friend of", "the box of")) for sentence in sentences]
    filler = [sentence for sentence, fact in zip(sentences, stated) if not fact]
    middle = len(filler) // 2
    again = cycle(sorted(filler, key=len)[middle : middle + 2])  # of middle length, which keeps that of the text
    words = " ".join(sentence if fact else next(again) for sentence, fact in zip(sentences, stated))
    return Sample(words, sample.questions, sample.answers)


def placed(task: str, length: int, depth: float, seed: int) -> ruler.Sample:
    """A text of `generate` with the asked fact moved to `depth`, 0 to 1.

    It has the same words, exactly `length` tokens with the answer. The task is facts, whose answer ends a sentence."""
    told = generate(task, length, seed)
    question, reply = told.questions[0], told.answers[0]
    asked = f"{question.partition('answer : ')[2]} {reply}"
    sentences = [f"{sentence} ." for sentence in told.context.removesuffix(" .").split(" . ")]
    rest = [sentence for sentence in sentences if sentence != asked]
    context = " ".join(ruler.scatter(rest, [asked], [depth]))
    prompt, tokens = f"{context} {question}", len(reply.split())
    metadata = {"units": len(rest), "needles": (asked,), "depths": (depth,)}
    return ruler.Sample(task, prompt, context, question, (reply.removesuffix(" ."),), tokens, metadata)
