"""The thirteen tasks of RULER (arXiv:2404.06654), written offline for any tokenizer and any length.

    from fastkv.evaluation import ruler

    sample = ruler.generate("niah_multikey_1", tokenizer, length=4096, seed=0, index=7)
    ruler.score(sample, what_the_model_wrote)

Tasks, kinds of text, numbers and metrics are those of the benchmark; the wording is fastkv's own, so results compare
policies with each other, not with published tables. The essays are generated prose or the user's own files. `qa_1` and
`qa_2` read SQuAD and HotpotQA from a local file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import FastKVError
from .niah import KINDS, niah, tracking
from .qa import SOURCES, documents
from .text import Draft, Request, Sample, Tokenizer, counter, longest
from .words import FREQUENT_LEAST, common_words, frequent_words

__all__ = ["TASKS", "Sample", "generate", "score"]

CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the reference strings that occur in the prediction, 0 to 1; of every task but question answering.

    Case does not matter, and control characters separate words. Raises: FastKVError without a reference string.
    """
    found = _found(prediction, answers)
    return sum(found) / len(found)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the reference strings, which say the same, occurs in the prediction, else 0; otherwise as above."""
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    if isinstance(answers, str) or not answers:
        raise FastKVError(
            f"a prediction is marked with a sequence of at least one answer, got {answers!r}; pass a tuple"
        )
    text = CONTROL.sub("\n", prediction).lower()
    return [answer.lower() in text for answer in answers]


@dataclass(frozen=True)
class Task:
    """How a task is written and marked; `least` is the smallest number of filler units that makes sense."""

    write: Callable[[Request], Draft]
    metric: Callable[[str, tuple[str, ...]], float] = string_match_all
    least: int = 1


TASKS = {
    **dict.fromkeys(KINDS, Task(niah)),
    "vt": Task(tracking),
    "cwe": Task(common_words),
    "fwe": Task(frequent_words, least=FREQUENT_LEAST),
    **dict.fromkeys(SOURCES, Task(documents, string_match_part)),
}


def generate(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int = 0,
    index: int = 0,
    *,
    depth: float | None = None,
    text: str | Path | None = None,
    data: str | Path | None = None,
) -> Sample:
    """One sample of `task`; the same arguments always give the same one.

    The prompt and `tokens_to_generate` together have at most `length` tokens, and with one more unit of filler (a
    sentence, a line, a word and its repetitions, a document) they would have more.

    Args:
        task: one of `TASKS`.
        tokenizer: of the model, special tokens included as it adds them; or a function that counts a text's tokens.
        length: tokens.  seed, index: of the set of samples, and in it.
        depth: where to put the needles that are asked for, 0 to 1; at random places if None. For niah tasks.
        text: file or folder of .txt and .md files for the essays; generated prose if None. For niah tasks with essays.
        data: the file with the questions. For qa tasks, which need it.
    Raises: FastKVError for an unknown task, an argument that is not for it, a file that cannot be used, or a length
        that is too short.
    """
    if task not in TASKS:
        raise FastKVError(f"expected one of the tasks {', '.join(TASKS)}, got {task!r}; choose one of them")
    essays = task in KINDS and KINDS[task].haystack == "essay"
    for name, value, has in (("depth", depth, task in KINDS), ("text", text, essays), ("data", data, task in SOURCES)):
        if value is not None and not has:
            raise FastKVError(f"{task} has no {name}, got {name}={value!r}; leave it out or choose another task")
    draft = TASKS[task].write(Request(task, length, seed, index, depth, text, data))
    return longest(draft, counter(tokenizer), length, TASKS[task].least)


def score(sample: Sample, prediction: str) -> float:
    """RULER's mark of what a model wrote, 0 to 1: the share of the answers in it, for `qa` whether any is in it."""
    if sample.task not in TASKS:
        return string_match_all(prediction, sample.answers)
    return TASKS[sample.task].metric(prediction, sample.answers)
