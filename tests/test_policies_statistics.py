"""LagKV, R-KV, Expected Attention and TriAttention: against brute force, and what must not matter.

Brute force is one token at a time in float64, over the valid tokens of one head, in order of position.
"""

import cmath
import itertools
import math
from dataclasses import replace

import pytest
import torch

from fastkv import ops, policies
from fastkv.policies import RKV, ExpectedAttention, FastKV, FastKVReread, LagKV, TriAttention
from fastkv.policies import attention as attention_file
from fastkv.rotary import Rotary

from .pairwise import named
from .states import changed
from .test_policies_geometry import DIM, F64, FREQUENCIES, NAN, both_times, brute, made, randn, scored

HEADS, GROUP, TOKENS = 2, 2, 12
POLICIES = {
    "lagkv": LagKV(), "lagkv of 5": LagKV(lag=5), "rkv": RKV(), "rkv strict": RKV(pool=3, weight=0.6, threshold=0.2),
    "expected-attention": ExpectedAttention(horizon=20),
    "expected-attention soon": ExpectedAttention(horizon=3, sinks=0, epsilon=0.0), "fastkv": FastKV(horizon=20),
    "fastkv soon": FastKV(horizon=3), "fastkv-reread": FastKVReread(horizon=20), "triattention": TriAttention(),
    "triattention near": TriAttention(horizon=40),
}  # fmt: skip
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def signals_of(decoding=False, seed=0, tokens=TOKENS, **options):
    """Those of `made`, with keys of which some are alike, attention, and statistics of queries."""
    signals = made(decoding=decoding, seed=seed, dtype=F64, **options)
    alike = randn(1, HEADS, 3, DIM, seed=seed + 5)[:, :, torch.arange(signals.keys.shape[2]) % 3]
    attention = randn(*signals.valid.shape, seed=seed + 6).softmax(-1)
    mean = randn(HEADS * GROUP, DIM, seed=seed + 7)
    known = policies.QueryStatistics(mean.float(), randn(HEADS * GROUP, DIM // 2, seed=seed + 8).abs().float())
    attention = torch.where(signals.valid, attention, NAN)
    return changed(signals, keys=signals.keys + alike, tokens=tokens, attention=attention, query_statistics=known)


def softmax(numbers):
    top = max(numbers)
    weights = [math.exp(x - top) for x in numbers]
    return [x / sum(weights) for x in weights]


def brute_lag(policy, signals, b, h, index):
    num, lag = signals.keys.shape[2], max(min(policy.lag, signals.layer.tokens // 4), 2)
    parts = [index[at : at + lag] for at in range(0, len(index) - lag + 1, lag)]
    scores = {i: 1 + place / num for place, i in enumerate(index)}
    for part, after in itertools.pairwise(parts):
        total = dict.fromkeys(part, 0.0)
        for rows in (signals.keys[b, h], signals.values[b, h]):
            low, high = rows[after].amin(0), rows[after].amax(0)
            spread = [float(((rows[i] - low) / (high - low)).std()) for i in part]
            for i, share in zip(part, softmax(spread)):
                total[i] += share
        for rank, i in enumerate(sorted(part, key=lambda i: total[i])):
            scores[i] = rank / lag
    return [scores[i] for i in index]


def brute_redundancy(policy, signals, b, h, index):
    keys, column = signals.keys[b, h], dict.fromkeys(index, 0.0)
    for j in index:
        cosine = {i: float(keys[j] @ keys[i] / keys[j].norm() / keys[i].norm()) for i in index if i != j}
        alike = [i for i in index if i != j and cosine[i] > policy.threshold]
        for i in index:
            if i != j and i not in alike[-1:]:
                column[i] += cosine[i]
    repeated = softmax([column[i] / len(index) for i in index])
    received, half = [float(signals.attention[b, h, i]) for i in index], policy.pool // 2
    pooled = [max(received[max(at - half, 0) : at + half + 1]) for at in range(len(index))]
    return [policy.weight * a - (1 - policy.weight) * r for a, r in zip(pooled, repeated)]


def complex_pairs(row):
    """[D/2] complex: what turns together."""
    return torch.complex(row[..., : DIM // 2].double(), row[..., DIM // 2 :].double())


def turned(row, angle):
    """A row whose pairs are turned by angle * frequency."""
    pairs = complex_pairs(row) * torch.exp(1j * angle * FREQUENCIES[DIM].double())
    return torch.cat([pairs.real, pairs.imag], -1)


def newest(signals, b):
    return int(signals.positions[b][signals.valid[b]].max())


def brute_expected(policy, signals, b, h, index):
    memory = {i: float(signals.memory[b, h, i]) for i in index}
    if signals.queries is not None:
        start = signals.keys.shape[2] - signals.queries.shape[2]
        asked = [i for i in index if i >= start and signals.positions[b, h, i] >= policy.sinks]
        to_come = [newest(signals, b) + step for step in range(1, policy.horizon + 1)]
        unit = torch.eye(DIM, dtype=F64)
        ahead = torch.stack([sum(turned(row, at) for at in to_come) / len(to_come) for row in unit], -1)
        received = dict.fromkeys(index, 0.0)
        for g in range(GROUP if asked else 0):
            queries = signals.queries[b, h * GROUP + g]
            before = torch.stack([turned(queries[i - start], -int(signals.positions[b, h, i])) for i in asked])
            mean = before.mean(0)
            spread = sum(torch.outer(q - mean, q - mean) for q in before) / len(before)
            mean, spread = ahead @ mean, ahead @ spread @ ahead.T
            keys = signals.layer.scale * signals.keys[b, h, index].double()
            for i, a in zip(index, softmax([float(k @ mean + k @ spread @ k / 2) for k in keys])):
                received[i] += a / GROUP
        for i in index if asked else ():
            memory[i] = (received[i] + policy.epsilon) * float(signals.values[b, h, i].norm())
    known = [m for m in memory.values() if m > 0]
    mean = sum(known) / len(known) if known else 0.0
    return [memory[i] or mean for i in index]


def standardised(numbers):
    """z-scores by the deviation of a population; 0 where all are equal."""
    rows = torch.tensor(numbers, dtype=F64)
    std = rows.std(correction=0)
    return (rows - rows.mean()) / std if std > 1e-3 * rows.mean().abs() else torch.zeros_like(rows)


def brute_unlike(signals, b, h, index):
    unit = torch.stack([turned(signals.keys[b, h, i], -int(signals.positions[b, h, i])) for i in index])
    unit = unit / unit.norm(dim=-1, keepdim=True)
    return standardised((-(unit @ unit.mean(0) / unit.mean(0).norm())).tolist())


def brute_remembered(memory, change=float):
    """z-scores of what is remembered; of what is not, the mean of the others."""
    known = [change(x) for x in memory if x > 0]
    mean = sum(known) / len(known) if known else 0.0
    return standardised([change(x) if x > 0 else mean for x in memory])


def brute_fastkv(policy, signals, b, h, index):
    memory = [float(signals.memory[b, h, i]) for i in index]
    if signals.queries is not None:
        memory = brute_expected(policy.expecting(), signals, b, h, index)
    return (brute_unlike(signals, b, h, index) + brute_remembered(memory, math.log)).tolist()


def brute_reread(policy, signals, b, h, index):
    """Of tokens that have been read again before."""
    score = brute_unlike(signals, b, h, index) + brute_remembered([float(signals.memory[b, h, i]) for i in index])
    if signals.queries is not None:
        score += standardised([math.log(x) for x in brute_expected(policy.expecting(), signals, b, h, index)])
    return score.tolist()


def brute_tri(policy, signals, b, h, index):
    steps = [2**power for power in range(40) if 2**power <= policy.horizon]
    best = dict.fromkeys(index, -math.inf)
    for g in range(GROUP):
        mean = complex_pairs(signals.layer.query_statistics.mean[h * GROUP + g])
        excess = signals.layer.query_statistics.excess[h * GROUP + g].double()
        logits = {}
        for i in index:
            at = int(signals.positions[b, h, i])
            key = complex_pairs(turned(signals.keys[b, h, i], -at))
            logits[i] = float((excess * key.abs()).sum())
            for f, frequency in enumerate(FREQUENCIES[DIM].tolist()):
                size, phase = float(mean[f].abs() * key[f].abs()), cmath.phase(mean[f] * key[f].conj())
                angles = [frequency * (newest(signals, b) + step - at) + phase for step in steps]
                logits[i] += size * sum(map(math.cos, angles)) / len(angles)
        centre = sum(logits.values()) / len(logits)
        std = math.sqrt(sum((x - centre) ** 2 for x in logits.values()) / len(logits))
        best = {i: max(best[i], (x - centre) / std) for i, x in logits.items()}
    return [best[i] for i in index]


RULES = {LagKV: brute_lag, RKV: brute_redundancy, ExpectedAttention: brute_expected, FastKV: brute_fastkv}
RULES |= {FastKVReread: brute_reread, TriAttention: brute_tri}


@both_times
@each_policy
@pytest.mark.parametrize("seed", [0, named(1, slow=True), named(2, slow=True)])
def test_the_equation(policy, decoding, seed):
    signals = signals_of(decoding, seed, new=11 + 7 * seed)
    scores = scored(policy, signals)
    assert scores.shape == signals.valid.shape
    found, expected = torch.where(signals.valid, scores, 0).double(), brute(policy, signals, RULES[type(policy)])
    far = isinstance(policy, TriAttention) and policy.horizon > 1000  # angles of 10^4 radians, in float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3 if far else 1e-6)


@each_policy
def test_a_head_without_tokens(policy):
    signals = signals_of()
    signals = replace(signals, valid=torch.zeros_like(signals.valid))
    assert not ops.select(scored(policy, signals), signals.positions, signals.valid, signals.valid, TOKENS).kept.any()


@each_policy
def test_half_precision_is_computed_in_float32(policy):
    signals = signals_of()
    half = replace(signals, keys=signals.keys.bfloat16(), values=signals.values.bfloat16())
    exact = replace(half, keys=half.keys.float(), values=half.values.float())
    torch.testing.assert_close(scored(policy, half)[half.valid], scored(policy, exact)[half.valid])


def test_a_second_reading_says_what_was_looked_up():
    """Of tokens that were read twice N is their largest attention times the length of their value."""
    signals = signals_of()
    received = randn(*signals.valid.shape, seed=3).sigmoid().float()
    reread = policies.Reread(received, signals.queries[:, :, :0], signals.valid[:, 0, :0])
    twice = FastKVReread().remember(replace(signals, reread=reread))
    want = received * signals.values.float().norm(dim=-1)
    torch.testing.assert_close(twice[signals.valid], want[signals.valid])
    assert (twice[~signals.valid] == 0).all()
    assert FastKVReread().remember(signals) is signals.memory


def test_channels_that_do_not_vary_say_nothing():
    signals = signals_of(pads=(0, 0), holes=(0, 0))
    constant = signals.keys.clone()
    constant[..., 0] = 7.0
    scores = scored(LagKV(), replace(signals, keys=constant))
    assert scores.isfinite().all()
    without = signals.keys.clone()
    without[..., 0] = -3.0
    assert torch.equal(scores, scored(LagKV(), replace(signals, keys=without)))


def test_keys_are_compared_in_parts(monkeypatch):
    signals = signals_of()
    whole = scored(RKV(), signals)
    monkeypatch.setattr(attention_file, "ROWS", 3)
    torch.testing.assert_close(scored(RKV(), signals)[signals.valid], whole[signals.valid])


def test_a_block_without_queries_of_its_own_changes_nothing():
    signals = signals_of(pads=(0, 11))
    remembered = ExpectedAttention().remember(signals)
    assert torch.equal(remembered[1][signals.valid[1]], signals.memory[1][signals.valid[1]])
    assert not torch.equal(remembered[0], signals.memory[0])


ROTARIES = {
    "halves": Rotary(FREQUENCIES[DIM]),
    "interleaved": Rotary(FREQUENCIES[DIM], scaling=1.3, interleaved=True),
    "part": Rotary(FREQUENCIES[DIM][:2], scaling=0.7, start=-4),
}


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_vectors_are_turned_ahead(rotary):
    vectors, positions = randn(2, 3, 5, DIM).float(), torch.randint(100, (2, 1, 5))
    there = rotary.ahead(vectors, positions, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(rotary.unrotate(there, positions), vectors)
    offsets = torch.tensor([1, 4, 9])
    each = torch.stack([rotary.ahead(vectors, positions + offset, offsets[:1] * 0) for offset in offsets.tolist()])
    torch.testing.assert_close(rotary.ahead(vectors, positions, offsets), each.mean(0), rtol=1e-4, atol=1e-5)
    lengths = rotary.lengths(there)
    assert lengths.shape[-1] == DIM - rotary.size // 2
    torch.testing.assert_close(lengths, rotary.lengths(each[0]))
    torch.testing.assert_close(lengths.square().sum(-1), there.square().sum(-1))
