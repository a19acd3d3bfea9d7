"""What a request may ask of its cache, and that it gets what `fastkv.patch` gives with those settings."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality, _load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

from fastkv import FastKVError
from fastkv.integrations.vllm.requests import Menu, RequestArguments

from .engine import Alone, Traffic, prompt, start

NUM = 40
CLASSES = {"small": {"budget": 48}, "best": {"policy": "snapkv", "budget": {"tokens": 128, "heads": "uniform"}}}
SETTINGS = {"policy": "keydiff", "budget": 96, "prefill_block": 64, "classes": CLASSES}
MENU = Menu(("small", "best"), 36, 96)


def alone(model, **changes):
    return Alone(model, {name: value for name, value in {**SETTINGS, **changes}.items() if name != "classes"})


def test_requests_of_all_kinds_together(model):
    """They arrive while others decode, and are preempted once."""
    asked = {
        "server's": (prompt(200, 1), {}, {}),
        "small": (prompt(300, 2), {"fastkv_class": "small"}, CLASSES["small"]),
        "best": (prompt(250, 3), {"fastkv_class": "best"}, CLASSES["best"]),
        "budget": (prompt(129, 4), {"fastkv_budget": 67}, {"budget": 72}),
        "keep": (prompt(320, 5), {"fastkv_keep": 0.2}, {"budget": 66}),
        "keep all": (prompt(400, 6), {"fastkv_keep": 1}, {}),
        "small again": (prompt(65, 7), {"fastkv_class": "small"}, CLASSES["small"]),
    }
    traffic = Traffic(start(model, SETTINGS))
    for i, (name, (tokens, own, _)) in enumerate(asked.items()):
        traffic.ask(name, tokens, NUM, own)
        traffic.turn(3)
        if i == 4:
            traffic.preempt()
    answers = traffic.finish()
    for name, (tokens, _, changes) in asked.items():
        assert answers[name] == alone(model, **changes).answer(tokens, NUM), name


def test_beginnings_are_found_by_requests_of_the_same_kind_only(model):
    traffic = Traffic(start(model, {**SETTINGS, "prefixes": 0.5}))
    expected = alone(model, **CLASSES["small"]).answer(prompt(300), NUM)
    found = []
    for name, own in (("0", {}), ("1", {"fastkv_class": "small"}), ("2", {"fastkv_class": "small"}), ("3", {})):
        answer = traffic.answered(name, prompt(300), NUM, own=own)
        found.append(traffic.cached[name])
        assert (answer == expected) == bool(own)
    assert found == [0, 0, 256, 256]


REFUSED = {
    "class": ({"fastkv_class": "large"}, "the server has no class 'large', its classes: small, best; use one of them"),
    "name": ({"fastkv_tokens": 3}, "a request has one of fastkv_class, fastkv_budget and fastkv_keep, got fastkv_tok"),
    "two": ({"fastkv_budget": 64, "fastkv_keep": 0.5}, "got fastkv_budget, fastkv_keep; leave the rest out"),
    "less": ({"fastkv_budget": 35}, "fastkv_budget must be a number of tokens from 36 to 96, got 35"),
    "more": ({"fastkv_budget": 97}, "fastkv_budget must be a number of tokens from 36 to 96, got 97"),
    "text": ({"fastkv_budget": "64"}, "fastkv_budget must be a number of tokens from 36 to 96, got '64'"),
    "share": ({"fastkv_keep": 1.5}, r"fastkv_keep must be a share of the prompt in \(0, 1\], got 1.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_there_is_not_is_refused(case, monkeypatch):
    given, message = REFUSED[case]
    monkeypatch.setattr(RequestArguments, "menu", MENU)
    with pytest.raises(ValueError, match=message) as refusal:
        RequestArguments.validate_params(SamplingParams(extra_args=given))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("given", [None, {}, {"ngram_size": 3}])
def test_requests_may_have_arguments_for_others(given, monkeypatch):
    monkeypatch.setattr(RequestArguments, "menu", Menu())
    RequestArguments.validate_params(SamplingParams(extra_args=given))
    with pytest.raises(ValueError, match="all requests have the server's settings for fastkv, got fastkv_budget=3 for"):
        RequestArguments.validate_params(SamplingParams(extra_args={**(given or {}), "fastkv_budget": 3}))


def test_budgets_in_bytes_have_classes_only():
    menu = Menu(("small",), 36, 0)
    assert menu.chosen({"fastkv_class": "small"}, 9) == "small"
    with pytest.raises(ValueError, match="is for servers with a budget in tokens, this one has bytes; use a class"):
        menu.chosen({"fastkv_keep": 0.5}, 9)


def test_budgets_are_rounded_up_to_sixteenths():
    assert [MENU.chosen({"fastkv_budget": tokens}, 0) for tokens in (36, 37, 42, 43, 90, 91, 96)] == [
        *(36, 42, 42, 48, 90),
        *(None, None),
    ]
    assert [MENU.chosen({"fastkv_keep": 0.1}, length) for length in (1, 100, 401, 5000)] == [36, 36, 42, None]
    assert MENU.chosen(None, 5) is None and MENU.chosen({"other": 1}, 5) is None


def test_the_least_budget_has_room_in_the_layer_of_the_smallest_weight(model):
    budget = {"tokens": 48, "layers": [2, 1, 1, 1], "heads": "uniform"}
    traffic = Traffic(start(model, {"policy": "keydiff", "budget": budget, "prefill_block": 64, "classes": {}}))
    menu = Menu.of(traffic.engine.vllm_config)
    assert menu.least == 47
    traffic.ask("least", prompt(100), 5, {"fastkv_budget": menu.least})
    assert len(traffic.finish()["least"]) == 5


@pytest.mark.parametrize("more", [{}, {"prefixes": 0.5}], ids=["", "prefixes"])
def test_an_engine_that_nobody_asked_ends_what_it_refuses(more, model, monkeypatch):
    """Where requests come from a process that knows no settings; others are served."""
    traffic = Traffic(start(model, SETTINGS | more))
    monkeypatch.setattr(RequestArguments, "validate_params", lambda params: None)
    traffic.ask("bad", prompt(100), 5, {"fastkv_class": "large"})
    traffic.ask("good", prompt(100), 5, {"fastkv_class": "small"})
    ended = {}
    while traffic.engine.has_unfinished_requests():
        ended |= {one.request_id: one.outputs[0] for one in traffic.engine.step()}
    assert ended["bad"].finish_reason == "error" and len(ended["good"].token_ids) == 5


@pytest.mark.parametrize(
    "classes, message",
    [
        (["small"], 'classes must be like {"small": {"budget": 256}}'),
        ({"small": 3}, 'classes must be like {"small": {"budget": 256}}'),
        ({"small": {"prefill_block": 3}}, "class 'small' has no setting prefill_block; it has policy, budget"),
        ({"small": {"budget": 3}}, "a budget of 3 tokens is smaller than sinks + recent"),
    ],
)
def test_classes_that_cannot_be_are_refused_at_the_start(model, classes, message):
    with pytest.raises(FastKVError) as refusal:
        start(model, {**SETTINGS, "classes": classes})
    assert message in str(refusal.value)


def test_both_model_runners_take_the_plugin(monkeypatch):
    """Each refuses all plugins that lack its own interface, and vLLM with them. A place has what was asked last."""
    for loaded in (_load_custom_logitsprocs([]), _load_v2_logitsprocs_plugins()):
        assert loaded == [RequestArguments]
    logits, lengths = torch.zeros(2, 3), SimpleNamespace(prompt_len=SimpleNamespace(np=[401, 9]))
    newer = RequestArguments(SimpleNamespace(additional_config={}), lengths)
    monkeypatch.setattr(RequestArguments, "menu", MENU)
    assert newer.apply(logits, None) is logits
    assert newer.add_request(0, SamplingParams(extra_args={"fastkv_keep": 0.1})) is False
    newer.add_request(1, SamplingParams(extra_args={"fastkv_class": "best"}))
    assert newer.kinds == {0: 42, 1: "best"}
    newer.add_request(1, SamplingParams())
    assert newer.kinds == {0: 42}


def test_the_older_runner_moves_requests(monkeypatch):
    older = RequestArguments(SimpleNamespace(additional_config={}), "cpu", False)
    monkeypatch.setattr(RequestArguments, "menu", MENU)
    small, best = (
        (i, SamplingParams(extra_args={"fastkv_class": name}), [1], []) for i, name in ((0, "small"), (2, "best"))
    )
    older.update_state(BatchUpdate(3, removed=[], added=[small, best], moved=[]))
    older.update_state(BatchUpdate(3, removed=[], added=[], moved=[(2, 1, MoveDirectionality.SWAP)]))
    assert older.kinds == {0: "small", 1: "best"}
    older.update_state(BatchUpdate(2, removed=[0], added=[(1, SamplingParams(), [1], [])], moved=[]))
    assert older.kinds == {}
