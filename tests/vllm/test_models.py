"""Models of which some layers are left to vLLM, and models that several processes share."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

import fastkv
from fastkv import FastKVError

from .engine import Alone, Traffic, loaded, prompt, start

LENGTHS, NUM = [300, 41, 129, 65], 20


def tiny_gemma(directory, layer_types):
    """A tiny Gemma 3 with random weights, calibrated; its own ones, as calibrations go by weights."""
    torch.manual_seed(sum(map(len, layer_types)))
    config = Gemma3TextConfig(
        vocab_size=720, hidden_size=128, intermediate_size=256, max_position_embeddings=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=64,
        layer_types=layer_types,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(directory)
    fastkv.patch(loaded(directory))
    return directory


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Every second layer has a sliding window."""
    return tiny_gemma(str(tmp_path_factory.mktemp("gemma")), ["sliding_attention", "full_attention"] * 2)


def compare(model, settings, budget=None, **arguments):
    """Requests that arrive one after another and are preempted once, against each alone; budget: what more is said of
    it there.
    """
    traffic, alone = Traffic(start(model, settings, **arguments)), Alone(model, settings, **budget or {})
    for length in LENGTHS:
        traffic.ask(str(length), prompt(length), NUM)
        traffic.turn(3)
    traffic.preempt()
    answers = traffic.finish()
    assert answers == {str(length): alone.answer(prompt(length), NUM) for length in LENGTHS}


@pytest.mark.parametrize("block", [None, 64], ids=["whole", "blocks"])
def test_sliding_windows_stay_with_vllm(gemma, block):
    """Heads share within their layer, as pages are as large as the largest."""
    compare(gemma, {"policy": "keydiff", "budget": 64, "prefill_block": block}, {"layers": [1.0, 1.0]})


def test_pages_are_filled_by_sliding_windows(gemma):
    """As large as ours, and not as many as without us; answers stay."""
    settings = {"policy": "keydiff", "budget": 400, "prefill_block": 64}
    config = Traffic(start(gemma, settings)).scheduler.kv_cache_config
    (windows,) = [group.kv_cache_spec for group in config.kv_cache_groups if group.kv_cache_spec.prefix_cacheable]
    assert windows.page_size_bytes == windows.real_page_size_bytes and windows.block_size == 512
    compare(gemma, settings, {"layers": [1.0, 1.0]})


def test_prefixes_of_a_model_with_sliding_windows(gemma):
    """vLLM's own cache of the other layers has to know the same beginning: the end of a prompt, or where two have begun
    alike. What it forgets is not gone on from.
    """
    settings = {"policy": "keydiff", "budget": 64, "prefill_block": 128}
    traffic, alone = Traffic(start(gemma, {**settings, "prefixes": 0.5})), Alone(gemma, settings, layers=[1.0, 1.0])
    first = prompt(600)
    asked = {"first": first, "again": first, "turn": first + prompt(100, 1)}
    asked |= {f"branch {i}": first[:300] + prompt(60, 2 + i) for i in range(2)}
    answers = {name: traffic.answered(name, tokens, NUM) for name, tokens in asked.items()}
    assert traffic.cached == {"first": 0, "again": 512, "turn": 512, "branch 0": 0, "branch 1": 256}
    manager = traffic.scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
    asked["forgotten"] = first
    answers["forgotten"] = traffic.answered("forgotten", first, NUM)
    assert traffic.cached["forgotten"] == 0
    assert answers == {name: alone.answer(tokens, NUM) for name, tokens in asked.items()}


def test_prefixes_of_a_model_with_several_block_tables(tmp_path):
    """vLLM makes groups of as many layers as have sliding windows, so that a request has three pages."""
    gemma = tiny_gemma(str(tmp_path), ["full_attention", "full_attention", "sliding_attention", "full_attention"])
    settings = {"policy": "momentkv", "budget": 64, "prefill_block": 128}
    traffic, alone = Traffic(start(gemma, {**settings, "prefixes": 0.5})), Alone(gemma, settings, layers=[1.0] * 3)
    assert len(traffic.scheduler.own) == 3
    asked = {f"{i}": prompt(600)[: 150 * (i % 4)] + prompt(30 + i, i) for i in range(10)}
    for i, (name, tokens) in enumerate(asked.items()):
        traffic.ask(name, tokens, NUM)
        traffic.turn(3)
        if i == 6:
            traffic.preempt()
    assert traffic.finish() == {name: alone.answer(tokens, NUM) for name, tokens in asked.items()}
    assert sum(traffic.cached.values()) >= 5 * 128


def test_blocks_that_are_none_of_the_sliding_windows_are_refused(gemma):
    with pytest.raises(FastKVError, match="must be blocks of vLLM's own layers, of 128 tokens, got"):
        start(gemma, {"policy": "keydiff", "budget": 64, "prefill_block": 50, "prefixes": 0.5})


def test_two_processes_that_share_the_heads(model):
    compare(model, {"policy": "fastkv", "budget": 64, "prefill_block": 64}, tensor_parallel_size=2)


def test_latents_are_refused(tmp_path):
    config = DeepseekV2Config(
        vocab_size=720, hidden_size=64, intermediate_size=64, max_position_embeddings=1024, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=32,
        qk_rope_head_dim=64, v_head_dim=32, first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(FastKVError, match=r"latents \(MLA\) does not work with a compressed cache"):
        start(str(tmp_path), {"policy": "keydiff", "budget": 64})
