"""How RULER marks an answer: by looking for the reference strings in what the model wrote (arXiv:2404.06654)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import FastKVError

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
