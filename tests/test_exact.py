"""With a budget that holds everything, a patched model is the stock model, and unpatching leaves no trace."""

from functools import partial

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastkv
from fastkv.cache import layer as cache_layer
from fastkv.cache import prefill
from fastkv.integrations.transformers import stock
from fastkv.integrations.transformers.attention import NAME

from .models import COMBINATIONS, account, build, compressed_layers, generate, prompt, small
from .pairwise import covering

# Every day with one attention function each; `tests.families` tries both.
EAGER = [(name, base) for name, base in COMBINATIONS if base == "eager" and name != "gemma2"]
kinds_and_blocks = pytest.mark.parametrize("kind,block", covering(COMBINATIONS, [None, 13], together=1, slow=EAGER))


@kinds_and_blocks
def test_budget_beyond_the_prompt_changes_nothing(kind, block):
    model, (ids, mask) = build(*kind), prompt()
    real = mask.bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    plain = model(ids[:1]).logits
    tokens, tokens_plain = generate(model, ids, mask), generate(model, ids[:1])
    fastkv.patch(model, budget=500, prefill_block=block)
    got = model(ids, attention_mask=mask, position_ids=positions).logits
    got_plain = model(ids[:1]).logits
    for mine, theirs in ((got[real], padded[real]), (got_plain, plain)):
        torch.testing.assert_close(mine, theirs, atol=0 if block is None else 1e-4, rtol=0)
    assert torch.equal(generate(model, ids, mask), tokens)
    assert torch.equal(generate(model, ids[:1]), tokens_plain)
    fastkv.unpatch(model)
    assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits[real], padded[real])


@pytest.mark.parametrize("rows", [1, 15])
def test_blocks_keep_only_the_rows_that_logits_need(rows):
    model, (ids, _) = build(), prompt()
    expected = model(ids[:1], logits_to_keep=rows).logits
    fastkv.patch(model, budget=500, prefill_block=13)
    torch.testing.assert_close(model(ids[:1], logits_to_keep=rows).logits, expected, atol=1e-4, rtol=0)


def snapshot(model):
    """Everything patch may touch, by identity."""

    def touched(one):
        return set(vars(one)), id(getattr(one, "config", None)), [*one._forward_pre_hooks], [*one._forward_hooks]

    return {name: touched(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_unpatch_restores_every_attribute(name):
    model = build(name)
    before, keys = snapshot(model), list(model.state_dict())
    fastkv.patch(model, budget=64)
    assert snapshot(model) != before
    assert list(model.state_dict()) == keys
    fastkv.patch(model, "keydiff", budget=40, prefill_block=8)  # re-patch = unpatch + patch
    fastkv.unpatch(model)
    assert snapshot(model) == before
    assert fastkv.unpatch(model) is model and snapshot(model) == before


def test_other_models_are_not_touched():
    shared = build().config
    first, second = type(build())(shared).eval(), type(build())(shared).eval()
    ids, mask = prompt()
    stock = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "flash_attention_2")}
    expected = generate(second, ids, mask)
    fastkv.patch(first, budget=40)
    assert torch.equal(generate(second, ids, mask), expected)
    assert shared._attn_implementation == "sdpa"
    assert all(ALL_ATTENTION_FUNCTIONS[name] is function for name, function in stock.items())


def test_patched_restores_the_model_after_an_error():
    model = build()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="from the block"), fastkv.patched(model, budget=40):
        raise RuntimeError("from the block")
    assert snapshot(model) == before


# With eviction: memory stays within its bound at every moment, nothing is lost from the count, positions stay true.

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
        total = state.exact.lengths + state.moments.count
        assert torch.equal(total, state.seen[:, None].expand_as(total))
        address = self.addresses.setdefault(module.layer_idx, state.exact.keys.data_ptr())
        assert state.exact.keys.data_ptr() == address, "slots are allocated once"
        self.checks += 1
        self.positions.append(kwargs["position_ids"])


@kinds_and_blocks
def test_bound_and_conservation(kind, block):
    model, (ids, mask) = build(*kind), prompt()
    fastkv.patch(model, "momentkv", budget=small(), prefill_block=block, evict_every=EVERY)
    watch = Watch(model)
    out = generate(model, ids, mask, new=30, return_dict_in_generate=True)
    cache, seen = out.past_key_values, mask.sum(-1) + 29
    layers = compressed_layers(cache)
    assert watch.checks == (29 + (1 if block is None else 4)) * len(layers)
    assert cache.get_seq_length() == 50 + 29
    account(cache, seen, sinks=2, recent=4)
    for layer in layers:
        assert cache.slots(layer) == TOKENS + EVERY and int(cache.moments(layer).count.min()) > 0
    # RoPE goes on at the true position of each row, not at the number of stored tokens.
    assert torch.equal(watch.positions[-1][:, -1].expand(3), seen - 1)


def without_autocast(call, *args, **options):
    assert not torch.is_autocast_enabled("cpu")
    return call(*args, **options)


@pytest.mark.parametrize("policy", ["fastkv", "criticalkv", "fastkv-reread"])
def test_autocast_reaches_attention_and_nothing_else(policy):
    """With all kept it is the stock model in bfloat16, with sums in another order; evictions are computed in fp32."""
    model, (ids, _) = build("llama"), prompt(2, 60, (0, 0))
    with torch.autocast("cpu", torch.bfloat16):
        want = model(ids).logits[:, -1]
    for budget in (fastkv.Budget(tokens=400, heads="uniform"), small()):
        fastkv.patch(model, policy, budget, evict_every=4)
        with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_layer, "absorb_block", partial(without_autocast, cache_layer.absorb_block))
            patch.setattr(cache_layer, "evict", partial(without_autocast, cache_layer.evict))
            cache = model(ids[:, :40]).past_key_values
            model(ids[:, 40:59], past_key_values=cache)
            got = model(ids[:, 59:], past_key_values=cache).logits[:, -1]
            for token in ids[0, :8]:
                model(token.expand(2, 1), past_key_values=cache)
        assert cache.compressed[0].state.exact.dtype == torch.bfloat16
        if budget.tokens == 400:
            torch.testing.assert_close(got, want, atol=0.1, rtol=0)


def test_autocast_over_static_windows():
    """What a prompt left in the rings is of another dtype than what a step brings."""
    model, (ids, mask) = fastkv.patch(build("gemma3"), "momentkv", 400, static=True), prompt()
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, ids, mask)
        fastkv.patch(model, "momentkv", 400, static=False)
        assert torch.equal(found, generate(model, ids, mask))


def test_a_mask_that_was_made_for_a_longer_text():
    """Its first columns count, as with stock caches."""
    model, (ids, mask) = build("llama"), prompt(2, 40, (0, 7))
    fastkv.patch(model, "keydiff", small(), evict_every=4)
    caches = [fastkv.FastKVCache(model) for _ in range(2)]
    for start, stop in ((0, 38), (38, 39), (39, 40)):
        masks = mask[:, :stop], torch.cat([mask[:, :stop], torch.zeros(2, 30, dtype=torch.long)], 1)
        given = zip(masks, caches)
        assert torch.equal(*(model(ids[:, start:stop], attention_mask=a, past_key_values=b).logits for a, b in given))


def test_keep_share_counts_the_whole_prompt_in_both_modes():
    model, (ids, _) = build(), prompt(1, 50, (0,))
    for block in (None, 13):
        fastkv.patch(model, "momentkv", budget=fastkv.Budget(keep=0.5, sinks=2, recent=4), prefill_block=block)
        assert model(ids).past_key_values.stored(0).tolist() == [[25, 25]]


def test_layer_shares_are_what_they_say():
    model, (ids, _) = build(), prompt(1, 50, (0,))
    fastkv.patch(model, "momentkv", budget=small(layers="pyramid"))
    cache = model(ids).past_key_values
    stored = [int(cache.stored(layer)[0, 0]) for layer in range(4)]
    assert sum(stored) == 4 * TOKENS and stored == sorted(stored, reverse=True) and stored[0] > stored[-1]
    fastkv.patch(model, "momentkv", budget=small(layers=[40, 20, 12, 8]))
    cache = model(ids).past_key_values
    assert [int(cache.stored(layer)[0, 0]) for layer in range(4)] == [40, 20, 12, 8]


def test_blocks_of_a_size_for_the_device(monkeypatch):
    assert [prefill.block_tokens(torch.device(kind)) for kind in ("cpu", "cuda", "xpu")] == [512, 4096, 512]
    model, (ids, mask) = build(), prompt()
    monkeypatch.setattr(prefill, "ELSEWHERE", 13)
    found = [generate(fastkv.patch(model, "keydiff", small(), prefill_block=size), ids, mask) for size in ("auto", 13)]
    assert model._fastkv_config.prefill_block == 13 and torch.equal(*found)
