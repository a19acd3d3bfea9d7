"""Prompts that are compressed only after all layers have read them: second readings and Budget(quality=...)."""

import math
from dataclasses import dataclass

import pytest
import torch

import fastkv
from fastkv import ops
from fastkv.calibration import describe, fingerprint
from fastkv.calibration.fits import QualityCurve, save_curves
from fastkv.policies import AttentionMatching, FastKVReread

from .models import build, generate, prompt, raises
from .test_policy_matrix import EVERY, TOKENS, small


def curve(model, policy, alpha=0.5, beta=-3.0):
    config = model.config
    return QualityCurve(alpha, beta, policy, fingerprint(config), describe(config), 10, 0.1)


def most_attention(model, ids, layer, request=()):
    """What KVzip computes, literally: the model reads prompt, request and prompt again with full attention."""
    again = torch.cat([ids, torch.tensor([list(request)], dtype=torch.long), ids], 1)
    attention = model(again, output_attentions=True).attentions[layer]
    num, heads = ids.shape[1], attention.shape[1] // 2
    return attention[0, :, num:, :num].unflatten(0, (2, heads)).amax((1, 2))


@pytest.mark.parametrize("name, request_ids", [("llama", (5, 6, 7)), ("qwen3", ()), ("gemma2", (5, 6, 7))])
def test_kvzip_keeps_what_a_second_reading_attends_to_most(name, request_ids):
    model, (ids, _), layer = build(name, "eager"), prompt(1, 40, (0,)), 1
    scores = most_attention(model, ids, layer, request_ids)
    fastkv.patch(model, fastkv.policies.get("kvzip", prompt=request_ids), small(), evict_every=EVERY)
    exact = model(ids).past_key_values.layers[layer].state.exact
    always = {0, 1, 36, 37, 38, 39}
    for head in range(2):
        ranked = sorted(range(40), key=lambda t: (t not in always, -float(scores[head, t]), t))
        assert set(exact.positions[0, head, :TOKENS].tolist()) == set(ranked[:TOKENS])
        want = scores[head, exact.positions[0, head, :TOKENS].long()]
        torch.testing.assert_close(exact.memory[0, head, :TOKENS], want, atol=1e-4, rtol=1e-4)


def test_a_second_reading_keeps_what_each_chunk_looked_up(monkeypatch):
    found, stock = [], ops.most_attended
    monkeypatch.setattr(ops, "most_attended", lambda *given, **how: found.append(stock(*given, **how)) or found[-1])
    model, (ids, _) = build("llama"), prompt(1, 40, (0,))
    fastkv.patch(model, fastkv.policies.get("kvzip", chunk=16), small(), evict_every=EVERY)
    layers = model(ids).past_key_values.layers
    exact, chunks = layers[0].state.exact, found[:: len(layers)]
    positions = exact.positions[:, :, :TOKENS].long()
    assert len(chunks) == 3 and not torch.equal(torch.stack(chunks).amax(0), chunks[-1])
    torch.testing.assert_close(exact.memory[:, :, :TOKENS], torch.stack(chunks).amax(0).gather(2, positions))


@dataclass(frozen=True)
class Short(FastKVReread):
    """In several chunks."""

    chunk: int = 16


@pytest.mark.parametrize("name", ["llama", "gemma2"])
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


@pytest.mark.parametrize("policy", [Short(), AttentionMatching(chunk=16)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("first", [None, 0, 5])
def test_a_row_does_not_depend_on_its_padding(first, policy):
    """Where its first token stands at `first`, or where the model numbers all tokens, padding included."""
    model, (ids, mask) = build(), prompt(2, 60, (0, 19))
    fastkv.patch(model, policy, small(), evict_every=EVERY)
    places = torch.arange(60).expand(2, -1) if first is None else (mask.cumsum(-1) - 1).clamp(min=0) + first
    together = model(ids, attention_mask=mask, position_ids=None if first is None else places).past_key_values
    alone = model(ids[1:, 19:]).past_key_values
    there = model(ids[1:, 19:], position_ids=places[1:, 19:]).past_key_values  # keys rounded to bf16 in the same places
    for mine, elsewhere, theirs in zip(together.layers, alone.layers, there.layers):
        assert torch.equal(mine.state.exact["positions"][1], elsewhere.state.exact["positions"][0])
        if not policy.second_reading.samples:  # fitted values follow from the last bits of sums
            values = mine.state.parts.values[1], theirs.state.parts.values[0]
            torch.testing.assert_close(*values, rtol=2**-7, atol=1e-4)  # sums in another order, one step of bf16


def test_refusals_of_a_second_reading():
    policy, model = "fastkv-reread", fastkv.patch(build(), "fastkv-reread", small())
    raises("needs the whole context before", fastkv.patch, build(), policy, small(), prefill_block=16)
    raises("reads the prompt with the whole model", fastkv.FastKVAttention, 4, 2, 8, policy=policy, budget=64)
    raises(r"second readings and .* pass input_ids", model, inputs_embeds=torch.randn(1, 30, 48))


def test_quality_keeps_what_the_curve_says(tmp_path):
    model, (ids, _) = build(), prompt(2, 50, (0, 0))
    logits = model(ids).logits[:, :-1].double()
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(-1)
    path = tmp_path / "context.json"
    save_curves(path, [curve(model, "keydiff")])
    fastkv.patch(model, "keydiff", fastkv.Budget(quality=0.9, calibration=path, sinks=2, recent=4))
    cache = model(ids).past_key_values
    k = 0.5 * nll - 3.0
    share = (torch.log1p(0.9 * torch.expm1(k)) / k).max()  # the row that needs most
    assert cache.stored(0).tolist() == [[math.ceil(float(share) * 50)] * 2] * 2
    assert TOKENS < int(cache.stored(0)[0, 0]) < 50
    assert generate(model, ids, new=10).shape == (2, 60)
    cache.reset()
    model(ids[:1, :20], past_key_values=cache)
    assert int(cache.stored(0).max()) <= 20


def test_refusals(tmp_path):
    model = build()
    path, foreign = tmp_path / "context.json", tmp_path / "foreign.json"
    save_curves(path, [curve(model, "snapkv")])
    foreign.write_text(path.read_text().replace(fingerprint(model.config), "0" * 16))

    def refuse(match, policy="snapkv", calibration=path, **options):
        raises(match, fastkv.patch, model, policy, fastkv.Budget(quality=0.9, calibration=calibration), **options)
        assert "_fastkv_config" not in model.__dict__

    refuse(r"no context\.json where the model was loaded from", calibration=None)
    refuse("needs the whole context", prefill_block=16)
    refuse("keydiff", policy="keydiff")
    refuse("there is no calibration file", calibration=tmp_path / "missing.json")
    refuse("fitted to another model", calibration=foreign)
    raises("is for quality", fastkv.Budget, tokens=10, calibration=path)
    budget = fastkv.Budget(quality=0.9, calibration=path)
    raises("has no output embeddings", fastkv.patch, model.model, "snapkv", budget)
    fastkv.patch(model, "kvzip", small())
    raises("decode without an assistant", generate, model, prompt(1, 20, (0,))[0], assistant_model=build())
