"""Absorb a block of prompt tokens: attend, score, select, compact. Nothing else happens to a prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..config import LayerPlan
from ..policies import Signals
from ..reference import Selection, joined, merge_partials, most_attended
from ..state import LayerState
from .compaction import candidates, store
from .key_only import attend_keys
from .selection import keep_best, score

Held = tuple[Tensor, Tensor, Tensor]
QUERY_CHUNK = 256  # queries observed at once where a policy watches all of them


def attend_block(state: LayerState, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, rule: LayerPlan) -> Tensor:
    """Attention of a block [B, H, T, D] over everything retained, everything evicted and, causally, itself.

    Args: q [B, Hq, T, D]; k, v [B, Hkv, T, D]; valid [B, T] bool, false for padding.  Returns: [B, Hq, T, Dv].
    """
    out, lse = ops.prefill_attention(
        q,
        state.exact["keys"],
        state.exact["values"],
        state.exact.lengths,
        k,
        v,
        valid,
        state.moments,
        rule.scale,
        rule.softcap,
        order=rule.plan.order,
        mass=rule.plan.mass,
        backend=rule.plan.backend,
    )
    if state.centroids is not None:
        more, more_lse = ops.centroid_attention(q, state.centroids, rule.scale, rule.softcap, backend=rule.plan.backend)
        out = merge_partials(out, lse, more, more_lse)[0].to(q.dtype)
    return out if state.approx is None else attend_keys(state.approx, q, out, lse, rule)


def attend_held(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, held: Held, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of re-fed tokens over a prompt that is held in full and, causally, themselves. Nothing is stored.

    Args: shapes as in `attend_block`; held: keys and values [B, Hkv, N, D] and valid [B, N] of the prompt.
    Returns: [B, Hq, T, Dv] and, [B, Hkv, N], the most that any of the tokens gave to each of the prompt.
    """
    keys, values, real = held
    num, size = real.shape[1], valid.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril() & valid[:, None]
    visible = torch.cat([real[:, None].expand(-1, size, -1), causal], 2) & valid[..., None]
    keys, values = joined(keys, without_padding(k, valid)), joined(values, without_padding(v, valid))
    out, most = most_attended(q, keys, values, visible, scale, softcap)
    return out, most[..., :num]


def without_padding(rows: Tensor, valid: Tensor) -> Tensor:
    """A contiguous copy of [B, H, T, D] with zeros where `valid` [B, T] is false: rows of padding may hold NaN."""
    zero = rows.new_zeros(())
    return torch.where(valid[:, None, :, None], rows, zero, out=rows.new_empty(rows.shape))


def absorb_block(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    rule: LayerPlan,
    attention: Tensor | None = None,
) -> None:
    """Make the block part of the state, evicting down to the layer's budget; evicted pairs are merged.

    Shapes as in `attend_block`, which comes first: every query sees its whole past before anything is evicted.
    attention [B, Hkv, T]: what the block's tokens receive, instead of an observation (KVzip).
    """
    num, policy = k.shape[2], rule.plan.policy
    # Padding gets the position of the token before it; it is never valid, so this is never read.
    positions = (state.seen[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, k.shape[1], -1).to(torch.int32)
    state.seen += valid.sum(-1)
    signals = candidates(state, (k, v, positions, valid), rule)
    full = state.exact.filled + num > rule.least
    if full or policy.remembers:
        if attention is not None:
            signals = replace(signals, attention=attention, queried=torch.ones_like(state.seen)[:, None, None])
        elif rule.plan.needs("attention"):
            signals = observe(signals, state, q, valid, rule)
        if rule.plan.needs("queries"):
            signals = replace(signals, queries=q)
        signals, scores = score(signals, rule)
    selection = Selection(signals.valid, signals.valid.sum(-1))
    if full:
        selection = keep_best(signals, scores, state.seen, rule)
    store(state, signals, selection, num, rule, full=full)


def evicted_mass(q: Tensor, state: LayerState, rule: LayerPlan) -> Tensor | None:
    """Log of the mass that the evicted tokens have in the attention of q [B, Hq, T, D]: [B, Hq, T], None for none."""
    plan, scale, softcap = rule.plan, rule.scale, rule.softcap
    if state.centroids is not None:
        return ops.centroid_attention(q, state.centroids, scale, softcap, backend=plan.backend)[1]
    if plan.order is None:
        return None
    return ops.moment_estimate(q, state.moments, scale, softcap, order=0, mass=plan.mass)[1]


def observe(signals: Signals, state: LayerState, q: Tensor, valid: Tensor, rule: LayerPlan) -> Signals:
    """Add the attention that the last queries of the block give to every candidate, and how many they were."""
    num, observed = q.shape[2], rule.plan.policy.observation
    if observed is not None and observed < num:  # each row's own last queries, on whichever side it is padded
        last = valid.to(torch.uint8).argsort(dim=-1, stable=True)[:, -observed:]
        q = q.gather(2, last[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        valid, num = valid.gather(1, last), observed
    received = queried = signals.keys.new_zeros((), dtype=torch.float32)
    for start in range(0, num, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, num)
        part, query_valid = q[:, :, start:stop], valid[:, start:stop].clone()
        later = valid[:, stop:].sum(-1, keepdim=True)
        query_positions = state.seen[:, None] - later - query_valid.flip(-1).cumsum(-1).flip(-1)
        log_mass = evicted_mass(part, state, rule)
        mean = ops.window_attention(
            part,
            signals.keys,
            rule.scale,
            rule.softcap,
            positions=signals.positions,
            query_positions=query_positions,
            valid=signals.valid,
            query_valid=query_valid,
            log_mass=log_mass,
            backend=rule.plan.backend,
        )
        asked = query_valid.sum(-1)[:, None, None].to(mean.dtype)
        received, queried = received + mean * asked, queried + asked
    return replace(signals, attention=received / queried.clamp(min=1), queried=queried)
