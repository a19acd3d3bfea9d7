"""Evictions on a CPU: what leaves joins the moments, and only the holes it leaves are filled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import Moments, protected
from ..reference.centroids import along
from ..reference.selection import places


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
    tokens = min(tokens, slots)
    used = torch.arange(slots) < lengths[..., None]
    guard = protected(positions, seen, sinks, recent)
    # The last of the order leave, unless they are no tokens, which come after all that are.
    leaving = places(scores, positions, used, guard).topk(slots - tokens, dim=-1).indices
    gone = used.gather(-1, leaving)
    rows = keys.gather(2, along(leaving, keys)), values.gather(2, along(leaving, values))
    moments.copy_(moments.add(*rows, gone))
    stays = used.scatter(-1, leaving, False)[..., tokens:]
    # As many survivors lie beyond `tokens` as there are holes before it; pairs of neither copy a row onto itself.
    survivor = (~stays).to(torch.uint8).argsort(dim=-1, stable=True)
    hole = (~(gone & (leaving < tokens))).to(torch.uint8).argsort(dim=-1, stable=True)
    moves, source = stays.gather(-1, survivor), survivor + tokens
    target = torch.where(moves, leaving.gather(-1, hole), source)
    for part in (keys, values, positions):
        index = source if part.ndim == 3 else along(source, part)
        into = target if part.ndim == 3 else along(target, part)
        part.scatter_(2, into, part.gather(2, index))
    lengths.clamp_(max=tokens)
