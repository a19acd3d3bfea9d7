"""A second reading of the prompt by fastkv: what stays, and centroids that are refitted to it."""

from dataclasses import dataclass, replace

import pytest
import torch

import fastkv
from fastkv import Budget, FastKVError
from fastkv.lab.equal_bytes import assert_equal_bytes, equal_bytes
from fastkv.policies import FastKV, FastKVReread, KVzip
from fastkv.reference import Centroids, centroid_estimate, merge_partials

from .models import build, generate, prompt
from .test_deferred import most_attention
from .test_policy_matrix import EVERY, TOKENS, check, small

B, HKV, GROUP, D, SCALE = 2, 2, 3, 8, 0.4
F64 = torch.float64


@dataclass(frozen=True)
class Short(FastKVReread):
    """In several chunks."""

    chunk: int = 16
    refits = True


class Plain(Short):
    """Whose centroids stay as they are."""

    refits = False


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_what_is_remembered_is_what_the_second_reading_attended_to(name):
    model, (ids, _), layer = build(name, "eager"), prompt(1, 40, (0,)), 1
    most = most_attention(model, ids, layer)
    fastkv.patch(model, "fastkv-reread", small(), evict_every=EVERY)
    exact = model(ids).past_key_values.layers[layer].state.exact
    for head in range(2):
        places = exact.positions[0, head, :TOKENS].long()
        assert {0, 1, 36, 37, 38, 39} <= set(places.tolist())
        want = most[head, places] * exact.values[0, head, :TOKENS].norm(dim=-1)
        torch.testing.assert_close(exact.memory[0, head, :TOKENS], want, atol=1e-4, rtol=1e-4)


def setting(num=40, kept=12, queries=30, softcap=None):
    """Centroids of all but `kept` of `num` tokens, queries, and their attention over all and over the kept tokens."""
    draw = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, B, HKV, num, D, dtype=F64, generator=draw)
    q = torch.randn(B, HKV * GROUP, queries, D, dtype=F64, generator=draw)
    parts = Centroids.empty(B, HKV, 4, D, D, dtype=F64).add(keys[:, :, kept:], values[:, :, kept:])
    logits = SCALE * q.view(B, HKV, -1, D) @ keys.mT
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    full, rest = ((some.softmax(-1) @ of, some.logsumexp(-1)) for some, of in (
        (logits, values), (logits[..., :kept], values[:, :, :kept])
    ))  # fmt: skip
    return parts, q, full, rest


def error(parts, q, full, rest, softcap=None):
    """What is missing from the attention of q over kept tokens and centroids, [B, Hkv, G * T, D]."""
    value, mass = centroid_estimate(q, parts, SCALE, softcap)
    return full[0] - merge_partials(*rest, value.view_as(full[0]), mass.view_as(full[1]))[0]


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_refitted_values_are_those_of_ridge_regression(softcap):
    parts, q, full, rest = setting(softcap=softcap)
    after = parts.refitted(q, full, rest, SCALE, softcap)
    for name in ("count", "keys", "spread"):
        assert torch.equal(getattr(after, name), getattr(parts, name))
    missing = error(parts, q, full, rest, softcap)
    # Shares by definition: how attention changes with the value of each centroid.
    shares = torch.stack(
        [
            (missing - error(replace(parts, values=parts.values + one), q, full, rest, softcap))[..., 0]
            for one in torch.eye(4, dtype=F64)[:, None, None, :, None].expand(-1, B, HKV, -1, D)
        ],
        -1,
    )
    ridge = (0.1 * shares.square().sum(2).mean(-1)).sqrt()[..., None, None] * torch.eye(4, dtype=F64)
    zeros = torch.zeros(B, HKV, 4, D, dtype=F64)
    want = torch.linalg.lstsq(torch.cat([shares, ridge], 2), torch.cat([missing, zeros], 2)).solution
    torch.testing.assert_close(after.values - parts.values, want)
    left = error(after, q, full, rest, softcap).square().sum((2, 3))
    assert (left < 0.9 * missing.square().sum((2, 3))).all()


def test_queries_that_do_not_count_and_heads_that_evicted_nothing():
    parts, q, full, rest = setting()
    q[:, :, 20:] = float("nan")
    for out, lse in (full, rest):
        lse.unflatten(2, (GROUP, -1))[..., 20:] = float("-inf")
        out.unflatten(2, (GROUP, -1))[..., 20:, :] = float("nan")
    some = parts.refitted(q, full, rest, SCALE)
    fewer = [part.unflatten(2, (GROUP, -1))[:, :, :, :20].flatten(2, 3) for part in (*full, *rest)]
    torch.testing.assert_close(some.values, parts.refitted(q[:, :, :20], fewer[:2], fewer[2:], SCALE).values)
    empty = Centroids.empty(B, HKV, 4, D, D, dtype=F64)
    assert torch.equal(empty.refitted(q[:, :, :20], fewer[:2], fewer[:2], SCALE).values, empty.values)


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
def test_settled_centroids_are_weighted_means_of_the_nearest_tokens(dtype):
    """By loops over heads; more tokens than are compared at once, of which some do not count."""
    draw, num = torch.Generator().manual_seed(4), 6
    keys, values = torch.randn(2, B, HKV, 1100, D, dtype=F64, generator=draw)
    values = values[..., : D - 2] * 5
    mask = torch.rand(B, HKV, 1100, generator=draw) < 0.6
    mask[1, 0] = False  # a head that evicted nothing
    keys[~mask], values[~mask] = float("nan"), float("inf")
    weight = torch.rand(B, HKV, 1100, dtype=F64, generator=draw) + 0.01
    before = Centroids.empty(B, HKV, num, D, D - 2, dtype=dtype).add(keys, values, mask)
    before.count[0, 1, 2] = 0  # not in use: nobody's
    found = before.settled(keys, values, mask, weight)
    assert found.keys.dtype == found.values.dtype == dtype
    close = {"rtol": 2**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-9}
    for place in ((b, h) for b in range(B) for h in range(HKV)):
        k, v, w = (rows[place][mask[place]] for rows in (keys, values, weight))
        used = before.count[place] > 0
        deviation = [(rows - rows.mean(0)).square().sum(-1).mean().sqrt() for rows in (k, v)]
        away = sum(
            torch.cdist(own, rows[place][used].double()).square() / size**2
            for own, rows, size in zip((k, v), (before.keys, before.values), deviation)
        )
        nearest = away.argmin(-1) if len(k) else away.new_zeros(0)
        parts = [nearest == one for one in range(int(used.sum())) if (nearest == one).any()]
        assert found.count[place].tolist() == [int(part.sum()) for part in parts] + [0] * (num - len(parts))
        for one, part in enumerate(parts):
            share = (w[part] / w[part].sum())[:, None]
            mean = (share * k[part]).sum(0)
            torch.testing.assert_close(found.keys[place][one].double(), mean, **close)
            torch.testing.assert_close(found.values[place][one].double(), (share * v[part]).sum(0), **close)
            moved = (k[part] - mean).square().mean(-1).sum()
            torch.testing.assert_close(found.spread[place][one].double(), moved, rtol=1e-4, atol=0)
        assert not found.keys[place][len(parts) :].any() and not found.spread[place][len(parts) :].any()


def test_centroids_of_a_second_reading_lie_where_it_attends():
    """Their means are weighted with the root of the most attention that a token received."""
    model, (ids, _) = build("llama", "eager"), prompt(1, 60, (0,))
    most, stock = most_attention(model, ids, 1), model(ids, use_cache=True).past_key_values.layers[1]
    fastkv.patch(model, Plain(chunk=64), small(), evict_every=EVERY)
    before = model(ids).past_key_values.layers[1].state
    fastkv.patch(model, Short(chunk=64), small(), evict_every=EVERY)
    after = model(ids).past_key_values.layers[1].state
    places = torch.arange(60)
    gone = torch.stack([~torch.isin(places, one[:TOKENS]) for one in before.exact["positions"][0]])[None]
    want = before.parts.settled(stock.keys, stock.values, gone, most[None].sqrt())
    assert torch.equal(want.count, after.parts.count) and not torch.equal(want.keys, before.parts.keys)
    torch.testing.assert_close(want.keys, after.parts.keys, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("first", [None, 0, 5])
def test_a_row_does_not_depend_on_its_padding(first):
    """Where its first token stands at `first`, or where the model numbers all tokens, padding included."""
    model, (ids, mask) = build(), prompt(2, 60, (0, 19))
    fastkv.patch(model, Short(), small(), evict_every=EVERY)
    places = torch.arange(60).expand(2, -1) if first is None else (mask.cumsum(-1) - 1).clamp(min=0) + first
    together = model(ids, attention_mask=mask, position_ids=None if first is None else places).past_key_values
    alone = model(ids[1:, 19:]).past_key_values
    there = model(ids[1:, 19:], position_ids=places[1:, 19:]).past_key_values  # keys rounded to bf16 in the same places
    for mine, elsewhere, theirs in zip(together.layers, alone.layers, there.layers):
        assert torch.equal(mine.state.exact["positions"][1], elsewhere.state.exact["positions"][0])
        values = mine.state.parts.values[1], theirs.state.parts.values[0]
        torch.testing.assert_close(*values, rtol=2**-7, atol=1e-4)  # sums in another order, one step of bf16


def test_the_refit_reaches_the_state():
    model, (ids, _) = build(), prompt(1, 60, (0,))
    fastkv.patch(model, Short(), small(), evict_every=EVERY)
    after = model(ids).past_key_values.layers[1].state
    fastkv.patch(model, Plain(), small(), evict_every=EVERY)
    before = model(ids).past_key_values.layers[1].state
    assert torch.equal(before.exact["positions"], after.exact["positions"])
    assert torch.equal(before.parts.count.sum(-1), after.parts.count.sum(-1))
    assert not torch.allclose(before.parts.values, after.parts.values, atol=1e-3)


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_turns_conserve_tokens(heads):
    model, (ids, mask) = build(), prompt()
    fastkv.patch(model, Short(), small(heads=heads), evict_every=EVERY)
    cache = fastkv.FastKVCache(model)
    generate(model, ids, mask, new=20, past_key_values=cache)
    if heads == "uniform":
        check(cache, mask.sum(-1) + 19)
    assert all(torch.isfinite(layer.state.parts.values).all() for layer in cache.layers)


def test_equal_bytes():
    model, (ids, _) = build(), prompt(1, 60, (0,))
    budget, caches = equal_bytes(model.config, 30, model.dtype, sinks=2, recent=4), {}
    for name in ("fastkv", "fastkv-reread", "kvzip"):
        with fastkv.patched(model, name, budget):
            caches[name] = model(ids).past_key_values
    assert_equal_bytes(caches, budget.bytes)


def test_by_name():
    assert FastKVReread().rereads and not FastKV().rereads and not FastKVReread().refits
    assert (FastKVReread().correction, FastKVReread().chunk) == ("centroids", 512)
    assert (KVzip().chunk, KVzip(chunk=5, prompt=[1]).prompt) == (2048, (1,)) and not KVzip().refits


def test_refusals():
    policy = "fastkv-reread"
    with pytest.raises(FastKVError, match="needs the whole context before anything is evicted"):
        fastkv.patch(build(), policy, small(), prefill_block=16)
    with pytest.raises(FastKVError, match="reads the prompt with the whole model"):
        fastkv.FastKVAttention(4, 2, 8, policy=policy, budget=Budget(tokens=40))
    model = fastkv.patch(build(), policy, small())
    with pytest.raises(FastKVError, match=r"second readings and .* pass input_ids"):
        model(inputs_embeds=torch.randn(1, 30, 48))
