"""What is known of the slots before an eviction: in use, protected, and the mean attention received, which starts anew.

    valid = slot < length;   guard = position < sinks or >= seen - recent;   mean = received / clamp(seen - position)

Twin of `reference.slot_signals`. Bytes per slot: 4 for the position, 2 for the masks, 16 for attention and queries.
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
from ._launch import check_like, check_rows

BLOCK = 1024


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
    if guard_ptr is not None:
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
    guard = torch.empty_like(positions if state.parts is not None else positions[:0, 0, 0], dtype=torch.bool)
    known = positions if exact.attention is not None else positions[:0, 0, 0]
    attention, queried = (torch.empty_like(known, dtype=torch.float32) for _ in range(2))
    if num and batch:
        _slot_kernel[batch * heads, triton.cdiv(num, BLOCK)](
            positions, pointers, valid.view(torch.uint8), None if state.parts is None else guard.view(torch.uint8),
            attention, queried, state.rows, page, num, spec.sinks, spec.recent, spec.spare, HEADS=heads, BLOCK=BLOCK,
        )  # fmt: skip
    return valid, guard, attention, queried
