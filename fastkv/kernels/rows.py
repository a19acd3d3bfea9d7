"""Rows of pages to a place of their own and back, in one launch for all tensors of a state.

The kernel of `ops.rows`, whose table says what the programs copy: each takes a stretch of one row of one tensor. Of a
slab the copy has heads of equally many slots: what lies beyond a head's own is 0 there, and stays as it is in the page.
Bytes: each once in and once out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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


def copy_rows(
    pages: Tensor, copy: Tensor, table: Tensor, starts: Tensor | None, rows: Tensor, slots: int, programs: int,
    block: int, back: bool,
) -> None:  # fmt: skip
    """`ops.rows.copy_rows`: one launch, no host sync."""
    if len(rows):
        _copy_kernel[programs, len(rows)](
            pages, copy, table, starts, rows, pages.stride(0), slots, len(rows), FIELDS=table.shape[1], BACK=back,
            BLOCK=block,
        )  # fmt: skip
