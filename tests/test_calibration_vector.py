"""Maps from keys to values: the fit against least squares on stored activations, the file, the text, the command."""

import copy
import io
import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import fastkv
from fastkv.calibration import describe, fingerprint
from fastkv.calibration.fits import MAPS, VectorMap, required_r2
from fastkv.integrations.transformers import rotations
from fastkv.lab import facts, fits
from fastkv.lab.cli import main
from fastkv.lab.fits import PairSums, pre_rope_pairs
from fastkv.lab.fits import fit_vector as fit

from .models import FAMILIES, VOCAB, build, projected, prompt, refused
from .toy import MODEL, write

FULL_LAYERS = {"llama": [0, 1, 2, 3], "qwen3": [0, 1, 2, 3], "gemma3": [1, 3]}
families = pytest.mark.parametrize("name", FULL_LAYERS)


def pairs(count=200, heads=2, key_dim=6, value_dim=4, seed=0):
    """Random keys [1, Hkv, N, Dk] whose dimensions differ in size, values [1, Hkv, N, Dv] with a mean; float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, key_dim, dtype=torch.float64)
    keys = torch.randn(1, heads, count, key_dim, generator=generator, dtype=torch.float64) * sizes
    return keys, torch.randn(1, heads, count, value_dim, generator=generator, dtype=torch.float64) + 0.3


def summed(keys, values):
    sums = PairSums(keys, values)
    sums.add(keys, values)
    return sums


def sequences(rows=8, length=60):
    return prompt(batch=rows, length=length, pads=(0,) * rows, seed=5)[0]


def brute_r2(keys, values, weight):
    """R^2 [Hkv] of a map on keys [Hkv, N, Dk] and values [Hkv, N, Dv], from the pairs themselves."""
    wrong = (values - keys @ weight).square().sum((1, 2))
    return 1 - wrong / (values - values.mean(1, keepdim=True)).square().sum((1, 2))


def test_values_that_do_not_vary_have_nothing_to_explain():
    """Sums of constants are off by rounding, to either side, which must not pass for variation."""
    keys, values = pairs(heads=64)
    values[:, :-1] = torch.randn(63, 1, 4, dtype=torch.float64)
    values[:, 0] = 0
    sums = summed(keys, values)
    r2 = sums.r2(sums.solve())
    assert (r2[:-1] == 0).all() and r2[-1] != 0 and torch.isfinite(sums.solve()).all()


@families
def test_fit_is_least_squares_on_the_keys_before_the_rotary_embedding(name):
    model, ids = build(name), sequences()
    recorded = projected(model, ids, "k", "v")
    fitted = fit(model, ids.split(3), held_out=0.25)
    assert list(fitted.weights) == list(fitted.r2) == FULL_LAYERS[name]
    assert fitted.tokens == ids.numel() and fitted.threshold == 0.5
    assert fitted.fingerprint == fingerprint(model.config) and fitted.model == describe(model.config)
    apart = torch.tensor([True, False, False, False] * 2)
    for layer in FULL_LAYERS[name]:
        k, v = (recorded[name, layer].permute(2, 0, 1, 3) for name in "kv")
        weight = torch.linalg.lstsq(k[:, ~apart].flatten(1, 2), v[:, ~apart].flatten(1, 2)).solution
        held_keys, held_values = k[:, apart].flatten(1, 2), v[:, apart].flatten(1, 2)
        assert fitted.weights[layer].dtype == torch.float32
        # The rotation and its undoing cost a few units of the last place of fp32.
        torch.testing.assert_close(fitted.weights[layer], weight.float())
        torch.testing.assert_close(fitted.r2[layer], brute_r2(held_keys, held_values, weight), rtol=0, atol=1e-6)


@families
def test_a_joint_fit_is_least_squares_on_the_keys_of_all_heads(name):
    model, ids = build(name), sequences()
    fitted = fit(model, ids.split(2), held_out=0.25, joint=True)
    apart = torch.tensor([True, False, False, False] * 2)
    for layer, keys, values in pre_rope_pairs(model, rotations(model, FULL_LAYERS[name]), ids):
        k, v = (rows.double().transpose(1, 2).flatten(2) for rows in (keys, values))
        weight = torch.linalg.lstsq(k[~apart].flatten(0, 1), v[~apart].flatten(0, 1)).solution
        assert fitted.weights[layer].shape == (2, 32, 16) and fitted.r2[layer].shape == (1,)
        for head in range(2):
            mine = weight[:, 16 * head :][:, :16].float()
            torch.testing.assert_close(fitted.weights[layer][head], mine, rtol=1e-4, atol=1e-4)
        held = (k[apart].flatten(0, 1)[None], v[apart].flatten(0, 1)[None])
        torch.testing.assert_close(fitted.r2[layer], brute_r2(*held, weight[None]), rtol=0, atol=1e-5)
    assert fitted.joint and not fit(model, ids.split(2)).joint


def test_held_out_sequences_measure_and_do_not_enter():
    model, ids = build(), sequences(rows=11, length=30)
    changed = ids.clone()
    changed[0] = changed[10] = sequences(rows=1, length=30)[0].flip(0)  # of eleven, a tenth is the first and the last
    before, after = fit(model, ids.split(1)), fit(model, changed.split(1))
    for layer in before.weights:
        assert torch.equal(before.weights[layer], after.weights[layer])
        assert not torch.equal(before.r2[layer], after.r2[layer])
    changed[1] = 7
    assert not torch.equal(fit(model, changed.split(1)).weights[0], before.weights[0])


def test_fit_refuses_what_it_cannot_fit():
    model, ids = build(), sequences()
    with fastkv.patched(model, budget=64):
        refused("unpatch", fit, model, [ids])
        refused("unpatch", fit, model.model, [ids])
    refused("eval", fit, build().train(), [ids])
    refused("held_out", fit, model, [ids], held_out=0.0)
    refused("held_out", fit, model, [ids], held_out=1.0)
    refused("boundary", fit, model, [ids], boundary=0.0)
    refused("got 1 in all", fit, model, [ids[:1]])
    refused("got 0 in all", fit, model, [])
    refused("full-attention", fit, build("gemma3", layer_types=["sliding_attention"] * 4), [ids])
    model.model.layers[2].self_attn.v_proj.weight[:] = torch.inf
    refused("layer 2", fit, model, [ids])


def test_threshold_is_that_of_the_proposition():
    assert required_r2() == 0.5 and required_r2(0.25) == 0.8


@pytest.mark.parametrize("boundary", [0.0, 1.1])
def test_threshold_refuses_what_is_not_a_share(boundary):
    refused("required_r2", required_r2, boundary)


def example(model=None):
    config = (model or build()).config
    weights = {layer: torch.randn(2, 16, 16) for layer in (0, 1, 2, 3)}
    r2 = {layer: torch.rand(2, dtype=torch.float64) for layer in weights}
    r2[1] = torch.tensor([0.3, 0.7], dtype=torch.float64)
    return VectorMap(weights, r2, 1 / 3, fingerprint(config), describe(config), 12345)


def same(one, other):
    facts = ("threshold", "fingerprint", "model", "tokens")
    assert [getattr(one, name) for name in facts] == [getattr(other, name) for name in facts]
    for mine, theirs in ((one.weights, other.weights), (one.r2, other.r2)):
        assert list(mine) == list(theirs)
        assert all(mine[i].dtype == theirs[i].dtype and torch.equal(mine[i], theirs[i]) for i in mine)


def test_a_file_comes_back_bit_for_bit(tmp_path):
    model, path = build(), tmp_path / "vector.safetensors"
    fitted = example()
    fitted.save(path)
    same(VectorMap.load(path, model.config), fitted)
    same(VectorMap.load(str(path), fastkv.patch(model, budget=64).config), fitted)
    first = path.read_bytes()
    fitted.save(path)
    assert path.read_bytes() == first and os.listdir(tmp_path) == ["vector.safetensors"]
    other = build("qwen3").config
    text = refused("another model", VectorMap.load, path, other)
    assert describe(build().config) in text and describe(other) in text
    refused("another model", fastkv.patch, build("qwen3"), "snapkv", budget=64, correction="vector", vector=fitted)


def test_a_joint_file_says_so_by_its_one_r2_a_layer(tmp_path):
    path, config = tmp_path / "vector.safetensors", build().config
    weights = {layer: torch.randn(2, 32, 16) for layer in range(4)}
    r2 = {layer: torch.tensor([0.2 + 0.2 * layer], dtype=torch.float64) for layer in weights}
    fitted = replace(example(), weights=weights, r2=r2, threshold=0.5)
    fitted.save(path)
    again = VectorMap.load(path, config)
    same(again, fitted)
    assert again.joint and [again.usable(layer) for layer in (1, 2)] == [[False, False], [True, True]]
    replace(fitted, weights=weights | {1: torch.randn(2, 31, 16)}).save(path)
    refused("damaged", VectorMap.load, path, config)


def test_usable_compares_with_the_threshold():
    fitted = replace(example(), threshold=0.7)
    assert fitted.usable(1) == [False, False], "a head has to exceed it"
    assert replace(fitted, threshold=0.69).usable(1) == [False, True]
    refused("layer 9", fitted.usable, 9)


def rewritten(path, **changes):
    """The file with other header entries; None removes one."""
    fitted = example()
    tensors = {f"weight.{i}": w for i, w in fitted.weights.items()} | {f"r2.{i}": r for i, r in fitted.r2.items()}
    header = {"version": MAPS.version, "tokens": 1, "threshold": 0.5, "model": "x", "fingerprint": fitted.fingerprint}
    header = {name: value for name, value in (header | changes).items() if value is not None}
    save_file(tensors, path, {MAPS.header: json.dumps(header)})


def test_load_refuses_files_it_cannot_trust(tmp_path):
    path, config = tmp_path / "vector.safetensors", build().config
    refused("No such file", VectorMap.load, path, config)
    refused("cannot be read", VectorMap.load, tmp_path, config)
    for content in (b"", b"no tensors here", struct.pack("<Q", 10**9) + b"{}"):
        path.write_bytes(content)
        refused("cannot be read", VectorMap.load, path, config)
    for header, said in ((None, "header"), ({"format": "pt"}, "header"), ({MAPS.header: "[1"}, "damaged")):
        save_file({"weight.0": torch.zeros(2)}, path, header)
        refused(said, VectorMap.load, path, config)
    rewritten(path)
    VectorMap.load(path, config)
    rewritten(path, version=MAPS.version + 1, fingerprint=None)
    refused("update fastkv", VectorMap.load, path, config)
    for name, value in (("version", "one"), ("tokens", 0.5), ("fingerprint", None)):
        rewritten(path, **{name: value})
        refused("damaged", VectorMap.load, path, config)


@pytest.mark.parametrize(
    "change",
    [lambda weights, r2: weights.pop(2), lambda weights, r2: r2.pop(2),
     lambda weights, r2: (weights.clear(), r2.clear()),
     lambda weights, r2: weights.update({2: weights[2].double()}),
     lambda weights, r2: weights.update({2: weights[2][0]}), lambda weights, r2: weights[2].fill_(torch.nan),
     lambda weights, r2: r2.update({2: r2[2][:1]}), lambda weights, r2: r2.update({2: r2[2].float()}),
     *(lambda weights, r2, name=name: [some.update({name: some[2]}) for some in (weights, r2)] for name in (4, "x"))],
    ids="weight-missing r2-missing empty double flat nan short single no-such-layer no-number".split(),
)  # fmt: skip
def test_load_refuses_tensors_that_do_not_fit(tmp_path, change):
    path, fitted = tmp_path / "vector.safetensors", example()
    weights, r2 = {i: w.clone() for i, w in fitted.weights.items()}, dict(fitted.r2)
    change(weights, r2)
    weights, r2 = ({i: t.clone() for i, t in tensors.items()} for tensors in (weights, r2))
    replace(fitted, weights=weights, r2=r2).save(path)
    refused("damaged", VectorMap.load, path, build().config)


@pytest.mark.parametrize("name", FAMILIES)
def test_fingerprint_belongs_to_the_shape_of_a_model(name, tmp_path):
    model = build(name, base="eager")
    config = model.config
    mine = fingerprint(config)
    assert len(mine) == 16 and int(mine, 16) >= 0
    assert mine == fingerprint(FAMILIES[name][1]) == fingerprint(type(config).from_dict(config.to_dict()))
    config.save_pretrained(tmp_path)
    assert mine == fingerprint(type(config).from_pretrained(tmp_path))
    assert mine == fingerprint(model.bfloat16().config)
    with fastkv.patched(model, budget=64):
        assert mine == fingerprint(model.config)
    others = [fingerprint(FAMILIES[other][1]) for other in FAMILIES if other != name]
    assert mine not in others and len(describe(config).splitlines()) == 1


def test_fingerprint_changes_with_every_field_and_not_with_what_a_config_spells_out():
    config = build("qwen3").config
    before = fingerprint(config)
    config.layer_types = ["full_attention"] * 4
    config.rope_parameters = {"rope_theta": 10000, "factor": None, "rope_type": "default"}
    assert fingerprint(config) == before
    for field, value in {
        **{"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 32, "vocab_size": VOCAB + 1, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    }.items():
        changed = copy.deepcopy(config)
        setattr(changed, field, value)
        assert fingerprint(changed) != before, field


WORDS = "the old baker waited in the kitchen . a small dog slept near the door . ".split()


def test_text_is_packed_and_cut_into_sequences(bundled, tmp_path, monkeypatch):
    _, tokenizer = bundled
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:5]) + "\n")
    (tmp_path / "b.md").write_text("\n".join(WORDS[5:12]))
    (tmp_path / "deep" / "c.txt").write_text(" ".join(WORDS[12:]))
    (tmp_path / "d.py").write_text("code")
    whole = [tokenizer.vocab[word] for word in WORDS]
    assert len(whole) == 16
    expected = [[tokenizer.bos_token_id, *whole[start : start + 3]] for start in range(0, 15, 3)]

    def read(source, tokens=1000):
        return [ids.tolist() for ids in fits.sequences(source, tokenizer, 4, tokens)]

    assert read(str(tmp_path)) == [[row] for row in expected]
    assert read(str(tmp_path), tokens=11) == [[row] for row in expected[:2]]
    assert read(str(tmp_path / "a.txt")) == [[expected[0]]]
    monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(WORDS)))
    assert read("-") == [[row] for row in expected]
    monkeypatch.setattr(facts, "PIECE", 7)
    (tmp_path / "lines.txt").write_text("\n".join(WORDS))
    assert read(str(tmp_path / "lines.txt")) == [[row] for row in expected]


def test_text_that_cannot_be_read_is_refused(bundled, tmp_path):
    _, tokenizer = bundled

    def read(source, length=8, tokens=100):
        return list(fits.sequences(str(source), tokenizer, length, tokens))

    path = tmp_path / "a.txt"
    refused(".txt or .md", read, tmp_path)
    path.write_text("the dog")
    refused("2 tokens", read, path)
    refused("one sequence of 8 tokens, got 7 in all", read, path, tokens=7)


@pytest.mark.parametrize("joint", [False, True])
def test_the_command_fits_prints_and_writes(bundled, tmp_path, capsys, joint):
    model, tokenizer = bundled
    path = tmp_path / "v.safetensors"
    text = write(tmp_path / "text.txt", 3)
    options = {"--model": MODEL, "--text": text, "--length": "128", "--tokens": "1300", "--boundary": "0.5"}
    words = [word for pair in options.items() for word in pair]
    assert main(["calibrate", "vector", *words, "--out", str(path), *["--joint"] * joint]) == 0
    printed = capsys.readouterr().out
    read = VectorMap.load(path, model.config)
    direct = fit(model, fits.sequences(text, tokenizer, 128, 1300), boundary=0.5, joint=joint)
    assert ("all heads" in printed) == joint and ("head 1" in printed) != joint
    same(read, direct)
    assert read.tokens == 1280 and read.threshold == pytest.approx(2 / 3)
    for layer, r2 in read.r2.items():
        row = next(line for line in printed.splitlines() if line.split()[:1] == [str(layer)])
        for value, usable in zip(r2.tolist(), read.usable(layer)):
            assert f"{value:.3f}{'' if usable else ' plain'}" in row
    usable = sum(sum(read.usable(layer)) for layer in read.weights)
    assert f"{usable} of 8 heads" in printed
    assert f'fastkv.patch(model, correction="vector", vector="{path}")' in printed
    assert main(["calibrate", "vector", "--model", str(tmp_path), "--out", str(path)]) == 2
    assert "cannot load a model" in capsys.readouterr().err
