"""Models of many kinds: found by behaviour, exact with room for everything, refused where they cannot be right."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import fastkv
from fastkv import Budget, FastKVCache, FastKVError
from fastkv.cache import CacheWorkspace
from fastkv.cache.layer import LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.config import Config
from fastkv.integrations.transformers import modules, stock
from fastkv.integrations.transformers.attention import valid_tokens
from fastkv.integrations.transformers.forward import SLIDING_ROLLBACK
from fastkv.integrations.transformers.layer import HybridLayer

from .families import tiny as families_of_tests
from .models import build, compressed_layers, generate, prompt, raises
from .test_families import WRITTEN_WITH

ROOM, SMALL = Budget(tokens=500), Budget(tokens=20, sinks=2, recent=4)
SHARED = "gemma3n_text:shared-keys", "gemma4_text:shared-keys"  # layers that attend to the keys of earlier ones


def tiny(name):
    """A seeded model of that kind; skipped where transformers has none, which the list of types is not written with."""
    try:
        return families_of_tests.build(name)
    except families_of_tests.DoesNotExist as error:
        assert transformers.__version__ != WRITTEN_WITH, error
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", *SHARED])
def test_a_prompt_that_is_read_twice(name):
    """What is not compressed forgets each part of the second reading; layers that share keys attend in both."""
    model, (ids, mask), policy = tiny(name), prompt(2, 40, (0, 7)), fastkv.policies.get("kvzip", chunk=16)
    tokens = generate(model, ids, mask)
    fastkv.patch(model, policy, ROOM)
    assert torch.equal(generate(model, ids, mask), tokens)
    fastkv.patch(model, policy, SMALL)
    generate(model, ids, mask)


@pytest.mark.skipif(Version(transformers.__version__) < SLIDING_ROLLBACK, reason="windows cannot roll back")
@pytest.mark.parametrize("name, block", [(SHARED[0], None), (SHARED[1], 13), ("phi3", None)])
def test_assisted_decoding(name, block):
    """Layers that share keys attend before it is known which tokens stay."""
    model, ids = tiny(name), prompt(1, 20, (0,))[0].repeat(1, 2)
    expected = generate(model, ids)
    fastkv.patch(model, budget=ROOM, prefill_block=block)
    cache = FastKVCache(model, static=False)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4, past_key_values=cache), expected)
    assert int(cache.compressed[0].state.seen) >= 40


# What is found.


def test_layers_of_each_kind():
    names = "qwen3_next", "falcon_h1", SHARED[1], "mllama:cross-attention"
    linear, hybrid, shared, crossed = (FastKVCache(fastkv.patch(tiny(name), budget=ROOM)) for name in names)
    assert compressed_layers(linear) == [1, 3] and len(linear.layers) == 4
    assert all(type(layer) is HybridLayer for layer in hybrid.layers)
    assert compressed_layers(shared) == [0, 2]
    assert shared.sources == {3: 2, 4: 1, 5: 2} and [one.cache.kv_sharers for one in shared.compressed] == [0, 2]
    assert compressed_layers(crossed) == [0, 2, 3] and len(crossed.layers) == 4


def test_sizes_are_those_of_the_tensors():
    for name in ("qwen3_next", "phi3", "falcon_h1", "lfm2", "gpt_neox", "gpt2", *SHARED, "mllama:cross-attention"):
        model, seen = tiny(name), {}
        fastkv.patch(model, budget=ROOM)
        cache = FastKVCache(model)
        model(prompt(1, 20, (0,))[0], past_key_values=cache)
        for layer in cache.compressed:
            keys, values = layer.state.exact.keys, layer.state.exact.values
            seen[layer.cache.layer] = (layer.cache.num_heads // keys.shape[1], keys.shape[-1], values.shape[-1])
        sizes = {index: modules.Sizes.of(one) for index, one in modules.attentions(model).items() if index in seen}
        assert {i: (one.groups, one.key_dim, one.value_dim) for i, one in sizes.items()} == seen


class Encoder(nn.Module):
    """Attention of something else, with a place of its own."""

    def __init__(self, module):
        super().__init__()
        self.self_attn = module


def test_only_the_decoder_is_looked_at():
    """An encoder whose modules have the same places as the decoder's changes nothing."""
    model = build()
    model.add_module("audio_tower", Encoder(build("qwen3").model.layers[0].self_attn))
    assert [type(one).__name__ for one in modules.attentions(model).values()] == ["LlamaAttention"] * 4
    fastkv.patch(model, budget=ROOM)
    assert torch.equal(generate(model, *prompt()), generate(fastkv.patch(build(), budget=ROOM), *prompt()))


def test_two_modules_in_one_place():
    model = build()
    model.model.layers[0].add_module("again", build("qwen3").model.layers[0].self_attn)
    raises("layer 0 of LlamaForCausalLM has several attention modules", fastkv.patch, model)


def test_the_output_projection_has_many_names():
    for name, shape in (("gpt2", (64, 4, 16)), ("gpt_neox", (64, 4, 16)), ("phi3", (64, 4, 16))):
        assert modules.output_projection(modules.attentions(tiny(name))[0], shape[2]).shape == shape
    raises("expected one named o_proj, out_proj", modules.output_weight, nn.Linear(2, 2))


# What is refused.


def test_state_spaces_that_read_prompts_whole():
    """Their layers begin anew at every block, in transformers too."""
    why = "jamba reads prompts whole only: its linear attention begins anew at every block; use prefill_block=None"
    raises(why, fastkv.patch, tiny("jamba"), prefill_block=16)


class OddLayer(stock.DynamicLayer):
    """Nobody knows what it keeps."""


CACHES = "fastkv.integrations.transformers.cache.stock_layers"


@pytest.mark.parametrize(
    "make, place, value, message",
    [(build, CACHES, lambda model: [OddLayer() for _ in range(4)], "keeps a OddLayer, expected layers of full"),
     (lambda: tiny(SHARED[1]), f"{modules.__name__}.sources", lambda model: {}, "keys that they do not cache"),
     (build, f"{modules.__name__}.INTERFACE", "ELSE", r"layers \[0, 1, 2, 3\] of LlamaForCausalLM do not attend")],
    ids=["kinds of layers", "keys of nobody", "another interface"],
)  # fmt: skip
def test_what_is_not_known(make, place, value, message, monkeypatch):
    monkeypatch.setattr(place, value)
    raises(message, fastkv.patch, make())


def test_chunks_are_no_ring():
    raises("static=True cannot hold layers that attend in chunks still", fastkv.patch, tiny("llama4_text"), static=True)


@pytest.mark.parametrize("attribute, value, words", [("is_causal", False, "later tokens"), ("expand_kv", 1, "latents")])
def test_modules_that_behave_otherwise(attribute, value, words):
    model = build()
    module = model.model.layers[2].self_attn
    module.__class__ = type("Other", (type(module),), {attribute: value})
    vars(module).pop(attribute, None)
    raises(rf"layer 2 \(Other\) .*{words}", fastkv.patch, model)


# Guards at run time. Each is one change to the forward of an attention module.


def calling(change):
    """A model whose second layer calls attention as `change(attention)` does."""
    model = fastkv.patch(build(), budget=SMALL)
    module = model.model.layers[1].self_attn
    stock_forward = module.forward
    module.forward = lambda *args, **kwargs: stock_forward(*args, **change(kwargs))
    return model


@pytest.mark.parametrize("length", [9, 1])
def test_unknown_tensors_of_attention(length):
    model = calling(lambda kwargs: kwargs)
    model(prompt(1, 30, (0,))[0], past_key_values=(cache := FastKVCache(model)))
    model = calling(lambda kwargs: {**kwargs, "alibi": torch.ones(1), "nothing": None})
    with pytest.raises(FastKVError, match=r"layer 1 \(LlamaAttention\) was given alibi, expected queries"):
        model(prompt(1, length, (0,))[0], past_key_values=cache)
    with pytest.raises(FastKVError, match="was asked to attend to later tokens"):
        calling(lambda kwargs: {**kwargs, "is_causal": False})(prompt(1, 9, (0,))[0])


def test_one_call_of_attention_for_every_update():
    model = fastkv.patch(build(), budget=SMALL)
    ids, cache = prompt(1, 9, (0,))[0], FastKVCache(model)
    model(ids, past_key_values=cache)
    layer, module = cache.layers[1], model.model.layers[1].self_attn
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    with pytest.raises(FastKVError, match="layer 1 attends to tokens that its cache was not given"):
        fastkv.integrations.transformers.attention.fastkv_attention(module, q, k, k, None, fastkv_layer=layer)
    layer.named = True
    layer.update(k, k)
    raises("layer 1 got more tokens before attention was called", layer.update, k, k)
    cache.reset()
    model(ids, past_key_values=cache)


def test_padding_follows_the_2d_mask():
    """A 4-D mask may let a padded token see itself, so that its softmax is defined."""
    seeing = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    real = torch.tensor([[False, True, True], [True, True, True]])
    assert torch.equal(valid_tokens(seeing, real, 2, 3, torch.device("cpu")), real)
    assert valid_tokens(seeing, None, 2, 3, torch.device("cpu")).all()
    hidden = torch.where(real[:, None, None] & seeing, 0.0, torch.finfo(torch.float32).min)
    assert torch.equal(valid_tokens(hidden, None, 2, 3, torch.device("cpu")), real)


@pytest.mark.parametrize("block", [None, 8])
def test_padding_of_a_model_whose_mask_hides_nothing(block, monkeypatch):
    (ids, mask), model = prompt(2, 30, (0, 7)), fastkv.patch(build(), budget=SMALL, prefill_block=block)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **given: None)
    assert model(ids, attention_mask=mask).past_key_values.compressed[0].state.seen.tolist() == [30, 23]


# Layers that share keys.


HOW = Attends(0.3)


def shared_layers(readers, evict_every=3):
    """A cache with so many readers, which has read a prompt and been looked at by each."""
    config = Config.make("momentkv", SMALL, None, evict_every, "auto", "reference", None)
    layer = LayerCache(LayerPlan(config, kv_sharers=readers), CacheWorkspace(evict_every=evict_every))
    q, k, v, valid = block(30)
    layer.allocate(4, k, v, 30)
    layer.configure(HOW)
    layer.read(q, k, v, valid)
    return layer, q


def block(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, num, 16, generator=generator) for heads in (4, 2, 2))
    return q, k, v, torch.ones(2, num, dtype=torch.bool)


def test_a_layer_evicts_after_its_last_reader():
    (alone, _), (layer, q) = shared_layers(0), shared_layers(2)
    before = alone.state
    assert int(before.stored.max()) == 20 and int(layer.state.stored.max()) == 0  # its block is not absorbed yet
    for _ in range(2):
        layer.attend_shared(q, HOW, lambda: q)
    assert torch.equal(layer.state.stored, before.stored)
    for step in range(7):
        q, k, v, _ = block(1, step + 1)
        assert torch.equal(alone.step(q, k, v), layer.step(q, k, v))
        held = int(layer.state.stored.max())
        assert torch.equal(layer.step_shared(q, HOW), layer.step_shared(q, HOW))
        assert int(layer.state.stored.max()) == (20 if step % 3 == 2 else held)
        assert torch.equal(alone.state.stored, layer.state.stored)
        for (name, mine), (_, other) in zip(alone.state.named_tensors(), layer.state.named_tensors()):
            times = 3 if name == "exact.attention" else 1  # the same queries were asked three times
            torch.testing.assert_close(times * mine, other, msg=name)


def test_readers_attend_once():
    layer, q = shared_layers(1)
    raises("1 of 1 layers that share the keys of layer 0 did not attend", layer.step, *block(1, 5)[:3])
    layer.attend_shared(q, HOW, lambda: q)
    raises("attend more often than once", layer.attend_shared, q, HOW, lambda: q)
    layer.reset()
    assert layer.left == 0


def test_readers_see_the_past_and_the_block():
    """Over blocks, the queries of a reader see what those of the layer itself see, also if only the last are asked."""
    layer, q = shared_layers(1)
    layer.attend_shared(q, HOW, lambda: q)
    q, k, v, valid = block(6, 9)
    out = layer.read(q, k, v, valid)
    torch.testing.assert_close(layer.attend_shared(q[:, :, -2:], HOW, lambda: q), out[:, :, -2:])
    assert int(layer.state.seen[0]) == 36
