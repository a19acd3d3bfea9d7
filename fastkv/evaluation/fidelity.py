"""How close a compressed cache comes to the full one on a text, without any task or data set.

Both caches read the same first tokens and are then fed the same further ones, one at a time. Two comparisons:

- with the run of the full cache: everything that went wrong so far, in this layer and below (`error`, next tokens);
- of one layer with itself, had it kept every pair that it was given: what eviction costs there, for the very query it
  got (`own_error` and everything about the evicted set E and the retained set R). With Z the sums of exp(logit) and f
  the attention over one set, attention over all pairs is f = (Z_R f_R + Z_E f_E) / (Z_R + Z_E)
  (MomentKV, arXiv:2606.01563, Eq. 3).

The pairs kept aside are those of the compressed run, not of the full one: deeper layers of the two runs see different
hidden states, and the moments summarise what their own layer has evicted. All comparisons are in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..demo.measure import cache_bytes, kept_tokens, record_attention
from ..errors import FastKVError
from ..integrations.transformers.cache import FastKVCache, FastKVLayer
from ..reference import LayerState, joined
from .common import check_stock
from .equal_bytes import stored_bytes


@dataclass(frozen=True)
class Full:
    """What the full cache did with the fed tokens.

    Attributes:
        attention: [layers, B, T, Hq * Dv], what every layer hands to its output projection.
        log_probs: [B, T, V] float64, of the token after each fed one.
        nll: [B, T - 1] float64, of the fed tokens after the first.
        nbytes: bytes of the cache per sequence.
    """

    attention: Tensor
    log_probs: Tensor
    nll: Tensor
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
        """Jensen gap, log Z_E minus its estimate; never negative without softcap."""
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


@torch.no_grad()
def read_full(model: PreTrainedModel, tokens: Tensor, steps: int) -> Full:
    """Run the stock model over tokens [B, N], the last `steps` of them one at a time.

    Raises: FastKVError if the model is patched or in training, or unless 2 <= steps < N.
    """
    check_stock("read_full", model)
    check_steps(tokens.shape[1], steps)
    cache = model(tokens[:, :-steps], use_cache=True, logits_to_keep=1).past_key_values
    attention, log_probs = feed(model, tokens[:, -steps:], cache)
    return Full(attention, log_probs, negative_log_likelihood(log_probs, tokens), cache_bytes(cache) // len(tokens))


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor, steps: int, full: Full) -> Fidelity:
    """Run the patched model over tokens [B, N], the last `steps` of them one at a time, and compare.

    Args: tokens, steps: as `read_full` got them, without padding; full: what it returned.
    Raises: FastKVError if the model is not patched, or unless 2 <= steps < N.
    """
    check_steps(tokens.shape[1], steps)
    cache = FastKVCache(model)
    witnesses = {index: Witness(layer) for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}
    model(tokens[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
    for witness in witnesses.values():
        witness.comparing = True
    attention, log_probs = feed(model, tokens[:, -steps:], cache)
    for witness in witnesses.values():
        witness.leave()
    compared = [witness.compared for witness in witnesses.values()]

    def of(name: str) -> Tensor:
        layers = [torch.stack([getattr(step, name) for step in steps], 1) for steps in compared]
        return torch.stack([layer.cpu() for layer in layers])

    heads = Heads(**{one.name: of(one.name) for one in fields(Heads)})
    layers, num_heads = list(witnesses), heads.mass.shape[-1]
    outputs = (run[layers].double().unflatten(-1, (num_heads, -1)) for run in (attention, full.attention))
    return Fidelity(
        layers=layers,
        heads=heads,
        error=distance(*outputs),
        agreement=log_probs.argmax(-1) == full.log_probs.argmax(-1),
        kl=(full.log_probs.exp() * (full.log_probs - log_probs)).sum(-1),
        excess=negative_log_likelihood(log_probs, tokens) - full.nll,
        cache=cache,
    )


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

    def step(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, *rest: Any) -> Tensor:
        """As `FastKVLayer.step`."""
        self.remember(k, v)
        if not self.comparing:
            return self.stock[1](q, k, v, scale, softcap, *rest)
        state = self.layer.state
        assert state is not None
        # Attention comes before eviction, so the evicted set of this query is that of the state before the step.
        stored, estimate = stored_tokens(state, self.keys.shape[2]), self.estimate(q, state, scale, softcap)
        out = self.stock[1](q, k, v, scale, softcap, *rest)
        pairs = self.keys, self.values, stored
        self.compared.append(compare(q[:, :, 0], *pairs, scale, softcap, out[:, :, 0], estimate))
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
) -> Heads:
    """Attention over the stored and over the evicted pairs, and how `out` and the estimate differ from it.

    Args:
        q [B, Hq, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv].  stored: [B, Hkv, S] bool.
        out: [B, Hq, Dv], what the layer returned.  estimate: of f_E [B, Hq, Dv] and log Z_E [B, Hq].
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
    whole, _ = attend(torch.ones_like(stored))
    return Heads(
        own_error=distance(out.double(), whole),
        cosine=torch.cosine_similarity(f_evicted, estimate[0], dim=-1),
        retained_cosine=torch.cosine_similarity(f_evicted, f_retained, dim=-1),
        log_retained=log_retained,
        log_evicted=log_evicted,
        log_estimate=estimate[1],
    )


def feed(model: PreTrainedModel, tokens: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    """Decode the given tokens [B, T]. Returns attention [layers, B, T, Hq * Dv] and log-probabilities [B, T, V]."""
    with record_attention(model) as recorded:
        logits = [model(word, past_key_values=cache).logits[:, -1] for word in tokens.split(1, dim=1)]
    attention = torch.stack([torch.cat(steps, 1).cpu() for steps in recorded])  # layers may be on several devices
    return attention, torch.stack(logits, 1).double().log_softmax(-1)


def negative_log_likelihood(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, T - 1], of the last T - 1 of tokens [B, N] given log_probs [B, T, V] after each of the last T."""
    steps = log_probs.shape[1]
    return -log_probs[:, :-1].gather(-1, tokens[:, 1 - steps :, None])[..., 0]


def distance(o: Tensor, full: Tensor) -> Tensor:
    """|o - full| / |full| over the last dimension."""
    return (o - full).norm(dim=-1) / full.norm(dim=-1)


def check_steps(tokens: int, steps: int) -> None:
    """Raise FastKVError unless some of the tokens of a text are read before at least two are fed."""
    if not 2 <= steps < tokens:
        raise FastKVError(
            f"steps must be at least 2 and fewer than the {tokens} tokens of the text, got {steps}; give fewer steps "
            "or a longer context"
        )


@dataclass(frozen=True)
class Row:
    """One cache. Means over texts, fed tokens, layers and heads; None where nothing was evicted or nothing estimated.

    Attributes:
        context: tokens of a text, the fed ones included.
        budget: tokens per KV head that a cache without moments keeps in the same bytes.  kept: what this one keeps.
        nbytes: of the compressed layers, per sequence.  full_nbytes: of the full cache.
        error, own_error, cosine, retained_cosine, mass, estimated_mass, gap: see `Heads` and `Fidelity`.
        standard_error: of `error`, over texts; None for one text.
        agreement: share of equal next tokens.  kl: nats.  perplexity_ratio: to the full cache.
        layers: indices in the model.  by_head: name to [layers][Hq].  by_text: name to [texts].
    """

    policy: str
    context: int
    budget: int
    kept: float
    nbytes: int
    full_nbytes: int
    error: float
    standard_error: float | None
    own_error: float
    cosine: float | None
    retained_cosine: float | None
    mass: float
    estimated_mass: float | None
    gap: float | None
    agreement: float
    kl: float
    perplexity_ratio: float
    layers: list[int]
    by_head: dict[str, list[list[float | None]]]
    by_text: dict[str, list[float]]


def summarise(name: tuple[str, int, int], measured: Fidelity, full: Full) -> Row:
    """One row; name: policy, context and budget."""
    policy, context, budget = name
    heads = measured.heads
    numbers = {
        "error": measured.error,
        "own_error": heads.own_error,
        "cosine": heads.cosine,
        "retained_cosine": heads.retained_cosine,
        "mass": heads.mass,
        "estimated_mass": heads.estimated_mass,
        "gap": heads.gap,
    }
    means = {one: known(number.nanmean()) for one, number in numbers.items()}
    errors = measured.error.mean((0, 2, 3))
    kept = kept_tokens(measured.cache)
    assert kept is not None
    texts = {"error": errors, "own_error": heads.own_error.mean((0, 2, 3)), "kl": measured.kl.mean(-1)}
    texts["agreement"] = measured.agreement.double().mean(-1)
    return Row(
        policy=policy,
        context=context,
        budget=budget,
        kept=kept,
        nbytes=stored_bytes(measured.cache),
        full_nbytes=full.nbytes,
        **means,  # type: ignore[arg-type]
        standard_error=(errors.std() / math.sqrt(len(errors))).item() if len(errors) > 1 else None,
        agreement=measured.agreement.double().mean().item(),
        kl=measured.kl.mean().item(),
        perplexity_ratio=measured.excess.mean().exp().item(),
        layers=measured.layers,
        by_head={
            one: [[known(head) for head in layer] for layer in number.nanmean((1, 2))]
            for one, number in numbers.items()
        },
        by_text={one: number.tolist() for one, number in texts.items()},
    )


def known(number: Tensor) -> float | None:
    """A number, or None for NaN, which JSON does not have."""
    return None if number.isnan() else number.item()
