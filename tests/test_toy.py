"""The toy answers, its texts are what they claim to be, and what was fitted to it is used."""

import json

import pytest
import torch

import fastkv

from .toy import MODEL_DIR, TASKS, VOCABULARY, generate, make_questions, measure, policy_of, relative_error


def test_it_is_small_and_documented():
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 10 * 2**20
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "llama" and config["head_dim"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    card = (MODEL_DIR / "README.md").read_text()
    for word in ("steps", "seed", "accuracy", *TASKS):
        assert word in card.lower()


@pytest.mark.parametrize("task", TASKS)
def test_texts_have_their_length_and_hold_their_answers(task, bundled):
    _, tokenizer = bundled
    for seed in range(5):
        sample = generate(task, 512, seed, questions=4)
        assert sample == generate(task, 512, seed, questions=4)
        assert sample != generate(task, 512, seed + 1, questions=4)
        whole = f"{sample.context} {sample.questions[0]} {sample.answers[0]}"
        assert len(tokenizer(whole).input_ids) <= 512
        assert set(whole.split()) <= set(VOCABULARY)
        assert tokenizer.decode(tokenizer(whole, add_special_tokens=False).input_ids) == whole
        for answer in sample.answers:
            numbers = [word for word in answer.split() if word.isdigit()]
            assert len(numbers) >= 3 and " ".join(numbers[:3]) in sample.context


@pytest.mark.parametrize("task", TASKS)
def test_the_full_cache_answers(task, bundled):
    model, tokenizer = bundled
    right = measure(model, make_questions(tokenizer, task, 1024, 3, seed=10, each=4)).right
    assert right.double().mean() >= 0.9


def test_compressed_caches_answer_and_better_policies_answer_more(bundled):
    """A quarter of the tokens: KeyDiff and SnapKV answer nearly everything, random eviction nearly nothing."""
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 1024, samples=5, seed=10)
    right = {}
    errors = {}
    full = measure(model, asked)
    assert int(full.right.sum()) == 5
    for policy in ("keydiff", "snapkv", "momentkv", "random"):
        for correction in ("none", "moments"):
            with fastkv.patched(model, policy, budget=256, correction=correction):
                got = measure(model, asked)
            right[policy] = int(got.right.sum())
            errors[policy, correction] = relative_error(got.attention, full.attention)
    assert right["keydiff"] >= 4 and right["snapkv"] >= 4
    assert right["random"] <= 1 < right["momentkv"]
    for policy in right:
        assert errors[policy, "moments"] < errors[policy, "none"], "the moments know something of what was evicted"


def test_generate_answers_a_question(bundled):
    model, tokenizer = bundled
    sample = generate("facts", 1024, seed=3)
    inputs = tokenizer(f"{sample.context} {sample.questions[0]}", return_tensors="pt")
    with fastkv.patched(model, budget=2048):
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert answer.startswith(sample.answers[0])
    assert torch.isfinite(model(inputs.input_ids).logits).all()


def test_what_is_fitted_to_the_model_is_used(bundled):
    """The map from keys to values, the quality curves and the head pattern beside the weights load and work."""
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 512, 4, seed=50)
    full = measure(model, asked)
    errors = {}
    for correction in ("none", "vector", "vector+moments"):
        with fastkv.patched(model, "keydiff", fastkv.Budget(tokens=96, sinks=4, recent=16), correction=correction):
            errors[correction] = relative_error(measure(model, asked).attention, full.attention)
    assert errors["vector+moments"] < 0.8 * errors["vector"] < 0.8 * 0.95 * errors["none"]
    with fastkv.patched(model, "keydiff", fastkv.Budget(quality=0.9)):
        graded = measure(model, asked)
    assert 36 < graded.kept < 512
    with fastkv.patched(model, policy_of("duoattention"), 96):
        assert measure(model, asked).kept == 96
