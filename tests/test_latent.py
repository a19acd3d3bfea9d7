"""Latent attention (MLA): the cache keeps one head of latents, and attention over them is the model's own."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import fastkv
from fastkv import Budget, FastKVCache, FastKVError, ops, reference
from fastkv.backend import Parallel, check_backend
from fastkv.integrations.transformers import INDEXED, REFUSED, modules
from fastkv.lab.reading import equal_bytes
from fastkv.reference import Moments, Slots

from .equal_bytes import assert_equal_bytes
from .models import MLA, account, build, generate, prompt, raises
from .pairwise import covering
from .states import make_spec, make_state, shrink

RANK, TURNED, HEADS = MLA["kv_lora_rank"], MLA["qk_rope_head_dim"], 4
ROOM, SMALL = Budget(tokens=200), Budget(tokens=20, sinks=2, recent=4)
EVERY = 5
pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"), reason="this transformers caches the keys and values of all heads"
)


POLICIES = ["momentkv", "keydiff", "compactor", "h2o", "tova", "kvzip", "fastkv"]
CORRECTIONS = ["none", "mean", "moments", "centroids"]
# The scores of MomentKV need its moments.
PAIRS = covering(POLICIES, CORRECTIONS, together=1, where=lambda name, one: name != "momentkv" or one == "moments")


@pytest.mark.parametrize("name,correction", PAIRS)
def test_policies_and_corrections(name, correction):
    model, (ids, mask) = build("deepseek_v3"), prompt(2, 50, (0, 7))
    fastkv.patch(model, name, SMALL, correction=correction, evict_every=EVERY)
    cache = FastKVCache(model)
    out = generate(model, ids, mask, new=14, past_key_values=cache)
    more = torch.cat([out, prompt(2, 11, (0, 0), seed=2)[0]], 1)  # a second turn
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    assert model(more[:, 63:], attention_mask=mask, past_key_values=cache).logits.isfinite().all()
    account(cache, torch.tensor([75, 68]), sinks=2, recent=4)
    for state in (layer.state for layer in cache.compressed):
        assert int(state.moments.count.min()) > 0
        assert state.parts is None or torch.equal(state.parts.count.sum(-1), state.moments.count.float())


def test_slots_and_moments_are_of_the_latents_that_transformers_caches():
    model, (ids, _) = build("deepseek_v3"), prompt(1, 50, (0,))
    stock = DynamicCache(config=model.config)
    model(ids, past_key_values=stock)
    fastkv.patch(model, "streaming", SMALL, correction="moments", evict_every=EVERY)
    cache = model(ids).past_key_values
    kept, gone = [0, 1, *range(32, 50)], slice(2, 32)
    for layer in range(4):
        state, theirs = cache.layers[layer].state, stock.layers[layer]
        keys = torch.cat([theirs.keys, theirs.values], -1)  # latent, rotated part
        assert state.exact["positions"][0, 0].tolist() == kept
        assert torch.equal(state.exact["keys"], keys[:, :, kept])
        assert torch.equal(state.exact["values"], theirs.keys[:, :, kept])
        empty = Moments.empty(1, 1, RANK + TURNED, RANK, torch.device("cpu"))
        wanted = empty.add(keys[:, :, gone], theirs.keys[:, :, gone])
        torch.testing.assert_close(state.moments.key_mean, wanted.key_mean)
        torch.testing.assert_close(state.moments.cross, wanted.cross, atol=1e-4, rtol=1e-4)


def test_a_token_costs_its_latent_once():
    model, (ids, _) = build("deepseek_v3"), prompt(1, 50, (0,))
    sizes = []
    for tokens in (20, 30):
        fastkv.patch(model, "streaming", Budget(tokens=tokens, sinks=2, recent=4), correction="none")
        sizes.append(model(ids).past_key_values.nbytes())
    assert sizes[1] - sizes[0] == 10 * 4 * (4 * (RANK + TURNED) + 4)  # four layers, fp32, and the position
    for correction in ("none", "moments", "centroids"):
        fastkv.patch(model, "keydiff", Budget(bytes=40_000, sinks=2, recent=4), correction=correction)
        assert_equal_bytes({correction: model(ids).past_key_values}, 40_000)
    equal = equal_bytes(model.config, SMALL, torch.float32, evict_every=EVERY)
    slots, counts = (20 + EVERY) * (4 * (RANK + TURNED) + 4), 4 + 8 + 8
    assert equal.bytes == 4 * (slots + counts)


def test_absorption_is_the_same_attention():
    module = build("deepseek_v3").double().model.layers[0].self_attn
    drawn = [torch.randn(2, 1, 9, size, dtype=torch.float64) for size in (RANK, TURNED)]
    query = torch.randn(2, HEADS, 9, module.qk_head_dim, dtype=torch.float64)
    keys, values = module.expand_kv(*drawn)
    wanted = (query @ keys.mT).softmax(-1) @ values
    key, value = modules.unexpanded(module, *drawn)
    out = (modules.absorbed(module, query) @ key.mT).softmax(-1) @ value
    torch.testing.assert_close(modules.lifted(module, out), wanted, atol=1e-12, rtol=0)
    assert all(map(torch.equal, modules.expanded(module, key, value), (keys, values)))


@pytest.mark.parametrize("correction", ["none", "moments", "centroids"])
def test_slots_of_latents_attend_and_evict_as_slots_of_pairs(correction):
    """The same operations where values are stored, and where they are the first numbers of keys."""
    keys, q, k, block = (torch.randn(2, *shape, 10) for shape in ((1, 12), (4,), (1, 1), (4, 3)))
    lengths, positions = torch.tensor([[10], [9]], dtype=torch.int32), torch.arange(12, dtype=torch.int32)
    spec = make_spec(0.3, correction=correction, tokens=6, spare=6, backend="cpu")
    results = []
    for values in (keys[..., :7].clone(), None):
        moments = Moments.empty(2, 1, 10, 7, keys.device).add(keys[:, :, 10:], keys[:, :, 10:, :7])
        parts = reference.Centroids.empty(2, 1, 3, 10, 7, keys.device) if correction == "centroids" else None
        seen = torch.tensor([12, 11])
        state = make_state(keys.clone(), values, lengths.clone(), seen=seen, moments=moments, parts=parts)
        own = positions.expand(2, 1, 12).clone()
        state.exact = Slots(state.exact.keys, values, state.exact.lengths, own, value_dim=7)
        out = ops.decode_step(q, k, k[..., :7], state, spec)
        shrink(ops, state.exact["keys"].norm(dim=-1), state, spec)
        real = torch.ones(2, 3, dtype=torch.bool)
        again = ops.prefill_attention(block, block[:, :1], block[:, :1, :, :7], real, state, spec)
        held = [state.exact[name][:, :, :6] for name in ("keys", "values", "positions")]
        results.append([*out, *again, *held, state.moments.key_mean, state.moments.cross])
    torch.testing.assert_close(*results)


def refused(model, match, *args, **options):
    before = [dict(vars(module)) for module in model.modules()]
    raises(match, fastkv.patch, model, *args, **options)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_settings_that_need_keys_and_values_of_heads_are_refused():
    model = build("deepseek_v3")
    said = "read values from slots of their own, not out of latents .* use backend='reference'"
    refused(model, said, backend="triton")
    refused(model, "'vector' recovers values from keys, .* caches latents", "keydiff", correction="vector")
    refused(model, "'criticalkv' reads values .* would have to expand", "criticalkv")
    with pytest.raises(FastKVError, match=r"not out of latents .* use backend='reference'"):
        check_backend("auto", torch.device("cuda"), torch.bfloat16, 576, 128, 512, latent=True)


def test_heads_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(Parallel, "of", classmethod(lambda cls, model: cls(0, 2)))
    refused(build("deepseek_v3"), "which all heads share, but tensor parallelism deals heads to processes")


def test_latents_that_are_expanded_in_another_way_are_refused():
    model = build("deepseek_v3")
    attention = model.model.layers[2].self_attn
    projection = attention.kv_b_proj
    attention.kv_b_proj = nn.Sequential(projection)
    refused(model, "layer 2 .* expected a linear kv_b_proj .* got Sequential")
    attention.kv_b_proj = projection.to(torch.float8_e4m3fn)
    refused(model, "layer 2 .* floating-point weights .* got Linear with weights of torch.float8_e4m3fn")
    attention.kv_b_proj = projection.to(torch.float32)
    hook = attention.kv_b_proj.register_forward_hook(lambda module, args, out: out + 0.1)
    refused(model, "layer 2 .* expands them to other keys and values than its kv_b_proj makes")
    hook.remove()
    fastkv.patch(model)
    attention.kv_b_proj = nn.Sequential(projection)  # as an adapter that comes after the patch
    attention.kv_b_proj.weight = projection.weight
    ids, _ = prompt(1, 50, (0,))
    raises("kv_b_proj of DeepseekV3Attention became a Sequential", generate, model, ids)


@pytest.mark.parametrize("name", [name for name, why in REFUSED.items() if why is INDEXED])
def test_models_with_indexers_are_refused(name):
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    model = nn.Module()
    model.config = CONFIG_MAPPING[name]()
    raises(f"{name} is not supported: it attends to tokens that an indexer picks", fastkv.patch, model)


def test_autocast():
    model, (ids, _) = fastkv.patch(build("deepseek_v3"), "keydiff", SMALL), prompt(1, 30, (0,))
    with torch.autocast("cpu", torch.bfloat16):
        raises("not compressed under autocast", model, ids)
        assert model(ids, use_cache=False).logits.isfinite().all()
        model.bfloat16()
        assert model(ids[:, :1], past_key_values=model(ids).past_key_values).logits.isfinite().all()
