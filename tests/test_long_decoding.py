"""`python -m perf.long_decoding`: what is fed, what is right, and what the committed results hold."""

import json
from dataclasses import replace

import pytest
import torch

from perf import long_decoding
from perf.long_decoding import CHAINS, FULL, LANGUAGE, WORDS, Bench, Settings, Stream, cases, decode, report

from .toy import VOCABULARY, load

SMALL = Settings(rows=2, tokens=512, chains=2, bins=2, budget=96, prose=160, prompt=32, kept=48)


class TestStream:
    def test_a_turn_is_as_long_as_said_and_in_the_models_words(self):
        stream = Stream(5, SMALL)
        for step in range(4):
            words = stream.fed(step).split()
            assert len(words) == SMALL.turn - WORDS and set(words) <= set(VOCABULARY)
            stream.right(step, ["Mara", *["the"] * (WORDS - 1)])
        assert len(stream.filled([], 127).split()) == 127

    def test_the_same_seed_gives_the_same_words(self):
        assert Stream(5, SMALL).fed(0) == Stream(5, SMALL).fed(0) != Stream(6, SMALL).fed(0)

    def test_a_box_is_stated_once_and_the_next_step_is_about_what_was_written(self):
        stream = Stream(5, SMALL)
        first = stream.fed(0)
        assert f"the box of {stream.owners[0]} holds {stream.values[0]} ." in first
        assert f"the friend of {stream.friends[0]} is {stream.owners[0]} ." in first
        answer = f"{stream.owners[0]} and the box of {stream.owners[0]} holds {stream.values[0]} .".split()
        assert stream.right(0, answer) and not stream.right(0, ["Nobody", *answer[1:]])
        stream.fed(1)
        again = stream.fed(2)
        assert f"the friend of {stream.friends[2]} is Nobody ." in again and stream.values[0] not in again

    def test_statements_stand_between_sentences(self):
        text = f"{Stream(5, SMALL).filled(['the box of Mara holds 1 2 3 .'], 60)} "
        before, after = text.split("the box of Mara holds 1 2 3 . ")
        assert (before == "" or before.endswith(". ")) and (after == "" or after.endswith(". "))


class TestDecoding:
    def test_the_full_cache_answers_and_a_cache_of_recent_tokens_forgets(self):
        bench = Bench(SMALL, None)
        full, recent = bench.run(CHAINS, FULL), bench.run(CHAINS, "streaming")
        assert full["tokens"] == recent["tokens"] == [384, 640]
        assert [len(part) for part in full["right"]] == [2, 2]
        mean = lambda row: torch.tensor(row["right"]).mean(1).tolist()  # noqa: E731
        assert min(mean(full)) >= 0.5 and mean(recent)[1] < mean(full)[1]
        assert full["nbytes"][1] > 1.5 * full["nbytes"][0] and recent["nbytes"][0] == recent["nbytes"][1]

    def test_the_models_own_answers_stay_in_its_context(self):
        model, tokenizer = load()
        fed = []
        hook = model.register_forward_pre_hook(lambda _, args: fed.append(args[0]))
        with torch.no_grad():
            decode(model, tokenizer, SMALL)
        hook.remove()
        words = torch.cat(fed, 1)
        assert words.shape == (2, SMALL.turn + SMALL.tokens)
        answers = [words[:, SMALL.turn * (turn + 2) - WORDS :][:, :WORDS] for turn in range(4)]
        text = tokenizer.decode(answers[0][0])
        assert text.split()[1:5] == ["and", "the", "box", "of"]

    def test_prose_differs_only_once_something_has_left(self):
        bench = Bench(replace(SMALL, bins=4), long_decoding.language_model.FOLDER)
        row = bench.run(LANGUAGE, "streaming")
        assert row["tokens"] == [64, 96, 128, 160]
        assert max(row["kl"][0]) < 1e-6 and all(min(part) > 1e-5 for part in row["kl"][1:])


class TestCommand:
    def test_help(self, capsys):
        with pytest.raises(SystemExit) as end:
            long_decoding.main(["--help"])
        assert end.value.code == 0 and "--report" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "words, why",
        [
            (["--tokens", "1000"], "tokens must be a multiple of 1024, got 1000"),
            (["--chains", "0"], "chains must be 1 to"),
            (["--tokens", "8192", "--chains", "90"], "each chain and each step needs one"),
            (["--report"], "has no results; measure some"),
        ],
    )
    def test_refused(self, words, why, tmp_path, capsys):
        assert long_decoding.main([*words, "--out", str(tmp_path)]) == 2
        assert why in capsys.readouterr().err


class TestWhatIsCommitted:
    @pytest.fixture(scope="class")
    def files(self):
        paths = {part: long_decoding.OUT / f"{part}.json" for part in cases()}
        return {part: json.loads(path.read_text()) for part, path in paths.items() if path.is_file()}

    def test_every_row_has_every_part_of_the_length(self, files):
        for part, file in files.items():
            assert file["rows"] and {row["id"] for row in file["rows"]} <= set(cases()[part])
            for row in file["rows"]:
                numbers, settings = row["right" if part == CHAINS else "kl"], file["settings"]
                assert [len(one) for one in numbers] == [settings["rows"]] * settings["bins"]
        assert files[CHAINS]["settings"]["tokens"] >= 4096

    def test_memory_is_bounded(self, files):
        rows = {row["id"]: row for row in files[CHAINS]["rows"]}
        for name, row in rows.items():
            assert (row["nbytes"][-1] > 4 * row["nbytes"][0]) is (name == FULL)

    def test_the_report_is_of_the_results_and_says_what_is_missing(self, files):
        text = (long_decoding.OUT / "README.md").read_text()
        assert text == report(files)
        assert (long_decoding.OUT / "long_decoding.png").stat().st_size > 10_000
        for part, file in files.items():
            for name in set(cases()[part]) - {row["id"] for row in file["rows"]}:
                assert name in text.partition("Not measured yet: ")[2]
