"""What a layer chooses from, and what the policy is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..policies import LayerFacts, Reread, Signals
from ..reference import LayerState, joined
from . import key_only
from .layout import LayerConfig


def candidates(state: LayerState, k: Tensor, v: Tensor, valid: Tensor, rule: LayerConfig) -> tuple[Signals, Tensor]:
    """The tokens in the slots, then those of a block, k, v [B, Hkv, T, D] and valid [B, T], and
    which of them no policy may evict, [B, Hkv, N] bool.
    """
    exact, spec = state.exact, rule.spec
    keys, values, positions, memory = _stored(state, rule)
    slots, block = (keys, values, positions, memory, exact.lengths), (k, v, valid, state.seen)
    made = ops.candidates(*slots, *block, spec.sinks, spec.recent, backend=spec.backend)
    keys, values, positions, real, guard, memory = made
    if state.approx is not None:
        real[:, :, : exact.filled + state.approx.filled] = joined(*(slots.valid for slots in state.tiers.values()))
    keys, values = (new if not len(both) else both for both, new in ((keys, k), (values, v)))
    return _signals(state, (keys, values, positions), real, memory, rule, decoding=False), guard


def of_slots(state: LayerState, copied: LayerState, rule: LayerConfig) -> tuple[Signals, Tensor]:
    """The tokens in the slots, with the attention received since the last eviction if the policy asks for it; it is
    counted anew from here. And which of them no policy may evict, [B, Hkv, N] bool.

    Args: copied: the state itself or, where the batch lives in chosen rows of it, a copy of what policies read there.
    """
    *tokens, memory = _stored(copied, rule)
    valid, guard, attention, queried = ops.slot_signals(tokens[2], state, rule.spec)
    signals = _signals(copied, tokens, valid, memory, rule, decoding=True)
    if rule.layout.attention and rule.plan.kv_sharers:
        looks = 1 + rule.plan.kv_sharers  # at every token: each layer that shares the keys has queries of its own
        attention, queried = attention / looks, queried * looks
    if rule.layout.attention:
        signals = replace(signals, attention=attention, queried=queried)
    return signals, guard


def _stored(state: LayerState, rule: LayerConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of the slots of all tiers: keys and values in the model's dtype, positions, and what the policy has stored with
    them, None if it stores nothing.
    """
    more = ("memory",) if rule.layout.memory else ()
    stored = [state.exact.read("keys", "values", "positions", *more)]
    if state.approx is not None:  # whose values are recovered
        keys, positions, *known = state.approx.read("keys", "positions", *more, dtype=torch.float32)
        values = key_only.estimated(keys, positions, rule).to(stored[0][1].dtype)
        stored.append([keys, values, positions, *known])
    keys, values, positions, *known = (joined(*same) for same in zip(*stored))
    return keys, values, positions, known[0] if known else None


def _signals(
    state: LayerState, tokens: Sequence[Tensor], valid: Tensor, memory: Tensor | None, rule: LayerConfig, decoding: bool
) -> Signals:
    """What every policy is told of tokens: keys, values and positions, which are real, and what it stored with them."""
    spec, (keys, values, positions) = rule.spec, tokens
    return Signals(
        keys=keys,
        values=values,
        positions=positions,
        valid=valid,
        moments=state.moments,
        layer=LayerFacts(
            rule.plan.layer,
            spec.scale,
            spec.softcap,
            None if state.sink_logits is None else state.sink_logits.detach(),
            rule.layout.total,
            rule.output,
            rule.rotary,
            rule.queries,
            rule.plan.parallel,
            spec.backend,
        ),
        decoding=decoding,
        memory=memory if rule.layout.memory else None,
    )


def of_block(
    signals: Signals,
    q: Tensor,
    state: LayerState,
    rule: LayerConfig,
    reread: Reread | None,
    mass: Tensor | None,
) -> Signals:
    """Add what the policy asks of a prompt block: the attention that candidates get, and the block's queries.

    Args: q [B, Hq, T, D]; reread: of the block, which is then all there is; mass [B, Hq, T]: log of that
        of the evicted tokens in the attention of q, None for none.
    """
    signals = replace(signals, reread=reread)
    if rule.config.needs("attention"):
        signals = observe(signals, q, state, rule, mass)
    return replace(signals, queries=q) if rule.config.needs("queries") else signals


def score(signals: Signals, rule: LayerConfig) -> tuple[Signals, Tensor]:
    """The policy's scores [B, Hkv, N], and the signals with what it wants remembered of each candidate."""
    policy = rule.config.policy
    if rule.config.needs("memory"):
        known = policy.remember(signals)
        signals = signals if known is signals.memory else replace(signals, memory=known)
    return signals, policy.score(signals)


def observe(signals: Signals, q: Tensor, state: LayerState, rule: LayerConfig, mass: Tensor | None) -> Signals:
    """Add the attention that the last queries of the block give to every candidate, and how many they were.

    Arguments as in `of_block`.
    """
    spec, sinks = rule.spec, state.sink_logits
    attention, queried = ops.observed_attention(
        q,
        signals.keys,
        signals.positions,
        signals.valid,
        spec.scale,
        spec.softcap,
        window=rule.config.policy.observation,
        log_mass=None if mass is None else mass.contiguous(),
        sink_logits=None if sinks is None else sinks.detach(),
        bias=state.exact.biases(signals.keys.shape[2]),
        backend=spec.backend,
    )
    if rule.config.policy.observation is None and state.exact.attention is not None:  # and what slots received before
        before, queried = joined(*(slots["attention"] for slots in state.tiers.values())), queried.clamp(min=1)
        attention = attention + pad(before, (0, attention.shape[-1] - before.shape[-1])) / queried
    return replace(signals, attention=attention, queried=queried)
