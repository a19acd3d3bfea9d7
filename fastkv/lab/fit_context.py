"""`fastkv calibrate context`: fit how much of a context a wanted quality needs, for one model and some policies.

What compression does to answers is measured as triples: share kept, NLL of the context, quality left.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import policies
from ..api import patched
from ..budget import Budget
from ..calibration.files import describe, fingerprint
from ..calibration.quality import QualityCurve, context_nll, retained, save
from ..errors import FastKVError
from ..integrations.transformers.stock import CACHE
from . import common, reading
from .ruler import WORDS, prose

PENALTY = 2.0
STEEPEST, FINEST = 50.0, 1e-7  # a curve beyond the first is a step; how exactly its steepness is fitted
KEEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024)
SINKS, RECENT = 4, 16
FLOOR = 0.05  # nats per token below which an answer counts as certain

FILLERS = ("varied", "repeated", "random")
QUESTIONS = 4  # at most, for each text; they share its compressed context
FACT_EVERY, MOST_FACTS = 96, 48  # tokens of an English text for each fact; no adjective or noun is used twice


class Triple(NamedTuple):
    """One measurement: share of the context kept, mean token NLL of the context, quality that was left, in [0, 1]."""

    keep: float
    nll: float
    quality: float


class Sample(NamedTuple):
    """A text and some questions about it; `context + " " + questions[i]` is to be continued by `answers[i]`."""

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


Write: TypeAlias = Callable[[PreTrainedTokenizerBase, int, int], Sample]  # tokenizer, tokens and seed to a text


def english_text(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Sample:
    """Facts in English prose, about `length` tokens by this tokenizer, for any model.

    Filler takes turns: `varied` sentences, two `repeated` ones, or log lines of `random` digits.
    """

    def tokens(sentence: str) -> int:
        return len(tokenizer(f" {sentence}", add_special_tokens=False).input_ids)

    rng = random.Random(f"{length}/{seed}")
    num = max(2, min(length // FACT_EVERY, MOST_FACTS))
    owners = list(map(" ".join, zip(rng.sample(WORDS["adjectives"], num), rng.sample(WORDS["nouns"], num))))
    codes = [f"{rng.randrange(1000, 10000)}-{rng.randrange(1000, 10000)}" for _ in owners]
    sentences = [f"The access code of the {owner} is {code}." for owner, code in zip(owners, codes)]
    filler = {"varied": prose(rng), "repeated": cycle(islice(prose(rng), 2)), "random": _log(rng)}
    room = length - sum(map(tokens, sentences))
    while room > 0:
        sentences.append(next(filler[FILLERS[seed % len(FILLERS)]]))
        room -= tokens(sentences[-1])
    rng.shuffle(sentences)
    asked = rng.sample(range(num), min(QUESTIONS, num))
    questions = [f"Question: What is the access code of the {owners[one]}? Answer:" for one in asked]
    return Sample(" ".join(sentences), tuple(questions), tuple(f"{codes[one]}." for one in asked))


def _log(rng: random.Random) -> Iterator[str]:
    """Lines that nobody could predict."""
    while True:
        yield f"Entry {rng.randrange(10**6):06d} reads {' '.join(str(rng.randrange(10, 100)) for _ in range(8))}."


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
    write: Write = english_text,
    progress: Callable[[], None] | None = None,
) -> list[Triple]:
    """Measure a policy on generated texts: the data that `fit` wants.

    The context is read and compressed before any question is known, as in Compactor, Sec. 3.5. Quality is

        y = max(NLL(answer | full), floor) / max(NLL(answer | compressed), floor), at most 1,

    with the mean NLL over the tokens of all answers to a context. The floor keeps an answer that is certain either way
    from counting as spoilt: without it, 0.9999 and 0.999 would differ by a factor of ten.

    Args:
        keeps: shares of the context to try. A share below sinks and recent tokens is measured, and reported, as theirs.
        lengths: tokens of the texts.  samples: texts of each length.  seed: of the first text; the others follow.
        write: makes a text of a length.  progress: called after each text.
    """
    common.check_stock("context calibration", model)
    triples = []
    for length in lengths:
        for index in range(samples):
            # The texts of negative seeds are nobody else's: whoever measures counts up.
            triples += _measure(model, tokenizer, policy, keeps, write(tokenizer, length, -1 - seed - index))
            if progress is not None:
                progress()
    return triples


def _measure(
    model: PreTrainedModel, tokenizer: Any, policy: str, keeps: Sequence[float], sample: Sample
) -> list[Triple]:
    """One triple for each share that keeps another number of tokens."""
    ids = tokenizer(sample.context, return_tensors="pt").input_ids.to(model.device)
    encode = partial(tokenizer, add_special_tokens=False)
    asked = [(encode(f" {q}").input_ids, encode(f" {a}").input_ids) for q, a in zip(sample.questions, sample.answers)]
    decoder: Any = model.get_decoder()
    read = decoder(ids, use_cache=True)
    softcap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    nll = float(context_nll(read.last_hidden_state, ids, model.get_output_embeddings(), softcap))
    full = _answer_nll(model, read[CACHE], asked)
    triples, length = [], ids.shape[1]
    kept = {max(math.ceil(keep * length), SINKS + RECENT): keep for keep in keeps}
    for tokens, keep in sorted(kept.items()):
        with patched(model, policy, Budget(keep=keep, sinks=SINKS, recent=RECENT)):
            compressed = _answer_nll(model, reading.read(model, ids), asked)
        triples.append(Triple(min(tokens / length, 1.0), nll, min(max(full, FLOOR) / max(compressed, FLOOR), 1.0)))
    return triples


def _answer_nll(model: PreTrainedModel, cache: Any, asked: list[tuple[list[int], list[int]]]) -> float:
    """Mean NLL of the tokens of all answers, given the tokens of each question and its answer; uses the cache up."""
    cache.batch_repeat_interleave(len(asked))
    scores = reading.forced(model, cache, [question + answer for question, answer in asked])
    said = [
        log_probs[len(question) - 1 : -1].gather(-1, torch.tensor(answer, device=log_probs.device)[:, None])
        for log_probs, (question, answer) in zip(scores, asked)
    ]
    return -float(torch.cat(said).mean())


def fit(triples: Sequence[Triple], penalty: float = PENALTY) -> tuple[float, float]:
    """alpha and beta of `fastkv.calibration.quality`, by asymmetric least squares (Compactor, Sec. 3.5).

    Minimised is the mean over (r, c, y) of w (f(r) - y)^2. Where the curve promises more quality than was measured,
    f > y, it asks for too small an r, and w = penalty; elsewhere w = 1. The paper names no penalty. With 2, an error
    that spoils answers weighs as much as two that waste memory; a large one gives the lower envelope of the triples.

    The unknowns are the steepness at the smallest and at the largest NLL: the best point of a grid of both is the
    middle of a finer one, and so on. Deterministic. If all NLLs are equal, alpha = 0. Steepness stays within +-50.
    """
    if not triples:
        raise FastKVError(
            "fit needs at least one triple (keep, nll, quality), got none; measure some with make_triples"
        )
    keep, nll, quality = torch.tensor(triples, dtype=torch.float64).T
    shares = torch.stack([keep, quality])
    if not (shares.ge(0).all() and shares.le(1).all() and nll.isfinite().all()):
        raise FastKVError("fit needs shares and qualities in [0, 1] and a finite nll, got others; check the triples")
    if not 0 < penalty < float("inf"):
        raise FastKVError(f"penalty must be a positive number, got {penalty}; 1 treats both errors alike")
    low, spread = nll.min(), nll.max() - nll.min()
    place = (nll - low) / spread if spread > 0 else torch.zeros_like(nll)

    def loss(ends: Tensor) -> Tensor:
        excess = retained(keep, torch.lerp(ends[..., :1], ends[..., 1:], place)) - quality
        return (torch.where(excess > 0, penalty, 1.0) * excess.square()).mean(-1)

    steps = torch.linspace(-1, 1, 40, dtype=torch.float64)  # even, so that none is 0, where f is linear
    best, width = torch.zeros(2, dtype=torch.float64), STEEPEST
    while width > FINEST:
        grid = (best + width * torch.cartesian_prod(steps, steps)).clamp(-STEEPEST, STEEPEST)
        best = grid[torch.stack([loss(row) for row in grid.split(40)]).argmin()]
        width /= 4
    first, last = best.tolist()
    alpha = (last - first) / float(spread) if spread > 0 else 0.0
    return alpha, first - alpha * float(low)


def residual(triples: Sequence[Triple], alpha: float, beta: float) -> float:
    """Root mean square of measured minus fitted quality."""
    keep, nll, quality = torch.tensor(triples, dtype=torch.float64).T
    return float((quality - retained(keep, alpha * nll + beta)).square().mean().sqrt())


def run(options: argparse.Namespace) -> None:
    """Measure and fit every policy, print alpha, beta and residual, and write context.json."""
    console = common.console_of()
    for name in options.policies:
        policies.get(name)
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("lengths", max(options.lengths), model, options.model)
    shape, words = fingerprint(model.config), describe(model.config)
    settings = {name: getattr(options, name) for name in ("lengths", "samples", "seed")}
    fitted: list[QualityCurve] = []
    with common.progress(console) as progress:
        bar = progress.add_task("", total=len(options.policies) * len(options.lengths) * options.samples)
        for name in options.policies:
            progress.update(bar, description=name)
            triples = make_triples(model, tokenizer, name, **settings, progress=partial(progress.advance, bar))
            alpha, beta = fit(triples, options.penalty)
            error = residual(triples, alpha, beta)
            fitted.append(QualityCurve(alpha, beta, name, shape, words, len(triples), error))
        progress.update(bar, description="measured")
    for curve in fitted:
        console.print(
            f"{curve.policy:<12} alpha {curve.alpha:8.3f}  beta {curve.beta:8.3f}  residual {curve.residual:.3f}  "
            f"triples {curve.triples}"
        )
    file = options.out / "context.json"
    save(file, fitted)
    console.print(f"{file} written. Use it with\nfastkv.Budget(quality=0.95, calibration={str(file)!r}).")
