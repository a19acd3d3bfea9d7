"""Pages: all that a layer remembers of one sequence, in one stretch of memory of fixed size, for serving engines.

The pages of a layer are one buffer, and every tensor of its state is a view of all of them, [P, ...] with a page's
stride. Page 0 belongs to no sequence (`LayerState.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..reference import LayerState

ALIGNMENT = 16  # bytes, of every tensor: what a GPU loads at once
PAGE_ALIGNMENT = 128  # bytes, of every page: a line of a GPU's cache


def aligned(number: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-number // unit) * unit


@dataclass(frozen=True)
class PageFormat:
    """Where the tensors of a layer's state lie in a page.

    Attributes: template: a state of the layer, of which only names, shapes and dtypes matter; it may be on "meta".
        places: first byte of each tensor, by name.  nbytes: of a page.
    """

    template: LayerState
    places: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, template: LayerState) -> PageFormat:
        """Tensors one after another, in the order of their names in the state."""
        places, end = {}, 0
        for name, tensor in template.named_tensors():
            places[name] = aligned(end, ALIGNMENT)
            end = places[name] + prod(tensor.shape[1:]) * tensor.itemsize
        return cls(template, places, aligned(end, PAGE_ALIGNMENT))

    def view(self, pages: Tensor) -> LayerState:
        """The state in these pages, [P, nbytes] uint8: nothing is copied, and nothing is done to what lies there."""
        state = self.template.shell()
        for name, like in self.template.named_tensors():
            first, shape = self.places[name], like.shape[1:]
            stretch = pages[:, first : first + prod(shape) * like.itemsize].view(like.dtype)
            state.replace(name, stretch.unflatten(1, shape) if shape else stretch[:, 0])
        return state

    def allocate(self, number: int, device: torch.device | str) -> LayerState:
        """So many empty pages."""
        return self.view(torch.zeros(number, self.nbytes, dtype=torch.uint8, device=device))
