"""`python -m perf.quality`: every policy measured, equal bytes, honest statistics, pages that equal the results."""

import dataclasses
import json
import math
import re
import shutil
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastkv import FastKVError, policies
from fastkv.corrections import vector
from perf import engine
from perf.engine import OtherSettings
from perf.quality import __main__ as command
from perf.quality import cases, page, report, results
from perf.quality.ablations import section
from perf.quality.measure import Bench, Settings, approximated
from perf.quality.papers import ABLATIONS
from perf.quality.parts import parts as all_parts

SMALL = Settings(seeds=2, texts=2, context=128, steps=24)
TASKS = ("facts", "pairs", "hops")


def case(name="keydiff", tokens=48, **rest):
    return cases.Case(**{"name": name, "policy": name, "tokens": tokens, "read": "context", **rest})


@pytest.fixture(scope="module")
def bench():
    return Bench(SMALL)


def save(file, path):
    path.write_text(json.dumps(file))


def written(folder, right, tokens=128, part="tasks_context", policy_names=None):
    """A file of made-up rows: name -> right answers by seed, the same for every task."""
    rows = []
    for name, seeds in right.items():
        one = case(name, tokens, policy="full" if name == "full" else "random" if name == "random" else "keydiff")
        held = {"stored": 1000, "bound": 1000, "token": 16, "total": 1100}
        by_task = {task: list(seeds) for task in TASKS}
        rows.append({"case": one.record(), "right": by_task, "error": by_task, "kept": tokens, "bytes": held})
    settings = {"seeds": len(seeds), "texts": 1, "context": 1024, "steps": 48}
    file = {"settings": settings, "versions": [{"model": "m"}], "planned": [row["case"] for row in rows], "rows": rows}
    save(file, folder / f"{part}.json")
    return file


class TestCases:
    def test_every_registered_policy_at_every_budget(self):
        parts = all_parts()
        for part in ("tasks_context", "tasks_whole", "tasks_256", "fidelity"):
            expected = {
                (name, tokens)
                for name in policies.names()
                for tokens in (128, 256, 512)
                if part != "tasks_256" or not policies.get(name).rereads
            }
            assert {(one.policy, one.tokens) for one in parts[part]} == expected

    def test_the_language_model_has_all_but_a_pattern_of_heads(self):
        assert {one.policy for one in all_parts()["language"]} == {*policies.names()} - {"duoattention"}
        assert {(one.read, one.tokens) for one in all_parts()["language"]} == {
            ("whole", tokens) for tokens in (128, 256, 512)
        }

    def test_a_policy_that_lands_later_is_picked_up(self, monkeypatch):
        @dataclasses.dataclass(frozen=True)
        class Newcomer(policies.KeyDiff):
            name: ClassVar[str] = "newcomer"

        monkeypatch.setattr(policies, "ALL", (*policies.ALL, Newcomer))
        parts = all_parts()
        assert all(
            sum(one.policy == "newcomer" for one in parts[part]) == 3
            for part in ("tasks_context", "tasks_whole", "tasks_256", "fidelity")
        )

    def test_no_case_twice_and_every_policy_and_option_exists(self):
        for part, some in all_parts().items():
            assert max(Counter(json.dumps(one.record()) for one in some).values()) == 1, part
            assert len({one.id for one in some}) == len(some)
            for one in some:
                if one.policy != "full":
                    policies.get(one.policy, **one.hyper)

    @pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda one: f"{one.title}, {one.read}")
    def test_ablations_name_measured_cases_and_complete_rows(self, ablation):
        measured = {one.name for one in all_parts()[ablation.part] if ablation.read in (None, one.read)}
        assert set(ablation.rows) <= measured
        assert set(ablation.numbers) <= set(ablation.rows)
        assert ablation.method in ablation.rows
        assert all(len(numbers) == len(ablation.columns) for numbers in ablation.numbers.values())
        assert re.search(r"arXiv:\d{4}\.\d{5}", ablation.source)

    def test_every_ablation_case_stands_in_a_table(self):
        for part in {one.part for one in ABLATIONS}:
            shown = {name for one in ABLATIONS if one.part == part for name in one.rows}
            assert {one.name for one in all_parts()[part]} == shown


class TestStatistics:
    @given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
    def test_mean_and_standard_error(self, values):
        mean = results.Mean.of(values)
        assert mean.value == pytest.approx(np.mean(values), abs=1e-12)
        assert mean.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)

    def test_one_seed_has_no_standard_error(self):
        assert results.Mean.of([0.25]) == results.Mean(0.25, None)
        assert results.Mean.of([0.25]).percent == "25"
        assert results.Mean.of([0.0, 1.0]).percent == "50 ± 50"

    @pytest.mark.parametrize("freedom", range(1, 10))
    def test_quantiles_are_students(self, freedom):
        scale = math.gamma((freedom + 1) / 2) / (math.gamma(freedom / 2) * math.sqrt(freedom * math.pi))
        x = np.linspace(0, results.STUDENT[freedom - 1], 200_001)
        inside = 2 * np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
        assert inside == pytest.approx(0.95, abs=5e-4)

    def test_on_par_is_paired(self):
        best, worse = [0.9, 0.5, 0.7, 0.3, 0.8], [0.8, 0.4, 0.6, 0.2, 0.69]
        assert not results.on_par(best, worse), "always a tenth better, however much the texts differ"
        assert results.on_par(best, [0.3, 0.9, 0.5, 0.7, 0.6])
        assert results.on_par([1.0] * 5, [1.0] * 5)
        assert not results.on_par([1.0] * 5, [0.9] * 5)

    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9))
    def test_correlation_of_ranks(self, pairs):
        def ranks(values):
            return [np.mean([place for place, v in enumerate(sorted(values)) if v == value]) for value in values]

        one, other = (ranks(side) for side in zip(*pairs))
        found = results.correlation(*(list(side) for side in zip(*pairs)))
        if np.std(one) == 0 or np.std(other) == 0:
            assert found is None
        else:
            assert found == pytest.approx(np.corrcoef(one, other)[0, 1], abs=1e-9)


class TestEqualBytes:
    def rows(self, tmp_path):
        return written(tmp_path, {"full": [1.0, 1.0], "keydiff": [1.0, 0.5], "snapkv": [0.5, 0.5]})["rows"]

    def test_equal_bytes_pass(self, tmp_path):
        results.check_bytes(self.rows(tmp_path))

    @pytest.mark.parametrize(("name", "number"), [("stored", 1001), ("stored", 984), ("bound", 1016)])
    def test_others_are_refused(self, tmp_path, name, number):
        file = json.loads((self.rows(tmp_path) and tmp_path / "tasks_context.json").read_text())
        file["rows"][2]["bytes"][name] = number
        save(file, tmp_path / "tasks_context.json")
        with pytest.raises(FastKVError, match="snapkv"):
            results.load(tmp_path)

    def test_settings_do_not_mix(self, tmp_path):
        written(tmp_path, {"keydiff": [1.0, 0.5]})
        written(tmp_path, {"keydiff": [1.0, 0.5, 0.0]}, part="tasks_whole")
        with pytest.raises(FastKVError, match="mixes results"):
            results.load(tmp_path)


class TestMeasuring:
    def test_seeds_are_groups_of_the_same_texts(self, bench):
        alone = Bench(dataclasses.replace(SMALL, seeds=4, texts=1)).run("tasks_context", case())
        together = bench.run("tasks_context", case())
        for task in TASKS:
            assert together["right"][task] == [np.mean(alone["right"][task][i : i + 2]) for i in (0, 2)]
            pairs = [np.mean(alone["error"][task][i : i + 2]) for i in (0, 2)]
            assert together["error"][task] == pytest.approx(pairs, rel=0.05)  # bf16 kernels depend on the batch

    def test_room_for_all_tokens_is_the_full_cache(self, bench):
        full, row = bench.run("full", case("full", 128, read="whole")), bench.run("tasks_whole", case("snapkv", 160))
        assert row["right"] == full["right"]
        assert all(seed == 0 for task in full["error"].values() for seed in task)
        assert all(seed < 0.02 for task in row["error"].values() for seed in task)

    def test_bytes_are_those_of_the_budget(self, bench):
        some = case(tokens=64), case("momentkv", 64), case("h2o", 64)
        rows = [{"case": one.record(), **bench.run("tasks_context", one)} for one in some]
        results.check_bytes(rows)
        assert len({row["bytes"]["bound"] for row in rows}) == 1
        assert rows[1]["kept"] < rows[2]["kept"] < rows[0]["kept"] == 64

    def test_fidelity_has_a_number_for_each_seed(self, bench):
        row = bench.run("fidelity", case("momentkv", 64))
        assert set(row["by_seed"]) == {"error", "own_error", "kl", "agreement"}
        assert all(len(seeds) == SMALL.seeds for seeds in row["by_seed"].values())

    @pytest.mark.parametrize(
        ("one", "reason"), [(case("kvzip", read="64"), "kvzip"), (case("momentkv", 48), "sinks and recent")]
    )
    def test_a_refusal_is_a_row_with_its_reason(self, bench, one, reason):
        row = bench.run("tasks_256", one)
        assert reason in row["refused"] and "right" not in row

    def test_share_without_values(self, bench):
        stock = vector.key_only
        rows = {
            share: bench.run("vector", case(tokens=64, correction="vector", keys_only=share))
            for share in (None, 0.25, 0.5)
        }
        assert vector.key_only is stock
        assert rows[0.5]["right"] == rows[None]["right"] and rows[0.5]["error"] == rows[None]["error"]
        assert 64 < rows[0.25]["kept"] < rows[0.5]["kept"]
        with approximated(0.25):
            assert vector.key_only(64, 20, None) == 32
            assert vector.key_only(24, 20, None) == 8, "protected tokens keep their values"

    def test_an_interrupted_command_goes_on(self, tmp_path, monkeypatch):
        some, started = [case(), case("knorm")], []

        def run(self, part, one):
            started.append(one.name)
            return {"right": {}, "bytes": {"total": 1}}

        monkeypatch.setattr(Bench, "__init__", lambda self, settings: None)
        monkeypatch.setattr(Bench, "run", run)

        def measure(minutes, some=some, settings=SMALL):
            options = command.arguments(["--minutes", str(minutes), "--out", str(tmp_path)])
            return command.measure_parts({"tasks_context": some}, settings, options)

        assert measure(10, some[:1]) == engine.COMPLETE
        assert measure(0) == engine.LEFT, "the time was over"
        assert measure(10) == measure(10) == engine.COMPLETE
        file = json.loads((tmp_path / "tasks_context.json").read_text())
        assert started == [row["case"]["name"] for row in file["rows"]] == ["keydiff", "knorm"]
        with pytest.raises(OtherSettings, match="other settings"):
            measure(10, settings=dataclasses.replace(SMALL, texts=1))
        assert results.versions_of(file)[0].keys() >= {"fastkv", "torch", "transformers", "model"}

    def test_a_policy_does_not_restart_the_others(self):
        files = {name: command.job("tasks_context", case(name), None).source for name in ("keydiff", "knorm", "fastkv")}
        assert len(set(files.values())) == 3


class TestReport:
    RIGHT: ClassVar = {
        "full": [1.0, 1.0, 1.0],
        "keydiff": [1.0, 1.0, 0.9],
        "tova": [0.1, 0.2, 0.3],
        "random": [0.1, 0.3, 0.2],
    }

    def loaded(self, tmp_path):
        rows = dict(self.RIGHT)
        written(tmp_path, {"full": rows.pop("full")}, 1024, "full")
        written(tmp_path, rows)
        return results.load(tmp_path)

    def test_tables_hold_the_means(self, tmp_path):
        text = report.report(self.loaded(tmp_path))
        assert re.search(r"\| keydiff \| 128 \| 1 \| 97 ± 3 .* \| 97 ± 3 \| 0.97 ± 0.03 \|", text)
        assert re.search(r"\| tova \| .* \| 20 ± 6 \|", text)

    def test_what_was_not_measured_is_absent_and_listed(self, tmp_path):
        folder = tmp_path / "all"
        folder.mkdir()
        self.loaded(folder)
        file = json.loads((folder / "tasks_context.json").read_text())
        gone = file["rows"].pop(0)
        file["rows"][0] = {"case": file["rows"][0]["case"], "refused": "no room"}
        save(file, folder / "tasks_context.json")
        text = report.report(results.load(folder))
        assert "- tasks_context: 2 of 3 caches; `python -m perf.quality --parts tasks_context`" in text
        assert "tova, 12.5 %, refused: no room" in text
        assert f"| {gone['case']['name']} |" not in text and "| tova |" not in text
        assert "Fidelity" not in text and "Ablations" not in text

    def test_separation(self, tmp_path):
        line = report.separation_table(self.loaded(tmp_path)).splitlines()[-1]
        assert "| 1 of 3: keydiff | tova |" in line

    def test_an_incomplete_budget_recommends_nothing(self, tmp_path):
        self.loaded(tmp_path)
        file = json.loads((tmp_path / "tasks_context.json").read_text())
        file["rows"] = [row for row in file["rows"] if row["case"]["name"] != "tova"]
        save(file, tmp_path / "tasks_context.json")
        loaded = results.load(tmp_path)
        assert not loaded.complete("tasks_context", 128)
        assert page.choices(loaded) == "" and "12.5" not in report.separation_table(loaded)
        assert "keydiff" in report.report(loaded)

    def test_twins(self, tmp_path):
        assert report.twins(self.loaded(tmp_path)) == ""
        written(tmp_path, {"keydiff": [1.0, 0.5], "snapkv": [1.0, 0.5], "tova": [1.0, 0.0]})
        (tmp_path / "full.json").unlink()
        assert "one choice of tokens: keydiff and snapkv." in report.twins(results.load(tmp_path))

    def test_correction_takes_one_choice_of_tokens(self, tmp_path):
        right = {"SnapKV": [0.2, 0.4], "both (chunk 4)": [0.5, 0.5], "correction only": [0.0, 0.2]}
        written(tmp_path, right, part="momentkv")
        lines = page.correction(results.load(tmp_path)).splitlines()[2:]
        assert [line.split(" | ")[2:] for line in lines] == [
            ["none", "128", "0.30 ± 0.10", "30 ± 10 |"],
            ["moments", "128", "0.10 ± 0.10", "10 ± 10 |"],
        ]

    def test_choices_need_no_more_than_enough(self, tmp_path):
        text = page.choices(self.loaded(tmp_path))
        assert "keeping up with the full cache at 12.5 % of the tokens: `keydiff` (97 ± 3 %)." in text
        assert "tova" not in text
        assert page.smallest(results.load(tmp_path), "context", "tova") == "> 12.5 % (20 ± 6)"

    def test_an_ablation_says_who_is_first_on_both_sides(self, tmp_path):
        ablation = next(one for one in ABLATIONS if one.title == "KeyDiff: distance")
        right = {"mean": [0.2, 0.2, 0.3], "dot product": [0.1, 0.0, 0.1], "Euclidean": [1.0, 0.9, 1.0]}
        written(tmp_path, right, part="keydiff")
        text = section(results.load(tmp_path), ablation)
        assert "Paper (2K): mean is first and Euclidean last, 21.4 points apart" in text
        assert "here (12.5 %): Euclidean is first and dot product last, 90 ± 0 points apart, beyond chance" in text
        assert "rank correlation -0.5 over 3 rows" in text
        assert "| **mean** | 35.09 | 40.28 | 41.88 | 42.4 | 23 ± 3 |" in text

    def test_unknown_markers_are_refused(self, tmp_path):
        with pytest.raises(FastKVError, match="unknown marker 'luck'"):
            page.renewed("<!-- from results: luck -->\n<!-- end -->", self.loaded(tmp_path))


class TestCommitted:
    """What stands in the repository is what its result files say."""

    def test_tables(self):
        assert (command.OUT / "README.md").read_text() == report.report(results.load(command.OUT))

    def test_page(self):
        text = page.PAGE.read_text()
        assert page.renewed(text, results.load(command.OUT)) == text
        assert {match[2] for match in page.MARKED.finditer(text)} == set(page.SECTIONS)

    def test_a_number_of_the_page_cannot_be_changed(self):
        text = page.PAGE.read_text()
        changed = text.replace(" ± ", " ± 1", 1)
        assert changed != text and page.renewed(changed, results.load(command.OUT)) == text

    def test_no_result_is_typed_by_hand(self):
        by_hand = page.MARKED.sub("", page.PAGE.read_text())
        assert not re.search(r"\d\s*(%|points|±)|\b0\.\d", by_hand)

    def test_the_command_writes_them(self, tmp_path):
        folder, text = tmp_path / "results", tmp_path / "page.md"
        shutil.copytree(command.OUT, folder)
        shutil.copy(page.PAGE, text)
        for stale in (folder / "README.md", folder / "tasks.png"):
            stale.unlink()
        assert command.main(["--report", "--out", str(folder), "--page", str(text)]) == 0
        assert (folder / "README.md").read_text() == (command.OUT / "README.md").read_text()
        assert (folder / "tasks.png").stat().st_size > 0
        assert text.read_text() == page.PAGE.read_text()
