"""The language model in perf/language_model: it loads, its card tells its record, and its loss is the recorded one."""

import json
import math
from dataclasses import asdict

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastkv.cli import main
from perf.quality.cases import LANGUAGE, Case
from perf.quality.measure import LanguageBench, Settings
from tools import language_model
from tools.language_model import FOLDER, LONG, SAMPLE, Record, card_of, held_out_loss, measure, sample_of, untrained

RECORD = Record(**json.loads((FOLDER / "training.json").read_text()))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32", local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


def test_shape(model):
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 4, 2)
    assert config.head_dim == 64 and config.max_position_embeddings == LONG
    assert (FOLDER / "model.safetensors").stat().st_size < 8e6, "in bf16"


def test_the_card_is_of_the_record(model):
    assert (FOLDER / "README.md").read_text() == card_of(model, RECORD)
    assert RECORD.steps > 1000 and RECORD.tokens > 4e6 and RECORD.held_out_files > 20
    assert "nothing about retrieval" in (FOLDER / "README.md").read_text()


def test_loss_of_the_held_out_sample(model, tokenizer):
    loss, _ = held_out_loss(model, tokenizer, [(FOLDER / SAMPLE).read_text(encoding="utf-8")])
    assert loss == pytest.approx(RECORD.sample_loss, abs=0.01)
    assert loss < 0.6 * math.log(language_model.VOCABULARY)


def test_tokens_are_the_text(tokenizer):
    text = (FOLDER / SAMPLE).read_text(encoding="utf-8")[:5000] + "\n    naïve = '→'\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_fidelity_works_on_the_folder(tmp_path, capsys):
    words = ["fidelity", "--model", str(FOLDER), "--text", str(FOLDER / SAMPLE), "--policies", "snapkv,fastkv"]
    words += ["--context", "256", "--steps", "8", "--seeds", "2", "--budgets", "64", "--out", str(tmp_path)]
    assert main(words) == 0
    rows = json.loads((tmp_path / "fidelity.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["snapkv", "fastkv"]
    assert all(0 < row["kl"] < 2 and row["nbytes"] < row["full_nbytes"] for row in rows)


def test_the_evaluation_report_measures_it():
    bench = LanguageBench(Settings(seeds=2, context=160, steps=6), FOLDER)
    small, large = (bench.run(LANGUAGE, Case("snapkv", "snapkv", tokens, "whole")) for tokens in (48, 200))
    assert len(small["by_seed"]["kl"]) == 2 and min(small["by_seed"]["kl"]) > 0
    assert max(large["by_seed"]["kl"]) < 1e-5, "all is kept"
    assert small["bytes"]["stored"] <= small["bytes"]["bound"] < large["bytes"]["bound"]


def test_measuring_an_untrained_model_says_that_it_knows_nothing(tokenizer):
    texts = [(FOLDER / SAMPLE).read_text(encoding="utf-8")[:9000]]
    record = Record(0, 1, "3", 1, 1)
    measure(untrained(0), tokenizer, texts * 2, record)
    assert record.loss == pytest.approx(math.log(language_model.VOCABULARY), abs=0.3)
    num_bytes, tokens = len(texts[0].encode()), len(tokenizer(texts[0], add_special_tokens=False).input_ids) + 1
    assert record.bits_per_byte == pytest.approx(record.loss / math.log(2) * tokens / num_bytes, rel=0.01)
    assert asdict(record)["sample_loss"] == pytest.approx(record.loss, abs=0.1)


def test_the_sample_is_of_several_files():
    texts = [letter * 7000 for letter in "abcdefghijklmnopqr"] + ["short"]
    sample = sample_of(texts)
    assert len(sample) == 8 * 6000 and len(set(sample)) == 8 and sample_of(texts[:2]) == "a" * 6000 + "b" * 6000
