"""Which tokens stay, and how those that leave are remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import check_shape
from .gather import pack, pack_known, rows_at
from .state import LayerState, Spec

CHUNK = 4096  # evicted tokens copied out at once on their way into what is remembered


class Selection(NamedTuple):
    """Which candidates of each head stay.

    Attributes:
        kept: [B, Hkv, N] bool.  counts: [B, Hkv] int64, how many.
    """

    kept: Tensor
    counts: Tensor


def select(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int) -> Selection:
    """Keep the `tokens` best valid candidates of each head: protected ones first, then by score.

    Equal scores go to the lower position. NaN counts as the lowest score. The result does not depend on the order of
    the candidates.

    Args: scores [B, Hkv, N], compared in fp32; positions (below 2^30), valid, protected [B, Hkv, N]; tokens: how many
        to keep per head.
    """
    order = best_first(scores, positions, valid, protected)[..., :tokens]
    chosen = valid.gather(-1, order)
    return Selection(torch.zeros_like(valid).scatter_(-1, order, chosen), chosen.sum(-1))


def select_each(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: Tensor) -> Selection:
    """`select` where every head keeps its own number of candidates, tokens [B, Hkv]."""
    order = best_first(scores, positions, valid, protected)
    chosen = valid.gather(-1, order) & (torch.arange(order.shape[-1], device=order.device) < tokens[..., None])
    return Selection(torch.zeros_like(valid).scatter_(-1, order, chosen), chosen.sum(-1))


def best_first(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor) -> Tensor:
    """Indices of the candidates in the order of `select`, int64 [B, Hkv, N]."""
    return ranks(scores, positions, valid, protected).argsort(dim=-1, stable=True)


def ranks(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor) -> Tensor:
    """Numbers int64 [B, Hkv, N] that ascend in the order of `select`."""
    shape = scores.shape
    for name, tensor in (("positions", positions), ("valid", valid), ("protected", protected)):
        check_shape("select", name, tensor, shape)
    # One int64 key holds all three criteria, most significant first: protected, valid or not; score; position.
    lowest = torch.finfo(torch.float32).min
    scores = torch.nan_to_num(scores.float(), nan=lowest, neginf=lowest) + 0.0  # -0.0 becomes 0.0
    bits = scores.view(torch.int32)
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    rank = torch.where(valid, torch.where(protected, -(1 << 62), 0), 1 << 62)
    return rank + torch.sub(positions, ascending, alpha=1 << 30)


def protected(positions: Tensor, seen: Tensor, sinks: int, recent: int) -> Tensor:
    """Which tokens no policy may evict: position < sinks, or among the last `recent` of the `seen` [B] true tokens."""
    first_recent = (seen - recent).to(positions.dtype)[:, None, None]
    return (positions < sinks) | (positions >= first_recent)


def slot_signals(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is known of the slots of all tiers, side by side, before an eviction. What they receive is counted anew.

    A token that arrived after the last eviction was seen by fewer queries than others: its mean is over those.

    Args: positions [B, Hkv, N] int32 of all slots.
    Returns: valid [B, Hkv, N] bool, in use; guard [B, Hkv, N] bool, `protected`; attention [B, Hkv, N], mean of what
        slots received, and queried [B, Hkv, N] fp32, the number of queries that it is over, empty unless slots collect
        it.
    """
    tiers = state.tiers.values()
    valid = joined(*(slots.valid for slots in tiers))
    guard = protected(positions, state.seen, spec.sinks, spec.recent)
    attention, queried = (positions.new_empty(0, dtype=torch.float32) for _ in range(2))
    if state.exact.attention is not None:
        queried = (state.seen[:, None, None] - positions).clamp(1, spec.spare).float()
        attention = joined(*(slots["attention"] for slots in tiers)) / queried
        for slots in tiers:
            assert slots.attention is not None
            slots.attention.zero_()
    return valid, guard, attention, queried


def joined(*parts: Tensor) -> Tensor:
    """The candidates side by side along axis 2, in the dtype of the first; empty parts cost no copy."""
    filled = [part for part in parts if part.shape[2]] or [parts[0]]
    return filled[0] if len(filled) == 1 else torch.cat([part.to(parts[0].dtype) for part in filled], 2)


def blocks_of(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of an engine's batch as blocks: q [N, Hq, D] and k, v [N, Hkv, D] become [R, H, T, D].

    Args: tokens [R, T] int64, which of the N tokens is where.
    """
    heads = (torch.arange(part.shape[1], device=part.device)[:, None] for part in (q, k, v))
    q, k, v = (part[tokens[:, None], own] for part, own in zip((q, k, v), heads))
    return q, k, v


def of_blocks(blocks: Tensor, own: Tensor, sequence: Tensor, within: Tensor, out: Tensor) -> None:
    """The inverse for blocks [R, H, T, D]: out[own] = blocks[sequence, :, within], all three [N] int64."""
    out.index_copy_(0, own, blocks.transpose(1, 2)[sequence, within])


def candidates(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    memory: Tensor | None,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    seen: Tensor,
    sinks: int,
    recent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a layer chooses from: the tokens in C slots of each head, then those of a block.

    Padding of the block gets the position of the token before it; it is never valid, so this is never read.

    Args: keys, values [B, Hkv, C, D], positions and memory (or None) [B, Hkv, C] of the slots, of which `lengths` [B,
        Hkv] are in use; k, v [B, Hkv, T, D] and valid [B, T] of the block; seen [B], true tokens before it.
    Returns: keys, values, positions, valid, `protected` once the block is seen, and memory of the C + T candidates.
        Keys and values are empty where there are no slots, since they would be copies of the block's; memory without
        one.
    """
    new = (seen[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, k.shape[1], -1).to(torch.int32)
    used = torch.arange(keys.shape[2], device=keys.device) < lengths[..., None]
    real = joined(used, valid[:, None].repeat(1, k.shape[1], 1))
    known = seen.new_empty(0, dtype=torch.float32)
    if memory is not None:
        known = joined(memory, k.new_zeros(k.shape[:3], dtype=torch.float32))
    both = [joined(old, fresh) if keys.shape[2] else old.new_empty(0) for old, fresh in ((keys, k), (values, v))]
    positions = joined(positions, new)
    return both[0], both[1], positions, real, protected(positions, seen + valid.sum(-1), sinks, recent), known


def compact(
    valid: Tensor,
    selection: Selection,
    block: tuple[Tensor, Tensor, Tensor] | None,
    known: Tensor | None,
    state: LayerState,
    spec: Spec,
) -> None:
    """Merge the candidates that were not selected into the moments and move the selected ones to the front, in place.

    The selected ones end up in order of position, so that slots are positional after a prompt. Heads that own stretches
    of a slab can have a block only while they are empty. The tokens of a block are seen from then on, and what slots
    receive is counted anew.

    Args: valid [B, Hkv, N] bool, N = S + T: which of the first S slots and of the block are tokens; selection: made
        over them; block: k, v [B, Hkv, T, D] and positions [B, Hkv, T] of new tokens, None for none; known: a number
        of each candidate, which becomes the memory of the selected ones, [B, Hkv, N] fp32, also a view of that; or
        None.
    """
    slots, moments = state.exact, state.moments
    used = valid.shape[-1] - (0 if block is None else block[0].shape[2])
    if slots.starts is not None:
        compact_in_copy(compact, valid, selection, block, known, state, spec)
        return
    evicted = valid & ~selection.kept
    gone = moments.add(slots["keys"][:, :, :used], slots["values"][:, :, :used], evicted[..., :used])
    every = {name: rows[:, :, :used] for name, rows in slots.moving().items()}
    if block is not None:
        state.seen.add_(valid[:, 0, used:].sum(-1))
        if slots.attention is not None:
            slots.attention.zero_()
        gone = gone.add(*block[:2], evicted[..., used:])
        every = {name: joined(every[name], new) for name, new in slots.encoded(*block).items()}
    moments.copy_(gone)
    index = in_order(every["positions"], selection.kept)[..., : slots.keys.shape[2]]
    if known is not None:
        assert slots.memory is not None
        there = torch.arange(index.shape[-1], device=index.device) < selection.counts[..., None]
        moved = torch.where(there, known.gather(-1, index), 0)  # first: it may be the memory itself
        slots.memory.zero_()
        slots.memory[:, :, : index.shape[-1]] = moved
    for name, rows in slots.moving().items():
        rows[:, :, : index.shape[-1]] = rows_at(every[name], index)
    slots.lengths.copy_(selection.counts)


def compact_in_copy(
    compact: Callable[..., None],
    valid: Tensor,
    selection: Selection,
    block: tuple[Tensor, Tensor, Tensor] | None,
    known: Tensor | None,
    state: LayerState,
    spec: Spec,
    move: Callable[[], None] | None = None,
) -> None:
    """`compact` of heads that own stretches of a slab, in a copy in which all have as many slots.

    Args: move: deals the slots anew, before they are filled; None if they stay as they are.
    """
    slots = state.exact
    new = 0 if block is None else block[0].shape[2]
    equal = slots.equal(valid.shape[-1] - new, room=new)
    equal.memory = None if known is None else torch.empty_like(known)
    compact(valid, selection, block, known, LayerState(equal, state.seen, state.moments), spec)
    if move is not None:
        move()
    assert slots.starts is not None
    pack(slots.starts, zip((getattr(slots, name) for name in equal.moving()), equal.moving().values()))
    if slots.memory is not None and equal.memory is not None:
        pack_known(slots.starts, slots.memory, equal.memory)
    if block is not None and slots.attention is not None:
        slots.attention.zero_()


def in_order(positions: Tensor, chosen: Tensor) -> Tensor:
    """Indices of the chosen candidates [B, Hkv, N] in order of position, then of the others."""
    return torch.where(chosen, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def remember(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    valid: Tensor,
    kept: Tensor,
    most: int,
    state: LayerState,
    spec: Spec,
) -> None:
    """Let the candidates that leave join what the layer's correction remembers besides the moments, oldest first.

    Args: keys [B, Hkv, N, Dk]; values [B, Hkv, N, Dv]; positions, valid, kept [B, Hkv, N]: those leave that are valid
        and not kept; most: at least as many as leave any head, so that shapes are static.
    """
    assert state.parts is not None
    gone = valid & ~kept
    for index in in_order(positions, gone)[..., :most].split(CHUNK, -1):
        new_keys, new_values = (rows_at(rows, index) for rows in (keys, values))
        state.parts.copy_(state.parts.add(new_keys, new_values, gone.gather(2, index)))
