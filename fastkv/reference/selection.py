"""Which tokens stay, and how those that leave are merged into the moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FastKVError, check_shape
from .gather import rows_at
from .moments import Moments
from .ragged import pack, unpack


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
    """Indices of the candidates in the order of `select`."""
    return places(scores, positions, valid, protected).argsort(dim=-1, stable=True)


def places(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor) -> Tensor:
    """A number for each candidate, int64 [B, Hkv, N], by which they are in the order of `select`, best ones lowest."""
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


def joined(*parts: Tensor) -> Tensor:
    """The candidates side by side along axis 2, in the dtype of the first; empty parts cost no copy."""
    filled = [part for part in parts if part.shape[2]] or [parts[0]]
    return filled[0] if len(filled) == 1 else torch.cat([part.to(parts[0].dtype) for part in filled], 2)


def compact(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    moments: Moments,
    new_keys: Tensor,
    new_values: Tensor,
    new_positions: Tensor,
    valid: Tensor,
    selection: Selection,
) -> None:
    """Merge the candidates that were not selected into the moments and move the selected ones to the front, in place.

    The selected ones end up in order of position, so that slots are positional after a prompt.

    The candidates are the first slots of the state followed by the new block: N = S + T, and `valid` [B, Hkv, N] says
    which are real tokens. `selection` was made over them.

    Args: keys, values [B, Hkv, C, D], positions [B, Hkv, C], lengths [B, Hkv], moments: mutated; new_keys, new_values
        [B, Hkv, T, D], new_positions [B, Hkv, T].
    """
    used = valid.shape[-1] - new_keys.shape[2]
    evicted = valid & ~selection.kept
    gone = moments.add(keys[:, :, :used], values[:, :, :used], evicted[..., :used])
    moments.copy_(gone.add(new_keys, new_values, evicted[..., used:]))
    everything = joined(positions[:, :, :used], new_positions)
    last = torch.iinfo(everything.dtype).max
    index = torch.where(selection.kept, everything, last).argsort(dim=-1, stable=True)[..., : keys.shape[2]]
    size = index.shape[-1]
    keys[:, :, :size] = rows_at(joined(keys[:, :, :used], new_keys), index)
    values[:, :, :size] = rows_at(joined(values[:, :, :used], new_values), index)
    positions[:, :, :size] = everything.gather(2, index)
    lengths.copy_(selection.counts)


def evict(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    moments: Moments,
    scores: Tensor,
    tokens: int,
    sinks: int,
    recent: int,
    *,
    starts: Tensor | None = None,
    drop: int | None = None,
) -> None:
    """Shrink every head to `tokens` stored tokens: the lowest scores leave and are merged into the moments, in place.

    A head that stores fewer loses none. Which tokens stay is `select`'s rule; in which slots is not specified.

    Args: keys, values [B, Hkv, C, D], positions [B, Hkv, C], lengths [B, Hkv], moments: mutated; seen [B]; scores
        [B, Hkv, C]; sinks, recent: what is protected; starts [B, Hkv + 1] if heads share slots unequally: then keys,
        values and positions are slabs [B, S, ...], scores [B, Hkv, W] reach beyond every length, and a head keeps
        `drop` less than its slots in place of `tokens`.
    Raises: FastKVError for starts without drop.
    """
    if starts is not None:
        _evict_from_slabs((keys, values, positions), lengths, seen, moments, scores, starts, drop, sinks, recent)
        return
    valid = torch.arange(positions.shape[-1], device=positions.device) < lengths[..., None]
    guard = protected(positions, seen, sinks, recent)
    chosen = select(scores, positions, valid, guard, tokens)
    none = slice(0, 0)
    block = keys[:, :, none], values[:, :, none], positions[:, :, none]
    compact(keys, values, positions, lengths, moments, *block, valid, chosen)


def _evict_from_slabs(
    slabs: tuple[Tensor, Tensor, Tensor],
    lengths: Tensor,
    seen: Tensor,
    moments: Moments,
    scores: Tensor,
    starts: Tensor,
    drop: int | None,
    sinks: int,
    recent: int,
) -> None:
    """`evict` where heads share slots unequally."""
    if drop is None:
        raise FastKVError("evict needs drop, how far below its slots a head shrinks, with starts, got None; pass both")
    width = scores.shape[-1]
    keys, values, positions = (unpack(slab, starts, width) for slab in slabs)
    valid = torch.arange(width, device=lengths.device) < lengths[..., None]
    guard = protected(positions, seen, sinks, recent)
    selection = select_each(scores, positions, valid, guard, (starts.diff() - drop).clamp(min=0))
    none = slice(0, 0)
    block = keys[:, :, none], values[:, :, none], positions[:, :, none]
    compact(keys, values, positions, lengths, moments, *block, valid, selection)
    for slab, rows in zip(slabs, (keys, values, positions)):
        pack(slab, starts, rows)
