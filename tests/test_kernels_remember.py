"""Evicted tokens join centroids in kernels: the same merges as `Centroids.add` makes, in the interpreter or on a GPU.

Sizes must be equal: they say which merges were made. Means and spreads may differ from those in float64 by rounding.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import ops, reference
from fastkv.kernels import remember as module
from fastkv.reference import Centroids

from .conftest import examples
from .models import raises
from .pairwise import covering
from .states import make_spec, make_state, randn, uninitialised_is_nan

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
normal = partial(randn, dtype=torch.float32)


def candidates(batch, heads, num, dim, leave, dtype=torch.float32, seed=0):
    """Keys, values, positions, valid and kept of `num`, of which `leave` (cycled) leave a head; the others are NaN."""
    source = torch.Generator().manual_seed(seed)
    keys = normal(batch, heads, num, dim, seed=seed, dtype=dtype) + 1
    values = normal(batch, heads, num, dim, seed=seed + 1, dtype=dtype)
    positions = torch.stack([torch.randperm(num, generator=source) for _ in range(batch * heads)])
    gone = torch.zeros(batch * heads, num, dtype=torch.bool)
    for pair in range(batch * heads):
        gone[pair, torch.randperm(num, generator=source)[: leave[pair % len(leave)]]] = True
    valid = gone | (torch.rand(batch * heads, num, generator=source) > 0.2)
    gone, valid = (mask.view(batch, heads, num) for mask in (gone, valid))
    keys[~gone], values[~gone] = NAN, NAN
    return keys, values, positions.view(batch, heads, num).int(), valid, valid & ~gone


def parts_of(batch, heads, num, dim, before, seed=5, means=torch.float32):
    """Centroids of `before` tokens."""
    made = Centroids.empty(batch, heads, num, dim, dim, dtype=means)
    return made.add(normal(batch, heads, before, dim, seed=seed) + 1, normal(batch, heads, before, dim, seed=seed + 1))


def joined(backend, parts, tokens, most):
    """The centroids afterwards; the given ones stay as they are."""
    parts = copy.deepcopy(parts)
    keys, values = tokens[:2]
    state = make_state(keys[:, :, :0], values[:, :, :0], torch.zeros(keys.shape[:2], dtype=torch.int32), parts=parts)
    with uninitialised_is_nan():
        ops.remember(*tokens, most, state, make_spec(correction="centroids", backend=backend))
    return parts


def check(parts, tokens, most):
    """The kernels against the reference in float64."""
    got = joined("triton", parts, tokens, most)
    wide = Centroids(*(t.double() for t in parts.tensors()))
    want = joined("reference", wide, (tokens[0].double(), tokens[1].double(), *tokens[2:]), most)
    assert torch.equal(got.count.double(), want.count)
    for mine, theirs in zip(got.tensors(), want.tensors()):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-6, rtol=3e-6)
    return got


@pytest.mark.parametrize("dim, dtype", covering([64, 80, 96, 128, 256], DTYPES, together=1))
def test_an_eviction(dim, dtype):
    check(parts_of(1, 1, 31, dim, 40), candidates(1, 1, 50, dim, (16,), dtype), 16)


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]), num=st.sampled_from([1, 4, 7, 15, 31, 40]),
    before=st.integers(0, 90), leave=st.lists(st.integers(0, 64), min_size=1, max_size=2),
    dim=st.sampled_from([16, 48, 80]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_eviction(shape, num, before, leave, dim, dtype, seed):
    """Empty heads, fewer tokens than centroids, rounds of one merge, one centroid."""
    tokens = candidates(*shape, 70, dim, leave, dtype, seed)
    check(parts_of(*shape, num, dim, before, seed + 1), tokens, max(leave))  # else tokens repeat parts, and joins tie


@pytest.mark.parametrize("few", [0, 64], ids=["as of a prompt", "as while decoding"])
def test_both_ways_to_join(monkeypatch, few):
    monkeypatch.setattr(module, "FEW", few)
    for leave, before in (((50, 7), 20), ((64, 0), 0)):
        check(parts_of(1, 2, 5, 48, before), candidates(1, 2, 90, 48, leave), 64)


def test_tokens_that_are_close_to_each_other(monkeypatch):
    """And far from their centre: which are closest is seen in the last bits of their products only."""
    monkeypatch.setattr(module, "FEW", 0)
    keys, values, *rest = candidates(1, 1, 70, 64, (66,))
    side = 1 - 2 * (torch.arange(70) % 2)[None, None, :, None]
    keys, values = (side * normal(64, seed=seed) + 0.03 * rows for seed, rows in enumerate((keys, values)))
    check(parts_of(1, 1, 9, 64, 0), (keys, values, *rest), 66)


def test_rounds_become_finer():
    """A head has so many centroids that a quarter of them join first, the other one few."""
    check(parts_of(1, 2, 110, 16, 220), candidates(1, 2, 320, 16, (230, 20)), 230)


@pytest.mark.parametrize("num, leave", [(5, (257, 256)), (5, (420, 0)), (140, (360, 281))])
def test_many_tokens_become_means_of_those_around_seeds(num, leave):
    """One head's tokens do, another's are few enough, or none."""
    total = max(leave)
    check(parts_of(1, 2, num, 16, 2 * num), candidates(1, 2, total + 20, 16, leave), total)


def test_seeds_that_are_alike_stay_apart(monkeypatch):
    """All tokens are the same: they choose the oldest seed, but seeds themselves. Then none is joined to another."""
    monkeypatch.setattr(reference.centroids, "SEEDS", 1)
    monkeypatch.setattr(reference.centroids, "ROOMY", 1)
    keys, values, *rest = candidates(1, 1, 90, 16, (80,))
    made = check(parts_of(1, 1, 16, 16, 0), (torch.ones_like(keys), torch.ones_like(values), *rest), 80)
    assert made.count[0, 0].tolist() == [65] + [1] * 15


def test_the_second_choice_is_among_means(monkeypatch):
    """Of ten tokens a part, so that most means are far from their seed."""
    monkeypatch.setattr(reference.centroids, "SEEDS", 16)
    check(parts_of(1, 2, 9, 16, 4), candidates(1, 2, 180, 16, (160, 90)), 160)


@pytest.mark.parametrize("block, shape, dim, leave", [(64, (1, 2), 32, (130, 65)), (300, (2, 1), 16, (390, 301))])
def test_seeds_of_blocks_of_a_prompt(block, shape, dim, leave, monkeypatch):
    """Of the second block of 300 tokens one head has no seeds, of the other's it keeps all tokens."""
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(reference.centroids, "BLOCK", block)
    check(parts_of(*shape, 9, dim, 4), candidates(*shape, leave[0] + 10, dim, leave, torch.bfloat16), leave[0])


@pytest.mark.parametrize("few", [0, 64], ids=["as of a prompt", "as while decoding"])
def test_means_in_bfloat16(monkeypatch, few):
    """They are those in fp32, rounded by the reference's rule: the same bits where fp32 agrees on the last of them."""
    monkeypatch.setattr(module, "FEW", few)
    parts = parts_of(1, 2, 9, 80, 200, means=torch.bfloat16)
    tokens = candidates(1, 2, 90, 80, (50, 7), torch.bfloat16)
    wide = Centroids(*(t.float() for t in parts.tensors()))
    got = joined("triton", parts, tokens, 64)
    want = joined("triton", wide, tokens, 64).rounded(torch.bfloat16)
    assert got.keys.dtype == got.values.dtype == torch.bfloat16
    assert all(map(torch.equal, got.tensors(), want.tensors()))
    plain = joined("reference", parts, tokens, 64)
    assert torch.equal(got.count, plain.count)
    for mine, theirs in ((got.keys, plain.keys), (got.values, plain.values)):
        assert ((mine - theirs).abs() <= 2**-7 * theirs.abs() + 1e-6).all()
        assert (mine == theirs).float().mean() > 0.99


@pytest.mark.parametrize("most", [16, 65], ids=["while decoding", "of a prompt"])
def test_equal_costs_go_to_the_older(most):
    """One round of tokens that occur four times each, twice in either half: every mover has two offers of no cost.

    Exactly, also on tensor cores: means are 0 and standard deviations 2."""
    keys, values = (torch.zeros(1, 12, 16, 16) for _ in range(2))
    kinds = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [-1, 1, -1, 1]])
    for head in range(12):
        for half in (0, 1):
            keys[0, head, half::2, 3:7] = kinds[torch.randperm(8) % 4]
    places = torch.arange(16, dtype=torch.int32).repeat(1, 12, 1)
    every = torch.ones(1, 12, 16, dtype=torch.bool)
    parts, tokens = Centroids.empty(1, 12, 12, 16, 16), (keys, values, places, every, ~every)
    want, got = joined("reference", parts, tokens, most), joined("triton", parts, tokens, most)
    assert all(map(torch.equal, got.tensors(), want.tensors()))


@pytest.mark.parametrize("most", [30, 65], ids=["while decoding", "of a prompt"])
def test_always_the_same_bits(most):
    parts, tokens = parts_of(1, 2, 6, 32, 15), candidates(1, 2, 70, 32, (30, 11), torch.bfloat16)
    first, second = (joined("triton", parts, tokens, most) for _ in range(2))
    alone = Centroids(*(t[:, 1:].contiguous() for t in parts.tensors()))
    own = joined("triton", alone, tuple(t[:, 1:].contiguous() for t in tokens), most)
    for one, same, mine in zip(first.tensors(), second.tensors(), own.tensors()):
        assert torch.equal(one, same) and torch.equal(one[:, 1:], mine)


def test_rows_of_a_block_lie_anywhere():
    """Candidates as the model's projections leave them: heads side by side."""
    tokens = candidates(1, 2, 30, 32, (20, 9))
    apart = tuple(rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in tokens[:2])
    places = tokens[2][:, :1].expand(1, 2, 30)
    parts = parts_of(1, 2, 5, 32, 9)
    for most in (20, 70):
        want = joined("triton", parts, (*tokens[:2], places.contiguous(), *tokens[3:]), most)
        got = joined("triton", parts, (*apart, places, *tokens[3:]), most)
        assert all(map(torch.equal, got.tensors(), want.tensors()))


def test_what_does_not_fit_is_refused():
    tokens = candidates(1, 2, 30, 32, (20, 9))
    raises(r"centroids\.keys must have shape", joined, "triton", parts_of(1, 2, 5, 16, 9), tokens, 20)
    raises("kept must have shape", joined, "triton", parts_of(1, 2, 5, 32, 9), (*tokens[:4], tokens[4][..., :29]), 20)
