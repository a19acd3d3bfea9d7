"""select, compact and the merge into the moments: the kernels keep exactly what the reference keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import reference
from fastkv.kernels import compact as compact_module
from fastkv.kernels import select as select_module
from fastkv.kernels.compact import compact
from fastkv.kernels.select import select
from fastkv.reference import Moments

from .conftest import examples
from .pairwise import covering, named
from .states import DEVICE, copied, make_spec, make_state

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def check_select(scores, positions, valid, protected, tokens):
    each = isinstance(tokens, torch.Tensor)
    wanted = (reference.select_each if each else reference.select)(scores, positions, valid, protected, tokens)
    kept, counts = select(
        scores=scores.to(DEVICE),
        positions=positions.to(DEVICE),
        valid=valid.to(DEVICE),
        protected=protected.to(DEVICE),
        tokens=tokens.to(DEVICE) if each else tokens,
    )
    assert kept.dtype == torch.bool and counts.dtype == torch.int64
    assert torch.equal(counts.cpu(), wanted.counts)
    assert torch.equal(kept.cpu(), wanted.kept)


def shuffled_positions(shape, generator, span=None):
    span = span or 2 * shape[-1]
    return torch.rand(*shape[:-1], span, generator=generator).argsort(-1)[..., : shape[-1]].to(torch.int32)


KINDS = ("random", "ties", "constant", "signed zero", "nan and inf", "tiny")


def make_scores(kind, shape, generator):
    scores = torch.randn(*shape, generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "constant":
        scores = torch.ones(shape)
    elif kind == "signed zero":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "nan and inf":
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4028234663852886e38, -3.4e38, 0.0, 1.0])
        scores = special[torch.randint(0, len(special), shape, generator=generator)]
    elif kind == "tiny":
        scores = scores * 1e-42  # denormal
    return scores


@pytest.mark.parametrize("num,kind", covering([1, 7, 129, 1300], KINDS, together=1))
def test_select_is_exact(kind, num):
    generator = torch.Generator().manual_seed(num)
    shape = (2, 2, num)
    scores, positions = make_scores(kind, shape, generator), shuffled_positions(shape, generator)
    valid = torch.rand(shape, generator=generator) > 0.2
    valid[0, 1] = False  # an empty head
    protected = torch.rand(shape, generator=generator) > 0.8
    for tokens in {0, 1, num // 3, num, num + 5}:
        check_select(scores, positions, valid, protected, tokens)


@pytest.mark.parametrize("num", [7, 129])
def test_select_of_heads_that_keep_their_own_number(num):
    generator = torch.Generator().manual_seed(num)
    shape = (2, 3, num)
    scores, positions = make_scores("ties", shape, generator), shuffled_positions(shape, generator)
    valid, protected = torch.rand(shape, generator=generator) > 0.2, torch.rand(shape, generator=generator) > 0.8
    check_select(scores, positions, valid, protected, torch.tensor([[0, 1, num // 3], [num // 2, num, num + 5]]))


@pytest.mark.parametrize("kind", [named(kind, slow=kind != "ties") for kind in KINDS])
def test_select_looped_over_chunks_is_exact(kind, monkeypatch):
    monkeypatch.setattr(select_module, "WARPS", {"": {1024: 4}})
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 2500)
    valid, protected = torch.rand(shape, generator=generator) > 0.2, torch.rand(shape, generator=generator) > 0.8
    for tokens in (3, 400, 1000, 2400):
        check_select(
            make_scores(kind, shape, generator), shuffled_positions(shape, generator), valid, protected, tokens
        )


def test_select_of_a_long_prompt():
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, 32768)
    positions = torch.arange(shape[-1], dtype=torch.int32)[None, None]
    scores = torch.randn(shape, generator=generator).mul(8).round()
    check_select(scores, positions, torch.ones(shape, dtype=torch.bool), positions < 4, 1000)


@pytest.mark.parametrize("tokens", [3, 20, 60])
def test_protection_inside_equals_protection_outside(tokens):
    generator = torch.Generator().manual_seed(1)
    shape = (2, 3, 50)
    scores, positions = torch.randn(shape, generator=generator), shuffled_positions(shape, generator)
    valid, seen = torch.rand(shape, generator=generator) > 0.1, torch.tensor([100, 80])
    guard = (positions < 4) | (positions >= seen[:, None, None] - 9)
    wanted = reference.select(scores, positions, valid, guard, tokens)
    kept, counts = select(scores=scores, positions=positions, valid=valid, tokens=tokens, seen=seen, sinks=4, recent=9)
    assert torch.equal(kept, wanted.kept) and torch.equal(counts, wanted.counts)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_select_any_case(data):
    num = data.draw(st.integers(1, 24))
    floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, float("nan")]))
    scores = torch.tensor(data.draw(st.lists(floats, min_size=num, max_size=num)), dtype=torch.float32)[None, None]
    # Duplicate positions too: then the lower index wins, in the reference by stability.
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 30), min_size=num, max_size=num)), dtype=torch.int32)
    flags = [
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))[None, None].contiguous()
        for _ in range(2)
    ]
    check_select(scores, positions[None, None], *flags, data.draw(st.integers(0, num + 2)))


def random_state(batch, heads, slots, used, dim, value_dim, block, dtype, seed, evicted=50, shift=0.0):
    """A state with `used` candidates in slots and float64 moments of `evicted` earlier tokens, a block, which of all
    these are tokens, and their positions."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return (torch.randn(*shape, generator=generator) + shift).to(dtype)

    total = used + block
    positions = shuffled_positions((batch, heads, total), generator)
    held = torch.randint(0, used + 1, (batch, heads), generator=generator)
    held[0, 0], held[-1, -1] = used, 0  # a full head and an empty one
    fresh = torch.rand(batch, 1, block, generator=generator) > 0.2
    valid = torch.cat([torch.arange(used).expand(batch, heads, -1) < held[..., None], fresh.expand(-1, heads, -1)], 2)
    keys, values = randn(batch, heads, slots, dim), randn(batch, heads, slots, value_dim)
    inside = torch.arange(slots) < held[..., None]
    keys = torch.where(inside[..., None], keys, float("nan"))
    values = torch.where(inside[..., None], values, float("nan"))
    # The block as Hugging Face makes it: a transposed view; padding rows hold NaN.
    new_keys = randn(batch, block, heads, dim).transpose(1, 2)
    new_values = randn(batch, block, heads, value_dim).transpose(1, 2)
    new_keys.masked_fill_(~fresh[..., None], float("nan"))
    new_values.masked_fill_(~fresh[..., None], float("nan"))
    places = torch.full((batch, heads, slots), -7, dtype=torch.int32)
    places[..., :used] = positions[..., :used]
    old = Moments.empty(batch, heads, dim, value_dim, dtype=torch.float64).add(
        torch.randn(batch, heads, evicted, dim, generator=generator).double() + shift,
        torch.randn(batch, heads, evicted, value_dim, generator=generator).double() + shift,
    )
    state = make_state(keys.contiguous(), values.contiguous(), held.to(torch.int32), places, moments=old)
    return state, (new_keys, new_values, positions[..., used:]), valid, positions


def cast(moments, dtype, order):
    """A copy with less precision and, perhaps, less memory."""
    fields = [moments.count.clone(), *(t.to(dtype, copy=True) for t in moments.tensors()[1:])]
    return Moments(*fields[: {None: 1, 0: 3, 1: 4}[order]])


def with_moments(state, dtype, order, floating=None):
    """A copy of a state whose moments, and perhaps all that is floating, have another precision."""
    moments, state = cast(state.moments, dtype, order), copied(state, floating)
    state.moments = moments
    return state


def rows_of(slots, head, length):
    """The set of stored tokens as sorted (position, key, value) rows."""
    place = slots.positions[head][:length]
    order = place.argsort()
    return place[order], slots.keys[head][:length][order], slots.values[head][:length][order]


def check_compact(state, block, valid, positions, tokens, order=1, slope=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(valid.shape, generator=generator)
    selection, spec = reference.select(scores, positions, valid, torch.zeros_like(valid), tokens), make_spec()
    exact = with_moments(state, torch.float64, order, torch.float64)
    same, got = with_moments(state, torch.float32, order), with_moments(state, torch.float32, order)
    reference.compact(valid, selection, (block[0].double(), block[1].double(), block[2]), exact, spec)
    reference.compact(valid, selection, block, same, spec)
    shadow = None
    if slope and order == 1:
        shadow = got.moments.slope = torch.empty_like(got.moments.cross, dtype=torch.bfloat16)
    compact(valid, selection, block, got, spec)

    slots = got.exact
    assert torch.equal(slots.lengths.long(), selection.counts)
    used = valid.shape[-1] - block[0].shape[2]
    for b in range(valid.shape[0]):
        for h in range(valid.shape[1]):
            length = int(selection.counts[b, h])
            for mine, theirs in zip(rows_of(slots, (b, h), length), rows_of(same.exact, (b, h), length)):
                assert torch.equal(mine, theirs)
            stay = selection.kept[b, h, : min(used, length)].nonzero()[:, 0]
            assert torch.equal(slots.positions[b, h, stay], state.exact.positions[b, h, stay])
    assert torch.equal(got.moments.count, exact.moments.count)
    for mine, theirs, right in zip(*(one.moments.tensors()[1:] for one in (got, same, exact))):
        assert mine.isfinite().all()
        error, allowed = (mine - right).abs().max(), (theirs - right).abs().max()
        assert error <= 2 * allowed + 1e-6 * (1 + right.abs().max()), (error, allowed)
    if shadow is not None:
        wanted = got.moments.cross / got.moments.count.clamp(min=1)[..., None, None]
        torch.testing.assert_close(shadow.float(), wanted, rtol=2**-7, atol=1e-30)


CASES = [  # heads, slots, used, block, tokens
    (2, 48, 40, 9, 40),  # a full cache and a block: at most 9 moves
    (2, 64, 33, 7, 64),  # everything fits
    (2, 40, 37, 0, 32),  # a flush while generating
    (1, 16, 0, 50, 16),  # the whole prompt at once
    (2, 8, 5, 3, 1),  # almost nothing stays
    (2, 8, 8, 5, 0),  # nothing stays
    (1, 1, 1, 1, 1),  # one slot
]


@pytest.mark.parametrize("case, dtype", covering(CASES, DTYPES, together=1))
def test_compact_keeps_and_merges(case, dtype):
    heads, slots, used, block, tokens = case
    check_compact(*random_state(2, heads, slots, used, 64, 64, block, dtype, seed=slots), tokens)


@pytest.mark.parametrize("dim, value_dim", [(80, 80), (96, 96), (128, 64), (256, 256), (512, 512)])
def test_compact_head_dims(dim, value_dim):
    check_compact(*random_state(1, 2, 48, 40, dim, value_dim, 9, torch.float32, seed=dim), 40)


@pytest.mark.parametrize("order, evicted", covering([1, 0, None], [50, 0], together=1))
def test_compact_orders(order, evicted):
    check_compact(*random_state(2, 2, 48, 40, 64, 64, 9, torch.float32, 3, evicted), 30, order, slope=evicted > 0)


def test_compact_does_not_cancel():
    """Keys far from zero: raw sums in fp32 would lose four digits here."""
    check_compact(*random_state(1, 1, 64, 60, 64, 64, 20, torch.float32, 5, shift=30.0), 20)


@pytest.mark.parametrize("rows", [16, 40])
def test_splits_of_the_rows_agree(rows, monkeypatch):
    monkeypatch.setattr(compact_module, "ROWS_PER_SPLIT", rows)
    check_compact(*random_state(2, 1, 64, 60, 64, 64, 140, torch.float32, 7), 60)


def test_plan_over_several_tiles(monkeypatch):
    monkeypatch.setattr(compact_module, "PLAN", 128)
    check_compact(*random_state(1, 2, 200, 190, 64, 64, 120, torch.float32, 7), 150)


@settings(max_examples=examples(200), deadline=None)
@given(
    used=st.integers(0, 12),
    spare=st.integers(0, 4),
    block=st.integers(0, 8),
    tokens=st.integers(0, 16),
    order=st.sampled_from([1, 0, None]),
    seed=st.integers(0, 10**6),
)
def test_compact_any_case(used, spare, block, tokens, order, seed):
    block += not used + block
    tokens = min(tokens, used + spare)
    check_compact(
        *random_state(1, 2, used + spare, used, 16, 16, block, torch.float32, seed, evicted=seed % 3),
        tokens,
        order,
        seed=seed,
    )
