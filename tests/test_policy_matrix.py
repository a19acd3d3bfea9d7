"""Every policy in every mode: one-shot, in blocks, while decoding, on a second turn; with every sharing of heads."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

import fastkv
from fastkv.policies import Policy

from .models import account, build, generate, policy, prompt, raises, small
from .pairwise import FOLLOWERS, covering, each

TOKENS, EVERY = 20, 7
NAMES = fastkv.policies.names()
ADAPTIVE = [one.name for one in fastkv.policies.ALL if one.adaptive]
IN_BLOCKS = [name for name in NAMES if not fastkv.policies.get(name).second_reading]


def check(cache, seen, every=EVERY):
    """Nothing is lost, nothing is stored twice, sinks and recent tokens are there, the bound holds."""
    if not any(layer.state.approx for layer in cache.layers):
        assert sum(cache.slots(layer) for layer in range(4)) == 4 * (TOKENS + every)
    for layer in range(4):
        stored, tokens = cache.stored(layer), cache.slots(layer) - every
        assert int(stored.sum(-1).max()) <= 2 * (tokens + every - 1)
        parts = cache.layers[layer].state.parts
        assert parts is None or torch.equal(parts.count.sum(-1), cache.moments(layer).count.float())
    account(cache, seen, sinks=2, recent=4)


def two_turns(model, chosen, budget, block, **options):
    """A prompt, generated tokens, a second prompt and more generated tokens on one cache; checked after each."""
    fastkv.patch(model, chosen, budget, prefill_block=block, evict_every=EVERY, **options)
    cache = fastkv.FastKVCache(model)
    ids, mask = prompt()
    tokens = mask.sum(-1)
    first = generate(model, ids, mask, new=20, past_key_values=cache)
    check(cache, tokens + 19)
    more = torch.cat([first, prompt(seed=2)[0][:, -11:]], 1)
    mask = torch.cat([mask, torch.ones(3, more.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    generate(model, more, mask, new=9, past_key_values=cache)
    check(cache, tokens + 20 + 11 + 8)
    return cache


@pytest.mark.parametrize("name,block", [*each(NAMES, [None]), *each(IN_BLOCKS, [16])])
def test_two_turns(name, block, tmp_path):
    cache = two_turns(build(), policy(name, tmp_path), small(), block)
    if name not in ("pyramidkv", "duoattention"):
        assert [cache.slots(layer) for layer in range(4)] == [TOKENS + EVERY] * 4
        assert int(cache.stored(0).max()) <= TOKENS + EVERY - 1


@pytest.mark.parametrize("name", ["momentkv", "fastkv", "duoattention", "kvzip"])
def test_32_short_turns_are_one_long_prompt(name, tmp_path):
    """Three tokens a turn: as many stored, as many counted and as many bytes as if all had come at once."""
    model, (ids, _), chosen = build(), prompt(1, 96, (0,)), policy(name, tmp_path)
    fastkv.patch(model, chosen, small(), evict_every=EVERY)
    turns = fastkv.FastKVCache(model)
    for start in range(0, 96, 3):
        model(ids[:, start : start + 3], past_key_values=turns, logits_to_keep=1)
        account(turns, torch.tensor([start + 3]), sinks=2, recent=4)
    for block in (None, 16) if name in IN_BLOCKS else (None,):
        fastkv.patch(model, chosen, small(), evict_every=EVERY, prefill_block=block)
        at_once = model(ids, logits_to_keep=1).past_key_values
        for layer in range(4):
            assert torch.equal(turns.stored(layer), at_once.stored(layer))
            assert turns.slots(layer) == at_once.slots(layer)
        assert turns.nbytes() == at_once.nbytes()


CORRECTIONS = ["none", "mean", "moments", "centroids"]
OTHERS = [name for name in NAMES if name != "momentkv"]  # whose scores need no moments


@pytest.mark.parametrize(
    "name,correction", [*product(["momentkv"], CORRECTIONS), *covering(OTHERS, CORRECTIONS, together=1, slow=FOLLOWERS)]
)
def test_every_correction_conserves(name, correction, tmp_path):
    model, (ids, mask) = build(), prompt()
    fastkv.patch(model, policy(name, tmp_path), small(), correction=correction, evict_every=1)
    cache = generate(model, ids, mask, new=20, return_dict_in_generate=True).past_key_values
    check(cache, mask.sum(-1) + 19, every=1)
    order = {"mean": 0, "moments": 1}.get(correction)
    assert cache.config.correction.name == correction
    assert cache.moments(0).order == (1 if name == "momentkv" else order)


@pytest.mark.parametrize(
    "name,block",
    covering(ADAPTIVE, [None, 16], together=1, where=lambda name, b: not b or name in IN_BLOCKS, slow=FOLLOWERS),
)
def test_adaptive_heads(name, block, tmp_path):
    adaptive = two_turns(build(), policy(name, tmp_path), small(heads="adaptive"), block)
    equal = fastkv.patch(build(), policy(name, tmp_path), small(), prefill_block=block, evict_every=EVERY)
    ids, mask = prompt()
    uniform = equal(ids, attention_mask=mask, use_cache=True).past_key_values
    # The state without the kernels' working memory; starts and nothing else come on top.
    sizes = [sum(layer.state.nbytes() for layer in cache.layers) for cache in (uniform, adaptive)]
    assert sizes[1] == sizes[0] + 4 * 3 * 3 * 4 < 1.05 * sizes[0]


def test_adaptive_heads_are_unequal_and_share_the_total():
    model, (ids, _) = build(), prompt(3, 50, (0, 0, 0))
    fastkv.patch(model, "snapkv", small(heads="adaptive"), evict_every=EVERY)
    cache = model(ids).past_key_values
    unequal = 0
    for layer in range(4):
        stored = cache.stored(layer)
        assert torch.equal(stored.sum(-1), torch.full((3,), 2 * TOKENS))
        assert int(stored.min()) >= 6, "sinks, recent tokens and a fifth of the mean are the floor"
        unequal += int((stored[:, 0] != stored[:, 1]).sum())
        starts = cache.layers[layer].state.exact.starts
        assert torch.equal(starts.diff(dim=-1), stored + EVERY), "a head owns what it uses and room to decode"
    assert unequal > 0


@dataclass(frozen=True)
class Unfair(Policy):
    """The first head would win every token."""

    name = "unfair"
    adaptive = True

    def score(self, signals):
        return signals.positions + 1e6 * torch.tensor([1.0, 0.0])[:, None]


@pytest.mark.parametrize("tokens,least", [(20, 4), (21, 5), (4, 1)])
@pytest.mark.parametrize("block", [None, 16], ids=["whole", "blocks"])
def test_every_head_keeps_a_fifth_of_the_mean(block, tokens, least):
    """Ada-KV's floor, rounded up, where neither sinks nor recent tokens ask for more."""
    budget = fastkv.Budget(tokens=tokens, sinks=0, recent=0, heads="adaptive")
    model = fastkv.patch(build(), Unfair(), budget, prefill_block=block, evict_every=EVERY)
    cache = model(prompt(1, 50)[0]).past_key_values
    assert all(cache.stored(layer).tolist() == [[2 * tokens - least, least]] for layer in range(4))
    assert cache.layers[0].state.exact["positions"][0, 1, :least].sort().values.tolist() == [*range(50 - least, 50)]


def test_refusals_of_combinations():
    for name in ("tova", "duoattention", "lagkv"):
        raises("do not compare between heads", fastkv.patch, build(), name, small(heads="adaptive"))


def test_duoattention_splits_by_the_pattern(tmp_path):
    model, (ids, _) = build(), prompt(3, 50, (0, 0, 0))
    fastkv.patch(model, policy("duoattention", tmp_path), small(), evict_every=EVERY)
    cache = model(ids).past_key_values
    assert [cache.stored(layer)[0].tolist() for layer in range(4)] == [[34, 6], [6, 34], [20, 20], [20, 20]]
    sizes = [layer.state.nbytes() for layer in cache.layers]
    assert sizes[0] == sizes[1] == sizes[2] + 3 * 3 * 4, "unequal heads cost their starts and nothing else"
