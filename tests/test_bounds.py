"""With eviction: memory stays within its bound at every moment, nothing is lost from the count, positions stay true."""

import pytest
import torch

import fastkv
from fastkv.integrations.transformers import stock
from fastkv.integrations.transformers.attention import NAME

from .models import COMBINATIONS, build, compressed_layers, generate, prompt, raises, small
from .pairwise import covering

TOKENS, EVERY = 20, 5


class Watch:
    """Checks the bound inside the forward: after each layer's attention, for each block and each token."""

    def __init__(self, model):
        self.checks = 0
        self.addresses = {}
        self.positions = []
        for module in model.modules():
            if getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME:
                module.register_forward_hook(self.check, with_kwargs=True)

    def check(self, module, args, kwargs, output):
        layer = kwargs[stock.CACHE].layers[module.layer_idx]
        state = layer.state
        assert {rows.shape[2] for rows in state.exact.moving().values()} == {TOKENS + EVERY}
        assert int(state.exact.lengths.max()) <= state.exact.filled <= TOKENS + EVERY
        assert torch.equal(
            state.exact.lengths + state.moments.count, state.seen[:, None].expand_as(state.exact.lengths)
        )
        address = self.addresses.setdefault(module.layer_idx, state.exact.keys.data_ptr())
        assert state.exact.keys.data_ptr() == address, "slots are allocated once"
        self.checks += 1
        self.positions.append(kwargs["position_ids"])


@pytest.mark.parametrize("kind,block", covering(COMBINATIONS, [None, 13], together=1))
def test_bound_and_conservation(kind, block):
    name, base = kind
    model = build(name, base)
    ids, mask = prompt()
    fastkv.patch(model, "momentkv", budget=small(), prefill_block=block, evict_every=EVERY)
    watch = Watch(model)
    out = generate(model, ids, mask, new=30, return_dict_in_generate=True)
    cache = out.past_key_values
    layers = compressed_layers(cache)
    forwards = 29 + (1 if block is None else 4)
    assert watch.checks == forwards * len(layers)
    assert cache.get_seq_length() == 50 + 29
    seen = mask.sum(-1, keepdim=True) + 29
    for layer in layers:
        stored, count = cache.stored(layer), cache.moments(layer).count
        assert torch.equal(stored + count, seen.expand_as(stored))
        assert cache.slots(layer) == TOKENS + EVERY
        assert int(count.min()) > 0
        assert torch.isfinite(cache.moments(layer).cross).all()
    # RoPE goes on at the true position of each row, not at the number of stored tokens.
    last = watch.positions[-1]
    assert torch.equal(last[:, -1].expand(3), seen[:, 0] - 1)


# Equal tokens have keys of equal length in the first layer, so rounding decides which of them `knorm` keeps.
def test_keep_share_counts_the_whole_prompt_in_both_modes():
    model = build()
    ids, _ = prompt(1, 50, (0,))
    for block in (None, 13):
        fastkv.patch(model, "momentkv", budget=fastkv.Budget(keep=0.5, sinks=2, recent=4), prefill_block=block)
        cache = model(ids).past_key_values
        assert cache.stored(0).tolist() == [[25, 25]]


def test_layer_shares_and_bytes_are_what_they_say():
    model = build()
    ids, _ = prompt(1, 50, (0,))
    fastkv.patch(model, "momentkv", budget=small(layers="pyramid"))
    cache = model(ids).past_key_values
    stored = [int(cache.stored(layer)[0, 0]) for layer in range(4)]
    assert sum(stored) == 4 * TOKENS and stored == sorted(stored, reverse=True) and stored[0] > stored[-1]
    fastkv.patch(model, "momentkv", budget=small(layers=[40, 20, 12, 8]))
    cache = model(ids).past_key_values
    assert [int(cache.stored(layer)[0, 0]) for layer in range(4)] == [40, 20, 12, 8]
    for name in ("momentkv", "keydiff"):
        fastkv.patch(model, name, budget=fastkv.Budget(bytes=40_000, sinks=2, recent=4))
        cache = model(ids.repeat(2, 1)).past_key_values
        per_slot = sum(layer.state.nbytes() // layer.state.slots for layer in cache.layers)
        assert 40_000 - per_slot < cache.nbytes() / 2 <= 40_000


def test_reset_takes_a_new_batch_and_a_new_share():
    model = build()
    ids, mask = prompt()
    fastkv.patch(model, "momentkv", budget=fastkv.Budget(keep=0.5, sinks=2, recent=4))
    cache = fastkv.FastKVCache(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    model(ids[:2, :30], past_key_values=cache)
    assert cache.stored(0).tolist() == [[15, 15]] * 2
    raises("holds 2 sequences, got 1", model, ids[:1, :1], past_key_values=cache)
