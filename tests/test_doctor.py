"""What `fastkv doctor --model` says of a checkpoint, of which there is only a config."""

import re

import pytest
import torch
import transformers

import fastkv
from fastkv.config import Config
from fastkv.lab.cli import main
from fastkv.lab.doctor import survey

from .models import COMMON, GEMMA, build, compressed_layers


def saved(folder, config):
    config.save_pretrained(folder)
    return str(folder)


def said(capsys, *arguments):
    """Lines of a section by their first words, and the exit code."""
    code, lines = main(["doctor", *arguments]), capsys.readouterr().out.splitlines()
    pairs = [line.strip().split("  ", 1) for line in lines if line.startswith("  ")]
    return {name: text.strip() for name, text in pairs}, code, lines


def test_a_model_of_full_attention(tmp_path, capsys):
    path = saved(tmp_path, transformers.LlamaConfig(**COMMON, dtype="bfloat16"))
    found, code, lines = said(capsys, "--model", path, "--context", "4096", "--budget", "64")
    assert code == 0 and lines[0] == "model"
    assert found["class"] == "LlamaForCausalLM" and found["compressed"] == "all 4"
    assert "memory of a sequence of 4096 tokens in bfloat16" in lines
    assert found["stock cache"] == f"{4 * 2 * 2 * 16 * 4096 * 2 / 2**20:.1f} MiB"
    assert "times less (fastkv, 64 tokens per KV head)" in found["fastkv"]
    assert "refused" not in found and found["heads"] == "found or calibrated when first patched"
    found, _, _ = said(capsys, "--model", path, "--context", "4096", "--budget", "8x")
    assert re.search(r"8\.[0-4] times less \(fastkv, budget 8x\)", found["fastkv"])
    for where in (["--model", str(path)], []):
        assert main(["doctor", *where, "--budget", "some"]) == 2


def test_windows_stay(tmp_path, capsys):
    found, code, _ = said(capsys, "--model", saved(tmp_path, transformers.Gemma3TextConfig(**GEMMA)))
    assert code == 0 and found["compressed"] == "2 of 4: 1, 3"
    assert found["left to transformers"] == "2 use a sliding window"


def test_what_is_refused_says_why(tmp_path, capsys):
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64)
    found, code, lines = said(capsys, "--model", saved(tmp_path, config))
    assert code == 0 and found["refused"].startswith("bloom is not supported")
    assert not any(line.startswith("memory") for line in lines)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("amount", [{"tokens": 20}, {"keep": 0.3}, {"compress": 2}], ids=str)
def test_bytes_are_those_of_a_cache(name, amount):
    context, model = 90, build(name)
    config = Config.make("momentkv", fastkv.Budget(**amount, sinks=2, recent=4), None, 16, "auto", "auto", None)
    with torch.device("meta"):
        bare = type(model)(model.config)
    found = survey(bare, config, context, torch.float32)
    ids = torch.randint(3, 90, (1, context))
    stock = model(ids, use_cache=True).past_key_values
    assert found.before == sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    fastkv.patch(model, "momentkv", config.budget)
    cache = model(ids).past_key_values
    assert found.after == cache.nbytes() - cache.workspace.nbytes()
    assert found.compressed == compressed_layers(cache)
