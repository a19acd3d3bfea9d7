"""Text with something to remember: facts scattered in filler, questions at the end.

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
from collections.abc import Callable
from dataclasses import dataclass

TASKS: tuple[str, ...] = ("facts", "pairs", "hops")

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PUNCTUATION = (".", ",", "?", ":")
FORM = (
    "question answer what is are does the code codes of and box friend hold holds a in on there were was it very but "
    "while because so when before after they he she we some many few all"
).split()
NUMBERS = tuple(str(n) for n in range(100))

# Keys of `facts` and `pairs` are one word of each list; owners in `hops` are one name. Filler uses none of them.
KEY_FIRST = (
    "amber silver golden scarlet ivory crimson azure copper jade violet cobalt coral indigo bronze ebony pearl ruby "
    "sapphire emerald topaz onyx opal quartz marble velvet linen cedar maple willow birch hazel lilac saffron ginger "
    "lunar solar arctic royal crystal iron"
).split()
KEY_SECOND = (
    "falcon otter badger heron lynx raven tiger dolphin sparrow beaver panther walrus gecko lizard cobra eagle turtle "
    "rabbit donkey camel jackal moose bison gibbon lemur weasel ferret puffin pelican stork magpie salmon lobster "
    "cricket hornet spider beetle mantis condor jaguar"
).split()
NAMES = (
    "Mara Tilo Anka Bero Cira Dano Elka Faro Gita Hugo Inka Jaro Kira Lino Mika Nilo Olga Pavo Rena Sami Tara Ugo "
    "Vera Wim Xena Yara Zeno Alma Boris Clara Diego Edda Felix Greta Hanna Ivo Jonas Klara Lukas Marta Nadia Oskar "
    "Petra Quinn Rosa Simon Thea Urs Viola Wanda Yuri Zora Arno Berta Cosmo Doris Emil Flora Gero Hilda Igor Julia "
    "Karl Lydia Milan Nora Otto Paula Rafael Selma Timo Ulla Viktor Willa Xaver Yvonne Anton Bruna Carlo Dina Erik "
    "Frida Guido Helga Ines Jakob Kaja Leon Mona Niko Orla Piet Ronja Sven Tessa Vito"
).split()

# Filler. Nouns also appear in the plural.
NOUNS = (
    "farmer baker sailor teacher doctor painter singer driver miller hunter gardener student soldier merchant "
    "neighbour traveller poet clerk captain child worker dancer guard writer table chair window door basket bottle "
    "lamp candle blanket ladder hammer bucket mirror carpet clock kettle spoon plate pillow curtain wagon boat bridge "
    "tower wall gate fence garden field river lake hill mountain valley forest meadow tree flower stone cloud storm "
    "shadow road path street market village town castle church school station harbour island beach letter book story "
    "song picture map coin ring coat hat shoe apple pear onion carrot potato cake cheese dog cat horse cow sheepdog "
    "goat hen duck pigeon engine wheel bell drum violin"
).split()
PLURALS = [
    noun + "es" if noun.endswith(("ch", "o")) else noun[:-1] + "ies" if noun.endswith(("ry", "dy")) else noun + "s"
    for noun in NOUNS
]
PLACES = "kitchen cellar attic hall courtyard barn stable library workshop orchard square corner yard mill inn".split()
ADJECTIVES = (
    "old young small large tall short quiet loud happy sad tired clever gentle proud strange empty full heavy light "
    "dark bright cold warm dry wet clean dusty broken wooden narrow wide deep round sharp soft rough smooth green red "
    "blue white black grey brown yellow distant famous lonely simple curious careful lazy brave honest polite hungry "
    "rich poor"
).split()
ADVERBS = (
    "slowly quickly quietly loudly often never always again together alone early late gladly sadly carefully suddenly "
    "silently gently today yesterday"
).split()
INTRANSITIVE = (
    "waited slept laughed cried danced sang walked returned vanished stopped rested worked arrived fell turned stood "
    "listened smiled trembled wandered"
).split()
TRANSITIVE = (
    "found carried painted moved watched followed bought sold lost cleaned repaired opened closed pushed pulled "
    "lifted dropped touched admired liked hated forgot remembered described noticed visited crossed left reached "
    "covered filled counted washed burned hid broke kept stole borrowed wanted"
).split()
PREPOSITIONS = (
    "near behind under above beside across around toward beyond past without with from inside outside"
).split()
PRONOUNS = "they he she we".split()
CONJUNCTIONS = "and but while because so when before after".split()
TIMES = "morning evening spring summer autumn winter afternoon night".split()

VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *(*SPECIAL, *PUNCTUATION, *FORM, *NUMBERS, *KEY_FIRST, *KEY_SECOND, *NAMES),
            *(*NOUNS, *PLURALS, *PLACES, *ADJECTIVES, *ADVERBS),
            *(*INTRANSITIVE, *TRANSITIVE, *PREPOSITIONS, *TIMES),
        )
    )
)

VALUE_WORDS = 3  # numbers per value
FACTS_PER_1024 = {"facts": 24, "pairs": 24, "hops": 12}  # two statements each for hops
MAX_FACTS = {"facts": 48, "pairs": 48, "hops": 24}  # longer contexts become sparser; bounded by the number of names
SHORTEST_SENTENCE = 3  # words


@dataclass(frozen=True)
class Sample:
    """One context and some questions about it; `context + " " + questions[i]` is to be continued by `answers[i]`."""

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def generate(task: str, length: int, seed: int, questions: int = 1) -> Sample:
    """A text of `task` with `questions` different questions.

    The token `<bos>`, the context, any one question and its answer together are exactly `length` tokens: all questions
    of one task are equally long, and so are their answers. Facts stand at uniformly random places among the filler
    sentences, and questions ask for facts chosen uniformly; no fact is asked for twice. There are 24 facts per 1024
    tokens (12 chains for `hops`), at least 2 and at most 48 (24).

    Args: task: one of `TASKS`; length: tokens, at least 96; seed: any int; questions: how many, at most
    `max_questions(task, length)`.
    Raises: ValueError for an unknown task, a length too short, or too many questions.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, expected one of {TASKS}")
    if length < 96:
        raise ValueError(f"length must be at least 96 tokens, got {length}")
    facts, most = num_facts(task, length), max_questions(task, length)
    if not 1 <= questions <= most:
        raise ValueError(f"{task} at length {length} allows 1 to {most} questions, got {questions}")
    rng = random.Random(f"{task}/{length}/{seed}")
    statements, asked, answers = _hops(rng, facts) if task == "hops" else _facts(rng, facts, paired=task == "pairs")
    budget = length - 1 - len(asked[0].split()) - len(answers[0].split())
    context = _scatter(rng, statements, budget)
    return Sample(context, tuple(asked[:questions]), tuple(answers[:questions]))


def num_facts(task: str, length: int) -> int:
    """How many facts (chains for `hops`) a text of `length` tokens holds."""
    return max(2, min(MAX_FACTS[task], FACTS_PER_1024[task] * length // 1024))


def max_questions(task: str, length: int) -> int:
    """How many questions of `task` a text of `length` tokens can answer without asking for a fact twice."""
    return num_facts(task, length) // (2 if task == "pairs" else 1)


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
    if room < SHORTEST_SENTENCE:
        raise ValueError(f"{len(statements)} statements leave {room} of {budget} words for filler; use a longer text")
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
