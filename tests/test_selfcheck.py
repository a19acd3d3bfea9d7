"""What a model shows of itself: how its layers turn their keys, for tiny models that do it in all known ways."""

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

import fastkv
from fastkv import FastKVError
from fastkv.integrations.transformers import rotations
from fastkv.integrations.transformers.selfcheck import unchanged
from fastkv.integrations.transformers.stock import CACHE

from .families import tiny as families
from .models import build, projected, prompt, raises
from .test_exact import snapshot
from .test_vector_cache import mapping

LAYERS, HKV, D = 4, 2, 16
# Of each model: whether pairs are interleaved, dimensions turned and the layers that turn none.
TURNING = {
    "llama": (False, D, ()), "cohere2": (True, D, (1, 3)), "smollm3": (False, D, (1, 3)), "exaone4": (False, D, (1, 3)),
    "ernie4_5": (True, D, ()), "glm4": (True, D // 2, ()), "gemma3_text": (False, D, ()), "qwen2_vl": (False, D, ()),
    "mistral3": (False, D, ()),
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", TURNING)


def tiny(kind, **changes):
    """A seeded random model of that type."""
    return families.build(kind, "eager", **changes)


@KINDS
def test_keys_are_turned_back(kind):
    """In every layer, also at positions that the check has not looked at."""
    model, (interleaved, size, still) = tiny(kind), TURNING[kind]
    found = rotations(model, range(LAYERS))
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(7).expand(2, HKV, 7)
    untouched, held = projected(model.get_decoder(), ids, "k"), model(ids).past_key_values.layers
    for layer, rotary in found.items():
        before, cached = untouched["k", layer].float().transpose(1, 2), held[layer].keys
        assert torch.equal(before, cached) == (layer in still) == (not rotary.frequencies.any())
        assert layer in still or (rotary.interleaved, rotary.size) == (interleaved, size)
        torch.testing.assert_close(rotary.unrotate(cached, positions), before, atol=1e-5, rtol=0)


def test_massive_channels_hide_nothing():
    """A bias of a thousand in a slow pair, as Qwen has, does not make the other pairs count for nothing."""
    model = build("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7] = 1000.0
    assert all(rotary.frequencies.all() for rotary in rotations(model.to(torch.bfloat16), range(LAYERS)).values())


def test_latent_attention_turns_the_end_of_its_keys():
    """What is cached as values is the turned part of the key, which all heads share."""
    for rotary in rotations(build("deepseek_v3", "eager"), range(LAYERS)).values():
        assert (rotary.start, rotary.size, rotary.interleaved) == (-8, 8, False)


def test_a_rotation_that_nothing_explains_is_refused_by_its_layer():
    model = build("llama")
    attention = model.model.layers[2].self_attn
    attention.k_proj.register_forward_hook(lambda module, args, out: out * attention.strength)
    # A key that grows with its position.
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(module, "strength", 1 + kwargs["position_ids"].max() / 4), with_kwargs=True
    )
    with pytest.raises(FastKVError, match="no rotary embedding explains how the keys of layer 2 of LlamaForCausalLM"):
        fastkv.patch(model, "compactor", 64)
    fastkv.patch(model, "keydiff", 64)  # which does not ask


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_refused(kind):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 128}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **(factors if kind == "longrope" else {})}
    model = build(rope_parameters=rope)
    model(torch.ones(1, 600, dtype=torch.long))  # longer than the model's positions: its frequencies are others now
    before = snapshot(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(FastKVError, match=f"layer 0 of LlamaForCausalLM is of type '{kind}', whose frequencies change"):
        fastkv.patch(model, "compactor", 64)
    with pytest.raises(FastKVError, match=f"of type '{kind}', whose frequencies follow the longest position"):
        fastkv.patch(model, budget=64, prefill_block=16)
    assert snapshot(model) == before and torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert fastkv.patch(model, budget=64, prefill_block="auto").model._fastkv_config.prefill_block is None


@pytest.mark.parametrize("kind, patched", [("llama", False), ("gemma3", True)])
def test_nothing_of_the_model_changes(kind, patched):
    model = build(kind)
    if patched:
        fastkv.patch(model, "keydiff", 64)
    model.train()
    model.model.layers[0].eval()
    calls = []
    model.register_buffer("seen", torch.zeros(3))
    model.model.layers[1].register_forward_hook(lambda *given: calls.append((torch.rand(1), model.seen.add_(1))))
    before, random = snapshot(model), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    rotations(model, [1, 3])
    assert calls and snapshot(model) == before and torch.equal(torch.get_rng_state(), random)
    assert modes == [module.training for module in model.modules()] and not model.seen.any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_put_back_after_an_error():
    model = build()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), unchanged(model):
        model.register_buffer("new", torch.ones(1))
        model.model.layers[0].register_forward_hook(print)
        del model.config
        raise ZeroDivisionError
    assert snapshot(model) == before and model.config.model_type == "llama"


class Shrinking(LlamaAttention):
    """Scales all keys by how many there are, after they were cached."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        cache, shape = kwargs.pop(CACHE, None), (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = self.updated(cache, k, v)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = self.attended(attend, q, k, v, attention_mask, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def updated(self, cache, k, v):
        return cache.update(k, v, self.layer_idx)

    def attended(self, attend, q, k, v, mask, **kwargs):
        return attend(self, q, k / k.shape[2] ** 0.5, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)


class Twice(Shrinking):
    """Attends with two sets of values."""

    def attended(self, attend, q, k, v, mask, **kwargs):
        one, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        other, _ = attend(self, q, k, v.flip(-1), mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return one + other, weights


def unheard_of(attention=None):
    """A model of a type that is on no list; its attention of that class."""
    model = build("llama", "eager")
    model.config.model_type = "unheard_of"
    for layer in model.model.layers if attention is not None else ():
        layer.self_attn.__class__ = attention
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_untested_model_that_agrees_is_accepted_with_one_warning(dtype):
    model = unheard_of().to(dtype).train()
    before, random = snapshot(model), torch.get_rng_state()
    with pytest.warns(UserWarning, match="unheard_of is not among the model types") as warned:
        fastkv.patch(model, "compactor", 64, prefill_block=16)
    assert len(warned) == 1 and torch.equal(torch.get_rng_state(), random) and model.training
    assert model._fastkv_config.prefill_block == 16 and model._fastkv_config.policy.name == "compactor"
    assert snapshot(fastkv.unpatch(model)) == before


class Peeking(Shrinking):
    """Looks into its cache layer, where a compressed one holds no keys."""

    def updated(self, cache, k, v):
        super().updated(cache, k, v)
        return cache.layers[self.layer_idx].keys.clone(), cache.layers[self.layer_idx].values.clone()


@pytest.mark.parametrize(
    "attention, why, patched",
    [(Shrinking, r"the logits of LlamaForCausalLM change by \d", True),
     (Twice, "LlamaForCausalLM fails .* twice to the same", False),
     (Peeking, "fails on a short prompt read whole when it is patched", False)],
    ids=["shrinking", "twice", "peeking"],
)  # fmt: skip
def test_an_untested_model_that_disagrees_is_refused(attention, why, patched):
    model = unheard_of()
    if patched:
        with pytest.warns(UserWarning):
            fastkv.patch(model, "keydiff", 64)
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention
    before, random = snapshot(model), torch.get_rng_state()
    ids = prompt()[0][:1]
    expected = model(ids, past_key_values=DynamicCache()).logits
    raises(why, fastkv.patch, model, "momentkv", 64)
    assert snapshot(model) == before and torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model(ids, past_key_values=DynamicCache()).logits, expected)
    assert ("_fastkv_config" in vars(model)) == patched


@pytest.mark.parametrize("kind, turned", [("ernie4_5", "16 turned as neighbours"), ("glm4", "8 turned as neighbours")])
def test_vector_refuses_what_its_kernels_do_not_turn(kind, turned):
    model = tiny(kind)
    model.config.model_type = "llama"  # what is tested does not matter here
    before = snapshot(model)
    how = {"correction": "vector", "vector": mapping(model)}
    raises(f"dimensions are turned in halves, got {turned} in layer 0", fastkv.patch, model, "keydiff", 64, **how)
    assert snapshot(model) == before
