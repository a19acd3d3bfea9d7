"""Decoding on slots that heads share unequally: as on equal slots, and nothing outside a head's own stretch changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import FastKVError, ops
from fastkv.kernels import evict as evict_kernel
from fastkv.reference import LayerState, Moments, Recovery, Slots

from .conftest import examples
from .pairwise import covering
from .states import BACKENDS, assert_same, copied, make_spec, make_state, splits

HEADS, G, D, SCALE = 3, 2, 16, 0.3
EXACTLY = dict(atol=0, rtol=0)
GAP = 5  # slots of a slab that no head owns
F64 = torch.float64


def normal(*shape):
    return torch.randn(*shape)


def deal(capacities):
    """starts [B, Hkv + 1] int32 and the size of the slab, for capacities [B][Hkv]."""
    owned = torch.tensor(capacities)
    starts = torch.cat([torch.zeros(len(owned), 1, dtype=torch.long), owned.cumsum(1)], 1)
    return starts.int(), int(starts.max()) + GAP


def stretches(starts):
    """(sequence, head, first slot, end) of every head."""
    for b, row in enumerate(starts.tolist()):
        for h in range(len(row) - 1):
            yield b, h, row[h], row[h + 1]


def slab_of(rows, starts, size):
    """A slab whose heads own the first rows of rows [B, Hkv, N, ...]; what nobody owns is -7."""
    slab = torch.full((len(rows), size, *rows.shape[3:]), -7, dtype=rows.dtype)
    for b, h, first, end in stretches(starts):
        slab[b, first:end] = rows[b, h, : end - first]
    return slab


def evicted(batch, order=1):
    """Moments of 0 to 6 tokens per head, and those tokens."""
    keys, values = normal(batch, HEADS, 6, D), normal(batch, HEADS, 6, D)
    gone = torch.arange(6) < torch.randint(0, 7, (batch, HEADS))[..., None]
    return Moments.empty(batch, HEADS, D, D, order=order).add(keys, values, gone), (keys, values, gone)


def full_rows(batch, width):
    return [normal(batch, HEADS, width, D), normal(batch, HEADS, width, D)]


capacities = st.lists(st.lists(st.integers(1, 12), min_size=HEADS, max_size=HEADS), min_size=1, max_size=2)
common = dict(
    owned=capacities,
    order=st.sampled_from([None, 0, 1]),
    softcap=st.sampled_from([None, 2.0]),
    parts=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**31),
)


def held_in(owned, spare):
    """Random lengths that leave `spare` slots free; half of the heads are as full as that allows."""
    most = torch.tensor(owned) - spare
    return torch.where(torch.rand(most.shape) < 0.5, most, (torch.rand(most.shape) * (most + 1)).long()).int()


@pytest.mark.parametrize("step", [True, False], ids=["step", "attention"])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(40))
@given(**common)
def test_decoding_equals_that_on_equal_slots(backend, step, owned, order, softcap, parts, seed):
    """Results bit for bit, or, of kernels that deal several programs to heads, but for the order of sums; every slot of
    the slab that is not the new token's is as before."""
    torch.manual_seed(seed)
    batch, width = len(owned), max(map(max, owned))
    starts, size = deal(owned)
    keys, values = full_rows(batch, width)
    positions = torch.randint(0, 99, (batch, HEADS, width), dtype=torch.int32)
    received = torch.rand(batch, HEADS, width)
    lengths = held_in(owned, int(step))
    moments, _ = evicted(batch)
    seen = torch.randint(50, 90, (batch,))
    q, k, v = normal(batch, HEADS * G, D), normal(batch, HEADS, 1, D), normal(batch, HEADS, 1, D)

    def run(state):
        spec = make_spec(SCALE, softcap, order, backend=backend)
        return ops.decode_step(q, *((k, v) if step else (None, None)), state, spec)

    known = seen, moments
    equal = make_state(keys, values, lengths, positions, *known, attention=received)
    slabs = [slab_of(t, starts, size) for t in (keys, values, positions, received)]
    ragged = dict(starts=starts, attention=slabs[3])
    state = make_state(*slabs[:2], lengths, slabs[2], *known, **ragged, limit=width)
    equal, state, wide = copied(equal), copied(state), copied(state)
    wide.exact.limit = wide.exact.filled = size
    with splits(parts):
        expected, got, unbounded = run(equal), run(state), run(wide)
    collected = state.exact.attention, slab_of(equal.exact.attention, starts, size)
    error = 1e-6 if backend == "triton" and parts > 1 else 0
    for mine, theirs in (*zip(got, expected), collected):
        torch.testing.assert_close(mine, theirs, atol=error, rtol=error, equal_nan=True)
    torch.testing.assert_close(unbounded[0], got[0], atol=1e-5, rtol=1e-5)
    for name in ("keys", "values", "positions"):
        assert torch.equal(getattr(state.exact, name), slab_of(getattr(equal.exact, name), starts, size))
    assert torch.equal(state.exact.lengths, equal.exact.lengths) and torch.equal(state.seen, equal.seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_head_stores_nothing(backend):
    starts, size = deal([[4, 2, 3], [1, 5, 2]])
    lengths = torch.tensor([[4, 2, 1], [1, 0, 2]], dtype=torch.int32)
    slabs = [normal(2, size, D), normal(2, size, D), torch.randint(0, 9, (2, size), dtype=torch.int32)]
    before = [t.clone() for t in slabs]
    q, k, v = normal(2, HEADS * G, D), normal(2, HEADS, 1, D), normal(2, HEADS, 1, D)
    moments, seen = Moments(torch.tensor([[7, 9, 10], [10, 11, 9]])), torch.tensor([11, 11])
    state = make_state(*slabs[:2], lengths, slabs[2], seen, moments, starts=starts, limit=5)
    ops.decode_step(q, k, v, state, make_spec(SCALE, backend=backend))
    for b, h, slot in ((0, 2, 7), (1, 1, 1)):
        before[0][b, slot], before[1][b, slot], before[2][b, slot] = k[b, h, 0], v[b, h, 0], 11
    for now, then in zip(slabs, before):
        assert torch.equal(now, then)
    assert lengths.tolist() == [[4, 2, 2], [1, 1, 2]]
    assert seen.tolist() == [12, 12]


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_share_scratch(backend):
    """Several steps with one scratch equal those without; the first tokens go into empty heads."""
    starts, size = deal([[7, 6, 80], [6, 70, 6]])
    moments, _ = evicted(2)
    q = normal(2, HEADS * G, D)
    token = [normal(2, HEADS, 1, D), normal(2, HEADS, 1, D)]
    slabs = [normal(2, size, D), normal(2, size, D), torch.zeros(2, size, dtype=torch.int32)]
    lengths = torch.tensor([[0, 0, 70], [0, 60, 0]], dtype=torch.int32)
    state = make_state(*slabs[:2], lengths, slabs[2], torch.tensor([75, 75]), moments, starts=starts, limit=80)
    state.exact.attention = torch.zeros(2, size)
    spec = make_spec(SCALE, order=1, backend=backend)
    with splits(4):
        scratch = ops.workspace(HEADS * G, state, spec)
    assert len(scratch) == (5 if backend == "triton" else 0)
    runs = []
    for room in (scratch, []):
        run, outs = copied(state), []
        run.scratch = room
        for _ in range(4):
            with splits(4):
                outs += ops.decode_step(q, *token, run, spec)
        runs.append((*outs, *(tensor for _, tensor in run.named_tensors())))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    if scratch:
        assert not scratch[3].any()


def brute_moments(old, gone):
    """count, means and cross moment of two lists of (key, value), in float64."""
    keys, values = (torch.cat([a.double(), b.double()]) for a, b in zip(old, gone))
    if not len(keys):
        return 0, torch.zeros(D, dtype=F64), torch.zeros(D, dtype=F64), torch.zeros(D, D, dtype=F64)
    key_mean, value_mean = keys.mean(0), values.mean(0)
    return len(keys), key_mean, value_mean, (keys - key_mean).T @ (values - value_mean)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(60))
@given(
    owned=st.lists(st.lists(st.integers(1, 30), min_size=HEADS, max_size=HEADS), min_size=1, max_size=2),
    drop=st.integers(0, 20),
    wide=st.integers(0, 9),
    sinks=st.integers(0, 3),
    recent=st.integers(0, 6),
    scan=st.sampled_from([16, 2048]),
    ties=st.booleans(),
    order=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 2**31),
)
def test_every_head_shrinks_below_its_own_slots(
    backend, owned, drop, wide, sinks, recent, scan, ties, order, seed
):  # fmt: skip
    torch.manual_seed(seed)
    batch, most = len(owned), max(map(max, owned))
    starts, size = deal(owned)
    lengths = held_in(owned, 0)
    span = most + 20
    positions = torch.rand(batch, HEADS, span).argsort(-1)[..., :most].int()
    slabs = [slab_of(t, starts, size) for t in (*full_rows(batch, most), positions)]
    before = [t.clone() for t in slabs]
    width = int(lengths.max()) + wide
    scores = normal(batch, HEADS, max(width, 1))
    scores = scores.round() if ties else scores
    moments, old = evicted(batch, order)
    held = lengths.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict_kernel, "MAX_SCAN", scan)
        known = torch.full((batch,), span), moments
        state = make_state(*slabs[:2], lengths, slabs[2], *known, starts=starts, limit=most)
        ops.evict(scores, None, state, make_spec(backend=backend, spare=drop, sinks=sinks, recent=recent))
    for b, h, first, end in stretches(starts):
        length, tokens = int(held[b, h]), max(end - first - drop, 0)
        place = before[2][b, first:end].tolist()
        guarded = [p < sinks or p >= span - recent for p in place]
        value = (scores[b, h] + 0.0).tolist()
        ranked = sorted(range(length), key=lambda j: (not guarded[j], -value[j], place[j]))
        kept = sorted(ranked[:tokens], key=lambda j: place[j])
        assert int(lengths[b, h]) == len(kept)
        now = torch.arange(first, first + len(kept))
        now = now[slabs[2][b, now].argsort()]
        for slab, was in zip(slabs, before):
            assert torch.equal(slab[b, now], was[b, [first + j for j in kept]])
        gone = [first + j for j in ranked[tokens:]]
        some = tuple(t[b, h][old[2][b, h]] for t in old[:2]), (before[0][b, gone], before[1][b, gone])
        count, *statistics = brute_moments(*some)
        assert int(moments.count[b, h]) == count
        for name, want in zip(("key_mean", "value_mean", "cross"), statistics[: 0 if order is None else order + 2]):
            torch.testing.assert_close(getattr(moments, name)[b, h].double(), want, atol=1e-5, rtol=1e-5)
        if backend == "triton" and not gone:
            assert all(torch.equal(slab[b, first:end], was[b, first:end]) for slab, was in zip(slabs, before))
    if backend == "triton":
        ends = starts[:, -1].tolist()
        assert all(torch.equal(s[b, e:], w[b, e:]) for s, w in zip(slabs, before) for b, e in enumerate(ends))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shrinking_equals_that_of_equal_slots(backend):
    """A slab of heads that own equally many slots is the uniform layout."""
    owned, drop = [[20] * HEADS] * 2, 6
    starts, size = deal(owned)
    keys, values = full_rows(2, 20)
    positions = torch.rand(2, HEADS, 20).argsort(-1).int()
    lengths = torch.tensor([[20, 14, 17], [3, 20, 0]], dtype=torch.int32)
    scores, seen = normal(2, HEADS, 20), torch.tensor([20, 20])
    slabs = [slab_of(t, starts, size) for t in (keys, values, positions)]
    shrink = make_spec(backend=backend, tokens=14, spare=drop, sinks=2, recent=3)
    equal = make_state(keys, values, lengths.clone(), positions, seen, Moments.empty(2, HEADS, D, D))
    state = make_state(*slabs[:2], lengths.clone(), slabs[2], seen, Moments.empty(2, HEADS, D, D))
    state.exact.starts, state.exact.limit = starts, 20
    for one in (equal, state):
        ops.evict(scores, None, one, shrink)
    for one, other in zip(*([one.exact.lengths, *one.moments.tensors()] for one in (equal, state))):
        torch.testing.assert_close(one, other, **(dict(atol=1e-5, rtol=1e-5) if backend == "cpu" else EXACTLY))
    for b, h, first, _ in stretches(starts):
        held = int(equal.exact.lengths[b, h])
        own = [(getattr(equal.exact, name)[b, h, :held], getattr(state.exact, name)[b, first : first + held])
               for name in ("positions", "keys", "values")]  # fmt: skip
        by = [place.argsort() if backend == "cpu" else slice(None) for place in own[0]]  # a CPU leaves them in place
        assert all(torch.equal(one[by[0]], other[by[1]]) for one, other in own)


def test_wrong_shrinking_is_refused():
    starts, size = deal([[4, 2, 3]])
    slabs = [normal(1, size, D), normal(1, size, D), torch.zeros(1, size, dtype=torch.int32)]

    def shrink(starts, spare):
        moments = Moments(torch.zeros(1, HEADS).long())
        state = make_state(*slabs[:2], torch.ones(1, HEADS, dtype=torch.int32), slabs[2], torch.tensor([9]), moments)
        state.exact.starts = starts
        ops.evict(normal(1, HEADS, 4), None, state, make_spec(backend="triton", tokens=3, spare=spare))

    with pytest.raises(FastKVError, match="at most 64 tokens of a head, got 65"):
        shrink(starts, 65)
    with pytest.raises(FastKVError, match="starts must have shape"):
        shrink(starts.repeat(2, 1), 1)


class Vector:
    """One problem with two kinds of slots, as lists of tokens per head, and its solution in float64."""

    def __init__(self, owned, approx_owned, order, softcap, seed):
        torch.manual_seed(seed)
        self.batch = batch = len(owned)
        self.owned, self.approx_owned, self.order, self.softcap = owned, approx_owned, order, softcap
        self.width, self.approx_width = max(map(max, owned)), max(map(max, approx_owned))
        self.keys, self.values = full_rows(batch, self.width)
        self.positions = torch.randint(0, 60, (batch, HEADS, self.width), dtype=torch.int32)
        self.lengths = held_in(owned, 1)
        self.approx_keys = normal(batch, HEADS, self.approx_width, D)
        self.approx_positions = torch.randint(0, 60, (batch, HEADS, self.approx_width), dtype=torch.int32)
        self.approx_lengths = held_in(approx_owned, 0)
        self.received = torch.rand(batch, HEADS, self.width), torch.rand(batch, HEADS, self.approx_width)
        self.seen = torch.full((batch,), 40)
        self.weight = normal(HEADS, D, D) / 4
        angle = torch.arange(60)[:, None] * 50.0 ** -(torch.arange(D // 2) / D * 2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.moments, self.old = evicted(batch)
        self.q, self.k, self.v = normal(batch, HEADS * G, D), normal(batch, HEADS, 1, D), normal(batch, HEADS, 1, D)

    def solve(self):
        """Per (sequence, head): out [G, D], lse_retained, lse_evicted [G] and what the slots of each kind receive."""
        for b, h, _, _ in stretches(deal(self.owned)[0]):
            held, extra = int(self.lengths[b, h]), int(self.approx_lengths[b, h])
            q = self.q[b, h * G : h * G + G].double()
            k = torch.cat([self.keys[b, h, :held], self.k[b, h]]).double()
            v = torch.cat([self.values[b, h, :held], self.v[b, h]]).double()
            known = self.approx_keys[b, h, :extra].double()
            back = []
            for key, p in zip(known, self.approx_positions[b, h].tolist()):
                pair = torch.view_as_complex(key.view(2, -1).T.contiguous())
                turn = torch.complex(self.cos[p].double(), -self.sin[p].double())
                back.append(torch.view_as_real(pair * turn).T.reshape(-1) @ self.weight[h].double())
            v = torch.cat([v, torch.stack(back) if back else v[:0]])

            def bent(x):
                return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

            raw = SCALE * q @ torch.cat([k, known]).T
            logits = bent(raw)
            count, key_mean, value_mean, cross = brute_moments(
                [t[b, h][self.old[2][b, h]] for t in self.old[:2]], (k[:0], v[:0])
            )
            lse, top = logits.logsumexp(1), torch.full((G,), -torch.inf, dtype=F64)
            estimate = torch.zeros(G, D, dtype=F64)
            if self.order is not None and count:
                mean = SCALE * q @ key_mean
                top = bent(mean) + torch.tensor(float(count)).double().log()
                slope = 1.0 if self.softcap is None else 1 - torch.tanh(mean / self.softcap) ** 2
                linear = (SCALE * q @ cross / count) * torch.as_tensor(slope, dtype=F64).reshape(-1, 1)
                estimate = value_mean + (linear if self.order else 0)
            total = torch.logaddexp(lse, top)[:, None]
            weights = (logits - total).exp()
            out = weights @ v + (top[:, None] - total).exp() * estimate
            received = weights.mean(0)
            yield b, h, out, lse, top, received[: held + 1], received[held + 1 :]

    def place(self, backend):
        """Position of the next token: kernels count what is known, which in a layer is what was seen."""
        known = self.lengths + self.approx_lengths + self.moments.count
        return known if backend == "triton" else self.seen[:, None].expand_as(known)

    def check(self, backend, ragged, approx_ragged, scratch=False):
        starts, size = deal(self.owned)
        approx_starts, approx_size = deal(self.approx_owned)

        def laid(rows, approx=False):
            if not (approx_ragged if approx else ragged):
                return rows.clone()
            return slab_of(rows, approx_starts, approx_size) if approx else slab_of(rows, starts, size)

        exact = Slots(laid(self.keys), laid(self.values), self.lengths.clone(), laid(self.positions))
        keys, positions = laid(self.approx_keys, True), laid(self.approx_positions, True)
        approx = Slots(keys, None, self.approx_lengths.clone(), positions)
        exact.attention, approx.attention = laid(self.received[0]), laid(self.received[1], True)
        if ragged:
            exact.starts, exact.limit, exact.filled = starts, self.width, self.width
        if approx_ragged:
            approx.starts, approx.limit, approx.filled = approx_starts, self.approx_width, self.approx_width
        recovery = Recovery(self.weight, self.cos, self.sin)
        state = LayerState(exact, self.seen.clone(), self.moments, approx, recovery=recovery)
        spec = make_spec(SCALE, self.softcap, self.order, backend=backend)
        if scratch:
            state.scratch = ops.workspace(HEADS * G, state, spec)
        out, lse_retained, lse_evicted = ops.decode_step(self.q, self.k, self.v, state, spec)
        keys, values, positions = self.keys.clone(), self.values.clone(), self.positions.clone()
        sums = [t.double() for t in self.received]
        for b, h, *truth, values_get, keys_get in self.solve():
            slot = int(self.lengths[b, h])
            keys[b, h, slot], values[b, h, slot] = self.k[b, h, 0], self.v[b, h, 0]
            positions[b, h, slot] = self.place(backend)[b, h]
            sums[0][b, h, : slot + 1] += values_get
            sums[1][b, h, : len(keys_get)] += keys_get
            rows = slice(h * G, h * G + G)
            for got, want in zip((out[b, rows], lse_retained[b, rows], lse_evicted[b, rows]), truth):
                torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
        for got, rows in zip((exact.keys, exact.values, exact.positions), (keys, values, positions)):
            assert torch.equal(got, laid(rows))
        assert torch.equal(exact.lengths, self.lengths + 1) and torch.equal(state.seen, self.seen + 1)
        assert torch.equal(approx.keys, laid(self.approx_keys, True))
        assert torch.equal(approx.lengths, self.approx_lengths)
        torch.testing.assert_close(exact.attention.double(), laid(sums[0]), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(approx.attention.double(), laid(sums[1], True), atol=2e-6, rtol=1e-5)
        received = (exact.attention, self.received[0]), (approx.attention, self.received[1])
        for keyless, (got, was) in enumerate(received):
            starting = laid(was, keyless)
            unused = torch.arange(was.shape[2]) >= (self.approx_lengths if keyless else self.lengths + 1)[..., None]
            same = laid(unused, keyless) != 0  # also what nobody owns
            assert torch.equal(got[same], starting[same])


@pytest.mark.parametrize("backend, ragged, approx_ragged", covering(BACKENDS, [True, False], [True, False], together=1))
@settings(max_examples=examples(12))
@given(**common, approx=st.lists(st.integers(0, 9), min_size=2 * HEADS, max_size=2 * HEADS))
def test_vector_step(backend, ragged, approx_ragged, owned, order, softcap, parts, seed, approx):
    approx_owned = [approx[b * HEADS : (b + 1) * HEADS] for b in range(len(owned))]
    with splits(parts):
        Vector(owned, approx_owned, order, softcap, seed).check(backend, ragged, approx_ragged)


@pytest.mark.parametrize("approx", [[[0, 0, 0]], [[9, 0, 1]]], ids=["none", "some"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vector_step_with_scratch(backend, approx):
    for seed in range(3):
        with splits(4):
            Vector([[40, 2, 33]], approx, 1, None, seed).check(backend, True, True, scratch=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vector_attention_is_the_step_without_its_token(backend):
    """On slots that already hold the token, and with only one kind of attention collected."""
    case = Vector([[6, 3, 9]], [[4, 0, 7]], 1, None, 0)
    starts, size = deal(case.owned)
    slots = [slab_of(t, starts, size) for t in (case.keys, case.values, case.positions)]
    approx = Slots(case.approx_keys, None, case.approx_lengths, case.approx_positions)
    approx.attention = torch.zeros(1, HEADS, case.approx_width)
    state = make_state(
        *slots[:2], case.lengths, slots[2], case.seen, case.moments, starts=starts, limit=case.width, approx=approx,
        recovery=Recovery(case.weight, case.cos, case.sin),
    )  # fmt: skip
    spec = make_spec(SCALE, order=1, backend=backend)
    step = ops.decode_step(case.q, case.k, case.v, state, spec)
    stored, received = copied(state), approx.attention.clone()
    state.approx.attention.zero_()
    again = ops.decode_step(case.q, None, None, state, spec)
    for one, other in zip((*step, received), (*again, state.approx.attention)):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert_same(state, stored, but=["approx.attention"])
