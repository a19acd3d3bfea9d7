"""Shared: what the layers of a cache have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..parallel import Parallel
from ..rotary import Rotary
from ..state import LayerState

FIRST_TABLE = 4096  # positions of the first table of cos and sin


class Phase:
    """How many tokens were decoded since the last prompt or eviction, as a link of a ring.

    A compiled step can follow a link. A number that it counted up would be part of its graph and make it another one.

    Attributes:
        steps: that many.  evicts: whether the step that leads here evicts.  next: after one more.
    """

    def __init__(self, steps: int, evicts: bool) -> None:
        self.steps, self.evicts, self.next = steps, evicts, self

    @classmethod
    def ring(cls, length: int) -> tuple[Phase, Phase]:
        """The first link, of no steps, to which every `length`-th step leads, and the last before it."""
        first = last = cls(0, True)
        for steps in range(1, length):
            last.next = cls(steps, False)
            last = last.next
        last.next = first
        return first, last


class Shared:
    """What the layers of a cache have in common.

    Args and attributes:
        parallel: processes that share the heads.
        rotary: the model's rotary embedding, None unless something undoes it.
        evict_every: decode steps between evictions.
        positions: for how many of them the tables are made at once.
        groups: query heads per KV head of each layer.
        phase: where between two evictions the layers are; evictions come whether or not the room is needed, so that a
            row does not depend on others.
    """

    def __init__(
        self,
        parallel: Parallel | None = None,
        rotary: Rotary | None = None,
        evict_every: int = 1,
        positions: int = FIRST_TABLE,
        groups: dict[int, int] | None = None,
    ) -> None:
        self.parallel, self.rotary = parallel or Parallel(), rotary
        self.evict_every, self.positions, self.groups = evict_every, positions, groups or {}
        self.first, self.last = Phase.ring(evict_every)
        self.phase = self.first
        self.scratch: dict[tuple[Any, ...], list[Tensor]] = {}
        self.tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def twin(self) -> Shared:
        """For a copy of the layers, which is as far as they are."""
        made = Shared(self.parallel, self.rotary, self.evict_every, self.positions, self.groups)
        made.move_to(self.phase.steps)
        return made

    def move_to(self, steps: int) -> None:
        """As if so many tokens had been decoded since the last prompt or eviction."""
        self.phase = self.first
        for _ in range(steps):
            self.phase = self.phase.next

    def workspace(self, num_heads: int, state: LayerState, backend: str) -> list[Tensor]:
        """Working memory of the decode kernels for so many query heads; one for all layers of the same shape."""
        q = state.exact.keys.new_empty(len(state.seen), num_heads, 0, state.exact.keys.shape[-1])
        exact, approx, collects = state.exact, state.approx, state.exact.attention is not None
        sizes = [(one.keys.shape, one.starts is not None, one.limit) for one in (exact, approx) if one is not None]
        shape = (q.device, q.shape[1], *sizes, collects)
        if shape not in self.scratch:
            options: dict[str, Any] = {"attention": collects, "starts": exact.starts, "width": exact.width}
            if approx is None:
                self.scratch[shape] = ops.workspace(q, exact.keys, **options, backend=backend)
            else:
                options |= {"approx_starts": approx.starts, "approx_width": approx.width}
                self.scratch[shape] = ops.vector_workspace(q, exact.keys, approx.keys, **options, backend=backend)
        return self.scratch[shape]

    def table(self, device: torch.device, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin for at least `length` positions; grows to powers of two, so almost never while decoding."""
        found = self.tables.get(device)
        if found is None or found[0].shape[0] < length:
            assert self.rotary is not None
            found = self.rotary.to(device).table(max(1 << (length - 1).bit_length(), self.positions))
            if not torch.compiler.is_compiling():
                for part in found:
                    torch._dynamo.mark_static_address(part, guard=False)  # or a captured step copies it every time
            self.tables[device] = found
        return found

    def nbytes(self) -> int:
        """Bytes of the working memory. Tables, like the model's weights, do not depend on what is cached."""
        return sum(tensor.nbytes for made in self.scratch.values() for tensor in made)
