"""What the bundled model is trained on: stages from short to long, and the batches of each."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from .tasks import TASKS, VOCABULARY, generate, max_questions

HELD_OUT = 1_000_000  # text seeds below are for evaluation, those from here on for training
IGNORE = -100


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `batch` texts; each batch has one length, drawn from `lengths`, and a mix of `tasks`."""

    name: str
    steps: int
    batch: int
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    questions: int = 16  # per text, or as many as the task allows


@dataclass(frozen=True)
class Round:
    """Stages under one warm-up and cosine; the second round starts from the stored weights of the first."""

    learning_rate: float
    stages: tuple[Stage, ...]


ROUNDS = (
    Round(
        1.5e-3,
        (
            Stage("repeats", 60, 16, (64, 96), tasks=()),
            Stage("short", 150, 16, (96, 128), questions=3),
            Stage("medium", 150, 8, (256, 384), questions=8),
            Stage("1k", 300, 3, (1024,)),
            Stage("2k", 100, 2, (1536, 2048), questions=24),
            Stage("4k", 120, 1, (3072, 4096, 5120), questions=24),
        ),
    ),
    Round(
        1e-3,
        (
            Stage("1k-2k", 200, 2, (1024, 2048), questions=24),
            Stage("1k-5k", 550, 1, (1024, 2048, 4096, 5120), questions=24),
        ),
    ),
)


@dataclass
class Record:
    """What the model card tells about a run, and where to resume; stored as training.json beside the weights."""

    seed: int
    threads: int
    rounds: int = 0  # finished
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def repeated_batch(stage: Stage, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words, repeated with a random period.

    Returns: ids and labels [B, length]; labels count the repetitions.
    """
    ids = torch.empty(stage.batch, length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    for row, label in zip(ids, labels):
        period = rng.randint(4, length // 2)
        pool = range(4, len(VOCABULARY))
        # Words that recur within a period force a match on more than the last word.
        words = rng.sample(pool, period) if rng.random() < 0.5 else rng.choices(rng.sample(pool, period // 2), k=period)
        row[:] = torch.tensor((words * (length // period + 1))[:length])
        label[period + 2 :] = row[period + 2 :]
    return ids, labels


def text_batch(
    stage: Stage, length: int, seed: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts followed by their questions and answers.

    Returns: ids and labels [B, T], padded right; labels count the answers and the <eos> after each.
    """
    rows = []
    for i in range(stage.batch):
        task = stage.tasks[(seed + i) % len(stage.tasks)]
        sample = generate(task, length, seed + i, min(stage.questions, max_questions(task, length)))
        ids = tokenizer(sample.context).input_ids
        labels = [IGNORE] * len(ids)
        for question, answer in zip(sample.questions, sample.answers):
            asked = tokenizer(question, add_special_tokens=False).input_ids
            told = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            ids += asked + told
            labels += [IGNORE] * len(asked) + told
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    counted = [labels + [IGNORE] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(padded), torch.tensor(counted)
