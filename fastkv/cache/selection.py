"""Selection, written once for all policies: protect sinks and recent tokens, then keep the best by score."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..policies import Signals
from ..reference import LayerState, Selection, z_scores
from .layout import LayerConfig

FLOOR = 0.2  # of the mean budget, what every head keeps in any case (Ada-KV, arXiv:2407.11550)


def protected(signals: Signals, seen: Tensor, rule: LayerConfig) -> Tensor:
    """[B, Hkv, N] bool, candidates that no policy may evict; seen [B]: true tokens absorbed, candidates included."""
    return ops.protected(signals.positions, seen, rule.spec.sinks, rule.spec.recent)


def keep_best(
    signals: Signals, scores: Tensor, guard: Tensor, rule: LayerConfig, more: Tensor | None = None
) -> Selection:
    """Of the N candidates, those that stay: as many of each head as the layer's layout says.

    Args: scores [B, Hkv, N]; guard [B, Hkv, N] bool, those that no policy may evict; more [B, Hkv] int64: how many each
        head keeps beyond that, None for none.
    """
    if rule.joint:  # heads choose together, by their mean
        scores = z_scores(scores, signals.valid).mean(1, keepdim=True).repeat(1, scores.shape[1], 1)
    if rule.layout.adaptive:
        return _adaptive(signals, scores, guard, rule, more)
    return _each(signals, scores, guard, _wanted(rule), more)


def keep_in_rounds(signals: Signals, scores: Tensor, guard: Tensor, rule: LayerConfig) -> Selection:
    """`keep_best` in as many rounds as the policy asks for, each of which evicts equally many (MomentKV, Alg. 1).

    The policy scores what is left with the moments as they will be. Arguments as there; scores: of the first round.
    """
    policy, rounds = rule.config.policy, rule.config.policy.moments.rounds
    left, count = signals, signals.valid.sum(-1)
    excess = (count - _counts(_wanted(rule), len(count), count.device)).clamp(min=0)
    for coming in range(rounds - 1, 0, -1):
        kept = keep_best(left, scores, guard, rule, more=excess * coming // rounds).kept
        gone = signals.valid & ~kept
        left = replace(left, valid=kept, moments=signals.moments.add(signals.keys, signals.values, gone))
        scores = policy.score(left)
    return keep_best(left, scores, guard, rule)


def _wanted(rule: LayerConfig) -> tuple[int, ...]:
    """Tokens that each head keeps, with or without their value."""
    layout = rule.layout
    keys = layout.approx or (0,) * len(layout.tokens)
    return tuple(pairs + extra for pairs, extra in zip(layout.tokens, keys))


def keep_slots(signals: Signals, scores: Tensor, guard: Tensor, state: LayerState, rule: LayerConfig) -> Selection:
    """Of the slots of a layer, those that stay: each head shrinks by what its slots have spare.

    Args: scores [B, Hkv, N] of all slots; guard [B, Hkv, N] bool, those that no policy may evict.
    """
    starts = state.exact.starts
    if starts is None:
        return _each(signals, scores, guard, rule.layout.tokens)
    choice = (scores, signals.positions, signals.valid, guard)
    return ops.select_each(*choice, starts.diff(dim=-1) - rule.layout.spare, backend=signals.layer.backend)


def keep_values(signals: Signals, kept: Tensor, errors: Tensor, seen: Tensor, rule: LayerConfig) -> Tensor:
    """Of the `kept` [B, Hkv, N] candidates, those that keep their value too: where the map from keys errs most.

    Args: errors [B, Hkv, N] >= 0, squared distance of each value from what the map makes of its key; negative for
        candidates that have no value any more.
    """
    guard = protected(signals, seen, rule)
    if rule.joint:  # candidates without a value have none in any head
        errors = errors.sum(1, keepdim=True).repeat(1, errors.shape[1], 1)
    have = replace(signals, valid=kept & (errors >= 0))
    return _each(have, errors, guard, rule.layout.tokens).kept


def _each(
    signals: Signals, scores: Tensor, guard: Tensor, tokens: tuple[int, ...], more: Tensor | None = None
) -> Selection:
    """`tokens[h]` candidates of head h, and `more` [B, Hkv]."""
    choice, backend = (scores, signals.positions, signals.valid, guard), signals.layer.backend
    if more is None and len(set(tokens)) == 1:
        return ops.select(*choice, tokens[0], backend=backend)
    numbers = _counts(tokens, len(scores), scores.device)
    return ops.select_each(*choice, numbers if more is None else numbers + more, backend=backend)


def _counts(tokens: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """[B, Hkv] int64, a view."""
    return _rows_of_counts(tokens, 1 << (batch - 1).bit_length(), device)[:batch]


@functools.lru_cache(maxsize=4096)  # of each layer, whose heads may differ, one for every power of two
def _rows_of_counts(tokens: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """[batch, Hkv] int64, sent to the device once, not at every eviction."""
    return torch.tensor([tokens] * batch, device=device)


def _adaptive(
    signals: Signals, scores: Tensor, guard: Tensor, rule: LayerConfig, more: Tensor | None = None
) -> Selection:
    """Heads * tokens candidates of the layer, and `more` [B, Hkv] in all: the floor of each head first, the rest to the
    best scores of all heads.

    Equal scores go to the lower position, then to the lower head. Under tensor parallelism the heads of all processes
    compete, as they would on one device.
    """
    backend, tokens = signals.layer.backend, rule.layout.total
    floor = max(math.ceil(FLOOR * tokens), rule.spec.sinks + rule.spec.recent)
    first = ops.select(scores, signals.positions, signals.valid, guard, floor, backend=backend).kept
    gather = rule.plan.parallel.gather
    scores, positions, valid, first = gather(scores), gather(signals.positions), gather(signals.valid), gather(first)
    heads = scores.shape[1]
    place = positions * heads + torch.arange(heads, dtype=torch.int32, device=scores.device)[:, None]

    def flat(part: Tensor) -> Tensor:
        return part.flatten(1)[:, None]

    choice, number = (flat(scores), flat(place), flat(valid), flat(first)), heads * tokens
    if more is None:
        chosen = ops.select(*choice, number, backend=backend)
    else:
        chosen = ops.select_each(*choice, number + gather(more).sum(-1, keepdim=True), backend=backend)
    kept = rule.plan.parallel.own(chosen.kept.reshape(scores.shape))
    return Selection(kept, kept.sum(-1))
