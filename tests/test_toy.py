"""The toy answers, its texts are what they claim to be, and what was fitted to it is used."""

import torch

import fastkv

from .toy import generate


def told(model, prompts, answers):
    """Log-probabilities [N, A, V] with which the words of the answers [N, A] are told one by one."""
    out = model(prompts, logits_to_keep=1, use_cache=True)
    cache, logits = out.past_key_values, [out.logits]
    for word in answers[:, :-1].split(1, dim=1):
        logits.append(model(word, past_key_values=cache).logits)
    return torch.cat(logits, 1).log_softmax(-1)


def divergence(full, kept):
    """KL in nats, mean over the words of the answers."""
    return float((full.exp() * (full - kept)).sum(-1).mean())


def right(logits, answers):
    return int((logits.argmax(-1) == answers).all(-1).sum())


def test_compressed_caches_answer_and_better_policies_answer_more(bundled):
    """A quarter of the tokens: KeyDiff and SnapKV answer nearly everything, random eviction nearly nothing."""
    model, tokenizer = bundled
    drawn = [generate("facts", 1024, seed) for seed in range(10, 15)]
    prompts = torch.tensor(tokenizer([f"{one.context} {one.questions[0]}" for one in drawn]).input_ids)
    answers = torch.tensor(tokenizer([one.answers[0] for one in drawn], add_special_tokens=False).input_ids)
    full, found, errors = told(model, prompts, answers), {}, {}
    assert right(full, answers) == 5
    for policy, corrections in {"keydiff": ("none", "moments"), "snapkv": ("moments",), "random": ("none", "moments"),
                                "momentkv": ("moments",)}.items():  # fmt: skip
        for correction in corrections:
            with fastkv.patched(model, policy, budget=256, correction=correction):
                logits = told(model, prompts, answers)
            found[policy], errors[policy, correction] = right(logits, answers), divergence(full, logits)
    for policy in ("keydiff", "random"):
        assert errors[policy, "moments"] < errors[policy, "none"], "the moments know something of what was evicted"
    assert found["keydiff"] >= 4 and found["snapkv"] >= 4
    assert found["random"] <= 1 < found["momentkv"]
