"""Attention with moments against float64 brute force over every token, retained or not."""

import pytest
import torch

from fastkv.errors import FastKVError
from fastkv.reference import Moments, decode_attention, merge_partials, prefill_attention

from .states import make_spec, make_state, randn

F64 = torch.float64


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


def test_nothing_evicted_changes_not_one_bit():
    q, keys, values = randn(2, 6, 8, dtype=torch.float32), randn(2, 3, 12, 8).float(), randn(2, 3, 12, 8).float()
    lengths = torch.full((2, 3), 12)
    plain = decode_attention(q, keys, values, lengths, None, 0.4)[0]
    assert torch.equal(decode_attention(q, keys, values, lengths, Moments.empty(2, 3, 8, 8), 0.4)[0], plain)


def test_merge_of_partials_is_attention_over_the_union():
    q, keys, values = randn(4, 8), randn(4, 20, 8), randn(4, 20, 8)
    first, second = brute_force(q, keys[:, :7], values[:, :7], 0.4), brute_force(q, keys[:, 7:], values[:, 7:], 0.4)
    merged = merge_partials(*first, *second)
    for mine, theirs in zip(merged, brute_force(q, keys, values, 0.4)):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num", [7, 300])
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


def test_shapes_are_checked():
    q, keys = randn(2, 5, 8), randn(2, 2, 4, 8)
    with pytest.raises(FastKVError, match="multiple of the number of KV heads, got 5 and 2"):
        decode_attention(q, keys, keys, torch.zeros(2, 2), None, 0.4)
    with pytest.raises(FastKVError, match="lengths must have shape"):
        decode_attention(randn(2, 4, 8), keys, keys, torch.zeros(2), None, 0.4)
