"""What a policy is: a small frozen dataclass that turns signals into scores. It never selects, protects or syncs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import FastKVError
from ..reference import Moments


@dataclass(frozen=True)
class Signals:
    """What a policy may look at when a layer must decide which tokens to keep.

    Candidates are the retained tokens followed by the new ones, N in all, in no guaranteed order.

    Attributes:
        keys: [B, Hkv, N, Dk] post-RoPE, values: [B, Hkv, N, Dv].
        positions: [B, Hkv, N] int32.  valid: [B, Hkv, N] bool, false for empty slots and padding.
        moments: of the tokens evicted so far.
        scale: logit multiplier of the layer.
        layer: index of the layer in the model.
        decoding: true when called between generated tokens, false while a prompt is read.
        attention: [B, Hkv, N], mean attention weight from the observation window: the last `policy.observation` queries
            of the prompt block, or the queries since the last eviction when decoding; None unless the policy `needs` it
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
    attention: Tensor | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class Policy:
    """Base of all policies. A subclass sets `name` and `needs` and implements `score`.

    Class attributes:
        name: what `fastkv.patch(model, policy=name)` calls it.
        needs: optional signals it reads; now only "attention".
        order: order of the moment correction that `correction="auto"` gives it; None for a plain eviction baseline.
        moment_order: moments that `score` itself reads (kept even if the correction is off).
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    order: ClassVar[int | None] = None
    moment_order: ClassVar[int | None] = None

    @property
    def observation(self) -> int:
        """How many last queries of a prompt block `Signals.attention` averages over."""
        return 0

    @property
    def recent_share(self) -> float:
        """Share of the budget that goes to the most recent tokens, whatever their score."""
        return 0.0

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
