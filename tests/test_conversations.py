"""Many turns on one cache: within the same bound as one prompt, nothing lost from the count, the first words kept."""

import pytest
import torch

import fastkv

from .models import account, build, compressed_layers, policy, prompt
from .pairwise import FOLLOWERS, covering
from .test_batches import NAMES, POLICIES
from .test_vector_cache import mapping

TOKENS, EVERY, SYSTEM = 20, 4, 6
MODES = ["uniform", "adaptive", "vector"]


def go_together(name, mode):
    return mode != "adaptive" or POLICIES[name].adaptive if mode != "vector" else name != "duoattention"


def patch(model, name, directory, mode="uniform", **options):
    """Patch with a protected system prompt."""
    if mode == "vector":
        options |= {"correction": "vector+moments", "vector": mapping(model)}
    heads = "adaptive" if mode == "adaptive" else "uniform"
    budget = fastkv.Budget(tokens=TOKENS, sinks=SYSTEM, recent=3, heads=heads)
    fastkv.patch(model, policy(name, directory), budget, evict_every=EVERY, **options)


def bound(cache, layer):
    """Tokens that the heads of a layer may hold together, those that wait for the next eviction included."""
    layout = cache.layers[layer].cache.rule.layout
    return sum(layout.tokens) + sum(layout.approx) + len(layout.tokens) * layout.spare


def check(cache, seen):
    """Every token is stored or counted, once; the bound holds; the system prompt and the last tokens are there."""
    for layer in compressed_layers(cache):
        assert int(cache.stored(layer).sum(-1).max()) <= bound(cache, layer)
    account(cache, torch.full((len(cache.stored(layer)),), seen), SYSTEM, 3)


@pytest.mark.parametrize("name,mode", covering(NAMES, MODES, together=1, where=go_together, slow=FOLLOWERS))
def test_many_turns_keep_the_system_prompt(name, mode, tmp_path):
    """A system prompt, then turns of every length between one token and more than the budget."""
    model = build()
    patch(model, name, tmp_path, mode)
    ids = torch.cat([prompt(2, 50, (0, 0), seed=seed)[0] for seed in (1, 2, 3)], 1)
    cache, seen, slots = fastkv.FastKVCache(model), 0, None
    for size in (SYSTEM, 2, 1, 1, 30, 1, 5, 1, 1, 1, 1, 1, 24, 2):
        model(ids[:, seen : seen + size], past_key_values=cache, logits_to_keep=1)
        seen += size
        check(cache, seen)
        slots = slots or [cache.slots(layer) for layer in range(4)]
        assert [cache.slots(layer) for layer in range(4)] == slots, "turns do not grow the cache"
    assert int(cache.moments(0).count.min()) > 0


@pytest.mark.parametrize("name", ["momentkv", "fastkv", "duoattention", "kvzip"])
def test_64_short_turns_are_one_long_prompt(name, tmp_path):
    """Three tokens a turn: as many stored, as many counted and as many bytes as if all had come at once."""
    model = build()
    ids = torch.cat([prompt(1, 50, (0,), seed=seed)[0] for seed in range(4)], 1)[:, :192]
    patch(model, name, tmp_path)
    turns = fastkv.FastKVCache(model)
    for start in range(0, 192, 3):
        model(ids[:, start : start + 3], past_key_values=turns, logits_to_keep=1)
        seen = start + 3
        assert torch.equal(turns.stored(1) + turns.moments(1).count, torch.full((1, 2), seen))
        assert int(turns.stored(1).sum()) <= bound(turns, 1)
    check(turns, 192)
    for block in (None,) if POLICIES[name].second_reading else (None, 16):
        patch(model, name, tmp_path, prefill_block=block)
        at_once = model(ids, logits_to_keep=1).past_key_values
        check(at_once, 192)
        for layer in range(4):
            assert torch.equal(turns.stored(layer), at_once.stored(layer))
            assert torch.equal(turns.moments(layer).count, at_once.moments(layer).count)
            assert turns.slots(layer) == at_once.slots(layer)
        assert turns.nbytes() == at_once.nbytes()
