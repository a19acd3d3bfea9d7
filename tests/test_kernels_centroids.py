"""Centroids and the cosh mass in the kernels, against the fp64 reference, in the interpreter or on a GPU.

Limits are those of test_kernels_decode. Centroids are fp32 and so are their products, hence the lse is exact to fp32.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import FastKVError, ops, reference
from fastkv.kernels import compact as compact_module
from fastkv.reference import Centroids, Moments

from . import states
from .conftest import examples
from .pairwise import covering
from .states import DEVICE, copied, make_spec, make_state
from .test_kernels_decode import NAN, SCALE, SLACK, Case, check, poisoned, split

__all__ = ["poisoned", "split"]  # fixtures
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {  # batch, KV heads, groups, head_dim, slots, lengths, evicted, centroids
    "llama": (1, 2, 4, 128, 40, (39, 7), (60, 5), 17),
    "gemma": (1, 1, 2, 256, 34, (33,), (40,), 8),
    "mha80": (1, 1, 1, 80, 70, (69,), (9,), 33),
    "group7": (1, 1, 7, 64, 20, (19,), (64,), 1),
    "group16": (1, 1, 16, 128, 20, (17,), (30,), 16),
    "few-and-none": (2, 2, 4, 64, 20, (0, 1, 5, 19), (0, 4, 0, 1), 4),
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def double(centroids):
    return Centroids(*(t.double() for t in centroids.tensors()))


@pytest.mark.parametrize("means", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_with_centroids(shape, dtype, means):
    *sizes, lengths, evicted, parts = shape
    check(Case.make(*sizes, dtype, lengths, evicted, parts=parts, means=means))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("append", [True, False], ids=["append", "stored"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "cap"])
def test_decode_variants_with_centroids(split, softcap, append, splits):
    split(splits)
    case = Case.make(2, 2, 3, 64, 24, torch.float32, (23, 0, 1, 14), (0, 0, 7, 70), parts=6)
    check(case, softcap, None, append, attention=True)


def test_centroids_are_slots_with_a_bias():
    """The formula written out, against the kernel alone: one head, one query, float64."""
    case = Case.make(1, 1, 1, 64, 20, torch.float32, (9,), (30,), parts=5)
    c, slots = double(case.state.parts), case.state.exact
    q, keys, values = (t.double() for t in (case.q[0, 0], slots.keys[0, 0, :9], slots.values[0, 0, :9]))
    deviation = SCALE * q.norm() * (c.spread / c.count)[0, 0].sqrt()
    biased = SCALE * (c.keys[0, 0] @ q) + c.count[0, 0].log() + deviation.cosh().log()
    logits = torch.cat([SCALE * (keys @ q), biased])
    expected = logits.softmax(0) @ torch.cat([values, c.values[0, 0]])
    out, retained, evicted, _ = case.kernel(append=False)
    torch.testing.assert_close(out[0, 0].double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(retained[0, 0].double(), logits[:9].logsumexp(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evicted[0, 0].double(), biased.logsumexp(0), atol=1e-5, rtol=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    groups=st.integers(1, 16),
    dim=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    evicted=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    parts=st.sampled_from([None, 1, 3, 18]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    order=st.sampled_from([None, 0, 1]),
    splits=st.sampled_from([1, 2]),
    append=st.booleans(),
    attention=st.booleans(),
    spread=st.sampled_from([0.0, 1e-5, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_decode_with_any_estimate(
    shape, groups, dim, dtype, lengths, evicted, parts, softcap, order, splits, append, attention, spread, seed
):
    what = {"cosh": True} if parts is None else {"parts": parts}
    with states.splits(splits):
        case = Case.make(*shape, groups, dim, 24, dtype, lengths, evicted, spread=spread, seed=seed, **what)
        check(case, softcap, order, append, attention)


@pytest.mark.parametrize("dim, dtype", covering([64, 128, 256], DTYPES, together=1))
def test_decode_with_the_cosh_mass(dim, dtype):
    check(Case.make(1, 2, 4, dim, 24, dtype, (20, 3), (50, 0), cosh=True))


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-2, 1.0, 1e3, 5e4])
def test_the_cosh_mass_is_stable(size):
    """Deviations of the logits from 0 to 1e5: no infinity, no 0 / 0; a small one has the value of Jensen's mass."""
    case = Case.make(1, 2, 4, 64, 24, torch.float32, (20, 3), (50, 9), cosh=True, spread=size)
    out, _, evicted, _ = check(case.copy())
    assert out.isfinite().all() and evicted.isfinite().all()
    case.state.moments.spread = None
    jensen = case.kernel()
    assert (evicted >= jensen[2] - 1e-5 * jensen[2].abs()).all()
    assert torch.allclose(out, jensen[0], atol=1e-6) == (size <= 1e-6)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dim,dtype", [(48, torch.float32), (64, torch.bfloat16), (128, torch.float16)], ids=str)
def test_evict_merges_the_spread(dim, dtype, order):
    """Two evictions in a row, the second of one head only, against the moments of all that left, in float64."""
    slots, first, second = 40, 21, 3
    keys, values = normal(1, 2, slots, dim, dtype=dtype) + 2, normal(1, 2, slots, dim, seed=1, dtype=dtype)
    moments = Moments.empty(1, 2, dim, dim, DEVICE, order=order, spread=True)
    positions = torch.arange(slots, dtype=torch.int32, device=DEVICE).repeat(1, 2, 1)
    lengths = torch.tensor([[slots, slots - first + 2]], dtype=torch.int32, device=DEVICE)
    seen, before = torch.tensor([slots], device=DEVICE), keys.double()
    state = make_state(keys, values, lengths, positions, seen, moments)
    for tokens in (slots - first, slots - first - second):
        ops.evict(positions.float(), None, state, make_spec(backend="triton", tokens=tokens))  # the oldest go
    for head, gone in enumerate((first + second, 2 + second)):
        away = (before[0, head, :gone] - before[0, head, :gone].mean(0)).square().sum(0)
        expected = away.mean(0, keepdim=True)
        assert moments.count[0, head] == gone
        torch.testing.assert_close(moments.spread[0, head].double(), expected, atol=1e-5, rtol=2e-6)


@pytest.mark.parametrize("rows", [16, 2048], ids=["splits", "one launch"])
@pytest.mark.parametrize("order", [0, 1])
def test_compact_merges_the_spread(monkeypatch, order, rows):
    monkeypatch.setattr(compact_module, "ROWS_PER_SPLIT", rows)
    dim, slots, new = 48, 30, 50
    pairs = [normal(2, 2, n, dim, seed=n + s) + 3 for n in (slots, new) for s in (0, 1)]
    old = normal(2, 2, 9, dim, seed=5) - 1, normal(2, 2, 9, dim, seed=6)
    moments = Moments.empty(2, 2, dim, dim, DEVICE, order=order, spread=True).add(*old)
    positions = torch.arange(slots + new, dtype=torch.int32, device=DEVICE).repeat(2, 2, 1)
    valid = torch.rand(2, 2, slots + new, device=DEVICE) > 0.1
    valid[0, 1] = False  # nothing leaves
    chosen = reference.select(normal(2, 2, slots + new, seed=7), positions, valid, positions < 2, 12)
    gone = valid & ~chosen.kept
    everything = [torch.cat([pairs[i], pairs[i + 2]], 2).double() for i in (0, 1)]
    expected = Moments.empty(2, 2, dim, dim, DEVICE, torch.float64, order, True)
    expected = expected.add(*(t.double() for t in old)).add(*everything, gone)
    lengths = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    state = make_state(*pairs[:2], lengths, positions[:, :, :slots].clone(), moments=moments)
    ops.compact(valid, chosen, (*pairs[2:], positions[:, :, slots:]), state, make_spec(backend="triton"))
    for got, want in zip(moments.tensors(), expected.tensors()):
        torch.testing.assert_close(got.double(), want.double(), atol=1e-4, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order,softcap", [(0, None), (1, None), (1, 2.0)])
def test_prompt_blocks_with_the_cosh_mass(order, softcap, dtype):
    dim, new = 64, 21
    rows = [normal(1, 2, n, dim, seed=n, dtype=dtype) for n in (30, 31, new, new + 1)]
    q = normal(1, 6, new, dim, seed=2, dtype=dtype)
    lengths = torch.tensor([[30, 3]], dtype=torch.int32, device=DEVICE)
    gone = torch.arange(40, device=DEVICE) < torch.tensor([[[40], [0]]], device=DEVICE)
    old = normal(1, 2, 40, dim, seed=8) + 0.3, normal(1, 2, 40, dim, seed=9)
    moments = Moments.empty(1, 2, dim, dim, DEVICE, spread=True).add(*old, gone)
    valid = torch.ones(1, new, dtype=torch.bool, device=DEVICE)
    state = make_state(rows[0], rows[1][:, :, :30].contiguous(), lengths, moments=moments)
    block, spec = (q, rows[2], rows[3][:, :, :new]), make_spec(SCALE, softcap, order, backend="triton")
    wide = copied(state, torch.float64)
    truth = reference.prefill_attention(*(one.double() for one in block), valid, wide, spec)
    usual = reference.prefill_attention(*block, valid, state, spec)
    got = ops.prefill_attention(*block, valid, state, spec)
    for mine, want, same, slack in zip(got, truth, usual, (SLACK[dtype], *[SLACK[torch.float32]] * 2), strict=True):
        empty = want == -torch.inf
        assert torch.equal(mine == -torch.inf, empty)
        mine, want, same = (one.double().masked_fill(empty, 0.0) for one in (mine, want, same))
        limit = 2 * (same - want).abs().max() + slack * want.abs().max().clamp(min=1)
        assert (mine - want).abs().max() <= limit


def test_tokens_join_in_place():
    pairs = normal(1, 2, 30, 16), normal(1, 2, 30, 16, seed=1)
    inside = torch.rand(1, 2, 30, device=DEVICE) > 0.3
    parts = Centroids.empty(1, 2, 4, 16, 16, DEVICE)
    expected = parts.add(*pairs, inside)
    addresses = [t.data_ptr() for t in parts.tensors()]
    lengths = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    state = make_state(*(rows[:, :, :0] for rows in pairs), lengths, parts=parts)
    places = torch.arange(30, dtype=torch.int32, device=DEVICE).repeat(1, 2, 1)
    ops.remember(*pairs, places, inside, torch.zeros_like(inside), 30, state, make_spec(correction="centroids"))
    assert addresses == [t.data_ptr() for t in parts.tensors()]
    for got, want in zip(parts.tensors(), expected.tensors()):
        assert torch.allclose(got, want, rtol=0, atol=1e-6)  # sums of another order


def test_wrong_centroids_are_refused():
    case = Case.make(1, 2, 4, 64, 20, torch.float32, (5, 6), (1, 1), parts=3)
    centroids = case.state.parts
    centroids.keys = centroids.keys.half()
    with pytest.raises(FastKVError, match="means in bfloat16 or float32 and the rest in float32"):
        case.kernel()
    centroids.keys = torch.full((1, 2, 3, 32), NAN, device=DEVICE)
    with pytest.raises(FastKVError, match=r"centroids\.keys must have shape"):
        case.kernel()
