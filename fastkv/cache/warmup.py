"""A layer's sequences in pages before there are any: all kernels that traffic will need are compiled.

How a kernel is compiled depends on the shapes that it meets: on the length of a prompt's last block, on how full the
slots are, and on the number of sequences that decode together. So one of each kind is read and decoded, in two pages
that are thrown away. What that takes of memory, traffic will take again; the scratch that it makes stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .paged import AT_ONCE, PagedBlocks, PagedLayer, PagedRule

FEW = 33  # blocks of up to so many tokens are all read: kernels take a window's queries in powers of two
FURTHER = (-1, 0, 1, 8, 16)  # beside a power of two: multiples of 16 and others are compiled apart, as is what has both


@dataclass(frozen=True)
class Traffic:
    """What is going to come.

    Attributes: longest: tokens of the longest prompt.  block: of a prompt that are read at once, None for all of it.
        sequences: that decode together at most.
    """

    longest: int
    block: int | None
    sequences: int

    @property
    def largest(self) -> int:
        """Tokens of the largest block."""
        return min(self.block or self.longest, self.longest)

    def lengths(self) -> list[int]:
        """Tokens of blocks of each kind."""
        found = {*range(1, FEW + 1), self.largest}
        powers = [1 << i for i in range(FEW.bit_length() - 1, self.largest.bit_length())]
        found |= {power + more for power in powers for more in FURTHER}
        return sorted(length for length in found if length <= self.largest)


def warm_up(opened: Callable[[Tensor], PagedLayer], paged: PagedRule, traffic: Traffic, device: torch.device) -> None:
    """Launch what a layer of that rule will.

    Args: opened: makes the layer of its pages, [P, bytes] uint8.  device: of the pages.
    """
    layer = opened(torch.zeros(3, paged.form.nbytes, dtype=torch.uint8, device=device))
    exact, heads = layer.state.exact, layer.state.heads
    dim = exact.format.keys.dim(exact.keys.shape[-1])

    def tokens(number: int) -> list[Tensor]:
        """As an engine has them: q, k and v of each token beside each other."""
        sizes = (layer.num_heads, dim), (heads, dim), (heads, exact.value_dim)
        return [torch.zeros(number, *size, dtype=exact.dtype, device=device) for size in sizes]

    def read(before: int, *lengths: int) -> None:
        starts = [0, lengths[0]][: len(lengths)]
        numbers = torch.tensor([rows[: len(lengths)], starts, lengths], device=device)
        q, k, v = tokens(sum(lengths))
        out = torch.empty(sum(lengths), layer.num_heads, exact.value_dim, dtype=exact.dtype, device=device)
        layer.read(PagedBlocks.of(lengths, [before] * len(lengths), numbers), q, k, v, out)

    rows = [1, 2]
    for others in (0, 1):  # prompts that are read with it
        for blocks in _full_blocks(paged.layer.layout.least, traffic):
            for length in traffic.lengths():
                layer.clear(torch.tensor(rows, device=device))
                for number in range(blocks):
                    read(number * traffic.largest, *(traffic.largest,) * (1 + others))
                read(blocks * traffic.largest, length, *(max(length - 1, 1),) * others)
    nobody = torch.zeros(traffic.sequences, dtype=torch.int64, device=device)
    for batch in range(1, traffic.sequences + 1):
        layer.evict(nobody[: batch if batch <= AT_ONCE else 0])
        layer.step(nobody[:batch], *tokens(batch))


def _full_blocks(least: int, traffic: Traffic) -> list[int]:
    """How many full blocks come before the last one of a prompt: none, one, and where slots are nearly full or full.

    Args: least: tokens that every head keeps.
    """
    most = (traffic.longest - 1) // traffic.largest  # of the longest prompt
    filling = least // traffic.largest
    return sorted({min(blocks, most) for blocks in (0, 1, filling, filling + 1)})
