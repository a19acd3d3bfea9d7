"""Copies of the rows that a batch lives in, where they are pages: all tensors of the state in one launch.

`LayerState.taken` and `put` are what they mean. A tensor of the copy is contiguous, as kernels want it.
"""

from __future__ import annotations

import functools
from math import prod

import torch
from torch import Tensor

from ..backend import implementation, resolve
from ..errors import FastKVError
from ..reference import LayerState, Spec
from .operator import nothing, opaque

BLOCK = 2048  # words that a program copies
ALIGNED = 16  # bytes: where each tensor of a copy begins
LAST = 2**31 - 1


@opaque(nothing, changes=("pages", "copy"))
def copy_rows(
    pages: Tensor,
    copy: Tensor,
    table: Tensor,
    starts: Tensor | None,
    rows: Tensor,
    slots: int,
    programs: int,
    block: int,
    back: bool,
) -> None:
    """Copy stretches of the rows of pages [P, bytes] to a copy, both uint8, or back. Only kernels do this.

    Args: table [6, F] int64, of each stretch: its first program, its first byte in a page, bytes of one row before it
        in the copy, bytes of its row in the copy, of a slot if it is a slab, and of a word.  starts: [P, Hkv + 1] of
        slabs, of which the copy has `slots` slots of each head.  rows [B] int64.  programs: how many each row has, of
        `block` words each.
    """
    implementation("copy_rows", "triton", pages.device.type)(
        pages, copy, table, starts, rows, slots, programs, block, back
    )


@functools.lru_cache(maxsize=64)
def _table(stretches: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, list[int], int, int]:
    """The table for stretches of which are given: first byte in a page, bytes of a row of the copy, of a slot.

    Returns: with it, bytes of one row before each in the copy, and of all; the number of programs.
    """
    columns, places, end, programs = [], [], 0, 0
    for first, size, slot in stretches:
        word = 1 if (slot or size) % 4 else 4
        columns.append((programs, first, end, size, slot, word))
        places.append(end)
        end += -(-size // ALIGNED) * ALIGNED
        programs += -(-size // (word * BLOCK))
    columns += [(LAST, 0, 0, 0, 0, 1)] * ((1 << (len(columns) - 1).bit_length()) - len(columns))
    return torch.tensor(list(zip(*columns)), device=device), places, end, programs


def _copied(state: LayerState, names: list[str], copy: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Copy the named tensors of the batch's rows out of their pages; from the `copy` back, if that is given.

    Of a slab, the copy has heads of equally many slots. Returns: the copy, uint8, and the tensors that are views of it.
    """
    named, exact, rows, pages = dict(state.named_tensors()), state.exact, state.rows, state.pages
    assert rows is not None and pages is not None
    starts, stretches, shapes = exact.starts, [], []
    for name in names:
        tensor = named[name]
        if tensor.stride(0) * tensor.itemsize != pages.stride(0):
            raise FastKVError(f"rows: {name} must be a view of the state's pages; see fastkv.cache.pages")
        slab = starts is not None and name in state.SLABS
        shape = (state.heads, exact.limit, *tensor.shape[2:]) if slab else tensor.shape[1:]
        first = tensor.storage_offset() * tensor.itemsize - pages.storage_offset()
        stretches.append((first, prod(shape) * tensor.itemsize, prod(tensor.shape[2:]) * tensor.itemsize * slab))
        shapes.append((shape, tensor.dtype))
    table, places, each, programs = _table(tuple(stretches), pages.device)
    number, back = len(rows), copy is not None
    if copy is None:
        copy = torch.empty(number * each, dtype=torch.uint8, device=pages.device)
    copy_rows(pages, copy, table, starts, rows, exact.limit, programs, BLOCK, back)
    found = {}
    for name, (shape, dtype), (_, size, _), place in zip(names, shapes, stretches, places):
        part = copy[number * place : number * (place + size)]
        found[name] = part.view(dtype).view(number, *shape)
    return copy, found


def taken(state: LayerState, spec: Spec, but: tuple[str, ...] = (), equal: bool = False) -> LayerState:
    """`LayerState.taken`. Kernel: one launch, of pages whose heads have equally many slots or can be copied so."""
    slabs = state.exact.starts is not None and not equal
    if slabs or state.pages is None or resolve(spec.backend, state.pages.device) != "triton":
        return state.taken(but, equal=equal)
    own = state.shell()
    own.pages, found = _copied(state, [name for name in state.names_but(but) if name != "exact.starts"])
    for name, tensor in found.items():
        own.replace(name, tensor)
    own.exact.starts = None
    return own


def put(state: LayerState, own: LayerState) -> None:
    """`LayerState.put` of what `taken` made. Kernel: one launch, into pages."""
    if own.pages is None:
        state.put(own)
        return
    here = dict(state.named_tensors())
    _copied(state, [name for name, tensor in own.named_tensors() if tensor is not here[name]], own.pages)
