"""The toy answers, its texts are what they claim to be, and what was fitted to it is used."""

import torch

import fastkv

from .toy import make_questions


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
