"""Launches that share memory between programs: the same bits are wanted in any order of them, whoever merges.

Every order starts from the same state with scratch that is full of other garbage, except for tickets, which the launch
before has to leave at zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastkv.kernels import compact as compact_module
from fastkv.kernels import operations
from fastkv.reference import Centroids, LayerState, Moments, Recovery, Selection, Slots

from .. import states
from ..states import best_slots, copied, encoded, in_pages, in_slab, make_spec, make_state, splits

BATCH, HEADS, G = 2, 2, 2
OWNED = [[3, 9], [8, 1]]  # slots per (sequence, head)
LENGTHS = torch.tensor([[0, 7], [8, 0]], dtype=torch.int32)
APPROX_OWNED = [[4, 1], [9, 2]]
APPROX_LENGTHS = torch.tensor([[4, 0], [9, 1]], dtype=torch.int32)
SCALE = 0.3


def poison(tensors: list[Tensor], seed: int) -> None:
    """Fill tensors with what nobody may rely on: NaN, infinity, the largest number, or any bits."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        kind = source.randrange(4)
        if kind == 3:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        else:
            tensor.fill_((math.nan, math.inf, torch.finfo(tensor.dtype).max)[kind])


@dataclass
class Problem:
    """A state and a launch on it: `call` returns results, changes its state and may use the workspace."""

    state: LayerState
    call: Callable[[LayerState], tuple[Tensor, ...]]
    room: list[Tensor]

    def outcome(self, seed: int) -> dict[str, Tensor]:
        """Results and the state afterwards, from scratch that the seed poisons."""
        state = copied(self.state)
        state.scratch = self.room
        poison([one for one in self.room if one.is_floating_point()], seed)
        with states.uninitialised_is_nan():
            results = self.call(state)
        assert not self.room[3].any(), "tickets are left for the next launch"
        return dict(enumerate(results)) | dict(state.named_tensors())


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def layer(dim: int, ragged: bool, dtype=torch.float32, *, parts=None, slots="model", vector=False) -> LayerState:
    """Slots of unequal heads, some of them empty or full, with moments of up to six evicted tokens; vector: beside
    slots that hold no values."""
    width = max(map(max, OWNED))
    keys, values = normal(2, BATCH, HEADS, width, dim, dtype=dtype)
    attention = torch.rand(BATCH, HEADS, width)
    positions = torch.rand(BATCH, HEADS, width).argsort(-1).int()
    old, gone = (normal(BATCH, HEADS, 6, dim), normal(BATCH, HEADS, 6, dim)), torch.rand(BATCH, HEADS, 6) < 0.5
    gone[0, 0] = False
    moments = Moments.empty(BATCH, HEADS, dim, dim).add(*old, gone)
    known = None if parts is None else Centroids.empty(BATCH, HEADS, parts, dim, dim).add(*old, gone)
    seen = torch.tensor([20, 30])
    rest = {"attention": attention, "parts": known}
    state = encoded(make_state(keys, values, LENGTHS.clone(), positions, seen, moments, **rest), slots)
    if vector:
        keys, positions = normal(BATCH, HEADS, 9, dim, dtype=dtype), torch.randint(0, 20, (BATCH, HEADS, 9)).int()
        lengths, attention = APPROX_LENGTHS.clone(), torch.rand(BATCH, HEADS, 9)
        state.approx = Slots(keys, None, lengths, positions, attention=attention)
        angle = torch.arange(20)[:, None] * 50.0 ** -(torch.arange(dim // 2) / dim * 2)
        state.recovery = Recovery(normal(HEADS, dim, dim) / 4, angle.cos(), angle.sin())
    return in_slab(state, OWNED, APPROX_OWNED) if ragged else state


def somewhere(state: LayerState, batch: list[int] | None) -> LayerState:
    """The layer in pages 3 and 1 of five, as a batch of these rows sees it; the layer itself where there are none."""
    if batch is None:
        return state
    placed = in_pages(state, [3, 1], 5)
    for _, tensor in placed.named_tensors():
        tensor[0] = tensor[1]  # nobody's page may hold anything
    return placed.at(torch.tensor(batch))


def decoding(
    number: int, dim: int = 16, ragged: bool = True, correction: str = "moments", rows: list[int] | None = None, **made
):
    state = somewhere(layer(dim, ragged, **made), rows)
    dtype = state.exact.dtype
    q, k, v = (normal(state.batch, heads, dim, dtype=dtype) for heads in (HEADS * G, HEADS, HEADS))
    spec = make_spec(SCALE, 2.0, correction=correction)

    def call(state):
        with splits(number):
            return operations.decode_step(q, k[:, :, None], v[:, :, None], state, spec)

    with splits(number):
        room = states.workspace(HEADS * G, state)
    return Problem(state, call, room)


def evicting(dim: int, ragged: bool, rows: list[int] | None = None, **made):
    state = layer(dim, ragged, **made)
    state.moments.slope = torch.zeros(BATCH, HEADS, dim, dim, dtype=torch.float16)
    state = somewhere(state, rows)
    width = max(map(max, OWNED))
    scores = normal(state.batch, HEADS, width)
    spec = make_spec(tokens=width - 6, spare=6, sinks=1, recent=2)
    with state.gathered() as own:
        chosen = best_slots(scores, own, spec)

    def call(state):
        operations.compact(*chosen, None, None, state, spec)
        return ()

    return Problem(state, call, states.workspace(HEADS * G, state))


def compacting(dim: int, slots: str = "model", **made):
    """Nine slots and a block of forty tokens, most of which go: a list in two splits."""
    used, num, room = 9, 49, 12
    state = layer(dim, False, **made)
    state.exact.keys, state.exact.values = normal(2, BATCH, HEADS, room, dim)
    state.exact.positions = torch.rand(BATCH, HEADS, room).argsort(-1).int()
    state.exact.attention = torch.ones(BATCH, HEADS, room)
    state.exact.limit = room
    state = encoded(state, slots)
    state.moments.slope = torch.zeros(BATCH, HEADS, dim, dim, dtype=torch.float16)
    block = normal(BATCH, HEADS, num - used, dim), normal(BATCH, HEADS, num - used, dim)
    places = torch.arange(num - used, dtype=torch.int32).expand(BATCH, HEADS, -1)
    valid = torch.arange(num) < used
    valid = torch.where(valid, torch.arange(num) < LENGTHS[..., None], torch.rand(BATCH, HEADS, num) < 0.95)
    rank = torch.rand(BATCH, HEADS, num).masked_fill(~valid, -1).argsort(-1, descending=True).argsort(-1)
    kept = valid & (rank < torch.tensor([[12, 5], [0, 12]])[..., None])

    def call(state):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compact_module, "ROWS_PER_SPLIT", num // 2)
            operations.compact(valid, Selection(kept, kept.sum(-1)), (*block, places), None, state, make_spec())
        return ()

    return Problem(state, call, states.workspace(HEADS * G, state))


CASES = {
    "decode": lambda: decoding(2, correction="moments"),
    "decode-equal-slots": lambda: decoding(4, ragged=False, dtype=torch.float16, correction="none"),
    "decode-centroids": lambda: decoding(2, correction="centroids", parts=3), "decode-alone": lambda: decoding(1),
    "decode-rows": lambda: decoding(2, rows=[0, 1, 3, 0], correction="centroids", parts=3),
    "vector": lambda: decoding(2, vector=True), "evict": lambda: evicting(80, True),
    "evict-equal-slots": lambda: evicting(48, False, dtype=torch.float16),
    "evict-rows": lambda: evicting(16, True, rows=[0, 1, 3, 0]), "compact": lambda: compacting(48),
    "decode-int8": lambda: decoding(2, slots="int8", rows=[0, 1, 3, 0]),
    "decode-fp8-alone": lambda: decoding(1, ragged=False, slots="fp8", dtype=torch.float16),
    "evict-int8": lambda: evicting(80, True, slots="int8"),
    "decode-int4": lambda: decoding(2, 32, slots="int4", rows=[0, 1, 3, 0]),
    "evict-int4": lambda: evicting(64, True, slots="int4"), "evict-k8v4": lambda: evicting(64, True, slots="k8v4"),
    "compact-fp8": lambda: compacting(48, slots="fp8"),
}  # fmt: skip


def assert_same_bits(got: dict, want: dict, order: int) -> None:
    assert got.keys() == want.keys()
    for key, one in want.items():
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (got[key], one))), f"{key} in order {order}"
