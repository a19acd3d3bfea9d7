"""The leaderboard: what its page says is what was measured, and it goes on where it was stopped."""

import json

import pytest

from fastkv import Budget
from fastkv.lab import facts
from perf.leaderboard import __main__ as leaderboard
from perf.leaderboard import another, onward, page
from perf.leaderboard.cells import rows_of

from . import toy

TABLE = leaderboard.Table("A table", length=700, names=("keydiff", "streaming"), keeps=(0.5, 0.25), texts=1)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    monkeypatch.setattr(leaderboard, "TABLES", {"later_2048": TABLE})
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "pictures" / "results.png")
    monkeypatch.setattr(page, "README", tmp_path / "README.md")
    page.README.write_text(f"before\n{page.MARK}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "DRAWN", ("keydiff", "streaming"))
    return tmp_path


def rows(seeds, asked=10, **other):
    told = {"torch": "2", "transformers": "5", "commit": "abc", "cpu": "a cpu"}
    for seed in range(seeds):
        for name, right in (("keydiff", 5), ("streaming", 1)):
            for keep in TABLE.keeps:
                cell = {"seed": seed, "part": 0, "policy": name, "keep": keep, "asked": asked, "right": right}
                yield {**cell, "answer_kl": 0.25, "text_kl": 0.125, **told, **other}


def written(file, found):
    file.write_text("".join(json.dumps(row) + "\n" for row in found))


def test_the_page_says_what_was_measured(place):
    written(place / "later_2048.jsonl", rows(3))
    page.write(place, leaderboard.TABLES)
    text = page.PAGE.read_text()
    assert "3 texts, 30 answerable questions or more" in text and "commit abc" in text
    paper = "[2504.15364](https://arxiv.org/abs/2504.15364)"
    row = f"| `keydiff` | [`KeyDiff`](../fastkv/policies/keys.py) | {paper} | **0.50** ± 0.00<br>0.250 · 0.125 |"
    assert row in text
    readme = page.README.read_text()
    assert "| keydiff | 0.50, 0.250 | 0.50, 0.250 |" in readme and "3 texts" in readme
    assert readme.startswith("before\n") and readme.endswith(f"{page.END}\nafter\n") and "old" not in readme
    assert text.index("`keydiff`") < text.index("`streaming`") and page.PICTURE.is_file()


def test_too_few_questions_are_not_published(place):
    written(place / "later_2048.jsonl", rows(2))
    page.write(place, leaderboard.TABLES)
    text = page.PAGE.read_text()
    assert "`keydiff`" not in text and "- A table, at 50 %, 75 % removed: 20, 20 questions so far." in text


def test_a_text_that_is_not_finished_does_not_count(place):
    written(place / "later_2048.jsonl", list(rows(4))[:-1])
    assert page.complete(rows_of(place / "later_2048.jsonl"), TABLE, 0.25) == {0, 1, 2}


def test_cells_are_measured_once_and_go_on(place, bundled, capsys):
    model, tokenizer = bundled
    leaderboard.run(["later_2048"], model, tokenizer, range(1), TABLE.keeps, {})
    file = place / "later_2048.jsonl"
    first = file.read_text().splitlines()
    assert len(first) == 4
    file.write_text("\n".join(first[:3]) + '\n{"seed": 0, "pa')  # killed while it wrote
    leaderboard.run(["later_2048"], model, tokenizer, range(1), TABLE.keeps, {})
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(row["policy"], row["keep"]) for row in again} == {(n, k) for n in TABLE.names for k in TABLE.keeps}
    assert again[-1] == json.loads(first[3])


def test_presses_are_shown_beside_fastkv_once_all_texts_were_read(place):
    told = {"kvpress": "0.5.5", "torch": "2", "transformers": "5.2", "cpu": "a cpu", "commit": "abc"}
    cell = {"part": 0, "keep": 0.25, "asked": 10, "answer_kl": 0.25, "text_kl": 0.125, **told}
    theirs = [{**cell, "policy": "KeyDiffPress", "seed": seed, "right": 2} for seed in range(page.BESIDE)]
    ours = [{**cell, "policy": "fastkv", "seed": seed, "right": 9} for seed in range(page.BESIDE + 1)]
    written(place / f"{page.OURS}.jsonl", ours)
    assert not page.beside_kvpress(place)
    written(place / f"{page.KVPRESS}.jsonl", theirs[:-1])
    assert not page.beside_kvpress(place)
    written(place / f"{page.KVPRESS}.jsonl", theirs)
    page.write(place, {})
    text = page.PAGE.read_text()
    assert f"{page.BESIDE} texts, {10 * page.BESIDE} questions; kvpress 0.5.5" in text
    assert text.index("| `fastkv` | [`FastKV`]") < text.index("| `KeyDiffPress` | |  | **0.20** ± 0.00")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(onward, "AFTER", 40)
    monkeypatch.setattr(onward, "PARTS", {"1 to 10": slice(0, 10), "11 to 40": slice(10, 40)})


def test_text_that_goes_on_is_the_full_caches_if_nothing_is_evicted(bundled, short, monkeypatch):
    model, tokenizer = bundled
    text = onward.read(model, tokenizer, 200, seed=0)
    assert text.ids.shape == (len(onward.SOURCES), 240) and text.hidden.shape[1] == 40
    with monkeypatch.context() as room:
        room.setattr(onward, "tokens_of", lambda *_: (Budget(tokens=300, heads="uniform"), {"slots": "model"}))
        whole = onward.cell(model, text, "keydiff", 1.0, {})
    for spans in whole["kl"].values():
        assert spans == pytest.approx([0] * len(spans), abs=1e-4)
    assert whole["nll"] == pytest.approx(whole["full_nll"], abs=1e-4)
    small = onward.cell(model, text, "keydiff", 0.5, {"heads": "uniform", "slots": "model"})
    assert small["nbytes"] < whole["nbytes"] and sum(map(sum, small["kl"].values())) > 1e-3


def test_text_that_goes_on_is_read_only_by_policies_that_are_missing(place, bundled, short, monkeypatch):
    model, tokenizer = bundled
    settings = {"heads": "uniform", "slots": "model"}
    table = leaderboard.Table("Onward", ("keydiff", "streaming"), (0.5,), 1, 200, settings, question="none")
    monkeypatch.setattr(leaderboard, "TABLES", {"onward_2048": table})
    told = {"torch": "2", "transformers": "5", "commit": "abc", "cpu": "a cpu"}
    for _ in range(2):
        leaderboard.run(["onward_2048"], model, tokenizer, range(1), table.keeps, told)
    assert [row["policy"] for row in rows_of(place / "onward_2048.jsonl")] == ["keydiff", "streaming"]
    page.write(place, leaderboard.TABLES)
    text = page.PAGE.read_text()
    assert "## Onward, at 50 % removed" in text and "Texts of each source: 1;" in text
    assert text.count("| `streaming` |") == 1 and "| prose | reference | docstrings | code |" in text


def test_another_model(place, monkeypatch, capsys):
    """A text counts when all of it was measured; what is there is not measured again."""
    monkeypatch.setattr(another, "RESULTS", place / "another")
    for name, value in (("LENGTH", 300), ("KEEPS", (0.5,)), ("NAMES", ("keydiff", "streaming"))):
        monkeypatch.setattr(another, name, value)
    for texts in (1, 2):
        another.run(str(toy.MODEL_DIR), texts)
        assert len(capsys.readouterr().out.splitlines()) == 4
    file = place / "another" / f"{toy.MODEL_DIR.name}.jsonl"
    cells = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(cell["text_kl"] > 0 for cell in cells)
    for number, cell in enumerate(cells):  # heads are uniform in every other one
        cell |= {"asked": 40, "right": 40 - number, "answer_kl": 0.1 * (1 + number)}
    written(file, cells[:-1])
    page.write(place, leaderboard.TABLES)
    text = page.PAGE.read_text().split(f"## {toy.MODEL_DIR.name}\n")[1]
    assert f"1 texts, 40 questions; {page.where_of(cells)}" in text
    assert f"| {page.link('keydiff, uniform heads')} | **1.00** ± nan<br>0.100 · {cells[0]['text_kl']:.3f} |" in text
    assert f"| {page.link('streaming')} | **0.93** ± nan<br>0.400 · {cells[3]['text_kl']:.3f} |" in text
    assert f"answers is {(0.2 / 0.1 * 0.4 / 0.3) ** 0.5:.2f} times" in text
    monkeypatch.setattr(page, "LEAST", 41)
    page.write(place, leaderboard.TABLES)
    assert f"## {toy.MODEL_DIR.name}\n" not in page.PAGE.read_text()


def test_a_base_model_is_asked_to_end_a_sentence(bundled):
    for one in facts.sample(bundled[1], 700, 0).questions:
        asked = another.to_end(lambda text, **_: {"input_ids": text}, one).ids
        assert one.fact.startswith(asked.strip()) and one.fact.removeprefix(asked.strip())[1:].startswith(one.answer)
