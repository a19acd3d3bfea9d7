"""Shared: what the layers of a cache have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .parallel import Parallel
from .rotary import Rotary
from .state import LayerState

FIRST_TABLE = 4096  # positions of the first table of cos and sin


class Shared:
    """What the layers of a cache have in common.

    Attributes:
        parallel: processes that share the heads.
        rotary: the model's rotary embedding, None unless something undoes it.
    """

    def __init__(self, parallel: Parallel | None = None, rotary: Rotary | None = None) -> None:
        self.parallel, self.rotary = parallel or Parallel(), rotary
        self.scratch: dict[tuple[Any, ...], list[Tensor]] = {}
        self.tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def workspace(self, q: Tensor, state: LayerState, backend: str) -> list[Tensor]:
        """Working memory of the decode kernels for queries [B, Hq, T, D]; one for all layers of the same shape."""
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
            found = self.rotary.to(device).table(max(1 << (length - 1).bit_length(), FIRST_TABLE))
            self.tables[device] = found
        return found

    def nbytes(self) -> int:
        """Bytes of the working memory. Tables, like the model's weights, do not depend on what is cached."""
        return sum(tensor.nbytes for made in self.scratch.values() for tensor in made)
