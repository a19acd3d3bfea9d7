"""While vLLM measures itself, kernels are compiled and their scratch is made."""

import pytest
import torch

from fastkv.cache.warmup import Traffic as Expected
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
