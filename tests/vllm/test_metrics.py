"""What an operator is told: metrics of requests that ended, and what fits."""

import pytest

from fastkv.config import Config
from fastkv.integrations.vllm.backend import Compression, compressed
from fastkv.integrations.vllm.requests import counted
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
        state = layer.impl.paged[None].state
        row = int(state.seen.argmax())
        assert int(state.seen[row]) == found["seen"]
        assert state.exact.lengths[row].tolist() == [found["kept"]] * state.heads


def test_budgets_in_bytes_do_not_say_how_many_tokens_are_kept():
    config = Config.make("keydiff", budget_of({"bytes": 500_000}), 64, 16, "auto", "auto", None)
    assert counted(config, 300, 33) == {"seen": 332, "evictions": 1}


def test_what_fits_is_what_pages_take(model):
    memory = 2**26
    llm = start(model, SETTINGS, kv_cache_memory_bytes=memory)
    each = sum(rule.form.nbytes for rule in Compression.latest.rules[None].values())
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    told = what_fits(llm.llm_engine.vllm_config, config)
    assert told == f"{memory // each - 1} requests of up to {LONGEST:,} tokens fit, {each / 1e6:.2f} MB each"
