"""`python -m perf.papers`: every row runs, and the page is what the results give."""

import json
from unittest import mock

import pytest
import torch

from fastkv.lab import facts
from perf.papers import __main__ as command
from perf.papers import page, row
from perf.papers.bench import Bench, Text

from . import toy

MEASURED = [one for one in command.ROWS if one.measure]


@pytest.fixture(scope="module")
def bench():
    """A model of a few layers whose every answer counts: what it says means nothing."""
    model, tokenizer = toy.load()
    with mock.patch.object(facts, "stretch", lambda tokenizer, source, length, draw: list(range(5, 5 + 12)) * length):
        yield Bench(model, tokenizer, quick=True, trusting=True)


def sample(tokenizer, length, seed, **rest):
    """Two facts in the words of the bundled model."""
    words = "the old clerk found the green lamp in the market . "
    ids = tokenizer(words * 12, add_special_tokens=False)["input_ids"][:length]
    asks = tokenizer("the lamp ?", add_special_tokens=False)["input_ids"]
    asked = facts.Question("kind", "the green lamp", "the lamp ?", "lamp", asks, False)
    return facts.Sample(ids, [asked, asked], [])


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.name)
def test_a_row_is_measured_judged_and_drawn(bench, tmp_path, monkeypatch, one):
    text = torch.tensor([sample(bench.tokenizer, 110, 0).prefix * 3])
    monkeypatch.setattr(Bench, "stretch", lambda self, length, seed, source="": text[:, seed % 7 :][:, :length])
    monkeypatch.setattr(facts, "sample", sample)
    monkeypatch.setattr(command.tasks, "many_keys", sample)
    monkeypatch.setattr(command.tasks, "asked_texts", lambda bench, texts, length, make: asked(bench))
    numbers = json.loads(json.dumps(page.rounded(one.measure(bench))))
    results = {one.name: {"numbers": numbers, "seconds": 1.0, "environment": command.environment()}}
    told = page.told(one, results)
    assert told["verdict"] in row.VERDICTS.values() and told["here"] and "None" not in told["here"]
    assert len({line.count("|") for line in told["table"].splitlines()}) <= 1
    page.draw([one], results, tmp_path)
    assert (tmp_path / f"{one.name}.png").exists() == (one.draw is not None)
    shown = page.render([one], results, "pictures")
    assert f"| {one.paper} | [{one.place}]" in shown and told["here"] in shown


def asked(bench):
    one = sample(bench.tokenizer, 110, 0)
    reading = Text(bench, torch.tensor([one.prefix]))
    yield reading, bench.ask(one, reading)


def test_the_page_is_what_the_results_give():
    results = page.load(command.ROOT / command.RESULTS)
    assert results.keys() <= {one.name for one in MEASURED}
    assert (command.ROOT / command.PAGE).read_text() == page.render(command.ROWS, results, "pictures/papers")
