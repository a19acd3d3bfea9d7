"""One case of the verdict on a trained model: attention errors, next tokens, right answers, and the evicted mass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from fastkv import Budget, FastKVError, patched
from fastkv.corrections import centroids
from fastkv.demo import load
from fastkv.demo.measure import Questions, make_questions
from fastkv.demo.tasks import TASKS, generate
from fastkv.evaluation import fidelity
from fastkv.evaluation.equal_bytes import assert_equal_bytes, stored_bytes, token_bytes

from .cases import FULL, LATER, RECENT, SINKS, WHOLE, Case

ROUNDING = 1e-4  # nats by which an estimate in float32 may exceed the true mass without meaning it


@dataclass(frozen=True)
class Settings:
    """What all results of the verdict share.

    Attributes:
        seeds: groups of texts, or synthetic keys, the unit of the standard errors.  first: seed of the first text; no
            other measurement of the project has used the seeds from here on.
        texts: of each task in a group, one question each.  context: tokens of a prompt with its answer.
        fed: last tokens of a text that are fed one at a time where masses are compared.
    """

    seeds: int = 6
    first: int = 700_000
    texts: int = 4
    context: int = 1024
    fed: int = 48


@dataclass(frozen=True)
class Answered:
    """What a cache did while the reference answers were fed to the N questions of a task.

    attention: [layers, N, A - 1, Hq * Dv]; log_probs: [N, A, V] float64, of the words of the answer.
    """

    attention: Tensor
    log_probs: Tensor


class TrainedBench:
    """A trained model, the questions of all tasks, and what the full cache makes of them.

    Args: directory: of the model; settings: of all results.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.settings = settings
        self.model, tokenizer = load(directory=directory)
        number = settings.seeds * settings.texts
        self.asked = [make_questions(tokenizer, task, settings.context, number, settings.first) for task in TASKS]
        self.full = [answered(self.model, questions, LATER) for questions in self.asked]
        drawn = [generate("facts", settings.context, settings.first + seed) for seed in range(settings.seeds)]
        texts = [f"{one.context} {one.questions[0]} {one.answers[0]}" for one in drawn]
        self.texts = torch.tensor(tokenizer(texts).input_ids)
        self.fed = fidelity.read_full(self.model, self.texts, settings.fed)

    def run(self, case: Case) -> dict[str, Any]:
        """Measure one case.

        Raises: FastKVError if the cache does not hold the bytes of MomentKV.
        """
        if case.policy == FULL:
            return {"right": {LATER: self.by_seed([self.right(*both) for both in zip(self.asked, self.full)])}}
        first = self.asked[0].prompts[:1, :1]
        with patched(self.model, "momentkv", Budget(tokens=case.tokens, sinks=SINKS, recent=RECENT)), torch.no_grad():
            bound = stored_bytes(self.model(first, use_cache=True).past_key_values)
        budget = Budget(bytes=bound, sinks=SINKS, recent=RECENT)
        row: dict[str, Any] = {"error": {}, "kl": {}, "right": {}}
        with sketch_share(case.share), patched(self.model, case.policy, budget, correction=case.correction):
            with torch.no_grad():
                cache = self.model(first, use_cache=True).past_key_values
            assert_equal_bytes({case.id: cache}, bound)
            row["bytes"] = {"stored": stored_bytes(cache), "bound": bound, "token": token_bytes(cache)}
            row["kept"] = cache.layers[0].cache.rule.layout.total
            for read in (WHOLE, LATER):
                found = [answered(self.model, questions, read) for questions in self.asked]
                row["error"][read] = self.by_seed([distance(*both) for both in zip(found, self.full)])
                row["kl"][read] = self.by_seed([divergence(*both) for both in zip(found, self.full)])
                row["right"][read] = self.by_seed([self.right(*both) for both in zip(self.asked, found)])
            return row | self.masses()

    def masses(self) -> dict[str, Any]:
        """What eviction costs in a layer itself, and how the estimated mass of the evicted tokens lies to the true."""
        measured = fidelity.measure(self.model, self.texts, self.settings.fed, self.fed)
        heads = measured.heads
        own = heads.own_error.mean((0, 2, 3)).tolist()
        gap = heads.gap[heads.log_evicted.isfinite() & heads.log_estimate.isfinite()]
        if not gap.numel():
            return {"own": own}
        return {"own": own, "gap": gap.mean().item(), "exceeds": (gap < -ROUNDING).double().mean().item()}

    def right(self, questions: Questions, found: Answered) -> Tensor:
        """[N] float64, 1 where greedy decoding gives the reference answer."""
        return (found.log_probs.argmax(-1) == questions.answers).all(-1).double()

    def by_seed(self, tasks: list[Tensor]) -> list[float]:
        """Means over the texts of a seed and over the tasks; tasks: a number of every text [N] each."""
        return torch.stack(tasks).unflatten(1, (self.settings.seeds, -1)).mean((0, 2)).tolist()


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
    return Answered(torch.stack([*attention.values()]), torch.cat([first, log_probs], 1))


def distance(found: Answered, full: Answered) -> Tensor:
    """[N], mean of |o - full| / |full| of attention outputs over layers and words."""
    error = (found.attention - full.attention).norm(dim=-1) / full.attention.norm(dim=-1)
    return error.mean((0, 2)).double()


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


@contextlib.contextmanager
def sketch_share(share: int | None) -> Iterator[None]:
    """Centroids in a byte for every `share` bytes of pairs; None: as the library has it.

    The share follows from the policy and is no option of `patch`, so other shares are put in its place.
    """
    with mock.patch.object(centroids, "SHARE", share or centroids.SHARE):
        yield
