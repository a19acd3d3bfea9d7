"""`fastkv calibrate`: `heads`, `vector` and `queries` in one pass over text, of which only sums are kept; `context`.

Vector: the maps from keys to values of VECTOR, by ordinary least squares: W = argmin sum_i |k~_i W - v_i|^2 =
(K^T K)^+ K^T V, with k~ the keys before the rotary embedding (VECTOR, arXiv:2605.23258, Section 3.1). The paper fits
one map per layer, from the keys of all KV heads to the values of all (`joint`): it explains far more, but a head then
needs the other heads' keys of the same tokens, so that all heads have to keep the same. A map of its own for each KV
head leaves them free. There is no intercept: attention applies W once, to the weighted sum of keys.

The quality is R^2 = 1 - sum |v_i - k~_i W|^2 / sum |v_i - v_mean|^2, over all dimensions of a head together, on
sequences that were not fitted. As in the paper's tables (its Appendix D calls a negative R^2 worse than the mean), it
is relative to the mean of the values, here of the held-out ones. The theory of its Section 4 divides by |v|^2 instead,
which can only give more: a head that exceeds the threshold here does so there.

Queries: mean query of every head before the rotary embedding, and by how much the length of each pair of numbers that
turn together exceeds, on average, the length of the pair's mean (TriAttention, arXiv:2604.04921, Sec. 4).

Context: what compression does to answers is measured as triples of share kept, NLL of the context and quality left, to
which a curve is fitted (Compactor, arXiv:2507.08143, Sec. 3.5).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import policies
from ..api import patched
from ..budget import Budget
from ..calibration import check_fitted, check_writable, describe, fingerprint, kv_shapes
from ..calibration import fits as files
from ..calibration.fits import QualityCurve, QueryCalibration, VectorMap, context_nll, required_r2, retained
from ..errors import FastKVError
from ..integrations.transformers import rotations
from ..integrations.transformers.calibrate import LENGTH, LONGEST, ROWS, TEXTS, calibrate_heads, sees_everything
from ..integrations.transformers.stock import CACHE
from ..policies import Policy, QueryStatistics, Signals
from ..rotary import Rotary
from . import common, facts, reading
from .reading import full_layers
from .ruler import WORDS, prose

T = TypeVar("T", bound=Any)  # what is fitted
# Directions of the keys whose energy is below this share of the strongest carry only the rounding of the activations.
CUTOFF = 1e-10
# Values that vary less than this share of their energy are constant up to rounding: there is nothing to explain.
CONSTANT = 1e-12
KEEP = 0.25  # of the text, for the picture of heads
SHADES = " ·░▒▓█"  # of a head that keeps next to nothing, ..., nearly all

# Text.


def sequences(source: str, tokenizer: PreTrainedTokenizerBase, length: int, tokens: int) -> Iterator[Tensor]:
    """Token ids of the text, [1, length] int64 each, until there are `tokens` of them or the text ends.

    Documents are packed one after the other, as in pre-training, and cut into sequences; each starts with the
    tokenizer's start token if it has the habit of adding one. The last, shorter rest is dropped.

    Args: source: as in `facts.documents`.
    """
    if tokens < length:
        raise FastKVError(f"expected at least one sequence of {length} tokens, got {tokens} in all; ask for more")
    start = facts.start_of(tokenizer)
    step = length - len(start)
    waiting: list[int] = []
    made = 0
    for text in facts.documents(source):
        waiting += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        while len(waiting) >= step and made + length <= tokens:
            yield torch.tensor([start + waiting[:step]])
            waiting, made = waiting[step:], made + length
        if made + length > tokens:
            return
    if not made:
        facts.check_tokens(source, len(waiting), length)


def written(options: argparse.Namespace, console: Console, fit: Callable[..., T]) -> T:
    """What `fit(model, batches)` makes of the text of the options, in the file of the options."""
    check_writable(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("length", options.length, model, options.model)
    batches = sequences(options.text, tokenizer, options.length, options.tokens)
    with common.progress(console) as shown:
        fitted = fit(model, shown.track(batches, options.tokens // options.length, description="reading"))
    fitted.save(options.out)
    return fitted


def say_use(options: argparse.Namespace, console: Console, tokens: int, use: str) -> None:
    """Which file was written, and how to use it."""
    console.print(f"{options.out} written, from {tokens:,} tokens. Use it:\n  {use}", soft_wrap=True)


# Heads: what they keep is measured by `fastkv.calibrate_heads`.


def picture(shares: Tensor) -> str:
    """Layers from left to right and their heads below each other: the share of a text that each keeps, of shares
    [layers, Hkv] as `HeadShares.shares` gives them for `KEEP`.
    """
    level = (shares * KEEP * (len(SHADES) - 1)).round().long().clamp(max=len(SHADES) - 1)
    rows = ["".join(SHADES[number] for number in head) for head in level.T.tolist()]
    title = f"what each head keeps of a text where a quarter stays ({len(level)} layers from left to right):"
    shades = ", ".join(f"{shade!r} {100 * place // (len(SHADES) - 1)} %" for place, shade in enumerate(SHADES))
    return "\n".join([title, *(f"  head {head:<3}|{row}|" for head, row in enumerate(rows)), f"  {shades}"])


def run_heads(options: argparse.Namespace) -> None:
    """Calibrate, write the file, show which heads keep most and say how to use it."""
    console = common.console_of()
    check_writable(options.out)
    model, tokenizer = common.load(options.model)
    text = None
    if options.text is not None:
        text = tokenizer(facts.read(options.text), return_tensors="pt", verbose=False)["input_ids"]
    total = TEXTS * ROWS * LENGTH if text is None else min(text.shape[1], LONGEST)
    total *= 1 + sees_everything(model)  # each token twice, or once
    with common.progress(console) as shown:
        bar = shown.add_task("calibrating", total=total)
        made = calibrate_heads(model, options.out, text, options.seed, lambda n: shown.advance(bar, n))
    console.print(picture(made.shares(KEEP)), highlight=False)
    use = f'fastkv.patch(model, budget=fastkv.Budget(keep=0.25, heads="{options.out}"))'
    say_use(options, console, made.tokens, use)


# Maps from keys to values.


class PairSums:
    """Sums of products of the keys and values of one layer, per KV head, in float64: all that least squares needs.

    Attributes:
        count: pairs added.  kk: [Hkv, Dk, Dk] K^T K.  kv: [Hkv, Dk, Dv] K^T V.  vv: [Hkv] sum of |v|^2.
        v: [Hkv, Dv] sum of v.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
        self.count = 0
        self.kk = keys.new_zeros(heads, key_dim, key_dim, dtype=torch.float64)
        self.kv = keys.new_zeros(heads, key_dim, value_dim, dtype=torch.float64)
        self.vv = keys.new_zeros(heads, dtype=torch.float64)
        self.v = keys.new_zeros(heads, value_dim, dtype=torch.float64)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add pairs: keys [B, Hkv, N, Dk] before the rotary embedding, values [B, Hkv, N, Dv]."""
        k, v = (pairs.transpose(0, 1).flatten(1, 2).double() for pairs in (keys, values))
        self.count += k.shape[1]
        self.kk += k.mT @ k
        self.kv += k.mT @ v
        self.vv += v.square().sum((1, 2))
        self.v += v.sum(1)

    def solve(self) -> Tensor:
        """The least-squares map, [Hkv, Dk, Dv] fp64; of minimal norm where the keys do not determine it."""
        return torch.linalg.pinv(self.kk, rtol=CUTOFF, hermitian=True) @ self.kv

    def r2(self, weight: Tensor) -> Tensor:
        """R^2 of a map [Hkv, Dk, Dv] on these pairs, [Hkv] fp64; 0 for a head whose values do not vary."""
        weight = weight.to(self.kk)
        residual = self.vv - 2 * (weight * self.kv).sum((1, 2)) + (weight * (self.kk @ weight)).sum((1, 2))
        total = self.vv - self.v.square().sum(1) / self.count
        varies = total > CONSTANT * self.vv
        return torch.where(varies, 1 - residual / torch.where(varies, total, 1), 0)


def fit_vector(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    joint: bool = False,
    held_out: float = 0.1,
    boundary: float = 1.0,
) -> VectorMap:
    """Fit the maps of all full-attention layers of a stock model to text.

    Args:
        model: a transformers model that is not patched, in eval mode.
        batches: token ids, [B, T] each, no padding; B and T may vary. They are read once and nothing of them is kept.
        joint: one map from the keys of all heads of a layer to the values of all, instead of one a KV head.
        held_out: share of the sequences that measure the maps and do not enter them: the first, then evenly spaced.
        boundary: see `required_r2`, which gives the threshold.

    Returns: the maps, on the CPU.
    """
    common.check_stock("fit", model)
    if not 0 < held_out < 1:
        raise FastKVError(f"held_out must be between 0 and 1, got {held_out}; 0.1 holds out every tenth sequence")
    threshold = required_r2(boundary)
    turning = rotations(model, full_layers(model.config), halves=True)
    fitted: dict[int, PairSums] = {}
    measured: dict[int, PairSums] = {}
    tokens = rows = held = 0
    for ids in batches:
        apart = []
        for row in range(rows, rows + len(ids)):
            apart.append(held < held_out * (row + 1))
            held += apart[-1]
        rows += len(ids)
        tokens += ids.numel()
        chosen = torch.tensor(apart)
        for layer, *pairs in pre_rope_pairs(model, turning, ids):
            keys, values = map(side_by_side, pairs) if joint else pairs
            for kept, which in ((fitted, ~chosen), (measured, chosen)):
                kept.setdefault(layer, PairSums(keys, values)).add(keys[which], values[which])
    if not 0 < held < rows:
        raise FastKVError(
            f"fit needs a sequence to fit and one to hold out, got {rows} in all; pass more text or shorter sequences"
        )
    weights, r2, text = {}, {}, model.config.get_text_config(decoder=True)
    for layer, sums in fitted.items():
        weight = sums.solve().float().cpu()
        r2[layer] = measured[layer].r2(weight).cpu()
        weights[layer] = each_head(weight, kv_shapes(text)[layer][0]) if joint else weight
    return VectorMap(weights, r2, threshold, fingerprint(model.config), describe(model.config), tokens)


def side_by_side(rows: Tensor) -> Tensor:
    """What H heads have of a token as one head has it: [B, H, N, D] as [B, 1, N, H * D]."""
    return rows.transpose(1, 2).flatten(2)[:, None]


def each_head(weight: Tensor, heads: int) -> Tensor:
    """A joint map [1, K, H * Dv] by the heads whose values it makes, [H, K, Dv]."""
    return weight[0].unflatten(-1, (heads, -1)).transpose(0, 1).contiguous()


def pre_rope_pairs(
    model: PreTrainedModel, turning: Mapping[int, Rotary], ids: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What every full-attention layer caches for token ids [B, T], with the rotation of the keys undone.

    Args: turning: of each of these layers, see `rotations`.
    Returns: (layer, keys [B, Hkv, T, Dk] fp32, values [B, Hkv, T, Dv]) for each.
    """
    for layer, keys, values in common.read_stock(model, ids):
        positions = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        # The rotation is undone in fp32, as decoding does it.
        yield layer, turning[layer].to(keys.device).unrotate(keys.float(), positions), values


def run_vector(options: argparse.Namespace) -> None:
    """Fit, print R^2 of every head, write the file and say how to use it."""
    console = common.console_of()
    fitted = written(options, console, partial(fit_vector, joint=options.joint, boundary=options.boundary))
    common.show(console, table_of(fitted))
    usable = [use for layer in fitted.weights for use in fitted.usable(layer)]
    console.print(
        f"{sum(usable)} of {len(usable)} heads exceed the threshold of {fitted.threshold:.2f} and may drop values; the "
        "others evict plainly."
    )
    say_use(options, console, fitted.tokens, f'fastkv.patch(model, correction="vector", vector="{options.out}")')


def table_of(fitted: VectorMap) -> Table:
    """Held-out R^2, one row a layer and one column a KV head; heads that fall back to plain eviction say so."""
    heads = range(max(len(r2) for r2 in fitted.r2.values()))
    names = ["all heads"] if fitted.joint else [f"head {head}" for head in heads]
    table = common.table((), ("layer", *names, "mean"), title="held-out R² of values predicted from keys")
    for layer, r2 in fitted.r2.items():
        cells = [f"{x:.3f}{'' if use else ' plain'}" for x, use in zip(r2.tolist(), fitted.usable(layer))]
        table.add_row(str(layer), *cells, f"{r2.mean():.3f}")
    return table


# Statistics of queries.


class QuerySums:
    """Sums over the queries of one layer, in float64.

    Attributes: count: queries of a head.  mean: [Hq, Dk], of queries before the embedding.  length: [Hq, F], of the
        lengths of their pairs after it.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary, self.count = rotary, 0
        self.mean = self.length = torch.zeros((), dtype=torch.float64)

    def add(self, queries: Tensor, positions: Tensor) -> None:
        """Add queries [B, Hq, T, Dk] as turned to `positions` [B, 1, T]."""
        queries = queries.float()
        self.count += queries.shape[0] * queries.shape[2]
        self.mean = self.mean + self.rotary.unrotate(queries, positions).double().sum((0, 2))
        self.length = self.length + self.rotary.lengths(queries).double().sum((0, 2))

    def statistics(self) -> QueryStatistics:
        """What they come to, on the CPU."""
        mean = (self.mean / self.count).float()
        start = torch.zeros(1, dtype=torch.int64, device=mean.device)
        turned = self.rotary.ahead(mean[None, :, None], start[None, None], start)[0, :, 0]
        excess = (self.length / self.count).float() - self.rotary.lengths(turned)
        return QueryStatistics(mean.cpu(), excess.clamp(min=0).cpu())


@dataclass(frozen=True, eq=False)
class Recorder(Policy):
    """Adds up the queries of every block; nothing is ever evicted where it is used. Args: sums: layer -> sums."""

    name = "recorder"
    needs = frozenset({"queries", "memory", "pre_rope"})

    sums: dict[int, QuerySums]

    def remember(self, signals: Signals) -> Tensor:
        """Nothing new, but the sums grow."""
        assert signals.queries is not None and signals.layer.rotary is not None and signals.memory is not None
        positions = signals.positions[:, :1, -signals.queries.shape[2] :]
        self.sums.setdefault(signals.layer.index, QuerySums(signals.layer.rotary)).add(signals.queries, positions)
        return signals.memory

    def score(self, signals: Signals) -> Tensor:
        """Zeros."""
        assert signals.memory is not None
        return signals.memory


@torch.no_grad()
def fit_queries(model: PreTrainedModel, batches: Iterable[Tensor]) -> QueryCalibration:
    """Read text with a stock model.

    Args:
        model: a transformers model that `fastkv.patch` takes, not patched, in eval mode.
        batches: token ids, [B, T] each, no padding; B and T may vary. They are read once and nothing of them is kept.
    Raises: FastKVError if the model cannot be patched or there is nothing to read.
    """
    common.check_stock("fit", model)
    sums: dict[int, QuerySums] = {}
    tokens = 0
    for ids in batches:
        with patched(model, Recorder(sums), Budget(tokens=ids.shape[1], sinks=0, recent=0)):
            model.base_model(input_ids=ids.to(model.device), use_cache=True)
        tokens += ids.numel()
    if not tokens:
        raise FastKVError("fit needs a sequence to read, got none; pass more text or shorter sequences")
    layers = {layer: sums[layer].statistics() for layer in sorted(sums)}
    for layer, known in layers.items():
        if not all(part.isfinite().all() for part in known):
            raise FastKVError(
                f"fit needs finite queries, layer {layer} has others; load the model in bfloat16 or float32"
            )
    return QueryCalibration(layers, fingerprint(model.config), describe(model.config), tokens)


def run_queries(options: argparse.Namespace) -> None:
    """Read, write the file and say how to use it."""
    console = common.console_of()
    use = f'fastkv.patch(model, fastkv.policies.get("triattention", calibration="{options.out}"))'
    say_use(options, console, written(options, console, fit_queries).tokens, use)


# Quality: how much of a context a wanted quality of answers needs, for one model and some policies.

STEEPEST, FINEST = 50.0, 1e-7  # a curve beyond the first is a step; how exactly its steepness is fitted
FLOOR = 0.05  # nats per token below which an answer counts as certain

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


def english_text(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Sample:
    """Facts in English prose, about `length` tokens by this tokenizer, for any model. Filler takes turns: varied
    sentences, two repeated ones, or log lines of random digits.
    """

    def tokens(sentence: str) -> int:
        return len(tokenizer(f" {sentence}", add_special_tokens=False).input_ids)

    rng = random.Random(f"{length}/{seed}")
    num = max(2, min(length // FACT_EVERY, MOST_FACTS))
    owners = list(map(" ".join, zip(rng.sample(WORDS["adjectives"], num), rng.sample(WORDS["nouns"], num))))
    codes = [f"{rng.randrange(1000, 10000)}-{rng.randrange(1000, 10000)}" for _ in owners]
    sentences = [f"The access code of the {owner} is {code}." for owner, code in zip(owners, codes)]
    draw = rng.randrange
    log = (f"Entry {draw(10**6):06d} reads {' '.join(str(draw(10, 100)) for _ in range(8))}." for _ in count())
    filler = (prose(rng), cycle(islice(prose(rng), 2)), log)
    room = length - sum(map(tokens, sentences))
    while room > 0:
        sentences.append(next(filler[seed % len(filler)]))
        room -= tokens(sentences[-1])
    rng.shuffle(sentences)
    asked = rng.sample(range(num), min(QUESTIONS, num))
    questions = [f"Question: What is the access code of the {owners[one]}? Answer:" for one in asked]
    return Sample(" ".join(sentences), tuple(questions), tuple(f"{codes[one]}." for one in asked))


@torch.no_grad()
def make_triples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    *,
    keeps: Sequence[float] = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0),
    lengths: Sequence[int] = (256, 512, 1024),
    samples: int = 12,
    seed: int = 0,
    write: Callable[[PreTrainedTokenizerBase, int, int], Sample] = english_text,
    progress: Callable[[], None] = lambda: None,
) -> list[Triple]:
    """Measure a policy on generated texts: the data that `fit_curve` wants.

    The context is read and compressed before any question is known, as in Compactor, Sec. 3.5. Quality is

        y = max(NLL(answer | full), floor) / max(NLL(answer | compressed), floor), at most 1,

    with the mean NLL over the tokens of all answers to a context. The floor keeps an answer that is certain either way
    from counting as spoilt: without it, 0.9999 and 0.999 would differ by a factor of ten.

    Args:
        keeps: shares of the context to try. A share below sinks and recent tokens is measured, and reported, as theirs.
        lengths: tokens of the texts.  samples: texts of each length.  seed: of the first text; the others follow.
        write: makes a text, given a tokenizer, tokens and a seed.  progress: called after each text.
    """
    common.check_stock("context calibration", model)
    triples = []
    for length in lengths:
        for index in range(samples):
            # The texts of negative seeds are nobody else's: whoever measures counts up.
            triples += _measure(model, tokenizer, policy, keeps, write(tokenizer, length, -1 - seed - index))
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
    kept = {max(math.ceil(round(keep * length, 6)), sum(common.SHARES.values())): keep for keep in keeps}
    for tokens, keep in sorted(kept.items()):
        with patched(model, policy, Budget(keep=keep, **common.SHARES)):
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


def fit_curve(triples: Sequence[Triple], penalty: float = 2.0) -> tuple[float, float]:
    """alpha and beta of `fastkv.calibration.fits`, by asymmetric least squares (Compactor, Sec. 3.5).

    Minimised is the mean over (r, c, y) of w (f(r) - y)^2. Where the curve promises more quality than was measured,
    f > y, it asks for too small an r, and w = penalty; elsewhere w = 1. The paper names no penalty. With 2, an error
    that spoils answers weighs as much as two that waste memory; a large one gives the lower envelope of the triples.

    The unknowns are the steepness at the smallest and at the largest NLL: the best point of a grid of both is the
    middle of a finer one, and so on. Deterministic. If all NLLs are equal, alpha = 0. Steepness stays within +-50.
    """
    keep, nll, quality = torch.tensor(triples, dtype=torch.float64).T
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


def run_context(options: argparse.Namespace) -> None:
    """Measure and fit every policy, print alpha, beta and residual, and write context.json."""
    console = common.console_of()
    for name in options.policies:
        policies.get(name)
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("lengths", max(options.lengths), model, options.model)
    shape, words, file = fingerprint(model.config), describe(model.config), options.out / "context.json"
    for curve in files.curves_in(file).values() if file.exists() else ():  # to which those measured here are added
        check_fitted(file, curve.fingerprint, curve.model, model.config, "context")
    settings = {name: getattr(options, name) for name in ("lengths", "samples", "seed")}
    fitted: list[QualityCurve] = []
    with common.progress(console) as progress:
        bar = progress.add_task("", total=len(options.policies) * len(options.lengths) * options.samples)
        for name in options.policies:
            progress.update(bar, description=name)
            triples = make_triples(model, tokenizer, name, **settings, progress=partial(progress.advance, bar))
            alpha, beta = fit_curve(triples, options.penalty)
            error = residual(triples, alpha, beta)
            fitted.append(QualityCurve(alpha, beta, name, shape, words, len(triples), error))
        progress.update(bar, description="measured")
    files.save_curves(file, fitted)
    for curve in fitted:
        console.print(
            f"{curve.policy:<12} alpha {curve.alpha:8.3f}  beta {curve.beta:8.3f}  residual {curve.residual:.3f}  "
            f"triples {curve.triples}"
        )
    console.print(f"{file} written. Use it with\nfastkv.Budget(quality=0.95, calibration={str(file)!r}).")
