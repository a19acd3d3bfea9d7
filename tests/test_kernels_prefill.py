"""prefill_attention against the reference in float64: at most twice the error of the same computation in its dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import reference
from fastkv.kernels.prefill_attention import prefill_attention
from fastkv.reference import Centroids, Moments

from .conftest import examples
from .models import raises
from .pairwise import covering
from .states import copied, make_spec, make_state, sinks

# The interpreter truncates fp32 to bf16 where the GPU rounds: weights and outputs lose up to one unit in the last place
ATOL = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def case(batch=2, heads=1, groups=2, dim=64, value_dim=None, slots=40, held=None, num=9, dtype=torch.float32,
         evicted=20, size=1.0, padding=True, seed=0, spare=3, parts=None,
         means=torch.float32):  # fmt: skip
    """Block in `dtype` (q, k, v, valid) and state. Unused slots and padding rows hold NaN; q, k and v are views, as in
    Hugging Face, and not all slots are looked at. With `parts` the evicted tokens are so many centroids."""
    value_dim, generator = value_dim or dim, torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(0, slots + 1, (batch, heads), generator=generator)
    if held is not None:
        lengths[:] = held
    inside = (torch.arange(slots + spare) < lengths[..., None])[..., None]
    valid = torch.ones(batch, num, dtype=torch.bool)
    if padding:
        valid[-1, : num // 2] = False
    past = Moments.empty(batch, heads, dim, value_dim)
    centroids = None if parts is None else Centroids.empty(batch, heads, parts, dim, value_dim, dtype=means)
    if evicted:
        mask = torch.ones(batch, heads, evicted, dtype=torch.bool)
        mask[0, 0] = False  # one head that evicted nothing
        old = randn(batch, heads, evicted, dim), randn(batch, heads, evicted, value_dim), mask
        past, centroids = past.add(*old), None if centroids is None else centroids.add(*old)
    q = (randn(batch, num, heads * groups, dim) * size).transpose(1, 2)
    keys, values = (
        torch.where(inside, randn(batch, heads, slots + spare, one), float("nan")).to(dtype) for one in (dim, value_dim)
    )
    k, v = (randn(batch, num, heads, one).transpose(1, 2) for one in (dim, value_dim))
    for rows in (k, v):
        rows.masked_fill_(~valid[:, None, :, None], float("nan"))
    state = make_state(keys, values, lengths.to(torch.int32), moments=past, parts=centroids)
    state.exact.filled = slots
    return (*(t.to(dtype) for t in (q, k, v)), valid), state


def check(block, state, scale=0.125, softcap=None, order=1, slope=False, lse_slack=1e-6, padding=True):
    """Args: padding: whether what queries of padding get is compared, too."""
    q, k, v, valid = block
    dtype = q.dtype
    spec = make_spec(scale, softcap, order, **({} if state.parts is None else {"correction": "centroids"}))
    wide = copied(state, torch.float64)
    exact, *exact_sums = reference.prefill_attention(q.double(), k.double(), v.double(), valid, wide, spec)
    plain, *plain_sums = reference.prefill_attention(*block, state, spec)
    if slope:
        state, m = copied(state), state.moments
        state.moments.slope = (m.cross / m.count.clamp(min=1)[..., None, None]).to(torch.bfloat16)
    out, *sums = prefill_attention(*block, state, spec)
    assert out.dtype == dtype and out.shape == exact.shape and out.isfinite().all()
    results = out, sums[0]
    if not padding:
        out, exact, plain = (one.transpose(1, 2)[valid] for one in (out, exact, plain))
        sums, exact_sums, plain_sums = (
            [one.transpose(1, 2)[valid] for one in three] for three in (sums, exact_sums, plain_sums)
        )
    largest = exact.abs().max()
    allowed = 2 * (plain.double() - exact).abs().max() + ATOL[dtype] * (1 + largest) + 4e-3 * largest * slope
    assert (out.double() - exact).abs().max() <= allowed
    assert (out[exact_sums[0] == -float("inf")] == 0).all()
    for mine, want, same in zip(sums, exact_sums, plain_sums, strict=True):
        some = want != -float("inf")
        assert mine.dtype == torch.float32 and torch.equal(mine != -float("inf"), some)
        if some.any():
            error, usual = ((one.double() - want)[some].abs().max() for one in (mine, same))
            assert error <= 2 * usual + lse_slack * (1 + want[some].abs().max())
    return results


SIZES = [(64, 64), (80, 80), (96, 96), (128, 64), (128, 128), (256, 256), (320, 512), (512, 512)]


@pytest.mark.parametrize("sizes, dtype", covering(SIZES, list(ATOL), together=1))
def test_head_dims(sizes, dtype):
    dim, value_dim = sizes
    dtype = torch.float16 if dtype == torch.float32 and dim > 256 else dtype  # wide heads have no room for fp32
    check(*case(batch=1, groups=3, dim=dim, value_dim=value_dim, dtype=dtype), slope=dtype == torch.bfloat16)


@pytest.mark.parametrize("evicted, softcap, order", covering([0, 1, 200], [None, 5.0], [1, 0, None]))
def test_orders_and_softcap(order, softcap, evicted):
    check(*case(evicted=evicted), softcap=softcap, order=order)


@pytest.mark.parametrize("slots, num", [(1, 1), (0, 5), (3, 1), (64, 64), (65, 33), (130, 70), (17, 129)])
def test_odd_sizes(slots, num):
    check(*case(batch=1, slots=slots, num=num, padding=False))


def test_padding_before_many_tokens():
    """Rows with padding, of whose tokens many are seen by all queries of a program."""
    block, state = case(num=150, groups=1, padding=False)
    block[3][1, :70] = False
    for rows in block[1:3]:
        rows[1, :, :70] = float("nan")
    check(block, state)


def test_empty_heads_and_padding_only():
    block, state = case(held=0, evicted=0)
    block[3][0] = False
    out, lse = check(block, state)
    assert (out[0] == 0).all() and (lse[0] == -float("inf")).all()


@pytest.mark.parametrize("size", [300.0, 3e3])
def test_huge_logits(size):
    block, state = case(size=size)
    assert (block[0].abs().max() * 0.125 * 64**0.5) > 500
    check(block, state)


def test_logits_of_ten_thousand_of_either_sign():
    block, state = case(evicted=0, dim=16)
    block[0][:] = 100.0
    for keys in (state.exact.keys, block[1]):
        keys.copy_(keys.sign() * 50.0)  # NaN stays NaN
    check(block, state)


# head_dim, value_dim, groups, centroids, dtype
PARTS = [(64, 64, 4, 31, torch.bfloat16), (80, 80, 3, 1, torch.float16), (128, 48, 1, 17, torch.float32)]
PARTS += [(256, 256, 2, 6, torch.bfloat16), (320, 512, 7, 33, torch.float16)]


@pytest.mark.parametrize(
    "sizes, softcap, means",
    covering(PARTS, [None, 2.0], [torch.float32, torch.bfloat16], together=1),
)
def test_centroids(sizes, softcap, means):
    """Of heads that evicted more tokens than there are centroids, fewer, and none."""
    dim, value_dim, groups, parts, dtype = sizes
    sizes = dict(heads=2, dim=dim, value_dim=value_dim, groups=groups, dtype=dtype, parts=parts, means=means)
    check(*case(batch=1, evicted=40, **sizes), softcap=softcap)
    check(*case(batch=1, evicted=min(parts, 4), held=0, **sizes), softcap=softcap)


def test_centroids_whose_logits_are_ten_thousand_of_either_sign():
    block, state = case(batch=1, heads=2, dim=16, parts=4, evicted=9, num=70)
    block[0][:] = torch.where(torch.arange(70) % 2 == 0, 100.0, -100.0)[:, None]
    state.parts.keys.copy_(state.parts.keys.sign() * 50.0)
    state.parts.spread.mul_(1e4)
    check(block, state)
    state.exact.lengths.zero_()
    block[3][:] = False  # all that is left to see
    out, _ = check(block, state)
    assert out[:, 2:].any() and not out[:, :2].any()


@settings(max_examples=examples(200), deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 4, 7, 8]), slots=st.integers(0, 9), num=st.integers(1, 7),
    evicted=st.integers(0, 3), order=st.sampled_from([1, 0, None]), softcap=st.sampled_from([None, 3.0]),
    dtype=st.sampled_from(list(ATOL)), size=st.sampled_from([0.01, 1.0, 30.0]),
    parts=st.sampled_from([None, None, 1, 2, 18]), seed=st.integers(0, 10**6), data=st.data(),
)  # fmt: skip
def test_any_case(groups, slots, num, evicted, order, softcap, dtype, size, parts, seed, data):
    block, state = case(
        batch=1, groups=groups, dim=16, slots=slots, num=num, evicted=evicted, dtype=dtype, size=size, seed=seed,
        parts=parts,
    )  # fmt: skip
    state.sink_logits = data.draw(sinks(groups), "sinks")
    check(block, state, 0.25, softcap, order)


@pytest.mark.parametrize(
    "groups, dim, dtype, size", [(1, 80, torch.float16, 1.0), (3, 64, torch.float32, 1e4), (8, 96, torch.bfloat16, 1e4)]
)
def test_sinks(groups, dim, dtype, size):
    """In heads with tokens and without; of a query that sees nothing the sink is all there is."""
    block, state = case(heads=2, groups=groups, dim=dim, dtype=dtype)
    state.exact.lengths[1] = 0
    state.sink_logits = torch.linspace(-size, size, 2 * groups)
    state.sink_logits[0] = -torch.inf
    check(block, state)
    check(block, state, order=None)


def test_refusals_say_what_to_do():
    block, state = case()
    loose = copied(state)
    loose.exact.keys = loose.exact.keys.transpose(0, 1).contiguous().transpose(0, 1)[:, :, ::2]
    loose.exact.values, loose.exact.filled = loose.exact.values[:, :, ::2], loose.exact.keys.shape[2]
    raises("keys must be contiguous", prefill_attention, *block, loose, make_spec(order=1))
    state.sink_logits = torch.zeros(3)
    raises("sink_logits", prefill_attention, *block, state, make_spec())
    for dim, dtype, what in ((528, torch.float16, "up to 512"), (272, torch.float32, "up to 256 in float32")):
        block, state = case(dim=dim, dtype=dtype, num=2, slots=2)
        raises(f"head_dim {what}", prefill_attention, *block, state, make_spec())
