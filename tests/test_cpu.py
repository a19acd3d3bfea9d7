"""What runs on a CPU against the float64 reference: attention, observed attention, blocks of a prompt, evictions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import cpu, ops, reference
from fastkv.reference import Centroids, Moments, unpack

from .conftest import examples

SCALE = 0.3
CASES = settings(max_examples=examples(150), deadline=None)
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
        self.mass = "jensen" if self.order is None else draw(st.sampled_from(("jensen", "cosh")))
        evicted = torch.rand(self.batch, self.heads, 12, generator=self.random) < draw(st.sampled_from((0.0, 0.5, 1.0)))
        self.gone = self.rows(12), self.rows(12), evicted

    def rows(self, num, heads=None):
        heads = self.heads if heads is None else heads
        return torch.randn(self.batch, heads, num, self.dim, generator=self.random)

    def moments(self, dtype):
        sizes = (self.batch, self.heads, self.dim, self.dim)
        return Moments.empty(*sizes, dtype=dtype, order=self.order, spread=self.order is not None).add(*self.gone)

    def centroids(self, dtype):
        return Centroids.empty(self.batch, self.heads, 3, self.dim, self.dim, dtype=dtype).add(*self.gone)

    def state(self, dtype):
        """Fresh copies of keys, values, positions, lengths and seen."""
        floating = (self.keys.to(dtype), self.values.to(dtype))
        return [t.clone() for t in (*floating, self.positions, self.lengths, self.seen)]


problems = st.composite(lambda draw, least=0: Problem(draw, least=least))


def close(found, expected, limit=2e-6):
    """Both -inf, or equal up to the limit."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


@CASES
@given(problems(), st.sampled_from(list(LIMIT)), st.booleans(), st.booleans())
def test_a_step(problem, dtype, watched, parts):
    q, k, v = problem.rows(problem.groups).flatten(1, 2).to(dtype), *(problem.rows(1).to(dtype) for _ in range(2))
    exact = [t.double() for t in (q, k, v)]
    found = expected = None
    if watched:
        found = torch.rand(problem.positions.shape, generator=problem.random)
        expected = found.double()
    mine, theirs = problem.state(dtype), [t.double() if t.is_floating_point() else t for t in problem.state(dtype)]
    options = {"order": problem.order, "mass": problem.mass}
    given_parts = [problem.centroids(kind) if parts else None for kind in (torch.float32, torch.float64)]
    out, *lses = cpu.decode_step(
        *(q, k, v, *mine, problem.moments(torch.float32), SCALE),
        **(options | {"attention": found, "centroids": given_parts[0]}),
    )
    want, *want_lses = reference.decode_step(
        *(*exact, *theirs, problem.moments(torch.float64), SCALE),
        **(options | {"attention": expected, "centroids": given_parts[1]}),
    )
    limit = LIMIT[dtype]
    assert out.dtype == dtype and out.shape == q.shape
    largest = max(1.0, theirs[1].abs().max().item(), want.abs().max().item())
    assert (out.double() - want).abs().max() <= (limit + 2e-6) * largest
    for one, other in zip(lses, want_lses):
        assert one.dtype == torch.float32
        close(one, other, 20 * limit)
    for one, other in zip(mine, theirs):
        assert torch.equal(one.double(), other.double())
    if watched:
        close(found, expected, 20 * limit)


@CASES
@given(problems(), st.booleans())
def test_a_step_of_heads_that_share_slots(problem, watched):
    """Every head owns one slot more than it uses, side by side in a slab."""
    starts = torch.zeros(problem.batch, problem.heads + 1, dtype=torch.int32)
    starts[:, 1:] = (problem.lengths + 1).cumsum(-1)
    room, width = int(starts.max()), problem.slots
    q, k, v = problem.rows(problem.groups).flatten(1, 2), problem.rows(1), problem.rows(1)
    slabs = [torch.randn(problem.batch, room, problem.dim, generator=problem.random) for _ in range(2)]
    results = []
    for run, dtype in ((cpu.decode_step, torch.float32), (reference.decode_step, torch.float64)):
        positions, lengths = torch.zeros(problem.batch, room, dtype=torch.int32), problem.lengths.clone()
        attention = torch.zeros(problem.batch, room, dtype=dtype) if watched else None
        keys, values = (slab.to(dtype, copy=True) for slab in slabs)
        step = (*(t.to(dtype) for t in (q, k, v)), keys, values, positions, lengths, problem.seen.clone())
        options = {"order": problem.order, "mass": problem.mass, "starts": starts, "width": width}
        out = run(*step, problem.moments(dtype), SCALE, **options, attention=attention)
        stored = unpack(positions, starts, width)[torch.arange(width) < lengths[..., None]]
        results.append((*out, keys, stored, lengths, *([attention] if watched else [])))
    for one, other in zip(*results):
        close(one, other, 4e-5)


@CASES
@given(problems(), st.integers(1, 40), st.sampled_from(("none", "left", "right", "anywhere")), st.data())
def test_a_block(problem, num, padding, data):
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
    options = {"order": problem.order, "mass": problem.mass}
    slots = (problem.keys, problem.values, problem.lengths)
    out, lse = cpu.prefill_attention(
        *(q, *slots, k, v, real, problem.moments(torch.float32), SCALE),
        **options,
    )
    exact = [t.double() if t.is_floating_point() else t for t in (q, *slots, k, v)]
    want, want_lse = reference.prefill_attention(*exact, real, problem.moments(torch.float64), SCALE, **options)
    close(out, want, 2e-5)
    close(lse, want_lse, 2e-5)


@CASES
@given(problems(least=1), st.integers(1, 6), st.booleans(), st.sampled_from(list(LIMIT)))
def test_what_a_window_of_queries_gives(problem, num, mixed, dtype):
    """Queries of padding come first and see nothing; the others see the used slots up to their own position."""
    batch, heads, slots = problem.positions.shape
    q, keys = problem.rows(num, heads * problem.groups).to(dtype), problem.keys.to(dtype)
    pads = torch.randint(0, num + 1, (batch, 1), generator=problem.random)
    real = torch.arange(num) >= pads
    last = problem.positions.amax((1, 2))[:, None] + torch.arange(num) - num + 1
    used = torch.arange(slots) < problem.lengths[..., None]
    visible = used[:, :, None] & (problem.positions[:, :, None] <= last[:, None, :, None]) & real[:, None, :, None]
    real &= visible.any(-1).all(1)
    mass = torch.randn(batch, heads * problem.groups, num, generator=problem.random) if mixed else None
    found = cpu.window_attention(q, keys, SCALE, visible, real, mass)
    exact = {"visible": visible, "query_valid": real, "log_mass": None if mass is None else mass.double()}
    close(found, reference.window_attention(q.double(), keys.double(), SCALE, **exact), 2e-5)
    assert found.dtype == torch.float32 and (found[~used] == 0).all()


@CASES
@given(problems(), st.integers(1, 9), st.booleans())
def test_what_centroids_say(problem, num, empty):
    q = problem.rows(num, problem.heads * problem.groups)
    if empty:
        problem.gone = (*problem.gone[:2], torch.zeros_like(problem.gone[2]))
    found = cpu.centroid_estimate(q, problem.centroids(torch.float32), SCALE)
    wanted = reference.centroid_estimate(q.double(), problem.centroids(torch.float64), SCALE)
    for one, other in zip(found, wanted):
        assert one.dtype == torch.float32
        close(one, other, 2e-5)


@CASES
@given(problems(), st.integers(1, 40), st.integers(0, 3), st.integers(0, 5), st.sampled_from(("ties", "nan", "any")))
def test_an_eviction(problem, tokens, sinks, recent, kind):
    scores = torch.randn(problem.positions.shape, generator=problem.random)
    if kind == "ties":
        scores = scores.round()
    elif kind == "nan":
        scores[torch.rand(scores.shape, generator=problem.random) < 0.3] = torch.nan
    mine, theirs = problem.state(torch.float32), problem.state(torch.float64)
    moments, exact = problem.moments(torch.float32), problem.moments(torch.float64)
    before = [t.clone() for t in mine]
    cpu.evict(*mine, moments, scores, tokens, sinks, recent)
    reference.evict(*theirs, exact, scores, tokens, sinks, recent)
    assert torch.equal(mine[3], theirs[3]) and torch.equal(mine[4], theirs[4])
    for one, other in zip(moments.tensors(), exact.tensors()):
        close(one, other, 2e-5)
    for row in range(problem.batch):
        for head in range(problem.heads):
            n, old = int(mine[3][row, head]), int(before[3][row, head])
            sorted_by = [state[2][row, head, :n].argsort() for state in (mine, theirs)]
            for part in range(3):
                found, want = (state[part][row, head, :n][by] for state, by in zip((mine, theirs), sorted_by))
                assert torch.equal(found.double(), want.double())
            # A token that stays within the first slots is not moved.
            was, now = before[2][row, head, : min(n, old)].tolist(), mine[2][row, head, :n].tolist()
            assert all(a == b for a, b in zip(was, now) if a in now)


def test_slots_with_gaps_are_evicted_by_the_reference():
    random = torch.Generator().manual_seed(0)
    room = torch.randn(2, 2, 2, 20, 8, generator=random)
    scores = torch.randn(2, 2, 20, generator=random)
    states = []
    for keys, values in ((room[:, 0].clone(), room[:, 1].clone()), room.clone().unbind(1)):
        place = torch.arange(20, dtype=torch.int32).repeat(2, 2, 1), torch.full((2, 2), 20, dtype=torch.int32)
        moments = Moments.empty(2, 2, 8, 8)
        assert cpu.evicts(keys, values, *place) == keys.is_contiguous()
        ops.evict(keys, values, *place, torch.full((2,), 20), moments, scores, 12, 1, 2)
        order = place[0][..., :12].argsort(-1)
        kept = [rows[:, :, :12].gather(2, order[..., None].expand(-1, -1, -1, 8)) for rows in (keys, values)]
        states.append((*kept, place[1], *moments.tensors()))
    for one, other in zip(*states):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("known", ["nothing", "moments", "centroids"])
@pytest.mark.parametrize("watched", [False, True])
def test_rows_do_not_touch_each_other(watched, known):
    """NaN in one row stays there, and every other row is what it is alone, bit for bit."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[30, 30], [7, 19], [39, 1]], dtype=torch.int32)
    keys, values = (torch.randn(3, 2, 40, 16, generator=random) for _ in range(2))
    q, k, v = torch.randn(3, 4, 16, generator=random), *(torch.randn(3, 2, 1, 16, generator=random) for _ in range(2))
    keys[1, 0, 3], values[1, 1, 5] = torch.nan, torch.inf
    gone = [torch.randn(3, 2, 9, 16, generator=random) for _ in range(2)]

    def step(rows):
        received = torch.zeros(len(rows), 2, 40) if watched else None
        place = torch.zeros(len(rows), 2, 40, dtype=torch.int32), lengths[rows].clone(), torch.full((len(rows),), 50)
        moments = Moments.empty(len(rows), 2, 16, 16, order=1 if known == "moments" else None)
        moments = moments.add(*(one[rows] for one in gone))
        centroids = Centroids.empty(len(rows), 2, 4, 16, 16).add(*(one[rows] for one in gone))
        options = {"attention": received, "centroids": centroids if known == "centroids" else None}
        stored = keys[rows].clone(), values[rows].clone()
        out = cpu.decode_step(q[rows], k[rows], v[rows], *stored, *place, moments, SCALE, **options)[0]
        return out if received is None else torch.cat([out.flatten(1), received.flatten(1)], 1)

    together = step([0, 1, 2])
    assert together[1].isnan().any() and together[[0, 2]].isfinite().all()
    for row in (0, 2):
        assert torch.equal(together[row], step([row])[0])


@pytest.mark.parametrize("num", [1, 12, 16, 33])
def test_blocks_of_rows_are_what_they_are_alone(num):
    """Bit for bit, whatever the vectors of the processor and the shape of the batch."""
    random = torch.Generator().manual_seed(0)
    q, *new = (torch.randn(3, heads, num, 16, generator=random) for heads in (4, 2, 2))
    keys, values = (torch.randn(3, 2, 20, 16, generator=random) for _ in range(2))
    lengths = torch.tensor([[20, 20], [7, 0], [19, 1]], dtype=torch.int32)

    def block(rows):
        given = (q[rows], keys[rows], values[rows], lengths[rows], *(one[rows] for one in new))
        return cpu.prefill_attention(*given, torch.ones(len(rows), num, dtype=torch.bool), None, SCALE)

    together = block([0, 1, 2])
    for row in range(3):
        assert all(torch.equal(one[row], alone[0]) for one, alone in zip(together, block([row])))


@pytest.mark.parametrize("mixed", [False, True])
def test_windows_of_rows_are_what_they_are_alone(mixed):
    random = torch.Generator().manual_seed(0)
    q, keys = torch.randn(3, 4, 5, 16, generator=random), torch.randn(3, 2, 45, 16, generator=random)
    visible = torch.rand(3, 2, 5, 45, generator=random) < 0.7
    real = torch.tensor([[True] * 5, [False] * 3 + [True] * 2, [True] * 5])
    mass = torch.randn(3, 4, 5, generator=random) if mixed else None

    def window(rows):
        masks = visible[rows], real[rows], None if mass is None else mass[rows]
        return cpu.window_attention(q[rows], keys[rows], SCALE, *masks)

    together = window([0, 1, 2])
    assert all(torch.equal(together[row], window([row])[0]) for row in range(3))


@pytest.mark.parametrize("why", ["softcap", "float64", "values of another size", "backend"])
def test_the_reference_does_what_the_fused_kernel_cannot(why):
    dtype = torch.float64 if why == "float64" else torch.float32
    q, keys = torch.randn(2, 4, 16, dtype=dtype), torch.randn(2, 2, 9, 16, dtype=dtype)
    values = torch.randn(2, 2, 9, 24 if why == "values of another size" else 16, dtype=dtype)
    softcap = 5.0 if why == "softcap" else None
    backend = "reference" if why == "backend" else "auto"
    assert cpu.serves("auto", q.float(), keys.float(), None) and not cpu.serves(backend, q, values, softcap)
    k, v = keys[:, :, :1].clone(), values[:, :, :1].clone()
    results = []
    for run, extra in ((ops.decode_step, {"backend": backend}), (reference.decode_step, {})):
        place = torch.zeros(2, 2, 9, dtype=torch.int32), torch.full((2, 2), 8, dtype=torch.int32), torch.full((2,), 8)
        moments = Moments.empty(2, 2, 16, values.shape[-1], dtype=dtype)
        results.append(run(q, k, v, keys.clone(), values.clone(), *place, moments, SCALE, softcap, **extra)[0])
    if why == "values of another size":
        assert results[0].shape[-1] == 24
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["refuses", "reads another head", "sees the future"])
def test_a_kernel_that_does_something_else_is_not_used(how, monkeypatch):
    attention = cpu.attention
    right = attention.attend

    def other(q, keys, values, scale, mask, causal=False):
        if how == "refuses":
            raise RuntimeError("attn_mask and is_causal exclude each other")
        if how == "reads another head":
            return right(q, keys.flip(1), values.flip(1), scale, mask, causal)
        return right(q, keys, values, scale, mask, False)

    assert attention.fused_as_expected()
    monkeypatch.setattr(attention, "attend", other)
    monkeypatch.setattr(attention, "fused_as_expected", attention.fused_as_expected.__wrapped__)
    q = torch.randn(1, 4, 16)
    assert not cpu.serves("auto", q, q, None)
