"""What an operator is told: metrics of requests that ended, and what fits. What a request may not ask for."""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import _load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

from fastkv.config import Config
from fastkv.integrations.vllm.backend import Compression, compressed
from fastkv.integrations.vllm.metrics import counted
from fastkv.integrations.vllm.requests import RequestArguments
from fastkv.integrations.vllm.scheduler import what_fits

from .engine import LONGEST, Traffic, budget_of, prompt, start

SETTINGS = {"policy": "keydiff", "budget": 64, "prefill_block": 64}


@pytest.mark.parametrize("length, num", [(300, 20), (300, 17), (300, 1), (60, 24), (30, 9)])
def test_metrics_are_what_pages_hold(model, length, num):
    """Calibrated heads keep different numbers, which come to the budget, once each of them is full."""
    traffic = Traffic(start(model, SETTINGS | {"budget": {"tokens": 64, "heads": "uniform"}}))
    traffic.ask("0", prompt(length), num)
    assert len(traffic.finish()["0"]) == num
    config = Config.make("keydiff", 64, 64, 16, "auto", "auto", None)
    found = counted(config, length, num)
    for layer in compressed(Compression.latest.vllm_config).values():
        state = layer.impl.paged.state
        row = int(state.seen.argmax())
        assert int(state.seen[row]) == found["seen"]
        assert state.exact.lengths[row].tolist() == [found["kept"]] * state.heads


def test_budgets_in_bytes_do_not_say_how_many_tokens_are_kept():
    config = Config.make("keydiff", budget_of({"bytes": 500_000}), 64, 16, "auto", "auto", None)
    assert counted(config, 300, 33) == {"seen": 332, "evictions": 2}


def test_what_fits_is_what_pages_take(model):
    memory = 2**26
    llm = start(model, SETTINGS, kv_cache_memory_bytes=memory)
    each = sum(rule.form.nbytes for rule in Compression.latest.rules.values())
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    told = what_fits(llm.llm_engine.vllm_config, config)
    assert told == f"{memory // each - 1} requests of up to {LONGEST:,} tokens fit, {each / 1e6:.2f} MB each"


@pytest.mark.parametrize("given", [None, {}, {"ngram_size": 3}])
def test_requests_may_have_arguments_for_others(given):
    RequestArguments.validate_params(SamplingParams(extra_args=given))
    with pytest.raises(ValueError, match="all requests have the server's settings for fastkv, got fastkv_budget=3 for"):
        RequestArguments.validate_params(SamplingParams(extra_args={**(given or {}), "fastkv_budget": 3}))


def test_both_model_runners_take_the_plugin():
    """Each refuses all plugins that lack its own interface, and vLLM with them."""
    for loaded in (_load_custom_logitsprocs([]), _load_v2_logitsprocs_plugins()):
        assert loaded == [RequestArguments]
    newer = RequestArguments(None, None)
    logits = torch.zeros(2, 3)
    assert newer.add_request(0, SamplingParams()) is False and newer.apply(logits, None) is logits
