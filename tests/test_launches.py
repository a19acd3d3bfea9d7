"""What a GPU is asked to do: how many kernels a step launches, how many compilations all lengths of prompts need."""

import random

import pytest
import torch

from fastkv import Budget, ops
from fastkv.cache import CacheWorkspace
from fastkv.cache.layer import LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.config import Config
from fastkv.ops import operator
from fastkv.reference.centroids import BLOCK
from perf.micro import states

from .launches import Driver, Operators, recorded
from .test_ops import CASES, flattened

HQ, HKV, D = 2, 1, 32
MOST = 4  # compilations of a kernel
LENGTHS = [int(2 ** random.Random(seed).uniform(3, 14)) for seed in range(80)]


def layer(policy, budget, block=None, slots="auto", correction="auto"):
    config = Config.make(policy, budget, block, 16, correction, "triton", None, slots=slots)
    return LayerCache(LayerPlan(config), CacheWorkspace(evict_every=16))


def tokens(num):
    return tuple(torch.zeros(1, heads, num, D, dtype=torch.bfloat16) for heads in (HQ, HKV, HKV))


def read(cache, length, block):
    """A prompt of that length: in blocks, or whole, where the first attention is the model's own."""
    for start in range(0, length, block or length):
        q, k, v = tokens(min(block or length, length - start))
        valid = torch.ones(1, q.shape[2], dtype=torch.bool)
        if cache.state is None:
            cache.allocate(HQ, k, v, length)
            cache.configure(Attends(0.25))
        cache.read(q, k, v, valid, None if block else lambda q=q: q)


PROMPTS = [(p, block, "auto") for p in ("snapkv", "momentkv", "keydiff", "manifold-windowed") for block in (None, 4096)]
PROMPTS += [("momentkv", 4096, "int8"), ("keydiff", 4096, "int4")]


@pytest.mark.parametrize("policy, block, slots", PROMPTS)
def test_all_lengths_of_prompts_need_few_compilations(policy, block, slots):
    with recorded() as launches:
        for length in LENGTHS:
            read(layer(policy, Budget(tokens=64, sinks=2, recent=8), block, slots), length, block)
    found = launches.compilations()
    assert len(found) > 4 and max(found.values()) <= MOST, found


def test_layers_of_unequal_heads_share_compilations():
    """Each has other numbers of slots and centroids. What differs is how many partials are merged."""
    q, k, v = torch.zeros(1, 4, 64, D), *torch.zeros(2, 1, 2, 64, D)
    spec = states.spec("centroids", 0, "triton")
    with recorded() as launches:
        for kept in (64, 100, 176, 300, 433, 640, 777, 1000, 1536, 2047, 3001, 4096):
            state = states.filled(1, 2, D, kept, free=kept % 17, correction="centroids", shares=(0.4, 1.6))
            ops.decode_step(q[:, :, 0].contiguous(), *(t[:, :, :1].contiguous() for t in (k, v)), state, spec)
            for num in (48, 61):
                valid = torch.ones(1, num, dtype=torch.bool)
                ops.prefill_attention(q[:, :, :num], k[:, :, :num], v[:, :, :num], valid, state, spec)
    assert sorted(launches.compilations().values()) == [1, 5], launches.compilations()


def test_nor_do_scores_of_prompts():
    with recorded() as launches:
        for length in LENGTHS:
            q, keys, values = tokens(length)
            for chosen in (None, torch.ones(keys.shape[:3], dtype=torch.bool)):
                ops.leverage_scores(keys, 8, generator=0, mask=chosen, backend="triton")
                ops.noncausal_attention_mass(q, keys, 0.25, mask=chosen, backend="triton")
            ops.most_attended(q, keys, q[..., 0].float(), 0.25, backend="triton")
    found = launches.compilations()
    assert len(found) == 4 and max(found.values()) <= MOST, found


def test_a_prompt_of_centroids_is_few_launches():
    """Per block of tokens: twice one finds seeds and one adds up, then one joins. One more makes what torch sorts."""
    num, state = 32768, layer("snapkv", Budget(tokens=1024), correction="centroids")
    q, k, v = tokens(1)
    state.allocate(HQ, k, v, num)
    keys, valid = torch.zeros(1, HKV, num, D), torch.ones(1, HKV, num, dtype=torch.bool)
    places = torch.arange(num, dtype=torch.int32)[None, None]
    with recorded() as launches, Operators() as operators:
        ops.remember(keys, keys, places, valid, torch.zeros_like(valid), num, state.state, state.rule.spec)
    assert len(launches) == num // BLOCK * 5 + 1 and len(operators.found) < 3


def evicting_step(policy, slots="auto", correction="auto"):
    """The launches of a step that evicts, and torch's operators that are launches."""
    cache = layer(policy, Budget(tokens=64, sinks=2, recent=8), slots=slots, correction=correction)
    with recorded() as launches:
        read(cache, 100, 100)
        q, k, v = tokens(1)
        for _ in range(15):
            cache.step(q, k, v)
        launches.clear()
        with Operators() as operators:
            cache.step(q, k, v)
    assert cache.workspace.clock.now.evicts
    return [name for name, _ in launches], operators.found


def test_an_evicting_step_is_few_launches():
    launched, others = evicting_step("snapkv", correction="centroids")
    assert len(launched) + len(others) <= 8, (launched, others)


@pytest.mark.parametrize("slots", ["int8", "int4"])
def test_codes_need_no_other_kernels(slots):
    assert evicting_step("momentkv", slots)[0] == evicting_step("momentkv")[0]


@pytest.mark.parametrize("gpus", [1, 2])
def test_kernels_are_launched_where_their_tensors_are(gpus, monkeypatch):
    """Every operator, with tensors on the last GPU while the first is current; with one GPU nobody asks or changes."""
    driver, last = Driver(gpus), torch.device("cuda", gpus - 1)
    driver.patch(monkeypatch)
    monkeypatch.setattr(operator, "device_of", lambda arguments: last)
    if gpus == 1:
        monkeypatch.setattr(torch.cuda, "current_device", None)
    operator.several_devices.cache_clear()
    launched = set()
    with recorded(driver) as launches:
        for name in CASES:
            opaque, pieces, _ = flattened(name, "triton")
            launches.clear()
            opaque(*pieces)
            launched |= {name.split()[0]} if launches else set()
    assert set(launches.devices) == {last.index} and driver.current == 0
    assert driver.changes == (0 if gpus == 1 else len(CASES))
    assert launched == {name.split()[0] for name in CASES} - {"sketch"}
    operator.several_devices.cache_clear()
