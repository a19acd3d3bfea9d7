"""Rows of every head: by index, and of slots that heads share unequally, one slab per sequence.

Head h owns slots [starts[h], starts[h + 1]) of its sequence's slab, of which the first lengths[h] are in use.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_index(index: Tensor, num: int) -> Tensor:
    """Where [B, H, m] rows of tensors [B, H, num, ...] lie if these are flattened to [B * H * num, ...]."""
    batch, heads = index.shape[:2]
    first = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * num
    return (first + index).flatten()


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """A copy of the rows at index [B, H, m] of rows [B, H, N, ...]: [B, H, m, ...]."""
    picked = rows.flatten(0, 2).index_select(0, flat_index(index, rows.shape[2]))
    return picked.view(*index.shape, *rows.shape[3:])


def slots_at(slab: Tensor, starts: Tensor, index: Tensor) -> Tensor:
    """A copy of the slots at index [B, Hkv, m], counted from the first of each head, of a slab [B, S, ...]:
    [B, Hkv, m, ...].
    """
    batch, size = slab.shape[:2]
    place = (starts[:, :-1, None].long() + index).clamp(max=size - 1)
    place = place + torch.arange(batch, device=slab.device)[:, None, None] * size
    picked = slab.flatten(0, 1).index_select(0, place.flatten())
    return picked.view(*index.shape, *slab.shape[2:])


def added_at(rows: Tensor, index: Tensor) -> Tensor:
    """Zeros in the shape of rows [B, H, N, ...], to whose row index[b, h, n], [B, H, N], row n was added."""
    total = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    total.flatten(0, 2).index_add_(0, flat_index(index, rows.shape[2]), rows.flatten(0, 2))
    return total


def unpack(slab: Tensor, starts: Tensor, width: int) -> Tensor:
    """The first `width` slots of every head side by side; what lies beyond a head's own slots is someone else's.

    Args: slab [B, S, ...]; starts [B, Hkv + 1] int.  Returns: [B, Hkv, width, ...], a copy.
    """
    batch, heads = starts.shape[0], starts.shape[1] - 1
    return slots_at(slab, starts, torch.arange(width, device=slab.device).expand(batch, heads, -1))


def pack(slab: Tensor, starts: Tensor, rows: Tensor) -> None:
    """Fill every head's stretch of the slab [B, S, ...] with its first rows [B, Hkv, N, ...], in place.

    Slots beyond the N rows of a head repeat its last one; they are not in use.
    """
    batch, heads, num = rows.shape[:3]
    slot = torch.arange(slab.shape[1], device=slab.device, dtype=starts.dtype).expand(batch, -1).contiguous()
    head = (torch.searchsorted(starts, slot, right=True) - 1).clamp(max=heads - 1)
    place = (slot - starts.gather(1, head)).clamp(max=num - 1)
    source = (torch.arange(batch, device=slab.device)[:, None] * heads + head) * num + place
    slab.copy_(rows.flatten(0, 2).index_select(0, source.flatten()).view(slab.shape))


def add_to_slab(slab: Tensor, starts: Tensor, rows: Tensor) -> None:
    """Add rows [B, Hkv, N] to the first N slots of every head's stretch of the slab [B, S], in place.

    Rows beyond what a head owns must be zero.
    """
    index = starts[:, :-1, None].long() + torch.arange(rows.shape[-1], device=rows.device)
    slab.scatter_add_(1, index.clamp(max=slab.shape[1] - 1).flatten(1), rows.flatten(1))
