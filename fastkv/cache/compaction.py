"""What a layer chooses from, and how its choice gets into the slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..config import LayerPlan
from ..policies import Signals
from ..reference import Selection, joined, pack
from ..reference.gather import rows_at
from ..state import LayerState, Slots
from . import key_only as tiers

CHUNK = 4096  # evicted tokens copied out at once on their way into the centroids
Block = tuple[Tensor, Tensor, Tensor, Tensor]


def candidates(state: LayerState, block: Block | None, rule: LayerPlan) -> Signals:
    """The tokens in the slots, then those of a block: k, v [B, Hkv, T, D], positions [B, Hkv, T] and valid [B, T]."""
    exact = state.exact
    parts = [(exact["keys"], exact["values"], exact["positions"], exact.valid)]
    if state.approx is not None:
        parts.append(tiers.recovered(state.approx, exact, rule))
    if block is not None:
        k, v, positions, valid = block
        parts.append((k, v, positions, valid[:, None].repeat(1, k.shape[1], 1)))
    keys, values, positions, valid = (joined(*same) for same in zip(*parts))
    memory = None
    if rule.plan.policy.remembers:
        known = [exact["memory"]] + ([] if state.approx is None else [state.approx["memory"]])
        num = 0 if block is None else block[0].shape[2]
        memory = joined(*known, exact.lengths.new_zeros(*exact.lengths.shape, num, dtype=torch.float32))
    return Signals(
        keys=keys,
        values=values,
        positions=positions,
        valid=valid,
        moments=state.moments,
        scale=rule.scale,
        softcap=rule.softcap,
        layer=rule.layer,
        tokens=rule.total,
        decoding=block is None,
        output=rule.output,
        memory=memory,
        rotary=rule.rotary,
        parallel=rule.parallel,
        backend=rule.plan.backend,
    )


def sketch(state: LayerState, signals: Signals, kept: Tensor, most: int) -> None:
    """Let the candidates that leave join the centroids, oldest first; before anything moves in the slots.

    Args: kept [B, Hkv, N] bool, which stay.  most: at least as many as leave any head, so that shapes are static.
    """
    if state.centroids is None:
        return
    last = torch.iinfo(torch.int32).max
    gone = signals.valid & ~kept
    order = torch.where(gone, signals.positions, last).argsort(dim=-1, stable=True)[..., :most]
    for index in order.split(CHUNK, -1):
        keys, values = (rows_at(rows, index) for rows in (signals.keys, signals.values))
        ops.centroids_add(state.centroids, keys, values, gone.gather(2, index), backend=signals.backend)


def store(state: LayerState, signals: Signals, selection: Selection, num: int, rule: LayerPlan, *, full: bool) -> None:
    """Keep the selected candidates, of which the last `num` are a new block, and merge the others into the moments (and
    centroids).

    full: whether the layer was out of room, so that something was selected.
    """
    exact = state.exact
    if full:
        num_kept = 0 if state.layout.adaptive else rule.least  # of a head that has so many
        sketch(state, signals, selection.kept, max(signals.keys.shape[2] - num_kept, 0))
    if state.approx is not None:
        tiers.store(state, signals, selection, rule, full=full)
    elif exact.starts is None:
        block = slice(signals.keys.shape[2] - num, None)
        new = (signals.keys[:, :, block], signals.values[:, :, block], signals.positions[:, :, block])
        ops.compact(*exact.pairs, state.moments, *new, signals.valid, selection, backend=signals.backend)
    else:
        # Compacted where the candidates lie, because the stretches of the heads are about to move.
        keys, values, positions = signals.keys, signals.values, signals.positions.clone()
        none = (keys[:, :, :0], values[:, :, :0], positions[:, :, :0])
        slots = (keys, values, positions, exact.lengths)
        ops.compact(*slots, state.moments, *none, signals.valid, selection, backend=signals.backend)
        if full and state.layout.adaptive:
            counts = rule.parallel.gather(selection.counts)
            left = (counts.shape[1] * rule.total - counts.sum(-1, keepdim=True)) // counts.shape[1]
            capacities = counts + left + state.layout.spare
            exact.trade(rule.parallel.own(capacities), capacities)
        for slab, part in zip(exact.pairs, slots[:3]):
            pack(slab, exact.starts, part)
    if state.approx is None:
        exact.filled = exact.limit - state.layout.spare if full else exact.filled + num
        remember(exact, signals)
    forget_attention(state)


def remember(slots: Slots, signals: Signals) -> None:
    """Put what the policy remembers of the candidates where the tokens lie now; 0 in slots that are not in use."""
    if slots.memory is None:
        return
    assert signals.memory is not None
    last = torch.iinfo(torch.int32).max
    ordered, order = torch.where(signals.valid, signals.positions, last).sort(dim=-1)
    place = torch.searchsorted(ordered, slots["positions"].contiguous()).clamp(max=ordered.shape[-1] - 1)
    rows = torch.where(slots.valid, signals.memory.gather(-1, order).gather(-1, place), 0)
    if slots.starts is not None:
        pack(slots.memory, slots.starts, pad(rows, (0, 1)))  # it repeats the last one: 0, for tokens to come
        return
    slots.memory.zero_()
    slots.memory[:, :, : slots.filled] = rows


def forget_attention(state: LayerState) -> None:
    """Add up what slots receive from now on."""
    for slots in (state.exact, state.approx):
        if slots is not None and slots.attention is not None:
            slots.attention.zero_()
