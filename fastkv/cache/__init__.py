"""What one layer does with a prompt block and with a token: attend, score, select, compact. Knows no engine.

Here is what the layers of a cache have in common: their clock, the kernels' scratch, tables of the rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..backend import Parallel
from ..errors import FastKVError
from ..reference import LayerState, Spec
from ..rotary import Rotary


def fixed(tensor: Tensor) -> Tensor:
    """The tensor, which stays where it is from now on: a captured step copies any other every time."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


class Tick:
    """How many tokens were decoded since the last prompt or eviction, as a link of a ring.

    A compiled step can follow a link. A number that it counted up would be part of its graph and make it another one.

    Attributes:
        steps: that many.  evicts: whether the step that leads here evicts.  next: after one more.
    """

    def __init__(self, steps: int, evicts: bool) -> None:
        self.steps, self.evicts, self.next = steps, evicts, self


class EvictionClock:
    """The clock of rows that decode in lock-step; rows with clocks of their own each have another.

    Attributes: period: decode steps between evictions.  now: the tick that the last step led to.
    """

    def __init__(self, period: int, steps: int = 0) -> None:
        """Args: steps: see `move_to`."""
        self.period = period
        self.first = self.last = Tick(0, True)
        for number in range(1, period):
            self.last.next = Tick(number, False)
            self.last = self.last.next
        self.last.next = self.first
        self.move_to(steps)

    def __reduce__(self) -> tuple[type[EvictionClock], tuple[int, int]]:
        return EvictionClock, (self.period, self.now.steps)  # link by link, a long ring is more than Python recurses

    def move_to(self, steps: int) -> None:
        """As if so many tokens had been decoded since the last prompt or eviction."""
        self.now = self.first
        for _ in range(steps):
            self.now = self.now.next


FIRST_TABLE = 4096  # positions of the first table of cos and sin


class CacheWorkspace:
    """What the layers of a cache have in common.

    Args and attributes:
        parallel: processes that share the heads.
        evict_every: decode steps between evictions, the period of `clock`.
        ahead: [B, T, T] bool, which later tokens of the block being read its tokens see, as those of an image do; None
            where attention is causal.
        real: [B, T] bool, which tokens of the block being read are no padding, where the engine knows; else None.
        positions: for how many of them the tables are made at once.
        sequences: of a batch at most, where batches differ in size; they then share one room for the kernels' scratch.
            None where every size has its own.
    """

    def __init__(
        self,
        parallel: Parallel | None = None,
        evict_every: int = 1,
        positions: int = FIRST_TABLE,
        sequences: int | None = None,
    ) -> None:
        self.parallel, self.positions, self.sequences = parallel or Parallel(), positions, sequences
        # reading: a block of one token is read like any other block: it may be padding.
        self.clock, self.reading = EvictionClock(evict_every), False
        self.ahead: Tensor | None = None
        self.real: Tensor | None = None
        self.scratch: dict[tuple[Any, ...], list[Tensor]] = {}
        self.rooms: dict[tuple[Any, ...], list[Tensor]] = {}
        self.tables: dict[tuple[Rotary, torch.device], tuple[Tensor, Tensor]] = {}

    def twin(self) -> CacheWorkspace:
        """For a copy of the layers, which is as far as they are."""
        made = CacheWorkspace(self.parallel, self.clock.period, self.positions, self.sequences)
        made.clock.move_to(self.clock.now.steps)
        return made

    def scratch_of(self, num_heads: int, state: LayerState, spec: Spec) -> list[Tensor]:
        """Working memory of the kernels for so many query heads; one for all layers of the same shape.

        Raises: FastKVError for a batch larger than the largest that was announced.
        """
        # Of the longest head its power of two counts, or heads that trade would ask for new memory after every block.
        tiers = [
            (slots.keys.shape[1:], slots.starts is not None, slots.limit.bit_length()) for slots in state.tiers.values()
        ]
        device = state.exact.keys.device
        sized = (device, num_heads, state.heads, *tiers, state.exact.attention is not None, state.batch)
        if sized not in self.scratch:
            self.scratch[sized] = ops.workspace(num_heads, state, spec, self._room_of(num_heads, state, spec))
        return self.scratch[sized]

    def _room_of(self, num_heads: int, state: LayerState, spec: Spec) -> list[Tensor] | None:
        """The memory that batches of all sizes view; one for all layers that need as much."""
        if self.sequences is None:
            return None
        if state.batch > self.sequences:
            raise FastKVError(
                f"scratch was made for batches of at most {self.sequences} sequences, got {state.batch}; make the "
                "workspace for more"
            )
        device = state.exact.keys.device
        sizes = tuple(ops.workspace_room(num_heads, state, spec, self.sequences, device))
        if (device, sizes) not in self.rooms:
            self.rooms[device, sizes] = [torch.zeros(number, dtype=dtype, device=device) for number, dtype in sizes]
        return self.rooms[device, sizes]

    def table(self, rotary: Rotary, device: torch.device, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least `length` positions; they grow to powers of two, so almost never while decoding."""
        found = self.tables.get((rotary, device))
        if found is None or found[0].shape[0] < length:
            found = rotary.to(device).table(max(1 << (length - 1).bit_length(), self.positions))
            self.tables[rotary, device] = found = (fixed(found[0]), fixed(found[1]))
        return found

    def nbytes(self) -> int:
        """Bytes of the working memory. Tables, like the model's weights, do not depend on what is cached."""
        owned = self.scratch if self.sequences is None else self.rooms  # views take none
        return sum(tensor.nbytes for made in owned.values() for tensor in made)
