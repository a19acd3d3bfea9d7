"""Tokens of an engine's batch as padded blocks of prompts and back, and what a layer chooses from once it has read one.

Twins of `reference.blocks_of`, `of_blocks` and `candidates`: nothing is computed but positions, so bytes
are each once in and once out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ._arguments import View
from ._launch import cdiv, check_like, pow2

ROWS, BLOCK = 64, 2048  # tokens of a program; of a mask at once
SCAN, STEP = tl.constexpr(1024), tl.constexpr(64)  # tokens of a mask that are counted, and compared with ranks, at once


class Heads(NamedTuple):
    """Constants of a launch: numbers of a head of queries or keys and of values, both padded; heads of both."""

    DK: int
    DV: int
    BK: int
    BV: int
    Q: int
    KV: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, q: int, kv: int) -> Heads:
        """For rows [..., D]."""
        dim, value_dim = keys.shape[-1], values.shape[-1]
        return cls(dim, value_dim, pow2(dim, 16), pow2(value_dim, 16), q, kv)


@triton.jit
def _copy(from_ptr, to_ptr, source, target, inside, D: tl.constexpr, BD: tl.constexpr):
    """to[target] = from[source] for rows of D numbers, whose places are counted in numbers."""
    column = tl.arange(0, BD)
    mask = inside[:, None] & (column < D)[None, :]
    rows = tl.load(from_ptr + source[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(to_ptr + target[:, None] + column[None, :], rows.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _real_before(valid_ptr, first, T, BLOCK: tl.constexpr):
    """How many tokens of a row [T] of bytes are real, of those before `first` and of all."""
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, T, BLOCK):
        index = start + tl.arange(0, BLOCK)
        real = (tl.load(valid_ptr + index, mask=index < T, other=0) != 0).to(tl.int32)
        total += real
        before += tl.where(index < first, real, 0)
    return tl.sum(before, 0), tl.sum(total, 0)


@triton.jit
def _of_rank(valid_ptr, rank, least, most, T):
    """Places in a row [T] of bytes of the real tokens of some ranks, all of which are between least and most."""
    low, high, before = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, T, SCAN):
        index = start + tl.arange(0, SCAN)
        real = (tl.load(valid_ptr + index, mask=index < T, other=0) != 0).to(tl.int32)
        until = before + tl.cumsum(real, 0)
        low += tl.sum(((index < T) & (until <= least)).to(tl.int32), 0)
        high += tl.sum(((index < T) & (until <= most)).to(tl.int32), 0)
        before += tl.sum(real, 0)
    before = tl.maximum(least, 0)
    place = low + tl.zeros(rank.shape, tl.int32)
    for start in range(low, high + 1, STEP):
        index = start + tl.arange(0, STEP)
        real = (tl.load(valid_ptr + index, mask=index < T, other=0) != 0).to(tl.int32)
        until = before + tl.cumsum(real, 0)
        place += tl.sum((until[None, :] <= rank[:, None]).to(tl.int32), 1)
        before += tl.sum(real, 0)
    return place


class CandidatePointers(NamedTuple):
    """What is made of the candidates, see `reference.candidates`. Absent: what is not."""

    keys_ptr: Any
    values_ptr: Any
    positions_ptr: Any
    valid_ptr: Any
    guard_ptr: Any
    memory_ptr: Any


class Known(NamedTuple):
    """What is known of slots, sequences and the tokens of a block. Absent: what the policy does not remember."""

    memory_ptr: Any
    lengths_ptr: Any
    seen_ptr: Any
    valid_ptr: Any


class Protection(NamedTuple):
    """First and last tokens that never leave."""

    sinks: Any
    recent: Any


@triton.jit(do_not_specialize=["used", "T"])
def _candidates_kernel(
    keys: View, values: View, positions: View, k: View, v: View, known: Known, made: CandidatePointers,
    never: Protection, used, T, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    batch, own, number = head // HEADS.KV, head % HEADS.KV, used + T
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    old, fresh = index < used, (index >= used) & (index < number)
    valid_ptr = known.valid_ptr + batch * T
    before, total = _real_before(valid_ptr, tl.maximum(tl.program_id(1) * ROWS - used, 0), T, BLOCK)
    seen = tl.load(known.seen_ptr + batch)
    real = (tl.load(valid_ptr + index - used, mask=fresh, other=0) != 0).to(tl.int32)
    position = seen.to(tl.int32) + before + tl.cumsum(real, 0) - 1
    slot = batch * positions.stride_b + own * positions.stride_h + index
    position = tl.where(old, tl.load(positions.ptr + slot, mask=old, other=0), position)
    place = head * number + index
    tl.store(made.positions_ptr + place, position, mask=index < number)
    after = seen + total
    guard = (position < never.sinks) | (position >= after - never.recent)
    tl.store(made.guard_ptr + place, guard.to(tl.uint8), mask=index < number)
    real = tl.where(old, index < tl.load(known.lengths_ptr + head), real != 0)
    tl.store(made.valid_ptr + place, real.to(tl.uint8), mask=index < number)
    if known.memory_ptr is not None:
        tl.store(made.memory_ptr + place, tl.load(known.memory_ptr + slot, mask=old, other=0.0), mask=index < number)
    if made.keys_ptr is not None:
        far, near = index.to(tl.int64), (index - used).to(tl.int64)
        key_ptr, value_ptr = (
            keys.ptr + batch * keys.stride_b + own * keys.stride_h,
            values.ptr + batch * values.stride_b + own * values.stride_h,
        )
        k_ptr, v_ptr = k.ptr + batch * k.stride_b + own * k.stride_h, v.ptr + batch * v.stride_b + own * v.stride_h
        _copy(key_ptr, made.keys_ptr, far * keys.stride_t, place * HEADS.DK, old, HEADS.DK, HEADS.BK)
        _copy(value_ptr, made.values_ptr, far * values.stride_t, place * HEADS.DV, old, HEADS.DV, HEADS.BV)
        _copy(k_ptr, made.keys_ptr, near * k.stride_t, place * HEADS.DK, fresh, HEADS.DK, HEADS.BK)
        _copy(v_ptr, made.values_ptr, near * v.stride_t, place * HEADS.DV, fresh, HEADS.DV, HEADS.BV)


def candidates(
    keys: Tensor, values: Tensor, positions: Tensor, memory: Tensor | None, lengths: Tensor, k: Tensor, v: Tensor,
    valid: Tensor, seen: Tensor, sinks: int, recent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference.candidates`: one launch, no host sync. All have unit stride along D, or along slots.

    Raises: FastKVError for shapes or strides that do not fit.
    """
    op, (batch, heads, used), num = "candidates", positions.shape, k.shape[2]
    valid = valid.contiguous()
    check_like(op, (batch, num), valid=valid)
    check_like(op, (batch, heads), lengths=lengths)
    check_like(op, (batch,), seen=seen)
    check_shape(op, "k", k, (batch, heads, num, keys.shape[-1]))
    check_shape(op, "v", v, (batch, heads, num, values.shape[-1]))
    rows = (keys, values, k, v, positions)
    assert all(part.stride(-1) == 1 for part in rows) and (memory is None or memory.stride() == positions.stride())
    shape = batch, heads, used + num

    def made(dtype: torch.dtype, *more: int, there: bool = True) -> Tensor:
        return torch.empty(*(*shape, *more) if there else (0,), dtype=dtype, device=keys.device)

    both = (made(part.dtype, part.shape[-1], there=used > 0) for part in (keys, values))
    masks = made(torch.bool), made(torch.bool)
    out = (*both, made(torch.int32), *masks, made(torch.float32, there=memory is not None))
    if batch:
        real, guard = (part.view(torch.uint8) for part in masks)
        pointers = CandidatePointers(out[0], out[1], out[2], real, guard, out[5])
        pointers = pointers if memory is not None else pointers._replace(memory_ptr=None)
        pointers = pointers if used else pointers._replace(keys_ptr=None, values_ptr=None)
        _candidates_kernel[batch * heads, cdiv(used + num, ROWS)](
            View.of(keys), View.of(values), View(positions, *positions.stride()), View.of(k), View.of(v),
            Known(memory, lengths, seen, valid.view(torch.uint8)), pointers, Protection(sinks, recent), used, num,
            HEADS=Heads.of(keys, values, 0, heads), ROWS=ROWS, BLOCK=BLOCK,
        )  # fmt: skip
    return out  # type: ignore[return-value]


# Rows of pages to a place of their own and back, in one launch for all tensors of a state, and for the tokens that an
# engine has for them. The table of `ops.read_rows` says what the programs copy: each takes a stretch of one row of one
# tensor. Of a slab the copy has heads of equally many slots: what lies beyond its own is 0 there, and stays as it is in
# the page. Bytes: each once in and once out.


class Rows(NamedTuple):
    """Rows [B] int64 of pages, their copy, and where the stretches of both are, see `ops.read_rows`. Absent: starts,
    without slabs.
    """

    pages_ptr: Any
    copy_ptr: Any
    table_ptr: Any
    starts_ptr: Any
    rows_ptr: Any


class Blocks(NamedTuple):
    """Queries, keys and values as blocks [R, H, T, D], and which token of an engine's batch is where, [R, T] int64."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    tokens_ptr: Any


class Places(NamedTuple):
    """Tokens of a batch, and where each is in blocks: of which sequence, and within it; [N] int64."""

    own_ptr: Any
    sequence_ptr: Any
    within_ptr: Any


@triton.jit
def _move(there_ptr, here_ptr, inside, whole, BACK: tl.constexpr):
    """Words of a page and of its copy; what is not inside is 0 in the copy."""
    if BACK:
        tl.store(there_ptr, tl.load(here_ptr, mask=inside, other=0), mask=inside)
    else:
        tl.store(here_ptr, tl.load(there_ptr, mask=inside, other=0), mask=whole)


@triton.jit
def _stretch(moved, program, number, page, slots, room, FIELDS: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """A program's stretch of a row."""
    row = tl.load(moved.rows_ptr + number)
    begun = tl.load(moved.table_ptr + tl.arange(0, FIELDS)) <= program
    fact_ptr = moved.table_ptr + tl.sum(begun.to(tl.int32), 0) - 1
    size, slot = tl.load(fact_ptr + 3 * FIELDS), tl.load(fact_ptr + 4 * FIELDS).to(tl.int32)
    word = tl.load(fact_ptr + 5 * FIELDS).to(tl.int32)
    index = (program - tl.load(fact_ptr).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    whole = index < (size // word).to(tl.int32)
    inside, place = whole, index
    if moved.starts_ptr is not None:
        if slot > 0:
            each = slot // word
            at = index // each
            own_ptr = moved.starts_ptr + row * (page // 4) + at // slots
            first = tl.load(own_ptr, mask=inside, other=0) + at % slots
            inside &= first < tl.load(own_ptr + 1, mask=inside, other=0)
            place = first * each + index % each
    there_ptr = moved.pages_ptr + row * page + tl.load(fact_ptr + FIELDS)
    here_ptr = moved.copy_ptr + tl.load(fact_ptr + 2 * FIELDS) * room + number * size
    if word == 4:
        _move(
            there_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + place,
            here_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + index, inside, whole, BACK,
        )  # fmt: skip
    else:
        _move(there_ptr + place, here_ptr + index, inside, whole, BACK)


@triton.jit(do_not_specialize=["page", "room", "programs", "length"])
def _read_kernel(
    moved: Rows, q: View, k: View, v: View, made: Blocks, page, slots, room, programs, length, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if program < programs:
        _stretch(moved, program, sequence, page, slots, room, FIELDS, False, BLOCK)
    else:
        tile, head = (program - programs) // (HEADS.Q + HEADS.KV), (program - programs) % (HEADS.Q + HEADS.KV)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = row < length
        token = tl.load(made.tokens_ptr + sequence * length + row, mask=inside, other=0).to(tl.int64)
        if head < HEADS.Q:
            target = ((sequence * HEADS.Q + head) * length + row) * HEADS.DK
            _copy(q.ptr + head * q.stride_h, made.q_ptr, token * q.stride_t, target, inside, HEADS.DK, HEADS.BK)
        else:
            own = head - HEADS.Q
            place = (sequence * HEADS.KV + own) * length + row
            key, value = place * HEADS.DK, place * HEADS.DV
            _copy(k.ptr + own * k.stride_h, made.k_ptr, token * k.stride_t, key, inside, HEADS.DK, HEADS.BK)
            _copy(v.ptr + own * v.stride_h, made.v_ptr, token * v.stride_t, value, inside, HEADS.DV, HEADS.BV)


@triton.jit(do_not_specialize=["page", "room", "programs", "length", "number"])
def _write_kernel(
    moved: Rows, blocks_ptr, places: Places, out: View, page, slots, room, programs, length, number,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs * room:
        _stretch(moved, program % programs, (program // programs).to(tl.int64), page, slots, room, FIELDS, True, BLOCK)
    else:
        tile, head = (program - programs * room) // HEADS.Q, (program - programs * room) % HEADS.Q
        index = tile * ROWS + tl.arange(0, ROWS)
        inside = index < number
        token = tl.load(places.own_ptr + index, mask=inside, other=0)
        sequence = tl.load(places.sequence_ptr + index, mask=inside, other=0)
        within = tl.load(places.within_ptr + index, mask=inside, other=0)
        source = ((sequence * HEADS.Q + head) * length + within) * HEADS.DV
        _copy(blocks_ptr, out.ptr + head * out.stride_h, source, token * out.stride_t, inside, HEADS.DV, HEADS.BV)


def read_rows(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, pages: Tensor, copy: Tensor, table: Tensor, starts: Tensor | None,
    rows: Tensor, slots: int, programs: int, block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`ops.read_rows`: one launch, no host sync. q, k, v [N, H, D] have unit stride along D."""
    (batch, length), dtype = tokens.shape, q.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    made = [torch.empty(batch, t.shape[1], length, t.shape[2], dtype=t.dtype, device=t.device) for t in (q, k, v)]
    check_like("read_rows", (len(rows), length), tokens=tokens)
    heads = Heads.of(q, v, q.shape[1], k.shape[1])
    assert k.dtype == v.dtype == dtype and k.shape[1:] == (heads.KV, heads.DK)
    views = (View(t, 0, t.stride(1), t.stride(0)) for t in (q, k, v))
    grid = programs + cdiv(length, ROWS) * (heads.Q + heads.KV), batch
    if batch:
        _read_kernel[grid](
            Rows(pages, copy, table, starts, rows), *views, Blocks(made[0], made[1], made[2], tokens), pages.stride(0),
            slots, batch, programs, length, FIELDS=table.shape[1], BLOCK=block, HEADS=heads, ROWS=ROWS,
        )  # fmt: skip
    return made[0], made[1], made[2]


def write_rows(
    blocks: Tensor, own: Tensor, sequence: Tensor, within: Tensor, out: Tensor, pages: Tensor, copy: Tensor,
    table: Tensor, starts: Tensor | None, rows: Tensor, slots: int, programs: int, block: int,
) -> None:  # fmt: skip
    """`ops.write_rows`: one launch, no host sync. blocks are contiguous; out has unit stride along D."""
    assert out.stride(-1) == 1
    check_like("write_rows", own.shape, own=own, sequence=sequence, within=within)
    check_like("write_rows", (None, out.shape[1], None, out.shape[2]), blocks=blocks)
    heads = Heads.of(out, out, out.shape[1], 0)
    if len(rows):
        _write_kernel[(programs * len(rows) + cdiv(len(own), ROWS) * heads.Q,)](
            Rows(pages, copy, table, starts, rows), blocks, Places(own, sequence, within),
            View(out, 0, out.stride(1), out.stride(0)), pages.stride(0), slots, len(rows), programs, blocks.shape[2],
            len(own), FIELDS=table.shape[1], BLOCK=block, HEADS=heads, ROWS=ROWS,
        )  # fmt: skip
