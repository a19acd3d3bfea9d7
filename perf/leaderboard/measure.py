"""One cell of the leaderboard: what a cache of a text answers, and how far its next tokens are from the full one's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkv import Budget, FastKVCache, patch, patched, policies, unpatch
from fastkv.api import answers, forked
from fastkv.cache.layout import cost
from fastkv.lab import facts
from fastkv.lab.reading import Reading
from fastkv.lab.reading import forced as log_probabilities
from fastkv.lab.reading import read as cache_of

NEW = 24  # tokens of an answer at most
TOLD = ("commit", "torch", "transformers", "cpu")  # of the environment, in every row


@dataclass(frozen=True)
class Answer:
    """What the full cache says to a question.

    Attributes: ids: tokens up to the end of the fact's value.  log_probs: [len(ids), V] of the full cache.
    """

    question: facts.Question
    ids: list[int]
    log_probs: Tensor


@dataclass(frozen=True)
class Text:
    """A text that was read, and what the full cache makes of it.

    Attributes: asked: questions in all.  answers: those that the full cache answers.  next: [T, V] log-probabilities of
    the text that goes on.
    """

    sample: facts.Sample
    reading: Reading
    asked: int
    answers: list[Answer]
    next: Tensor


@torch.no_grad()
def read(model: Any, tokenizer: Any, sample: facts.Sample) -> Text:
    """Read a text and ask the full cache."""
    reading = Reading.of(unpatch(model), torch.tensor([sample.prefix], device=model.device))
    told = answered(model, tokenizer, reading.full(), reading.ids, sample.questions)
    (goes_on,) = log_probabilities(model, reading.full(), [sample.continuation])
    return Text(sample, reading, len(sample.questions), told, goes_on)


def answered(model: Any, tokenizer: Any, cache: Any, seen: Tensor, questions: list[facts.Question]) -> list[Answer]:
    """What the full cache of tokens `seen` [1, N] says to those questions that it answers."""
    found: list[tuple[facts.Question, list[int]]] = []
    written = answers(model, tokenizer, cache, seen, [question.ids for question in questions], NEW)
    for question, spoken in zip(questions, written):
        starts = ((n, tokenizer.decode(spoken[:n], skip_special_tokens=True)) for n in range(1, len(spoken) + 1))
        end = next((n for n, start in starts if question.answered_by(start)), None)
        if end is not None:
            found.append((question, spoken[:end]))
    along = forced(model, forked(cache, len(found)), found) if found else []
    return [Answer(*one, log_probs) for one, log_probs in zip(found, along)]


def forced(model: Any, cache: Any, answers: list[tuple[facts.Question, list[int]]]) -> list[Tensor]:
    """Log-probabilities [len(ids), V] along given answers, one a row of the cache."""
    rows = log_probabilities(model, cache, [question.ids + said[:-1] for question, said in answers])
    return [row[-len(said) :] for row, (_, said) in zip(rows, answers)]


def tokens_of(
    model: Any, keep: float, num: int, equal: str, policy: policies.Policy, settings: dict[str, Any]
) -> tuple[Budget, dict[str, Any]]:
    """The share `keep` of the text's tokens, or the tokens that fit into that share of the bytes of a bf16 cache.

    Returns: the budget, in tokens or a share of them, and the rest of the settings, as `fastkv.patch` decides them for
        that share of the bytes.
    """
    rest = {name: value for name, value in settings.items() if name != "heads"}
    heads = settings.get("heads", "calibrated")
    if equal == "tokens":
        return Budget(keep=keep, heads=heads), rest
    text = model.config
    hkv, dim, layers = text.num_key_value_heads, text.head_dim, text.num_hidden_layers
    rows = torch.empty(1, hkv, 1, dim, dtype=torch.bfloat16, device="meta")
    bounded = Budget(compress=1 / keep, heads=heads)
    with patched(model, policy, bounded, **rest):
        cache = FastKVCache(model).compressed[0].cache
        known = cache.config.budget
        spent = cost(rows, rows, partial(cache.plan.layout, hkv, torch.device("cpu")), ragged=known.shared is not None)
        told = rest | {"slots": cache.config.slots.name}
        return replace(bounded, compress=None, tokens=known.average(layers, num, spent)), told


def caches(model: Any, text: Text, policy: Any, budget: Budget, settings: dict[str, Any]) -> FastKVCache:
    """The cache of a text; read for itself if it is read in blocks."""
    if settings.get("prefill_block") is None:
        return text.reading.compressed(policy, budget, **settings)
    patch(model, policy, budget, **settings)
    return cache_of(model, text.reading.ids)


@torch.no_grad()
def cell(
    model: Any, tokenizer: Any, text: Text, name: str, keep: float, equal: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Right answers, KL of answers and of the text that goes on, and bytes of one cache."""
    policy = policies.get(name)
    budget, told = tokens_of(model, keep, len(text.sample.prefix), equal, policy, settings)
    cache = caches(model, text, policy, budget, told)
    found: dict[str, Any] = {"tokens": budget.tokens, "nbytes": cache.nbytes()}
    found["slots"] = cache.compressed[0].cache.config.slots.name
    if text.answers:
        found |= judged(model, tokenizer, cache, text.reading.ids, text.answers)
    (log_probs,) = log_probabilities(model, cache.clone(), [text.sample.continuation])
    found["text_kl"] = kl(text.next, log_probs).mean().item()
    return found | {"top1": (text.next.argmax(-1) == log_probs.argmax(-1)).float().mean().item()}


def judged(model: Any, tokenizer: Any, cache: FastKVCache, seen: Tensor, known: list[Answer]) -> dict[str, Any]:
    """How many answers a cache of `seen` generates too, and the KL along the full cache's, mean over questions."""
    told = [(answer.question, answer.ids) for answer in known]
    spoken = answers(model, tokenizer, cache, seen, [question.ids for question, _ in told], NEW)
    replies = [tokenizer.decode(ids, skip_special_tokens=True) for ids in spoken]
    right = [question.answered_by(reply) for (question, _), reply in zip(told, replies)]
    apart = [kl(a.log_probs, b).mean().item() for a, b in zip(known, forced(model, cache.fork(len(told)), told))]
    found = {"asked": len(told), "right": sum(right), "answer_kl": sum(apart) / len(apart)}
    return found | {"replies": replies}


def kl(full: Tensor, other: Tensor) -> Tensor:
    """KL in nats of each row of log-probabilities [T, V]."""
    return (full.exp() * (full - other)).sum(-1)


def seen(sample: facts.Sample) -> Iterator[facts.Sample]:
    """A text for each question, which is read with it: the prefix then ends before the question's last token."""
    for question in sample.questions:
        with_question = [*sample.prefix, *question.ids[:-1]]
        alone = replace(question, ids=question.ids[-1:])
        yield replace(sample, prefix=with_question, questions=[alone])


def given(text: Text, seed: int, told: dict[str, Any]) -> dict[str, Any]:
    """A text and the full cache's part of it, for `presses.py`, which knows nothing of fastkv."""
    answers = [
        {"ids": one.question.ids, "answer": one.question.answer, "said": one.ids, "log_probs": one.log_probs}
        for one in text.answers
    ]
    told = {name: told[name] for name in ("commit", "cpu")}
    ends = {"prefix": text.sample.prefix, "continuation": text.sample.continuation, "next": text.next}
    return {"seed": seed, "answers": answers, **ends, "told": told}
