"""One case of the verdict on a trained model: right answers, next tokens and attention errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastkv import Budget, FastKVError, patched
from fastkv.demo import load
from fastkv.demo.measure import Questions, make_questions
from fastkv.demo.tasks import TASKS
from fastkv.evaluation import fidelity
from fastkv.evaluation.equal_bytes import assert_equal_bytes, stored_bytes, token_bytes

from .cases import FULL, LATER, RECENT, SINKS, WHOLE, Case


@dataclass(frozen=True)
class Settings:
    """What all results of the verdict share.

    Attributes:
        seeds: groups of texts, or synthetic keys, the unit of the standard errors.  first: seed of the first text; no
            other measurement of the project has used the seeds from here on.
        texts: of each task in a group, one question each.  context: tokens of a prompt with its answer.
        stretches: of held-out text in a group, whose last `continued` tokens come after a prompt of `context`.
    """

    seeds: int = 10
    first: int = 950_000
    texts: int = 1
    context: int = 1024
    stretches: int = 2
    continued: int = 64


@dataclass(frozen=True)
class Answered:
    """What a cache did while the reference answers were fed to the N questions of a task.

    attention: of each layer [N, A - 1, Hq * Dv]; log_probs: [N, A, V] float64, of the words of the answer.
    """

    attention: dict[int, Tensor]
    log_probs: Tensor


class TrainedBench:
    """A trained model, the questions of all tasks, and what the full cache makes of them.

    Args: directory: of the model; settings: of all results.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.settings = settings
        self.model, tokenizer = load_bf16(directory)
        number = settings.seeds * settings.texts
        self.asked = [make_questions(tokenizer, task, settings.context, number, settings.first) for task in TASKS]
        self.full = [answered(self.model, questions, LATER) for questions in self.asked]

    def run(self, case: Case) -> dict[str, Any]:
        """Measure one case.

        Raises: FastKVError if the cache does not hold the bytes of MomentKV.
        """
        if case.policy == FULL:
            return {"right": {LATER: self.by_seed([right(*both) for both in zip(self.asked, self.full)])}}
        first = self.asked[0].prompts[:1, :1]
        budget = budget_of(self.model, case, first)
        row: dict[str, Any] = {"right": {}, "kl": {}, "error": {}}
        with patched(self.model, case.policy, budget, correction=case.correction):
            row |= held(self.model, case, budget, first)
            for read in (WHOLE, LATER):
                found = [answered(self.model, questions, read) for questions in self.asked]
                row["right"][read] = self.by_seed([right(*both) for both in zip(self.asked, found)])
                row["kl"][read] = self.by_seed([divergence(*both) for both in zip(found, self.full)])
                row["error"][read] = self.by_seed(
                    [mean_distance(one.attention, full.attention) for one, full in zip(found, self.full)]
                )
        return row

    def by_seed(self, tasks: list[Tensor]) -> list[float]:
        """Means over the texts of a seed and over the tasks; tasks: a number of every text [N] each."""
        return torch.stack(tasks).unflatten(1, (self.settings.seeds, -1)).mean((0, 2)).tolist()


def load_bf16(directory: Path) -> tuple[Any, Any]:
    """The model in bf16, so that its caches are, and its tokenizer."""
    return load(dtype=torch.bfloat16, directory=directory)


@torch.no_grad()
def budget_of(model: Any, case: Case, first: Tensor) -> Budget:
    """The bytes that MomentKV holds with the tokens of the case; first [1, T]: tokens of a prompt."""
    with patched(model, "momentkv", Budget(tokens=case.tokens, sinks=SINKS, recent=RECENT)):
        bound = stored_bytes(model(first, use_cache=True).past_key_values)
    return Budget(bytes=bound, sinks=SINKS, recent=RECENT)


@torch.no_grad()
def held(model: Any, case: Case, budget: Budget, first: Tensor) -> dict[str, Any]:
    """Tokens per KV head and bytes of a sequence in the patched model.

    Raises: FastKVError if the bytes are more than the budget's, or less by a token per head.
    """
    cache = model(first, use_cache=True).past_key_values
    assert budget.bytes is not None
    assert_equal_bytes({case.id: cache}, budget.bytes)
    nbytes = {"stored": stored_bytes(cache), "bound": budget.bytes, "token": token_bytes(cache)}
    return {"kept": cache.layers[0].cache.rule.layout.total, "bytes": nbytes}


@torch.no_grad()
def answered(model: Any, questions: Questions, read: str) -> Answered:
    """Read the prompts, whole or the question by itself, then feed the reference answers word by word."""
    parts = [questions.prompts]
    if read == LATER:
        parts = list(questions.prompts.tensor_split([questions.prompts.shape[1] - questions.question], 1))
    cache = None
    for part in parts:
        out = model(part, past_key_values=cache, logits_to_keep=1, use_cache=True)
        cache = out.past_key_values
    attention, log_probs = fidelity.feed(model, questions.answers[:, :-1], cache)
    first = out.logits[:, -1:].double().log_softmax(-1)
    return Answered(attention, torch.cat([first, log_probs], 1))


def right(questions: Questions, found: Answered) -> Tensor:
    """[N] float64, 1 where greedy decoding gives the reference answer."""
    return (found.log_probs.argmax(-1) == questions.answers).all(-1).double()


def mean_distance(attention: dict[int, Tensor], full: dict[int, Tensor]) -> Tensor:
    """[N], mean of |o - full| / |full| over layers and tokens of attention outputs, [N, T, Hq * Dv] of each layer."""
    o, whole = (torch.stack([*layers.values()]).double() for layers in (attention, full))
    return ((o - whole).norm(dim=-1) / whole.norm(dim=-1)).mean((0, 2))


def divergence(found: Answered, full: Answered) -> Tensor:
    """[N], mean over words of the KL of next tokens from the full cache, nats."""
    return (full.log_probs.exp() * (full.log_probs - found.log_probs)).sum(-1).mean(-1)


def check_held(case: Case, nbytes: dict[str, int]) -> None:
    """Raise FastKVError unless the bytes held are at most the bound, and one more token would be too much."""
    if not nbytes["bound"] - nbytes["token"] < nbytes["stored"] <= nbytes["bound"]:
        raise FastKVError(
            f"{case.id} must hold more than {nbytes['bound'] - nbytes['token']} and at most {nbytes['bound']} bytes, "
            f"got {nbytes['stored']}; all contestants must have the same Budget(bytes=...)"
        )
