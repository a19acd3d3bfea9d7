"""`python -m perf.quality.verdict`: what is committed is complete and of equal bytes, and sentences are judged."""

import json
import math

import pytest
import torch

from fastkv import FastKVError
from fastkv.corrections import centroids
from perf.quality.verdict import __main__ as verdict
from perf.quality.verdict import synthetic
from perf.quality.verdict.cases import (
    ALONE,
    BUNDLED,
    CONTESTANTS,
    FASTKV,
    GEOMETRIES,
    LATER,
    LENGTHS,
    MOMENTKV,
    STEPS,
    TRAINED,
    WHOLE,
    Case,
    cases,
)
from perf.quality.verdict.judge import Results, at_most, compare, judged, load, not_lower, well_below
from perf.quality.verdict.report import report
from perf.quality.verdict.trained import check_held, sketch_share
from tools.second_model import untrained

FILE = verdict.OUT / "verdict.json"


class TestWhatIsCommitted:
    def test_every_contestant_length_and_geometry_has_five_seeds(self):
        results = load(FILE)
        assert results.settings["seeds"] >= 5
        for geometry in GEOMETRIES:
            for tokens in LENGTHS:
                for contestant in CONTESTANTS:
                    row = results.rows[geometry, tokens, contestant.name]
                    reads = (WHOLE, LATER) if geometry in TRAINED else (STEPS,)
                    measures = ("error", "kl", "right") if geometry in TRAINED else ("error",)
                    for measure in measures:
                        assert tuple(row[measure]) == reads
                        for numbers in row[measure].values():
                            assert len(numbers) == results.settings["seeds"] and all(map(math.isfinite, numbers))

    def test_bytes_are_those_of_momentkv(self):
        rows = [row for row in json.loads(FILE.read_text())["rows"] if row["case"]["tokens"]]
        for row in rows:
            held, case = row["bytes"], row["case"]
            assert held["bound"] - held["token"] < held["stored"] <= held["bound"]
            if case["name"] == MOMENTKV:
                assert held["stored"] == held["bound"] and row["kept"] == case["tokens"]
        for geometry in GEOMETRIES:
            for tokens in LENGTHS:
                same = [row for row in rows if (row["case"]["geometry"], row["case"]["tokens"]) == (geometry, tokens)]
                assert len({row["bytes"]["bound"] for row in same}) == 1

    def test_the_report_is_of_the_results(self):
        text = FILE.with_name("README.md").read_text()
        assert text == report(load(FILE)) and FILE.with_name("error.png").stat().st_size > 10_000
        assert "measured outside the repository" in text.replace("\n", " ").lower()

    def test_models_are_named_by_their_weights(self):
        for version in load(FILE).versions:
            assert len(version["second model"]) == 64 and int(version["second model"], 16)


def made_up(errors, right=None, seeds=5, geometry=BUNDLED):
    """Results of one model: name -> error of every seed, the same for all L and ways of reading, or by L."""
    rows = {}
    for name, number in errors.items():
        for tokens in LENGTHS:
            one = number[tokens] if isinstance(number, dict) else number
            answers = [(right or {}).get(name, 0.5)] * seeds
            rows[geometry, tokens, name] = {
                "error": {read: [one] * seeds for read in (WHOLE, LATER)},
                "right": {read: answers for read in (WHOLE, LATER)},
            }
    return Results({"seeds": seeds}, [], rows, len(rows))


class TestJudgement:
    def test_at_most(self):
        found = made_up({MOMENTKV: 0.5, FASTKV: {32: 0.4, 64: 0.5, 128: 0.5, 256: 0.52}})
        cells = compare(found, "error", FASTKV, (MOMENTKV,))
        assert len(cells) == 8 and cells[0].above == pytest.approx(-0.2)
        missed = at_most("", cells, 0.0)
        assert not missed.met and {one.place.tokens for one in missed.missed} == {256} and len(missed.missed) == 2
        assert "+4.0 % against MomentKV" in missed.note
        assert at_most("", cells, 0.05).met
        assert not at_most("", [], 0.05).met

    def test_the_better_rival_counts(self):
        found = made_up({ALONE[0]: 0.4, ALONE[1]: 0.3, MOMENTKV: 1.0, FASTKV: 0.35})
        best = compare(found, "error", FASTKV, ALONE)
        assert {one.rival for one in best} == {ALONE[1]} and not at_most("", best, 0.02).met
        assert at_most("", compare(found, "error", FASTKV, ALONE[:1]), 0.02).met
        answers = made_up({MOMENTKV: 1.0, **dict.fromkeys((*ALONE, FASTKV), 1.0)}, {ALONE[0]: 0.7, ALONE[1]: 0.6})
        assert {one.rival for one in compare(answers, "right", FASTKV, ALONE)} == {ALONE[0]}

    @pytest.mark.parametrize("low, met", [((32, 64), True), ((256,), False), (LENGTHS, True)])
    def test_well_below_for_two_budgets(self, low, met):
        errors = {tokens: 0.45 if tokens in low else 0.47 for tokens in LENGTHS}
        cells = compare(made_up({MOMENTKV: 0.5, FASTKV: errors}), "error", FASTKV, (MOMENTKV,))
        assert well_below("", cells, 0.08, 2).met is met
        elsewhere = made_up({MOMENTKV: 0.5, FASTKV: errors}, geometry="second model")
        assert not well_below("", compare(elsewhere, "error", FASTKV, (MOMENTKV,)), 0.08, 2).met

    def test_answers_may_be_lower_by_a_standard_error(self):
        found = made_up({MOMENTKV: 1.0, FASTKV: 1.0})
        for tokens in LENGTHS:
            found.rows[BUNDLED, tokens, FASTKV]["right"][WHOLE] = [0.5, 0.5, 0.5, 0.5, 0.25]  # -0.05 +- 0.05
        cells = compare(found, "right", FASTKV, (MOMENTKV,))
        assert not_lower("", cells).met
        found.rows[BUNDLED, 32, FASTKV]["right"][LATER] = [0.4] * 5
        judgement = not_lower("", compare(found, "right", FASTKV, (MOMENTKV,)))
        assert [(one.place.read, one.place.tokens) for one in judgement.missed] == [(LATER, 32)]
        assert not judgement.met and "-10 ± 0 points" in judgement.note

    def test_all_sentences(self):
        names = (*ALONE, MOMENTKV)
        good = judged(made_up(dict.fromkeys(names, 0.5) | {FASTKV: 0.4}))
        bad = judged(made_up(dict.fromkeys(names, 0.5) | {FASTKV: 0.6}, {FASTKV: 0.1}))
        assert len(good) == len(bad) == 7
        assert all(one.met for one in good) and not any(one.met for one in bad)
        assert len(judged(made_up(dict.fromkeys(names, 0.5)), MOMENTKV)) == 5


class TestCommand:
    def test_help(self, capsys):
        with pytest.raises(SystemExit) as end:
            verdict.main(["--help"])
        assert end.value.code == 0 and "--report" in capsys.readouterr().out

    def test_nothing_to_report(self, tmp_path, capsys):
        assert verdict.main(["--report", "--out", str(tmp_path)]) == 2
        assert "is missing; measure it" in capsys.readouterr().err

    def test_it_goes_on_where_it_stopped(self, tmp_path, monkeypatch):
        monkeypatch.setattr(verdict, "write_report", lambda path: None)
        monkeypatch.setattr(synthetic.SyntheticBench, "__init__", lambda self, *arguments: None)
        monkeypatch.setattr(synthetic.SyntheticBench, "run", lambda self, case: {"error": {STEPS: [0.5, 0.5]}})
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        words = ["--out", str(tmp_path), "--second", str(tmp_path), "--seeds", "2", "--parts", "RoPE"]
        rows = lambda: json.loads((tmp_path / "verdict.json").read_text())["rows"]  # noqa: E731
        assert verdict.main([*words, "--only", "| 32 |"]) == 3
        before = rows()
        assert verdict.main(words) == 3, "other geometries are left"
        assert 0 < len(before) < len(rows()) and rows()[: len(before)] == before
        assert verdict.main([*words, "--seeds", "3"]) == 2
        (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert verdict.main([*words, "--only", "| 32 | fastkv"]) == 3 and len(rows()) == 1


class TestMeasuring:
    def test_synthetic_keys(self):
        q, k, v = synthetic.family("massive + RoPE", 3)
        assert torch.equal(k, synthetic.family("massive + RoPE", 3)[1])
        assert q.shape == (8, 1008, 64) and k.shape == v.shape == (4, 1008, 64)
        plain = synthetic.family("massive channels", 3)[1]
        torch.testing.assert_close(k.norm(dim=-1), plain.norm(dim=-1))  # a rotation
        powers = plain.mean(1).abs()
        assert (powers.topk(2).indices.sort().values == torch.tensor([30, 61])).all()
        logits = 64**-0.5 * q[:, -48:] @ k.repeat_interleave(2, 0).mT
        assert float(logits.std(-1).mean()) == pytest.approx(synthetic.SPREAD, rel=1e-4)

    def test_everything_kept_has_no_error(self, monkeypatch):
        monkeypatch.setattr(synthetic, "PROMPT", 200)
        bench = synthetic.SyntheticBench("isotropic", [1, 2])
        row = bench.run(Case("isotropic", 260, FASTKV, "fastkv", "auto", None))
        assert max(row["error"][STEPS]) < 1e-5 and row["kept"] > 260

    def test_other_bytes_are_refused(self):
        with pytest.raises(FastKVError, match="must hold more than 90 and at most 100 bytes, got 90"):
            check_held(cases()[5], {"bound": 100, "token": 10, "stored": 90})

    def test_other_shares_are_taken_back(self):
        with sketch_share(4):
            assert centroids.SHARE == 4
        assert centroids.SHARE == 16

    def test_the_second_model_is_another_geometry(self):
        model = untrained(0)
        attention = model.model.layers[1].self_attn
        assert model.config.head_dim == 32 and float(attention.q_norm.weight[0]) == pytest.approx(2.4)
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), untrained(0).state_dict().values()))
