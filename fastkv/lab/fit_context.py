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
from ..calibration import describe, fingerprint
from ..calibration.fits import QualityCurve, context_nll, retained, save_curves
from ..errors import FastKVError
from ..integrations.transformers.stock import CACHE
from . import common, reading
from .ruler import WORDS, prose

PENALTY = 2.0
STEEPEST = 50.0  # a curve beyond it is a step
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


class Asked(NamedTuple):
    """Tokens: a context [1, N], its questions, each with its answer, and where each answer starts."""

    context: Tensor
    rests: list[list[int]]
    starts: list[int]


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
            asked = _tokenise(model, tokenizer, write(tokenizer, length, -1 - seed - index))
            triples += _measure(model, policy, keeps, asked)
            if progress is not None:
                progress()
    return triples


def _tokenise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Asked:
    """Tokens of a text on the model's device; only the context gets the tokenizer's special tokens."""
    context = tokenizer(sample.context).input_ids
    questions, answers = (
        [tokenizer(f" {one}", add_special_tokens=False).input_ids for one in texts]
        for texts in (sample.questions, sample.answers)
    )
    rests = [question + answer for question, answer in zip(questions, answers)]
    return Asked(torch.tensor([context], device=model.device), rests, [len(question) for question in questions])


def _measure(model: PreTrainedModel, policy: str, keeps: Sequence[float], asked: Asked) -> list[Triple]:
    """One triple for each share that keeps another number of tokens."""
    length = asked.context.shape[1]
    decoder: Any = model.get_decoder()
    read = decoder(asked.context, use_cache=True)
    config = model.config.get_text_config(decoder=True)
    softcap = getattr(config, "final_logit_softcapping", None)
    nll = float(context_nll(read.last_hidden_state, asked.context, model.get_output_embeddings(), softcap))
    full = _answer_nll(model, read[CACHE], asked)
    triples = []
    kept = {max(math.ceil(keep * length), SINKS + RECENT): keep for keep in keeps}
    for tokens, keep in sorted(kept.items()):
        with patched(model, policy, Budget(keep=keep, sinks=SINKS, recent=RECENT)):
            cache = model(asked.context, logits_to_keep=1, use_cache=True)[CACHE]
            compressed = _answer_nll(model, cache, asked)
        triples.append(Triple(min(tokens / length, 1.0), nll, min(max(full, FLOOR) / max(compressed, FLOOR), 1.0)))
    return triples


def _answer_nll(model: PreTrainedModel, cache: Any, asked: Asked) -> float:
    """Mean NLL of the tokens of all answers; uses the cache up."""
    cache.batch_repeat_interleave(len(asked.rests))
    said = [
        log_probs[start - 1 : -1].gather(-1, torch.tensor(rest[start:], device=log_probs.device)[:, None])
        for log_probs, rest, start in zip(reading.forced(model, cache, asked.rests), asked.rests, asked.starts)
    ]
    return -float(torch.cat(said).mean())


def fit(triples: Sequence[Triple], penalty: float = PENALTY) -> tuple[float, float]:
    """alpha and beta of `fastkv.calibration.fits`, by asymmetric least squares (Compactor, Sec. 3.5).

    Minimised is the mean over (r, c, y) of w (f(r) - y)^2. Where the curve promises more quality than was measured,
    f > y, it asks for too small an r, and w = penalty; elsewhere w = 1. The paper names no penalty. With 2, an error
    that spoils answers weighs as much as two that waste memory; a large one gives the lower envelope of the triples.

    The unknowns are the steepness at the smallest and at the largest NLL: a scan of both finds the right valley, L-BFGS
    in float64 its bottom. Deterministic. If all NLLs are equal, alpha = 0. Steepness stays within +-50.
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

    steps = torch.linspace(-STEEPEST, STEEPEST, 40, dtype=torch.float64)  # even, so that none is 0, where f is linear
    grid = torch.cartesian_prod(steps, steps)
    ends = grid[torch.stack([loss(row) for row in grid.split(40)]).argmin()].clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [ends], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    @torch.enable_grad()
    def step() -> float:
        optimiser.zero_grad()
        error = loss(ends)
        error.backward()  # type: ignore[no-untyped-call]
        return float(error.detach())

    optimiser.step(step)
    first, last = (float(end) for end in ends.detach().clamp(-STEEPEST, STEEPEST))
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
    save_curves(file, fitted)
    console.print(f"{file} written. Use it with\nfastkv.Budget(quality=0.95, calibration={str(file)!r}).")
