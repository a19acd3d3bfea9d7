"""Absorb a block of prompt tokens: attend, score, select, compact. Nothing else happens to a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .plan import LayerPlan
from .policies import Signals
from .reference import Selection, joined
from .select import keep_best
from .state import LayerState


def attend_block(state: LayerState, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, rule: LayerPlan) -> Tensor:
    """Attention of a block [B, H, T, D] over everything retained, everything evicted and, causally, itself.

    Args: q [B, Hq, T, D]; k, v [B, Hkv, T, D]; valid [B, T] bool, false for padding.  Returns: [B, Hq, T, Dv].
    """
    used = slice(0, state.filled)
    out, _ = ops.prefill_attention(
        q,
        state.keys[:, :, used],
        state.values[:, :, used],
        state.lengths,
        k,
        v,
        valid,
        state.moments,
        rule.scale,
        rule.softcap,
        order=rule.plan.order,
        backend=rule.plan.backend,
    )
    return out


def absorb_block(state: LayerState, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, rule: LayerPlan) -> None:
    """Make the block part of the state, evicting down to the layer's budget; evicted pairs go into the moments.

    Shapes as in `attend_block`, which comes first: every query sees its whole past before anything is evicted.
    """
    num, heads = k.shape[2], k.shape[1]
    inside = valid[:, None].repeat(1, heads, 1)
    # Padding gets the position of the token before it; it is never valid, so this is never read.
    new_positions = (state.seen[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, heads, -1).to(torch.int32)
    used = state.filled
    held = torch.arange(used, device=k.device) < state.lengths[..., None]
    state.seen += valid.sum(-1)
    signals = Signals(
        keys=joined(state.keys[:, :, :used], k),
        values=joined(state.values[:, :, :used], v),
        positions=joined(state.positions[:, :, :used], new_positions),
        valid=joined(held, inside),
        moments=state.moments,
        scale=rule.scale,
        layer=rule.layer,
        decoding=False,
        backend=rule.plan.backend,
    )
    if used + num > rule.tokens:
        if rule.plan.wants_attention:
            signals = observe(signals, state, q, valid, rule)
        selection = keep_best(signals, state.seen, rule)
    else:  # everything fits
        selection = Selection(signals.valid, signals.valid.sum(-1))
    ops.compact(
        state.keys,
        state.values,
        state.positions,
        state.lengths,
        state.moments,
        k,
        v,
        new_positions,
        signals.valid,
        selection,
        backend=rule.plan.backend,
    )
    state.filled = min(used + num, rule.tokens)
    if state.attention is not None:
        state.attention.zero_()
    state.steps = 0


def observe(signals: Signals, state: LayerState, q: Tensor, valid: Tensor, rule: LayerPlan) -> Signals:
    """Add the attention that the last queries of the block give to every candidate."""
    window = min(rule.plan.policy.observation, q.shape[2])
    q, query_valid = q[:, :, -window:], valid[:, -window:].clone()
    query_positions = state.seen[:, None] - query_valid.flip(-1).cumsum(-1).flip(-1)
    log_mass = None
    if rule.plan.order is not None:
        log_mass = ops.moment_estimate(q, state.moments, rule.scale, rule.softcap, order=0)[1]
    attention = ops.window_attention(
        q,
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
    return Signals(**{**vars(signals), "attention": attention})
