"""A second reading of the prompt by fastkv: what stays."""

from dataclasses import dataclass

import pytest
import torch

import fastkv
from fastkv import Budget, FastKVError
from fastkv.lab.equal_bytes import assert_equal_bytes, equal_bytes
from fastkv.policies import AttentionMatching, FastKV, FastKVReread, KVzip

from .models import build, prompt
from .test_deferred import most_attention
from .test_policy_matrix import EVERY, TOKENS, small

B, HKV, GROUP, D, SCALE = 2, 2, 3, 8, 0.4
F64 = torch.float64


@dataclass(frozen=True)
class Short(FastKVReread):
    """In several chunks."""

    chunk: int = 16


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_what_is_remembered_is_what_the_second_reading_attended_to(name):
    model, (ids, _), layer = build(name, "eager"), prompt(1, 40, (0,)), 1
    most = most_attention(model, ids, layer)
    fastkv.patch(model, "fastkv-reread", small(), evict_every=EVERY)
    exact = model(ids).past_key_values.layers[layer].state.exact
    for head in range(2):
        places = exact.positions[0, head, :TOKENS].long()
        assert {0, 1, 36, 37, 38, 39} <= set(places.tolist())
        want = most[head, places] * exact.values[0, head, :TOKENS].norm(dim=-1)
        torch.testing.assert_close(exact.memory[0, head, :TOKENS], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [Short(), AttentionMatching(chunk=16)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("first", [None, 0, 5])
def test_a_row_does_not_depend_on_its_padding(first, policy):
    """Where its first token stands at `first`, or where the model numbers all tokens, padding included."""
    model, (ids, mask) = build(), prompt(2, 60, (0, 19))
    fastkv.patch(model, policy, small(), evict_every=EVERY)
    places = torch.arange(60).expand(2, -1) if first is None else (mask.cumsum(-1) - 1).clamp(min=0) + first
    together = model(ids, attention_mask=mask, position_ids=None if first is None else places).past_key_values
    alone = model(ids[1:, 19:]).past_key_values
    there = model(ids[1:, 19:], position_ids=places[1:, 19:]).past_key_values  # keys rounded to bf16 in the same places
    for mine, elsewhere, theirs in zip(together.layers, alone.layers, there.layers):
        assert torch.equal(mine.state.exact["positions"][1], elsewhere.state.exact["positions"][0])
        if not policy.second_reading.samples:  # fitted values follow from the last bits of sums
            values = mine.state.parts.values[1], theirs.state.parts.values[0]
            torch.testing.assert_close(*values, rtol=2**-7, atol=1e-4)  # sums in another order, one step of bf16


def test_equal_bytes():
    model, (ids, _) = build(), prompt(1, 60, (0,))
    budget, caches = equal_bytes(model.config, 30, model.dtype, sinks=2, recent=4), {}
    for name in ("fastkv", "fastkv-reread", "kvzip"):
        with fastkv.patched(model, name, budget):
            caches[name] = model(ids).past_key_values
    assert_equal_bytes(caches, budget.bytes)


def test_by_name():
    assert FastKVReread().second_reading and not FastKV().second_reading
    assert (FastKVReread().correction, FastKVReread().second_reading.chunk) == ("centroids", 512)
    assert (KVzip().chunk, KVzip(chunk=5, prompt=[1]).prompt) == (2048, (1,)) and not KVzip().second_reading.samples


def test_refusals():
    policy = "fastkv-reread"
    with pytest.raises(FastKVError, match="needs the whole context before anything is evicted"):
        fastkv.patch(build(), policy, small(), prefill_block=16)
    with pytest.raises(FastKVError, match="reads the prompt with the whole model"):
        fastkv.FastKVAttention(4, 2, 8, policy=policy, budget=Budget(tokens=40))
    model = fastkv.patch(build(), policy, small())
    with pytest.raises(FastKVError, match=r"second readings and .* pass input_ids"):
        model(inputs_embeds=torch.randn(1, 30, 48))
