"""Statistics of queries: the fit against the model's own projections, the file, the command, and what reads it."""

from dataclasses import replace

import pytest
import torch

import fastkv
from fastkv.calibration.fits import QueryCalibration
from fastkv.lab.cli import main
from fastkv.lab.fits import fit_queries as fit
from fastkv.policies import QueryStatistics

from .models import build, projected, query_calibration, refused
from .test_calibration_vector import FULL_LAYERS, families, sequences
from .toy import MODEL, load, write


@families
def test_fit_is_the_mean_of_the_queries_before_the_rotary_embedding(name):
    model, ids = build(name), sequences()
    recorded = projected(model, ids, "q")
    fitted = fit(model, ids.split(3))
    assert list(fitted.layers) == FULL_LAYERS[name] and fitted.tokens == ids.numel()
    for layer, known in fitted.layers.items():
        queries = recorded["q", layer].flatten(0, 1)
        mean, pairs = queries.mean(0), torch.complex(queries[..., :8], queries[..., 8:])
        torch.testing.assert_close(known.mean.double(), mean, rtol=1e-5, atol=1e-6)
        excess = pairs.abs().mean(0) - pairs.mean(0).abs()
        torch.testing.assert_close(known.excess.double(), excess, rtol=1e-5, atol=1e-6)
    assert not any("_fastkv_config" in vars(module) for module in model.modules()), "the model is as it was"


def test_fit_refuses_what_it_cannot_read():
    model, ids = build(), sequences()
    with fastkv.patched(model, budget=64):
        refused("unpatch", fit, model, [ids])
    refused("got none", fit, model, [])
    model.model.layers[2].self_attn.q_proj.weight.data[:] = torch.inf
    refused("layer 2", fit, model, [ids])


def test_a_file_comes_back_bit_for_bit(tmp_path):
    model, path = build(), tmp_path / "queries.safetensors"
    fitted = query_calibration(model)
    fitted.save(path)
    read = QueryCalibration.load(path, fastkv.patch(model, budget=64).config)
    assert list(read.layers) == list(fitted.layers)
    assert (read.fingerprint, read.model, read.tokens) == (fitted.fingerprint, fitted.model, fitted.tokens)
    for layer, known in fitted.layers.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(read.layers[layer], known))
    refused("another model", QueryCalibration.load, path, build("qwen3").config)
    refused("layer 9", read.of_layer, 9)


@pytest.mark.parametrize(
    "change",
    [lambda known: {}, lambda known: {2: QueryStatistics(known.mean.double(), known.excess)},
     lambda known: {2: QueryStatistics(known.mean[0], known.excess)},
     lambda known: {2: QueryStatistics(known.mean[:1], known.excess)},
     lambda known: {2: QueryStatistics(known.mean * torch.nan, known.excess)}, lambda known: {9: known}],
    ids="empty double flat short nan no-such-layer".split(),
)  # fmt: skip
def test_load_refuses_tensors_that_do_not_fit(tmp_path, change):
    path, fitted = tmp_path / "queries.safetensors", query_calibration(build())
    replace(fitted, layers=change(fitted.layers[2])).save(path)
    refused("damaged", QueryCalibration.load, path, build().config)


def test_the_policy_finds_the_file_beside_the_model_or_asks_for_it(tmp_path):
    refused("fastkv calibrate queries", fastkv.patch, build(), "triattention", 64)
    refused("fastkv calibrate queries", fastkv.patch, build(), fastkv.policies.get("criticalkv", base="triattention"))
    model = build()
    model.config._name_or_path = str(tmp_path)
    query_calibration(model).save(tmp_path / "queries.safetensors")
    config = fastkv.patch(model, "triattention", 64)._fastkv_config
    assert list(config.queries.layers) == [0, 1, 2, 3] and list(config.rotations) == [0, 1, 2, 3]


def test_the_command_writes_what_fit_finds(tmp_path, capsys):
    path, text = tmp_path / "queries.safetensors", write(tmp_path / "text.txt", 3)
    words = ("--model", MODEL, "--text", text, "--length", "128", "--tokens", "300", "--out", str(path))
    assert main(["calibrate", "queries", *words]) == 0
    assert QueryCalibration.load(path, load()[0].config).tokens == 256
    assert f'fastkv.policies.get("triattention", calibration="{path}")' in capsys.readouterr().out
