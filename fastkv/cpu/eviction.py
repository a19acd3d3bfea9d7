"""Evictions on a CPU: what leaves joins the moments, and only the holes it leaves are filled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import Moments, protected
from ..reference.gather import flat_index, rows_at
from ..reference.selection import places
from .attention import hiding


def evicts(*slots: Tensor) -> bool:
    """Whether the slots of a layer can be shrunk here, where rows are addressed by their place in memory."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in slots)


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
    """`reference.evict` for heads of equally many slots. Survivors among the last slots move into the holes."""
    slots = positions.shape[-1]
    if slots <= tokens:
        return
    used = torch.arange(slots, device="cpu") < lengths[..., None]
    guard = protected(positions, seen, sinks, recent)
    # The last of the order leave, unless they are no tokens, which come after all that are.
    leaving = places(scores, positions, used, guard).topk(slots - tokens, dim=-1).indices.sort(-1).values
    moments.copy_(moments.add(rows_at(keys, leaving), rows_at(values, leaving), hiding(used.gather(-1, leaving))))
    # As many slots beyond `tokens` stay as there are holes before it. The holes come first in `target`, the slots that
    # stay first in `source`; what follows in both are the slots beyond that leave, each onto itself.
    stays = torch.ones_like(used, dtype=torch.uint8).scatter_(-1, leaving, 0)[..., tokens:]
    source = flat_index(stays.argsort(dim=-1, descending=True, stable=True) + tokens, slots)
    target = flat_index(leaving, slots)
    for part in (keys, values, positions):
        rows = part.flatten(0, 2)  # a view: the slots are contiguous
        rows.index_copy_(0, target, rows.index_select(0, source))
    lengths.clamp_(max=tokens)
