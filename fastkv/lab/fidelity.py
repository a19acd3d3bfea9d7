"""`fastkv fidelity`: how close a compressed cache comes to the full one on a text, without any task or data set.

Both caches read the same first tokens and are then fed the same further ones, one at a time.
With `--question` the text holds a fact that is asked for, and the fed tokens are what the full cache answers. Two
comparisons:

- with the run of the full cache: everything that went wrong so far, in this layer and below (`error`, next tokens);
- of one layer with itself, had it kept every pair that it was given: what eviction costs there, for the very query it
  got (`own_error` and everything about the evicted set E and the retained set R). With Z the sums of exp(logit) and f
  the attention over one set, attention over all pairs is f = (Z_R f_R + Z_E f_E) / (Z_R + Z_E)
  (MomentKV, arXiv:2606.01563, Eq. 3).

The pairs kept aside are those of the compressed run, not of the full one: deeper layers of the two runs see different
hidden states, and the moments summarise what their own layer has evicted. All comparisons are in float64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..api import answers, ends_of
from ..cache.layout import Attends
from ..errors import FastKVError
from ..integrations.transformers.cache import FastKVCache, FastKVLayer
from ..integrations.transformers.stock import CACHE
from ..reference import LayerState, joined, with_sink
from . import common, facts, reading
from .reading import cache_bytes, kept_tokens, record_attention, stored_bytes


@dataclass(frozen=True)
class Full:
    """What the full cache did with the fed tokens.

    Attributes:
        attention: by index of the layer [B, T, Hq * Dv], what it hands to its output projection.
        log_probs: [B, T, V] float64, of the token after each fed one.
        nbytes: bytes of the cache per sequence.
    """

    attention: dict[int, Tensor]
    log_probs: Tensor
    nbytes: int


@dataclass(frozen=True)
class Heads:
    """One number for every query, float64: [B, Hq] from `compare`, [layers, B, T, Hq] in `Fidelity`.

    Numbers about the evicted set are NaN (masses: -inf) as long as it is empty; estimates also without moments.

    Attributes:
        own_error: |o - f| / |f|, with o what the layer returned and f attention over all pairs it was given.
        cosine: of f_E with its estimate from the moments.
        retained_cosine: of f_E with f_R.
        log_retained, log_evicted, log_estimate: log Z_R, log Z_E and its estimate.
    """

    own_error: Tensor
    cosine: Tensor
    retained_cosine: Tensor
    log_retained: Tensor
    log_evicted: Tensor
    log_estimate: Tensor

    @property
    def mass(self) -> Tensor:
        """Share of the attention that the evicted set should get, Z_E / (Z_R + Z_E)."""
        return torch.sigmoid(self.log_evicted - self.log_retained)

    @property
    def estimated_mass(self) -> Tensor:
        """Share that it gets if Z_E is estimated from the moments."""
        return torch.sigmoid(self.log_estimate - self.log_retained)

    @property
    def gap(self) -> Tensor:
        """log Z_E minus its estimate; of moments and means the Jensen gap, never negative without softcap."""
        return self.log_evicted - self.log_estimate


@dataclass(frozen=True)
class Fidelity:
    """A compressed cache against the full one, for T fed tokens of B texts.

    Attributes:
        layers: indices of the compressed layers.  heads: per layer and head.
        error: [layers, B, T, Hq], |o - o_full| / |o_full|.
        agreement: [B, T] bool, whether both caches find the same next token most likely.
        kl: [B, T], Kullback-Leibler divergence of the next-token distribution from that of the full cache, nats.
        excess: [B, T - 1], negative log-likelihood of the fed tokens after the first minus that with the full cache.
        cache: as it was left.
    """

    layers: list[int]
    heads: Heads
    error: Tensor
    agreement: Tensor
    kl: Tensor
    excess: Tensor
    cache: FastKVCache


def fed(model: Any, cache: Any, tokens: Tensor, steps: int, question: int, ready: Callable[[], None]) -> Any:
    """What `feed` returns of the last `steps` of tokens [B, N]; the `question` ones before these are read apart."""
    length = tokens.shape[1] - question
    if not 2 <= steps < length:
        raise FastKVError(f"steps must be at least 2 and fewer than the {length} tokens of the text, got {steps}")
    *parts, last = tokens.split([length - steps, question, steps], 1)
    for part in parts:
        if part.shape[1]:
            model(part, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    ready()
    return feed(model, last, cache)


@torch.no_grad()
def read_full(model: PreTrainedModel, tokens: Tensor, steps: int, question: int = 0) -> Full:
    """Run the stock model over tokens [B, N], the last `steps` of them one at a time, the `question` ones before these
    apart from the text.
    """
    common.check_stock("read_full", model)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    attention, log_probs = fed(model, cache, tokens, steps, question, lambda: None)
    return Full(attention, log_probs, cache_bytes(cache) // len(tokens))


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor, steps: int, full: Full, question: int = 0) -> Fidelity:
    """Run the patched model over tokens [B, N], the last `steps` of them one at a time, and compare.

    Args: tokens, steps, question: as `read_full` got them, without padding; full: what it returned.
    """
    cache = FastKVCache(model)
    witnesses = {index: Witness(layer) for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}

    def ready() -> None:
        for witness in witnesses.values():
            witness.comparing = True

    attention, log_probs = fed(model, cache, tokens, steps, question, ready)
    for witness in witnesses.values():
        witness.leave()
    compared = [witness.compared for witness in witnesses.values()]

    def of(name: str) -> Tensor:
        return torch.stack([torch.stack([getattr(step, name) for step in steps], 1).cpu() for steps in compared])

    heads = Heads(**{one.name: of(one.name) for one in fields(Heads)})
    layers, num_heads = list(witnesses), heads.mass.shape[-1]
    runs = (torch.stack([run[layer] for layer in layers]) for run in (attention, full.attention))
    outputs = (run.double().unflatten(-1, (num_heads, -1)) for run in runs)
    agreement = log_probs.argmax(-1) == full.log_probs.argmax(-1)
    kl = (full.log_probs.exp() * (full.log_probs - log_probs)).sum(-1)
    excess = negative_log_likelihood(log_probs, tokens) - negative_log_likelihood(full.log_probs, tokens)
    return Fidelity(layers, heads, distance(*outputs), agreement, kl, excess, cache)


class Witness:
    """Stands in for a compressed layer's `attend` and `step`: remembers every pair that the layer is given and, while
    `comparing`, what became of the query.

    Args: layer: of a cache that is still empty.
    """

    def __init__(self, layer: FastKVLayer) -> None:
        self.layer, self.stock = layer, (layer.attend, layer.step)
        self.keys = self.values = torch.empty(0, 0, 0, 0)
        self.comparing = False
        self.compared: list[Heads] = []
        layer.attend, layer.step = self.attend, self.step  # type: ignore[assignment, method-assign]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """As `FastKVLayer.attend`."""
        self.remember(k, v)
        return self.stock[0](q, k, v, *rest)

    def step(self, q: Tensor, k: Tensor, v: Tensor, how: Attends) -> Tensor:
        """As `FastKVLayer.step`."""
        self.remember(k, v)
        if not self.comparing:
            return self.stock[1](q, k, v, how)
        state = self.layer.state
        assert state is not None
        # Attention comes before eviction, so the evicted set of this query is that of the state before the step.
        stored, estimate = stored_tokens(state, self.keys.shape[2]), self.estimate(q, state, how.scale, how.softcap)
        out = self.stock[1](q, k, v, how)
        pairs = self.keys, self.values, stored
        self.compared.append(
            compare(q[:, :, 0], *pairs, how.scale, how.softcap, out[:, :, 0], estimate, state.sink_logits)
        )
        return out

    def remember(self, k: Tensor, v: Tensor) -> None:
        """Keep new pairs; a second reading of the prompt (KVzip) brings none."""
        if self.layer.seen > self.keys.shape[2]:
            self.keys, self.values = joined(self.keys, k), joined(self.values, v)

    def leave(self) -> None:
        """Give the layer its own methods back, so that the cache does not hold on to the pairs."""
        del self.layer.attend, self.layer.step

    def estimate(self, q: Tensor, state: LayerState, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Estimate of f_E [B, Hq, Dv] and log Z_E [B, Hq] for queries [B, Hq, 1, D]; NaN without moments."""
        evicted = self.layer.cache.config.correction.evicted(state)
        if evicted is None and state.moments.order is not None:
            evicted = state.moments  # a policy may keep moments that are not applied
        if evicted is None:
            nothing = torch.full_like(q[:, :, 0, :1], torch.nan, dtype=torch.float64)
            return nothing, nothing[..., 0]
        value, log_mass = evicted.estimate(q.double(), scale, softcap)
        return value[:, :, 0], log_mass[:, :, 0]


def stored_tokens(state: LayerState, num: int) -> Tensor:
    """[B, Hkv, num] bool: which of the first `num` tokens are in the slots of each head, or arrived after the state."""
    tokens = torch.arange(num, device=state.seen.device)
    stored = (tokens >= state.seen[:, None])[:, None].repeat(1, state.heads, 1)
    for slots in (state.exact, state.approx):
        if slots is not None:
            # Slots that are not in use all point past the end.
            places = torch.where(slots.valid, slots["positions"].long(), num)
            stored = torch.cat([stored, stored[..., :1]], -1).scatter(-1, places, True)[..., :num]
    return stored


def compare(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    stored: Tensor,
    scale: float,
    softcap: float | None,
    out: Tensor,
    estimate: tuple[Tensor, Tensor],
    sink_logits: Tensor | None = None,
) -> Heads:
    """Attention over the stored and over the evicted pairs, and how `out` and the estimate differ from it.

    Args: q [B, Hq, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv]; stored [B, Hkv, S] bool; out [B, Hq, Dv], what the
        layer returned; estimate: of f_E [B, Hq, Dv] and log Z_E [B, Hq]; sink_logits [Hq].
    """
    batch, num_heads, dim = q.shape
    logits = scale * q.double().reshape(batch, keys.shape[1], -1, dim) @ keys.double().mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    def attend(inside: Tensor) -> tuple[Tensor, Tensor]:
        within = logits.masked_fill(~inside[:, :, None], float("-inf"))
        f = within.softmax(-1) @ values.double()
        return f.reshape(batch, num_heads, -1), within.logsumexp(-1).reshape(batch, num_heads)

    (f_retained, log_retained), (f_evicted, log_evicted) = attend(stored), attend(~stored)
    whole, _ = with_sink(*attend(torch.ones_like(stored)), sink_logits)
    return Heads(
        own_error=distance(out.double(), whole),
        cosine=torch.cosine_similarity(f_evicted, estimate[0], dim=-1),
        retained_cosine=torch.cosine_similarity(f_evicted, f_retained, dim=-1),
        log_retained=log_retained,
        log_evicted=log_evicted,
        log_estimate=estimate[1],
    )


def feed(model: PreTrainedModel, tokens: Tensor, cache: Any) -> tuple[dict[int, Tensor], Tensor]:
    """Decode the given tokens [B, T]. Returns attention of each layer [B, T, Hq * Dv], log-probabilities [B, T, V]."""
    with record_attention(model) as recorded:
        logits = [model(word, **{CACHE: cache}).logits[:, -1] for word in tokens.split(1, dim=1)]
    attention = {layer: torch.cat(steps, 1).cpu() for layer, steps in recorded.items()}  # from several devices
    return attention, torch.stack(logits, 1).double().log_softmax(-1)


def negative_log_likelihood(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, T - 1], of the last T - 1 of tokens [B, N] given log_probs [B, T, V] after each of the last T."""
    steps = log_probs.shape[1]
    return -log_probs[:, :-1].gather(-1, tokens[:, 1 - steps :, None])[..., 0]


def distance(o: Tensor, full: Tensor) -> Tensor:
    """|o - full| / |full| over the last dimension."""
    return (o - full).norm(dim=-1) / full.norm(dim=-1)


def summarise(policy: str, budget: int, measured: Sequence[Fidelity], full: Full) -> dict[str, Any]:
    """One row, see `COLUMNS`; measured: the same cache on several texts, which count alike. Means are over texts, fed
    tokens, layers and heads; None where nothing was evicted or nothing estimated.
    """
    cache = measured[-1].cache
    names = ("own_error", "cosine", "retained_cosine", "mass", "estimated_mass", "gap")
    heads = {one: torch.cat([getattr(text.heads, one).nanmean(2) for text in measured], 1).nanmean() for one in names}
    error = torch.cat([text.error.mean((0, 2, 3)) for text in measured])  # of each text
    tokens = {
        one: torch.cat([getattr(text, one).double().mean(-1) for text in measured]).mean().item()
        for one in ("agreement", "kl", "excess")
    }
    return {
        "policy": policy,
        "budget": budget,
        "kept": kept_tokens(cache),
        "nbytes": stored_bytes(cache),
        "full_nbytes": full.nbytes,
        "error": error.mean().item(),
        "standard_error": (error.std() / math.sqrt(len(error))).item() if len(error) > 1 else None,
        **{one: None if number.isnan() else number.item() for one, number in heads.items()},
        "perplexity_ratio": math.exp(tokens.pop("excess")),
        **tokens,
    }


def run(options: argparse.Namespace, console: Console | None = None) -> list[dict[str, Any]]:
    """Measure every cache, print the table, and write fidelity.json into `options.out`."""
    console = console or common.console_of(112)
    if options.steps >= options.context:
        raise FastKVError(f"steps must be fewer than the {options.context} tokens of the text, got {options.steps}")
    common.caches_of(options)
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("context", options.context + bool(options.question) * options.steps, model, options.model)
    texts, rows = texts_of(model, tokenizer, options), []
    for cache, _ in common.each(model, common.caches_of(options, model), console):
        if cache.policy == common.FULL:
            full = [read_full(model, *text) for text in texts]
        else:
            measured = [measure(model, *text[:2], whole, text.question) for text, whole in zip(texts, full)]
            rows.append(summarise(cache.policy, cache.budget, measured, full[0]))
    rows.sort(key=lambda row: options.budgets.index(row["budget"]))
    chosen = "model text question context steps policies budgets equal correction slots seeds".split()
    record = {"versions": common.versions(), "options": {name: getattr(options, name) for name in chosen}}
    common.write_json(options.out / "fidelity.json", {**record, "rows": rows})
    common.show(console, common.table_of(rows, ("policy",), COLUMNS, ("budget",), padding=(0, 1, 0, 0)))
    console.print(f"""
Means over {options.seeds} text(s), the last {options.steps} tokens of each fed one at a time.
The full cache takes {full[0].nbytes / 2**10:.0f} KiB for {options.context} tokens.
{common.legend(COLUMNS)}
""")
    console.print(f"{options.out / 'fidelity.json'} written")
    return rows


class Text(NamedTuple):
    """What is read: tokens [B, N], the last `steps` of them one at a time, the `question` ones before these apart."""

    tokens: Tensor
    steps: int
    question: int = 0


def texts_of(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[Text]:
    """Consecutive stretches of the text in one batch; with a question one by one, as answers differ in length."""
    if options.question is not None:
        return [asked(model, tokenizer, options, seed) for seed in range(options.seeds)]
    start, context = facts.start_of(tokenizer), options.context
    ids = tokenizer(facts.read(options.text), add_special_tokens=False, verbose=False).input_ids
    each = context - len(start)
    facts.check_tokens(options.text, len(ids), options.seeds * each)
    tokens = torch.tensor([start + ids[index * each :][:each] for index in range(options.seeds)], device=model.device)
    return [Text(tokens, options.steps)]


def asked(model: Any, tokenizer: Any, options: argparse.Namespace, seed: int) -> Text:
    """Text and question, `options.context` tokens, and at most `options.steps` tokens that the full cache answers."""
    sample, rest = facts.with_question(tokenizer, options.context, seed, options.text)
    prompt = torch.tensor([sample.prefix + rest[:-1]], device=model.device)
    (written,) = answers(model, tokenizer, reading.read(model, prompt), prompt, [rest[-1:]], options.steps)
    # The question's last token is fed, too: what comes after it is the first word of the answer.
    fed = [rest[-1], *written, *ends_of(model)][: max(len(written) + 1, 2)]
    tokens = torch.cat([prompt, torch.tensor([fed], device=model.device)], 1)
    return Text(tokens, len(fed), len(rest) - 1 if options.question == "later" else 0)


COLUMNS: common.Columns = {
    "budget": ("budget", "{}", "tokens per KV head; with --equal bytes all get the bytes of so many keys and values"),
    "kept": ("kept", "{:.0f}", "tokens per KV head that this cache keeps"),
    "nbytes": ("KiB", common.kibibytes, "bytes of the compressed layers of this cache, per sequence"),
    "error": ("error", "{:.3f}", "mean |o - full| / |full| of attention outputs, against the run of the full cache"),
    "standard_error": ("±", "{:.3f}", "standard error of that, over the texts"),
    "own_error": ("own", "{:.3f}", "the same against attention over all pairs that this layer was given"),
    "cosine": ("cosine", "{:.3f}", "of the evicted tokens' output with its estimate; - where nothing is estimated"),
    "mass": ("mass", "{:.3f}", "share of the attention that the evicted tokens should get"),
    "estimated_mass": ("est.", "{:.3f}", "estimate of that share"),
    "gap": ("gap", "{:.2f}", "log mass of the evicted tokens minus log of its estimate (Jensen)"),
    "agreement": ("top-1", "{:.0%}", "equal most likely next tokens"),
    "kl": ("KL", "{:.2g}", "divergence of the next-token distribution, nats"),
    "perplexity_ratio": ("ppl", "{:.3f}", "perplexity of the fed tokens, relative to the full cache"),
}
