"""Random settings, random uses: whatever is done to the cache of a model, no token is lost and rows stay apart.

Beside the cache of a batch goes a cache for each of its rows, which is given the same tokens, padding included. Models
compute in float64, so that a batch and its rows choose alike. Exactly what is kept: test_cache_operations.
"""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fastkv
from fastkv import Budget, FastKVCache, policies

from .conftest import examples
from .models import account, build, compressed_layers, generate, policy
from .test_vector_cache import mapping

POLICIES = {one.name: one for one in policies.ALL}
CORRECTIONS = ["none", "mean", "moments", "centroids", "vector", "vector+moments"]
FIRST, DISTINCT, MOST_ROWS, LONGEST = 3, 400, 3, 80


@functools.cache
def model_of(name):
    """Ids hardly ever occur twice: equal tokens would tie, and ties follow the last bit."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return build(name, vocab_size=DISTINCT, **(layers if name == "gemma3" else {"num_hidden_layers": 2})).double()


@functools.cache
def folder():
    return tempfile.TemporaryDirectory()


@functools.cache
def policy_of(name, family):
    path = Path(folder().name) / family
    path.mkdir(exist_ok=True)
    return policy(name, path, model_of(family), pattern="0.1\t0.9\n0.8\t0.7\n")


@st.composite
def arguments(draw):
    """Of `patch`, such that they go together."""
    chosen = POLICIES[draw(st.sampled_from(sorted(POLICIES)))]
    heads = draw(st.sampled_from(["uniform", "adaptive"])) if chosen.adaptive else "uniform"
    fixed = heads == "adaptive" or chosen.name == "duoattention"
    amount = draw(st.sampled_from([{"tokens": 6}, {"tokens": 14}, {"tokens": 100}, {"keep": 0.5}]))
    return {
        "policy": chosen.name,
        "budget": Budget(**amount, sinks=draw(st.integers(0, 2)), recent=draw(st.integers(0, 3)), heads=heads),
        "correction": draw(st.sampled_from(CORRECTIONS[:-2] if fixed else CORRECTIONS)),
        "prefill_block": None if chosen.second_reading else draw(st.sampled_from([None, None, 1, 3, 8])),
        "evict_every": draw(st.integers(1, 6)),
        "static": draw(st.booleans()),
    }


class Uses(RuleBasedStateMachine):
    """`text` and `mask` [B, L] are all tokens so far; the last one that `generate` made is not in the cache yet."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    @initialize(name=st.sampled_from(["llama", "qwen3", "gemma3"]), given=arguments(), data=st.data())
    def patch(self, name, given, data):
        given = given | {"policy": policy_of(given["policy"], name)}
        self.model, self.given = model_of(name), given
        vector = mapping(self.model) if given["correction"].startswith("vector") else None
        fastkv.patch(self.model, **given, vector=vector)
        self.cache, self.alone = FastKVCache(self.model), []
        self.read_prompt(data)

    # What caches are given.

    def read_prompt(self, data):
        batch = data.draw(st.integers(1, MOST_ROWS))
        self.text = self.mask = torch.empty(batch, 0, dtype=torch.long)
        self.alone = [*self.alone, *(FastKVCache(self.model) for _ in range(batch))][:batch]
        self.append(self.draw_mask(data, data.draw(st.integers(12 if self.given["budget"].keep else 1, 20))))
        self.feed()

    def draw_mask(self, data, num):
        """Each row is padded on its left, on its right or not at all."""
        mask = torch.ones(len(self.text), num, dtype=torch.long)
        for row in mask:
            pad = data.draw(st.sampled_from([0, *range(-num, num + 1)]))
            row[slice(pad, None) if pad < 0 else slice(0, pad)] = 0
        return mask

    def append(self, mask):
        """New tokens, real where the mask says so."""
        tokens = torch.randint(FIRST, DISTINCT, mask.shape, generator=self.generator)
        self.text = torch.cat([self.text, tokens * mask], 1)
        self.mask = torch.cat([self.mask, mask], 1)

    def length(self, cache):
        return int(cache.get_seq_length())

    def forward(self, cache, rows):
        """Logits of the tokens that a cache does not have yet."""
        new, mask = slice(self.length(cache), None), self.mask[rows]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, new]
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        return self.model(self.text[rows, new], **given).logits

    def feed(self):
        """What is new of the text, to the batch and to each row."""
        real = self.mask[:, self.length(self.cache) :].bool()
        num, block = real.shape[1], self.given["prefill_block"] or real.shape[1]
        # Whether a lone token is a decode step or a block may depend on all rows: what follows then does, too.
        lone = [t for t in range(0, num, block) if min(block, num - t) == 1 and real[:, t].any() > real[:, t].all()]
        same = real.clone()
        same[:, min(lone, default=num) + 1 :] = False
        logits = self.forward(self.cache, slice(None))
        assert logits.isfinite().all()
        for row, cache in enumerate(self.alone):
            own = self.forward(cache, slice(row, row + 1))[0]
            torch.testing.assert_close(logits[row][same[row]], own[same[row]], atol=1e-4, rtol=0)
        if lone:
            self.alone = [self.row_of(row) for row in range(len(self.text))]

    def row_of(self, row):
        cache = self.cache.clone()
        cache.batch_select_indices(torch.tensor([row]))
        return cache

    # The rules.

    @precondition(lambda self: self.text.shape[1] < LONGEST)
    @rule(data=st.data(), num=st.one_of(st.just(1), st.integers(1, 9)))
    def turn(self, data, num):
        self.append(self.draw_mask(data, num))
        self.feed()

    @precondition(lambda self: self.text.shape[1] < LONGEST)
    @rule(num=st.integers(1, 7))
    def decode(self, num):
        self.feed_pending()
        before = self.nbytes()
        for _ in range(num):
            self.append(torch.ones(len(self.text), 1, dtype=torch.long))
            self.feed()
            self.check()
        assert self.nbytes() == before

    def feed_pending(self):
        if self.length(self.cache) < self.text.shape[1]:
            self.feed()

    def nbytes(self):
        """Of what does not grow; transformers' own sliding windows do."""
        return sum(self.cache.layers[layer].state.nbytes() for layer in compressed_layers(self.cache))

    @precondition(lambda self: self.text.shape[1] < LONGEST)
    @rule(num=st.integers(1, 6))
    def greedy(self, num):
        self.append(torch.ones(len(self.text), 1, dtype=torch.long))
        text = generate(self.model, self.text, self.mask, new=num, past_key_values=self.cache)
        for row, cache in enumerate(self.alone):
            rows = slice(row, row + 1)
            own = generate(self.model, self.text[rows], self.mask[rows], new=num, past_key_values=cache)
            assert torch.equal(own[0], text[row])
        self.text = text
        self.mask = torch.cat([self.mask, torch.ones(len(text), num, dtype=torch.long)], 1)

    @rule(seed=st.integers(0, 9))
    def sample(self, seed):
        """Two samples of each row, which leave the cache that they continue as it was."""
        torch.manual_seed(seed)
        self.feed_pending()
        text, mask = self.text.repeat_interleave(2, 0), self.mask.repeat_interleave(2, 0)
        text, mask = (torch.cat([rows, torch.ones_like(rows[:, :1])], 1) for rows in (text, mask))
        cache = self.cache.fork(2)
        out = generate(self.model, text, mask, new=3, do_sample=True, past_key_values=cache)
        assert torch.equal(out[:, :-3], text)
        self.check_counts(cache, mask.sum(-1) + 2)

    @rule(seed=st.integers(0, 9), batch=st.integers(1, 2), num=st.integers(12, 24))
    def beams(self, seed, batch, num):
        """A new text, which has a cache of its own."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(FIRST, DISTINCT, (batch, num), generator=generator)
        options = {"num_beams": 2, "new": 4}
        out = generate(self.model, ids, torch.ones_like(ids), return_dict_in_generate=True, **options)
        self.check_counts(out.past_key_values, torch.full((2 * batch,), num + 3))
        for row in range(batch):
            assert torch.equal(generate(self.model, ids[row : row + 1], **options)[0], out.sequences[row])

    @precondition(lambda self: 2 * len(self.text) <= MOST_ROWS)
    @rule(fork=st.booleans())
    def repeat(self, fork):
        if fork:
            self.cache = self.cache.fork(2)
        else:
            self.cache.batch_repeat_interleave(2)
        self.rearrange([row for row in range(len(self.text)) for _ in range(2)])

    @rule(data=st.data())
    def select(self, data):
        """Rows are dropped, repeated and put into another order."""
        rows = data.draw(st.lists(st.integers(0, len(self.text) - 1), min_size=1, max_size=MOST_ROWS))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.rearrange(rows)

    @rule(data=st.data())
    def reorder(self, data):
        batch = len(self.text)
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder_cache(torch.tensor(rows))
        self.rearrange(rows)

    def rearrange(self, rows):
        self.text, self.mask = self.text[rows], self.mask[rows]
        self.alone = [self.alone[row].clone() for row in rows]

    @rule()
    def save_and_load(self):
        path = Path(folder().name) / "cache"
        self.cache.save(path)
        self.cache.reset()  # what was read must not hang on it
        self.cache = FastKVCache.load(path, self.model)

    @rule(data=st.data())
    def reset(self, data):
        for cache in (self.cache, *self.alone):
            cache.reset()
        self.read_prompt(data)

    # What always holds.

    @invariant()
    def check(self):
        end = self.length(self.cache)
        assert all(self.length(cache) == end for cache in self.alone)
        self.check_counts(self.cache, self.mask[:, :end].sum(-1))

    def check_counts(self, cache, seen):
        """Every token of every head is stored or counted as evicted, within the slots; everything is a number."""
        account(cache, seen)
        for layer in compressed_layers(cache):
            assert (cache.stored(layer).sum(-1) <= 2 * cache.slots(layer)).all()
            for tier in cache.layers[layer].state.tiers.values():
                assert (tier.lengths <= (tier.limit if tier.starts is None else tier.starts.diff(dim=-1))).all()


@pytest.mark.timeout(1800)
def test_any_use_of_a_model():
    slow, steps = [HealthCheck.too_slow, HealthCheck.data_too_large], max(examples(20), 10)
    every = settings(max_examples=examples(360), stateful_step_count=steps, suppress_health_check=slow)
    stateful.run_state_machine_as_test(Uses, settings=every)
