"""What compression does to answers: triples of share kept, NLL of the context, and quality left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..api import patched
from ..budget import Budget
from ..demo.tasks import Sample
from ..errors import FastKVError
from .context_texts import TEXTS
from .models import check_stock
from .nll import context_nll

KEEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024)
SHORTEST = 96  # tokens of a generated text
SINKS, RECENT = 4, 16
FLOOR = 0.05  # nats per token below which an answer counts as certain


class Triple(NamedTuple):
    """One measurement: share of the context kept, mean token NLL of the context, quality that was left, in [0, 1]."""

    keep: float
    nll: float
    quality: float


class Asked(NamedTuple):
    """A context [1, N] and its Q questions, each followed by its answer: rests [Q, T], padded on the right.

    `answers` [Q, T] is true for the tokens of the answers.
    """

    context: Tensor
    rests: Tensor
    answers: Tensor


@torch.no_grad()
def make_triples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    *,
    keeps: Sequence[float] = KEEPS,
    lengths: Sequence[int] = LENGTHS,
    samples: int = 12,
    seed: int = 0,
    text: str = "english",
    query_aware: bool = False,
    progress: Callable[[], None] | None = None,
) -> list[Triple]:
    """Measure a policy on generated texts: the data that `fastkv.calibration.context.fit` wants.

    The context is read and compressed before any question is known, as in Compactor, Sec. 3.5. Quality is

        y = max(NLL(answer | full), floor) / max(NLL(answer | compressed), floor), at most 1,

    with the mean NLL over the tokens of all answers to a context. The floor keeps an answer that is certain either way
    from counting as spoilt: without it, 0.9999 and 0.999 would differ by a factor of ten.

    Args:
        model: stock, in eval mode.  tokenizer: its own.  policy: name.
        keeps: shares of the context to try. A share below sinks and recent tokens is measured, and reported, as theirs.
        lengths: tokens of the texts.  samples: texts of each length.
        seed: of the first text; the others follow.
        text: "english" for any model, "demo" for the bundled one.
        query_aware: compress a context together with its first question instead, as when a prompt is read for one
            answer; contexts then survive much stronger compression, but only for that question.
        progress: called after each text.

    Raises: FastKVError for a patched model, an unknown text, or numbers that cannot be used.
    """
    _check(model, keeps, lengths, samples, text)
    triples = []
    for length in lengths:
        for index in range(samples):
            # The texts of negative seeds are nobody else's: training and evaluation of the bundled model count up.
            asked = _tokenise(model, tokenizer, TEXTS[text](tokenizer, length, -1 - seed - index), query_aware)
            triples += _measure(model, policy, keeps, asked)
            if progress is not None:
                progress()
    return triples


def _check(model: PreTrainedModel, keeps: Sequence[float], lengths: Sequence[int], samples: int, text: str) -> None:
    """Raise FastKVError unless `make_triples` can work with its arguments."""
    check_stock("context calibration", model)
    if text not in TEXTS:
        raise FastKVError(f"text must be one of {', '.join(TEXTS)}, got {text!r}")
    if not keeps or not all(0 < keep <= 1 for keep in keeps):
        raise FastKVError(f"keeps must list shares in (0, 1], got {list(keeps)}; for example 0.1, 0.25, 0.5")
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    if not lengths or not all(SHORTEST <= length <= longest for length in lengths):
        raise FastKVError(f"lengths must list numbers of tokens from {SHORTEST} to {longest}, got {list(lengths)}")
    if samples < 1:
        raise FastKVError(f"samples must be at least 1, got {samples}; more of them make a steadier fit")


def _tokenise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, query_aware: bool) -> Asked:
    """Tokens of a text on the model's device; only the context gets the tokenizer's special tokens."""
    context = tokenizer(sample.context).input_ids
    questions, answers = (
        [tokenizer(f" {one}", add_special_tokens=False).input_ids for one in texts]
        for texts in (sample.questions, sample.answers)
    )
    if query_aware:  # the last token of the question waits: what is read after compression predicts the answer
        context += questions[0][:-1]
        questions, answers = [questions[0][-1:]], answers[:1]
    width = max(len(question) + len(answer) for question, answer in zip(questions, answers))
    rests = torch.zeros(len(questions), width, dtype=torch.long)
    wanted = torch.zeros_like(rests, dtype=torch.bool)
    for row, (question, answer) in enumerate(zip(questions, answers)):
        end = len(question) + len(answer)
        rests[row, :end] = torch.tensor(question + answer)
        wanted[row, len(question) : end] = True
    return Asked(*(each.to(model.device) for each in (torch.tensor([context]), rests, wanted)))


def _measure(model: PreTrainedModel, policy: str, keeps: Sequence[float], asked: Asked) -> list[Triple]:
    """One triple for each share that keeps another number of tokens."""
    length = asked.context.shape[1]
    decoder: Any = model.get_decoder()
    read = decoder(asked.context, use_cache=True)
    config = model.config.get_text_config(decoder=True)
    softcap = getattr(config, "final_logit_softcapping", None)
    nll = float(context_nll(read.last_hidden_state, asked.context, model.get_output_embeddings(), softcap))
    full = _answer_nll(model, read.past_key_values, asked)
    triples = []
    kept = {max(math.ceil(keep * length), SINKS + RECENT): keep for keep in keeps}
    for tokens, keep in sorted(kept.items()):
        with patched(model, policy, Budget(keep=keep, sinks=SINKS, recent=RECENT)):
            cache = model(asked.context, logits_to_keep=1, use_cache=True).past_key_values
            compressed = _answer_nll(model, cache, asked)
        triples.append(Triple(min(tokens / length, 1.0), nll, min(max(full, FLOOR) / max(compressed, FLOOR), 1.0)))
    return triples


def _answer_nll(model: PreTrainedModel, cache: Any, asked: Asked) -> float:
    """Mean NLL of the tokens of all answers; uses the cache up."""
    cache.batch_repeat_interleave(len(asked.rests))
    logits = model(asked.rests, past_key_values=cache).logits[:, :-1].float()
    said = logits.log_softmax(-1).gather(-1, asked.rests[:, 1:, None])[..., 0]
    return -float(said[asked.answers[:, 1:]].mean())
