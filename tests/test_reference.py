"""The specification against float64 brute force, and what the papers claim for its equations.

Attention and moments of any sets of tokens: test_properties. Scores as policies ask for them: test_policies_*.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv import reference
from fastkv.reference import Moments, keydiff_scores, leverage_scores, moment_estimate, moment_residual, random_scores
from fastkv.reference.geometry import LEVERAGE_METHODS, sketch_matrix

from .models import raises
from .states import attention, randn

F64 = torch.float64


def pairs(num, seed=0, dtype=F64):
    return (2 * randn(2, 3, num, 8, seed=seed) + 5).to(dtype), (randn(2, 3, num, 6, seed=seed + 1) - 3).to(dtype)


def moments_of(keys, values):
    return Moments.empty(2, 3, 8, 6, dtype=keys.dtype).add(keys, values)


def test_float32_stays_accurate_over_many_small_evictions():
    """32768 evictions, 16 at a time, of keys with a large common offset (the hard case for raw sums)."""
    keys, values = (part[:1, :1] for part in pairs(32_768, dtype=torch.float32))
    keys[..., :3] += 40
    state = Moments.empty(1, 1, 8, 6)
    for part in zip(keys.split(16, 2), values.split(16, 2)):
        state = state.add(*part)
    exact = Moments.empty(1, 1, 8, 6, dtype=F64).add(keys.double(), values.double())
    for mine, want, limit in zip(state.tensors()[1:], exact.tensors()[1:], (1e-6, 1e-6, 1e-5)):
        assert (mine.double() - want).norm() < limit * want.norm()


def test_empty_and_single_sets_are_exact():
    keys, values = pairs(1)
    empty, one = Moments.empty(2, 3, 8, 6, dtype=F64), moments_of(keys, values)
    assert torch.equal(one.key_mean, keys[:, :, 0]) and torch.equal(one.value_mean, values[:, :, 0])
    assert not one.cross.any()
    for merged in (one.merge(empty), empty.merge(one)):
        assert all(torch.equal(a, b) for a, b in zip(merged.tensors(), one.tensors()))
    value, log_mass = moment_estimate(randn(2, 6, 4, 8), empty, scale=0.3)
    assert torch.equal(value, torch.zeros(2, 6, 4, 6, dtype=F64)) and (log_mass == float("-inf")).all()


@given(num=st.integers(1, 50), scale=st.floats(0.01, 4.0), seed=st.integers(0, 2**31))
def test_mass_estimate_never_exceeds_the_true_mass(num, scale, seed):
    keys, values, q = *pairs(num, seed), randn(2, 6, 4, 8, seed=seed)
    log_mass = moment_estimate(q, moments_of(keys, values), scale)[1]
    assert (log_mass <= attention(q, keys, values, scale)[1] + 1e-9).all()


def test_first_order_error_falls_with_the_square_of_the_spread():
    (keys, values), q, errors = pairs(200), randn(2, 6, 4, 8), []
    center = keys.mean(2, keepdim=True)
    for spread in (0.02, 0.01):
        near = center + spread * (keys - center)
        state, want = moments_of(near, values), attention(q, near, values, 1.0)[0]
        errors.append(float((moment_estimate(q, state, 1.0)[0] - want).norm()))
    assert 3.5 < errors[0] / errors[1] < 4.5
    assert float((moment_estimate(q, state, 1.0, order=0)[0] - want).norm()) > 10 * errors[1]


def test_residual_is_what_the_affine_model_misses():
    keys, values = pairs(30)
    state = moments_of(keys, values)
    expected = values - state.value_mean[:, :, None] - keys @ (0.3 * state.cross / 30)
    torch.testing.assert_close(moment_residual(keys, values, state, 0.3), expected.norm(dim=-1))
    torch.testing.assert_close(moment_residual(keys, values, Moments.empty(2, 3, 8, 6), 0.3), values.norm(dim=-1))


def test_keydiff_in_bf16_does_not_tie():
    scores = keydiff_scores((randn(1, 1, 300, 64) + 3).bfloat16())
    # In bf16 there would be a dozen values for all of them; in fp32 two of 300 so close together may meet by chance.
    assert scores.dtype == torch.float32 and len(scores.unique()) >= 298


@pytest.mark.parametrize("pool, groups", [(1, 4), (5, 1), (7, 3)])
def test_window_scores_equal_brute_force(groups, pool):
    q, keys = randn(2, 2 * groups, 4, 8), randn(2, 2, 20, 8, seed=1)
    *_, weights = attention(q, keys, keys, 0.4)
    weights = weights.unflatten(1, (2, groups)).mean((2, 3))
    near = [weights[..., max(n - pool // 2, 0) : n + pool // 2 + 1].sum(-1) / pool for n in range(20)]
    torch.testing.assert_close(reference.window_scores(q, keys, 0.4, pool), torch.stack(near, -1))


def test_window_attention_is_causal_ignores_padding_and_shares_with_the_evicted():
    q, keys, mass = randn(1, 2, 3, 8), randn(1, 1, 6, 8, seed=1), randn(1, 2, 3, seed=2)
    visible = torch.arange(6) <= torch.tensor([3, 4, 5])[:, None]
    query_valid = torch.tensor([[False, True, True]])
    visible[0] = False  # of padding, which sees nothing
    got = reference.window_attention(q, keys, 0.4, visible=visible[None, None], query_valid=query_valid, log_mass=mass)
    expected = torch.zeros(6, dtype=F64)
    for g, w in ((g, w) for g in range(2) for w in (1, 2)):
        weights = (0.4 * keys[0, 0] @ q[0, g, w]).exp() * visible[w]
        expected += weights / (weights.sum() + mass[0, g, w].exp()) / 4
    torch.testing.assert_close(got[0, 0], expected)


def test_random_depends_on_seed_layer_head_and_position_only():
    positions = torch.arange(1000, dtype=torch.int32).expand(2, 3, 1000)
    scores = random_scores(positions, seed=1, stream=2)
    assert torch.equal(random_scores(positions, seed=1 + 2**44, stream=2), scores)  # of milliseconds since 1970, say
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[:, 1:], random_scores(positions[:, 1:], seed=1, stream=2, first=1)), "of another process"
    assert torch.equal(scores[:1, :, 100:200], random_scores(positions[:1, :, 100:200], seed=1, stream=2))
    others = [random_scores(positions, seed=2, stream=2), random_scores(positions, seed=1, stream=3)]
    for other in [*others, scores.roll(1, dims=1)]:
        assert abs(float(torch.corrcoef(torch.stack([scores[0].flatten(), other[0].flatten()]))[0, 1])) < 0.1
    assert 0 <= float(scores.min()) and float(scores.max()) < 1
    counts = torch.histc(scores[0, 0], 10, 0, 1)
    assert float(counts.min()) > 60 and float(counts.max()) < 140


@pytest.mark.parametrize("method", LEVERAGE_METHODS)
def test_leverage_sums_to_the_rank_in_fp32_and_ignores_invertible_maps(method):
    keys = torch.cat([randn(1, 1, 50, rank, seed=1) @ randn(1, 1, rank, 32, seed=2) for rank in range(4)], 1)
    for sketch_dim in (None, 16):
        score = leverage_scores(keys.float(), sketch_dim, method)
        assert score.dtype == torch.float32 and score.isfinite().all()
        assert (score[:, 0] == 0).all() and 0 <= score.min() and score.max() <= 1 + 1e-5
        torch.testing.assert_close(score.sum(-1)[0], torch.arange(4.0), atol=1e-4, rtol=0)
    turned = keys @ (randn(32, 32, seed=3) + 8 * torch.eye(32, dtype=F64))
    one, other = (leverage_scores(rows, None, method) for rows in (keys, turned))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["qr", "svd", "eig"])
def test_leverage_of_many_keys_has_all_directions_and_ignores_padding(method):
    """Small directions count, however many keys there are; and masked keys do not."""
    keys = (randn(1, 1, 20000, 16) * torch.logspace(-3, 0, 16, dtype=F64)).float()
    score = leverage_scores(keys, None, method)
    torch.testing.assert_close(score.sum(-1), torch.full((1, 1), 16.0), atol=1e-3, rtol=0)
    padded = torch.cat([keys[:, :, :300], torch.full_like(keys[:, :, 300:], torch.nan)], 2)
    mask = (torch.arange(20000) < 300).expand(1, 1, -1)
    alone = leverage_scores(keys[:, :, :300], None, method)
    torch.testing.assert_close(leverage_scores(padded, None, method, mask=mask)[:, :, :300], alone)


def test_eigenvectors_of_the_gram_matrix_give_what_an_svd_of_the_keys_gives():
    """Also of fp32 keys of unequal directions, whose smallest eigenvalues fp32 could not hold beside the largest."""
    keys = (randn(1, 2, 200, 16) * torch.logspace(-3, 1, 16, dtype=F64)).float()
    wanted = leverage_scores(keys.double(), None, "svd")
    torch.testing.assert_close(leverage_scores(keys, None, "eig").double(), wanted, atol=1e-5, rtol=1e-5)
    keys[0, 1, 3, 0] = float("nan")
    spoilt = leverage_scores(keys, None, "eig")
    assert spoilt[0, 1].isnan().all()
    torch.testing.assert_close(spoilt[0, 0].double(), wanted[0, 0], atol=1e-5, rtol=1e-5)


def test_sketch_is_seeded_and_preserves_norms():
    assert torch.equal(sketch_matrix(64, 16), sketch_matrix(64, 16))
    first, second = (sketch_matrix(64, 16, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert not torch.equal(first, second)
    for kind in ("gaussian", "srht"):
        drawn = [sketch_matrix(24, 16, torch.Generator().manual_seed(seed), kind=kind) for seed in range(400)]
        mean = sum(phi @ phi.T for phi in drawn) / 400  # E[Phi Phi^T] = I over the draw
        torch.testing.assert_close(mean, torch.eye(24), atol=0.06, rtol=0)


KEYS = randn(1, 2, 4, 8)
MASK = torch.ones(2, 3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    "message, call, arguments",
    [
        ("multiple of the number of KV heads, got 5 and 2", reference.decode_attention,
         (randn(1, 5, 8), KEYS, KEYS, torch.zeros(1, 2), None, 0.4)),
        ("lengths must have shape", reference.decode_attention,
         (randn(1, 4, 8), KEYS, KEYS, torch.zeros(2), None, 0.4)),
        ("keys must have shape", Moments.empty(2, 2, 8, 6).add, pairs(5)),
        ("mask must have shape", Moments.empty(2, 3, 8, 6).add, (*pairs(5), MASK)),
        ("anchor must be one of", keydiff_scores, (KEYS, "mode")),
        ("odd width", reference.window_scores, (KEYS, KEYS, 1.0, 2)),
        ("metric must be one of l2, l1, linf, cosine", reference.manifold_scores, (KEYS, None, "l3")),
        ("window must be None or at least 1", reference.manifold_scores, (KEYS, 0)),
        ("method must be one of", leverage_scores, (KEYS, 4, "lu")),
        ("sketch_dim must be", leverage_scores, (KEYS, 0)),
        ("multiple of the number of KV heads", reference.noncausal_attention_mass, (randn(1, 3, 4, 8), KEYS, 1.0)),
        ("chunk must be at least 1", reference.noncausal_attention_mass, (KEYS, KEYS, 1.0, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_refused(message, call, arguments):
    raises(message, call, *arguments)
