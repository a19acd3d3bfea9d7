"""What is known of the slots before an eviction: in use, protected, and the mean attention received, which starts anew;
and candidates by age.

    valid = slot < length;   guard = position < sinks or >= seen - recent;   mean = received / clamp(seen - position)

Twins of `reference.slot_signals` and `in_order`. Of up to FEW candidates, each is compared with all others: how many
come before it is its place. Of more, a launch makes the numbers that torch sorts, and counts them.
Bytes per slot: 4 for the position, 2 for the masks, 16 for attention and queries; to order N: 9 N^2 / 64 from L2.
Does not handle: attention that heads of unequally many slots collect, tokens without values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import LayerState, Spec
from ._arguments import StatePointers
from ._attention import _home, _page
from ._launch import cdiv, check_like, check_rows

BLOCK = 1024
SLOTS, CANDIDATES = 64, 64  # compared at once
FEW = 4096  # candidates of a head: of more, a sort is faster
LAST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["page", "sinks", "recent", "spare"])
def _slot_kernel(
    positions_ptr, state: StatePointers, valid_ptr, guard_ptr, attention_ptr, queried_ptr, rows_ptr, page, slots, sinks,
    recent, spare, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = slot < slots, pair * slots + slot
    row, own = _home(rows_ptr, page, pair, HEADS)
    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])
    tl.store(valid_ptr + place, (slot < tl.load(state.lengths_ptr + own)).to(tl.uint8), mask=inside)
    seen = tl.load(state.seen_ptr + own // HEADS)
    position = tl.load(positions_ptr + place, mask=inside, other=0)
    guard = (position < sinks) | (position >= seen - recent)
    tl.store(guard_ptr + place, guard.to(tl.uint8), mask=inside)
    if state.attention_ptr is not None:
        queried = tl.minimum(tl.maximum(seen - position, 1), spare).to(tl.float32)
        received_ptr = state.attention_ptr + own * slots + slot
        received = tl.load(received_ptr, mask=inside, other=0.0)
        tl.store(attention_ptr + place, received / queried, mask=inside)
        tl.store(queried_ptr + place, queried, mask=inside)
        if rows_ptr is not None:
            inside &= row != 0  # which may come several times
        tl.store(received_ptr, tl.zeros([BLOCK], tl.float32), mask=inside)


def slot_signals(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch, no host sync; shapes as in `reference.slot_signals`.

    Raises: FastKVError for shapes or strides that do not fit.
    """
    exact, op = state.exact, "slot_signals"
    batch, heads, num = positions.shape
    check_like(op, (state.batch, heads, num), positions=positions)
    if exact.attention is not None:
        check_shape(op, "attention", exact.attention, (None, heads, num))
    pointers = StatePointers.of(exact, "attention", "lengths", seen=state.seen)
    page = check_rows(op, state, pointers)
    valid = torch.empty_like(positions, dtype=torch.bool)
    guard = torch.empty_like(valid)
    known = positions if exact.attention is not None else positions[:0, 0, 0]
    attention, queried = (torch.empty_like(known, dtype=torch.float32) for _ in range(2))
    if num and batch:
        _slot_kernel[batch * heads, cdiv(num, BLOCK)](
            positions, pointers, valid.view(torch.uint8), guard.view(torch.uint8), attention,
            queried, state.rows, page, num, spec.sinks, spec.recent, spec.spare, HEADS=heads, BLOCK=BLOCK,
        )  # fmt: skip
    return valid, guard, attention, queried


@triton.jit
def _keys(positions_ptr, chosen_ptr, but_ptr, head, index, N):
    """By what candidates are in order, and which of them are chosen."""
    place = head * N + index
    chosen = tl.load(chosen_ptr + place, mask=index < N, other=0) != 0
    if but_ptr is not None:
        chosen = chosen & (tl.load(but_ptr + place, mask=index < N, other=0) == 0)
    position = tl.load(positions_ptr + place, mask=index < N, other=0)
    return tl.where(chosen, position, LAST), chosen


@triton.jit(do_not_specialize=["N"])
def _key_kernel(positions_ptr, chosen_ptr, but_ptr, keys_ptr, counts_ptr, N, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        key, chosen = _keys(positions_ptr, chosen_ptr, but_ptr, head, index, N)
        tl.store(keys_ptr + head * N + index, key, mask=index < N)
        count += chosen.to(tl.int32)
    tl.store(counts_ptr + head, tl.sum(count, 0).to(tl.int64))


@triton.jit(do_not_specialize=["N"])
def _rank_kernel(
    positions_ptr, chosen_ptr, but_ptr, order_ptr, counts_ptr, N, SLOTS: tl.constexpr, CANDIDATES: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    key, _ = _keys(positions_ptr, chosen_ptr, but_ptr, head, own, N)
    rank = tl.zeros([SLOTS], tl.int32)
    count = tl.zeros([CANDIDATES], tl.int32)
    for first in range(0, N, CANDIDATES):
        index = first + tl.arange(0, CANDIDATES)
        theirs, chosen = _keys(positions_ptr, chosen_ptr, but_ptr, head, index, N)
        alike = (theirs[None, :] == key[:, None]) & (index[None, :] < own[:, None])
        before = (theirs[None, :] < key[:, None]) | alike
        rank += tl.sum(before.to(tl.int32), 1)
        count += chosen.to(tl.int32)
    tl.store(order_ptr + head * N + rank, own.to(tl.int64), mask=own < N)
    if tl.program_id(1) == 0:
        tl.store(counts_ptr + head, tl.sum(count, 0).to(tl.int64))


def in_order(positions: Tensor, chosen: Tensor, but: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the chosen candidates in order of position, then of the others; and how many are chosen.

    Args: positions [B, Hkv, N] int32; chosen, but [B, Hkv, N] bool: those in both are not meant.
    Returns: [B, Hkv, N] and [B, Hkv] int64.  Cost: one launch, and a sort of more than FEW; no host sync.
    """
    check_like("in_order", positions.shape, positions=positions, chosen=chosen, but=but)
    counts = torch.empty(positions.shape[:2], dtype=torch.int64, device=positions.device)
    num = positions.shape[2]
    given = positions, chosen.view(torch.uint8), None if but is None else but.view(torch.uint8)
    if num > FEW:
        keys = torch.empty_like(positions)
        _key_kernel[(counts.numel(),)](*given, keys, counts, num, BLOCK=BLOCK)
        return keys.argsort(dim=-1, stable=True), counts
    order = torch.empty_like(positions, dtype=torch.int64)
    if counts.numel():
        grid = counts.numel(), max(cdiv(num, SLOTS), 1)
        _rank_kernel[grid](*given, order, counts, num, SLOTS=SLOTS, CANDIDATES=CANDIDATES)
    return order, counts
