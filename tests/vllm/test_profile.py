"""While vLLM measures itself, kernels are compiled and their scratch is made; then it captures steps, if it may."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from fastkv.cache.pages import Traffic as Expected
from fastkv.integrations.vllm import backend

from .engine import LONGEST, SEQUENCES, Alone, Traffic, prompt, start


def profile(llm):
    llm.collective_rpc(lambda worker: worker.model_runner.profile_run())


@pytest.mark.parametrize("layers, kinds", [("uniform", 1), ([2, 1, 1, 1], 2)])
def test_layers_that_are_alike_are_warmed_up_once(model, layers, kinds, monkeypatch):
    """With what traffic may bring; layers that keep other numbers of tokens, by themselves."""
    made = []
    monkeypatch.setattr(backend, "resolve", lambda *given: "triton")
    monkeypatch.setattr(backend, "warm_up", lambda *given: made.append(given))
    budget = {"tokens": 50, "layers": layers, "heads": "uniform"}
    settings = {"policy": "keydiff", "budget": budget, "prefill_block": 64}
    llm = start(model, settings)
    made.clear()
    profile(llm)
    profile(llm)
    assert len({rule.form.nbytes for _, rule, *_ in made}) == len(made) == kinds
    opened, rule, traffic, device = made[0]
    assert traffic == Expected(LONGEST, 64, SEQUENCES) and device == torch.device("cpu")
    assert opened(torch.zeros(2, rule.form.nbytes, dtype=torch.uint8)).shared.sequences == SEQUENCES


def test_a_warm_up_leaves_answers_alone(model, monkeypatch):
    """It runs in pages of its own, here with the backend of a CPU."""
    warmed, stock = [], backend.warm_up
    monkeypatch.setattr(backend, "resolve", lambda *given: "triton")
    monkeypatch.setattr(backend, "warm_up", lambda *given: warmed.append(stock(*given)))
    settings = {"policy": "fastkv", "budget": 64, "prefill_block": 64}
    llm = start(model, settings)
    profile(llm)
    assert warmed
    traffic, alone = Traffic(llm), Alone(model, settings)
    traffic.ask("0", prompt(300), 20)
    assert traffic.finish()["0"] == alone.answer(prompt(300), 20)


@pytest.mark.parametrize("classes, support", [(None, "UNIFORM_SINGLE_TOKEN_DECODE"), ({}, "NEVER")])
def test_steps_that_decode_may_be_captured_where_requests_are_alike(model, classes, support):
    settings = {"policy": "keydiff", "budget": 64, "prefill_block": 64, "classes": classes}
    config = start(model, settings).llm_engine.vllm_config
    assert backend.BatchBuilder.get_cudagraph_support(config, None) is AttentionCGSupport[support]


def test_a_captured_step_finds_the_pages_and_rows_of_those_that_follow(model):
    """vLLM captures with a cache that it throws away, and again with the one it keeps."""
    settings = {"policy": "keydiff", "budget": 64, "prefill_block": 64}
    llm = start(model, settings)
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    builder = runner.attn_groups[0][0].get_metadata_builder()
    (layer, *_), described = builder.layers, SimpleNamespace(num_reqs=2)
    kept, layer.kv_cache = layer.kv_cache, torch.zeros_like(layer.kv_cache[:3])
    builder.build_for_cudagraph_capture(described)
    assert len(layer.impl.paged[None].pages) == 3
    layer.kv_cache = kept
    captured = builder.build_for_cudagraph_capture(described)[None]
    assert captured.rows.tolist() == [0, 0] and captured.places is None and not captured.prompts
    assert layer.impl.paged[None].pages.data_ptr() == kept.data_ptr()
    again = type(builder)(builder.kv_cache_spec, builder.layer_names, builder.vllm_config, builder.device)
    assert again.layers[0].impl.pages is None and not again.layers[0].impl.paged  # vLLM is about to make other pages
    traffic = Traffic(llm)
    for name in ("0", "1"):
        traffic.ask(name, prompt(100), 3)
    traffic.turn(4)
    pages = captured.rows.tolist()
    assert sorted(traffic.finish()) == ["0", "1"] and len({0, *pages}) == 3


@pytest.mark.parametrize("given, kept", [(None, [1, 2]), (2**30, [1, 2, 4, 8])])
def test_steps_are_captured_for_as_many_requests_as_fit(given, kept, monkeypatch):
    """vLLM captures all of them in a cache of as many requests before it knows how much there is for one."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    captures = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)
    cache = SimpleNamespace(kv_cache_memory_bytes=given, gpu_memory_utilization=0.9)
    told = SimpleNamespace(compilation_config=captures, cache_config=cache)
    told_others = []
    monkeypatch.setattr(backend, "fewest", lambda number: told_others.append(number) or number)
    backend.Compression.bound_captures(SimpleNamespace(vllm_config=told, device=torch.device("cuda")), 10)
    assert told_others == [] if given else [2]
    assert captures.cudagraph_capture_sizes == kept and captures.max_cudagraph_capture_size == kept[-1]
