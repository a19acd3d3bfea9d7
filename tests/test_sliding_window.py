"""Layers with a sliding window attend as transformers makes them, but copy no keys for each query in a decode step."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastkv
from fastkv.integrations.transformers.attention import window_attention

from .models import build, prompt, small

B, HQ, HKV, D, N = 2, 6, 2, 8, 11


def random_mask(num, heads):
    mask = torch.rand(B, heads, num, N) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("masked", ["none", "alike", "each head", "beside a tensor"])
def test_it_is_what_transformers_computes(num, masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, rows, D) for heads, rows in ((HQ, num), (HKV, N), (HKV, N)))
    mask = None if masked == "none" else random_mask(num, HQ if masked == "each head" else 1)
    more = {"position_bias": torch.randn(B, HQ, num, N)} if masked == "beside a tensor" else {}
    module = SimpleNamespace(
        num_key_value_groups=HQ // HKV, is_causal=True, config=None,
        _fastkv_stock_config=SimpleNamespace(_attn_implementation="sdpa"),
    )  # fmt: skip
    want, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, scaling=0.4, **more)
    got, _ = window_attention(module, q, k, v, mask, scaling=0.4, **more)
    assert got.shape == want.shape == (B, num, HQ, D)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def attended(model, cache, ids, **options):
    """Heads of keys that sdpa is given in a step, as where it is compiled."""
    found = []

    def watched(query, key, *args, **more):
        found.append(key.shape[1])
        return sdpa(query, key, *args, **more)

    asked = "transformers.integrations.sdpa_attention.is_torchdynamo_compiling"
    compiling = mock.patch(asked, lambda: True, create=True)
    with compiling, mock.patch("torch.nn.functional.scaled_dot_product_attention", watched), torch.no_grad():
        model(ids, past_key_values=cache, **options)
    return found


@pytest.mark.parametrize("static", [False, True])
def test_a_step_copies_no_keys(static):
    model, (ids, mask) = build("gemma3"), prompt()
    fastkv.patch(model, "keydiff", fastkv.Budget(tokens=20, sinks=2, recent=4), static=static)
    cache = model(ids, attention_mask=mask).past_key_values
    longer = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    heads = attended(model, cache, ids[:, :1], attention_mask=longer, position_ids=torch.full((len(mask), 1), 50))
    assert heads == [model.config.num_key_value_heads] * 2


def test_an_empty_cache_may_be_copied_for_more_sequences():
    model, ids = fastkv.patch(build("gemma3"), budget=small(heads="uniform"), static=True), prompt(1, 30, (0,))[0]
    want = model(ids.expand(2, -1)).logits
    assert torch.equal(model(ids.expand(2, -1), past_key_values=fastkv.FastKVCache(model).fork(2)).logits, want)


@pytest.mark.parametrize("base, name", [("sdpa", "fastkv_window"), ("eager", "eager")])
def test_only_where_sdpa_attends_and_until_unpatched(base, name):
    model = build("gemma3", base)
    layers = [layer.self_attn for layer in model.model.layers if layer.self_attn.sliding_window]
    fastkv.patch(model, "keydiff", fastkv.Budget(tokens=20, sinks=2, recent=4))
    assert [layer.config._attn_implementation for layer in layers] == [name] * 2
    fastkv.unpatch(model)
    assert [layer.config._attn_implementation for layer in layers] == [base] * 2
    assert all(layer.config is model.config for layer in layers)
