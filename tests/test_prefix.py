"""compress: a stock cache becomes the compressed one that reading would have made."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import fastkv
from fastkv import Budget, FastKVCache

from .models import build, generate, prompt, raises
from .pairwise import covering
from .test_policy_matrix import EVERY, small
from .test_saved import assert_same, contents
from .test_vector_cache import mapping

POLICIES = ("keydiff", "manifold", "leverage", "lagkv", "knorm", "streaming", "random")


def stock(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=True).past_key_values


@pytest.mark.parametrize(
    "policy, options",
    covering(POLICIES, [{}, {"correction": "centroids"}, {"correction": "moments", "slots": "int8"}], together=1),
)
def test_it_is_what_reading_makes(policy, options):
    """Bit for bit, also what the next tokens make of it; the stock cache stays as it is."""
    model, (ids, _) = build(), prompt(1, 60, (0,))
    cache = stock(model, ids)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    made = fastkv.compress(cache, model, policy, small(), evict_every=EVERY, **options)
    read = model(ids).past_key_values
    assert isinstance(made, FastKVCache) and made.get_seq_length() == 60
    assert_same(contents(made), contents(read))
    for layer, (keys, values) in zip(cache.layers, before):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    more = torch.cat([ids, ids[:, :5]], 1)
    assert torch.equal(*(generate(model, more, new=9, past_key_values=one) for one in (made, read)))


def test_padding_and_adaptive_heads():
    model, (ids, mask) = build(), prompt(2, 60, (0, 19))
    cache = stock(model, ids, mask)
    for heads in ("uniform", "adaptive"):
        made = fastkv.compress(cache, model, "knorm", small(heads=heads), evict_every=EVERY, attention_mask=mask)
        for mine, theirs in zip(made.layers, model(ids, attention_mask=mask).past_key_values.layers):
            assert torch.equal(mine.state.stored, theirs.state.stored)
            assert torch.equal(mine.state.seen, theirs.state.seen)
            torch.testing.assert_close(mine.state.exact["keys"], theirs.state.exact["keys"])


@pytest.mark.parametrize("options", [{"policy": "leverage"}, {"policy": "knorm", "correction": "vector"}])
def test_padding_where_positions_matter(options):
    """Without a mask the model counts padding, and keys are turned by what it counts."""
    model, (ids, mask) = build(), prompt(2, 60, (0, 19))
    given = {"budget": small(), "attention_mask": mask, "vector": mapping(model) if "correction" in options else None}
    raises("whether padding was counted", fastkv.compress, stock(model, ids, mask), model, **options, **given)
    assert "_fastkv_config" not in vars(model)


def test_a_static_cache_and_bytes():
    """Of a cache with room for more, its tokens; the budget is of the prefix."""
    model, (ids, _) = build(num_hidden_layers=2), prompt(1, 200, (0,))
    static = StaticCache(config=model.config, max_cache_len=256)
    model(ids, past_key_values=static)
    made = fastkv.compress(static, model, budget="2x")
    assert made.get_seq_length() == 200 and made.config.slots.name == "int8"
    full = 200 * sum(2 * layer.keys.shape[1] * layer.keys.shape[3] * 2 for layer in static.layers)
    assert 0.8 * full / 2 < made.nbytes() <= full / 2


def test_refusals_change_nothing():
    model, (ids, _) = build(), prompt(1, 60, (0,))
    cache = stock(model, ids)
    fastkv.patch(model, "snapkv", 64)
    before = model._fastkv_config
    mine = model(ids).past_key_values
    short = DynamicCache()
    for index, layer in enumerate(cache.layers):
        short.update(layer.keys, layer.values if index else layer.values[:, :, :50], index)
    wrong = [
        ("looks at queries or attention", cache, {"policy": "snapkv"}),
        ("policy 'kvzip' looks at queries", cache, {"policy": "kvzip"}),
        ("policy 'fastkv' looks at queries", cache, {"policy": "fastkv"}),
        ("got FastKVCache", mine, {}),
        ("with 4 layers, as DynamicCache, got DynamicCache", DynamicCache(), {}),
        ("layer 0 of the DynamicCache does not hold", short, {}),
        (r"attention_mask must have shape \[1, 60\]", cache, {"attention_mask": torch.ones(1, 59)}),
        (r"attention_mask must have shape \[1, 60\], .* got list", cache, {"attention_mask": [[1] * 60]}),
        (r"of \(4, 16, 16\), this model of \(2, 16, 16\)", stock(build(num_key_value_heads=4), ids), {}),
        ("smaller than sinks", cache, {"budget": 8}),
        ("give at least", cache, {"budget": Budget(bytes=100)}),
        (r"Budget\(quality=...\) looks at queries", cache, {"budget": Budget(quality=0.9)}),
    ]
    for message, given, options in wrong:
        raises(message, fastkv.compress, given, model, **{"budget": small(), **options})
        assert model._fastkv_config is before
    raises("needs a transformers model, got Linear", fastkv.compress, cache, torch.nn.Linear(2, 2))
    for name in ("gemma2", "deepseek_v3"):  # a sliding window; latents, which a stock cache may hold expanded
        other, said = build(name, "eager"), "layers that are not compressed, share keys or cache latents"
        raises(said, fastkv.compress, stock(other, ids), other, budget=Budget(tokens=20, recent=4))
        assert "_fastkv_config" not in vars(other)
