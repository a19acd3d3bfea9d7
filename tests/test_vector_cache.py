"""VECTOR in the cache: tokens without values, at equal bytes, on top of any policy."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import fastkv
from fastkv.backend import Parallel
from fastkv.cache.layout import LayerPlan
from fastkv.calibration import KEEPS, HeadShares, fingerprint
from fastkv.calibration.fits import VectorMap
from fastkv.config import Config
from fastkv.integrations.transformers import rotations
from fastkv.integrations.transformers.calibrate import weights_digest

from .models import build, generate, prompt, raises
from .pairwise import covering, named
from .test_policy_matrix import EVERY, TOKENS, check, small, two_turns


def linear_model(name="llama", **changes):
    """A model whose values are a linear map of its keys before the rotation, and that map."""
    model = build(name, **changes)
    weights = {layer: torch.randn(2, 16, 16) / 4 for layer in range(len(model.model.layers))}
    for index, layer in enumerate(model.model.layers):
        keys = layer.self_attn.k_proj.weight.detach().view(2, 16, -1)
        layer.self_attn.v_proj.weight.data = (weights[index].transpose(1, 2) @ keys).reshape(32, -1)
    return model, weights


def mapping(model, weights=None, r2=1.0, joint=False):
    """A VectorMap for the model; r2 may be a table [layer][head], [layer][1] for a joint map."""
    layers = range(model.config.num_hidden_layers)
    weights = weights or {layer: torch.randn(2, 16, 16) / 16 for layer in layers}
    table = r2 if isinstance(r2, list) else [[r2] if joint else [r2, r2]] * len(layers)
    r2 = {layer: torch.tensor(table[layer], dtype=torch.float64) for layer in layers}
    return VectorMap(weights, r2, threshold=0.5, fingerprint=fingerprint(model.config), model="tiny", tokens=1)


@pytest.mark.parametrize(
    "block,backend", [(None, "reference"), (16, "reference"), (None, "triton"), named(16, "triton", slow=True)]
)
def test_recovered_values_are_exact_where_the_map_is(block, backend):
    """36 pairs' room holds 18 pairs and 36 keys: more than the sequence, so nothing but values is lost."""
    model, weights = linear_model(num_hidden_layers=1)
    ids, mask = prompt(2, 40, (0, 7))
    new = 3 if backend == "triton" else 12
    expected = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    tokens = generate(model, ids, mask, new=new)
    budget = fastkv.Budget(tokens=36, sinks=2, recent=4)
    options = {"correction": "vector", "vector": mapping(model, weights), "backend": backend, "evict_every": 4}
    fastkv.patch(model, "keydiff", budget, prefill_block=block, **options)
    got = model(ids, attention_mask=mask)
    assert got.past_key_values.layers[0].state.approx.lengths.min() > 0
    assert (got.past_key_values.moments(0).count == 0).all()
    real = mask.bool()
    torch.testing.assert_close(got.logits[real], expected[real], atol=1e-4, rtol=0)
    assert torch.equal(generate(model, ids, mask, new=new), tokens)


def test_a_budget_in_bytes_counts_everything():
    model, (ids, _) = build(), prompt()
    for r2 in (1.0, [[1.0, 0.0]] * 4):
        budget = fastkv.Budget(bytes=40_000, sinks=2, recent=4)
        fastkv.patch(model, "snapkv", budget, correction="vector", vector=mapping(model, r2=r2))
        assert 40_000 - 4 * 600 < model(ids).past_key_values.nbytes() / 3 <= 40_000


def test_heads_below_the_threshold_fall_back():
    model, (ids, mask) = build(), prompt()
    mixed = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=mapping(model, r2=mixed), evict_every=EVERY)
    cache = generate(model, ids, mask, new=20, return_dict_in_generate=True).past_key_values
    check(cache, mask.sum(-1) + 19)
    for layer, row in enumerate(mixed):
        state = cache.layers[layer].state
        for head, r2 in enumerate(row):
            pairs, keys = (TOKENS // 2, TOKENS) if r2 else (TOKENS, 0)
            assert pairs <= int(state.exact.lengths[0, head]) < pairs + EVERY
            assert (0 if state.approx is None else int(state.approx.lengths[0, head])) == keys


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("joint", [False, True], ids=["head", "joint"])
def test_a_token_without_value_attends_with_what_the_map_makes_of_its_key(joint, backend):
    """Here no linear map gives values: the stock model says the same of a cache of what the map makes of those keys."""
    model, (ids, _) = build(), prompt(2, 50, (0, 0))
    maps = mapping(model, joint_weights() if joint else None, joint=joint)
    stock = model(ids).past_key_values
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=maps, backend=backend, evict_every=EVERY)
    cache = model(ids).past_key_values
    token = torch.tensor([[5], [9]])
    kept = DynamicCache()
    for index, layer in enumerate(cache.layers):
        turned, values = stock.layers[index].keys, stock.layers[index].values
        raw = rotations(model, [index])[index].unrotate(turned, torch.arange(50).expand(2, 2, 50))
        seen = [torch.cat([raw[:, 0], raw[:, 1]], -1)] * 2 if joint else raw.unbind(1)
        made = [keys @ weight for keys, weight in zip(seen, maps.weights[index])]
        state, tokens = layer.state, (TOKENS // 2, TOKENS)
        assert all((slots.lengths == held).all() for slots, held in zip(state.tiers.values(), tokens))
        places = [slots["positions"][:, :, :held].long() for slots, held in zip(state.tiers.values(), tokens)]
        exact, approx = (place[..., None].expand(-1, -1, -1, 16) for place in places)
        told = torch.cat([values.gather(2, exact), torch.stack(made, 1).gather(2, approx)], 2)
        kept.update(torch.cat([turned.gather(2, exact), turned.gather(2, approx)], 2), told, index)
    got = model(token, past_key_values=cache).logits
    fastkv.unpatch(model)
    expected = model(token, past_key_values=kept, position_ids=torch.full((2, 1), 50)).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    assert (model(token, past_key_values=stock).logits - expected).abs().max() > 1e-2


def joint_weights():
    generator = torch.Generator().manual_seed(4)
    return {layer: torch.randn(2, 32, 16, generator=generator) / 16 for layer in range(4)}


@pytest.mark.parametrize("name, block", covering(["keydiff", "momentkv", "h2o", "compactor"], [None, 16], together=1))
def test_with_a_joint_map_all_heads_keep_the_same_tokens(name, block):
    """Through prompts, evictions and a second turn."""
    model = build()
    options = {"correction": "vector+moments", "vector": mapping(model, joint_weights(), joint=True)}
    for layer in two_turns(model, name, small(), block, **options).layers:
        for slots in layer.state.tiers.values():
            assert torch.equal(slots.lengths[:, 0], slots.lengths[:, 1])
            for places, length in zip(slots["positions"], slots.lengths[:, 0]):
                assert torch.equal(*places[:, :length])


def test_layers_whose_joint_map_is_poor_evict_each_head_for_itself():
    model, (ids, mask) = build(), prompt()
    maps = mapping(model, joint_weights(), r2=[[1.0], [0.2], [1.0], [0.2]], joint=True)
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=maps, evict_every=EVERY)
    cache = generate(model, ids, mask, new=20, return_dict_in_generate=True).past_key_values
    check(cache, mask.sum(-1) + 19)
    for layer in (1, 3):
        state = cache.layers[layer].state
        assert state.approx is None
        assert not torch.equal(*state.exact.positions[0, :, : int(state.exact.lengths.min())].sort(-1).values)


def test_calibrated_heads_of_a_layer_with_a_joint_map_keep_their_mean():
    model, (ids, _) = build(), prompt(1, 50, (0,))
    table = torch.tensor([[[1.6, 0.8], [1.2, 0.4]] * 2] * len(KEEPS)).half()
    known = fingerprint(model.config), "tiny", weights_digest(model)
    shares = HeadShares(table, (2,) * 4, *known, tokens=1)
    options = {"correction": "vector", "vector": mapping(model, joint_weights(), joint=True), "evict_every": EVERY}
    fastkv.patch(model, "keydiff", fastkv.Budget(tokens=TOKENS, sinks=2, recent=2, heads=shares), **options)
    cache = model(ids).past_key_values
    stored = [cache.stored(layer)[0].tolist() for layer in range(4)]
    assert all(first == second for first, second in stored) and stored[0][0] > stored[1][0]


@pytest.mark.parametrize("joint", [False, True], ids=["head", "joint"])
def test_values_go_where_the_map_errs_least(joint):
    """Among the kept tokens, exactly those with the largest |v - W k~|^2 keep their value, protected ones first. With a
    joint map heads decide together: by the mean of their z-scores, then by the sum of their errors."""
    model, (ids, _) = build(), prompt(1, 50, (0,))
    stock = model(ids).past_key_values.layers[0]
    own = {layer: torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)) for layer in range(4)}
    maps = mapping(model, joint_weights() if joint else own, joint=joint)
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=maps, evict_every=EVERY)
    state = model(ids).past_key_values.layers[0].state
    raw = rotations(model, [0])[0].unrotate(stock.keys.double(), torch.arange(50).expand(1, 2, 50)).double()
    seen = raw[0].transpose(0, 1).flatten(1) if joint else raw[0]
    errors = (stock.values[0].double() - seen @ maps.weights[0].double()).square().sum(-1)
    scores = fastkv.reference.keydiff_scores(stock.keys)[0].double()
    if joint:
        scores = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True, correction=0)
        scores, errors = scores.mean(0).expand(2, -1), errors.sum(0).expand(2, -1)
    always = {0, 1, 46, 47, 48, 49}
    for head in range(2):
        ranked = sorted(range(50), key=lambda t: (t not in always, -float(scores[head, t]), t))
        kept = ranked[: TOKENS // 2 + TOKENS]
        valued = sorted(kept, key=lambda t: (t not in always, -float(errors[head, t]), t))[: TOKENS // 2]
        assert set(state.exact.positions[0, head, : TOKENS // 2].tolist()) == set(valued)
        assert set(state.approx.positions[0, head, :TOKENS].tolist()) == set(kept) - set(valued)


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_the_share_of_keys_is_an_option(share):
    """20 pairs' room: 20 (1 - share) pairs and twice as many keys as the others; what is protected stays a pair."""
    model, (ids, _) = build(), prompt(1, 90, (0,))
    chosen = fastkv.corrections.get("vector", share=share)
    fastkv.patch(model, "keydiff", small(), correction=chosen, vector=mapping(model), evict_every=EVERY)
    state = model(ids).past_key_values.layers[0].state
    pairs = max(round(TOKENS * (1 - share)), 6)
    assert state.exact.lengths.tolist() == [[pairs, pairs]]
    assert share == 0 or state.approx.lengths.tolist() == [[2 * (TOKENS - pairs)] * 2]
    assert (share == 0) == (state.approx is None)


def test_refusals(tmp_path):
    model = build()
    joint = mapping(model, joint_weights(), joint=True)
    config = replace(Config.make("keydiff", small(), None, 1, "vector", "reference", None), vector=joint)
    plan, cpu = LayerPlan(config, parallel=Parallel(rank=1, size=2)), torch.device("cpu")
    raises("needs them in one process, got 2; fit one map a head", plan.layout, 1, cpu, TOKENS)
    for share in (-0.1, 1.1, "half", True):
        raises(r"vector: share must be in \[0, 1\]", fastkv.corrections.get, "vector", share=share)
    raises("correction 'moments' has no option share; it has none", fastkv.corrections.get, "moments", share=0.5)
    patch = partial(fastkv.patch, model, "keydiff")
    raises(r"no vector\.safetensors where the model was loaded from", patch, small(), correction="vector")
    raises("is for correction='vector', got another correction", patch, small(), vector=mapping(model))
    raises("use one of them", patch, small(heads="adaptive"), correction="vector", vector=mapping(model))
    path = tmp_path / "map.safetensors"
    mapping(model).save(path)
    raises("fitted to another model", fastkv.patch, build("qwen3"), "snapkv", small(), correction="vector", vector=path)
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=str(path))
    assert generate(model, *prompt(), new=3).shape == (3, 53)
