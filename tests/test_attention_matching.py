"""Attention Matching: keys, biases and values against plain loops and coordinate descent in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import fastkv
from fastkv.corrections import Matching, Pairs
from fastkv.policies import AttentionMatching, Reread
from fastkv.reference import Spec

from .models import build, prompt, raises
from .states import make_signals
from .test_policy_matrix import EVERY, small

B, HKV, G, D, N, W, SCALE = 2, 2, 3, 8, 30, 50, 0.5
F64 = torch.float64


def setting(seed=0, spread=1.0):
    """Queries [B, HQ, W, D] and which count, keys and values [B, HKV, N, D], and which candidates are real."""
    draw = torch.Generator().manual_seed(seed)
    q = spread * torch.randn(B, HKV * G, W, D, dtype=F64, generator=draw)
    keys, values = torch.randn(2, B, HKV, N, D, dtype=F64, generator=draw)
    asked, valid = torch.rand(B, W, generator=draw) < 0.9, torch.rand(B, HKV, N, generator=draw) < 0.9
    return q, asked, keys, values, valid


def rows_of(q, asked, keys, valid, b, head, softcap=None):
    """Logits [n, N] of the queries that count over the candidates that are real, -inf elsewhere."""
    logits = SCALE * q[b, head * G : (head + 1) * G, asked[b]].flatten(0, 1) @ keys[b, head].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~valid[b, head], -torch.inf)


def descend(a, y, penalty, low, high):
    """argmin of |a w - y|^2 + penalty sum diag(a^T a) (w - 1)^2 within bounds, one coordinate after another."""
    weight, w = penalty * a.square().sum(0), torch.ones(a.shape[1], dtype=F64)
    for _ in range(100):
        for c in range(len(w)):
            rest = y - a @ w + a[:, c] * w[c]
            w[c] = ((a[:, c] @ rest + weight[c]) / (a[:, c] @ a[:, c] + weight[c])).clamp(low, high)
    return w


@pytest.mark.parametrize("softcap,penalty,high", [(None, 0.01, 3.0), (2.0, 0.01, 3.0), (None, 1e-6, 0.3)])
def test_biases_and_values_are_those_of_two_least_squares_problems(softcap, penalty, high):
    q, asked, keys, values, valid = setting()
    stay = valid & (torch.arange(N) % 3 == 0)
    free = stay & (torch.arange(N) > 4)  # the others are no part of either side
    correction = Matching(penalty=penalty, bounds=(-3.0, high))
    match = valid & (torch.arange(N) > 4)
    both = Pairs(keys, values, match), Pairs(keys, values, free)
    bias, after = correction.matched(q, asked, *both, Spec(SCALE, softcap))
    assert not bias[~free].any() and torch.equal(after[~free], values[~free])
    for b, head in itertools.product(range(B), range(HKV)):
        own = free[b, head]
        logits = rows_of(q, asked, keys, match, b, head, softcap)
        mass = (logits - logits.amax(-1, keepdim=True)).exp()
        w = descend(mass[:, own], mass.sum(-1), penalty, math.exp(-3), math.exp(high))
        torch.testing.assert_close(bias[b, head, own], w.log(), atol=2e-4, rtol=2e-4)
        x = mass[:, own] * bias[b, head, own].exp()
        x = x / x.sum(-1, keepdim=True)
        ridge = penalty * x.square().sum() / own.sum()
        missing = logits.softmax(-1) @ values[b, head] - x @ values[b, head, own]
        stacked = torch.cat([x, ridge.sqrt() * torch.eye(int(own.sum()), dtype=F64)])
        target = torch.cat([missing, torch.zeros(int(own.sum()), D, dtype=F64)])
        want = values[b, head, own] + torch.linalg.lstsq(stacked, target).solution
        torch.testing.assert_close(after[b, head, own], want, atol=1e-9, rtol=1e-9)


def told(softcap=None):
    q, asked, rows, values, valid = setting(seed=1, spread=2.0)
    positions = torch.arange(N, dtype=torch.int32).repeat(B, HKV, 1)
    zeros, policy = torch.zeros(B, HKV, N), AttentionMatching()
    signals = make_signals(
        SCALE, keys=rows, values=values, positions=positions, valid=valid, softcap=softcap, tokens=9,
        attention=zeros, memory=zeros, reread=Reread(zeros + 0.5, q, asked),
    )  # fmt: skip
    signals = replace(signals, memory=policy.remember(signals))
    return signals, policy.score(signals)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_scores_are_root_mean_squares_of_attention(softcap):
    signals, scores = told(softcap)
    again = signals.reread
    for b, head in itertools.product(range(B), range(HKV)):
        logits = rows_of(again.queries, again.asked, signals.keys, signals.valid, b, head, softcap)
        want = logits.softmax(-1).square().mean(0).sqrt()
        torch.testing.assert_close(scores[b, head].double(), want, atol=1e-6, rtol=1e-5)


def read(policy, length=50, heads="uniform", slots="model", **options):
    """The cache of a model that has read a prompt."""
    model, (ids, mask) = build(head_dim=32), prompt(2, length, (0, 7))
    fastkv.patch(model, policy, small(heads=heads), evict_every=EVERY, slots=slots, **options)
    return model(ids, attention_mask=mask).past_key_values


@pytest.mark.parametrize("heads,slots", [("uniform", "model"), ("adaptive", "int8")])
def test_only_what_may_leave_gets_a_bias_and_another_value(heads, slots):
    cache = read("attention-matching", heads=heads, slots=slots)
    plain = read("attention-matching", heads=heads, slots=slots, correction="none")
    for layer in range(4):
        one, other = cache.layers[layer].state.exact, plain.layers[layer].state.exact
        assert other.bias is None and torch.equal(one["positions"][one.valid], other["positions"][other.valid])
        places, used = one["positions"], one.valid
        for row, seen in enumerate((50, 43)):
            safe = used[row] & ((places[row] < 2) | (places[row] >= seen - 4))
            assert not one["bias"][row][safe].any()
            assert torch.equal(one["values"][row][safe], other["values"][row][safe])
            assert one["bias"][row][used[row] & ~safe].any(), "some count more often than once"
        assert not torch.equal(one["values"][used], other["values"][used])
        assert one["bias"][used].abs().max() <= 3 + 1e-5


def test_refusals():
    said = "'matching' is fitted to a second reading of the prompt, and policy 'snapkv' reads once"
    raises(said, fastkv.patch, build(), "snapkv", 64, correction="matching")
    latent, said = build("deepseek_v3"), r"stores keys and values apart, but layer 0 .* caches latents"
    raises(said, fastkv.patch, latent, "keydiff", 64, slots="int8")
    raises(r"changes values, but layer 0 .* caches latents", fastkv.patch, latent, "attention-matching", small())
