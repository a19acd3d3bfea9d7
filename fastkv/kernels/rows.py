"""Rows of pages to a place of their own and back, in one launch for all tensors of a state.

Twin of `LayerState.taken` and `put`. A tensor of the copy is contiguous. Programs take stretches of one row of one
tensor; which, a table says that is made once for each layout. Of a slab the copy has heads of equally many slots: what
lies beyond a head's own is 0 there, and stays as it is in the page. Bytes: each once in and once out.
"""

from __future__ import annotations

import functools
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError
from ..reference import LayerState
from ._launch import pow2

BLOCK = 2048  # words at once
LAST = 2**31 - 1


@triton.jit
def _move(there_ptr, here_ptr, inside, whole, BACK: tl.constexpr):
    """Words of a page and of its copy; what is not inside is 0 in the copy."""
    if BACK:
        tl.store(there_ptr, tl.load(here_ptr, mask=inside, other=0), mask=inside)
    else:
        tl.store(here_ptr, tl.load(there_ptr, mask=inside, other=0), mask=whole)


@triton.jit(do_not_specialize=["page", "room"])
def _copy_kernel(
    pages_ptr, copy_ptr, table_ptr, starts_ptr, rows_ptr, page, slots, room, FIELDS: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A line of the table for each fact, a column for each tensor: first program, byte in a page, bytes before it in the
    # copy of one row, bytes of a row of the copy, bytes of a slot if it is a slab, bytes of a word.
    number = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + number)
    begun = tl.load(table_ptr + tl.arange(0, FIELDS)) <= tl.program_id(0)
    fact_ptr = table_ptr + tl.sum(begun.to(tl.int32), 0) - 1
    size, slot = tl.load(fact_ptr + 3 * FIELDS), tl.load(fact_ptr + 4 * FIELDS).to(tl.int32)
    word = tl.load(fact_ptr + 5 * FIELDS).to(tl.int32)
    index = (tl.program_id(0) - tl.load(fact_ptr).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    whole = index < (size // word).to(tl.int32)
    inside, place = whole, index
    if starts_ptr is not None:
        if slot > 0:
            each = slot // word
            at = index // each
            own_ptr = starts_ptr + row * (page // 4) + at // slots
            first = tl.load(own_ptr, mask=inside, other=0) + at % slots
            inside &= first < tl.load(own_ptr + 1, mask=inside, other=0)
            place = first * each + index % each
    there_ptr = pages_ptr + row * page + tl.load(fact_ptr + FIELDS)
    here_ptr = copy_ptr + tl.load(fact_ptr + 2 * FIELDS) * room + number * size
    if word == 4:
        _move(
            there_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + place,
            here_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + index, inside, whole, BACK,
        )  # fmt: skip
    else:
        _move(there_ptr + place, here_ptr + index, inside, whole, BACK)


@functools.lru_cache(maxsize=64)
def _table(facts: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, list[int], int, int]:
    """The table for tensors of which are given: byte in a page, bytes of a row of the copy, of a slot if it is a slab.

    Returns: with it, bytes before each in the copy of one row, and the bytes of all; the number of programs.
    """
    columns, places, end, programs = [], [], 0, 0
    for offset, size, slot in facts:
        word = 1 if (slot or size) % 4 else 4
        columns.append((programs, offset, end, size, slot, word))
        places.append(end)
        end += -(-size // 16) * 16
        programs += triton.cdiv(size // word, BLOCK)
    columns += [(LAST, 0, 0, 0, 0, 1)] * (pow2(len(facts)) - len(facts))
    return torch.tensor(list(zip(*columns)), device=device), places, end, programs


def _launch(state: LayerState, names: list[str], copy: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Copy the named tensors of the batch's rows out of their pages; from the `copy` back, if that is given.

    Without "exact.starts" among the names, the copy has heads of equally many slots. Returns: the copy, uint8, and the
    tensors that are views of it.
    """
    named, exact, rows, pages = dict(state.named_tensors()), state.exact, state.rows, state.pages
    assert rows is not None and pages is not None
    starts = None if "exact.starts" in names else exact.starts
    facts, shapes = [], []
    for name in names:
        tensor = named[name]
        if tensor.stride(0) * tensor.itemsize != pages.stride(0):
            raise FastKVError(f"rows: {name} must be a view of the state's pages; see fastkv.cache.pages")
        slab = starts is not None and name in state.SLABS
        shape = (state.heads, exact.limit, *tensor.shape[2:]) if slab else tensor.shape[1:]
        slot = prod(tensor.shape[2:]) * tensor.itemsize if slab else 0
        facts.append(
            (tensor.storage_offset() * tensor.itemsize - pages.storage_offset(), prod(shape) * tensor.itemsize, slot)
        )
        shapes.append((shape, tensor.dtype))
    table, places, each, programs = _table(tuple(facts), pages.device)
    number, back = len(rows), copy is not None
    if copy is None:
        copy = torch.empty(number * each, dtype=torch.uint8, device=pages.device)
    if number:
        _copy_kernel[programs, number](
            pages, copy, table, starts, rows, pages.stride(0), exact.limit, number, FIELDS=table.shape[1], BACK=back,
            BLOCK=BLOCK,
        )  # fmt: skip
    found = {}
    for name, (shape, dtype), (_, size, _), place in zip(names, shapes, facts, places):
        part = copy[number * place : number * (place + size)]
        found[name] = part.view(dtype).view(number, *shape)
    return copy, found


def taken(state: LayerState, but: tuple[str, ...] = (), equal: bool = False) -> LayerState:
    """`LayerState.taken`, of pages in one launch. No host sync."""
    if state.pages is None:
        return state.taken(but, equal=equal)
    names = [name for name in state.names_but(but) if not (equal and name == "exact.starts")]
    own = state.shell()
    own.pages, found = _launch(state, names)
    for name, tensor in found.items():
        own.replace(name, tensor)
    if equal:
        own.exact.starts = None
    return own


def put(state: LayerState, own: LayerState) -> None:
    """`LayerState.put`, into pages in one launch. No host sync."""
    if state.pages is None or own.pages is None:
        state.put(own)
        return
    mine, here = dict(own.named_tensors()), dict(state.named_tensors())
    names = [name for name, tensor in mine.items() if tensor is not here[name]]
    _launch(state, names, own.pages)
