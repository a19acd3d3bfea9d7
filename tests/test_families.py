"""Which model types work: every check of `tests.families` on tiny models, and the lists that are written from them."""

import re
from unittest import mock

import pytest
import transformers

from fastkv.integrations import transformers as engine
from fastkv.integrations.transformers.layer import FastKVLayer

from .families import lists, tiny
from .families.__main__ import main
from .families.checks import CHECKS
from .families.examine import FAILS, REFUSED, UNBUILT, WORKS, examine

# Of these all is checked every day: nothing special, windows and images, states of linear attention within layers.
OFTEN = "llama gemma3 falcon_h1".split()
NAMES = """
llama llama4 llama4_text mllama mllama:cross-attention mistral mistral:windows-only ministral ministral3 mistral3
mixtral qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_vl
qwen3_vl_moe gemma gemma2 gemma3 gemma3_text gemma3n_text gemma3n_text:shared-keys gemma4 gemma4_text
gemma4_text:shared-keys gpt_neox gpt_oss phi phi3 phimoe phi4_multimodal glm glm4 glm4_moe olmo2 olmo3 smollm3 granite
granitemoehybrid cohere2 exaone4 nemotron_h falcon_h1 lfm2 ernie4_5 hunyuan_v1_dense seed_oss starcoder2 minimax_m2
axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 mistral4 youtu
""".split()
PAGE = lists.PAGE.read_text()
WRITTEN_WITH = re.search(r"transformers (\S+) that", PAGE)[1]


def listed(name):
    """What docs/models.md says of a model type."""
    for title, status in (("Tested", WORKS), ("Refused", REFUSED), ("Wrong or failing", FAILS)):
        if name.partition(":")[0] in lists.table(PAGE, title):
            return status
    return UNBUILT


# Of one of each other way to be special, less: what a model computes, and where its cache goes.
FEW = ("whole", "blocks", "turns", "copies", "saved")
MORE = """
deepseek_v3 gpt_oss qwen2_vl
qwen3_next phi3 lfm2 gpt2 gpt_neox llama4_text gemma4_text:shared-keys mllama:cross-attention bailing_hybrid
""".split()


@pytest.mark.parametrize(
    "name, checks",
    [*(pytest.param(name, tuple(CHECKS), id=name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in NAMES),
     *(pytest.param(name, FEW, id=f"{name}-few") for name in MORE)],
)  # fmt: skip
def test_a_type_works_or_is_refused(name, checks):
    try:
        tiny.kind_of(name)
    except tiny.DoesNotExist as error:
        assert transformers.__version__ != WRITTEN_WITH, error
        pytest.skip(str(error))
    result = examine(name, checks)
    assert result.status != FAILS, result.reason
    if transformers.__version__ == WRITTEN_WITH and ":" not in name:
        assert result.status == listed(name), f"{result}; run python -m tests.families --types {name} --write"


def test_what_works_is_what_is_tested():
    table = lists.table(PAGE, "Tested")
    assert table.keys() == engine.TESTED.keys()
    for name, (_, _, limits) in table.items():
        found = [] if limits == "none" else [limit.partition(": ")[0] for limit in limits.split("<br>")]
        assert engine.TESTED[name] == lists.summary(found)


def test_what_is_refused_says_why():
    refused = lists.table(PAGE, "Refused")
    assert not engine.REFUSED.keys() & engine.TESTED.keys()
    assert not refused.keys() & engine.TESTED.keys()
    reasons = " ".join(why for (why,) in refused.values())
    missing = {name for name, why in engine.REFUSED.items() if f"{name} is not supported: {why}" not in reasons}
    assert not missing - lists.table(PAGE, "Not tried").keys()


def test_nothing_is_wrong_and_accepted():
    """A type that fails a check has to be refused."""
    assert not lists.table(PAGE, "Wrong or failing")


def test_checks_notice_a_position_that_is_off_by_one(monkeypatch):
    right = FastKVLayer.get_seq_length
    monkeypatch.setattr(FastKVLayer, "get_seq_length", lambda self, *args: right(self, *args) + bool(self.seen))
    found = examine("llama", ["turns", "unpatched"])
    assert found.status == FAILS and "second turn" in found.reason and "unpatched" not in found.reason
    assert examine("llama", ["kept_only"]).status == WORKS  # is given positions


def test_checks_notice_evicted_tokens_that_still_count(monkeypatch):
    monkeypatch.setattr("tests.families.checks.PADDING", 5)
    monkeypatch.setattr("fastkv.cache.layer.evict", lambda state, rule: None)
    found = examine("llama", ["evictions"])
    assert found.status == FAILS and "evictions" in found.reason


def test_a_type_that_crashes_fails_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tests.families.__main__.examine", mock.Mock(side_effect=SystemExit(3)))
    assert main(["--types", "llama", "--results", str(tmp_path / "kept.jsonl")]) == 1
    assert "ended without a result" in capsys.readouterr().out
