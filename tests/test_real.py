"""The real model's own answers: what no change may break. `make test-real`; needs the extra real."""

import pytest
import torch

from fastkv import Budget, FastKVCache, patch, unpatch
from fastkv.integrations.transformers import calibrate
from fastkv.lab import facts
from fastkv.lab.pretrained import load
from perf.leaderboard import measure, samples

pytestmark = pytest.mark.real
FLOORS = {"kvzip": (2, 0.15), "compactor": (1, 0.4)}  # of half the tokens, whole and right: a wrong score falls through


@pytest.fixture(scope="module")
def loaded():
    return load("smollm2")


@pytest.fixture(scope="module")
def text(loaded):
    with torch.no_grad():
        return measure.read(*loaded, facts.sample(loaded[1], 1024, seed=102))


def test_the_full_cache_answers(text):
    assert len(text.answers) == 4


@pytest.mark.parametrize(("policy", "block"), [("fastkv", None), ("momentkv", 256), ("compactor", 256)])
def test_a_budget_as_large_as_the_text_changes_no_token(loaded, text, policy, block):
    model, tokenizer = loaded
    patch(model, policy, Budget(tokens=1200), prefill_block=block)
    cache = FastKVCache(model)
    model(text.reading.ids, past_key_values=cache, logits_to_keep=1)
    asked = [answer.question.ids for answer in text.answers]
    spoken = measure.answers(model, tokenizer, cache, text.reading.ids, asked, measure.NEW)
    for answer, ids in zip(text.answers, spoken):
        assert ids[: len(answer.ids)] == answer.ids


@pytest.mark.parametrize("policy", FLOORS)
def test_half_of_the_bytes_is_no_worse_than_it_was(loaded, text, policy):
    right, answer_kl = FLOORS[policy]
    found = measure.cell(*loaded, text, policy, 0.5, "bytes", {})
    assert found["right"] >= right and found["answer_kl"] <= answer_kl and found["text_kl"] <= 0.2


@pytest.mark.calibrated
@pytest.mark.parametrize(
    ("keep", "slots", "right", "answer_kl", "text_kl"),
    [(0.25, "auto", 4, 0.03, 0.03), (0.125, "int8", 3, 0.05, 0.05), (0.0625, "int4", 2, 0.2, 0.1)],
)
def test_what_patch_does_by_default(loaded, text, keep, slots, right, answer_kl, text_kl):
    """With heads that are calibrated: floors that heads which are alike fall through."""
    found = measure.cell(*loaded, text, "fastkv", keep, "bytes", {"slots": slots})
    assert found["right"] >= right and found["answer_kl"] <= answer_kl and found["text_kl"] <= text_kl, found


def test_the_model_is_left_as_it_was(loaded, text):
    model, _ = loaded
    unpatch(model)
    assert torch.equal(model(text.reading.ids, logits_to_keep=1).logits[0, -1], text.reading.logits)


@pytest.mark.calibrated
def test_its_heads_are_known(loaded, monkeypatch, tmp_path):
    """Without anything in the user's cache, and without calibrating."""
    monkeypatch.setattr(calibrate, "user_cache", lambda kind: tmp_path / kind)
    monkeypatch.setattr(calibrate, "calibrate_heads", None)
    shares = calibrate.shares_for(loaded[0], "calibrated")
    assert shares.heads == (3,) * 30 and shares.tokens == 2048 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_known_is_what_calibration_finds(loaded):
    """Another processor may draw other texts; the shares belong to the model."""
    known, found = calibrate.known_shares(loaded[0]), calibrate.calibrate_heads(loaded[0])
    for keep in (0.5, 0.25, 0.125, 0.0625):
        assert torch.corrcoef(torch.stack([known.shares(keep).flatten(), found.shares(keep).flatten()]))[0, 1] > 0.95


def test_rulers_tasks_end_before_the_question_and_their_reply_begins(loaded):
    _, tokenizer = loaded
    for seed, task in enumerate(samples.RULER):
        made = samples.retrieval(tokenizer, 2000, seed)
        (question,) = made.questions
        text = tokenizer.decode(made.prefix)
        assert question.kind == task and question.answer in text and "Question:" not in text
        asked = tokenizer.decode(question.ids)
        assert asked.rstrip().endswith("is") and question.answer not in asked
