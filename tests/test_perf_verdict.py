"""`python -m perf.quality.verdict`: what is committed is complete and of equal bytes, and sentences are judged."""

import json
import math

import pytest
import torch

from fastkv import FastKVError
from perf.quality.verdict import __main__ as verdict
from perf.quality.verdict import synthetic
from perf.quality.verdict.cases import (
    ALONE,
    ANSWERING,
    BUNDLED,
    FASTKV,
    GEOMETRIES,
    LANGUAGE,
    LATER,
    LENGTHS,
    MOMENTKV,
    PROSE,
    RIVALS,
    STEPS,
    WHOLE,
    Case,
    cases,
    contestants,
    lengths,
)
from perf.quality.verdict.judge import (
    BEYOND,
    Results,
    at_most,
    compare,
    halved,
    judged,
    judged_twice,
    load,
    not_longer,
    not_lower,
)
from perf.quality.verdict.language import LanguageBench
from perf.quality.verdict.report import report
from perf.quality.verdict.trained import Settings, check_held
from tools import language_model
from tools.language_model import stretches
from tools.second_model import untrained

FILE = verdict.OUT / "verdict.json"


class TestWhatIsCommitted:
    def test_every_contestant_and_length_of_a_geometry_has_six_seeds(self):
        results = load(FILE)
        assert results.settings["seeds"] >= 6
        assert len(results.rows) == results.planned and "have not been measured yet" not in report(results)
        for geometry in GEOMETRIES:
            for tokens in lengths(geometry):
                for contestant in contestants(geometry):
                    row = results.rows[geometry, tokens, contestant.name]
                    measures, reads = ("error",), (STEPS,)
                    if geometry in ANSWERING:
                        measures, reads = ("error", "kl", "right"), (WHOLE, LATER)
                    elif geometry == LANGUAGE:
                        measures, reads = ("error", "kl", "excess"), (PROSE,)
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
            for tokens in lengths(geometry):
                same = [row for row in rows if (row["case"]["geometry"], row["case"]["tokens"]) == (geometry, tokens)]
                assert len({row["bytes"]["bound"] for row in same}) == 1

    def test_the_report_is_of_the_results(self):
        text = FILE.with_name("README.md").read_text()
        assert text == report(load(FILE)) and FILE.with_name("kl.png").stat().st_size > 10_000
        assert "measured outside the repository" in text.replace("\n", " ").lower()

    def test_models_are_named_by_their_weights(self):
        for version in load(FILE).versions:
            for name in ("model", "second model", "language model", "held-out text"):
                assert len(version[name]) == 16 and int(version[name], 16)


def made_up(numbers, right=None, seeds=5, geometry=BUNDLED):
    """Results of one model: name -> error and KL of every seed, the same for all L and ways of reading, or by L."""
    rows, reads = {}, (PROSE,) if geometry == LANGUAGE else (WHOLE, LATER)
    for name, number in numbers.items():
        for tokens in lengths(geometry):
            one = number[tokens] if isinstance(number, dict) else number
            answers = [(right or {}).get(name, 0.5)] * seeds
            rows[geometry, tokens, name] = {
                "error": {read: [one] * seeds for read in reads},
                "kl": {read: [one] * seeds for read in reads},
                "right": {read: answers for read in (WHOLE, LATER)},
                "prompt_seconds": one,
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

    def test_missed_cells_that_chance_explains_are_told(self):
        found = made_up({MOMENTKV: 0.5, FASTKV: 0.6})
        found.rows[BUNDLED, 32, FASTKV]["error"][WHOLE] = [0.5, 0.5, 0.5, 0.5, 1.5]  # 0.2 +- 0.2
        note = at_most("", compare(found, "error", FASTKV, (MOMENTKV,)), 0.05).note
        assert f"7 of the 8 missed cells are above the rival by more than {BEYOND} standard errors" in note

    @pytest.mark.parametrize("low, met", [((32, 512), True), ((256,), False), (lengths(LANGUAGE), True)])
    def test_half_for_two_budgets(self, low, met):
        numbers = {tokens: 0.25 if tokens in low else 0.26 for tokens in lengths(LANGUAGE)}
        found = made_up({MOMENTKV: 1.0, FASTKV: 0.5, "again": numbers}, geometry=LANGUAGE)
        kl, time = judged_twice(found, "again")
        assert kl.met is met and kl.total == 5 and len(kl.missed) == 5 - len(low)
        assert time.met and not_longer("", found, "nobody").note == halved("", []).note == "not measured"

    def test_time_of_a_second_reading(self):
        found = made_up({MOMENTKV: 1.0, FASTKV: 1.0, "again": 2.59, "late": 2.61}, geometry=LANGUAGE)
        again, late = not_longer("", found, "again"), not_longer("", found, "late")
        assert again.met and again.note == "2.59 x" and not late.met

    def test_answers_may_be_lower_by_two_standard_errors(self):
        found = made_up({MOMENTKV: 1.0, FASTKV: 1.0})
        for tokens in LENGTHS:
            found.rows[BUNDLED, tokens, FASTKV]["right"][WHOLE] = [0.5, 0.5, 0.5, 0.5, 0.25]  # -0.05 +- 0.05
        cells = compare(found, "right", FASTKV, (MOMENTKV,))
        assert not_lower("", cells).met
        found.rows[BUNDLED, 32, FASTKV]["right"][LATER] = [0.4, 0.4, 0.4, 0.4, 0.3]  # -0.12 +- 0.02
        judgement = not_lower("", compare(found, "right", FASTKV, (MOMENTKV,)))
        assert [(one.place.read, one.place.tokens) for one in judgement.missed] == [(LATER, 32)]
        assert not judgement.met and "-12 ± 2 points" in judgement.note

    def test_all_sentences(self):
        good = judged(made_up(dict.fromkeys(RIVALS, 0.5) | {FASTKV: 0.4}))
        bad = judged(made_up(dict.fromkeys(RIVALS, 0.5) | {FASTKV: 0.6}, {FASTKV: 0.1}))
        assert len(good) == len(bad) == 4
        assert all(one.met for one in good) and not any(one.met for one in bad)


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
        words = [
            "--out",
            str(tmp_path),
            "--second",
            str(tmp_path),
            "--language",
            str(tmp_path),
            "--seeds",
            "2",
            "--parts",
            "RoPE",
        ]
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
        row = bench.run(Case("isotropic", 260, FASTKV, "fastkv", "auto"))
        assert max(row["error"][STEPS]) < 0.01 and row["kept"] > 260

    def test_other_bytes_are_refused(self):
        with pytest.raises(FastKVError, match="must hold more than 90 and at most 100 bytes, got 90"):
            check_held(cases()[5], {"bound": 100, "token": 10, "stored": 90})

    def test_the_second_model_is_another_geometry(self):
        model = untrained(0)
        attention = model.model.layers[1].self_attn
        assert model.config.head_dim == 32 and float(attention.q_norm.weight[0]) == pytest.approx(2.4)
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), untrained(0).state_dict().values()))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder with an untrained language model and a tokenizer of a few files."""
    folder = tmp_path_factory.mktemp("language_model")
    language_model.untrained(0).bfloat16().save_pretrained(folder)
    language_model.tokenizer_of(language_model.corpus()[1][:4]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bench(stand_in):
    return LanguageBench(stand_in, Settings(seeds=2, stretches=1, context=160, continued=6))


class TestLanguage:
    @pytest.mark.parametrize("one", contestants(LANGUAGE), ids=lambda one: one.name)
    def test_every_contestant_is_measured(self, bench, one):
        row = bench.run(Case(LANGUAGE, 32, one.name, one.policy, one.correction))
        for measure in ("error", "kl", "excess"):
            assert len(row[measure][PROSE]) == 2 and all(map(math.isfinite, row[measure][PROSE]))
        assert min(row["kl"][PROSE]) > 0 and min(row["error"][PROSE]) > 0 and row["prompt_seconds"] > 0
        held = row["bytes"]
        assert held["bound"] - held["token"] < held["stored"] <= held["bound"] and row["kept"] >= 32

    def test_a_cache_that_holds_all_is_the_full_one(self, bench):
        row = bench.run(Case(LANGUAGE, 200, "SnapKV alone", "snapkv", "none"))
        assert max(row["kl"][PROSE]) < 1e-3 and max(map(abs, row["excess"][PROSE])) < 0.02
        assert max(row["error"][PROSE]) < 0.02, "but for rounding to bf16"

    def test_perplexity_and_kl_are_of_the_fed_tokens(self, bench):
        case = Case(LANGUAGE, 32, FASTKV, "fastkv", "auto")
        row = bench.run(case)
        whole = bench.model(bench.texts).logits[:, -7:-1].double().log_softmax(-1)
        fed = whole.gather(-1, bench.texts[:, -6:, None])[..., 0]
        torch.testing.assert_close(bench.full.nll, -fed[:, 1:], atol=0.05, rtol=0)
        assert row["excess"][PROSE] != row["kl"][PROSE]

    def test_stretches_do_not_overlap(self):
        drawn = stretches(torch.arange(1000), 9, 100, 5)
        assert len(set(drawn.flatten().tolist())) == 900
        assert torch.equal(drawn, stretches(torch.arange(1000), 9, 100, 5))
        assert not torch.equal(drawn, stretches(torch.arange(1000), 9, 100, 6))

    def test_only_text_that_is_held_out(self):
        trained_on, held_out = map(set, language_model.corpus())
        assert held_out and max(map(len, held_out & trained_on), default=0) < 200, "empty packages and the like"
