"""Facts hidden in real text, and questions about them: in the words of the text, and in other words.

    from fastkv.lab import facts

    sample = facts.sample(tokenizer, length=2048, seed=0)
    model(torch.tensor([sample.prefix + sample.questions[0].ids]))

Tuning and reporting never share a text or a fact: `split="tuning"` takes Python's language reference and one set of
facts, `split="reported"` docstrings of the standard library and another.

Real texts that come with every Python, each as its version has them: `topics`, its language reference
(`pydoc_data.topics`); `library`, docstrings of the standard library; `code`, its source without docstrings.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from io import TextIOWrapper
from itertools import starmap
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ..errors import FastKVError

SOURCES = ("topics", "library", "code")
SUFFIXES = (".txt", ".md")
PIECE = 1 << 20  # characters read at a time, so that a large file is read only as far as it is needed
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "pydoc_data", "encodings")
SHORTEST = 200  # characters of a docstring that is more than a label


def documents(source: str) -> Iterator[str]:
    """A text of `SOURCES`, of a file, of the .txt and .md files of a folder by path, or of standard input ("-").

    In pieces that end with a line, as far as lines are shorter than a piece.
    Raises: FastKVError if there is none, or if it is not UTF-8.
    """
    if source == "topics":
        texts: Iterable[str] = (topics[name].strip() for name in sorted(topics))
    elif source == "library":
        texts = (text for _, tree in _modules() for text in _docstrings(tree))
    elif source == "code":
        texts = starmap(_without_docstrings, _modules())
    if source in SOURCES:
        yield "\n\n".join(texts)
        return
    path, typed = Path(source), source == "-"
    files = [path]
    if not typed and path.is_dir():  # anything else that can be opened is read: a file, a pipe
        files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    if not source or not files:
        what = f"a folder without {' or '.join(SUFFIXES)} files" if source else "no name"
        raise FastKVError(f"expected a text at {source!r}, got {what}; name a file, a folder or {', '.join(SOURCES)}")
    if typed and sys.stdin is None:
        raise FastKVError("expected a text on standard input, got none that is open; name a file")
    for one in files:
        try:
            if typed and isinstance(sys.stdin, TextIOWrapper):  # whatever the locale says
                sys.stdin.reconfigure(encoding="utf-8", errors="strict")
            with nullcontext(sys.stdin) if typed else open(one, encoding="utf-8") as file:
                while piece := file.read(PIECE) + file.readline():
                    yield piece
        except UnicodeDecodeError as error:
            raise FastKVError(f"{source} is not UTF-8 text ({error}); convert it or choose another") from error
        except OSError as error:
            raise FastKVError(f"cannot read the text {one} ({error.strerror or error}); choose another one") from error


@cache
def read(source: str) -> str:
    """The whole text of a source of `documents`."""
    return "".join(documents(source))


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Modules of the standard library, without packages of tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if not {*file.relative_to(root).parts} & {*LEFT_OUT}:
            try:
                source = file.read_text(encoding="utf-8")
                yield source, ast.parse(source)
            except (SyntaxError, ValueError, OSError):  # templates, and files in other encodings
                yield "", ast.Module([], [])


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Those of a module that are more than a label."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= SHORTEST:
                yield text


def _without_docstrings(source: str, tree: ast.Module) -> str:
    gone: set[int] = set()
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
                gone.update(range(first.lineno - 1, first.end_lineno or first.lineno))
    return "\n".join(line for place, line in enumerate(source.splitlines()) if place not in gone)


# Facts, and texts with them.

ASKED = 6  # facts of a text
GOES_ON = 64  # tokens of the text after the prefix
MARK = "\x00"  # the place of the text in a chat template
SPLITS = {"tuning": "topics", "reported": "library"}


@dataclass(frozen=True)
class Kind:
    """A kind of fact.

    Attributes:
        name: of the kind.  text: the sentence, of a subject {0} and a value {1}.
        literal: the question in the sentence's words.  reworded: with another verb or noun than the sentence has.
        subjects, values: to draw from; values None: numbers of seven digits.
    """

    name: str
    text: str
    literal: str
    reworded: str
    subjects: tuple[str, ...]
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Question:
    """A question about a fact.

    Attributes:
        kind: of the fact.  fact: the sentence in the text.  text: the question.  answer: what has to be in the reply.
        ids: tokens of the rest of the chat turn, from the question to where the reply begins.  reworded: whether it
        avoids the words of the sentence where it can.
    """

    kind: str
    fact: str
    text: str
    answer: str
    ids: list[int]
    reworded: bool

    def answered_by(self, reply: str) -> bool:
        """Whether a reply contains the answer, case and separators of digits aside."""
        return plain(self.answer) in plain(reply)


@dataclass(frozen=True)
class Sample:
    """A text with facts in it: the first tokens of a chat turn, questions, and how the text goes on.

    Attributes:
        prefix: tokens, as many as were asked for.  questions: one or two a fact.
        continuation: tokens after the prefix.
    """

    prefix: list[int]
    questions: list[Question]
    continuation: list[int]


def plain(text: str) -> str:
    """Lower case, without the commas, dashes and spaces that a model writes into numbers."""
    return text.lower().replace(",", "").replace("-", "").replace(" ", "")


# The kinds of each split; in the file, subjects and values are words of one line.
BANKS: dict[str, tuple[Kind, ...]] = {
    split: tuple(Kind(*words, *(one and tuple(one.split()) for one in drawn)) for *words, drawn in rows)
    for split, rows in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}


def check_tokens(text: str, tokens: int, least: int) -> None:
    """Raise FastKVError for a text that is too short."""
    if tokens < least:
        raise FastKVError(f"{text} has {tokens} tokens, expected {least} or more; give a longer text or ask for less")


@cache
def _tokens(tokenizer: Any, source: str) -> list[int]:
    return list(tokenizer(read(source), add_special_tokens=False, verbose=False)["input_ids"])


def stretch(tokenizer: Any, source: str, length: int, draw: random.Random) -> list[int]:
    """`length` tokens of a source from a random place. Raises FastKVError if the text is shorter."""
    ids = _tokens(tokenizer, source)
    check_tokens(source, len(ids), length)
    start = draw.randrange(len(ids) - length + 1)
    return ids[start : start + length]


def start_of(tokenizer: Any) -> list[int]:
    """The start token, if the tokenizer has the habit of adding one."""
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("")["input_ids"] else []


def around(tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """Tokens before and after the text in a chat turn that ends with a question; without a template, plain lines."""
    from ..api import as_chat  # not where facts are all that is needed: it asks for a recent transformers

    encode = partial(tokenizer, add_special_tokens=False)
    if tokenizer.chat_template is None:
        return start_of(tokenizer), encode(f"\n\nQuestion: {question}\nAnswer:")["input_ids"]
    shown = as_chat(tokenizer, [("user", f"{MARK}\n\n{question}")])
    if shown.count(MARK) != 1:
        raise FastKVError(
            "questions about a text need a chat template that has a message once and as it is, got one that has it "
            f"{shown.count(MARK)} times; set tokenizer.chat_template = None"
        )
    before, _, after = shown.partition(MARK)
    return encode(before)["input_ids"], encode(after)["input_ids"]


def sample(
    tokenizer: Any,
    length: int,
    seed: int,
    source: str | None = None,
    split: str = "reported",
    asked: int = ASKED,
    both: bool = False,
) -> Sample:
    """A text of `length` tokens in all, with one fact of each of `asked` kinds between random lines.

    Args: source: as in `facts.read`, by default that of the split.  split: whose facts, "tuning" or "reported".
        both: whether each fact is asked for in both ways; else every other one in other words.
    Raises: FastKVError if the text is too short, or another split is asked for.
    """
    if split not in BANKS:
        raise FastKVError(f"split must be one of {', '.join(BANKS)}, got {split!r}")
    draw = random.Random(f"{split} {seed}")
    encode = partial(tokenizer, add_special_tokens=False)
    facts, questions, head = list[list[int]](), list[Question](), list[int]()
    for place, kind in enumerate(draw.sample(BANKS[split], asked)):
        subject = draw.choice(kind.subjects)
        value = str(draw.randrange(1_000_000, 10_000_000)) if kind.values is None else draw.choice(kind.values)
        fact = kind.text.format(subject, value)
        facts.append(encode(f"\n{fact}\n")["input_ids"])
        for reworded, words in enumerate((kind.literal, kind.reworded)):
            asks = f"{words.format(subject)} Answer in a few words."
            head, ids = around(tokenizer, asks)
            if both or reworded == place % 2:
                questions.append(Question(kind.name, fact, asks, value, ids, bool(reworded)))
    room = length - len(head) - sum(map(len, facts))
    if room < asked:
        raise FastKVError(f"a text of {length} tokens has no room for {asked} facts; ask for a longer one")
    text = stretch(tokenizer, source or SPLITS[split], room + GOES_ON, draw)
    text, goes_on = text[:room], text[room:]
    ends = [place for place, token in enumerate(text, 1) if "\n" in tokenizer.decode([token])]
    places = ends if len(ends) >= asked else range(room + 1)  # between lines, where the text has some
    for place, fact_ids in zip(sorted(draw.sample(places, asked), reverse=True), facts):
        text = text[:place] + fact_ids + text[place:]
    return Sample(head + text, questions, goes_on)


def with_question(
    tokenizer: Any, length: int, seed: int, source: str, answered: bool = False
) -> tuple[Sample, list[int]]:
    """A sample and the tokens of its first question, with its answer if that is wanted; `length` tokens together."""
    rest: list[int] = []
    for _ in range(2):  # the question is the same for every length
        found = sample(tokenizer, length - len(rest), seed, source)
        answer = tokenizer(found.questions[0].answer, add_special_tokens=False).input_ids
        rest = found.questions[0].ids + answer * answered
    return found, rest
