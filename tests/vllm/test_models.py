"""Models of which some layers are left to vLLM, and models that several processes share."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from .engine import Alone, Traffic, prompt, start

LENGTHS, NUM = [300, 41, 129, 65], 20


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny Gemma 3 with random weights: every second layer has a sliding window."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=720,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=1024,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    directory = str(tmp_path_factory.mktemp("gemma"))
    Gemma3ForCausalLM(config).save_pretrained(directory)
    return directory


def compare(model, settings, **arguments):
    """Requests that arrive one after another and are preempted once, against each alone."""
    traffic, alone = Traffic(start(model, settings, **arguments)), Alone(model, settings)
    for length in LENGTHS:
        traffic.ask(str(length), prompt(length), NUM)
        traffic.turn(3)
    traffic.preempt()
    answers = traffic.finish()
    assert answers == {str(length): alone.answer(prompt(length), NUM) for length in LENGTHS}


@pytest.mark.parametrize("block", [None, 64], ids=["whole", "blocks"])
def test_sliding_windows_stay_with_vllm(gemma, block):
    compare(gemma, {"policy": "keydiff", "budget": 64, "prefill_block": block})


def test_two_processes_that_share_the_heads(model):
    compare(model, {"policy": "fastkv", "budget": 64, "prefill_block": 64}, tensor_parallel_size=2)
