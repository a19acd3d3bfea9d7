"""Slots that the heads of a layer share unequally: one slab per sequence, each head owns a stretch of it.

Head h owns slots [starts[h], starts[h + 1]) of its sequence's slab, of which the first lengths[h] are in use.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(slab: Tensor, starts: Tensor, width: int) -> Tensor:
    """The first `width` slots of every head side by side; what lies beyond a head's own slots is someone else's.

    Args: slab [B, S, ...]; starts [B, Hkv + 1] int.  Returns: [B, Hkv, width, ...], a copy.
    """
    batch, size = slab.shape[:2]
    index = starts[:, :-1, None].long() + torch.arange(width, device=slab.device)
    index = index.clamp(max=size - 1) + torch.arange(batch, device=slab.device)[:, None, None] * size
    return slab.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *slab.shape[2:])


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
