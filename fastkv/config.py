"""Plan: everything `patch` was told, checked once and never changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from .backend import BACKENDS
from .budget import Budget
from .calibration.quality import QualityCurve
from .calibration.vector_map import VectorMap
from .errors import FastKVError
from .parallel import Parallel
from .policies import Policy, get
from .rotary import Rotary
from .state import Layout

# Order of the moments that each mixes into attention.
CORRECTIONS = {
    "auto": None,
    "none": None,
    "mean": 0,
    "moments": 1,
    "cosh": 1,
    "centroids": None,
    "vector": None,
    "vector+mean": 0,
    "vector+moments": 1,
}


@dataclass(frozen=True)
class Plan:
    """The settings of a patched model.

    Attributes:
        policy: scores tokens.  budget: how many stay.
        prefill_block: None reads the whole prompt and compresses each layer right after its own attention; an int reads
            it in blocks of that many tokens, so that no layer ever holds more than budget + block tokens.
        evict_every: decode steps between evictions; a layer holds at most budget + evict_every tokens.
        order: of the moment correction: 1, 0 (means only) or None.  mass: of the moments, "jensen" or "cosh".
        centroids: whether the evicted tokens are kept as centroids, which are mixed into attention.
        vector: whether some tokens keep their key only (VECTOR).
        backend: "auto", "reference" or "triton".
        static: whether decode steps may be compiled into graphs; None: on CUDA.
        values: map from keys to values that `vector` uses.  curve: that `Budget(quality=...)` uses. Both are found when
            the model is known.
    """

    policy: Policy
    budget: Budget
    prefill_block: int | None = None
    evict_every: int = 16
    order: int | None = None
    vector: bool = False
    backend: str = "auto"
    static: bool | None = None
    centroids: bool = False
    mass: str = "jensen"
    values: VectorMap | None = None
    curve: QualityCurve | None = None

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
        if static is not None and not isinstance(static, bool):
            raise FastKVError(f"static must be True, False or None (on CUDA), got {static!r}")
        share = Budget.of(budget)
        if chosen.layers is not None and share.layers == "uniform":
            share = replace(share, layers=chosen.layers)
        if correction == "auto":
            correction = chosen.correction
        plan = cls(
            policy=chosen,
            budget=share,
            prefill_block=prefill_block,
            evict_every=evict_every,
            order=CORRECTIONS[correction],
            vector=correction.startswith("vector"),
            backend=backend,
            static=static,
            centroids=correction == "centroids",
            mass="cosh" if correction == "cosh" else "jensen",
        )
        plan._check_combination()
        return plan

    def _check_combination(self) -> None:
        name = self.policy.name
        adaptive = self.budget.heads == "adaptive"
        if adaptive and not self.policy.adaptive:
            raise FastKVError(
                f"the scores of {name} do not compare between heads; use Budget(heads='uniform') or another policy"
            )
        if adaptive and self.vector:
            raise FastKVError(
                "correction='vector' fixes how many tokens each head keeps, heads='adaptive' does not; use one of them"
            )
        if self.prefill_block is not None and self.deferred:
            what = f"policy {name!r}" if self.policy.rereads else "Budget(quality=...)"
            raise FastKVError(f"{what} needs the whole context before anything is evicted; leave prefill_block out")

    @property
    def deferred(self) -> bool:
        """Whether the first prompt is compressed only after all layers have read it."""
        return self.policy.rereads or self.budget.quality is not None

    @property
    def correction(self) -> str:
        """What is mixed into attention for the evicted tokens, as `CORRECTIONS` calls it."""
        if self.centroids:
            return "centroids"
        if self.order is None:
            return "none"
        return "mean" if self.order == 0 else "cosh" if self.mass == "cosh" else "moments"

    @property
    def moment_order(self) -> int | None:
        """What must be remembered of evicted tokens: enough for the correction and for the policy's own score."""
        orders = [order for order in (self.order, self.policy.moment_order) if order is not None]
        return max(orders, default=None)

    @property
    def undoes_rotation(self) -> bool:
        """Whether keys are needed as they were before the rotary embedding."""
        return self.vector or self.needs("pre_rope")

    def needs(self, signal: str) -> bool:
        """Whether the policy reads an optional signal."""
        return signal in self.policy.needs

    def layout(
        self, layer: int, heads: int, tokens: int, keep: float | None, slope: bool, parallel: Parallel
    ) -> Layout:
        """The layout of a layer's state.

        Args:
            layer: index in the model.  heads: KV heads of this process.  tokens: kept per KV head, mean.
            keep: share of the prompt that stays, where the budget says so.
            slope: whether kernels want a half-precision copy of the cross moment.
            parallel: processes that share the layer's heads.
        Raises: FastKVError if VECTOR meets a policy that fixes what each head keeps.
        """
        reserved = self.budget.reserved
        own = slice(parallel.rank * heads, (parallel.rank + 1) * heads)
        pairs = self.policy.head_tokens(layer, heads * parallel.size, tokens, reserved)
        pairs = pairs and pairs[own]
        approx: tuple[int, ...] = ()
        if self.vector:
            if pairs is not None:
                raise FastKVError(
                    f"correction='vector' and policy {self.policy.name!r} both fix how many tokens each head keeps; "
                    "use one of them"
                )
            assert self.values is not None
            keyed = key_only(tokens, reserved, keep)
            approx = tuple(keyed if usable else 0 for usable in self.values.usable(layer)[own])
            pairs = tuple(tokens - extra // 2 for extra in approx)
        return Layout(
            tokens=pairs or (tokens,) * heads,
            spare=self.evict_every,
            adaptive=self.budget.heads == "adaptive" and heads * parallel.size > 1,
            approx=approx if any(approx) else (),
            order=self.moment_order,
            spread=self.mass == "cosh",
            sketched=tokens if self.centroids else 0,
            slope=slope,
            attention=self.needs("attention"),
            memory=self.policy.remembers,
        )


def key_only(tokens: int, reserved: int, keep: float | None) -> int:
    """How many tokens keep only their key where `tokens` pairs fit; two of them take the room of one pair.

    With removal ratio p_c = 1 - keep, p_a = min(p_c / 2, (1 - p_c) / 2) pairs of every prompt token become 2 p_a keys
    (VECTOR, Sec. 4.3). Without a share, the prompt is taken to be long. Protected tokens stay pairs.
    """
    pairs = tokens // 2
    if keep is not None:
        pairs = min(pairs, math.floor(tokens * (1 - keep) / (2 * keep)))
    return 2 * max(min(pairs, tokens - max(reserved, 1)), 0)


@dataclass(frozen=True)
class LayerPlan:
    """A plan with what only the layer knows.

    Attributes:
        layer: index in the model.  layout: of its state.  scale: logit multiplier.  softcap: or None.
        parallel: processes that share the layer's heads.  rotary: the model's rotary embedding, if anything undoes it.
        output: [hidden, Hq, Dv], the layer's output projection, if the policy reads it.
        weight: [Hkv, Dk, Dv] fp32, the layer's map from keys to values, if VECTOR is used.
    """

    plan: Plan
    layer: int
    layout: Layout
    scale: float
    softcap: float | None = None
    parallel: Parallel = field(default_factory=Parallel)
    rotary: Rotary | None = None
    output: Tensor | None = None
    weight: Tensor | None = None

    @property
    def least(self) -> int:
        """Tokens that every head keeps, whatever the others do: below it nothing is selected."""
        return min(self.layout.tokens)

    @property
    def total(self) -> int:
        """Tokens per KV head that stay, with or without their value; their mean where heads differ."""
        layout = self.layout
        return (sum(layout.tokens) + sum(layout.approx)) // len(layout.tokens)
