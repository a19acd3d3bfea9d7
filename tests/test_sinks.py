"""Learned attention sinks: a logit of each query head that takes its share of every softmax, with the value zero."""

import pytest
import torch

import fastkv
from fastkv import Budget, ops, reference
from fastkv.cache import CacheWorkspace
from fastkv.cache.layer import HeldPrompt, LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.config import Config
from fastkv.reference import Moments

from .models import raises
from .states import attention, make_spec, make_state, randn

B, HQ, HKV, D = 2, 6, 2, 16
F64 = torch.float64
SINKS = torch.tensor([0.5, -2.0, 3.0, -torch.inf, 1e4, -1e4], dtype=F64)
SMALL = Budget(tokens=20, sinks=2, recent=4)


def shares(weights):
    """Mean over the query heads of a group."""
    return weights.unflatten(1, (HKV, -1)).mean(2)


def held(num, lengths):
    keys, values = randn(B, HKV, num, D, seed=1), randn(B, HKV, num, D, seed=2)
    return make_state(keys, values, torch.tensor(lengths, dtype=torch.int32), sink_logits=SINKS)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_step(evicted):
    """Evicted tokens of equal keys: what the moments say of them is exact."""
    q, state = randn(B, HQ, D), held(9, [[4, 8], [1, 0]])
    new = randn(B, HKV, 1, D, seed=3), randn(B, HKV, 1, D, seed=4)
    state.exact.positions, state.exact.attention = torch.zeros(B, HKV, 9, dtype=torch.int32), torch.zeros(B, HKV, 9)
    gone = randn(B, HKV, 1, D, seed=5).expand(-1, -1, 6, -1), randn(B, HKV, 6, D, seed=6)
    if evicted:
        state.moments = Moments.empty(B, HKV, D, D, dtype=F64).add(*gone)
    spec = make_spec(0.3, order=1 if evicted else None)
    out, *lses = reference.decode_step(q, *new, state, spec)
    exact = state.exact
    keys, values, valid = exact.keys, exact.values, exact.valid
    if evicted:
        keys, values = torch.cat([keys, gone[0]], 2), torch.cat([values, gone[1]], 2)
        valid = torch.cat([valid, torch.ones(B, HKV, 6, dtype=torch.bool)], 2)
    want, _, weights = attention(q[:, :, None], keys, values, 0.3, valid[:, :, None], sinks=SINKS)
    torch.testing.assert_close(out, want[:, :, 0])
    torch.testing.assert_close(exact.attention.double(), shares(weights)[:, :, 0, :9], rtol=1e-6, atol=1e-7)
    state.sink_logits = state.exact.attention = None
    plain = reference.decode_step(q, None, None, state, spec)[1:]
    assert all(map(torch.equal, lses, plain)), "sinks are neither retained nor evicted"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_block(backend):
    q, k, v = randn(B, HQ, 5, D), randn(B, HKV, 5, D, seed=3), randn(B, HKV, 5, D, seed=4)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    state = held(9, [[4, 8], [1, 0]])
    out, lse, _ = ops.prefill_attention(q, k, v, real, state, make_spec(0.3, backend=backend))
    causal = torch.ones(5, 5, dtype=torch.bool).tril() & real[:, None, None]
    visible = torch.cat([state.exact.valid[:, :, None].expand(-1, -1, 5, -1), causal.expand(-1, HKV, -1, -1)], -1)
    keys, values = torch.cat([state.exact.keys, k], 2), torch.cat([state.exact.values, v], 2)
    want, total, _ = attention(q, keys, values, 0.3, visible, sinks=SINKS)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, total)


def test_a_second_reading():
    """Two chunks over a padded prompt: attention, and the most that each of its tokens received."""
    q, keys, values = randn(B, HQ, 8, D), randn(B, HKV, 8, D, seed=1), randn(B, HKV, 8, D, seed=2)
    valid = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    config = Config.make("kvzip", SMALL, None, 5, "auto", "auto", None)
    held = HeldPrompt(LayerCache(LayerPlan(config), CacheWorkspace(5)))
    held.configure(Attends(0.3, sink_logits=SINKS))
    held.read(q, keys, values, valid, stock=lambda: q)
    held.expect_again()
    received = []
    for seed in (3, 6):
        fed = randn(B, HQ, 4, D, seed=seed), *(randn(B, HKV, 4, D, seed=seed + part) for part in (1, 2))
        out = held.read(*fed, torch.ones(B, 4, dtype=torch.bool), stock=lambda: q)
        causal = torch.ones(B, 4, 4, dtype=torch.bool).tril()
        visible = torch.cat([valid[:, None].expand(-1, 4, -1), causal], -1)[:, None]
        every = [torch.cat(parts, 2) for parts in zip((keys, values), fed[1:])]
        want, _, weights = attention(fed[0], *every, 0.3, visible, sinks=SINKS)
        torch.testing.assert_close(out, want)
        received.append(weights.unflatten(1, (HKV, -1))[..., :8].amax((2, 3)))
    most = torch.maximum(*received)
    torch.testing.assert_close(held.reread.received[0], most[0], check_dtype=False)
    torch.testing.assert_close(held.reread.received[1], most[1].roll(-3, -1), check_dtype=False)


def layer(backend="auto", budget=SMALL, chosen="snapkv", correction="auto", block=None):
    config = Config.make(chosen, budget, block, 5, correction, backend, None)
    return LayerCache(LayerPlan(config), CacheWorkspace(evict_every=5))


def watched(chosen, correction, sinks):
    """The attention that a policy is told of, for a block after evictions, and the state then."""
    from fastkv.cache import signals

    cache = layer("reference", chosen=chosen, correction=correction)
    q, k, v = randn(B, HQ, 40, D), randn(B, HKV, 40, D, seed=1), randn(B, HKV, 40, D, seed=2)
    cache.allocate(HQ, k, v, 40)
    rule, real = cache.configure(Attends(0.3, sink_logits=sinks)), torch.ones(B, 40, dtype=torch.bool)
    cache.read(q, k, v, real)
    state, block = cache.state, (k[:, :, :6], v[:, :, :6], real[:, :6])
    told, _ = signals.candidates(state, *block, rule)
    *_, mass = ops.prefill_attention(q[:, :, :6], *block, state, rule.spec)
    return signals.observe(told, q[:, :, :6], state, rule, mass), state, rule, q[:, :, :6]


@pytest.mark.parametrize("correction", ["none", "moments", "centroids"])
def test_attention_that_policies_are_told_of(correction):
    """Over candidates, evicted tokens and sinks together."""
    told, state, rule, q = watched("snapkv", correction, SINKS)
    visible = told.valid[:, :, None] & (told.positions[:, :, None] <= torch.arange(40, 46)[:, None])
    logits = 0.3 * q @ told.keys.repeat_interleave(3, 1).mT
    logits = logits.masked_fill(~visible.repeat_interleave(3, 1), float("-inf"))
    beside = [SINKS.view(1, -1, 1, 1).expand(B, -1, 6, 1)]
    known = rule.spec.evicted(state)
    if known is not None:
        beside.append(known.estimate(q, 0.3, None)[1][..., None].double())
    weights = torch.cat([logits, *beside], -1).softmax(-1)[..., : logits.shape[-1]]
    torch.testing.assert_close(told.attention.double(), shares(weights).mean(2), rtol=1e-5, atol=1e-7)


# What the cache does with them.


def test_sinks_belong_to_the_model_and_not_to_the_state():
    cache, k = layer(), randn(B, HKV, 30, D).float()
    cache.allocate(HQ, k, k, 30)
    before, sinks = cache.nbytes(), torch.nn.Parameter(SINKS.float())
    cache.configure(Attends(0.3, sink_logits=sinks))
    state = cache.state
    assert state.sink_logits is sinks and cache.nbytes() == before
    assert not any("sink" in name for name, _ in state.named_tensors())
    assert cache.copied(CacheWorkspace(evict_every=5)).state.sink_logits is sinks
    kept = sinks.clone()
    cache.map_batch(lambda rows: rows[:1])
    cache.reset()
    assert torch.equal(sinks, kept) and cache.state.sink_logits is sinks
    cache.configure(Attends(0.3))
    assert cache.state.sink_logits is None


def test_a_module_refuses_other_numbers_of_sinks():
    raises("sink_logits", fastkv.FastKVAttention, HQ, HKV, D, sink_logits=torch.zeros(HKV))
