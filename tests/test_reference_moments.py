"""Moments against float64 brute force, and what MomentKV's estimate really guarantees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv.errors import FastKVError
from fastkv.reference import Moments, moment_estimate, moment_residual

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def pairs(num, batch=2, heads=3, key_dim=8, value_dim=6, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, num, key_dim, generator=generator, dtype=torch.float64) * 2 + 5
    values = torch.randn(batch, heads, num, value_dim, generator=generator, dtype=torch.float64) - 3
    return keys.to(dtype), values.to(dtype)


def brute_force(keys, values):
    keys, values = keys.double(), values.double()
    key_mean, value_mean = keys.mean(2), values.mean(2)
    cross = torch.einsum("bhnk,bhnv->bhkv", keys - key_mean[:, :, None], values - value_mean[:, :, None])
    return key_mean, value_mean, cross


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def test_float32_stays_accurate_over_many_small_evictions():
    """32768 evictions, 16 at a time, of keys with a large common offset (the hard case for raw sums)."""
    keys, values = pairs(32_768, batch=1, heads=1)
    keys[..., :3] += 40
    state = Moments.empty(1, 1, 8, 6)
    for start in range(0, keys.shape[2], 16):
        state = state.add(keys[:, :, start : start + 16], values[:, :, start : start + 16])
    key_mean, value_mean, cross = brute_force(keys, values)
    assert relative(state.key_mean, key_mean) < 1e-6
    assert relative(state.value_mean, value_mean) < 1e-6
    assert relative(state.cross, cross) < 1e-5


def test_empty_and_single_sets_are_exact():
    keys, values = pairs(1)
    empty = Moments.empty(2, 3, 8, 6)
    one = empty.add(keys, values)
    assert torch.equal(one.key_mean, keys[:, :, 0]) and torch.equal(one.value_mean, values[:, :, 0])
    assert not one.cross.any()
    for merged in (one.merge(empty), empty.merge(one)):
        assert all(torch.equal(a, b) for a, b in zip(merged.tensors(), one.tensors()))
    value, log_mass = moment_estimate(torch.randn(2, 6, 4, 8), empty, scale=0.3)
    assert torch.equal(value, torch.zeros(2, 6, 4, 6)) and (log_mass == float("-inf")).all()


def test_lower_orders_keep_less():
    keys, values = pairs(5)
    for order, present in ((None, 1), (0, 3), (1, 4)):
        state = Moments.empty(2, 3, 8, 6, order=order).add(keys, values)
        assert state.order == order and len(state.tensors()) == present
        assert torch.equal(state.merge(state).count, torch.full((2, 3), 10))


def test_shapes_are_checked():
    keys, values = pairs(5)
    with pytest.raises(FastKVError, match="keys must have shape"):
        Moments.empty(2, 2, 8, 6).add(keys, values)
    with pytest.raises(FastKVError, match="mask must have shape"):
        Moments.empty(2, 3, 8, 6).add(keys, values, torch.ones(2, 3, 4, dtype=torch.bool))


def true_attention(q, keys, values, scale):
    groups = q.shape[1] // keys.shape[1]
    logits = scale * torch.einsum("bhtd,bhnd->bhtn", q, keys.repeat_interleave(groups, 1))
    return logits.softmax(-1) @ values.repeat_interleave(groups, 1), logits.logsumexp(-1)


@given(num=st.integers(1, 50), scale=st.floats(0.01, 4.0), seed=st.integers(0, 2**31))
def test_mass_estimate_never_exceeds_the_true_mass(num, scale, seed):
    keys, values = pairs(num, seed=seed, dtype=torch.float64)
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    state = Moments.empty(2, 3, 8, 6, dtype=torch.float64).add(keys, values)
    log_mass = moment_estimate(q, state, scale)[1]
    true_mass = true_attention(q, keys, values, scale)[1]
    assert (log_mass <= true_mass + 1e-9).all()


def test_estimate_is_exact_when_all_keys_are_equal():
    keys, values = pairs(20, dtype=torch.float64)
    keys = keys[:, :, :1].expand_as(keys)
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    state = Moments.empty(2, 3, 8, 6, dtype=torch.float64).add(keys, values)
    value, log_mass = moment_estimate(q, state, 0.3)
    out, lse = true_attention(q, keys, values, 0.3)
    torch.testing.assert_close(value, out)
    torch.testing.assert_close(log_mass, lse)


def test_first_order_error_falls_with_the_square_of_the_spread():
    keys, values = pairs(200, dtype=torch.float64)
    center = keys.mean(2, keepdim=True)
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    errors = []
    for spread in (0.02, 0.01):
        near = center + spread * (keys - center)
        state = Moments.empty(2, 3, 8, 6, dtype=torch.float64).add(near, values)
        errors.append(float((moment_estimate(q, state, 1.0)[0] - true_attention(q, near, values, 1.0)[0]).norm()))
    assert 3.5 < errors[0] / errors[1] < 4.5
    order0 = moment_estimate(q, state, 1.0, order=0)[0]
    assert float((order0 - true_attention(q, near, values, 1.0)[0]).norm()) > 10 * errors[1]


def test_residual_is_what_the_affine_model_misses():
    keys, values = pairs(30, dtype=torch.float64)
    state = Moments.empty(2, 3, 8, 6, dtype=torch.float64).add(keys, values)
    got = moment_residual(keys, values, state, 0.3)
    slope = 0.3 * state.cross / 30
    expected = torch.stack(
        [
            (values[:, :, j] - state.value_mean - torch.einsum("bhk,bhkv->bhv", keys[:, :, j], slope)).norm(dim=-1)
            for j in range(30)
        ],
        -1,
    )
    torch.testing.assert_close(got, expected)
    empty = Moments.empty(2, 3, 8, 6)
    torch.testing.assert_close(moment_residual(keys, values, empty, 0.3), values.norm(dim=-1))
