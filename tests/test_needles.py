"""`fastkv needles`: the grid of every cache, at equal bytes, kept and resumed; refusals in one sentence."""

import io
import json

import pytest
from rich.console import Console

import fastkv
from fastkv.lab import needles
from fastkv.lab.cli import build_parser
from fastkv.lab.needles import table_of

from .models import raises
from .toy import MODEL, load, placed

QUICK = ("--lengths", "160,320", "--depths", "0,1", "--samples", "2", "--budget", "128")


@pytest.fixture
def toy_needles(monkeypatch):
    """Texts in the toy's language, whatever the task: it knows no other."""

    def generate(task, tokenizer, length, seed, index=0, depth=None):
        return placed("facts", length, depth, seed + index)

    monkeypatch.setattr(needles.ruler, "generate", generate)


def asked(*arguments):
    """Rows and what was printed."""
    options = build_parser().parse_args(["needles", "--model", MODEL, *map(str, arguments)])
    told = io.StringIO()
    return needles.run(options, Console(file=told, width=100)), told.getvalue()


@pytest.mark.parametrize("question", ["seen", "later"])
def test_it_compares_keeps_and_resumes(question, tmp_path, monkeypatch, toy_needles):
    command = (*QUICK, "--policy", "streaming,keydiff", "--out", tmp_path, "--question", question)
    rows, told = asked(*command)
    assert [(row["policy"], row["budget"]) for row in rows] == [("full", ""), ("streaming", "128"), ("keydiff", "128")]
    full, streaming, keydiff = rows
    assert full["accuracy"] == [[1.0, 1.0], [1.0, 1.0]]
    # 4 sinks and the last 124 tokens hold the first words of a text and what stands right before the question.
    assert streaming["accuracy"] == [[0.0, 0.0], [1.0, 1.0]] and keydiff["accuracy"][0][0] == 1.0
    assert "streaming" in told and "50%" in told and str(tmp_path) in told.replace("\n", "")

    model, tokenizer = load()
    with fastkv.patched(model, "streaming", fastkv.Budget(tokens=128)):
        by_hand = needles.grid(model, tokenizer, (160, 320), (0.0, 1.0), 2, question=question)
    assert {name: streaming[name] for name in by_hand} == by_hand
    config = model.config
    words = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert full["nbytes"] == words * 319, "all but the last word of the answer"
    assert streaming["nbytes"] == keydiff["nbytes"] < full["nbytes"]

    for name in ("full", "streaming-128", "keydiff-128"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        record = json.loads((tmp_path / f"{name}.json").read_text())
        row = next(row for row in rows if row["policy"] == record["policy"])
        assert {one: record[one] for one in row} == row
        assert record["settings"]["question"] == question

    (tmp_path / "keydiff-128.json").unlink()
    measured, before = [], needles.grid
    monkeypatch.setattr(needles, "grid", lambda *args, **how: measured.append(args) or before(*args, **how))
    again, _ = asked(*command)
    assert len(measured) == 1 and again == rows
    raises(r"was written with samples 2, this run has 3; choose another --out", asked, *command, "--samples", 3)
    monkeypatch.setattr("fastkv.lab.common.weights_digest", lambda model: "of another model")
    raises(r"was written with weights \w{16}, this run has of another model", asked, *command)
    (tmp_path / "keydiff-128.json").write_text("")
    raises("has damaged results", asked, *command)


def test_the_table_has_means_over_depths():
    row = {"policy": "keydiff", "budget": "64", "accuracy": [[0.5, 0.25], [1.0, 0.25]], "nbytes": 2048}
    told = io.StringIO()
    Console(file=told, width=80).print(table_of([row], [10, 20]))
    assert told.getvalue().splitlines()[-1].split() == ["keydiff", "64", "2", "50%", "75%", "25%"]
