"""Kernels of an eviction that are about single slots: their signals, and scores in standard deviations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import ops, reference
from fastkv.kernels import blended_scores, slot_signals
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


@pytest.mark.parametrize("num", [1, 37, 2048, 5000])
def test_blended_scores(num):
    """A head with no real token, one with a single one, equal distances, no attention, and distances far from 0."""
    distance, mask = uniform(3, 2, num) ** 3 + 100, uniform(3, 2, num, seed=1) > 0.2
    mask[0, 0], mask[0, 1], distance[1, 0] = False, False, 1 / 3
    mask[0, 1, num // 2] = True
    distance[2, 1] = distance[2, 1].round()  # skewed beyond 1
    attention = uniform(3, 2, num, seed=2) ** 9  # few of them count
    attention[1, 1] = 0
    positions = (uniform(3, 2, num, seed=3) * 3 * num).int()
    distance, attention = (torch.where(mask, given, float("nan")) for given in (distance, attention))
    rest = positions, mask, 30, 12.0
    want = reference.blended_scores(distance.double(), attention.double(), *rest)
    got = ops.blended_scores(distance, attention, *rest, backend="triton")
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-5)
    assert torch.equal(got, ops.blended_scores(distance, attention, *rest, backend="triton"))


def test_blended_scores_of_nothing():
    none, mask = torch.zeros(1, 2, 0), torch.zeros(1, 2, 0, dtype=torch.bool)
    assert blended_scores.blended_scores(none, none, none.int(), mask, 4, 1.0).shape == (1, 2, 0)
