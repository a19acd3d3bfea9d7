"""Every policy and correction that reads a prompt once, and those that are not: tokens as `fastkv.patch` gives them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fastkv
from fastkv import FastKVError
from fastkv.calibration import user_cache
from fastkv.integrations.transformers.calibrate import known_shares
from fastkv.integrations.vllm import settings
from fastkv.integrations.vllm.backend import Compression

from .engine import FITTED, Alone, Traffic, loaded, prompt, start

LENGTHS, NUM = [300, 41, 129], 20
DONE = {"momentkv", "keydiff", "fastkv", "snapkv", "h2o"}  # by test_tokens
NOT_SERVED = {"criticalkv", "kvzip", "fastkv-reread", "attention-matching"}
FILES = {
    "triattention": {"name": "triattention", "calibration": str(FITTED / "queries.safetensors")},
    "duoattention": {"name": "duoattention", "pattern": str(FITTED / "full_attention_heads.tsv")},
}
CASES = {
    **{name: {"policy": FILES.get(name, name)} for name in fastkv.policies.names() if name not in DONE | NOT_SERVED},
    "mean": {"policy": "snapkv", "correction": "mean", "prefill_block": 64},
    "vector": {"policy": "snapkv", "correction": "vector+moments", "vector": str(FITTED / "vector.safetensors")},
    "vector and a class": {
        **{"policy": "snapkv", "correction": "vector", "vector": str(FITTED / "vector.safetensors")},
        "classes": {"plain": {"correction": "none"}},
    },
    "adaptive heads": {"policy": "snapkv", "prefill_block": 64, "budget": {"tokens": 64, "heads": "adaptive"}},
    "heads alike": {"policy": "snapkv", "budget": {"tokens": 64, "heads": "uniform"}},
    "a shorter text": {"policy": "fastkv", "prefill_block": 64, "budget": {"tokens": 64, "context": 200}},
    "unequal layers": {"policy": "keydiff", "budget": {"tokens": 64, "layers": [2, 1, 1, 1]}},
    "bytes": {"policy": "fastkv", "budget": {"bytes": 500_000}},
    "reference": {"policy": "momentkv", "backend": "reference", "prefill_block": 64, "evict_every": 7},
    "int8": {"policy": "fastkv", "slots": "int8"},
    "fp8": {"policy": "momentkv", "slots": "fp8", "prefill_block": 64},
    "int4": {"policy": "keydiff", "slots": "int4", "budget": {"bytes": 200_000}},
    "bfloat16": {"policy": "momentkv", "prefill_block": 64},
}


def arguments(settings):
    """Settings as `fastkv.patch` takes them."""
    policy = settings["policy"]
    own = {name: value for name, value in settings.items() if name != "classes"}
    return own | {"policy": fastkv.policies.get(**policy) if isinstance(policy, dict) else policy}


@pytest.mark.parametrize("name", CASES)
def test_tokens(model, name):
    settings, dtype = {"budget": 64, **CASES[name]}, "bfloat16" if name == "bfloat16" else "float32"
    traffic, alone = Traffic(start(model, settings, dtype)), Alone(model, arguments(settings), dtype)
    for length in LENGTHS:
        traffic.ask(str(length), prompt(length), NUM)
        traffic.turn(3)
    answers = traffic.finish()
    for length in LENGTHS:
        expected = alone.answer(prompt(length), NUM)
        if dtype == "bfloat16":  # two implementations of a model round differently: the first token is told, no more
            assert len(answers[str(length)]) == NUM and answers[str(length)][0] == expected[0]
        else:
            assert answers[str(length)] == expected


def test_shares_come_from_a_file(model, tmp_path):
    """Here such that every head keeps the same in the end, which no other place says."""
    known = known_shares(loaded(model))
    file = tmp_path / "heads.safetensors"
    replace(known, table=torch.ones_like(known.table)).save(file)
    budget = {"tokens": 64, "heads": str(file)}
    start(model, {"policy": "keydiff", "budget": budget})
    assert {rule.layer.layout.tokens for rule in Compression.latest.rules[None].values()} == {(64, 64)}
    replace(known, weights="0" * 16).save(file)
    with pytest.raises(FastKVError, match="was calibrated for other weights"):
        start(model, {"policy": "keydiff", "budget": budget})


def test_a_model_that_was_not_calibrated_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not user_cache("heads").exists()
    with pytest.raises(FastKVError, match=f"fastkv calibrate heads --model {model} --out heads.safetensors") as refusal:
        start(model, {"policy": "keydiff"})
    assert "\n" not in str(refusal.value)
    start(model, {"policy": "keydiff", "budget": {"tokens": 64, "heads": "uniform"}})


REFUSALS = {
    "unknown": ({"polcy": "keydiff"}, {}, "has no setting polcy"),
    "no dictionary": (7, {}, "must be a dictionary of settings, got 7"),
    "policy": ({"policy": "nothing"}, {}, "unknown policy 'nothing'; choose one of momentkv"),
    "hyper-parameter": ({"policy": {"name": "snapkv", "windw": 3}}, {}, "'snapkv' has no hyper-parameter windw"),
    "budget": ({"budget": 3}, {}, "a budget of 3 tokens is smaller than sinks \\+ recent"),
    "unit": ({"budget": {"token": 64}}, {}, "the budget has no setting token; it has tokens"),
    "share": ({"budget": {"keep": 0.5}}, {}, "got a budget that follows the prompt"),
    "quality": (
        {"budget": {"quality": 0.9}},
        {},
        "needs the whole context before anything is evicted, vLLM reads it once",
    ),
    "kvzip": ({"policy": "kvzip"}, {}, "policy 'kvzip' needs the whole context"),
    "reread": ({"policy": "fastkv-reread"}, {}, "policy 'fastkv-reread' needs the whole context"),
    "criticalkv": ({"policy": "criticalkv"}, {}, "output projections, which vLLM hands to no attention"),
    "block": ({"prefill_block": 0}, {}, "prefill_block must be a whole number of at least 1 tokens, got 0"),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' does not work"),
    "unchunked": (
        {"prefill_block": 64},
        {"enable_chunked_prefill": False},
        "enable_chunked_prefill=False, .* in several",
    ),
    "threshold": ({}, {"long_prefill_token_threshold": 9}, "long_prefill_token_threshold does not work"),
    "steps": ({}, {"max_num_batched_tokens": 512}, "takes max_num_batched_tokens of at least 1039, got 512"),
    "small steps": ({"prefill_block": 64}, {"max_num_batched_tokens": 64}, "of at least 79, got 64"),
    "prefixes": ({"prefixes": 2, "prefill_block": 64}, {}, "share of pages .* 0 to 1, got 2; give one"),
    "prefixes of whole prompts": ({"prefixes": 0.5}, {}, "prefill_block=None reads a prompt whole"),
    "vector without its correction": (
        {"vector": "map", "classes": {"plain": {"correction": "none"}}},
        {},
        "vector=... is for correction='vector'",
    ),
    "vector": ({"correction": "vector"}, {}, "there is no vector.safetensors where the model was loaded from"),
    "scheduler": (
        {},
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "needs a scheduler that keeps to blocks of a prompt",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_at_start(model, name):
    settings, given, message = REFUSALS[name]
    with pytest.raises(FastKVError, match=message) as refusal:
        start(model, settings, **given)
    assert "\n" not in str(refusal.value)


def test_without_settings_nothing_changes(model):
    """Tokens of vLLM's own cache are those of the model that is not patched."""
    llm = start(model, None)
    traffic = Traffic(llm)
    traffic.ask("0", prompt(300), NUM)
    plain = Alone.__new__(Alone)
    plain.model = fastkv.unpatch(loaded(model))
    assert traffic.finish()["0"] == plain.answer(prompt(300), NUM)


@pytest.mark.parametrize("policy", ["keydiff", "fastkv"])
def test_sequences_that_fit(model, policy):
    """At 16K tokens and 512 kept, 15 times as many as with vLLM's own cache in the same memory."""
    memory, context = 2**28, 16384
    llm = start(model, {"policy": policy, "budget": 512, "prefill_block": 64}, kv_cache_memory_bytes=memory)
    config = llm.llm_engine.vllm_config
    layers, heads, dim = 4, config.model_config.get_total_num_kv_heads(), config.model_config.get_head_size()
    stock = memory // (context * layers * heads * 2 * dim * 4)
    assert stock and config.cache_config.num_gpu_blocks - 1 >= 15 * stock  # page 0 is nobody's


@pytest.mark.parametrize("offered, size", [(8192, 512), (300, 256), (70, 64)])
def test_blocks_for_the_device_have_room_in_a_step(offered, size, monkeypatch):
    """Beside 15 other sequences; of fewer than 64 tokens the start would complain."""
    steps = SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=offered, max_num_scheduled_tokens=None)
    told = {"additional_config": {"fastkv": {"budget": 64, "prefill_block": "auto"}}, "scheduler_config": steps}
    vllm_config = SimpleNamespace(**told, device_config=SimpleNamespace(device_type="cpu"))
    monkeypatch.setattr(settings, "_check_engine", lambda *given: None)
    assert settings.config_of(vllm_config).prefill_block == size
