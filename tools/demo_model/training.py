"""What the demonstration models are trained on, stages from short to long, and how: the loss and the steps.

The first stage repeats random words, so that attention learns to continue what it has seen; then come facts in filler.
The loss counts the answers, and a little everything else. Many questions follow each text, so that one long text gives
many gradients.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fastkv.demo.tasks import TASKS, VOCABULARY, generate, max_questions

HELD_OUT = 1_000_000  # text seeds below are for evaluation, those from here on for training
IGNORE = -100
REST_WEIGHT = 0.1  # loss weight of the words that are not an answer
WARMUP_STEPS = 20
FINAL_RATE = 0.05  # the cosine ends at this share of the learning rate


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


def loss_of(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Cross entropy of the labelled words plus `REST_WEIGHT` times that of the others; and the labelled part alone."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    target, labelled = ids[:, 1:], labels[:, 1:] != IGNORE
    rest = ~labelled & (target != model.config.pad_token_id)
    each = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    main = each[labelled].mean()
    return main + REST_WEIGHT * each[rest].mean(), main.item()


def rate(step: int, total: int) -> float:
    """Share of the learning rate: linear warm-up, then a cosine down to `FINAL_RATE`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


@dataclass(frozen=True)
class Step:
    """One step that was taken: the how-many-th of its stage, loss of the answers (a running mean), tokens, seconds."""

    stage: Stage
    number: int
    loss: float
    tokens: int
    seconds: float

    @property
    def last(self) -> bool:
        """Whether the stage ends with it."""
        return self.number == self.stage.steps


def steps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    stages: Sequence[Stage],
    learning_rate: float,
    rng: random.Random,
    text_seed: int,
    *,
    fused: bool,
) -> Iterator[Step]:
    """Train through all stages under one warm-up and cosine, a step whenever the next one is asked for.

    Args: rng: of lengths and random words; text_seed: of the first text; fused: of AdamW, which decides the rounding.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=fused or None)
    done, total = 0, sum(stage.steps for stage in stages)
    for stage in stages:
        recent = 0.0
        for number in range(1, stage.steps + 1):
            model.train()
            began = time.monotonic()
            length = rng.choice(stage.lengths)
            if stage.tasks:
                ids, labels = text_batch(stage, length, text_seed, tokenizer)
                text_seed += stage.batch
            else:
                ids, labels = repeated_batch(stage, length, rng)
            optimizer.param_groups[0]["lr"] = learning_rate * rate(done, total)
            loss, answers = loss_of(model, ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = answers if number == 1 else 0.9 * recent + 0.1 * answers
            done += 1
            yield Step(stage, number, recent, ids.numel(), time.monotonic() - began)
