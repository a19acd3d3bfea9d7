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
import gzip
import json
import random
import sysconfig
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ..errors import FastKVError

SOURCES = ("topics", "library", "code")
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "pydoc_data", "encodings")
SHORTEST = 200  # characters of a docstring that is more than a label


@cache
def read(source: str) -> str:
    """The whole text of a source: one of `SOURCES`, or the path of a text file.

    Raises: FastKVError if it is neither, or not UTF-8.
    """
    if source == "topics":
        return "\n\n".join(topics[name].strip() for name in sorted(topics))
    if source == "library":
        return "\n\n".join(found for file in _modules() for found in _docstrings(file))
    if source == "code":
        return "\n\n".join(_without_docstrings(file) for file in _modules())
    path = Path(source)
    if not path.is_file():
        raise FastKVError(f"a text is one of {', '.join(SOURCES)} or a file, got {source!r}; check the path")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise FastKVError(f"{source} is not UTF-8 text ({error}); convert it first") from None


def _modules() -> list[Path]:
    """Files of the standard library, sorted; packages of tests and tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    return [file for file in files if not {*file.relative_to(root).parts} & {*LEFT_OUT}]


def _parsed(file: Path) -> tuple[str, ast.Module] | None:
    try:
        source = file.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (SyntaxError, ValueError, OSError):  # templates, and files in other encodings
        return None


def _docstrings(file: Path) -> list[str]:
    parsed = _parsed(file)
    if parsed is None:
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(parsed[1]) if isinstance(node, documented)]
    return [text for text in found if text is not None and len(text) >= SHORTEST]


def _without_docstrings(file: Path) -> str:
    parsed = _parsed(file)
    if parsed is None:
        return ""
    source, tree = parsed
    lines = source.splitlines()
    gone: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            gone.update(range(first.lineno - 1, first.end_lineno or first.lineno))
    return "\n".join(line for place, line in enumerate(lines) if place not in gone)


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


def _banks() -> dict[str, tuple[Kind, ...]]:
    """The kinds of each split, from `facts.json`, where subjects and values are words of one line."""
    told = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
    return {
        split: tuple(Kind(*words, *(one and tuple(one.split()) for one in drawn)) for *words, drawn in rows)
        for split, rows in told.items()
    }


BANKS = _banks()


@cache
def _tokens(tokenizer: Any, source: str) -> list[int]:
    return list(tokenizer(read(source), add_special_tokens=False, verbose=False)["input_ids"])


def stretch(tokenizer: Any, source: str, length: int, draw: random.Random) -> list[int]:
    """`length` tokens of a source from a random place.

    Raises: FastKVError if the text is shorter.
    """
    ids = _tokens(tokenizer, source)
    if len(ids) < length:
        raise FastKVError(
            f"{source} has {len(ids)} tokens, expected {length} or more; give a longer text or ask for less"
        )
    start = draw.randrange(len(ids) - length + 1)
    return ids[start : start + length]


def around(tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """Tokens before and after the text in a chat turn that ends with a question; without a template, plain lines."""
    if tokenizer.chat_template is None:
        before, after = "", f"\n\nQuestion: {question}\nAnswer:"
    else:
        turn = [{"role": "user", "content": f"{MARK}\n\n{question}"}]
        before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(MARK)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))  # type: ignore


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
    facts: list[list[int]] = []
    questions: list[Question] = []
    head: list[int] = []
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
