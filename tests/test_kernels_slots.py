"""Kernels of an eviction that are about single slots: their signals, and scores in standard deviations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import ops, reference
from fastkv.kernels import slot_signals, z_scores
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
@pytest.mark.parametrize("kind", ["alone", "bonus", "attention"])
def test_z_scores(num, kind):
    """A head with no real token, one with a single one, equal scores, and scores far from 0."""
    scores, mask = uniform(2, 2, num) + 100, uniform(2, 2, num, seed=1) > 0.2
    mask[0, 0], mask[0, 1], scores[1, 0] = False, False, 1 / 3
    mask[0, 1, num // 2] = True
    scores = torch.where(mask, scores, float("nan"))
    more = None if kind == "alone" else uniform(2, 2, num, seed=2) ** 9  # few of them count
    if kind == "attention":
        more[1, 0] = 0
        more[~mask] = float("nan")
    rest = 12.0, 30 if kind == "attention" else None
    want = reference.z_scores(scores.double(), mask, None if more is None else more.double(), *rest)
    got = ops.z_scores(scores, mask, more, *rest, backend="triton")
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-5, equal_nan=True)
    assert torch.equal(got[mask], ops.z_scores(scores, mask, more, *rest, backend="triton")[mask])


def test_z_scores_of_nothing():
    assert z_scores.z_scores(torch.zeros(1, 2, 0), torch.zeros(1, 2, 0, dtype=torch.bool)).shape == (1, 2, 0)
