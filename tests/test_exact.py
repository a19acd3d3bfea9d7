"""With a budget that holds everything, a patched model is the stock model, and unpatching leaves no trace."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastkv

from .models import COMBINATIONS, build, generate, prompt
from .pairwise import covering

BLOCKS = [None, 13]


@pytest.mark.parametrize("kind,block", covering(COMBINATIONS, BLOCKS, together=1))
def test_budget_beyond_the_prompt_changes_nothing(kind, block):
    name, base = kind
    model = build(name, base)
    ids, mask = prompt()
    real = mask.bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    plain = model(ids[:1]).logits
    tokens, tokens_plain = generate(model, ids, mask), generate(model, ids[:1])
    fastkv.patch(model, budget=500, prefill_block=block)
    got = model(ids, attention_mask=mask, position_ids=positions).logits
    got_plain = model(ids[:1]).logits
    if block is None:
        assert torch.equal(got[real], padded[real])
        assert torch.equal(got_plain, plain)
    else:
        torch.testing.assert_close(got[real], padded[real], atol=1e-4, rtol=0)
        torch.testing.assert_close(got_plain, plain, atol=1e-4, rtol=0)
    assert torch.equal(generate(model, ids, mask), tokens)
    assert torch.equal(generate(model, ids[:1]), tokens_plain)
    fastkv.unpatch(model)
    assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits[real], padded[real])


@pytest.mark.parametrize("rows", [1, 15])
def test_blocks_keep_only_the_rows_that_logits_need(rows):
    model = build()
    ids, _ = prompt()
    expected = model(ids[:1], logits_to_keep=rows).logits
    fastkv.patch(model, budget=500, prefill_block=13)
    torch.testing.assert_close(model(ids[:1], logits_to_keep=rows).logits, expected, atol=1e-4, rtol=0)


def snapshot(model):
    """Everything patch may touch, by identity."""
    return {
        module_name: (
            set(module.__dict__),
            id(getattr(module, "config", None)),
            list(module._forward_pre_hooks),
            list(module._forward_hooks),
        )
        for module_name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_unpatch_restores_every_attribute(name):
    model = build(name)
    before, keys = snapshot(model), list(model.state_dict())
    fastkv.patch(model, budget=64)
    assert snapshot(model) != before
    assert list(model.state_dict()) == keys
    fastkv.patch(model, "keydiff", budget=40, prefill_block=8)  # re-patch = unpatch + patch
    fastkv.unpatch(model)
    assert snapshot(model) == before
    assert fastkv.unpatch(model) is model
    assert snapshot(model) == before


def test_other_models_are_not_touched():
    shared = build().config
    first, second = type(build())(shared).eval(), type(build())(shared).eval()
    ids, mask = prompt()
    stock = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "flash_attention_2")}
    expected = generate(second, ids, mask)
    fastkv.patch(first, budget=40)
    assert torch.equal(generate(second, ids, mask), expected)
    assert shared._attn_implementation == "sdpa"
    assert all(ALL_ATTENTION_FUNCTIONS[name] is function for name, function in stock.items())


def test_patched_restores_the_model_after_an_error():
    model = build()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="from the block"), fastkv.patched(model, budget=40):
        raise RuntimeError("from the block")
    assert snapshot(model) == before
