"""Scratch of the split decode kernels, and the rule for how far to split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import LayerState

CTAS = 396  # co-resident programs on 132 SMs: splits are chosen to fit in one wave
SMS = 132


@dataclass(frozen=True)
class Workspace:
    """Scratch of the split decode kernels. One per stream or captured graph; layers of one model may share it.

    Attributes:
        accs, tops, totals: room for every partial.
        logits: [G, all slots of the batch], of both tiers in vector_decode; None unless attention is collected.
        tickets: [B * Hkv] int32, zeroed once; each launch leaves them zero.
    """

    accs: Tensor
    tops: Tensor
    totals: Tensor
    logits: Tensor | None
    tickets: Tensor

    @classmethod
    def of(cls, scratch: list[Tensor]) -> Workspace | None:
        """The workspace that `tensors` made a list of; None if there is none."""
        if not scratch:
            return None
        accs, tops, totals, tickets, *logits = scratch
        return cls(accs, tops, totals, logits[0] if logits else None, tickets)

    def tensors(self) -> list[Tensor]:
        """As `LayerState.scratch` holds them."""
        return [t for t in (self.accs, self.tops, self.totals, self.tickets, self.logits) if t is not None]

    @classmethod
    def for_state(cls, num_heads: int, state: LayerState) -> Workspace:
        """Room for the decode steps of so many query heads over the slots of a layer."""
        exact, tiers, heads = state.exact, state.tiers.values(), state.heads
        dim = exact.keys.shape[-1]
        return cls.allocate(
            len(state.seen),
            heads,
            num_heads // heads,
            max(slots.limit for slots in tiers),
            dim,
            exact.keys.device,
            attention=exact.attention is not None,
            sets=len(tiers),
            pool=sum(slots.keys.numel() // dim for slots in tiers),
        )

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_kv_heads: int,
        groups: int,
        slots: int,
        head_dim: int,
        device: torch.device | str | None = None,
        *,
        attention: bool = True,
        sets: int = 1,
        pool: int | None = None,
    ) -> Workspace:
        """Room for the given shape.

        Args:
            slots: of a head, or an upper bound of the tokens in them.  sets: separately split sets of slots (2 for
                vector_decode).  pool: slots of all heads of the batch; B * Hkv * slots * sets if None.
        """
        pairs = batch * num_kv_heads
        parts = pairs * sets * (num_splits(pairs * sets, slots) + 1) * groups

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.float32, device=device)

        return cls(
            accs=empty(parts, head_dim),
            tops=empty(parts),
            totals=empty(parts),
            logits=empty(groups, pairs * slots * sets if pool is None else pool) if attention else None,
            tickets=torch.zeros(pairs, dtype=torch.int32, device=device),
        )


def num_splits(pairs: int, slots: int) -> int:
    """Programs that share the slots of one pair, a power of two; a function of static sizes only.

    As many as are co-resident, but none smaller than 32 slots, and none smaller than 64 once every SM has one.
    """
    splits = 1
    while pairs * (2 * splits + 1) <= CTAS:
        least = 64 if 2 * splits * pairs > SMS else 32
        if slots < 2 * splits * least:
            break
        splits *= 2
    return splits
