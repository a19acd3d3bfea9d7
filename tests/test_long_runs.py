"""Long runs: moments after a million evictions against float64, and thousands of generated tokens, counted."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

import fastkv
from fastkv import ops
from fastkv.reference import LayerState, Moments, Slots, Spec
from perf import long_run
from perf.long_run import Sample, Settings

from .models import build, prompt

MILLION = 1_000_000
VICTIMS = 16
DRIFTS = ("offset", "far offset", "trend", "wave", "random walk", "unrelated values")


def drifting(num, key_dim, value_dim, dtype):
    """Keys and values [1, H, N, D] of correlated pairs, whose mean does in each head what DRIFTS says."""
    time = torch.linspace(0, 1, num)
    walk = torch.randn(num).cumsum(0) * 10 / num**0.5
    flat = torch.zeros_like(time)
    means = torch.stack([flat + 5, flat + 40, 20 * time - 5, 10 * torch.sin(40 * time) + 5, walk, flat + 5])
    noise = torch.randn(1, len(means), num, key_dim)
    values = noise @ (torch.randn(key_dim, value_dim) / 3) + torch.randn(1, len(means), num, value_dim) / 2
    values[:, -1] = torch.randn(num, value_dim)
    drift = means[None, :, :, None]
    return (noise + drift).to(dtype), (values + drift / 2).to(dtype)


def assert_close_to_float64(moments, keys, values):
    """Means within 1e-5 of their size; cross moments within 1e-5 of |k - k_mean| |v - v_mean|, the size of what is
    summed, and of their own size where keys and values have to do with each other.
    """
    for head, drift in enumerate(DRIFTS):
        k, v = keys[0, head].double(), values[0, head].double()
        key_mean, value_mean = k.mean(0), v.mean(0)
        k, v = k - key_mean, v - value_mean
        cross = k.T @ v
        error = (moments.cross[0, head].double() - cross).norm()
        assert (moments.key_mean[0, head].double() - key_mean).norm() < 1e-5 * key_mean.norm().clamp(min=1), drift
        assert (moments.value_mean[0, head].double() - value_mean).norm() < 1e-5 * value_mean.norm().clamp(min=1), drift
        assert error < 1e-5 * k.norm() * v.norm(), drift
        if drift != "unrelated values":
            assert error < 1e-5 * cross.norm(), drift


@pytest.mark.parametrize(
    "dtype,num",
    [
        (torch.bfloat16, MILLION // 10),
        pytest.param(torch.float32, MILLION, marks=pytest.mark.slow),
        pytest.param(torch.float16, MILLION // 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_moments_of_a_million_evicted_tokens(dtype, num):
    keys, values = drifting(num, 8, 6, dtype)
    moments = Moments.empty(1, len(DRIFTS), 8, 6)
    for block in zip(keys.split(VICTIMS, 2), values.split(VICTIMS, 2)):
        moments = moments.add(*block)
    assert moments.count.dtype == torch.int64 and (moments.count == num).all()
    assert all(one.dtype == torch.float32 for one in (moments.key_mean, moments.value_mean, moments.cross))
    assert_close_to_float64(moments, keys, values)


def test_half_precision_sums_would_be_seen():
    """The check above is sharp: the same moments, rounded to half precision after every block, are far off."""
    keys, values = drifting(20_000, 8, 6, torch.float32)
    moments = Moments.empty(1, len(DRIFTS), 8, 6)
    for block in zip(keys.split(VICTIMS, 2), values.split(VICTIMS, 2)):
        moments = moments.add(*block)
        moments.cross = moments.cross.bfloat16().float()
    with pytest.raises(AssertionError):
        assert_close_to_float64(moments, keys, values)


@pytest.mark.parametrize(
    "backend,num,dtype",
    [
        *(("reference", 16_000, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        ("triton", 96, torch.bfloat16),
        *(pytest.param("triton", 160, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_evictions_of_the_oldest(backend, num, dtype):
    """Slots that fill and empty again, as while decoding: what is not stored is in the moments, once."""
    tokens, dim, heads = 8, 16, len(DRIFTS)
    keys, values = drifting(num, dim, dim, dtype)
    slots = tokens + VICTIMS
    held_keys, held_values = (torch.zeros(1, heads, slots, dim, dtype=dtype) for _ in "kv")
    positions = torch.zeros(1, heads, slots, dtype=torch.int32)
    lengths = torch.zeros(1, heads, dtype=torch.int32)
    moments = Moments.empty(1, heads, dim, dim)
    state = LayerState(Slots(held_keys, held_values, lengths, positions), torch.zeros(1, dtype=torch.int64), moments)
    spec = Spec(1.0, backend=backend, tokens=tokens)
    for start in range(0, num, VICTIMS):
        free = slice(0, VICTIMS) if start == 0 else slice(tokens, slots)
        block = slice(start, start + VICTIMS)
        held_keys[:, :, free], held_values[:, :, free] = keys[:, :, block], values[:, :, block]
        positions[:, :, free] = torch.arange(start, start + VICTIMS, dtype=torch.int32)
        lengths.fill_(VICTIMS if start == 0 else slots)
        state.seen.fill_(start + VICTIMS)
        ops.evict(positions.float(), None, state, spec)
    evicted = num - tokens
    assert (lengths == tokens).all() and (moments.count == evicted).all() and moments.count.dtype == torch.int64
    assert torch.equal(positions[0, :, :tokens].sort(-1).values, torch.arange(evicted, num).int().expand(heads, -1))
    assert_close_to_float64(moments, keys[:, :, :evicted], values[:, :, :evicted])


@pytest.fixture(scope="module", params=[400, pytest.param(2000, marks=pytest.mark.slow)])
def short(request):
    """What `python -m perf.long_run` finds in so many tokens."""
    with torch.no_grad():
        return long_run.run(Settings(tokens=request.param, every=request.param // 20))


def test_tokens_are_counted_and_cost_no_memory(short):
    tokens, summary = short["settings"]["tokens"], short["summary"]
    assert short["faults"] == [] and short["tokens"] == tokens and len(short["samples"]) == 20
    assert summary["cache_growth_bytes"] == 0
    if tokens >= 2000:  # below, a full cache would not grow by more than the allocator rounds to
        assert summary["resident_growth_mib"] < 0.5 * summary["full_cache_growth_mib"]


def test_the_picture_is_drawn(short, tmp_path):
    long_run.write_plot(short, tmp_path / "long_run.png")
    assert (tmp_path / "long_run.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_run_stayed_flat():
    facts = json.loads((long_run.OUT / "long_run.json").read_text())
    assert long_run.failures(facts) == []
    assert facts["settings"]["tokens"] == facts["tokens"] == MILLION // 10
    assert facts["samples"][-1]["tokens"] + facts["settings"]["every"] > facts["tokens"]
    assert facts["summary"] == long_run.summarise(
        [Sample(**one) for one in facts["samples"]], facts["full_cache_bytes_per_token"]
    )


STEADY = [Sample(tokens=500 * i, resident=2**28, cache=2**20, forward=5.0, step=6.0, wall=7.0) for i in range(1, 101)]


@pytest.mark.parametrize(
    "change,complaint",
    [
        (lambda one: {"resident": one.resident + 1000 * one.tokens}, "resident set grew by 42.9 MiB"),
        (lambda one: {"cache": one.cache + one.tokens}, "cache grew by 49500 bytes"),
        (lambda one: {"forward": 5 + one.tokens / 20_000}, "1.44 times as slow"),
    ],
    ids=["memory", "cache", "time"],
)
def test_growth_is_seen(change, complaint):
    samples = [dataclasses.replace(one, **change(one)) for one in STEADY]
    facts = {"faults": [], "summary": long_run.summarise(samples, 4096)}
    assert len(long_run.failures(facts)) == 1 and complaint in long_run.failures(facts)[0]
    steady = {"faults": [], "summary": long_run.summarise(STEADY, 4096)}
    assert long_run.failures(steady) == []


def corrupt_seen(state):
    state.seen += 1


def corrupt_count(state):
    state.moments.count[0, 1] -= 1


def corrupt_dtype(state):
    state.moments.count = state.moments.count.int()


def corrupt_place(state):
    state.exact.positions[0, 0, 0] = state.exact.positions[0, 0, 1]


@pytest.mark.parametrize(
    "corrupt,complaint",
    [
        (corrupt_seen, "seen [61] of 60"),
        (corrupt_count, "evicted of 60"),
        (corrupt_dtype, "counters are torch.int64 and torch.int32"),
        (corrupt_place, "positions"),
    ],
)
def test_a_wrong_counter_is_seen(corrupt, complaint):
    model = build()
    fastkv.patch(model, budget=fastkv.Budget(tokens=20, sinks=2, recent=4), evict_every=4)
    ids, _ = prompt(1, 60, (0,))
    cache = model(ids).past_key_values
    assert long_run.count_faults(cache, 60) == []
    corrupt(cache.layers[2].state)
    faults = long_run.count_faults(cache, 60)
    assert len(faults) >= 1 and all("layer 2" in fault for fault in faults) and complaint in " ".join(faults)


def test_a_wrong_position_is_seen():
    watch = SimpleNamespace(position=4, faults=[])
    long_run.Watch.read_position(watch, None, (None, torch.tensor([[5, 6]])), {})
    assert watch.faults == [] and watch.position == 6
    long_run.Watch.read_position(watch, None, (None, torch.tensor([[8]])), {})
    assert watch.faults == ["positions [[8]] after 6"]
