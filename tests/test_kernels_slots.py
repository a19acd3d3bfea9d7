"""Kernels of an eviction that are about single slots: their signals, and scores in standard deviations."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import reference
from fastkv.kernels import slot_signals
from fastkv.reference import Centroids

from .conftest import examples
from .states import DEVICE, copied, make_spec, make_state, uninitialised_is_nan


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@settings(max_examples=examples(60), deadline=None)
@given(
    slots=st.integers(1, 40),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seen=st.lists(st.integers(0, 90), min_size=2, max_size=2),
    attention=st.booleans(),
    parts=st.booleans(),
    spare=st.integers(1, 20),
)
def test_slot_signals(slots, lengths, seen, attention, parts, spare):
    """Bit for bit; what slots received is zero afterwards."""
    held = torch.tensor([min(lengths[i % len(lengths)], slots) for i in range(4)]).view(2, 2).int().to(DEVICE)
    positions = (uniform(2, 2, slots) * 90).int()
    state = make_state(
        torch.zeros(2, 2, slots, 16, device=DEVICE), torch.zeros(2, 2, slots, 16, device=DEVICE), held, positions,
        torch.tensor(seen, device=DEVICE), attention=uniform(2, 2, slots, seed=1) if attention else None,
        parts=Centroids.empty(2, 2, 4, 16, 16, DEVICE) if parts else None,
    )  # fmt: skip
    spec, twin = make_spec(spare=spare, sinks=2, recent=5), copied(state)
    with uninitialised_is_nan():
        found = slot_signals.slot_signals(positions, state, spec)
    for mine, theirs in zip(found, reference.slot_signals(positions, twin, spec), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert state.exact.attention is None or not state.exact.attention.any()
