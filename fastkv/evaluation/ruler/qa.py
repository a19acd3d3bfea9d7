"""RULER's question answering: paragraphs with the answer among many others, from the user's own copy of the data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import FastKVError
from .text import Draft, Request, Units, drafted

TOKENS = 32  # of the answer

TASK = "Answer the question below from the documents. Give only the answer, in as few words as the documents use."


class Source(NamedTuple):
    """A data set: its name, file and address, and the metadata that names the file in lm-evaluation-harness."""

    name: str
    file: str
    address: str
    option: str


SOURCES = {
    "qa_1": Source("SQuAD 2.0", "dev-v2.0.json", "https://rajpurkar.github.io/SQuAD-explorer", "squad"),
    "qa_2": Source("HotpotQA", "hotpot_dev_distractor_v1.json", "https://hotpotqa.github.io", "hotpotqa"),
}


@dataclass(frozen=True)
class Question:
    """A question, its answers (any one is right), and paragraphs as places in the list of all documents.

    Attributes:
        needed: paragraphs that every text has.  near: of the same article, preferred as distractors.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


def documents(request: Request) -> Draft:
    """Documents in random order: those the answer needs, then others of the same article, then any, repeated at need.

    The question is one of the file's, in an order that depends on the seed only, whatever the length.
    Raises: FastKVError if the file is missing or something else, saying where to get it.
    """
    paragraphs, questions = _load(request.task, request.data)
    order = list(range(len(questions)))
    random.Random(request.seed).shuffle(order)
    asked = questions[order[request.index % len(order)]]
    rng = request.rng()
    needed = [(rng.random(), paragraphs[one]) for one in asked.needed]
    filler = Units(_others(paragraphs, asked, rng))
    question = f"Question: {asked.text}\nAnswer:"

    def write(units: int) -> tuple[str, dict[str, Any]]:
        placed = sorted(needed + filler.take(units))
        context = "\n\n".join(f"Document {number}:\n{text}" for number, (_, text) in enumerate(placed, 1))
        depths = tuple(placed.index(one) / len(placed) for one in needed)
        return context, {"needles": tuple(text for _, text in needed), "depths": depths}

    between = f"{TASK}\n\n"
    return drafted(
        request, write, before=TASK, between=between, question=question, answers=asked.answers, tokens=TOKENS
    )


def _others(paragraphs: tuple[str, ...], asked: Question, rng: random.Random) -> Iterator[tuple[float, str]]:
    near = rng.sample(asked.near, len(asked.near))
    known = {*asked.needed, *near}
    far = [one for one in range(len(paragraphs)) if one not in known]
    rng.shuffle(far)
    for one in cycle(near + far):
        yield rng.random(), paragraphs[one]


def _load(task: str, data: str | Path | None) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    """All paragraphs, each once, and all questions that have an answer."""
    name, file, address, option = SOURCES[task]
    advice = f"download {file} from {address} and pass data=PATH, or --metadata {option}=PATH for lm-evaluation-harness"
    if data is None:
        raise FastKVError(f"{task} reads {name}, which does not come with fastkv, and got no file; {advice}")
    path = Path(data)
    if not path.is_file():
        raise FastKVError(f"{task} expected {name}'s {file} at {path}, got nothing there; {advice}")
    try:
        return _parse(task, path, path.stat().st_mtime_ns)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FastKVError(f"{path} is not {name}'s {file}, reading it failed with {error!r}; {advice}") from error


@lru_cache(maxsize=2)
def _parse(task: str, path: Path, changed: int) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    """`changed` is when the file was written, so that a new file is read anew."""
    content = json.loads(path.read_text(encoding="utf-8"))
    paragraphs: dict[str, int] = {}
    questions = list(_squad(content, paragraphs) if task == "qa_1" else _hotpot(content, paragraphs))
    if not questions or len(paragraphs) < 2:
        raise ValueError("no questions, or fewer than two paragraphs")
    return tuple(paragraphs), tuple(questions)


def _squad(content: Any, paragraphs: dict[str, int]) -> Iterator[Question]:
    for article in content["data"]:
        places = [paragraphs.setdefault(one["context"], len(paragraphs)) for one in article["paragraphs"]]
        for place, paragraph in zip(places, article["paragraphs"]):
            near = tuple(dict.fromkeys(other for other in places if other != place))
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers:  # SQuAD 2.0 also asks what has none
                    yield Question(asked["question"], answers, (place,), near)


def _hotpot(content: Any, paragraphs: dict[str, int]) -> Iterator[Question]:
    """A question needs two of its ten paragraphs, and RULER keeps all ten."""
    for asked in content:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]]
        places = tuple(dict.fromkeys(paragraphs.setdefault(text, len(paragraphs)) for text in texts))
        yield Question(asked["question"], (asked["answer"],), places)
