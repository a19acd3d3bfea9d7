"""What a request may ask of its cache, and that it gets what `fastkv.patch` gives with those settings."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality, _load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

from fastkv import FastKVError
from fastkv.calibration import KEEPS
from fastkv.integrations.transformers.calibrate import known_shares
from fastkv.integrations.vllm.backend import compressed
from fastkv.integrations.vllm.requests import Menu, RequestArguments
from fastkv.integrations.vllm.scheduler import InBlocks

from . import engine
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
        "server's": (prompt(200, 1), {}, {}), "small": (prompt(300, 2), {"fastkv_class": "small"}, CLASSES["small"]),
        "best": (prompt(250, 3), {"fastkv_class": "best"}, CLASSES["best"]),
        "budget": (prompt(129, 4), {"fastkv_budget": 67}, {"budget": 72}),
        "keep": (prompt(320, 5), {"fastkv_keep": 0.2}, {"budget": 66}),
        "keep all": (prompt(400, 6), {"fastkv_keep": 1}, {}),
        "small again": (prompt(65, 7), {"fastkv_class": "small"}, CLASSES["small"]),
    }  # fmt: skip
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
    chosen = [MENU.chosen({"fastkv_budget": tokens}, 0) for tokens in (36, 37, 42, 43, 90, 91, 96)]
    assert chosen == [36, 42, 42, 48, 90, None, None]
    assert [MENU.chosen({"fastkv_keep": 0.1}, length) for length in (1, 100, 401, 5000)] == [36, 36, 42, None]
    assert {MENU.chosen({"fastkv_budget": tokens}, 0) for tokens in range(36, 97)} == {*MENU.sizes, None}
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


def test_pages_hold_every_budget_that_may_be_asked(model, tmp_path):
    """Of heads that are the more unlike the less stays: those of the first layer need most of the smallest budget."""
    known, table = known_shares(engine.loaded(model)), torch.ones(len(KEEPS), 4, 2)
    table[-4:] = torch.tensor([3.4, 0.2, 0.2, 0.2])[:, None]
    replace(known, table=table.half()).save(tmp_path / "heads.safetensors")
    budget = {"tokens": 96, "heads": str(tmp_path / "heads.safetensors"), "sinks": 2, "recent": 4}
    given = {"policy": "keydiff", "budget": budget, "prefill_block": 64, "classes": {}}
    llm, grown = start(model, given), 0
    config = llm.llm_engine.vllm_config
    for name, layer in compressed(config).items():
        first, *others = (layer.impl.common.rules[kind][name].form.nbytes for kind in (None, *Menu.of(config).sizes))
        assert layer.attn_backend.page == max(first, *others)
        grown += max(others) > first
    assert grown


class Base:
    """What a scheduler of vLLM has, as far as `InBlocks` looks at it."""

    def __init__(self, ending=dict):
        self.block, self.menu, self.streams, self.grammar_compile_error_reqs = 64, MENU, set(), ending()
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
        self.encoder_cache_manager = SimpleNamespace(cache_size=100, free=lambda request: self.let_go.append(request))
        self.max_num_encoder_input_tokens, self.added, self.let_go = 2000, [], []

    def add_request(self, request):
        self.added.append(request)

    def _try_schedule_encoder_inputs(self, request, computed, offered, budget):
        return [0], min(offered, 30), budget - 1, [], []


class Blocks(InBlocks, Base):
    __init__ = Base.__init__


def asked(name="0", tokens=300, pictures=(), resumable=False, ids=(), **params):
    features = [SimpleNamespace(identifier=str(i), mm_position=SimpleNamespace(offset=at, length=most))
                for i, (at, most) in enumerate(pictures)]  # fmt: skip
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=tokens, mm_features=features, resumable=resumable, prompt_token_ids=ids,
        sampling_params=SamplingParams(**params), get_num_encoder_embeds=lambda i: pictures[i][1],
    )  # fmt: skip


@pytest.mark.parametrize("ending", [set, dict], ids=["vLLM 0.32", "vLLM 0.33"])
@pytest.mark.parametrize(
    "request_, refused",
    [
        (asked(), False),
        (asked(seed=1, temperature=0.8), True),  # vLLM's CPU generators cannot go on behind a block
        (asked(tokens=64, seed=1, temperature=0.8), False),
        (asked(seed=1, temperature=0.0), False),
        (asked(pictures=[(0, 60), (70, 60), (128, 90)]), True),  # two of them share tokens 128 to 191
        (asked(pictures=[(0, 60), (70, 50), (128, 90)]), False),
        (asked(pictures=[(10, 101)]), True),
    ],
)
def test_what_blocks_cannot_serve_is_refused(request_, refused, ending):
    blocks = Blocks(ending)
    blocks.add_request(request_)
    assert blocks.added == [request_] and set(blocks.grammar_compile_error_reqs) == ({"0"} if refused else set())
    if refused:
        assert blocks._reserve_prefill_lookahead(request_, 0, 64) == 0, "it ends without a step"


def test_the_end_of_a_stream_that_was_refused_is_refused():
    blocks, parts = Blocks(), [asked(resumable=True), asked(resumable=True), asked(tokens=1), asked(tokens=1)]
    for part in parts[:3]:
        blocks.add_request(part)
    assert blocks.added == parts[:3] and set(blocks.grammar_compile_error_reqs) == {"0"} and not blocks.streams
    blocks.grammar_compile_error_reqs.clear()
    blocks.add_request(parts[3])
    assert not blocks.grammar_compile_error_reqs


def test_why_a_request_is_refused_is_passed_on():
    """By vLLM since 0.33."""
    blocks = Blocks()
    blocks.add_request(asked(seed=1, temperature=0.8))
    error = blocks.grammar_compile_error_reqs["0"]
    assert error.code == "validation_error" and error.message.endswith("leave seed out")


def test_the_scheduler_knows_how_long_embeddings_are():
    blocks, request_ = Blocks(), asked(tokens=401, ids=None, extra_args={"fastkv_keep": 0.1})
    blocks.add_request(request_)
    assert request_.sampling_params.extra_args == {"fastkv_budget": 42}


def test_pictures_of_a_block_come_together():
    blocks, request_ = Blocks(), asked(pictures=[(0, 40)])
    assert blocks._try_schedule_encoder_inputs(request_, 280, 64, 9) == ([0], 20, 8, [], []) and not blocks.let_go
    assert blocks._try_schedule_encoder_inputs(request_, 0, 64, 9) == ([], 0, 9, [], []) and blocks.let_go == [request_]


@pytest.mark.parametrize(
    "classes, message",
    [(["small"], 'classes must be like {"small": {"budget": 256}}'),
     ({"small": 3}, 'classes must be like {"small": {"budget": 256}}'),
     ({64: {"budget": 64}}, 'classes must be like {"small": {"budget": 256}}'),
     ({"small": {"prefill_block": 3}}, "class 'small' has no setting prefill_block; it has policy, budget"),
     ({"small": {"budget": 3}}, "a budget of 3 tokens is smaller than sinks + recent")],
)  # fmt: skip
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
