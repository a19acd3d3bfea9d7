"""VECTOR in the cache: tokens without values, at equal bytes, on top of any policy."""

import pytest
import torch

import fastkv
from fastkv.calibration.files import fingerprint
from fastkv.calibration.vector_map import VectorMap
from fastkv.errors import FastKVError
from fastkv.integrations.transformers import rotations

from .models import build, generate, policy, prompt
from .pairwise import covering, named
from .test_policy_matrix import EVERY, IN_BLOCKS, NAMES, TOKENS, check, small, two_turns


def linear_model(name="llama", **changes):
    """A model whose values are a linear map of its keys before the rotation, and that map."""
    model = build(name, **changes)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for index, layer in enumerate(model.model.layers):
        maps = torch.randn(2, 16, 16, generator=generator) / 4
        weights[index] = maps
        keys = layer.self_attn.k_proj.weight.detach().view(2, 16, -1)
        layer.self_attn.v_proj.weight.data = (maps.transpose(1, 2) @ keys).reshape(32, -1)
    return model, weights


def mapping(model, weights=None, r2=1.0):
    """A VectorMap for the model; r2 may be a table [layer][head]."""
    layers = range(model.config.num_hidden_layers)
    weights = weights or {layer: torch.randn(2, 16, 16) / 16 for layer in layers}
    table = r2 if isinstance(r2, list) else [[r2, r2]] * len(layers)
    return VectorMap(
        weights=weights,
        r2={layer: torch.tensor(table[layer], dtype=torch.float64) for layer in layers},
        threshold=0.5,
        fingerprint=fingerprint(model.config),
        model="tiny",
        tokens=1,
    )


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
    torch.testing.assert_close(got.logits[real], expected[real], atol=2e-3, rtol=0)
    assert torch.equal(generate(model, ids, mask, new=new), tokens)


@pytest.mark.parametrize("name,block", covering([n for n in NAMES if n != "duoattention"], [None, 16], together=1))
def test_on_top_of_every_policy(name, block, tmp_path):
    if block and name not in IN_BLOCKS:
        return
    model = build()
    chosen = policy(name, tmp_path)
    cache = two_turns(model, chosen, small(), block, correction="vector+moments", vector=mapping(model))
    tiers = [layer.state.approx for layer in cache.layers]
    assert sum(int(tier.lengths.sum()) for tier in tiers if tier is not None)


def test_bytes_of_keys_and_values_are_equal():
    model = build()
    ids, mask = prompt()

    def stored_bytes(**options):
        fastkv.patch(model, "snapkv", small(), evict_every=EVERY, **options)
        cache = model(ids, attention_mask=mask).past_key_values
        total = 0
        for layer in cache.layers:
            parts = [layer.state.exact.keys, layer.state.exact.values]
            parts += [] if layer.state.approx is None else [layer.state.approx.keys]
            total += sum(part.nbytes for part in parts)
        return total

    plain = stored_bytes()
    assert stored_bytes(correction="vector", vector=mapping(model)) == plain
    mixed = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert stored_bytes(correction="vector", vector=mapping(model, r2=mixed)) == plain


def test_a_budget_in_bytes_counts_everything():
    model = build()
    ids, _ = prompt()
    for r2 in (1.0, [[1.0, 0.0]] * 4):
        budget = fastkv.Budget(bytes=40_000, sinks=2, recent=4)
        fastkv.patch(model, "snapkv", budget, correction="vector", vector=mapping(model, r2=r2))
        cache = model(ids).past_key_values
        assert 40_000 - 4 * 600 < cache.nbytes() / 3 <= 40_000


def test_heads_below_the_threshold_fall_back():
    model = build()
    ids, mask = prompt()
    mixed = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=mapping(model, r2=mixed), evict_every=EVERY)
    cache = generate(model, ids, mask, new=20, return_dict_in_generate=True).past_key_values
    check(cache, mask.sum(-1) + 19)
    for layer, row in enumerate(mixed):
        state = cache.layers[layer].state
        for head, r2 in enumerate(row):
            exact = int(state.exact.lengths[0, head])
            approx = 0 if state.approx is None else int(state.approx.lengths[0, head])
            if r2:
                assert TOKENS // 2 <= exact < TOKENS // 2 + EVERY and approx == TOKENS
            else:
                assert TOKENS <= exact < TOKENS + EVERY and approx == 0


def test_values_go_where_the_map_errs_least():
    """Among the kept tokens, exactly those with the largest |v - W k~|^2 keep their value, protected ones first."""
    model = build()
    ids, _ = prompt(1, 50, (0,))
    stock = model(ids).past_key_values.layers[0]
    weights = {layer: torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)) for layer in range(4)}
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=mapping(model, weights), evict_every=EVERY)
    state = model(ids).past_key_values.layers[0].state
    rotary = rotations(model, [0])[0]
    raw = rotary.unrotate(stock.keys.double(), torch.arange(50).expand(1, 2, 50)).double()
    errors = (stock.values.double() - raw @ weights[0].double()).square().sum(-1)
    scores = fastkv.reference.keydiff_scores(stock.keys)
    always = {0, 1, 46, 47, 48, 49}
    for head in range(2):
        ranked = sorted(range(50), key=lambda t: (t not in always, -float(scores[0, head, t]), t))
        kept = ranked[: TOKENS // 2 + TOKENS]
        valued = sorted(kept, key=lambda t: (t not in always, -float(errors[0, head, t]), t))[: TOKENS // 2]
        assert set(state.exact.positions[0, head, : TOKENS // 2].tolist()) == set(valued)
        assert set(state.approx.positions[0, head, :TOKENS].tolist()) == set(kept) - set(valued)


def test_keep_follows_the_paper():
    """p_a = min(p_c / 2, (1 - p_c) / 2): 3/4 of 40 kept leaves 25 pairs and 10 keys, in the room of 30 pairs."""
    model = build()
    ids, _ = prompt(1, 40, (0,))
    budget = fastkv.Budget(keep=0.75, sinks=2, recent=4)
    fastkv.patch(model, "keydiff", budget, correction="vector", vector=mapping(model))
    state = model(ids).past_key_values.layers[0].state
    assert state.exact.lengths.tolist() == [[25, 25]] and state.approx.lengths.tolist() == [[10, 10]]


def test_refusals(tmp_path):
    model = build()
    with pytest.raises(FastKVError, match=r"no vector\.safetensors where the model was loaded from"):
        fastkv.patch(model, "keydiff", small(), correction="vector")
    with pytest.raises(FastKVError, match="is for correction='vector', got another correction"):
        fastkv.patch(model, "keydiff", small(), vector=mapping(model))
    with pytest.raises(FastKVError, match="use one of them"):
        fastkv.patch(model, "keydiff", small(heads="adaptive"), correction="vector", vector=mapping(model))
    path = tmp_path / "map.safetensors"
    mapping(model).save(path)
    with pytest.raises(FastKVError, match="fitted to another model"):
        fastkv.patch(build("qwen3"), "keydiff", small(), correction="vector", vector=path)
    fastkv.patch(model, "keydiff", small(), correction="vector", vector=str(path))
    assert generate(model, *prompt(), new=3).shape == (3, 53)


def test_beams_and_reset():
    model = build()
    ids, mask = prompt()
    mixed = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    fastkv.patch(model, "snapkv", small(), correction="vector", vector=mapping(model, r2=mixed), evict_every=EVERY)
    beams = generate(model, ids, mask, new=15, num_beams=2)
    alone = generate(model, ids[:1], mask[:1], new=15, num_beams=2)
    assert torch.equal(beams[0], alone[0])
    cache = fastkv.FastKVCache(model)
    first = generate(model, ids, mask, new=15, past_key_values=cache)
    cache.reset()
    assert torch.equal(generate(model, ids, mask, new=15, past_key_values=cache), first)
