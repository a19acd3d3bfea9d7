"""Shares of heads: how they are found, what they come to in tokens, the file, and the caches that follow them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastkv
from fastkv import Budget, FastKVAttention, FastKVCache, HeadShares, calibrate_heads, calibration
from fastkv.cache.layer import LayerCache
from fastkv.calibration import KEEPS, describe, fingerprint, weights_digest
from fastkv.integrations.transformers import calibrate

from .families import tiny
from .models import build, generate, policy, prompt, refused
from .pairwise import named
from .test_vector_cache import mapping

HEADS, LAYERS = 2, 4
TEXT = torch.arange(3, 88).repeat(3)  # fits twice into the positions of a model


def shares_of(model=None, seed=0, heads=(HEADS,) * LAYERS):
    """Random shares, the less stays the more they differ; of the model's shape, if one is given."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.rand(1, len(heads), max(heads), generator=draw) ** torch.linspace(0.1, 4, len(KEEPS))[:, None, None]
    table *= torch.arange(max(heads)) < torch.tensor(heads)[:, None]
    table *= sum(heads) / table.sum((1, 2), keepdim=True)
    known = ("0" * 16, "none", "0" * 16)
    if model is not None:
        known = (fingerprint(model.config), describe(model.config), weights_digest(model))
    return HeadShares(table.half(), tuple(heads), *known, tokens=1)


# What they come to.


def test_shares_have_the_mean_one_and_are_linear_in_the_logarithm():
    shares = shares_of()
    for keep in (1.0, 0.7, 0.25, 0.1, 1 / 64, 0.001):
        torch.testing.assert_close(shares.shares(keep).mean(), torch.tensor(1.0))
    below, above = shares.shares(KEEPS[4]), shares.shares(KEEPS[5])
    middle = shares.shares((KEEPS[4] * KEEPS[5]) ** 0.5)
    torch.testing.assert_close(middle, (below + above) / 2, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(shares.shares(1e-9), shares.shares(KEEPS[-1]))


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, float("nan")])
def test_a_share_of_the_text_is_a_share(keep):
    refused("keep must be in (0, 1]", shares_of().shares, keep)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    *(st.integers(0, 40), st.integers(1, 300), st.integers(0, 3000), st.booleans()),
)
def test_all_tokens_are_dealt_and_none_twice(heads, reserved, more, context, weighted):
    """The total is met to a token, every head has what is protected, and none more than there is."""
    average = reserved + more
    steep = [1.95 - 1.9 * layer / max(len(heads) - 1, 1) for layer in range(len(heads))]  # PyramidKV's
    layers = tuple(steep) if weighted and more > reserved else None
    found = shares_of(heads=tuple(heads)).tokens_of(average, context, reserved, layers)
    flat = [number for layer in found for number in layer]
    assert [len(layer) for layer in found] == heads and sum(flat) == average * sum(heads)
    assert min(flat) >= max(reserved, 1)
    if context > average:
        assert max(flat) <= context
    elif layers is None:
        assert set(flat) == {average}


def test_heads_that_keep_all_there_is_leave_the_rest_to_the_others():
    """Most heads have nearly all of the text, and what the first layers may not take is much."""
    heads, steep = (2,) * 30, tuple(1.95 - 1.9 * layer / 29 for layer in range(30))
    for context, average in ((1000, 990), (1100, 1089), (200, 180)):
        flat = [number for layer in shares_of(heads=heads).tokens_of(average, context, 36, steep) for number in layer]
        assert max(flat) <= context and sum(flat) == 60 * average


def test_a_text_that_fits_is_kept_by_all_heads():
    assert shares_of().tokens_of(200, 200, 4) == ((200,) * HEADS,) * LAYERS
    assert shares_of().tokens_of(200, 201, 4) != ((200,) * HEADS,) * LAYERS


def test_layers_share_as_they_are_told_and_heads_within_them():
    weights = (1.0, 2.0, 3.0, 4.0)
    found = shares_of().tokens_of(200, 1000, 0, weights)
    assert [sum(layer) for layer in found] == [160 * weight for weight in weights]
    wanted = shares_of().shares(0.2)
    assert all((row[0] > row[1]) == (layer[0] > layer[1]) for layer, row in zip(found, wanted.tolist()))


# How they are found.


def test_the_hull_of_a_curve_lies_below_it_and_is_convex():
    curve = torch.tensor([9.0, 8.9, 4.0, 4.5, 3.0, 2.9, 2.8], dtype=torch.float64)
    found = calibrate.hull(curve)
    assert (found <= curve + 1e-12).all() and (found.diff().diff() >= -1e-12).all()
    torch.testing.assert_close(found, torch.tensor([9, 6.5, 4, 3.5, 3, 2.9, 2.8], dtype=torch.float64))


def test_tokens_go_where_they_save_most():
    """Of two heads of which one needs twice as many tokens: the sum of the curves is least, floor aside."""
    flat = (1 - torch.linspace(0, 1, calibrate.POINTS + 1, dtype=torch.float64)) ** 2
    steep = 0.2 * flat
    table = calibrate.shares_of([torch.stack([flat, steep])])
    for keep, row in zip(KEEPS, table[:, 0].double()):
        total = round(2 * keep * calibrate.POINTS)
        best = min(range(total + 1), key=lambda n: _cost(flat, n) + _cost(steep, total - n))
        got = row[0] * keep * calibrate.POINTS
        assert abs(got - min(best, total * 0.95)) <= 1.5, (keep, best, got)


def _cost(curve, steps):
    return curve[steps] if steps < len(curve) else float("inf")


def test_a_curve_is_what_a_head_loses_by_keeping_only_its_best_tokens(monkeypatch):
    """Against attention itself over the tokens that are kept, in float64."""
    model = build("llama", dtype=torch.float64).double()
    ids, seen, add = torch.randint(3, 90, (1, 96)), {}, calibrate.Watched.add

    def watched(self, loss, gradient):
        before = self.curves.clone()
        add(self, loss, gradient)
        if loss == 0:
            seen[self.cache.layer] = (self, gradient, self.curves - before)

    monkeypatch.setattr(calibrate.Watched, "add", watched)
    calibrate.curves(model, ids, 0, lambda tokens: None, ids)
    assert sorted(seen) == [0, 1, 2, 3]
    held, gradient, curves = seen[2]
    weights, values = held.weights.double(), held.held[2][0].double()
    out, g = (part[0].double().unflatten(0, (HEADS, -1)) for part in (held.output.detach(), gradient))
    points = torch.linspace(0, 96, calibrate.POINTS + 1).round().long()
    for head in range(HEADS):
        for place in (0, 20, 64, calibrate.POINTS):
            kept = held.order[head, : points[place]]
            old, own = weights[head][..., kept], held.own_output[head].double()
            mass = old.sum(-1) + held.own_weight[head].double()
            less = (old @ values[head, kept] + own) / mass[..., None]
            want = ((less - out[head]) * g[head]).sum(-1).sum(0).square().sum()
            torch.testing.assert_close(curves[0, head, place].double(), want, rtol=5e-3, atol=1e-9)


def test_the_last_point_of_a_curve_costs_nothing():
    model, ids = build("llama"), torch.randint(3, 90, (1, 128))
    for curve in calibrate.curves(model, ids, 0, lambda tokens: None, ids):
        assert curve[:, 0].min() > 0 and curve[:, -1].abs().max() < 1e-6 * curve[:, 0].max()


@pytest.fixture(scope="module")
def own():
    """A model and its shares."""
    model = build("llama")
    return model, calibrate_heads(model, text=TEXT)


def test_calibration_is_deterministic_and_leaves_the_model_alone(own, tmp_path):
    model, shares = own
    before = generate(model, prompt()[0])
    counted = []
    again = calibrate_heads(model, tmp_path / "heads.safetensors", TEXT, 0, counted.append)
    assert torch.equal(again.table, shares.table) and again.heads == (HEADS,) * LAYERS
    assert sum(counted) == 2 * again.tokens == 2 * 255
    assert torch.equal(generate(model, prompt()[0]), before) and "_fastkv_config" not in vars(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(calibrate_heads(model, text=TEXT, seed=1).table, shares.table)


def test_the_models_own_text(monkeypatch):
    """It begins where the model's texts begin, and is the same for a seed."""
    monkeypatch.setattr(calibrate, "LENGTH", 40)
    model = build("llama", bos_token_id=7)
    first, second = calibrate.own_texts(model, 0)
    assert first.shape == second.shape == (1, calibrate.ROWS * 40)
    assert (first.view(calibrate.ROWS, 40)[:, 0] == 7).all()
    again, other = calibrate.own_texts(model, 0), calibrate.own_texts(model, 1)
    assert torch.equal(again[1], second) and not torch.equal(other[1], second)
    (long, _) = calibrate.own_texts(model, 0, rows=1)
    assert long.shape == first.shape and long[0, 0] == 7


@pytest.mark.parametrize("name, again", [("llama", True), ("deepseek_v3", True), ("gemma3", False)])
def test_beside_other_layers_a_text_goes_on_and_is_not_read_again(name, again, monkeypatch):
    """Layers with a window know nothing of what is read again, so that all of it would seem to be the heads' part."""
    read, curves = [], calibrate.curves

    def watched(model, ids, seed, progress, behind):
        read.append((ids, behind))
        return curves(model, ids, seed, progress, behind)

    monkeypatch.setattr(calibrate, "curves", watched)
    text, counted = TEXT[None], []
    calibrate_heads(build(name), text=text[0], progress=counted.append)
    ((first, behind),) = read
    assert torch.equal(first, text if again else text[:, :128])
    assert torch.equal(behind, first if again else text[:, 128:])
    assert sum(counted) == (1 + again) * 255


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_other_families(name):
    """Layers with sliding windows, soft-caps and experts: as many shares as there are compressed heads."""
    model, (ids, mask) = build(name, "eager" if name == "gemma2" else "sdpa"), prompt()
    shares = calibrate_heads(model, text=TEXT)
    fastkv.patch(model, "keydiff", Budget(tokens=24, sinks=2, recent=4, heads=shares), evict_every=4)
    cache = model(ids, attention_mask=mask).past_key_values
    stored = torch.cat([cache.stored(layer.cache.layer)[0] for layer in cache.compressed])
    assert len(stored) == sum(shares.heads) and int(stored.sum()) == 24 * len(stored)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma4_text:shared-keys"])
def test_states_that_layers_write_over_and_what_they_read_of_others(name):
    assert calibrate_heads(tiny.build(name), text=TEXT).heads == (2, 2)


def test_no_text_is_read_beyond_the_positions():
    """GPT-2 has an embedding for each, and no other: they hold half as many tokens, as a text is read twice."""
    assert calibrate_heads(tiny.build("gpt2", n_positions=300)).tokens == 2 * 150
    assert calibrate_heads(tiny.build("gpt2", n_positions=300), text=TEXT).tokens == len(TEXT)
    refused("128 tokens twice", calibrate_heads, tiny.build("gpt2", n_positions=250))


def test_training_is_neither_calibrated_with_nor_changed():
    model, ids = build("llama", attention_dropout=0.5), TEXT
    want = calibrate_heads(model, text=ids)
    model.train()
    model.model.layers[1].eval()
    assert torch.equal(calibrate_heads(model, text=ids).table, want.table)
    assert model.training and model.model.layers[0].mlp.training and not model.model.layers[1].mlp.training


def test_parts_of_a_model_are_not_calibrated(monkeypatch, tmp_path):
    """They need a file, as the heads of other processes are not there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate.Parallel, "of", lambda model: calibrate.Parallel(rank=0, size=2))
    refused("tensor parallelism", calibrate_heads, build("llama"), text=TEXT)
    refused("tensor parallelism", calibrate.shares_for, build("llama"), "calibrated")


def test_what_cannot_be_calibrated():
    model = build("llama")
    refused("at least 128 tokens", calibrate_heads, model, text=torch.arange(20))
    refused("token ids", calibrate_heads, model, text=torch.rand(500))
    for text in ("hello " * 500, ["hello"] * 500, [[1], [1, 2]], object()):
        refused(f"128 tokens, got {type(text).__name__};", calibrate_heads, model, text=text)
    refused("no output embeddings", calibrate_heads, model.model)
    refused("cannot be written", calibrate_heads, model, "nowhere/heads.safetensors")
    fastkv.patch(model, "keydiff", 64)
    refused("stock model", calibrate_heads, model, text=TEXT)


@pytest.mark.parametrize("size", [{}, {"slots": "int8", "prefill_block": 16}], ids=["whole", "blocks"])
def test_shares_may_be_of_a_text_that_the_budget_names(size):
    """Whatever the prompt, also one that is shorter than the budget; and they stay so while the text grows."""
    model = build("llama")
    shares = shares_of(model)
    budget = Budget(tokens=24, sinks=2, recent=4, heads=shares, context=300)
    fastkv.patch(model, "keydiff", budget, evict_every=4, **size)
    for length in (10, 60):
        cache = FastKVCache(model)
        generate(model, prompt(1, length, (0,))[0], new=40, past_key_values=cache)
        made = [layer.cache.rule.layout.tokens for layer in cache.compressed]
        assert made == list(shares.tokens_of(24, 300, 6)) and len(set(made)) > 1
    refused("context is for budgets of tokens or bytes, got keep", Budget, keep=0.5, context=300)
    refused("context must be an integer of at least 1", Budget, tokens=64, context=0)


# The file.


def test_a_file_gives_the_same_shares(own, tmp_path):
    model, shares = own
    file = tmp_path / "heads.safetensors"
    shares.save(file)
    assert file.stat().st_size < 100_000
    again = HeadShares.load(file, model.config)
    assert torch.equal(again.table, shares.table) and repr(again) == repr(shares)
    refused("another model", HeadShares.load, file, build("llama", num_hidden_layers=2).config)
    file.write_bytes(file.read_bytes()[:-9])
    refused("cannot be read", HeadShares.load, file, model.config)
    refused("cannot be read", HeadShares.load, tmp_path / "none.safetensors", model.config)
    nothing = (torch.arange(len(KEEPS)) > 0).half().view(-1, 1, 1).expand(-1, 1, 2)
    for table, said in ((nothing * torch.nan, "finite"), (nothing, "finite"), (nothing[:2], "of shape")):
        refused(said, HeadShares, table, (2,), "", "", "", 1)


def test_where_patch_finds_them(own, tmp_path, monkeypatch, capsys):
    """Where they are known, else they are made and one line says so."""
    stock, shares = own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "calibrate_heads", make := mock.Mock(return_value=shares))
    assert calibrate.shares_for(stock, "calibrated") is shares and make.call_count == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "Budget(heads='uniform')" in told
    found = calibrate.shares_for(stock, "calibrated")  # in the cache now
    assert torch.equal(found.table, shares.table) and make.call_count == 1 and not capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "fastkv").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    assert calibrate.shares_for(stock, "calibrated") is shares and "not stored" in capsys.readouterr().err


def test_a_digest_is_of_the_weights_and_not_of_their_dtype():
    model = build("llama").bfloat16()
    digest = weights_digest(model)
    assert weights_digest(model.float()) == digest
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert weights_digest(model) != digest


@pytest.mark.calibrated
def test_the_default_is_calibrated(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "LENGTH", 40)
    model = fastkv.patch(build("llama"))
    config = FastKVCache(model).config
    assert "heads=calibrated" in repr(FastKVCache(model))
    assert config.policy.name == "fastkv" and isinstance(config.budget.heads, HeadShares)
    assert [file.suffix for file in (tmp_path / "fastkv" / "heads").iterdir()] == [".safetensors"]


def test_what_the_caller_is_in_does_not_change_the_shares(own):
    model, shares = own
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            assert torch.equal(calibrate_heads(model, text=TEXT).table, shares.table)
    with torch.inference_mode():
        made = build("llama")
    refused("weights made in inference mode", calibrate_heads, made, text=TEXT)


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    folder = calibration.user_cache("heads")
    assert folder == calibration.user_cache("heads") and folder.parts[-2:] == ("fastkv", "heads")
    assert folder.parents[1].stat().st_mode & 0o077 == 0, "nobody else can put anything there"


@pytest.mark.calibrated
def test_a_patched_model_is_calibrated_and_stays_patched(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "LENGTH", 40)
    model = fastkv.patch(build("llama"), "keydiff", Budget(tokens=64, heads="uniform"))
    monkeypatch.setattr(calibrate, "own_texts", lambda model, seed, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fastkv.patch(model, "snapkv")
    assert FastKVCache(model).config.policy.name == "keydiff"


def test_models_whose_rotation_follows_the_length_get_another_default():
    """As they grow their frequencies change, so that keys cannot be turned back."""
    model = build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    assert FastKVCache(fastkv.patch(model)).config.policy.name == "momentkv"
    assert FastKVCache(fastkv.patch(model)).config.correction.name == "moments"
    refused("frequencies change", fastkv.patch, model, "fastkv")
    fastkv.unpatch(model)
    assert calibrate_heads(model, text=TEXT).heads == (HEADS,) * LAYERS


# What a budget says.


def test_budgets_take_a_file_or_shares(own, tmp_path):
    model, shares = build("llama"), own[1]
    file = tmp_path / "heads.safetensors"
    shares.save(file)
    for heads in (file, str(file), shares):
        fastkv.patch(model, "keydiff", Budget(tokens=64, heads=heads))
        assert repr(FastKVCache(model).config.budget.heads) == repr(shares)
    refused("heads must be", Budget, tokens=64, heads="adaptively")
    refused("another model", fastkv.patch, model, "keydiff", Budget(tokens=64, heads=shares_of()))
    refused("shares of 2 layers", Budget(tokens=64, heads=shares_of(heads=(2, 2))).check_layers, 4)


def test_a_policy_that_fixes_heads_takes_no_shares(own, tmp_path):
    model, shares = build("llama"), own[1]
    fixed = policy("duoattention", tmp_path)
    refused("fixes how many tokens", fastkv.patch, model, fixed, Budget(tokens=64, heads=shares))
    fastkv.patch(model, fixed, 64)  # what nobody asked for gives way
    assert FastKVCache(model).config.budget.heads == "uniform"


# Caches.

KINDS = {"correction": ("moments", "centroids"), "backend": ("reference", "triton"), "policy": ("fastkv", "kvzip")}
KINDS |= {"slots": ("int8", "int4")}
SETTINGS = {name: {kind: name} for kind, names in KINDS.items() for name in names}
SETTINGS |= {"whole": {}, "blocks": {"prefill_block": 16}}


def patched(model, shares, tokens=20, **settings):
    settings = {"policy": "keydiff", "evict_every": 4, **settings}
    return fastkv.patch(model, budget=Budget(tokens=tokens, sinks=2, recent=4, heads=shares), **settings)


def kept(cache):
    """Tokens that each head holds, [B, all heads]."""
    return torch.cat([cache.stored(layer.cache.layer) for layer in cache.compressed], 1)


def dealt(shares, context):
    """Tokens that each head is to hold of a text of that many."""
    return [number for layer in shares.tokens_of(20, context, 6) for number in layer]


@pytest.mark.parametrize("setting", [named(name, slow=name in ("triton", "whole", "reference")) for name in SETTINGS])
def test_heads_hold_what_they_are_dealt_and_memory_stays(setting):
    """After a prompt and after decoding, in every mode; bytes are those of heads that are alike, starts aside. Dealt
    anew, with every slot in use, attention reads what the slots hold: a copy goes on alike."""
    model, settings = build("llama", head_dim=32), SETTINGS[setting]
    shares, (ids, mask) = shares_of(model), prompt(length=80)
    caches = []
    for heads in ("uniform", shares):
        patched(model, heads, **settings)
        caches.append(FastKVCache(model))
        model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=caches[-1])
    uniform, unequal = (sum(layer.cache.nbytes() for layer in one.compressed) for one in caches)
    assert unequal <= uniform + 3 * LAYERS * (HEADS + 1) * 4
    cache, want = caches[-1], dealt(shares, 60)
    assert sum(want) == 20 * len(want) and len(set(want)) > 2
    assert kept(cache)[0].tolist() == want  # the row without padding
    for place in range(60, 82):  # 1.25 times as many are reached, and an eviction is due
        if place == 68:
            assert kept(cache)[0].tolist() == want
        model(torch.full((3, 1), place % 9 + 3), past_key_values=cache)
    twin = cache.clone()
    for token in range(3, 13):
        one, other = (model(torch.full((3, 1), token), past_key_values=each).logits for each in (cache, twin))
        assert torch.equal(one, other) and one.isfinite().all()
    assert kept(cache)[0].tolist() != want
    assert int(kept(cache)[0].sum()) <= (20 + 4) * HEADS * LAYERS


def test_heads_are_dealt_anew_as_a_text_grows():
    """A short prompt is kept whole, a long one after it or much decoding makes heads differ; the total stays."""
    model, (ids, _) = build("llama"), prompt(batch=1, length=200, pads=(0,))
    shares = shares_of(model)
    patched(model, shares, backend="reference")  # it reads nothing beyond a slab
    cache = model(ids[:, :12]).past_key_values
    assert (kept(cache) == 12).all()
    model(ids[:, 12:80], past_key_values=cache)
    assert kept(cache)[0].tolist() == dealt(shares, 80)
    bytes_then = sum(layer.cache.nbytes() for layer in cache.compressed)
    for place in range(80, 112):
        model(ids[:, place : place + 1], past_key_values=cache)
    assert kept(cache)[0].tolist() == dealt(shares, 104) != dealt(shares, 80)  # at 104 > 1.25 * 80, where one was due
    assert sum(layer.cache.nbytes() for layer in cache.compressed) == bytes_then


def test_layers_whose_keys_others_read_are_dealt_anew_too():
    model, (ids, _) = tiny.build("gemma4_text:shared-keys"), prompt(batch=1, length=150, pads=(0,))
    shares = shares_of(model, heads=(2, 2))
    patched(model, shares)
    cache = model(ids[:, :12]).past_key_values
    for place in range(12, 124):
        model(ids[:, place : place + 1], past_key_values=cache)
    source, alone = (layer.cache for layer in cache.compressed)
    assert source.context == alone.context == 108 and source.kv_sharers != alone.kv_sharers
    assert kept(cache)[0].tolist() == dealt(shares, 108)


def test_a_later_prompt_in_blocks_is_dealt_for_all_of_it():
    model, (ids, _), found = build("llama"), prompt(batch=1, length=200, pads=(0,)), []
    shares = shares_of(model)
    patched(model, shares, prefill_block=32)
    cache = model(ids[:, :60]).past_key_values
    with pytest.MonkeyPatch.context() as patch:
        stock = LayerCache.deal
        patch.setattr(LayerCache, "deal", lambda self, *how: found.append(stock(self, *how)) or found[-1])
        model(ids[:, 60:], past_key_values=cache)
    assert sum(found) == LAYERS and kept(cache)[0].tolist() == dealt(shares, 200)


def test_a_copy_of_a_block_that_may_be_taken_back_is_its_own():
    """Slots are dealt where the block lies."""
    model, (ids, _) = build("llama"), prompt(batch=1, length=60, pads=(0,))
    patched(model, shares_of(model), backend="reference")
    cache, alone = FastKVCache(model), FastKVCache(model)
    for one in (cache, alone):
        one.activate_past_recording()
        model(ids, past_key_values=one)
    twin = cache.clone()
    cache.crop(0)
    for one in (twin, alone):
        one.crop(-3)
    for one, other in zip(twin.compressed, alone.compressed):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.state.named_tensors(), other.state.named_tensors()))


def test_after_a_reset_heads_are_dealt_for_the_next_text():
    model, (ids, _) = build("llama"), prompt(batch=1, length=200, pads=(0,))
    patched(model, shares_of(model))
    cache, fresh = FastKVCache(model), FastKVCache(model)
    model(ids, past_key_values=cache)
    cache.reset()
    for one in (cache, fresh):
        model(ids[:, :60], past_key_values=one)
    assert torch.equal(kept(cache), kept(fresh))


def test_a_layer_that_keeps_all_of_a_growing_text_gets_slots_for_it():
    """The first layers have room for the whole text: what follows a first prompt needs more slots than they have."""
    model, (ids, _) = build("llama"), prompt(batch=1, length=80, pads=(0,))
    equal = torch.ones(len(KEEPS), LAYERS, HEADS, dtype=torch.float16)
    patched(model, replace(shares_of(model), table=equal), policy="pyramidkv", tokens=40, backend="reference")
    cache = model(ids[:, :60]).past_key_values
    model(ids[:, 60:70], past_key_values=cache)
    for place in range(70, 73):
        model(ids[:, place : place + 1], past_key_values=cache)
    slots = cache.compressed[0].cache.state.exact
    assert (kept(cache)[0, :2] == 73).all() and (slots.starts.diff(dim=-1) >= slots.lengths).all()
    assert torch.equal(slots["positions"][0, :, :73].sort(dim=-1).values, torch.arange(73).expand(2, -1).int())


@pytest.mark.parametrize("static", [False, True])
def test_padding_is_no_text(static):
    """However much of it there is, tokens that fit into the budget stay, also while a text grows."""
    model, (ids, mask) = build("llama"), prompt(batch=1, length=50, pads=(0,))
    want = generate(model, ids, mask, new=20)
    patched(model, shares_of(model), tokens=80, static=static)
    for pads in (60, 200):
        padded = (torch.nn.functional.pad(part, (pads, 0)) for part in (ids, mask))
        made = generate(model, *padded, new=20, return_dict_in_generate=True)
        assert torch.equal(made.sequences[:, pads:], want)
        assert (kept(made.past_key_values) == 69).all()


def test_vector_shares_keys_as_pairs():
    """Each head deals its own room to pairs and to keys without values."""
    model = build("llama")
    shares = shares_of(model)
    patched(model, shares, correction="vector", vector=mapping(model), tokens=24)
    cache = model(prompt(batch=1, length=80, pads=(0,))[0]).past_key_values
    for layer, want in zip(cache.compressed, shares.tokens_of(24, 80, 6)):
        layout = layer.cache.rule.layout
        assert [pairs + keys // 2 for pairs, keys in zip(layout.tokens, layout.approx or (0, 0))] == list(want)


def test_static_steps_keep_their_slots():
    """A static cache is dealt once, by its first prompt: addresses stay."""
    model, (ids, _) = build("llama"), prompt(batch=1, length=120, pads=(0,))
    shares = shares_of(model)
    patched(model, shares)
    cache = FastKVCache(model, static=True)
    model(ids[:, :80], past_key_values=cache)
    addresses = [tensor.data_ptr() for tensor in cache.changed()]
    for place in range(80, 96):
        model(ids[:, place : place + 1], past_key_values=cache)
    assert kept(cache)[0].tolist() == dealt(shares, 80)
    model(ids[:, 96:], past_key_values=cache)
    assert kept(cache)[0].tolist() == dealt(shares, 80)
    assert [tensor.data_ptr() for tensor in cache.changed()] == addresses


def test_a_module_takes_shares_of_the_whole_model():
    shares = shares_of()
    layer = FastKVAttention(4, HEADS, 16, "keydiff", Budget(tokens=20, sinks=2, recent=4, heads=shares), layer=1,
                            num_layers=LAYERS, evict_every=4)  # fmt: skip
    layer.allocate(1, prompt=80)
    assert layer.cache.rule.layout.tokens == shares.tokens_of(20, 80, 6)[1]
    refused("4 layers of 2 KV heads", FastKVAttention, 4, 4, 16, "keydiff", Budget(tokens=20, heads=shares, recent=4),
            layer=1, num_layers=LAYERS)  # fmt: skip
    refused("HeadShares.load", FastKVAttention, 4, 4, 16, "keydiff", Budget(tokens=64, heads="a.safetensors"))


def test_shares_that_are_known_are_found_and_none_are_made(own, tmp_path, monkeypatch, capsys):
    """In the user's cache, before it beside the model; what is of other weights is refused."""
    model, shares = own
    monkeypatch.setattr(calibrate, "user_cache", lambda kind: tmp_path / kind)
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path / "model"))
    assert calibrate.known_shares(model) is None
    cached = tmp_path / "heads" / f"{shares.weights}-{shares.fingerprint}.safetensors"
    beside = tmp_path / "model" / "heads.safetensors"
    for place in (cached, beside):
        place.parent.mkdir()
        shares.save(place)
        assert repr(calibrate.known_shares(model)) == repr(shares)
    with beside.open("wb"):
        refused("cannot be read", calibrate.known_shares, model)
    beside.unlink()
    cached.write_bytes((whole := cached.read_bytes())[:-9])
    assert calibrate.known_shares(model) is None, "what is damaged in the cache is made anew"
    cached.write_bytes(whole)
    other = replace(shares, weights="0" * 16)
    other.save(beside)
    refused("other weights", calibrate.known_shares, model)
    assert repr(calibrate.known_shares(build("llama").half(), beside)) == repr(other)
    assert "float16 do not tell" in capsys.readouterr().err
    beside.unlink()
    monkeypatch.setattr(Path, "is_file", partial(pytest.fail, "raises where nobody may look"))
    assert repr(calibrate.known_shares(model)) == repr(shares)


def test_the_command(own, tmp_path, monkeypatch, capsys):
    from fastkv.lab import cli, common

    monkeypatch.setattr(calibrate, "LENGTH", 40)
    monkeypatch.setattr(common, "load", lambda name: (build("llama"), None))
    assert cli.main(["calibrate", "heads", "--model", "tiny", "--out", str(tmp_path / "heads.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "320 tokens" in said and "heads=" in said
    rows = [line for line in said.splitlines() if line.startswith("  head ")]
    assert len(rows) == HEADS and all(len(row.split("|")[1]) == LAYERS for row in rows)
    assert HeadShares.load(tmp_path / "heads.safetensors", build("llama").config).tokens == 320
