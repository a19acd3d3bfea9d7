"""What of a config one layer needs: what its state consists of and costs, how it attends and evicts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Parallel, resolve
from ..budget import LayerCost
from ..config import Config
from ..corrections import Correction, Shape
from ..errors import FastKVError
from ..ops.operator import BackendCodec
from ..policies import QueryStatistics
from ..reference import PLAIN, LayerState, Moments, SlotFormat, Slots, Spec
from ..rotary import Rotary

SAMPLE = 1024  # tokens per head at which the cost of a layout is measured; even, so that no rounding shows


@dataclass(frozen=True)
class Layout:
    """What a layer keeps.

    Attributes:
        tokens: (key, value) pairs that each KV head keeps; where `adaptive`, what they keep before the first selection.
        correction: says what is remembered of evicted tokens.
        mean: tokens per KV head, mean over the heads of all processes; 0 for nothing remembered besides moments.
        spare: further slots per head, filled between evictions.
        adaptive: whether heads trade slots with each other when tokens are selected.
        shared: whether heads keep what they were calibrated to keep, and are dealt slots anew when a text grows.
        approx: tokens of which each KV head keeps the key only (VECTOR); empty without.
        order: of the moments, None for the count only.
        slope: whether to keep a half-precision copy of the cross moment for the kernels (half-precision keys only).
        attention: whether to add up the attention that slots receive.
        memory: whether the policy stores a number with each token.
        latent: whether values are the first numbers of keys, which are then stored alone.
        format: how keys and values of pairs are stored.  backend: that converts them.
    """

    tokens: tuple[int, ...]
    correction: Correction
    mean: int = 0
    spare: int = 0
    adaptive: bool = False
    shared: bool = False
    approx: tuple[int, ...] = ()
    order: int | None = None
    slope: bool = False
    attention: bool = False
    memory: bool = False
    latent: bool = False
    format: SlotFormat = PLAIN
    backend: str = "reference"

    @property
    def ragged(self) -> bool:
        """Whether heads own stretches of a slab instead of equally many slots."""
        return self.adaptive or self.shared or len(set(self.tokens)) > 1

    @property
    def fixed(self) -> bool:
        """Whether the layer knows how many slots each head has, so that they need not stand with the slots."""
        return not self.adaptive and not self.approx

    @property
    def least(self) -> int:
        """Tokens that every head keeps, whatever the others do: below it nothing is selected."""
        return min(self.tokens)

    @property
    def total(self) -> int:
        """Tokens per KV head that stay, with or without their value; their mean where heads differ."""
        return (sum(self.tokens) + sum(self.approx)) // len(self.tokens)

    def capacities(self, tier: str) -> list[int]:
        """Slots that each head has in a tier before any are traded."""
        return [tokens + self.spare for tokens in self.tokens] if tier == "exact" else list(self.approx)

    def allocate(self, like_keys: Tensor, like_values: Tensor) -> LayerState:
        """An empty state for the batch, heads, sizes, dtype and device of the given [B, Hkv, T, D]."""
        batch, heads, _, key_dim = like_keys.shape
        value_dim, device, itemsize = like_values.shape[-1], like_keys.device, like_keys.element_size()
        moments = Moments.empty(batch, heads, key_dim, value_dim, device, order=self.order)
        if self.slope and moments.cross is not None and itemsize == 2:
            moments.slope = torch.zeros(batch, heads, key_dim, value_dim, dtype=like_keys.dtype, device=device)
        shape = Shape(heads, key_dim, value_dim, itemsize, self.latent, self.format)
        return LayerState(
            exact=self._slots("exact", like_keys, like_values),
            seen=torch.zeros(batch, dtype=torch.int64, device=device),
            moments=moments,
            approx=self._slots("approx", like_keys, None) if self.approx else None,
            parts=self.correction.empty(batch, shape, self.mean, device) if self.mean else None,
        )

    def _slots(self, tier: str, like_keys: Tensor, like_values: Tensor | None) -> Slots:
        """Empty slots of a tier, zero: attention may read them."""
        batch, heads, _, dim = like_keys.shape
        capacities = self.capacities(tier)
        ragged = self.ragged if tier == "exact" else len(set(capacities)) > 1
        place = (batch, sum(capacities)) if ragged else (batch, heads, capacities[0])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=like_keys.device)

        value_dim = 0 if like_values is None else like_values.shape[-1]
        keys, key_scales = self.format.keys.empty(place, dim, like_keys.dtype, like_keys.device)
        values = value_scales = None
        if value_dim and not self.latent:
            values, value_scales = self.format.values.empty(place, value_dim, like_keys.dtype, like_keys.device)
        made = Slots(
            keys=keys,
            values=values,
            lengths=zeros(batch, heads, dtype=torch.int32),
            positions=zeros(*place, dtype=torch.int32),
            starts=zeros(batch, heads + 1, dtype=torch.int32) if ragged else None,
            attention=zeros(*place) if self.attention else None,
            memory=zeros(*place) if self.memory else None,
            bias=zeros(*place) if self.correction.match is not None else None,
            value_dim=value_dim,
            key_scales=key_scales,
            value_scales=value_scales,
            format=self.format,
            decodes_to=None if self.format.plain else like_keys.dtype,
            codec=BackendCodec(self.backend),
        )
        made.deal(capacities)
        return made

    def clear(self, state: LayerState) -> None:
        """Forget everything, in place: addresses stay."""
        for _, tensor in state.named_tensors():
            tensor.zero_()
        for tier, slots in state.tiers.items():
            slots.deal(self.capacities(tier))


def cost(like_keys: Tensor, like_values: Tensor, layout: Callable[[int], Layout], ragged: bool = False) -> LayerCost:
    """Bytes per sequence that `Layout.allocate` spends for [B, Hkv, T, D]: for each token per KV head, and apart.

    Args: layout: makes one for a number of tokens per KV head.  ragged: whether heads will own stretches of a slab.
    """
    heads, dims = like_keys.shape[1], (like_keys.shape[-1], like_values.shape[-1])
    made, double = (replace(one, shared=ragged) for one in (layout(SAMPLE), layout(2 * SAMPLE)))
    once, twice = (_bytes(replace(one, mean=0), heads, *dims, like_keys.dtype) for one in (made, double))
    each = (twice - once) / SAMPLE
    shape = Shape(heads, *dims, like_keys.element_size(), made.latent, made.format)
    full = 2.0 * heads * (dims[0] if made.latent else sum(dims))  # bfloat16
    return made.correction.cost(shape, LayerCost(each, once - round(SAMPLE * each), full=full))


@functools.lru_cache(maxsize=256)  # layers of a model are alike, so are its caches, and each takes milliseconds
def _bytes(layout: Layout, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Of the state of one sequence."""
    keys, values = (torch.empty(1, heads, 0, dim, dtype=dtype, device="meta") for dim in (key_dim, value_dim))
    return layout.allocate(keys, values).nbytes()


@dataclass(frozen=True)
class LayerPlan:
    """How one layer of a model is laid out, whoever the engine is.

    Attributes:
        layer: index in the model.  place: among the `num_layers` that share the budget.
        parallel: processes that share the layer's heads.
        latent: whether values are the first numbers of keys.
        kv_sharers: how many other layers attend to this one's keys and values.
    """

    config: Config
    layer: int = 0
    place: int = 0
    num_layers: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    latent: bool = False
    kv_sharers: int = 0

    def of(self, keys: Tensor, values: Tensor, context: int = 0, keep: float | None = None) -> tuple[Layout, int]:
        """The layout for the shapes, dtype and device of keys and values [B, Hkv, T, D].

        Args: context: length of the prompt to be read, tokens.  keep: share of it that stays, where the budget left
            that open.
        Returns: with it, where heads were calibrated, the tokens per head of all layers; else 0.
        Raises: FastKVError if the budget is too small, or as `layout`.
        """
        budget = self.config.budget
        if keep is not None:  # what a quality asked for
            budget = replace(budget, quality=None, calibration=None, keep=keep)
        layout = functools.partial(self.layout, keys.shape[1], keys.device, keep=budget.keep)
        costs = cost(keys, values, layout, ragged=budget.shared is not None)
        average = budget.average(self.num_layers, context, costs)
        if budget.shared is None:
            return layout(budget.layer_tokens(average, self.place, self.num_layers)), 0
        shares = budget.heads_of(self.place, self.num_layers, average, context)
        return layout(sum(shares) // len(shares), shares=shares), average

    def layout(
        self,
        heads: int,
        device: torch.device,
        tokens: int,
        keep: float | None = None,
        shares: tuple[int, ...] | None = None,
    ) -> Layout:
        """The layout for so many KV heads of this process that keep so many tokens, on average.

        Args: keep: share of the prompt that stays, where the budget says so.  shares: tokens of each KV head of all
            processes, if they were calibrated.
        Raises: FastKVError if VECTOR meets a policy that fixes what each head keeps, or heads of several processes.
        """
        config, policy, correction = self.config, self.config.policy, self.config.correction
        parallel, reserved, fixed = self.parallel, config.budget.reserved, policy.shares.heads
        own = slice(parallel.rank * heads, (parallel.rank + 1) * heads)
        pairs = None if fixed is None else fixed.head_tokens(self.layer, heads * parallel.size, tokens, reserved)
        approx: tuple[int, ...] = ()
        if pairs is None:
            usable = [True] * heads if config.vector is None else config.vector.usable(self.layer)[own]
            own_shares = (tokens,) * heads if shares is None else shares[own]
            if config.vector is not None and config.vector.joint:
                if parallel.size > 1:
                    raise FastKVError(
                        f"a map from the keys of all heads of a layer needs them in one process, got {parallel.size}; "
                        "fit one map a head with fastkv calibrate vector"
                    )
                if any(usable):  # all heads keep the same tokens
                    own_shares = (sum(own_shares) // heads,) * heads
            pairs, approx = correction.split(own_shares, tokens, reserved, keep, usable)
        elif correction.key_only:
            raise FastKVError(
                f"correction='vector' and policy {policy.name!r} both fix how many tokens each head keeps; use one of "
                "them"
            )
        else:
            pairs = pairs[own]
        orders = [order for order in (correction.order, policy.moments.order) if order is not None]
        return Layout(
            tokens=pairs,
            correction=correction,
            mean=tokens,
            spare=config.evict_every,
            adaptive=config.budget.heads == "adaptive" and heads * parallel.size > 1,
            shared=shares is not None,
            approx=approx,
            order=max(orders, default=None),
            slope=resolve(config.backend, device) == "triton",
            attention=config.needs("attention"),
            memory=config.needs("memory"),
            latent=self.latent,
            format=config.slots,
            backend=config.backend,
        )


class Attends(NamedTuple):
    """How a layer attends, as its engine says with every call.

    Attributes: scale: logit multiplier.  softcap: bends logits, or None.  output: [hidden, Hq, Dv], the layer's output
        projection, for policies that need it.  sink_logits: [Hq], learned attention sinks, of this process's heads.
    """

    scale: float
    softcap: float | None = None
    output: Tensor | None = None
    sink_logits: Tensor | None = None


@dataclass(frozen=True)
class LayerConfig:
    """A plan with what follows from the shapes of keys and values, and how the layer attends.

    Attributes:
        plan: of the layer.  layout: of its state.  spec: how it attends and evicts.
        rotary: how keys are turned, if anything undoes it.
        output: [hidden, Hq, Dv], the layer's output projection, if the policy reads it.
        queries: what the layer's queries are like, if the policy reads it.
        weight: [Hkv, Dk, Dv] fp32, the layer's map from keys to values, if some tokens keep no value; joint:
            [Hkv, Hkv * Dk, Dv].
    """

    plan: LayerPlan
    layout: Layout
    spec: Spec
    rotary: Rotary | None = None
    output: Tensor | None = None
    queries: QueryStatistics | None = None
    weight: Tensor | None = None

    @classmethod
    def of(cls, plan: LayerPlan, layout: Layout, device: torch.device) -> LayerConfig:
        """Of a layer of that layout: its part of what was fitted to the model. It attends with scale 1."""
        config, layer, parallel = plan.config, plan.layer, plan.parallel
        rotary = config.rotations.get(layer)
        weight = queries = None
        if config.vector is not None:
            weight = parallel.own(config.vector.weights[layer][None])[0].to(device)
        if config.queries is not None:
            known = config.queries.of_layer(layer)
            queries = QueryStatistics(*(parallel.own(part[None])[0].to(device) for part in known))
        turning = None if rotary is None else rotary.to(device)
        return cls(plan, layout, spec_of(config, layout, scale=1.0), turning, queries=queries, weight=weight)

    @property
    def config(self) -> Config:
        """Of the whole model."""
        return self.plan.config

    @property
    def joint(self) -> bool:
        """Whether all heads keep the same tokens, because a value is recovered from the keys of all heads."""
        return bool(self.layout.approx) and self.config.vector is not None and self.config.vector.joint

    def keeping(self, tokens: tuple[int, ...]) -> LayerConfig:
        """The same where heads keep so many tokens."""
        layout = replace(self.layout, tokens=tokens)
        spec = spec_of(self.config, layout, self.spec.scale, self.spec.softcap)
        return replace(self, layout=layout, spec=spec)

    def attending(self, how: Attends) -> LayerConfig:
        """The same for a layer that attends so."""
        return replace(self, spec=replace(self.spec, scale=how.scale, softcap=how.softcap), output=how.output)


def spec_of(config: Config, layout: Layout, scale: float, softcap: float | None = None) -> Spec:
    """How a layer of that layout attends and evicts.

    The budget's recent tokens are protected, or the policy's larger share; sinks always fit.
    """
    budget = config.budget
    recent = max(budget.recent, math.ceil(config.policy.shares.recent * layout.total))
    return Spec(
        scale=scale,
        softcap=softcap,
        correction=config.correction,
        backend=config.backend,
        tokens=layout.least,
        spare=layout.spare,
        sinks=budget.sinks,
        recent=min(recent, layout.least - budget.sinks),
    )
