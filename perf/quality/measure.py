"""One case: right answers and attention errors for every seed, and the bytes of the cache; or its fidelity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from fastkv import Budget, FastKVError, patched, policies
from fastkv.corrections import vector
from fastkv.demo import load, policy_of
from fastkv.demo.measure import Measured, make_questions, measure, relative_error
from fastkv.demo.tasks import TASKS, generate
from fastkv.evaluation import fidelity
from fastkv.evaluation.equal_bytes import assert_equal_bytes, equal_bytes, stored_bytes, token_bytes
from fastkv.evaluation.fidelity import summarise
from tools import language_model
from tools.language_model import stretches

from .cases import CONTEXT, FIDELITY, FULL, LANGUAGE, Case


@dataclass(frozen=True)
class Settings:
    """What results must share to stand in one table.

    Attributes:
        seeds: groups of texts, the unit of the standard errors.  texts: of each task in a group, one question each.
        context: tokens of a prompt with its answer.  steps: last tokens of a fidelity text, fed one at a time.
    """

    seeds: int = 5
    texts: int = 2
    context: int = CONTEXT
    steps: int = 48


class Bench:
    """The bundled model, the questions of all tasks, and what the full cache makes of them."""

    def __init__(self, settings: Settings) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model, self.tokenizer = load()
        self.settings = settings
        number = settings.seeds * settings.texts
        self.asked = [make_questions(self.tokenizer, task, settings.context, number, 0) for task in TASKS]
        self.full = [measure(self.model, questions) for questions in self.asked]
        self.first = self.asked[0].prompts[:1, :1]
        self.whole: tuple[Tensor, fidelity.Full] | None = None

    def run(self, part: str, case: Case) -> dict[str, Any]:
        """Measure one case. A combination that fastkv refuses has the reason in its row.

        Raises: FastKVError if caches do not hold equal bytes.
        """
        row: dict[str, Any] = {}
        if case.policy == FULL:
            row |= self.answers(self.full) | {"bytes": {"total": max(one.nbytes for one in self.full)}}
        else:
            budget = self.budget(case)
            try:
                with self.cache(case, budget):
                    held = self.held(case.id, budget)
                    row |= self.closeness(case) if part in (FIDELITY, LANGUAGE) else self.tasks(case)
            except FastKVError as error:
                if "equal bytes" in str(error):
                    raise
                return row | {"refused": str(error)}
            row["bytes"] = {**held, "total": row.pop("nbytes", None)}
        return row

    def budget(self, case: Case) -> Budget:
        """The bytes that a cache without moments spends on the tokens of the case."""
        shares: dict[str, Any] = {"sinks": case.sinks, "recent": case.recent, "heads": case.heads}
        return equal_bytes(self.model.config, case.tokens, self.model.dtype, **shares)  # always with 16 spare slots

    @contextlib.contextmanager
    def cache(self, case: Case, budget: Budget) -> Iterator[None]:
        """The model with the cache of the case."""
        policy = policies.get(case.policy, **case.hyper) if case.hyper else policy_of(case.policy)
        block = int(case.read) if case.read.isdigit() else None
        options = {"prefill_block": block, "evict_every": case.evict_every, "correction": case.correction}
        with approximated(case.keys_only), patched(self.model, policy, budget, **options):
            yield

    def held(self, name: str, budget: Budget) -> dict[str, int]:
        """Bytes per sequence from `nbytes()`, once they are known to be what all caches of this budget hold."""
        with torch.no_grad():
            cache = self.model(self.first, use_cache=True).past_key_values
        assert budget.bytes is not None
        assert_equal_bytes({name: cache}, budget.bytes)
        return {"stored": stored_bytes(cache), "bound": budget.bytes, "token": token_bytes(cache)}

    def tasks(self, case: Case) -> dict[str, Any]:
        """The questions of all tasks."""
        later = case.read == "context"
        measured = [measure(self.model, questions, question_later=later) for questions in self.asked]
        kept = measured[0].kept
        return self.answers(measured) | {"kept": kept, "nbytes": max(one.nbytes for one in measured)}

    def answers(self, measured: list[Measured]) -> dict[str, Any]:
        """Means of every task and seed: right answers, and |o - full| / |full| of attention outputs."""
        groups = range(self.settings.seeds)
        right = {
            questions.task: [got.right[self.group(seed)].double().mean().item() for seed in groups]
            for questions, got in zip(self.asked, measured)
        }
        error = {
            questions.task: [
                relative_error(got.attention[:, self.group(seed)], full.attention[:, self.group(seed)])
                for seed in groups
            ]
            for questions, got, full in zip(self.asked, measured, self.full)
        }
        return {"right": right, "error": error}

    def group(self, seed: int) -> slice:
        """The texts of a seed among all texts of a task."""
        return slice(seed * self.settings.texts, (seed + 1) * self.settings.texts)

    def closeness(self, case: Case) -> dict[str, Any]:
        """Attention outputs and next tokens on one text for each seed, compared with the full cache."""
        text, full = self.fed()
        measured = fidelity.measure(self.model, text, self.settings.steps, full)
        row = asdict(summarise((case.policy, self.settings.context, case.tokens), measured, full))
        names = ("kept", "own_error", "cosine", "mass", "estimated_mass", "gap", "perplexity_ratio")
        return {"by_seed": row["by_text"], **{name: row[name] for name in names}}

    def fed(self) -> tuple[Tensor, fidelity.Full]:
        """Texts [seeds, context] that end with a question and its answer, and what the full cache makes of them."""
        if self.whole is None:
            steps, context = self.settings.steps, self.settings.context
            drawn = [generate("facts", context, seed) for seed in range(self.settings.seeds)]
            texts = [f"{one.context} {one.questions[0]} {one.answers[0]}" for one in drawn]
            tokens = torch.tensor(self.tokenizer(texts).input_ids)
            unpatched, _ = load()
            self.whole = tokens, fidelity.read_full(unpatched, tokens, steps)
        return self.whole


class LanguageBench(Bench):
    """The language model, held-out texts [seeds, context], and what the full cache makes of them."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model, self.tokenizer = load(directory=directory)
        self.settings = settings
        ids = language_model.encoded(self.tokenizer, language_model.corpus()[1])
        text = stretches(ids, settings.seeds, settings.context, seed=0)
        self.first, self.whole = text[:1, :1], (text, fidelity.read_full(self.model, text, settings.steps))


@contextlib.contextmanager
def approximated(share: float | None) -> Iterator[None]:
    """VECTOR with p_a = share (1 - p_c): so many pairs become two keys each. None: as the library does.

    p_a follows from the budget and is no option of `patch`, so its ablation puts another rule in its place.
    """
    if share is None:
        yield
        return

    def keys(tokens: int, reserved: int, keep: float | None) -> int:
        return 2 * max(min(int(share * tokens), tokens - max(reserved, 1)), 0)

    with mock.patch.object(vector, "key_only", keys):
        yield
