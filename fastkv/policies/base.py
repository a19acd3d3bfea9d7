"""What a policy is: a small frozen dataclass that turns signals into scores. It never selects, protects or syncs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import FastKVError
from ..parallel import Parallel
from ..reference import Moments
from ..rotary import Rotary


class QueryStatistics(NamedTuple):
    """What the queries of a layer are like, as `fastkv calibrate queries` found them in a text.

    Attributes:
        mean: [Hq, Dk] fp32, mean query before the rotary embedding.
        excess: [Hq, F] fp32, by how much the mean length of each pair that the embedding turns exceeds the length of
            the pair's mean; in the order of `Rotary.lengths`, and with the embedding's scaling.
    """

    mean: Tensor
    excess: Tensor


@dataclass(frozen=True)
class Signals:
    """What a policy may look at when a layer must decide which tokens to keep.

    Candidates are the retained tokens followed by the new ones, N in all, in no guaranteed order; the new tokens of a
    prompt block are the last T of them, in order.

    Attributes:
        keys: [B, Hkv, N, Dk] post-RoPE, values: [B, Hkv, N, Dv].
        positions: [B, Hkv, N] int32.  valid: [B, Hkv, N] bool, false for empty slots and padding.
        moments: of the tokens evicted so far.
        scale: logit multiplier of the layer.  softcap: of its logits, or None.
        sink_logits: [Hq], learned logits beside those of the keys, with the value zero; None for none.
        layer: index of the layer in the model.
        tokens: how many each head will keep (their mean where heads differ).
        decoding: true when called between generated tokens, false while a prompt is read.
        attention: [B, Hkv, N], mean attention weight from the observation window: the last `policy.observation` queries
            of the prompt block, or the queries since the last eviction when decoding; None unless the policy `needs` it
        queried: [B, 1, 1] or [B, Hkv, N] fp32, the number of queries each mean in `attention` is over; None without it.
        queries: [B, Hq, T, Dk] post-RoPE, of the new tokens of a prompt block; None when decoding and unless needed.
        output: [hidden, Hq, Dv], the layer's output projection; None unless needed.
        received: [B, Hkv, N] fp32, the largest attention weight that any query of a second reading gave each candidate;
            None without one.
        reference_queries: [B, Hq, W, Dk] post-RoPE, some of those of a second reading, and asked: [B, W] bool, false
            for none; None without one, empty unless they are kept (`samples_queries`).
        memory: [B, Hkv, N] fp32, what the policy stored with each token; 0 for tokens it has not seen. None unless the
            policy `remembers`.
        rotary: how the layer turns its keys, None unless "pre_rope" is needed.
        query_statistics: what the layer's queries are like, from a calibration file; None unless needed.
        parallel: the processes that share the layer's heads.
        backend: to pass on to `fastkv.ops`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    moments: Moments
    scale: float
    layer: int
    decoding: bool
    softcap: float | None = None
    sink_logits: Tensor | None = None
    tokens: int = 0
    attention: Tensor | None = None
    queried: Tensor | None = None
    queries: Tensor | None = None
    output: Tensor | None = None
    received: Tensor | None = None
    reference_queries: Tensor | None = None
    asked: Tensor | None = None
    memory: Tensor | None = None
    rotary: Rotary | None = None
    query_statistics: QueryStatistics | None = None
    parallel: Parallel = field(default_factory=Parallel)
    backend: str = "auto"

    @property
    def pre_rope_keys(self) -> Tensor:
        """[B, Hkv, N, Dk], the keys before the rotary embedding; computed on every call."""
        assert self.rotary is not None
        return self.rotary.unrotate(self.keys, self.positions)


@dataclass(frozen=True)
class Policy:
    """Base of all policies. A subclass sets `name`, implements `score`, and overrides what differs from here.

    Properties are overridden by a class attribute, `needs = frozenset({"attention"})`, or, where the value depends on
    hyper-parameters, by a property.

    Class attributes:
        name: what `fastkv.patch(model, policy=name)` calls it.
        adaptive: whether its scores can be compared between the heads of a layer, as `Budget(heads="adaptive")` does.
        fixes_heads: whether `head_tokens` says how many tokens each head keeps.
        places: whether keys before the rotary embedding have to be these; else they may all be turned by one angle, as
            they are where the model counts padding as positions.
    """

    name: ClassVar[str]
    adaptive: ClassVar[bool] = True
    fixes_heads: ClassVar[bool] = False
    places: ClassVar[bool] = True

    @property
    def correction(self) -> str:
        """What `correction="auto"` gives it; "none" for a plain eviction baseline."""
        return "none"

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals it reads: "attention", "queries", "output", "pre_rope", "query_statistics"."""
        return frozenset()

    @property
    def calibration(self) -> str | Path | None:
        """File with the "query_statistics", if it needs them; None for the one beside the model."""
        return None

    @property
    def moment_order(self) -> int | None:
        """Moments that `score` itself reads (kept even if the correction is off)."""
        return None

    @property
    def remembers(self) -> bool:
        """Whether a number is stored with each token (see `remember`); costs 4 bytes a slot."""
        return False

    @property
    def rereads(self) -> bool:
        """Whether the context is read twice and compressed only afterwards (KVzip); excludes blocks."""
        return False

    @property
    def chunk(self) -> int:
        """Tokens that are fed again at once, where the context is read twice."""
        return 2048

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids that are fed before each of these chunks."""
        return ()

    @property
    def samples_queries(self) -> bool:
        """Whether some queries of a second reading are kept, for its scores."""
        return False

    @property
    def layers(self) -> str | None:
        """Shares of layers that it brings where the budget says "uniform"; None for none."""
        return None

    @property
    def observation(self) -> int | None:
        """How many last queries of a prompt block `Signals.attention` averages over; None for all of them."""
        return 0

    @property
    def rounds(self) -> int:
        """In how many rounds a whole prompt is evicted from, for scores that read the moments: those of what a round
        evicts are known to the next one.
        """
        return 1

    @property
    def recent_share(self) -> float:
        """Share of the budget that goes to the most recent tokens, whatever their score."""
        return 0.0

    def check(self, heads: Sequence[int]) -> None:
        """Raise FastKVError unless the policy can serve a model with so many KV heads in each layer."""

    def head_tokens(self, layer: int, heads: int, tokens: int, reserved: int) -> tuple[int, ...] | None:
        """Tokens that each KV head keeps if that is fixed in advance: at most heads * tokens in all, each at least
        `reserved`. None if all keep the same.
        """
        return None

    def remember(self, signals: Signals) -> Tensor:
        """What to store with each candidate, [B, Hkv, N] fp32, called before `score` if the policy `remembers`.

        `signals.memory` holds what was stored before; the result replaces it, also in the signals that `score` gets.
        """
        raise NotImplementedError

    def score(self, signals: Signals) -> Tensor:
        """Score every candidate: [B, Hkv, N] float, larger = keep. Entries that are not valid are ignored."""
        raise NotImplementedError


def check_at_least(policy: Policy, **least: int) -> None:
    """Raise FastKVError unless each named hyper-parameter is an integer of at least the given value."""
    for name, minimum in least.items():
        value = getattr(policy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise FastKVError(
                f"{policy.name}: {name} must be an integer of at least {minimum}, got {value!r}; pass a whole number"
            )


def known_or_mean(signals: Signals) -> Tensor:
    """What is remembered of each candidate, [B, Hkv, N]; where that is 0, the mean of what the head remembers."""
    assert signals.memory is not None
    known = signals.valid & (signals.memory > 0)
    score = torch.where(known, signals.memory, 0)
    mean = score.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(known, score, mean)
