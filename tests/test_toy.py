"""The toy answers, its texts are what they claim to be, and what was fitted to it is used."""

import json

import pytest
import torch

import fastkv

from .toy import MODEL_DIR, TASKS, VOCABULARY, generate, make_questions


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


def told(model, asked):
    """Log-probabilities [N, A, V] with which the words of the answers are told one by one; and the cache."""
    out = model(asked.prompts, logits_to_keep=1, use_cache=True)
    cache, logits = out.past_key_values, [out.logits]
    for word in asked.answers[:, :-1].split(1, dim=1):
        logits.append(model(word, past_key_values=cache).logits)
    return torch.cat(logits, 1).log_softmax(-1), cache


def divergence(full, kept):
    """KL in nats, mean over the words of the answers."""
    return float((full.exp() * (full - kept)).sum(-1).mean())


def right(logits, asked):
    return int((logits.argmax(-1) == asked.answers).all(-1).sum())


@pytest.mark.parametrize("task", TASKS)
def test_the_full_cache_answers(task, bundled):
    model, tokenizer = bundled
    asked = make_questions(tokenizer, task, 512, 3, seed=10, each=3)
    assert right(told(model, asked)[0], asked) >= 8


def test_compressed_caches_answer_and_better_policies_answer_more(bundled):
    """A quarter of the tokens: KeyDiff and SnapKV answer nearly everything, random eviction nearly nothing."""
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 1024, 5, seed=10)
    full, found, errors = told(model, asked)[0], {}, {}
    assert right(full, asked) == 5
    for policy in ("keydiff", "snapkv", "momentkv", "random"):
        for correction in ("none", "moments"):
            with fastkv.patched(model, policy, budget=256, correction=correction):
                logits, _ = told(model, asked)
            found[policy], errors[policy, correction] = right(logits, asked), divergence(full, logits)
        assert errors[policy, "moments"] < errors[policy, "none"], "the moments know something of what was evicted"
    assert found["keydiff"] >= 4 and found["snapkv"] >= 4
    assert found["random"] <= 1 < found["momentkv"]


def test_what_is_fitted_to_the_model_is_used(bundled):
    """The map from keys to values and the quality curves beside the weights load and work."""
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 512, 4, seed=50)
    for correction in ("vector", "vector+moments"):
        with fastkv.patched(model, "keydiff", fastkv.Budget(tokens=96, sinks=4, recent=16), correction=correction):
            logits, cache = told(model, asked)
        assert right(logits, asked) == 4 and cache.layers[0].state.approx is not None
    with fastkv.patched(model, "keydiff", fastkv.Budget(quality=0.9)):
        kept = told(model, asked)[1].stored(0)
    assert 36 < int(kept.min()) and int(kept.max()) < 512
