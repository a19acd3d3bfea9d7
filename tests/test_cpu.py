"""What runs on a CPU against the float64 reference: attention, observed attention, blocks of a prompt, evictions."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import cpu as compiled
from fastkv import ops, reference
from fastkv.cpu import operations as cpu
from fastkv.cpu import slots as compiled_slots
from fastkv.reference import Centroids, Moments, Selection, centroids, slot_format
from fastkv.rotary import Rotary

from .conftest import examples
from .models import raises
from .states import assert_same, compiled_step, copied, in_slab, make_spec, make_state, shrink, sinks

SCALE = 0.3
CASES = settings(max_examples=examples(300), deadline=None)
LIMIT = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of the largest value: one rounding


class Problem:
    """Slots of which each head uses its own number, evicted tokens, and one more token or a block of them."""

    def __init__(self, draw, *, least=0):
        pick = lambda low, high: draw(st.integers(low, high))  # noqa: E731
        self.batch, self.heads, self.groups, self.slots = pick(1, 3), pick(1, 3), pick(1, 4), pick(2, 40)
        self.dim = draw(st.sampled_from((8, 16, 64)))
        self.random = torch.Generator().manual_seed(pick(0, 2**31))
        some = st.integers(least, self.slots - 1)
        count = self.batch * self.heads
        lengths = [draw(some)] * count if draw(st.booleans()) else draw(st.lists(some, min_size=count, max_size=count))
        self.lengths = torch.tensor(lengths, dtype=torch.int32).reshape(self.batch, self.heads)
        self.keys, self.values = self.rows(self.slots), self.rows(self.slots)
        order = torch.rand(self.batch, self.heads, self.slots, generator=self.random).argsort(-1)
        self.positions = order.to(torch.int32)
        self.seen = torch.full((self.batch,), self.slots)
        self.order = draw(st.sampled_from((None, 0, 1)))
        evicted = torch.rand(self.batch, self.heads, 12, generator=self.random) < draw(st.sampled_from((0.0, 0.5, 1.0)))
        self.gone = self.rows(12), self.rows(12), evicted
        self.sinks = draw(sinks(self.heads * self.groups))

    def rows(self, num, heads=None):
        heads = self.heads if heads is None else heads
        return torch.randn(self.batch, heads, num, self.dim, generator=self.random)

    def moments(self, dtype):
        sizes = (self.batch, self.heads, self.dim, self.dim)
        return Moments.empty(*sizes, dtype=dtype, order=self.order).add(*self.gone)

    def centroids(self, dtype):
        return Centroids.empty(self.batch, self.heads, 3, self.dim, self.dim, dtype=dtype).add(*self.gone)

    def state(self, dtype, parts=False, moments=None):
        """Keys and values in `dtype`, and what is known of the evicted in that or `moments`."""
        known = self.moments(moments or dtype)
        state = copied(make_state(self.keys, self.values, self.lengths, self.positions, self.seen, known))
        state.exact.keys, state.exact.values = self.keys.to(dtype, copy=True), self.values.to(dtype, copy=True)
        state.parts, state.sink_logits = self.centroids(moments or dtype) if parts else None, self.sinks
        return state

    def spec(self, parts=False, **rest):
        return make_spec(SCALE, None, self.order, correction="centroids" if parts else None, **rest)


problems = st.composite(lambda draw, least=0: Problem(draw, least=least))


def close(found, expected, limit=2e-6):
    """Both -inf, or equal up to the limit."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("slab", [False, True])
@settings(max_examples=examples(400), deadline=None)
@given(problems(), st.sampled_from(list(LIMIT)), st.booleans(), st.booleans(), st.booleans())
def test_a_step(slab, problem, dtype, watched, parts, append):
    """With a token, or on what is stored, if anything. Heads that share a slab own a slot more than they use."""
    q = problem.rows(problem.groups).flatten(1, 2).to(dtype)
    new = [problem.rows(1).to(dtype) for _ in range(2)] if append else [None, None]
    mine = problem.state(dtype, parts, torch.float32)
    theirs = problem.state(torch.float64, parts)
    theirs.exact.keys, theirs.exact.values = mine.exact.keys.double(), mine.exact.values.double()
    if watched:
        mine.exact.attention = torch.rand(problem.positions.shape, generator=problem.random)
        theirs.exact.attention = mine.exact.attention.double()
    if slab:
        mine, theirs = (in_slab(one, (problem.lengths + 1).tolist()) for one in (mine, theirs))
    spec, limit = problem.spec(parts), LIMIT[dtype]
    out, *lses = cpu.decode_step(q, *new, mine, spec)
    want, *want_lses = reference.decode_step(q.double(), *(t.double() if append else None for t in new), theirs, spec)
    assert out.dtype == dtype and out.shape == q.shape
    largest = max(1.0, theirs.exact.values.abs().max().item(), want.abs().max().item())
    assert (out.double() - want).abs().max() <= (limit + 2e-6) * largest
    for one, other in zip(lses, want_lses):
        assert one.dtype == torch.float32
        close(one, other, 20 * limit)
    for name in ("keys", "values", "positions", "lengths"):
        assert torch.equal(getattr(mine.exact, name).double(), getattr(theirs.exact, name).double())
    assert torch.equal(mine.seen, theirs.seen)
    if watched:
        close(mine.exact.attention, theirs.exact.attention, 20 * limit)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_another_batch_than_the_state_s_is_refused(batch):
    """C++ would look behind tensors, or pass over sequences."""
    keys, lengths = torch.randn(2, 3, 8, 16), torch.full((2, 3), 4, dtype=torch.int32)
    state = make_state(keys, keys.clone(), lengths, torch.zeros(2, 3, 8, dtype=torch.int32))
    q, k, before = torch.randn(batch, 6, 16), torch.randn(batch, 3, 1, 16), copied(state)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        cpu.decode_step(q, k, k, state, make_spec(SCALE))
    assert_same(state, before)


@pytest.mark.parametrize("name", ["exact.keys", "exact.lengths", "seen", "centroids.keys", "centroids.count"])
def test_a_step_follows_tensors_that_were_replaced(name):
    """What was found out about a layer's tensors is found anew for others."""
    known = Centroids.empty(2, 3, 4, 16, 16).add(torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16))
    keys, lengths = torch.randn(2, 3, 8, 16), torch.full((2, 3), 4, dtype=torch.int32)
    state = make_state(keys, keys.clone(), lengths, torch.zeros(2, 3, 8, dtype=torch.int32), parts=known)
    q, k, spec = torch.randn(2, 6, 16), torch.randn(2, 3, 1, 16), make_spec(SCALE, correction="centroids")
    cpu.decode_step(q, k, k, state, spec)
    tensor = dict(state.named_tensors())[name]
    state.replace(name, tensor * 2 if tensor.is_floating_point() else tensor - 1)
    theirs = copied(state)
    for found, expected in zip(cpu.decode_step(q, k, k, state, spec), reference.decode_step(q, k, k, theirs, spec)):
        close(found, expected, 1e-5)
    assert torch.equal(state.seen, theirs.seen) and torch.equal(state.exact.lengths, theirs.exact.lengths)


@CASES
@given(problems(), st.integers(1, 40), st.booleans(), st.sampled_from(("none", "left", "right", "anywhere")), st.data())
def test_a_block(problem, num, parts, padding, data):
    q, k, v = problem.rows(num, problem.heads * problem.groups), problem.rows(num), problem.rows(num)
    real = torch.ones(problem.batch, num, dtype=torch.bool)
    for row in range(problem.batch):
        hidden = data.draw(st.integers(0, num))
        if padding == "anywhere":
            real[row] = torch.rand(num, generator=problem.random) < 0.5
        elif padding != "none" and hidden:
            real[row, :hidden] = padding == "right"
            real[row, num - hidden :] = padding == "left"
    k, v = k * real[:, None, :, None], v * real[:, None, :, None]
    spec = problem.spec(parts)
    out, *sums = cpu.prefill_attention(q, k, v, real, problem.state(torch.float32, parts), spec)
    exact = (one.double() for one in (q, k, v))
    want, *exact_sums = reference.prefill_attention(*exact, real, problem.state(torch.float64, parts), spec)
    close(out, want, 2e-5)
    for mine, other in zip(sums, exact_sums, strict=True):
        close(mine, other, 2e-5)


@CASES
@given(problems(), st.integers(1, 40), st.integers(0, 3), st.integers(0, 5), st.sampled_from(("ties", "nan", "any")))
def test_an_eviction(problem, tokens, sinks, recent, kind):
    scores = torch.randn(problem.positions.shape, generator=problem.random)
    if kind == "ties":
        scores = scores.round()
    elif kind == "nan":
        scores[torch.rand(scores.shape, generator=problem.random) < 0.3] = torch.nan
    mine, theirs = problem.state(torch.float32), problem.state(torch.float64)
    before, spec = copied(mine), problem.spec(tokens=tokens, sinks=sinks, recent=recent)
    shrink(cpu, scores, mine, spec)
    shrink(reference, scores, theirs, spec)
    assert torch.equal(mine.exact.lengths, theirs.exact.lengths) and torch.equal(mine.seen, theirs.seen)
    for one, other in zip(mine.moments.tensors(), theirs.moments.tensors()):
        close(one, other, 2e-5)
    for row in range(problem.batch):
        for head in range(problem.heads):
            n, old = int(mine.exact.lengths[row, head]), int(before.exact.lengths[row, head])
            sorted_by = [state.exact.positions[row, head, :n].argsort() for state in (mine, theirs)]
            for part in ("keys", "values", "positions"):
                pair = (getattr(state.exact, part)[row, head, :n] for state in (mine, theirs))
                found, want = (rows[by] for rows, by in zip(pair, sorted_by))
                assert torch.equal(found.double(), want.double())
            # A token that stays within the first slots is not moved.
            was = before.exact.positions[row, head, : min(n, old)].tolist()
            now = mine.exact.positions[row, head, :n].tolist()
            assert all(a == b for a, b in zip(was, now) if a in now)


SLOTS = compiled.library("slots")


@pytest.mark.skipif(isinstance(SLOTS, str), reason=f"slots.cpp: {SLOTS}")
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stretches_of_a_head_add_up(dtype, ragged):
    """Up to 3.5 of them, one that no query sees, one with a large logit; the same bits for any number of threads."""
    random, lengths = torch.Generator().manual_seed(5), torch.tensor([[450, 128, 0], [129, 1, 300]], dtype=torch.int32)
    keys, values = (torch.randn(2, 3, 450, 32, generator=random).to(dtype) for _ in range(2))
    bias = torch.zeros(2, 3, 450)
    bias[0, 0, 128:256], bias[0, 0, 400], bias[1, 2, 3] = -torch.inf, 40.0, 30.0
    state = make_state(keys, values, lengths)
    state.exact.bias = bias
    slots = in_slab(state, lengths.tolist()).exact if ragged else state.exact
    q, received = torch.randn(2, 3, 5, 32, generator=random), torch.ones(slots.bias.shape)
    logits = SCALE * q.double() @ keys.double().mT + bias[:, :, None]
    logits = logits.masked_fill(torch.arange(450) >= lengths[..., None, None], -torch.inf)
    want = logits.softmax(-1).nan_to_num(0.0)
    out, lse = compiled_step(q, slots, SCALE, received)
    used = torch.arange(450) < lengths[..., None]
    given_to = reference.unpack([received], slots.starts, 450)[0] if ragged else received
    close((given_to - 1).masked_fill(~used, 0.0), want.mean(2), 4e-6)
    assert ragged or bool((given_to[~used] == 1).all())
    close(out, want @ values.double(), 4e-6)
    close(lse, logits.logsumexp(-1), 4e-6)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    assert all(map(torch.equal, compiled_step(q, slots, SCALE), (out, lse)))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("why", ["softcap", "float64", "values of another size", "backend"])
def test_the_reference_does_what_neither_torch_nor_a_compiled_step_can(why, monkeypatch):
    dtype = torch.float64 if why == "float64" else torch.float32
    q, keys = torch.randn(2, 4, 16, dtype=dtype), torch.randn(2, 2, 9, 16, dtype=dtype)
    values = torch.randn(2, 2, 9, 24 if why == "values of another size" else 16, dtype=dtype)
    softcap = 5.0 if why == "softcap" else None
    assert cpu.serves(q.float(), 16, None)
    assert cpu.serves(q, values.shape[-1], softcap) == (why == "backend")
    k, v = keys[:, :, :1].clone(), values[:, :, :1].clone()
    monkeypatch.setattr(compiled, "call", None)  # the backend "reference" does not even ask
    spec = make_spec(SCALE, softcap, backend="reference" if why == "backend" else "auto")
    lengths = torch.full((2, 2), 8, dtype=torch.int32)
    state = make_state(keys, values, lengths, torch.zeros(2, 2, 9, dtype=torch.int32), torch.full((2,), 8))
    results = [run(q, k, v, copied(state), spec)[0] for run in (ops.decode_step, reference.decode_step)]
    if why == "values of another size":
        assert results[0].shape[-1] == 24
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["refuses", "reads another head", "sees the future"])
def test_a_kernel_that_does_something_else_is_not_used(how, monkeypatch):
    right = cpu.attend

    def other(q, keys, values, scale, mask, causal=False):
        if how == "refuses":
            raise RuntimeError("attn_mask and is_causal exclude each other")
        if how == "reads another head":
            return right(q, keys.flip(1), values.flip(1), scale, mask, causal)
        return right(q, keys, values, scale, mask, False)

    assert cpu.fused_as_expected()
    monkeypatch.setattr(cpu, "attend", other)
    monkeypatch.setattr(cpu, "fused_as_expected", cpu.fused_as_expected.__wrapped__)
    q = torch.randn(1, 4, 16)
    assert not cpu.serves(q, q.shape[-1], None)


shares_compiled = pytest.mark.skipif(not compiled.available("most_attended"), reason="it does not compile")


@shares_compiled
@CASES
@given(
    *[st.integers(1, most) for most in (3, 3, 3, 20, 50)], st.sampled_from([8, 24, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([None, 2.0]), st.integers(0, 999),
)  # fmt: skip
def test_compiled_shares_are_those_of_the_reference(batch, heads, groups, asking, num, dim, dtype, cap, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads * groups, asking), (heads, num)
    q, keys = (torch.randn(batch, *size, dim, generator=generator).to(dtype) for size in sizes)
    lse = 4 + torch.randn(batch, heads * groups, asking, generator=generator)
    lse[:, :, ::3] = torch.inf  # padding
    exact = reference.most_attended(q.double(), keys.double(), lse.double(), SCALE, cap)
    found = cpu.most_attended(q, keys, lse, SCALE, cap)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-30)


@CASES
@given(
    *[st.integers(1, most) for most in (3, 3, 300)],
    *[st.sampled_from(some) for some in ([16, 32, 96], [torch.float32, torch.bfloat16], ["mean", "normalized_mean"])],
    *[st.booleans() for _ in range(2)], st.integers(0, 999),
)  # fmt: skip
def test_keys_unlike_the_others(batch, heads, num, dim, dtype, anchor, turned, masked, seed):
    """What is no token is not read: it is NaN."""
    generator = torch.Generator().manual_seed(seed)
    keys = (0.3 + torch.randn(batch, heads, num, dim, generator=generator)).to(dtype)
    mask = torch.rand(batch, heads, num, generator=generator) < (0.7 if masked else 1.1)
    keys = torch.where(mask[..., None], keys, torch.nan).transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.randint(0, 5000, (batch, heads, num), generator=generator, dtype=torch.int32)
    rotary = Rotary(torch.rand(dim // 2, generator=generator), scaling=1.3) if turned else None
    exact = keys.double() if rotary is None else rotary.unrotate(keys.double(), positions)
    found = ops.keydiff_scores(keys, anchor, mask=mask, positions=positions, rotary=rotary)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference.keydiff_scores(exact, anchor, mask=mask), atol=1e-5, rtol=0)


@pytest.mark.skipif(not compiled.available("expected"), reason="it does not compile")
@CASES
@given(
    *[st.integers(1, most) for most in (2, 3, 3, 40, 300)],
    *[st.sampled_from(some) for some in ([32, 64, 96], [torch.float32, torch.bfloat16], ["halves", "pairs", "part"])],
    st.integers(0, 999),
)  # fmt: skip
def test_what_queries_to_come_are_expected_to_read(batch, heads, groups, old, num, dim, dtype, turn, seed):
    """Queries and keys lie as projections leave them, far from zero, and are NaN where there is no token."""
    generator = torch.Generator().manual_seed(seed)

    def rows(heads, num, away=1):
        made = torch.randn(batch, num, heads, dim, generator=generator) + away * torch.randn(dim, generator=generator)
        return (made / 3).to(dtype).transpose(1, 2)

    size = dim if turn == "halves" else 16
    rotary = Rotary(torch.rand(size // 2, generator=generator), 1.3, turn == "pairs", dim - size)
    positions = torch.arange(old + num, dtype=torch.int32).expand(batch, heads, -1)
    queries, keys, values = rows(heads * groups, num, 30), rows(heads, old + num), rows(heads, old + num)
    queries = rotary.turned(queries, *rotary.turn(positions[:, :1, old:])).to(dtype)
    real = torch.rand(batch, old + num, generator=generator) < 0.9
    keys.masked_fill_(~real[:, None, :, None], torch.nan)
    queries.masked_fill_(~real[:, None, old:, None], torch.nan)
    valid = real[:, None].expand(-1, heads, -1)
    block = positions, valid, rotary, 20, 4
    exact, found = reference.queries_ahead(queries.double(), *block), cpu.queries_ahead(queries, *block)
    for want, got in zip(exact, found):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=3e-5)
    rest = found[2], SCALE, 0.01, torch.rand(batch, heads, old + num, generator=generator)
    told = keys, values, *found[:2]
    want = reference.expected_attention(*(part.double() for part in told), *rest, valid=valid)
    torch.testing.assert_close(cpu.expected_attention(*told, *rest, valid=valid), want, rtol=1e-4, atol=1e-30)


@pytest.mark.skipif(not compiled.available("choice"), reason="it does not compile")
@CASES
@given(
    *[st.integers(1, most) for most in (2, 3)], *[st.integers(0, most) for most in (9, 30)],
    *[st.booleans() for _ in range(2)], st.integers(0, 999),
)  # fmt: skip
def test_what_a_layer_chooses_from(batch, heads, slots, num, known, spread, seed):
    """Slots of unequal lengths, then a block with padding; and slots alone."""
    generator = torch.Generator().manual_seed(seed)

    def rows(number, dim=16):
        return torch.randn(batch, heads, number, dim, generator=generator)

    lengths = torch.randint(slots + 1, (batch, heads), generator=generator, dtype=torch.int32)
    places = torch.randint(40, (batch, heads, slots), generator=generator, dtype=torch.int32)
    places = places.transpose(0, 1).contiguous().transpose(0, 1) if spread else places
    seen, real = torch.randint(40, (batch,), generator=generator), torch.rand(batch, num, generator=generator) < 0.7
    old = rows(slots), rows(slots), places, rows(slots, 1)[..., 0] if known else None, lengths
    given = *old, rows(num), rows(num), real, seen, 3, 5
    for want, got in zip(reference.candidates(*given), cpu.candidates(*given), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want.reshape(got.shape))
    state, spec = make_state(*old[:2], lengths, places, seen), replace(make_spec(), sinks=3, recent=5)
    for want, got in zip(*(module.slot_signals(places, state, spec) for module in (reference, cpu)), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


STORED = [*product(["model"], [None, 0, 1]), ("int8", 0), *product(["fp8", "int4", "k8v4"], [None])]


@pytest.mark.skipif(not compiled.available("slots"), reason="it does not compile")
@pytest.mark.parametrize("held", [0, 16], ids=["first block", "later block"])
@pytest.mark.parametrize("shared", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("form, order", STORED)
def test_a_block_is_stored_behind_what_stays_and_read(form, order, shared, held):
    """What the reference keeps and knows of it; rows lie as projections do, NaN if they leave without moments."""
    form, (batch, heads, num, dim, room) = slot_format(form), (2, 3, 20, 64, 24)
    used = (torch.tensor([[9, 16, 0], [3, 12, 7]]) if held else torch.zeros(batch, heads)).int()
    real, known = torch.rand(batch, num) < 0.9, torch.rand(batch, heads, held + num)
    rows, new = torch.randn(2, batch, heads, room, dim), torch.randn(2, batch, num, heads, dim).transpose(2, 3)
    there = torch.cat([torch.arange(held) < used[..., None], real[:, None].expand(-1, heads, -1)], -1)
    kept, states = there & (torch.rand(there.shape) < 0.5), []
    if order is None:
        new[0].masked_fill_(~kept[..., held:, None], torch.nan)
    block = *new, torch.arange(held, held + num, dtype=torch.int32).expand(batch, heads, num)
    for module in (reference, cpu):
        keys, values = (one.encode(part.clone()) for one, part in zip((form.keys, form.values), rows))
        places = torch.arange(room, dtype=torch.int32).repeat(batch, heads, 1)
        moments = Moments.empty(batch, heads, dim, dim, order=order)
        state = make_state(*rows, used.clone(), places, torch.full((batch,), held), moments)
        slots = {"keys": keys[0], "key_scales": keys[1], "values": values[0], "value_scales": values[1]}
        state.exact = replace(state.exact, format=form, decodes_to=torch.float32, limit=-1, **slots)
        state = in_slab(state, [[room] * heads] * batch) if shared else state
        state.exact.memory = torch.rand(state.exact.positions.shape)
        state.exact.limit, state.exact.filled = room, held
        module.compact(there, Selection(kept, kept.sum(-1)), block, known, state, make_spec(order=order))
        state.exact.filled = room
        states.append(state)
    want, got = states
    assert torch.equal(got.exact.lengths, kept.sum(-1).int()) and torch.equal(got.seen, held + real.sum(-1))
    for one, other in zip(got.moments.tensors(), want.moments.tensors()):
        close(one, other, 2e-5)
    assert not got.exact["memory"][~got.exact.valid].any()
    for scales in (got.exact.key_scales, got.exact.value_scales):  # what others have stored before
        if scales is not None:
            scales[scales == 0] = 1
    names = "keys", "values", "positions", "memory"
    told = cpu.read_slots(got.exact, names, torch.float32)
    if form.plain and not shared:
        assert told is None
        told = got.exact.read(*names)
    by = [reference.in_order(state.exact["positions"], state.exact.valid) for state in states]
    used = torch.arange(room) < got.exact.lengths[..., None]
    for theirs, mine in zip(want.exact.read(*names), told, strict=True):
        found, expected = (reference.rows_at(part, order)[used] for part, order in ((mine, by[1]), (theirs, by[0])))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert mine[~got.exact.valid].count_nonzero() == 0 or not shared


@pytest.mark.skipif(not compiled.available("slots"), reason="it does not compile")
def test_slots_that_are_not_the_candidates_are_left_alone():
    keys, lengths = torch.randn(1, 1, 4, 16), torch.tensor([[3]], dtype=torch.int32)
    slots = make_state(keys, keys, lengths, torch.arange(4, dtype=torch.int32)[None, None]).exact
    kept, count = torch.tensor([[[True, False, True, False]]]), torch.zeros(1, 1, dtype=torch.int64)
    for valid, left in ((kept, 3), (torch.tensor([[[True, True, True, False]]]), 2)):
        assert compiled_slots.compact(slots, valid, kept, None, count, None) == (left == 2)
        assert lengths == left and count == 3 - left


def test_what_is_compiled_reads_no_further_than_tensors_go():
    """Others are refused, before anything is read."""
    keys, mask = torch.randn(2, 3, 20, 32), torch.ones(2, 3, 20, dtype=torch.bool)
    places, few, rotary = torch.arange(20, dtype=torch.int32).expand(2, 3, 20), mask[:, :, :9], Rotary(torch.rand(16))
    mean, covariance, count = cpu.queries_ahead(keys, places, mask, rotary, 4, 0)
    rest = count, SCALE, 0.0, keys[..., 0]
    state = make_state(keys, keys, torch.full((2, 3), 20), places, torch.full((2,), 20))
    state.parts = Centroids.empty(2, 3, 4, 32, 32)
    raises("mask must have", cpu.keydiff_scores, keys, "mean", distance="cosine", mask=few)
    turned = {"mask": None, "positions": places[:, :1], "rotary": rotary}
    raises("positions must have", cpu.keydiff_scores, keys, "mean", distance="cosine", **turned)
    raises("valid must have", cpu.queries_ahead, keys, places, few, rotary, 4, 0)
    raises("valid must have", cpu.expected_attention, keys, keys, mean, covariance, *rest, valid=few)
    raises("mean must have", cpu.expected_attention, keys, keys, mean[:1], covariance, *rest, valid=mask)
    raises("covariance must have", cpu.expected_attention, keys, keys, mean, covariance[:1], *rest, valid=mask)
    raises("expected must have", cpu.needed_scores, keys[..., 0], few.float(), None, mask)
    raises("protected must have", cpu.select, keys[..., 0], places, mask, few, 3)
    raises("kept must have", cpu.remember, keys, keys, places, mask, few, 20, state, make_spec())


@CASES
@given(*[st.integers(1, most) for most in (2, 3, 60)], *[st.booleans() for _ in range(3)], st.integers(0, 999))
def test_what_says_that_a_token_is_needed(batch, heads, num, expected, read, flat, seed):
    """Of some nothing is known; what is no token is NaN."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(batch, heads, num, generator=generator) < 0.9
    rows = torch.rand(3, batch, heads, num, generator=generator)
    rows[1:][torch.rand(2, batch, heads, num, generator=generator) < 0.2] = 0
    rows = (rows * (1e-5 if flat else 1) + flat).where(valid, torch.nan)
    given = rows[0], rows[1] if expected else None, rows[2] if read else None
    want = reference.needed_scores(*(None if one is None else one.double() for one in given), valid)
    torch.testing.assert_close(ops.needed_scores(*given, valid).double(), want.nan_to_num(), rtol=1e-4, atol=1e-5)


@CASES
@given(st.integers(1, 3), st.integers(1, 60), st.integers(0, 9), st.integers(0, 999))
def test_a_choice_of_which_few_leave(heads, num, spare, seed):
    """With equal scores, some no numbers or without bounds, candidates that are no tokens, and protected ones."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([0.0, -0.0, 1.5, -2.0, torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
    scores = levels[torch.randint(0, 8, (2, heads, num), generator=generator)]
    positions = torch.rand(2, heads, num, generator=generator).argsort(-1).to(torch.int32)
    valid, guard = (torch.rand(2, heads, num, generator=generator) < share for share in (0.9, 0.2))
    tokens = (num - spare - torch.randint(0, 3, (2, heads), generator=generator)).clamp(min=0)
    for choose, number in (("select", int(tokens[0, 0])), ("select_each", tokens)):
        want = getattr(reference, choose)(scores, positions, valid, guard, number)
        found = getattr(ops, choose)(scores, positions, valid, guard, number)
        assert torch.equal(found.kept, want.kept) and torch.equal(found.counts, want.counts)


JOINS = compiled.library("joins")
joins_compiled = pytest.mark.skipif(isinstance(JOINS, str), reason=f"joins.cpp: {JOINS}")


def leaving(batch, heads, num, dims, seed, share=0.9):
    """Keys, values and which of them leave."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(batch, heads, num, dim, generator=generator) for dim in dims]
    return *rows, torch.rand(batch, heads, num, generator=generator) < share


def join(parts, keys, values, inside):
    """Those that are inside, given in another order and between others that are no tokens."""
    order = torch.rand(inside.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    keys, values = (reference.rows_at(rows, order) for rows in (keys, values))
    leave, draw = inside.gather(-1, order), order % 2 == 0
    cpu.join(parts, keys, values, order.int(), leave | draw, ~leave & draw)


@joins_compiled
@CASES
@given(
    st.integers(1, 40), st.integers(1, 20), st.sampled_from([(8, 8), (24, 40), (64, 64), (128, 16)]),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([0.0, 0.3, 1.1]), st.integers(0, 999),
)  # fmt: skip
def test_compiled_joins_are_those_of_the_reference(num, fresh, dims, dtype, share, seed):
    """What does not leave is not read: it is NaN."""
    mine = Centroids.empty(2, 3, num, *dims, dtype=dtype)
    for step in range(4):
        rows = leaving(2, 3, fresh, dims, seed + step, share)
        want, hidden = copy.deepcopy(mine).add(*rows), ~rows[-1][..., None]
        join(mine, *(part.masked_fill(hidden, torch.nan) for part in rows[:2]), rows[-1])
        assert torch.equal(mine.count, want.count)
        # A mean in bf16 is rounded up or down by its last bits.
        allowed = 2e-6 if dtype == torch.float32 else 1 / 64
        for found, exact in zip(mine.tensors(), want.tensors()):
            assert torch.allclose(found.float(), exact.float(), rtol=allowed, atol=2e-6 * max(dims))


@joins_compiled
def test_no_token_is_lost_where_costs_overflow():
    mine = Centroids.empty(1, 2, 4, 16, 16)
    keys, values, inside = leaving(1, 2, 16, (16, 16), 0)
    join(mine, 1e30 * keys, values, inside)
    assert torch.equal(mine.count.sum(-1), inside.sum(-1).float())


@joins_compiled
def test_a_prompt_joins_block_by_block(monkeypatch):
    monkeypatch.setattr(centroids, "BLOCK", 48)
    monkeypatch.setattr(centroids, "SEEDS", 16)
    for num, fresh in ((7, 100), (33, 96), (5, 49)):  # means in bf16, so that each block rounds
        mine = Centroids.empty(1, 2, num, 16, 16, dtype=torch.bfloat16)
        *rows, inside = leaving(1, 2, fresh, (16, 16), fresh, 0.9)
        first = (~inside).to(torch.uint8).argsort(dim=-1, stable=True)[..., : inside.sum(-1).max()]
        want = mine.add(*(reference.rows_at(one, first) for one in rows), inside.gather(-1, first))
        join(mine, *rows, inside)
        assert torch.equal(mine.count, want.count)
        assert torch.allclose(mine.keys.float(), want.keys.float(), rtol=1 / 64, atol=1e-4)


@joins_compiled
@pytest.mark.parametrize("num, fresh", [(150, 700), (9, 700), (9, 257), (140, 280)])
def test_many_tokens_become_fewer_as_in_the_reference(num, fresh):
    """To ROOMY * 150 parts, to SEEDS, or not at all."""
    mine = Centroids.empty(1, 2, num, 16, 16)
    rows = leaving(1, 2, fresh, (16, 16), 0, 1.1)
    want = mine.add(*rows)
    join(mine, *rows)
    assert torch.equal(mine.count, want.count)
    assert torch.allclose(mine.keys, want.keys, rtol=1e-5, atol=1e-5)
    assert torch.allclose(mine.spread, want.spread, rtol=1e-4, atol=1e-5)


@joins_compiled
def test_compiled_joins_carry_what_is_rounded_away():
    """One centroid of tokens around 1, 1 / 300 apart: means in bf16 are 1 / 128 apart there."""
    mine = Centroids.empty(1, 1, 1, 16, 16, dtype=torch.bfloat16)
    want, ones = copy.deepcopy(mine), torch.ones(1, 1, 8, dtype=torch.bool)
    for step in range(40):
        keys = 1 + torch.arange(8 * 16).remainder(7 + step % 3).view(1, 1, 8, 16) / 300
        want = want.add(keys, keys, ones)
        join(mine, keys, keys, ones)
    assert torch.equal(mine.count, want.count)
    apart_by = mine.keys.float() - want.keys.float()  # some differ by a bit, as many up as down
    assert abs(float(apart_by.mean())) < 1e-3 and float(apart_by.abs().max()) < 0.01


def block(num):
    q, *new = (torch.randn(3, heads, num, 16) for heads in (4, 2, 2))
    keys, values = torch.randn(2, 3, 2, 20, 16)
    lengths, real = torch.tensor([[20, 20], [7, 0], [19, 1]], dtype=torch.int32), torch.ones(3, num, dtype=torch.bool)

    def run(rows):
        state = make_state(keys[rows], values[rows], lengths[rows])
        return cpu.prefill_attention(q[rows], *(one[rows] for one in new), real[rows], state, make_spec(SCALE))

    return run


def window(mixed):
    q, keys, mass = torch.randn(3, 4, 5, 16), torch.randn(3, 2, 45, 16), torch.randn(3, 4, 5)
    visible, real = torch.rand(3, 2, 5, 45) < 0.7, torch.tensor([[True] * 5, [False] * 3 + [True] * 2, [True] * 5])

    def run(rows):
        given = {"visible": visible[rows], "query_valid": real[rows], "log_mass": mass[rows] if mixed else None}
        return [reference.window_attention(q[rows], keys[rows], SCALE, **given)]

    return run


def shares():
    given = torch.randn(3, 4, 40, 64), torch.randn(3, 2, 70, 64), 4 + torch.randn(3, 4, 40)
    return lambda rows: [cpu.most_attended(*(one[rows] for one in given), SCALE)]


def joins(dtype):
    given = leaving(3, 2, 16, (64, 64), 5)

    def run(rows):
        parts = Centroids.empty(len(rows), 2, 9, 64, 64, dtype=dtype)
        join(parts, *(one[rows] for one in given))
        return parts.tensors()

    return run


@pytest.mark.parametrize(
    "make, compiled",
    [
        *(pytest.param(partial(block, num), False, id=f"block of {num}") for num in (1, 12, 16, 33)),
        *(pytest.param(partial(window, mixed), False, id=f"window {mixed}") for mixed in (False, True)),
        pytest.param(shares, True, marks=shares_compiled),
        *(pytest.param(partial(joins, dtype), True, id=f"joins {dtype}", marks=joins_compiled)
          for dtype in (torch.float32, torch.bfloat16)),
    ],
)  # fmt: skip
def test_rows_are_what_they_are_alone(make, compiled):
    """Bit for bit, whatever the vectors of the processor, the shape of the batch and, in C++, the number of threads."""
    run, threads = make(), torch.get_num_threads()
    together = run([0, 1, 2])
    if compiled:
        torch.set_num_threads(3 - min(threads, 2))
    for row in range(3):
        assert all(torch.equal(one[row], alone[0]) for one, alone in zip(together, run([row])))
    torch.set_num_threads(threads)
