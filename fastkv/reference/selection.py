"""Which tokens stay, and how those that leave are merged into the moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import check_shape
from .moments import Moments


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

    Args: scores, positions, valid, protected [B, Hkv, N]; tokens: how many to keep per head.
    """
    shape = scores.shape
    for name, tensor in (("positions", positions), ("valid", valid), ("protected", protected)):
        check_shape("select", name, tensor, shape)
    lowest = torch.finfo(scores.dtype).min
    scores = torch.nan_to_num(scores, nan=lowest, neginf=lowest)
    # Three stable sorts, least significant key first: position, score, class (protected, valid, invalid).
    order = positions.argsort(dim=-1, stable=True)
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    rank = torch.where(valid, torch.where(protected, 0, 1), 2)
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))[..., :tokens]
    chosen = valid.gather(-1, order)
    return Selection(torch.zeros_like(valid).scatter_(-1, order, chosen), chosen.sum(-1))


def protected(positions: Tensor, seen: Tensor, sinks: int, recent: int) -> Tensor:
    """Which tokens no policy may evict: position < sinks, or among the last `recent` of the `seen` [B] true tokens."""
    return (positions < sinks) | (positions >= seen[:, None, None] - recent)


def joined(held: Tensor, new: Tensor) -> Tensor:
    """The candidates: slots, then the block, along axis 2; a first block is not copied."""
    return torch.cat([held, new.to(held.dtype)], 2) if held.shape[2] else new


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

    def take(rows: Tensor) -> Tensor:
        return rows.gather(2, index[..., None].expand(*index.shape, rows.shape[-1]))

    keys[:, :, :size] = take(joined(keys[:, :, :used], new_keys))
    values[:, :, :size] = take(joined(values[:, :, :used], new_values))
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
) -> None:
    """Shrink every head to `tokens` stored tokens: the lowest scores leave and are merged into the moments, in place.

    A head that stores fewer loses none. Which tokens stay is `select`'s rule; in which slots is not specified.

    Args: keys, values [B, Hkv, C, D], positions [B, Hkv, C], lengths [B, Hkv], moments: mutated; seen [B]; scores
        [B, Hkv, C]; sinks, recent: what is protected.
    """
    valid = torch.arange(positions.shape[-1], device=positions.device) < lengths[..., None]
    guard = protected(positions, seen, sinks, recent)
    chosen = select(scores, positions, valid, guard, tokens)
    none = slice(0, 0)
    block = keys[:, :, none], values[:, :, none], positions[:, :, none]
    compact(keys, values, positions, lengths, moments, *block, valid, chosen)
