"""Everything people do with a model keeps working on a patched one: decoding strategies, turns, training, adapters."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from transformers.cache_utils import Cache

import fastkv

from .families import tiny
from .models import FAMILIES, build, compressed_layers, generate, prompt
from .pairwise import covering

OLD = Version(transformers.__version__) < Version("5.23")
SMALL = fastkv.Budget(tokens=20, sinks=2, recent=4)
STRATEGIES = {
    "beams": {"num_beams": 3}, "beam sequences": {"num_beams": 3, "num_return_sequences": 2},
    "stock chunks": {"prefill_chunk_size": 16}, "no cache": {"use_cache": False},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
}  # fmt: skip


@pytest.mark.parametrize("strategy, name", covering(STRATEGIES, ["llama", "gemma3"], together=1))
def test_decoding_strategies_match_stock(name, strategy):
    model, (ids, mask) = build(name), prompt()
    torch.manual_seed(0)
    expected = generate(model, ids, mask, **STRATEGIES[strategy])
    fastkv.patch(model, budget=500, prefill_block=16)
    torch.manual_seed(0)
    assert torch.equal(generate(model, ids, mask, **STRATEGIES[strategy]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_second_turn_continues_the_cache(name):
    model, (ids, _) = build(name), prompt(1, 50, (0,))

    def two_turns(cache=None):
        extra = {} if cache is None else {"past_key_values": cache}
        first = generate(model, ids, return_dict_in_generate=True, **extra)
        second = torch.cat([first.sequences, ids[:, :9]], 1)
        return generate(model, second, past_key_values=first.past_key_values, return_dict_in_generate=True)

    expected = two_turns(DynamicCache(config=model.config)).sequences
    fastkv.patch(model, budget=500, prefill_block=16)
    assert torch.equal(two_turns().sequences, expected)
    assert torch.equal(two_turns(DynamicCache(config=model.config)).sequences, expected)


@pytest.mark.parametrize("block", [None, 16])
def test_inputs_embeds(block):
    model, (ids, _) = build(), prompt(1, 50, (0,))
    embeds = model.get_input_embeddings()(ids)
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    with fastkv.patched(model, budget=500, prefill_block=block):
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3n_text"])
def test_all_outputs_are_joined_over_blocks(name):
    model, (ids, mask) = tiny.build(name) if name == "gemma3n_text" else build(name), prompt()
    extra = {"output_router_logits": True} if name == "qwen3_moe" else {}
    expected = model(ids, attention_mask=mask, output_hidden_states=True, **extra)
    fastkv.patch(model, budget=500, prefill_block=16)
    got = model(ids, attention_mask=mask, output_hidden_states=True, **extra)
    assert len(got.hidden_states) == len(expected.hidden_states)
    for mine, theirs in zip(got.hidden_states, expected.hidden_states):
        torch.testing.assert_close(mine[..., mask.bool(), :], theirs[..., mask.bool(), :], atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(got.router_logits, expected.router_logits, strict=True) if extra else ():
        real = mask.bool().flatten()
        torch.testing.assert_close(mine[real], theirs[real], atol=1e-4, rtol=1e-4)


def test_attention_weights_warn():
    model = fastkv.patch(build(base="eager"), budget=SMALL)
    with pytest.warns(UserWarning, match="no attention weights"):
        model(prompt()[0], output_attentions=True)


def test_training_is_untouched():
    model, (ids, mask) = build(), prompt()
    model.train()

    def loss_and_gradient():
        model.zero_grad()
        with torch.enable_grad():
            loss = model(ids, attention_mask=mask, labels=ids).loss
            loss.backward()
        return loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    expected = loss_and_gradient()
    fastkv.patch(model, budget=SMALL, prefill_block=8)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss, gradient = loss_and_gradient()
        assert torch.equal(loss, expected[0])
        torch.testing.assert_close(gradient, expected[1], atol=1e-6, rtol=0)


def test_gradients_flow_in_eval_mode_without_keeping_the_cache_alive():
    model, (ids, _) = fastkv.patch(build(), budget=SMALL), prompt(1, 50, (0,))
    with torch.enable_grad():
        out = model(ids, labels=ids)
        out.loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    assert not out.past_key_values.layers[0].state.exact.keys.requires_grad


def test_deepcopy_is_independent():
    model, (ids, mask) = fastkv.patch(build(), budget=SMALL, prefill_block=16), prompt()
    expected = generate(model, ids, mask)
    other = copy.deepcopy(model)
    assert torch.equal(generate(other, ids, mask), expected)
    for parameter in other.parameters():
        parameter.zero_()
    assert not torch.equal(generate(other, ids, mask), expected)
    fastkv.unpatch(other)
    assert "forward" not in other.model.__dict__ and "forward" in model.model.__dict__
    assert torch.equal(generate(model, ids, mask), expected)


def test_saved_models_know_nothing_of_fastkv(tmp_path):
    model, (ids, mask) = fastkv.patch(build(), budget=SMALL), prompt()
    model.save_pretrained(tmp_path)
    assert "fastkv" not in (tmp_path / "config.json").read_text()
    again = FAMILIES["llama"][0].from_pretrained(tmp_path)
    fastkv.unpatch(model)
    assert torch.equal(generate(again, ids, mask), generate(model, ids, mask))


def test_lora_adapters():
    adapted = get_peft_model(build(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    ids, mask = prompt()
    expected = adapted.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    fastkv.patch(adapted.get_base_model(), budget=500)
    assert torch.equal(adapted.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False), expected)
    fastkv.patch(adapted.get_base_model(), budget=SMALL)
    out = adapted.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, fastkv.FastKVCache)


def test_threads_share_a_patched_model():
    model, (ids, _) = fastkv.patch(build(), budget=SMALL, prefill_block=16), prompt()

    @torch.no_grad()
    def work(row):
        return generate(model, ids[row : row + 1, 20:])

    expected = list(map(work, range(3)))
    with ThreadPoolExecutor(3) as pool:
        assert all(map(torch.equal, pool.map(work, range(3)), expected))


@pytest.mark.parametrize("name, block", [("llama", 16), ("gemma3", None)])
def test_assisted_decoding_is_lossless(name, block):
    model, draft = build(name), build(name)
    for parameter in draft.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.01)  # an imperfect draft: some tokens accepted, some rejected
    ids, _ = prompt(1, 50, (0,))
    fastkv.patch(model, budget=500, prefill_block=block)
    expected = generate(model, ids, new=16)
    if not hasattr(Cache, "activate_past_recording") or (name == "gemma3" and OLD):
        with pytest.raises(fastkv.FastKVError, match="assisted decoding"):  # transformers cannot, and we say so
            generate(model, ids, new=16, assistant_model=draft)
        return
    assert torch.equal(generate(model, ids, new=16, assistant_model=draft), expected)
    assert torch.equal(generate(model, ids, new=16, prompt_lookup_num_tokens=3), expected)
    fastkv.patch(model, budget=SMALL, prefill_block=block)
    cache = generate(model, ids, new=16, assistant_model=draft, return_dict_in_generate=True).past_key_values
    layer = cache.layers[compressed_layers(cache)[0]]
    layer.cache.accept()
    total = layer.state.exact.lengths + layer.state.moments.count
    assert torch.equal(total, torch.full_like(total, cache.get_seq_length()))
    assert int(layer.state.exact.lengths.max()) <= 20 + 16
    model(ids[:, :3], past_key_values=cache)
    seen = cache.get_seq_length()
    layer.crop(seen + 40)  # the length to keep, which is more than there is
    assert layer.get_seq_length() == seen
