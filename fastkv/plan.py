"""Plan: everything `patch` was told, checked once and never changed."""

from __future__ import annotations

from dataclasses import dataclass

from .backend import BACKENDS
from .budget import Budget
from .errors import FastKVError
from .policies import Policy, get

CORRECTIONS = {"auto": None, "none": None, "mean": 0, "moments": 1}


@dataclass(frozen=True)
class Plan:
    """The settings of a patched model.

    Attributes:
        policy: scores tokens.  budget: how many stay.
        prefill_block: None reads the whole prompt and compresses each layer right after its own attention; an int reads
            it in blocks of that many tokens, so that no layer ever holds more than budget + block tokens.
        evict_every: decode steps between evictions; a layer holds at most budget + evict_every tokens.
        order: of the moment correction: 1, 0 (means only) or None.
        backend: "auto", "reference" or "triton".
    """

    policy: Policy
    budget: Budget
    prefill_block: int | None = None
    evict_every: int = 16
    order: int | None = None
    backend: str = "auto"

    @classmethod
    def make(
        cls,
        policy: str | Policy,
        budget: int | Budget,
        prefill_block: int | None,
        evict_every: int,
        correction: str | bool | None,
        backend: str,
        static: bool | None,
    ) -> Plan:
        """Check the arguments of `fastkv.patch`. Raises FastKVError for each that cannot be used."""
        chosen = get(policy)
        for name, value, least in (("prefill_block", prefill_block, 1), ("evict_every", evict_every, 1)):
            if value is None and name == "prefill_block":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise FastKVError(f"{name} must be a whole number of at least {least} tokens, got {value!r}")
        if correction is None or isinstance(correction, bool):
            correction = "moments" if correction else "none"
        if correction not in CORRECTIONS:
            raise FastKVError(f"correction must be one of {', '.join(CORRECTIONS)}, got {correction!r}")
        if backend not in BACKENDS:
            raise FastKVError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if static:
            raise FastKVError("static=True is not available in this version; leave it out and decode uncompiled")
        order = chosen.order if correction == "auto" else CORRECTIONS[correction]
        return cls(chosen, Budget.of(budget), prefill_block, evict_every, order, backend)

    @property
    def moment_order(self) -> int | None:
        """What must be remembered of evicted tokens: enough for the correction and for the policy's own score."""
        orders = [order for order in (self.order, self.policy.moment_order) if order is not None]
        return max(orders, default=None)

    @property
    def wants_attention(self) -> bool:
        """Whether decode steps must add up the attention each slot receives."""
        return "attention" in self.policy.needs


@dataclass(frozen=True)
class LayerPlan:
    """A plan with what only the layer knows.

    Attributes:
        layer: index in the model.  tokens: kept per KV head.  scale: logit multiplier.  softcap: or None.
    """

    plan: Plan
    layer: int
    tokens: int
    scale: float
    softcap: float | None = None
