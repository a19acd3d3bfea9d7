"""Policy: a small frozen dataclass that turns signals into scores. It never selects, protects or synchronises."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..backend import Parallel
from ..errors import FINITE, FastKVError, is_number, is_whole
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
class LayerFacts:
    """What does not change from one eviction of a layer to the next.

    Attributes:
        index: of the layer in the model.
        scale: logit multiplier.  softcap: of the logits, or None.
        sink_logits: [Hq], learned logits beside those of the keys, with the value zero; None for none.
        tokens: how many each head will keep (their mean where heads differ).
        output: [hidden, Hq, Dv], the output projection; None unless "output" is needed.
        rotary: how the layer turns its keys; None unless "pre_rope" or "rotary" is needed.
        query_statistics: from a calibration file; None unless needed.
        parallel: the processes that share the layer's heads.  backend: to pass on to `fastkv.ops`.
    """

    index: int
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    tokens: int = 0
    output: Tensor | None = None
    rotary: Rotary | None = None
    query_statistics: QueryStatistics | None = None
    parallel: Parallel = field(default_factory=Parallel)
    backend: str = "auto"


@dataclass
class Reread:
    """What a second reading found out about a prompt of T tokens.

    Attributes:
        received: [B, Hkv, T] fp32, the largest attention weight that any query of it gave each token.
        queries: [B, Hq, W, D] post-RoPE, some of its queries, and asked: [B, W] bool, false for none; both empty unless
            they are sampled.
    """

    received: Tensor
    queries: Tensor
    asked: Tensor


@dataclass(frozen=True)
class Signals:
    """What a policy knows when a layer must decide which tokens to keep.

    The N candidates are the retained tokens, in no particular order, followed by the new ones. The new tokens of a
    prompt block are the last T candidates, in order.

    Attributes:
        keys: [B, Hkv, N, Dk] post-RoPE, values: [B, Hkv, N, Dv].
        positions: [B, Hkv, N] int32.  valid: [B, Hkv, N] bool, false for empty slots and padding.
        moments: moments of the tokens evicted so far.
        layer: facts that do not change from one eviction to the next.
        decoding: true between generated tokens, false while a prompt is read.
        attention: [B, Hkv, N], mean attention weight from the observation window: the last `policy.observation` queries
            of the prompt block, or the queries since the last eviction when decoding; None unless needed.
        queried: [B, 1, 1] or [B, Hkv, N] fp32, the number of queries each mean in `attention` is over; None without it.
        queries: [B, Hq, T, Dk] post-RoPE, of the new tokens of a prompt block; None when decoding and unless needed.
        memory: [B, Hkv, N] fp32, the number that the policy stored with each token; 0 for tokens it has not seen.
            None unless needed.
        reread: results of a second reading of the candidates; None without.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    moments: Moments
    layer: LayerFacts
    decoding: bool
    attention: Tensor | None = None
    queried: Tensor | None = None
    queries: Tensor | None = None
    memory: Tensor | None = None
    reread: Reread | None = None

    @property
    def pre_rope_keys(self) -> Tensor:
        """[B, Hkv, N, Dk], the keys before the rotary embedding; computed on every call."""
        assert self.layer.rotary is not None
        return self.layer.rotary.unrotate(self.keys, self.positions)


class SecondReading(NamedTuple):
    """How a prompt is read a second time, before anything of it is evicted (KVzip).

    Attributes: chunk: tokens that are fed again at once.  prompt: token ids that are fed before each chunk.
        samples: whether some of the queries are kept, for `Reread.queries`.
    """

    chunk: int = 2048
    prompt: tuple[int, ...] = ()
    samples: bool = False


class MomentUse(NamedTuple):
    """What `score` reads of the moments of evicted tokens.

    Attributes: order: of these moments, which are kept even if the correction is off; None for none.  rounds: in how
        many a whole prompt is evicted from: the moments of what a round evicts are known to the next one.
    """

    order: int | None = None
    rounds: int = 1


class Shares(NamedTuple):
    """What a policy says about the budget.

    Attributes: layers: shares of layers where the budget says "uniform"; None for none.  recent: share of the mean
        budget of a layer's heads that goes to the most recent tokens, whatever their score; a head that keeps less
        than that, and with it all heads, has as many as fit.  heads: what each head keeps, by
        `check` and `head_tokens` as in `DuoAttention`; None for the budget's.
    """

    layers: str | None = None
    recent: float = 0.0
    heads: Any = None


@dataclass(frozen=True)
class Policy:
    """Base class of all policies. A subclass sets `name`, implements `score`, and overrides properties that differ.

    A property is overridden by a class attribute, `needs = frozenset({"attention"})`, or by a property if its value
    depends on hyper-parameters.

    Class attributes:
        name: the name in `fastkv.patch(model, policy=name)`.
        adaptive: whether scores can be compared between the heads of a layer, as `Budget(heads="adaptive")` needs.
        correction: the meaning of `correction="auto"`; "none" for a plain eviction baseline.
        waits: whether scores wait for the device, as some of torch.linalg do: no graph of a step can be captured then.
    """

    name: ClassVar[str]
    adaptive: ClassVar[bool] = True
    correction: ClassVar[str] = "none"
    waits: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals that it reads.

        "attention", "queries", "output", "query_statistics"; "memory": a number that is stored with each token in 4
        bytes a slot (see `remember`); "pre_rope": keys before the rotary embedding; "rotary": the same up to one
        angle for all keys, as where the model counts padding as positions.
        """
        return frozenset()

    @property
    def calibration(self) -> str | Path | None:
        """File with the "query_statistics", if they are needed; None for the file beside the model."""
        return None

    @property
    def observation(self) -> int | None:
        """Number of last queries of a prompt block over which `Signals.attention` averages; None for all."""
        return None

    @property
    def moments(self) -> MomentUse:
        """What `score` reads of the moments."""
        return MomentUse()

    @property
    def second_reading(self) -> SecondReading | None:
        """How a prompt is read twice, which excludes blocks; None if it is read once."""
        return None

    @property
    def shares(self) -> Shares:
        """What the policy says about the budget."""
        return Shares()

    def remember(self, signals: Signals) -> Tensor:
        """What to store with each candidate, [B, Hkv, N] fp32, called before `score` if the policy needs "memory".

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
        if not is_whole(value, minimum):
            raise FastKVError(
                f"{policy.name}: {name} must be an integer of at least {minimum}, got {value!r}; pass a whole number"
            )


def check_within(policy: Policy, least: float, most: float = FINITE, **examples: float) -> None:
    """Raise FastKVError unless each named hyper-parameter is a finite number in that range; its example is."""
    where = f"of at least {least:g}" if most == FINITE else f"in [{least:g}, {most:g}]"
    for name, example in examples.items():
        value = getattr(policy, name)
        if not is_number(value, least, most):
            raise FastKVError(f"{policy.name}: {name} must be a finite number {where}, got {value!r}; try {example}")
