"""Single tokens that go past the forward of an attention module (`integrations.transformers.single`)."""

import pytest
import torch
import transformers as hf

import fastkv
from fastkv import cpu
from fastkv.cache.layout import Attends
from fastkv.cpu.slots import rotated

from .models import COMMON, FAMILIES, build, prompt

SERVED = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"}
OTHERS = {
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**COMMON)),  # normalises all heads together
    "cohere2": (hf.Cohere2ForCausalLM, hf.Cohere2Config(**COMMON, layer_types=["full_attention"] * 4)),  # no positions
    "ernie": (hf.Ernie4_5ForCausalLM, hf.Ernie4_5Config(**COMMON)),  # turns i with i + 1
}


def attentions(model):
    return [module for module in model.modules() if "_fastkv_single" in vars(module)]


def steps(model, num=4, grad=False, pads=(0, 7, 19)):
    """Logits of so many tokens after a prompt; they evict twice."""
    ids, mask = prompt(pads=pads)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask).past_key_values
    found = []
    for step in range(1, num + 1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        with torch.set_grad_enabled(grad):
            found.append(model(ids[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(found).detach()


def patched(model):
    return fastkv.patch(model, "keydiff", fastkv.Budget(tokens=24, sinks=2, recent=4), evict_every=2)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_tokens_that_are_served_give_the_same_bits(name):
    cls, config = OTHERS.get(name, (None, None))
    model = patched(build(name, "eager" if name == "gemma2" else "sdpa") if cls is None else cls(config).eval())
    found = steps(model)
    assert {type(one._fastkv_single) for one in attentions(model)} == {Attends if name in SERVED else bool}
    for one in attentions(model):
        one._fastkv_single = False
    assert torch.equal(found, steps(model))


def test_a_forward_like_llamas_that_turns_otherwise_is_left_alone(monkeypatch):
    """Its code names what Llama's does; what it hands on tells."""
    monkeypatch.setattr(hf.models.llama.modeling_llama, "rotate_half", lambda x: x.roll(1, -1))
    model = patched(build())
    steps(model)
    assert all(one._fastkv_single is False for one in attentions(model))


def test_what_is_asked_for_otherwise_is_left_alone():
    """Gradients, autocast, other dtypes, hooks, and forwards of others, as accelerate's."""
    model = patched(build())
    steps(model, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        steps(model)
    steps(patched(build().bfloat16()))
    seen = []
    hook = attentions(model)[0].o_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    steps(model)
    assert seen == [50, 1, 1, 1, 1]
    assert attentions(model)[0]._fastkv_single is None
    hook.remove()
    steps(model)
    assert all(one._fastkv_single for one in attentions(model))
    other = build()
    other.model.layers[1].self_attn.forward = other.model.layers[1].self_attn.forward
    patched(other)
    assert torch.equal(steps(other), steps(model))
    assert [one._fastkv_single is False for one in attentions(other)] == [False, True, False, False]


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 14), (3, 3, 64)])
def test_rotated(shape):
    """Bits as torch's, of angles of one row or of each, of gaps between heads; none without a compiler."""
    batch, rows, dim = shape
    q, k, cos, sin = (torch.randn(*size, dim) for size in ((batch, 1, 4), (batch, 1, 2), *[(rows, 1)] * 2))
    q, k, half = q.transpose(1, 2), k.transpose(1, 2), dim // 2
    for one, found in zip((q, k), rotated(q, k, cos, sin)):
        across = torch.cat([-one[..., half:], one[..., :half]], -1)
        assert torch.equal(found, one * cos[:, None] + across * sin[:, None])


def test_without_a_compiler(monkeypatch):
    found = steps(patched(build()))
    monkeypatch.setattr(cpu, "available", lambda name: False)
    other = patched(build())
    torch.testing.assert_close(steps(other), found, rtol=1e-4, atol=1e-4)
    assert all(one._fastkv_single is False for one in attentions(other))


def test_a_cache_of_a_policy_that_reads_the_output_projection():
    """Of an earlier patch, after other caches were served."""
    model, (ids, _) = build(), prompt(pads=(0,), batch=1)
    fastkv.patch(model, "criticalkv", fastkv.Budget(tokens=24, sinks=2, recent=4), evict_every=2)
    with torch.no_grad():
        caches = [model(ids).past_key_values for _ in range(2)]
        steps(patched(model))
        found = [model(ids[:, step : step + 1], past_key_values=caches[0]).logits for step in range(5)]
        for one in attentions(model):
            one._fastkv_single = False
        want = [model(ids[:, step : step + 1], past_key_values=caches[1]).logits for step in range(5)]
    assert torch.equal(torch.cat(found), torch.cat(want))
