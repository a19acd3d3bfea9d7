"""Centroids in the kernels, against the fp64 reference, in the interpreter or on a GPU.

Limits are those of test_kernels_decode. Centroids are fp32 and so are their products, hence the lse is exact to fp32.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import FastKVError, ops
from fastkv.reference import Centroids

from . import states
from .conftest import examples
from .pairwise import covering
from .states import DEVICE, make_spec, make_state
from .test_kernels_decode import NAN, SCALE, Case, check, split

__all__ = ["split"]  # a fixture
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
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


@pytest.mark.parametrize("shape, dtype, means", covering(SHAPES, DTYPES, [torch.float32, torch.bfloat16], together=1))
def test_decode_with_centroids(shape, dtype, means):
    *sizes, lengths, evicted, parts = SHAPES[shape]
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
    with states.splits(splits):
        case = Case.make(*shape, groups, dim, 24, dtype, lengths, evicted, spread=spread, seed=seed, parts=parts)
        check(case, softcap, order, append, attention)


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
