"""select, compact and the merge into the moments: the kernels keep exactly what the reference keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import reference
from fastkv.kernels import compact as compact_module
from fastkv.kernels import operations
from fastkv.kernels import select as select_module
from fastkv.kernels.select import select
from fastkv.reference import Moments

from .conftest import examples
from .pairwise import covering, named
from .states import copied, encoded, in_pages, make_spec, make_state

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def check_select(scores, positions, valid, protected, tokens):
    each = isinstance(tokens, torch.Tensor)
    wanted = (reference.select_each if each else reference.select)(scores, positions, valid, protected, tokens)
    got = select(scores, positions, valid, protected, tokens)
    assert got.kept.dtype == torch.bool and got.counts.dtype == torch.int64
    assert torch.equal(got.counts, wanted.counts) and torch.equal(got.kept, wanted.kept)


def shuffled_positions(shape, generator, span=None):
    span = span or 2 * shape[-1]
    return torch.rand(*shape[:-1], span, generator=generator).argsort(-1)[..., : shape[-1]].to(torch.int32)


KINDS = ("random", "ties", "constant", "signed zero", "nan and inf", "tiny")


def make_scores(kind, shape, generator):
    scores = torch.randn(*shape, generator=generator)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4028234663852886e38, -3.4e38, 0.0, 1.0])
    return {
        "random": scores, "ties": scores.round(), "constant": torch.ones(shape),
        "signed zero": torch.where(scores > 0, 0.0, -0.0), "tiny": scores * 1e-42,  # denormal
        "nan and inf": special[torch.randint(0, len(special), shape, generator=generator)],
    }[kind]  # fmt: skip


def candidates(kind, *shape):
    """Scores and positions of candidates, and which are valid and protected."""
    generator = torch.Generator().manual_seed(shape[-1])
    scores, positions = make_scores(kind, shape, generator), shuffled_positions(shape, generator)
    return scores, positions, *(torch.rand(shape, generator=generator) > share for share in (0.2, 0.8))


@pytest.mark.parametrize("num,kind", covering([1, 7, 129, 1300], KINDS, together=1))
def test_select_is_exact(kind, num):
    given = candidates(kind, 2, 2, num)
    given[2][0, 1] = False  # an empty head
    for tokens in {0, 1, num // 3, num, num + 5}:
        check_select(*given, tokens)


@pytest.mark.parametrize("num", [7, 129])
def test_select_of_heads_that_keep_their_own_number(num):
    check_select(*candidates("ties", 2, 3, num), torch.tensor([[0, 1, num // 3], [num // 2, num, num + 5]]))


@pytest.mark.parametrize("kind", [named(kind, slow=kind != "ties") for kind in KINDS])
def test_select_looped_over_chunks_is_exact(kind, monkeypatch):
    monkeypatch.setattr(select_module, "WARPS", {"": {1024: 4}})
    for tokens in (3, 400, 1000, 2400):
        check_select(*candidates(kind, 1, 2, 2500), tokens)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_select_any_case(data):
    num = data.draw(st.integers(1, 24))
    floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, float("nan")]))
    scores = torch.tensor(data.draw(st.lists(floats, min_size=num, max_size=num)), dtype=torch.float32)[None, None]
    # Duplicate positions too: then the lower index wins, in the reference by stability.
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 30), min_size=num, max_size=num)), dtype=torch.int32)
    booleans = st.lists(st.booleans(), min_size=num, max_size=num)
    flags = (torch.tensor(data.draw(booleans))[None, None] for _ in range(2))
    check_select(scores, positions[None, None], *flags, data.draw(st.integers(0, num + 2)))


def sorted_rows(state):
    """Every tensor with a row for each token, in order of position, of the tokens in use."""
    exact = state.exact
    index = torch.where(exact.valid, exact.positions, 2**30).argsort(-1)
    live = exact.valid.gather(2, index)
    return {name: reference.rows_at(rows, index)[live] for name, rows in exact.moving().items()}


def moments_of(tokens, dtype, order):
    """Moments in float64 of keys and values, as that dtype holds them, up to that order."""
    empty = Moments.empty(*tokens[0].shape[:2], *(t.shape[-1] for t in tokens), dtype=torch.float64)
    count, *rest = empty.add(*(t.double() for t in tokens)).tensors()
    return Moments(*[count, *(t.to(dtype) for t in rest)][: {None: 1, 0: 3, 1: 4}[order]])


def check_compact(slots="model", dtype=torch.float32, dim=64, value_dim=None, room=48, used=40, num=9, tokens=None,
                  order=1, evicted=50, shift=0.0, paged=False, batch=2, heads=2, seed=0):  # fmt: skip
    """Up to `used` slots of each head and a block of `num`, of which random `tokens` stay: what stays of the slots
    moves as it is, what stays of the block is encoded, and moments see the block as it was. Unused slots and padding
    are NaN; the block is a transposed view, as Hugging Face makes it."""
    source, value_dim = torch.Generator().manual_seed(seed), value_dim or dim

    def normal(*shape):
        return torch.randn(*shape, generator=source) + shift

    lengths = torch.randint(0, used + 1, (batch, heads), generator=source)
    lengths[0, 0], lengths[-1, -1] = used, 0  # a full head and an empty one
    inside, fresh = torch.arange(room) < lengths[..., None], torch.rand(batch, num, generator=source) < 0.8
    positions = shuffled_positions((batch, heads, used + num), source)
    places = torch.nn.functional.pad(positions[..., :used], (0, room - used), value=-7)
    keys, values = (normal(batch, heads, room, one).masked_fill(~inside[..., None], NAN) for one in (dim, value_dim))
    block = [normal(batch, num, heads, one).masked_fill(~fresh[..., None, None], NAN) for one in (dim, value_dim)]
    block = (*(rows.to(dtype).transpose(1, 2) for rows in block), positions[..., used:])
    valid = torch.cat([inside[..., :used], fresh[:, None].expand(-1, heads, -1)], 2)
    kept = valid & (torch.rand(valid.shape, generator=source).argsort(-1).argsort(-1) < (tokens or room))
    kept &= kept.cumsum(-1) <= room
    selection = reference.Selection(kept, kept.sum(-1))
    seen, gone = torch.full((batch,), 2 * (used + num)), [normal(batch, heads, evicted, d) for d in (dim, value_dim)]
    made = [t for t in (keys.to(dtype), values.to(dtype), lengths.int(), places.int(), seen)]
    state = encoded(make_state(*made, moments=Moments(torch.zeros_like(made[2].long()))), slots)
    state.exact.attention = torch.ones(batch, heads, room)
    state.exact.memory, known = torch.ones(batch, heads, room), torch.rand(valid.shape, generator=source)
    truth, usual, mine = copied(state, torch.float64), copied(state), copied(state)
    for one, to in ((truth, torch.float64), (usual, torch.float32), (mine, torch.float32)):
        one.moments = moments_of([t for t in gone], to, order)
    if order == 1:
        mine.moments.slope = torch.empty_like(mine.moments.cross, dtype=torch.bfloat16)
    spec = make_spec(order=order)
    wide = tuple(t.double() if t.is_floating_point() else t for t in block)
    reference.compact(valid, selection, wide, known, truth, spec)
    reference.compact(valid, selection, block, known, usual, spec)
    placed = in_pages(mine, [2, 1], 3) if paged else mine
    operations.compact(valid, selection, block, known, placed, spec)
    mine = placed.taken() if paged else mine

    assert torch.equal(mine.exact.lengths.long(), selection.counts)
    assert torch.equal(mine.seen, seen + fresh.sum(-1)) and not mine.exact.attention.any()
    for one in (mine, usual):  # the numbers of the tokens in the slots
        there = one.exact.positions[..., None] == torch.where(kept, positions, -1)[:, :, None]
        there &= (torch.arange(room) < one.exact.lengths[..., None])[..., None]
        assert torch.equal(one.exact.memory, torch.where(there, known[:, :, None], 0).sum(-1))
    for (name, got), (_, want) in zip(sorted_rows(mine).items(), sorted_rows(usual).items(), strict=True):
        assert torch.equal(got, want), name
    stays = kept[..., :used] & (torch.arange(used) < selection.counts[..., None])  # where it is
    was, now = (one.exact.positions[..., :used][stays] for one in (state, mine))
    assert torch.equal(was, now)
    assert torch.equal(mine.moments.count, truth.moments.count)
    for got, same, want in zip(*(one.moments.tensors()[1:] for one in (mine, usual, truth))):
        error, limit = (got - want).abs().max(), 2 * (same - want).abs().max() + 2e-6 * (1 + want.abs().max())
        assert got.isfinite().all() and error <= limit, (error, limit)
    if order == 1:
        exact = mine.moments.cross / mine.moments.count.clamp(min=1)[..., None, None]
        torch.testing.assert_close(mine.moments.slope.float(), exact, rtol=2**-7, atol=1e-30)


CASES = {
    "a full cache and a block": dict(tokens=40), "everything fits": dict(room=64, used=33, num=7),
    "a flush while generating": dict(room=40, used=37, num=0, tokens=32),
    "a whole prompt": dict(room=16, used=0, num=50, heads=1),
    "almost nothing stays": dict(room=8, used=5, num=3, tokens=1),
    "one slot": dict(room=1, used=1, num=1, tokens=1, heads=1), "only counts": dict(order=None),
    "only means, of nothing before": dict(order=0, evicted=0), "nothing before": dict(evicted=0),
    "far from zero": dict(room=64, used=60, num=20, tokens=20, shift=30.0, heads=1),  # raw sums would lose four digits
    "values of another size": dict(dim=128, value_dim=64), "512": dict(dim=512, batch=1),
    **{f"{dim}": dict(dim=dim) for dim in (80, 96, 256)},
}  # fmt: skip


@pytest.mark.parametrize("case, dtype", covering(CASES, DTYPES, together=1))
def test_compact(case, dtype):
    check_compact(dtype=dtype, **CASES[case])


@pytest.mark.parametrize("rows", [16, 40])
def test_splits_of_the_rows_agree(rows, monkeypatch):
    monkeypatch.setattr(compact_module, "ROWS_PER_SPLIT", rows)
    check_compact(room=64, used=60, num=140, tokens=60, heads=1)


def test_plan_over_several_tiles(monkeypatch):
    monkeypatch.setattr(compact_module, "PLAN", 128)
    check_compact(room=200, used=190, num=120, tokens=150, batch=1)


@settings(max_examples=examples(240), deadline=None)
@given(
    slots=st.sampled_from(["model", "model", "int8", "fp8", "int4", "k8v4"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), dim=st.sampled_from([32, 64, 128]), used=st.integers(0, 12),
    spare=st.integers(0, 4), num=st.integers(0, 8), tokens=st.integers(1, 16), order=st.sampled_from([1, 0, None]),
    paged=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_compact_any_case(slots, dtype, dim, used, spare, num, tokens, order, paged, seed):
    num += not used + num
    room = max(used + spare, 1)
    check_compact(slots, dtype, dim, None, room, used, num, tokens, order, seed % 3, paged=paged, seed=seed)
