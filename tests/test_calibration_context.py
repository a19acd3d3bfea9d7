"""Context-calibrated compression: the curve, its file, the fit, and measurements on the bundled model."""

import json
import math
import os
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastkv
from fastkv.calibration import describe, fingerprint, fits
from fastkv.calibration.fits import QualityCurve, context_nll, keep_for, retained, save_curves
from fastkv.lab.cli import build_parser
from fastkv.lab.fits import Triple, english_text, fit_curve, make_triples, residual, run_context

from .models import FAMILIES, raises, refused
from .pairwise import covering
from .toy import MODEL, calibration_text

STEEPNESS = st.floats(-50, 50)
SHARE = st.floats(0, 1)


@given(SHARE, STEEPNESS)
def test_quality_to_share_and_back(wanted, k):
    assert float(retained(keep_for(wanted, k), k)) == pytest.approx(wanted, rel=0, abs=1e-9)


@given(SHARE, st.floats(-30, 30).filter(lambda k: abs(k) > 1e-3))
def test_the_curve_is_the_papers(keep, k):
    """The paper's own form, (exp(rk - k) - exp(-k)) / (1 - exp(-k))."""
    expected = (math.exp(keep * k - k) - math.exp(-k)) / (1 - math.exp(-k))
    assert float(retained(keep, k)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.floats(-1e300, 1e300))
def test_ends_are_exact_and_nothing_overflows(k):
    assert float(retained(0.0, k)) == 0 and float(retained(1.0, k)) == 1
    assert float(keep_for(0.0, k)) == 0 and float(keep_for(1.0, k)) == 1
    shares = torch.linspace(0, 1, 11)
    for found in (retained(shares, k), keep_for(shares, k)):
        assert found.dtype == torch.float64 and ((found >= 0) & (found <= 1)).all()


@given(SHARE, st.sampled_from([-1.0, 1.0]), st.floats(-300, -3))
def test_the_straight_limit_is_approached_from_both_sides(share, sign, exponent):
    """|f(r) - r| = |k| r (1 - r) / 2 to first order, and the same for the inverse."""
    k = sign * 10.0**exponent
    for found in (retained(share, k), keep_for(share, k)):
        assert abs(float(found) - share) <= abs(k) / 7 + 1e-14


def test_the_smallest_share_is_meant():
    curve = QualityCurve(3.0, 1.0, "p", "f", "m", 1, 0.0)
    nll = torch.tensor([0.5, 2.0, 4.0])
    keep = curve.keep(0.9, nll)
    assert (retained(keep, curve.steepness(nll)) >= 0.9 - 1e-12).all()
    assert (retained(keep - 1e-6, curve.steepness(nll)) < 0.9).all()
    assert (keep.diff() > 0).all(), "what is hard to predict needs more"
    assert float(curve.keep(0.9, 2.0)) == float(keep[1])


class Head(torch.nn.Linear):
    """A language-model head that remembers the most rows it was asked for."""

    def __init__(self, hidden, vocab):
        super().__init__(hidden, vocab, bias=False)
        self.largest = 0

    def forward(self, hidden):
        self.largest = max(self.largest, hidden[..., 0].numel())
        return super().forward(hidden)


@pytest.mark.parametrize("softcap, chunk, side", covering([None, 2.0], [1, 7, 64, 512], ["none", "left", "right"]))
def test_context_nll_is_cross_entropy(softcap, chunk, side):
    rows, length, vocab = 3, 41, 57
    head = Head(16, vocab)
    head.weight *= 2
    hidden, ids = torch.randn(rows, length, 16), torch.randint(vocab, (rows, length))
    pads = [0, 5, 38] if side != "none" else [0, 0, 0]
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, slice(0, pad) if side == "left" else slice(length - pad, length)] = 0
    got = context_nll(hidden, ids, head, softcap, None if side == "none" else mask, chunk)
    assert got.shape == (rows,) and 0 < head.largest <= max(chunk, rows)
    for row in range(rows):
        real = mask[row].bool()
        logits = head.weight.double() @ hidden[row, real].double().T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = torch.nn.functional.cross_entropy(logits.T[:-1], ids[row, real][1:])
        assert float(got[row]) == pytest.approx(float(expected), rel=0, abs=1e-6)


def test_context_nll_of_nothing_is_zero_and_half_precision_is_widened():
    head = Head(8, 11)
    hidden, ids = torch.randn(2, 1, 8), torch.randint(11, (2, 1))
    assert context_nll(hidden, ids, head).tolist() == [0, 0]
    mask = torch.tensor([[0, 0, 1], [0, 0, 0]])
    assert context_nll(torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.long), head, mask=mask).tolist() == [0, 0]
    hidden, ids = torch.randn(1, 30, 8).bfloat16(), torch.randint(11, (1, 30))
    head = head.bfloat16()
    expected = torch.nn.functional.cross_entropy(head(hidden)[0, :-1].float(), ids[0, 1:])
    assert float(context_nll(hidden, ids, head)) == pytest.approx(float(expected), abs=1e-6)


def synthetic(alpha, beta, count=400, seed=0):
    """keep, nll and the quality that the curve has there, written out in its plain form; fp64."""
    generator = torch.Generator().manual_seed(seed)
    keep, nll = torch.rand(2, count, generator=generator, dtype=torch.float64)
    nll = 1 + 3 * nll
    k = alpha * nll + beta
    return keep, nll, torch.expm1(k * keep) / torch.expm1(k)


def triples_of(keep, nll, quality):
    return [Triple(*row) for row in torch.stack([keep, nll, quality], 1).tolist()]


KNOWN = [(2.0, -1.0), (-1.5, 4.0), (0.5, -6.0), (3.0, 0.1), (0.0, 2.0), (-2.0, 0.0)]


@pytest.mark.parametrize("alpha, beta", KNOWN)
def test_fit_recovers_a_known_curve(alpha, beta):
    triples = triples_of(*synthetic(alpha, beta))
    found = fit_curve(triples)
    assert found == pytest.approx((alpha, beta), rel=0, abs=1e-3)
    assert residual(triples, *found) < 1e-6
    assert fit_curve(triples) == found, "deterministic"


def test_fit_minimises_what_it_says():
    """No other (alpha, beta) near the result has a smaller loss; the loss is written out with plain floats."""
    keep, nll, honest = synthetic(2.0, -3.0, count=60)
    triples = triples_of(keep, nll, (honest + 0.1 * torch.randn(60, dtype=torch.float64)).clamp(0, 1))

    def loss(alpha, beta):
        total = 0.0
        for r, c, y in triples:
            excess = math.expm1((alpha * c + beta) * r) / math.expm1(alpha * c + beta) - y
            total += (4.0 if excess > 0 else 1.0) * excess**2
        return total

    alpha, beta = fit_curve(triples, penalty=4.0)
    best = loss(alpha, beta)
    for step in (1e-4, 1e-2, 1.0):
        for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -2), (-1, 2)):
            assert loss(alpha + a * step, beta + b * step) > best


CONFIG = FAMILIES["llama"][1]
OTHER = FAMILIES["qwen3"][1]


def curve(policy="snapkv", config=CONFIG, **changes):
    return replace(QualityCurve(1.25, -0.1, policy, fingerprint(config), describe(config), 42, 0.07), **changes)


def test_file_round_trip_and_merge(tmp_path):
    path = tmp_path / "context.json"
    save_curves(path, [curve(), curve("keydiff", alpha=1 / 3)])
    assert QualityCurve.load(path, CONFIG, "snapkv") == curve()
    assert QualityCurve.load(str(path), CONFIG, "keydiff") == curve("keydiff", alpha=1 / 3)
    save_curves(path, [curve("momentkv"), curve(beta=9.0)])
    assert QualityCurve.load(path, CONFIG, "keydiff").alpha == 1 / 3, "still there"
    assert QualityCurve.load(path, CONFIG, "snapkv").beta == 9.0, "replaced"
    assert QualityCurve.load(path, CONFIG, "momentkv") == curve("momentkv")
    assert [entry.name for entry in tmp_path.iterdir()] == ["context.json"]


def damaged(**changes):
    """Text of a good file with some entries replaced; None removes one."""
    entry = {"alpha": 1.0, "beta": 2.0, "triples": 3, "residual": 0.1}
    curves = {"snapkv": entry | changes.pop("entry", {})}
    content = {"format": fits.FORMAT, "version": fits.VERSION, "fingerprint": fingerprint(CONFIG), "model": "m"}
    content |= {"curves": curves, **changes}
    return json.dumps({name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize(
    "text, says",
    [(None, "there is no calibration file"), ("{", "something else"), ("\x00\x01", "something else"),
     ("[]", "something else"), ('{"version": 1, "format": "another"}', "something else"),
     (damaged(version=fits.VERSION + 1), "update fastkv"), (damaged(fingerprint="0123"), "another model"),
     (damaged(curves={}), "damaged"), (damaged(curves=[1]), "damaged"), (damaged(model=None), "damaged"),
     (damaged(entry={"alpha": True}), "damaged"), (damaged(entry={"beta": float("inf")}), "damaged"),
     (damaged(curves={"keydiff": {}}), "damaged")],
)  # fmt: skip
def test_load_refuses_in_one_sentence(text, says, tmp_path):
    path = tmp_path / "context.json"
    if text is not None:
        path.write_text(text)
    assert str(path) in refused(says, QualityCurve.load, path, CONFIG, "snapkv")


def test_save_refuses_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "context.json"
    save_curves(path, [curve()])
    before = path.read_bytes()
    refused("one model", save_curves, path, [curve("keydiff", config=OTHER)])
    refused("none", save_curves, tmp_path / "new.json", [])
    refused("cannot be written", save_curves, tmp_path / "nowhere" / "context.json", [curve()])
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    refused("No space left", save_curves, path, [curve("keydiff")])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["context.json"]


@pytest.mark.parametrize("text", [calibration_text, english_text])
def test_texts_hold_their_answers(text, bundled):
    _, tokenizer = bundled
    for seed in range(-1, -13, -1):
        sample = text(tokenizer, 256, seed)
        assert sample == text(tokenizer, 256, seed) and sample != text(tokenizer, 256, seed - 12)
        assert len(sample.questions) == len(sample.answers) > 1
        for answer in sample.answers:
            assert answer.removesuffix(".").split(" and ")[0].strip() in sample.context
        assert 190 <= len(tokenizer(sample.context).input_ids) <= 290


def test_triples_of_the_bundled_model(bundled):
    """The NLL is the model's own, and everything kept loses nothing."""
    model, tokenizer = bundled
    texts, keeps = [], (0.05, 0.5, 1.0)
    options = {"keeps": keeps, "lengths": (512,), "samples": 1, "write": calibration_text}
    triples = make_triples(model, tokenizer, "keydiff", progress=lambda: texts.append(1), **options)
    ids = tokenizer(calibration_text(tokenizer, 512, -1).context, return_tensors="pt").input_ids
    assert len(texts) == 1
    assert [one.keep for one in triples] == [math.ceil(r * ids.numel()) / ids.numel() for r in keeps]
    assert [triple.nll for triple in triples] == pytest.approx([float(model(ids, labels=ids).loss)] * 3, abs=1e-5)
    assert triples[0].quality < triples[2].quality == pytest.approx(1.0, abs=1e-3)
    assert not any("_fastkv_config" in vars(module) for module in model.modules()), "the model is stock again"


def test_quality_is_the_nll_ratio_of_the_answers_alone(bundled):
    """Recomputed one question at a time, without sharing a cache: stock in one pass, compressed in two."""
    model, tokenizer = bundled
    options = {"keeps": (0.15,), "lengths": (256,), "samples": 3, "write": calibration_text}
    triples = make_triples(model, tokenizer, "keydiff", **options)
    for index, triple in enumerate(triples):
        sample = calibration_text(tokenizer, 256, -1 - index)
        prompt = tokenizer(sample.context).input_ids
        lost = {"full": [], "compressed": []}
        for question, answer in zip(sample.questions, sample.answers):
            asked, told = tokenizer([question, answer], add_special_tokens=False).input_ids
            ids = torch.tensor([prompt + asked + told])
            split = len(prompt)
            full = model(ids).logits
            with fastkv.patched(model, "keydiff", fastkv.Budget(keep=0.15, sinks=4, recent=16)):
                rest = model(ids[:, split:], past_key_values=model(ids[:, :split]).past_key_values).logits
            for name, logits in (("full", full), ("compressed", rest)):
                last = logits[0, -len(told) - 1 : -1]
                lost[name] += torch.nn.functional.cross_entropy(last, ids[0, -len(told) :], reduction="none").tolist()
        full, compressed = (max(sum(each) / len(each), 0.05) for each in lost.values())
        assert triple.quality == pytest.approx(min(full / compressed, 1), rel=1e-3)
    assert min(triple.quality for triple in triples) < 0.5, "something was lost, so the ratio says something"


def test_make_triples_refuses(bundled):
    for changes, says in (({"keeps": (0.5, 1.5)}, "keep"), ({"policy": "nope"}, "nope")):
        raises(says, make_triples, *bundled, **{"policy": "snapkv", "lengths": (128,), "samples": 1, **changes})
    with fastkv.patched(bundled[0], "snapkv", 64):
        refused("unpatch", make_triples, *bundled, "snapkv")


def options_of(*arguments):
    return build_parser().parse_args(["calibrate", "context", "--model", MODEL, *arguments])


def test_command_writes_the_file(tmp_path, capsys, bundled):
    out = tmp_path / "results"
    run_context(options_of("--policies", "keydiff,random", "--samples", "2", "--lengths", "128", "--out", str(out)))
    said = capsys.readouterr().out
    for policy in ("keydiff", "random"):
        found = QualityCurve.load(out / "context.json", bundled[0].config, policy)
        line = next(line.split() for line in said.splitlines() if line.startswith(policy))
        assert line[2] == f"{found.alpha:.3f}" and line[4] == f"{found.beta:.3f}" and line[6] == f"{found.residual:.3f}"
        assert found.triples > 0
    text = (out / "context.json").read_text()
    (out / "context.json").write_text(text.replace(found.fingerprint, "0" * 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastkv.lab.fits.make_triples", partial(pytest.fail, "measured first"))
        refused("another model", run_context, options_of("--policies", "keydiff", "--out", str(out)))
