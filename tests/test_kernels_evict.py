"""Evictions while decoding: compact without a block, moment_scores against reference.moment_residual, signals of slots.

Which tokens stay must agree exactly. The moments may differ from fp64 by twice the error of the fp32 reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastkv import reference
from fastkv.kernels import operations, slot_signals
from fastkv.kernels.moment_scores import moment_scores
from fastkv.reference import LayerState, Moments

from .conftest import examples
from .pairwise import covering
from .states import copied, cycled, make_spec, make_state, shrink, uninitialised_is_nan

NAN = float("nan")


@dataclass
class Case:
    """One problem; slots that hold nothing are NaN and at impossible positions."""

    state: LayerState
    scores: Tensor

    @classmethod
    def make(cls, batch, heads, dim, slots, dtype, lengths, evicted, *, scores="normal", mean=0.5, count=None, seed=0):
        """lengths, evicted: per (sequence, head), cycled. count: pretend that many were evicted."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=source)

        held, gone = cycled(lengths, batch, heads), cycled(evicted, batch, heads)
        used = torch.arange(slots) < held[..., None]
        most = max(max(evicted), 1)
        inside = torch.arange(most) < gone[..., None]
        old = normal(batch, heads, most, dim) + mean, normal(batch, heads, most, dim) - mean
        moments = Moments.empty(batch, heads, dim, dim).add(*old, inside)
        if count is not None:
            moments.cross *= count / moments.count[..., None, None]
            moments.count.fill_(count)
        span = slots + 40
        order = torch.rand(batch, heads, span, generator=source).argsort(-1)[..., :slots]
        ranked = normal(batch, heads, slots) * (scores != "equal")
        if scores == "ties":
            ranked = ranked.round()
            ranked[..., 1::5] = NAN
            ranked[..., 2::5] = -0.0
            ranked[..., 3::7] = -torch.inf
        keys = (normal(batch, heads, slots, dim) + mean).to(dtype)
        values = (normal(batch, heads, slots, dim) - mean).to(dtype)
        positions, seen = order.to(torch.int32), torch.full((batch,), span)
        moments.slope = torch.full((batch, heads, dim, dim), NAN, dtype=torch.float16)
        keys[~used], values[~used], ranked[~used], positions[~used] = NAN, NAN, NAN, -(2**31)
        return cls(make_state(keys, values, held.int(), positions, seen, moments), ranked)

    def forget(self, order, slope=True):
        """Know no more of the evicted than moments of this order, and no slope of them."""
        m = self.state.moments
        known = [m.key_mean, m.value_mean, m.cross][: 0 if order is None else order + 2]
        self.state.moments = Moments(m.count, *known)
        if order == 1 and slope:
            self.state.moments.slope = m.slope

    def specified(self, dtype, spec):
        """The state afterwards."""
        state = copied(self.state, dtype)
        state.moments.slope = None
        shrink(reference, self.scores, state, spec)
        return state


def check(case, tokens, sinks=0, recent=0, order=1, slope=True):
    """Run both and compare."""
    case.forget(order, slope)
    dropped = case.state.exact.lengths > tokens
    spec = make_spec(tokens=tokens, sinks=sinks, recent=recent)
    truth, usual = (case.specified(dtype, spec) for dtype in (torch.float64, torch.float32))
    before = copied(case.state)
    with uninitialised_is_nan():
        shrink(operations, case.scores, case.state, spec)
    mine, theirs = case.state.exact, truth.exact
    lengths, moments = theirs.lengths, truth.moments
    assert torch.equal(mine.lengths, lengths)
    assert torch.equal(case.state.moments.count, moments.count)
    assert torch.equal(case.state.seen, before.seen)
    for b, h in torch.cartesian_prod(*map(torch.arange, lengths.shape)).tolist():
        held = slice(0, int(lengths[b, h]))
        by, other = mine.positions[b, h, held].argsort(), theirs.positions[b, h, held].argsort()
        for name, rows in theirs.moving().items():
            assert torch.equal(getattr(mine, name)[b, h, held][by].double(), rows[b, h, held][other].double()), name
        if not dropped[b, h]:  # then nothing has changed
            for (name, tensor), (_, old) in zip(case.state.named_tensors(), before.named_tensors()):
                index = (b, h) if tensor.dim() > 1 else b
                assert "slope" in name or torch.equal(tensor[index].nan_to_num(7), old[index].nan_to_num(7))
    for name in ("key_mean", "value_mean", "cross")[: 0 if order is None else order + 2]:
        want = getattr(moments, name)
        error, limit = (
            (getattr(m, name).double() - want).abs().amax().item() for m in (case.state.moments, usual.moments)
        )  # fmt: skip
        assert error <= 2 * limit + 3e-7 * max(1.0, want.abs().max().item()), name
    if order == 1 and slope:
        want = moments.cross / moments.count.clamp(min=1)[..., None, None]
        error = (case.state.moments.slope.double() - want).abs() / want.abs().clamp(min=1e-3)
        assert error.max().item() < 1.1e-3


SHAPES = {  # batch, heads, head_dim, slots, tokens, lengths, evicted
    "llama": (1, 2, 128, 80, 64, (80, 71), (30, 0)), "gemma": (1, 1, 256, 48, 16, (48,), (9,)),
    "gemma4": (1, 1, 512, 24, 16, (24,), (9,)), "d80": (2, 1, 80, 33, 30, (33, 31), (5, 1)),
    "d96": (1, 2, 96, 41, 31, (41, 30), (3, 3)), "ragged": (2, 2, 64, 40, 24, (0, 1, 24, 25), (0, 4, 0, 1)),
    "all": (1, 2, 64, 20, 0, (20, 3), (0, 2)), "most": (1, 1, 64, 72, 8, (72,), (2,)),
    "one-slot": (1, 1, 64, 2, 1, (2,), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", covering(SHAPES, [torch.float32, torch.float16, torch.bfloat16], together=1))
def test_evict_shapes(name, dtype):
    batch, heads, dim, slots, tokens, lengths, evicted = SHAPES[name]
    check(Case.make(batch, heads, dim, slots, dtype, lengths, evicted), tokens, sinks=1, recent=2)


def test_evict_drops_protected_tokens_last():
    check(Case.make(1, 2, 64, 40, torch.float32, (40, 36), (6, 0), scores="ties"), 20, sinks=30, recent=40)
    check(Case.make(1, 2, 64, 40, torch.float32, (40, 36), (6, 0), scores="ties"), 20, sinks=10**6, recent=0)


def test_evict_without_slope():
    check(Case.make(1, 1, 64, 30, torch.bfloat16, (30,), (6,)), 20, slope=False)


def test_evict_many_before_and_outlying_means():
    check(Case.make(1, 1, 64, 40, torch.float32, (40,), (50,), mean=20.0, count=10**6), 24)
    check(Case.make(1, 1, 64, 40, torch.float32, (40,), (0,), mean=20.0), 24)


def check_scores(case, attention, matrix, means, scale=0.2):
    """moment_scores against attention times reference.moment_residual."""
    m, slots = case.state.moments, case.state.exact
    held = slots.valid
    slope = None
    if matrix == "slope" and slots.keys.dtype != torch.float32:
        slope = (m.cross / m.count.clamp(min=1)[..., None, None]).to(slots.keys.dtype)
        m.cross = slope.float() * m.count[..., None, None]
    weight = torch.rand(held.shape).masked_fill(~held, NAN) if attention else None

    def specified(dtype):
        parts = [m.value_mean if means else None, m.cross if matrix else None]
        parts = [None if t is None else t.to(dtype) for t in parts]
        moments = Moments(m.count, None, *parts)
        residual = reference.moment_residual(slots.keys.to(dtype), slots.values.to(dtype), moments, scale)
        return torch.where(held, residual if weight is None else residual * weight, 0)

    truth, usual = specified(torch.float64), specified(torch.float32)
    known = Moments(m.count, None, m.value_mean if means else None, m.cross if matrix else None)
    known.slope = slope
    with uninitialised_is_nan():
        out = moment_scores(weight, slots.keys, slots.values, known, scale)
    out = torch.where(held, out, 0)
    limit = 2 * (usual - truth).abs().max().item() + 1e-6 * max(1.0, truth.abs().max().item())
    assert (out - truth).abs().max().item() <= limit


@pytest.mark.parametrize("name, dtype", covering(SHAPES, [torch.float32, torch.float16, torch.bfloat16], together=1))
def test_moment_scores_shapes(name, dtype):
    batch, heads, dim, slots, _, lengths, evicted = SHAPES[name]
    check_scores(Case.make(batch, heads, dim, slots, dtype, lengths, evicted), True, "slope", True)


@settings(max_examples=examples(200), deadline=None)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 2), dim=st.sampled_from([16, 48, 64, 80]), slots=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=4),
    evicted=st.lists(st.integers(0, 5), min_size=1, max_size=4), attention=st.booleans(),
    matrix=st.sampled_from([None, "cross", "slope"]), means=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_moment_scores_property(batch, heads, dim, slots, dtype, lengths, evicted, attention, matrix, means, seed):
    lengths = [min(length, slots) for length in lengths]
    check_scores(Case.make(batch, heads, dim, slots, dtype, lengths, evicted, seed=seed), attention, matrix, means)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(60), deadline=None)
@given(
    slots=st.integers(1, 40), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seen=st.lists(st.integers(0, 90), min_size=2, max_size=2), attention=st.booleans(), spare=st.integers(1, 20),
)  # fmt: skip
def test_slot_signals(slots, lengths, seen, attention, spare):
    """Bit for bit; what slots received is zero afterwards."""
    held = torch.tensor([min(lengths[i % len(lengths)], slots) for i in range(4)]).view(2, 2).int()
    positions = (uniform(2, 2, slots) * 90).int()
    state = make_state(
        torch.zeros(2, 2, slots, 16), torch.zeros(2, 2, slots, 16), held, positions,
        torch.tensor(seen), attention=uniform(2, 2, slots, seed=1) if attention else None,
    )  # fmt: skip
    spec, twin = make_spec(spare=spare, sinks=2, recent=5), copied(state)
    with uninitialised_is_nan():
        found = slot_signals.slot_signals(positions, state, spec)
    for mine, theirs in zip(found, reference.slot_signals(positions, twin, spec), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert state.exact.attention is None or not state.exact.attention.any()
