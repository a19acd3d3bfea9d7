"""Text to calibrate on: a file, a folder, standard input or the generator of the bundled model, as token sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..demo.tasks import TASKS, generate
from ..errors import FastKVError
from .models import DEMO

SUFFIXES = (".txt", ".md")
SHORTEST = 96  # tokens of a generated text
PIECE = 1 << 20  # characters read at a time, so that a large file is read only as far as it is needed


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
    for text in documents(source, length):
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


def documents(source: str, length: int) -> Iterator[str]:
    """The text of `source` piece by piece, see `sequences`; for "demo" without end, texts of `length` words each."""
    if source == DEMO:
        yield from _generated(length)
    elif source == "-":
        yield from _pieces(sys.stdin, source)
    else:
        for path in _files(Path(source)):
            try:
                with open(path, encoding="utf-8") as file:
                    yield from _pieces(file, str(path))
            except OSError as error:
                raise FastKVError(f"{path} cannot be read ({error.strerror}); choose a readable text") from error


def _generated(length: int) -> Iterator[str]:
    """Texts of every task in turn, with their question and answer; negative seeds are nobody else's."""
    if length < SHORTEST:
        raise FastKVError(f"generated texts have at least {SHORTEST} tokens, got length {length}; choose a larger one")
    for index in count():
        sample = generate(TASKS[index % len(TASKS)], length, seed=-1 - index)
        yield f"{sample.context} {sample.questions[0]} {sample.answers[0]}"


def _files(path: Path) -> list[Path]:
    """The file, or the texts in the folder and below."""
    if path.is_file():
        return [path]
    found = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    if not found:
        what = f"a folder without {' or '.join(SUFFIXES)} files" if path.is_dir() else "nothing there"
        raise FastKVError(f"expected a text at {path}, got {what}; name a file, a folder, - or {DEMO}")
    return found


def _pieces(file: TextIO, name: str) -> Iterator[str]:
    """The file in pieces that end with a line, as far as its lines are shorter than a piece."""
    try:
        while piece := file.read(PIECE) + file.readline():
            yield piece
    except UnicodeDecodeError as error:
        raise FastKVError(f"{name} is not UTF-8 text; convert it or choose another file") from error
