"""Centroids of the evicted tokens in a cache: which tokens join when, what attention makes of them, their bytes."""

import pytest
import torch

import fastkv
from fastkv import Budget, FastKVCache, corrections
from fastkv.cache import signals
from fastkv.reference import Centroids, centroid_estimate

from .models import build, prompt, raises
from .test_module import B, D, fresh, tokens
from .test_policy_matrix import EVERY, small
from .test_saved import rewritten

F64 = torch.float64


def attended(q, keys, values, parts, softcap):
    """Attention of q [B, HQ, T, D] over all of keys and values [B, 2, N, D] and the centroids."""
    logits = D**-0.5 * q @ keys.repeat_interleave(2, 1).mT
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    value, mass = centroid_estimate(q, parts, D**-0.5, softcap)
    weights = torch.cat([logits, mass[..., None]], -1).softmax(-1)
    return weights[..., :-1] @ values.repeat_interleave(2, 1) + weights[..., -1:] * value


@pytest.mark.parametrize("block, softcap", [(None, 3.0), (32, None)], ids=["whole", "blocks"])
def test_a_window_with_the_centroids_of_the_rest(monkeypatch, block, softcap):
    """StreamingLLM keeps a set that is known beforehand; the rest joins in the order in which it leaves. Unrounded."""
    monkeypatch.setattr(corrections, "MEANS", torch.float32)
    budget, every, length = Budget(tokens=64, sinks=2, recent=4), 3, 110
    options = {"correction": "centroids", "evict_every": every, "prefill_block": block, "softcap": softcap}
    module = fresh("streaming", budget, **options)
    q, k, v = tokens(length + 10, dtype=F64)
    first = module(q[:, :, :length], k[:, :, :length], v[:, :, :length])
    assert module.state.parts.num == 64 * 2 * D * 8 // (16 * 4 * (2 * D + 2)) == 7
    parts, oldest = Centroids.empty(B, 2, 7, D, D, dtype=F64), 2
    if block is not None:
        parts, oldest = parts.add(k[:, :, 2:34], v[:, :, 2:34]), 34  # the first block that does not fit is the third
        now = [0, 1, *range(34, 104)]
        want = attended(q[:, :, 103:104], k[:, :, now], v[:, :, now], parts, softcap)
        torch.testing.assert_close(first[:, :, 103:104], want, atol=2e-6, rtol=0)
    for at in range(length, length + 10):
        if (at - length) % every == 0:  # the first two and the last 62 stay
            parts, oldest = parts.add(k[:, :, oldest : at - 62], v[:, :, oldest : at - 62]), at - 62
        now = [0, 1, *range(oldest, at + 1)]
        got = module(*(rows[:, :, at : at + 1] for rows in (q, k, v)))
        want = attended(q[:, :, at : at + 1], k[:, :, now], v[:, :, now], parts, softcap)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert torch.equal(module.state.parts.count.sort(-1).values.double(), parts.count.sort(-1).values)


@pytest.mark.parametrize("records", [False, True])
def test_the_evicted_mass_of_a_block_reaches_what_is_observed(monkeypatch, records):
    module, told, observe = fresh("snapkv", correction="centroids", prefill_block=16), [], signals.observe
    q, k, v = tokens(60)
    module(*(rows[:, :, :50] for rows in (q, k, v)))
    monkeypatch.setattr(signals, "observe", lambda *given: told.append(given[-1]) or observe(*given))
    want = centroid_estimate(q[:, :, 50:], module.state.parts, D**-0.5)[1]
    module.cache.records = records
    module.cache.read(*(rows[:, :, 50:] for rows in (q, k, v)), torch.ones(B, 10, dtype=torch.bool), None)
    if records:
        module.cache.accept(3)
        want = want[:, :, :7]
    torch.testing.assert_close(*told, want)


def test_what_was_decoded_joins_with_the_next_prompt():
    module = fresh("keydiff", Budget(tokens=32, sinks=2, recent=4), correction="centroids", evict_every=8)
    given = tokens(41)
    for first, end in ((0, 32), *((at, at + 1) for at in range(32, 37)), (37, 41)):
        module(*(rows[:, :, first:end] for rows in given))
    assert (module.state.parts.count.sum(-1) == 9).all()


# What is done to a cache is done to them.


def test_files_of_something_else_are_refused(tmp_path):
    model, (ids, _) = fastkv.patch(build(), "fastkv", small(), evict_every=EVERY), prompt(2, 50, (0, 0))
    model(ids).past_key_values.save(tmp_path / "cache")
    content = (tmp_path / "cache").read_bytes()

    def one_more(held):
        held["2.centroids.count"] = held["2.centroids.count"] + 1

    raises("is damaged", FastKVCache.load, rewritten(tmp_path / "forged", content, tensors=one_more), model)
    fastkv.patch(model, "fastkv", small(), evict_every=EVERY, correction="moments")
    raises(r"was saved with correction=centroids, got correction=moments", FastKVCache.load, tmp_path / "cache", model)
