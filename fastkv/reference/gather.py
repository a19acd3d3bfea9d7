"""Rows of every head: by index, and of slots that heads share unequally, one slab per sequence.

Head h owns slots [starts[h], starts[h + 1]) of its sequence's slab, of which the first lengths[h] are in use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad


def flat_index(index: Tensor, num: int) -> Tensor:
    """Where [B, H, m] rows of tensors [B, H, num, ...] lie if these are flattened to [B * H * num, ...]."""
    batch, heads = index.shape[:2]
    first = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * num
    return (first + index).flatten()


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """A copy of the rows at index [B, H, m] of rows [B, H, N, ...]: [B, H, m, ...]."""
    picked = rows.flatten(0, 2).index_select(0, flat_index(index, rows.shape[2]))
    return picked.view(*index.shape, *rows.shape[3:])


def slots_at(slabs: Iterable[Tensor], starts: Tensor, index: Tensor) -> list[Tensor]:
    """Copies of the slots at index [B, Hkv, m], counted from the first of each head, of slabs [B, S, ...]:
    [B, Hkv, m, ...] each.
    """
    slabs = list(slabs)
    batch, size = slabs[0].shape[:2]
    place = (starts[:, :-1, None].long() + index).clamp(max=size - 1)
    place = (place + torch.arange(batch, device=index.device)[:, None, None] * size).flatten()
    picked = (slab.flatten(0, 1).index_select(0, place) for slab in slabs)
    return [rows.view(*index.shape, *slab.shape[2:]) for rows, slab in zip(picked, slabs)]


def added_at(rows: Tensor, index: Tensor) -> Tensor:
    """Zeros in the shape of rows [B, H, N, ...], to whose row index[b, h, n], [B, H, N], row n was added."""
    total = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    total.flatten(0, 2).index_add_(0, flat_index(index, rows.shape[2]), rows.flatten(0, 2))
    return total


def unpack(slabs: Iterable[Tensor], starts: Tensor, width: int) -> list[Tensor]:
    """The first `width` slots of every head side by side; what lies beyond a head's own slots is someone else's.

    Args: slabs [B, S, ...]; starts [B, Hkv + 1] int.  Returns: [B, Hkv, width, ...] of each, copies.
    """
    batch, heads = starts.shape[0], starts.shape[1] - 1
    return slots_at(slabs, starts, torch.arange(width, device=starts.device).expand(batch, heads, -1))


def pack(starts: Tensor, filled: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fill every head's stretch of slabs [B, S, ...] with its first rows [B, Hkv, N, ...], in place.

    Slots beyond the N rows of a head repeat its last one; they are not in use.

    Args: filled: slabs and their rows, all of as many slots and rows.
    """
    filled = list(filled)
    (slab, rows), *_ = filled
    batch, heads, num = rows.shape[:3]
    slot = torch.arange(slab.shape[1], device=slab.device, dtype=starts.dtype).expand(batch, -1).contiguous()
    head = (torch.searchsorted(starts, slot, right=True) - 1).clamp(max=heads - 1)
    place = (slot - starts.gather(1, head)).clamp(max=num - 1)
    source = ((torch.arange(batch, device=slab.device)[:, None] * heads + head) * num + place).flatten()
    for slab, rows in filled:
        slab.copy_(rows.flatten(0, 2).index_select(0, source).view(slab.shape))


def pack_known(starts: Tensor, slab: Tensor, rows: Tensor) -> None:
    """`pack` of a number of each row [B, Hkv, N]; 0 in slots beyond them, for tokens to come."""
    pack(starts, [(slab, pad(rows, (0, 1)))])


def add_to_slab(slab: Tensor, starts: Tensor, rows: Tensor) -> None:
    """Add rows [B, Hkv, N] to the first N slots of every head's stretch of the slab [B, S], in place.

    Rows beyond what a head owns must be zero.
    """
    index = starts[:, :-1, None].long() + torch.arange(rows.shape[-1], device=rows.device)
    slab.scatter_add_(1, index.clamp(max=slab.shape[1] - 1).flatten(1), rows.flatten(1))
