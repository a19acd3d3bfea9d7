"""Attention with moments against float64 brute force over every token, retained or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv.errors import FastKVError
from fastkv.reference import Moments, append, decode_attention, decode_step, merge_partials, prefill_attention

from .states import assert_same, copied, make_spec, make_state

F64 = torch.float64


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def brute_force(q, keys, values, scale, softcap=None):
    """One query per head [Hq, D] over its KV head's [Hkv, N, D], one head at a time."""
    groups = q.shape[0] // keys.shape[0]
    outs, lses = [], []
    for head in range(q.shape[0]):
        logits = scale * keys[head // groups] @ q[head]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        outs.append(logits.softmax(0) @ values[head // groups])
        lses.append(logits.logsumexp(0))
    return torch.stack(outs), torch.stack(lses)


@given(
    groups=st.sampled_from([1, 3, 4, 7, 8]),
    dim=st.sampled_from([8, 16, 20]),
    slots=st.integers(1, 33),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_retained_part_equals_brute_force(groups, dim, slots, softcap, seed):
    q, keys, values = (
        randn(2, 2 * groups, dim, seed=seed),
        randn(2, 2, slots, dim, seed=seed + 1),
        randn(2, 2, slots, 5),
    )
    lengths = torch.randint(1, slots + 1, (2, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    out, lse, lse_evicted = decode_attention(q, keys, values, lengths, None, 0.4, softcap)
    assert (lse_evicted == float("-inf")).all()
    for row in range(2):
        for head in range(2):
            held = slice(0, int(lengths[row, head]))
            heads = slice(head * groups, (head + 1) * groups)
            expected = brute_force(q[row, heads], keys[row, [head], held], values[row, [head], held], 0.4, softcap)
            torch.testing.assert_close(out[row, heads], expected[0])
            torch.testing.assert_close(lse[row, heads], expected[1])


def test_moments_of_equal_keys_restore_full_attention():
    """If all evicted keys are equal the estimate is exact, so retained + moments must equal the full cache."""
    q, keys, values = randn(1, 4, 8), randn(1, 2, 30, 8), randn(1, 2, 30, 8)
    keys[:, :, 10:] = keys[:, :, 10:11]
    moments = Moments.empty(1, 2, 8, 8, dtype=F64).add(keys[:, :, 10:], values[:, :, 10:])
    lengths = torch.full((1, 2), 10)
    out, lse, lse_evicted = decode_attention(q, keys[:, :, :10], values[:, :, :10], lengths, moments, 0.4)
    expected, total = brute_force(q[0], keys[0], values[0], 0.4)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(torch.logaddexp(lse, lse_evicted)[0], total)


@pytest.mark.parametrize("order", [0, 1])
def test_mixing_weight_is_the_sigmoid_of_the_mass_difference(order):
    q, keys, values = randn(2, 6, 8), randn(2, 3, 12, 8), randn(2, 3, 12, 8)
    gone = randn(2, 3, 40, 8, seed=5), randn(2, 3, 40, 8, seed=6)
    moments = Moments.empty(2, 3, 8, 8, dtype=F64).add(*gone)
    lengths = torch.full((2, 3), 12)
    alone, lse, _ = decode_attention(q, keys, values, lengths, None, 0.4)
    evicted, empty_lse, lse_evicted = decode_attention(q, keys, values, lengths * 0, moments, 0.4, order=order)
    assert (empty_lse == float("-inf")).all()
    out, _, _ = decode_attention(q, keys, values, lengths, moments, 0.4, order=order)
    w = torch.sigmoid(lse - lse_evicted)[..., None]
    torch.testing.assert_close(out, w * alone + (1 - w) * evicted)


def test_nothing_evicted_changes_not_one_bit():
    q, keys, values = randn(2, 6, 8, dtype=torch.float32), randn(2, 3, 12, 8).float(), randn(2, 3, 12, 8).float()
    lengths = torch.full((2, 3), 12)
    plain = decode_attention(q, keys, values, lengths, None, 0.4)[0]
    assert torch.equal(decode_attention(q, keys, values, lengths, Moments.empty(2, 3, 8, 8), 0.4)[0], plain)


def test_nothing_at_all_gives_zeros():
    q, keys = randn(2, 6, 8), torch.full((2, 3, 4, 8), float("nan"), dtype=F64)
    out, lse, lse_evicted = decode_attention(q, keys, keys, torch.zeros(2, 3), Moments.empty(2, 3, 8, 8), 0.4)
    assert torch.equal(out, torch.zeros(2, 6, 8, dtype=F64))
    assert (lse == float("-inf")).all() and (lse_evicted == float("-inf")).all()


def test_empty_slots_may_hold_anything():
    q, keys, values = randn(2, 6, 8), randn(2, 3, 12, 8), randn(2, 3, 12, 8)
    lengths = torch.tensor([[3, 12, 1], [5, 2, 7]])
    expected = decode_attention(q, keys, values, lengths, None, 0.4)[0]
    empty = torch.arange(12) >= lengths[..., None]
    keys[empty] = values[empty] = float("nan")
    assert torch.equal(decode_attention(q, keys, values, lengths, None, 0.4)[0], expected)


@given(seed=st.integers(0, 2**31))
def test_shuffled_slots_give_the_same_attention(seed):
    q, keys, values = randn(1, 4, 8, seed=seed), randn(1, 2, 12, 8, seed=seed), randn(1, 2, 12, 8)
    moments = Moments.empty(1, 2, 8, 8, dtype=F64).add(randn(1, 2, 9, 8), randn(1, 2, 9, 8, seed=3))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((1, 2), 12)
    a = decode_attention(q, keys, values, lengths, moments, 0.4)
    b = decode_attention(q, keys[:, :, order], values[:, :, order], lengths, moments, 0.4)
    for mine, theirs in zip(a, b):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_stay_finite(size):
    q = torch.full((1, 2, 4), 1.0)
    keys = torch.zeros(1, 1, 3, 4)
    keys[0, 0, 1] = size / 4
    values = randn(1, 1, 3, 4).float()
    moments = Moments.empty(1, 1, 4, 4).add(keys, values)
    out, lse, lse_evicted = decode_attention(q, keys, values, torch.tensor([[3]]), moments, 1.0)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all() and torch.isfinite(lse_evicted).all()


def test_attention_weights_are_added_up_over_the_group():
    q, keys, values = randn(2, 6, 8), randn(2, 3, 12, 8), randn(2, 3, 12, 8)
    moments = Moments.empty(2, 3, 8, 8, dtype=F64).add(randn(2, 3, 9, 8, seed=4), randn(2, 3, 9, 8, seed=3))
    received = torch.ones(2, 3, 12, dtype=F64)
    out, lse, lse_evicted = decode_attention(q, keys, values, torch.full((2, 3), 12), moments, 0.4, attention=received)
    logits = 0.4 * torch.einsum("bhgd,bhnd->bhgn", q.reshape(2, 3, 2, 8), keys)
    total = torch.logaddexp(lse, lse_evicted).reshape(2, 3, 2, 1)
    torch.testing.assert_close(received, 1 + (logits - total).exp().mean(2))


def test_merge_of_partials_is_attention_over_the_union():
    q, keys, values = randn(4, 8), randn(4, 20, 8), randn(4, 20, 8)
    first, second = brute_force(q, keys[:, :7], values[:, :7], 0.4), brute_force(q, keys[:, 7:], values[:, 7:], 0.4)
    merged = merge_partials(*first, *second)
    for mine, theirs in zip(merged, brute_force(q, keys, values, 0.4)):
        torch.testing.assert_close(mine, theirs)


def test_step_is_append_then_attend():
    keys, values, positions = randn(2, 3, 5, 8), randn(2, 3, 5, 8), torch.zeros(2, 3, 5, dtype=torch.int32)
    lengths, seen = torch.tensor([[2, 3, 0], [4, 1, 2]], dtype=torch.int32), torch.tensor([9, 7])
    q, k, v = randn(2, 6, 8, seed=7), randn(2, 3, 1, 8, seed=8), randn(2, 3, 1, 8, seed=9)
    state = make_state(keys, values, lengths, positions, seen)
    copy = copied(state)
    append(copy.exact, k, v, seen)
    copy.seen += 1
    expected = decode_attention(q, copy.exact.keys, copy.exact.values, copy.exact.lengths, None, 0.4)
    got = decode_step(q, k, v, state, make_spec(0.4))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert_same(state, copy)
    assert torch.equal(seen, torch.tensor([10, 8]))
    assert torch.equal(keys[0, 1, 3], k[0, 1, 0]) and int(positions[1, 0, 4]) == 7


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num", [1, 7, 300])
def test_a_block_equals_its_queries_one_by_one(num, softcap):
    """A query of the block sees the slots, the moments and the earlier real tokens of the block."""
    q, keys, values = randn(2, 4, num, 8), randn(2, 2, 10, 8), randn(2, 2, 10, 8, seed=2)
    new_keys, new_values = randn(2, 2, num, 8, seed=3), randn(2, 2, num, 8, seed=4)
    lengths = torch.tensor([[10, 3], [0, 6]])
    valid = torch.ones(2, num, dtype=torch.bool)
    valid[1, : num // 3] = False
    moments = Moments.empty(2, 2, 8, 8, dtype=F64).add(randn(2, 2, 9, 8, seed=5), randn(2, 2, 9, 8, seed=6))
    state = make_state(keys, values, lengths, moments=moments)
    out, lse, _ = prefill_attention(q, new_keys, new_values, valid, state, make_spec(0.4, softcap, order=1))
    for row in range(2):
        for t in {num // 3, num // 2, num - 1}:
            for head in range(2):
                seen = valid[row, : t + 1]
                held = int(lengths[row, head])
                k = torch.cat([keys[row, head, :held], new_keys[row, head, : t + 1][seen]])[None, None]
                v = torch.cat([values[row, head, :held], new_values[row, head, : t + 1][seen]])[None, None]
                part = Moments(*[m[row : row + 1, head : head + 1] for m in moments.tensors()])
                heads = slice(2 * head, 2 * head + 2)
                one = decode_attention(
                    q[row : row + 1, heads, t], k, v, torch.tensor([[k.shape[2]]]), part, 0.4, softcap
                )
                torch.testing.assert_close(out[row, heads, t], one[0][0])
                torch.testing.assert_close(lse[row, heads, t], torch.logaddexp(one[1], one[2])[0])


def test_half_precision_is_summed_in_float32():
    q, keys, values = (randn(*s).half() for s in ((2, 6, 8), (2, 3, 500, 8), (2, 3, 500, 8)))
    lengths = torch.full((2, 3), 500)
    out = decode_attention(q, keys, values, lengths, None, 0.4)[0]
    exact = decode_attention(q.double(), keys.double(), values.double(), lengths, None, 0.4)[0]
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, atol=5e-4, rtol=1e-3)


def test_shapes_are_checked():
    q, keys = randn(2, 5, 8), randn(2, 2, 4, 8)
    with pytest.raises(FastKVError, match="multiple of the number of KV heads, got 5 and 2"):
        decode_attention(q, keys, keys, torch.zeros(2, 2), None, 0.4)
    with pytest.raises(FastKVError, match="lengths must have shape"):
        decode_attention(randn(2, 4, 8), keys, keys, torch.zeros(2), None, 0.4)
