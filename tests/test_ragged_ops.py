"""Decoding on slots that heads share unequally: as on equal slots, and nothing outside a head's own stretch changes."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import randn

from fastkv import ops
from fastkv.kernels._attention import _dealt
from fastkv.reference import Moments, Recovery, Selection, Slots

from .conftest import examples
from .pairwise import covering
from .states import BACKENDS, assert_same, copied, deal, in_slab, make_spec, make_state, shrink, splits
from .test_properties import SCORES, best, moments_of

HEADS, G, D, SCALE = 3, 2, 16, 0.3
UNEQUAL = [400, 500, 600, 800, 1000, 1200, 1500, 2000]  # slots of eight heads


def evicted(batch, order=1):
    """Moments of 0 to 6 tokens per head, and those tokens as [B][Hkv] lists of (key, value)."""
    keys, values = randn(batch, HEADS, 6, D), randn(batch, HEADS, 6, D)
    out = torch.arange(6) < torch.randint(0, 7, (batch, HEADS))[..., None]
    gone = [[list(zip(keys[b, h][out[b, h]], values[b, h][out[b, h]])) for h in range(HEADS)] for b in range(batch)]
    return Moments.empty(batch, HEADS, D, D, order=order).add(keys, values, out), gone


def held_in(owned, spare):
    """Random lengths that leave `spare` slots free; half of the heads are as full as that allows."""
    most = torch.tensor(owned) - spare
    return torch.where(torch.rand(most.shape) < 0.5, most, (torch.rand(most.shape) * (most + 1)).long()).int()


def layer(owned, spare, order=1, keyless=()):
    """Slots of equal heads of which each uses no more than it will own, `spare` of them free, beside slots without
    values of which each head uses up to `keyless`, if there are any."""
    batch, width = len(owned), max(map(max, owned))
    positions = torch.randint(0, 60, (batch, HEADS, width), dtype=torch.int32)
    known = torch.randint(50, 60, (batch,)), evicted(batch, order)[0]
    state = make_state(*randn(2, batch, HEADS, width, D), held_in(owned, spare), positions, *known)
    state.exact.attention = torch.rand(batch, HEADS, width)
    if keyless:
        width = max(map(max, keyless))
        positions = torch.randint(0, 60, (batch, HEADS, width), dtype=torch.int32)
        state.approx = Slots(randn(batch, HEADS, width, D), None, held_in(keyless, 0), positions)
        state.approx.attention = torch.rand(batch, HEADS, width)
        angle = torch.arange(60)[:, None] * 50.0 ** -(torch.arange(D // 2) / D * 2)
        state.recovery = Recovery(randn(HEADS, D, D) / 4, angle.cos(), angle.sin())
    return state


def token(batch):
    """A query, a key and a value."""
    return randn(batch, HEADS * G, D), randn(batch, HEADS, 1, D), randn(batch, HEADS, 1, D)


@pytest.mark.parametrize("backend, step, keyless", covering(BACKENDS, [True, False], [True, False]))
@settings(max_examples=examples(80))
@given(
    owned=st.lists(st.lists(st.integers(1, 12), min_size=HEADS, max_size=HEADS), min_size=1, max_size=2),
    order=st.sampled_from([None, 0, 1]), softcap=st.sampled_from([None, 2.0]), parts=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**31), data=st.data(),
)  # fmt: skip
def test_decoding_equals_that_on_equal_slots(backend, step, keyless, owned, order, softcap, parts, seed, data):
    """Results bit for bit, or, of kernels that deal several programs to heads, but for the order of sums; every slot of
    the slab that is not the new token's is as before, whoever owns it."""
    torch.manual_seed(seed)
    some = st.lists(st.integers(0, 9), min_size=HEADS, max_size=HEADS)
    without = data.draw(st.lists(some, min_size=len(owned), max_size=len(owned))) if keyless else []
    equal, (q, k, v) = layer(owned, int(step), keyless=without), token(len(owned))
    state, spec = in_slab(equal, owned, without), make_spec(SCALE, softcap, order, backend=backend)
    wide = copied(state)
    wide.exact.limit = wide.exact.filled = wide.exact.keys.shape[1]
    given = (q, k, v) if step else (q, None, None)
    with splits(parts):
        expected, got, unbounded = (ops.decode_step(*given, one, spec) for one in (equal, state, wide))
    error = 1e-6 if backend == "triton" and parts > 1 else 0
    same = in_slab(equal, owned, without)
    received = zip((tier.attention for tier in state.tiers.values()), (tier.attention for tier in same.tiers.values()))
    for mine, theirs in (*zip(got, expected), *received):
        torch.testing.assert_close(mine, theirs, atol=error, rtol=error, equal_nan=True)
    torch.testing.assert_close(unbounded[0], got[0], atol=1e-5, rtol=1e-5)
    assert_same(state, same, but=["exact.attention", "approx.attention"])


@triton.jit
def _deal_kernel(starts_ptr, found_ptr, HEADS: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr):
    for program in range(-HEADS, HEADS * SPLITS):  # the first ask about a head each
        head, first, count = _dealt(starts_ptr, 0, tl.maximum(program, -1), program + HEADS, SPLITS, HEADS, MOST)
        place = found_ptr + (program + HEADS) * 3
        tl.store(place, head)
        tl.store(place + 1, first)
        tl.store(place + 2, count)


@settings(max_examples=examples(100))
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=9), splits=st.integers(2, 9), more=st.integers(1, 4))
@example(sizes=UNEQUAL, splits=3, more=4)
def test_programs_are_dealt_by_slots(sizes, splits, more):
    """Each works for one head, every head has at least one, and shares are as short as the programs suffice for."""
    heads, starts = len(sizes), deal([sizes])[0]
    most, programs = more * splits, heads * splits
    found = torch.full((heads + programs, 3), -7, dtype=torch.int32)
    _deal_kernel[(1,)](starts, found, heads, splits, most)
    asked, dealt = found[:heads], found[heads:]
    firsts, counts = asked[:, 1].tolist(), asked[:, 2].tolist()
    assert asked[:, 0].tolist() == list(range(heads)) and firsts == [sum(counts[:head]) for head in range(heads)]
    owners = [head for head, count in enumerate(counts) for _ in range(count)]
    assert dealt[:, 0].tolist() == owners + [heads] * (programs - len(owners))
    assert min(counts) >= 1 and max(counts) <= most
    assert dealt[: len(owners), 1:].tolist() == [[firsts[head], counts[head]] for head in owners]
    longest = max(-(-size // count) for size, count in zip(sizes, counts))
    assert longest <= max(-(-sum(sizes) // (programs - heads)), -(-max(sizes) // most), 1)
    if sizes == UNEQUAL:
        assert longest == 400 and len(owners) == 22  # with shares of 399 slots there would be 26, but there are 24


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_head_stores_nothing(backend):
    starts, size = deal([[4, 2, 3], [1, 5, 2]])
    lengths = torch.tensor([[4, 2, 1], [1, 0, 2]], dtype=torch.int32)
    slabs = [randn(2, size, D), randn(2, size, D), torch.randint(0, 9, (2, size), dtype=torch.int32)]
    before = [t.clone() for t in slabs]
    q, k, v = randn(2, HEADS * G, D), randn(2, HEADS, 1, D), randn(2, HEADS, 1, D)
    moments, seen = Moments(torch.tensor([[7, 9, 10], [10, 11, 9]])), torch.tensor([11, 11])
    state = make_state(*slabs[:2], lengths, slabs[2], seen, moments, starts=starts, limit=5)
    ops.decode_step(q, k, v, state, make_spec(SCALE, backend=backend))
    for b, h, slot in ((0, 2, 7), (1, 1, 1)):
        before[0][b, slot], before[1][b, slot], before[2][b, slot] = k[b, h, 0], v[b, h, 0], 11
    assert all(map(torch.equal, slabs, before))
    assert lengths.tolist() == [[4, 2, 2], [1, 1, 2]] and seen.tolist() == [12, 12]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [None, 1])
def test_a_first_block_fills_empty_stretches(backend, order):
    """Tokens that stay lie in order from where their head begins; the rest is forgotten, but for moments."""
    capacities, num = [[9, 3, 20], [5, 30, 4]], 33
    starts, size = deal(capacities)
    keys, values = randn(2, HEADS, num, D), randn(2, HEADS, num, D)
    valid = (torch.rand(2, num) < 0.9)[:, None].repeat(1, HEADS, 1)
    ranks = torch.where(valid, torch.rand(2, HEADS, num), 2).argsort(-1).argsort(-1)
    counts = torch.minimum(torch.tensor(capacities) - 1, valid.sum(-1))
    kept, places = ranks < counts[..., None], torch.arange(num, dtype=torch.int32).repeat(2, HEADS, 1)
    known, seven = torch.rand(2, HEADS, num), partial(torch.full, fill_value=7)
    moments = Moments.empty(2, HEADS, D, D, order=order) if order else None
    state = make_state(
        seven((2, size, D), dtype=torch.float32), seven((2, size, D), dtype=torch.float32),
        torch.zeros(2, HEADS, dtype=torch.int32), seven((2, size), dtype=torch.int32), moments=moments, starts=starts,
        attention=seven((2, size), dtype=torch.float32), limit=30,
    )  # fmt: skip
    state.exact.memory, state.exact.filled = seven((2, size), dtype=torch.float32), 0
    chosen = Selection(kept, counts)
    ops.compact(valid, chosen, (keys, values, places), known, state, make_spec(order=order, backend=backend))
    slots = state.exact
    assert torch.equal(slots.lengths, counts.int()) and torch.equal(state.seen, valid[:, 0].sum(-1))
    assert torch.equal(state.moments.count, (valid & ~kept).sum(-1)) and not slots.attention.any()
    for row, head in itertools.product(range(2), range(HEADS)):
        own, first = kept[row, head], int(starts[row, head])
        used, rest = slice(first, first + int(own.sum())), slice(first + int(own.sum()), int(starts[row, head + 1]))
        for stored, told in zip(
            (slots.keys, slots.values, slots.positions, slots.memory), (keys, values, places, known), strict=True
        ):
            assert torch.equal(stored[row, used], told[row, head, own])
        assert not slots.memory[row, rest].any()
        if order:
            gone = valid[row, head] & ~own
            torch.testing.assert_close(state.moments.key_mean[row, head], keys[row, head, gone].mean(0))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(120))
@given(
    owned=st.lists(st.lists(st.integers(1, 30), min_size=HEADS, max_size=HEADS), min_size=1, max_size=2),
    slab=st.booleans(), drop=st.integers(0, 20), wide=st.integers(0, 9), sinks=st.integers(0, 3),
    recent=st.integers(0, 6), order=st.sampled_from([None, 0, 1]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_evict_conserves_every_token(backend, owned, slab, drop, wide, sinks, recent, order, seed):
    """The best of each stay, so many below what it owns or, of equal heads, all slots; the others join the moments."""
    torch.manual_seed(seed)
    batch, most = len(owned), max(map(max, owned))
    span = most + 20
    equal = layer(owned, 0)
    equal.seen, (equal.moments, gone) = torch.full((batch,), span), evicted(batch, order)
    equal.exact.positions = torch.rand(batch, HEADS, span).argsort(-1)[..., :most].int()
    equal.exact.attention = None
    state = in_slab(equal, owned) if slab else copied(equal)
    before, width = copied(state), int(equal.exact.lengths.max()) + wide if slab else most
    scores = torch.tensor(SCORES)[torch.randint(0, len(SCORES), (batch, HEADS, max(width, 1)))]
    spec = make_spec(backend=backend, tokens=max(most - drop, 0), spare=drop, sinks=sinks, recent=recent)
    shrink(ops, scores, state, spec)
    names = ("positions", "keys", "values")
    stored = [dict(zip(names, one.exact.stored(*names))) for one in (equal, state)]
    for b, h in ((b, h) for b in range(batch) for h in range(HEADS)):
        was, now = ({name: rows[b, h] for name, rows in one.items()} for one in stored)
        places = was["positions"][: int(before.exact.lengths[b, h])].tolist()
        guarded = [place < sinks or place >= span - recent for place in places]
        room = owned[b][h] if slab else most
        stay = best([*zip(guarded, scores[b, h].tolist(), places, range(most))], max(room - drop, 0))
        left = [(was["keys"][i], was["values"][i]) for i in range(len(places)) if i not in stay]
        assert int(state.exact.lengths[b, h]) == len(stay)
        order_now, order_was = now["positions"][: len(stay)].argsort(), sorted(stay, key=lambda i: places[i])
        assert all(torch.equal(now[name][order_now], was[name][order_was]) for name in names)
        count, *exact = moments_of(gone[b][h] + left)
        assert int(state.moments.count[b, h]) == count
        for name, want in zip(("key_mean", "value_mean", "cross"), exact[: 0 if order is None else order + 2]):
            mine = getattr(state.moments, name)[b, h].double()
            torch.testing.assert_close(mine, want.expand_as(mine), atol=1e-5, rtol=1e-5)
    if slab and backend == "triton":  # what nobody owns
        for name in names:
            for mine, theirs, end in zip(getattr(state.exact, name), getattr(before.exact, name), state.exact.starts):
                assert torch.equal(mine[end[-1] :], theirs[end[-1] :])
