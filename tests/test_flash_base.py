"""Models loaded with one of the flash-attn implementations: what transformers then calls, without a GPU or the package.

`tests.flash_attn` stands in for the package and for kernels of the hub; everything of transformers is the real thing.
"""

import sys

import pytest
import torch
import transformers.integrations.hub_kernels as hub
import transformers.modeling_flash_attention_utils as flash
from packaging.version import Version
from transformers import __version__ as transformers_version
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastkv
from fastkv.integrations.transformers import stock

from . import flash_attn
from .models import build, compressed_layers, generate, prompt, raises

SMALL = fastkv.Budget(20, sinks=2, recent=4, heads="uniform")
HUB = "kernels-community/flash-attn2"
BASES = ("flash_attention_2", "flash_attention_3", HUB, "kernels-community/vllm-flash-attn3")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """flash-attn 2 and 3 are there, and the hub has what is asked of it."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.bert_padding"):
        monkeypatch.setitem(sys.modules, name, flash_attn.package(name))
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(hub, "is_kernels_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(hub, "get_kernel", lambda name, *args, **kwargs: flash_attn.package(name))
    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    before = dict(mapping)
    flash_attn.CALLS.clear()
    yield
    mapping.clear()
    mapping.update(before)


def loaded(base, name="llama"):
    """A model as transformers leaves it that was loaded with this implementation."""
    model = build(name)
    flash.lazy_import_flash_attention(base)
    model.config._attn_implementation_internal = base
    return model


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("policy, pads, block", [("momentkv", (0, 7, 19), None), ("fastkv", (0, 0, 0), 16)])
def test_the_first_prompt_goes_through_it_and_everything_else_through_ours(base, policy, pads, block):
    """Once a layer, without padding."""
    ids, mask = prompt(pads=pads)
    mask = mask if any(pads) else None
    expected = generate(fastkv.patch(build(), policy, budget=SMALL, prefill_block=block), ids, mask)
    model = fastkv.patch(loaded(base), policy, budget=SMALL, prefill_block=block)
    flash_attn.CALLS.clear()  # of patch, which may try the model out
    assert torch.equal(generate(model, ids, mask), expected)
    call = ("flash_attn_func", block) if mask is None else ("flash_attn_varlen_func", int(mask.sum()))
    assert flash_attn.CALLS == [(*call, -1)] * 4


@pytest.mark.parametrize("base", ["flash_attention_3", HUB])
def test_layers_with_a_sliding_window_stay_with_it(base):
    ids, mask = prompt()
    expected = generate(fastkv.patch(build("gemma3"), budget=SMALL), ids, mask)
    model = fastkv.patch(loaded(base, "gemma3"), budget=SMALL)
    flash_attn.CALLS.clear()
    cache = generate(model, ids, mask, return_dict_in_generate=True)
    assert torch.equal(cache.sequences, expected) and compressed_layers(cache.past_key_values) == [1, 3]
    prompts = [("flash_attn_varlen_func", int(mask.sum()), window) for window in (15, -1, 15, -1)]
    assert flash_attn.CALLS[:4] == prompts and len(flash_attn.CALLS) == 4 + 11 * 2  # after that the windows only


def with_sinks():
    """A tiny gpt-oss."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, attn_implementation="eager")).eval()


def test_sinks_need_an_implementation_that_the_model_vouches_for():
    model = with_sinks()
    for base in ("flash_attention_2", HUB):
        flash.lazy_import_flash_attention(base)
        model.config._attn_implementation_internal = base
        raises(f"got '{base}' .*ignores s_aux.*attn_implementation='eager'", fastkv.patch, model)
    listed = "kernels-community/vllm-flash-attn3"
    flash.lazy_import_flash_attention(listed)
    model.config._attn_implementation_internal = listed
    model._compatible_flash_implementations = [listed]
    fastkv.patch(model, budget=SMALL)


def test_kernels_of_the_hub_with_another_interface_are_refused():
    model = build()
    for name in ("somebody/sparse-attention", "kernels-community/flash-attn2:another_function"):
        ALL_ATTENTION_FUNCTIONS.register(name, lambda *args, **kwargs: None)
        model.config._attn_implementation_internal = name
        raises("attn_implementation must be one of eager, sdpa, flash_attention_2", fastkv.patch, model)
    assert not stock.is_flash("kernels-community/never-loaded") and stock.is_flash("flash_attention_3")


@pytest.mark.skipif(Version(transformers_version) < Version("5.23"), reason="earlier ones ask for the hub differently")
def test_a_kernel_of_the_hub_as_transformers_loads_it(monkeypatch):
    """Through the public call; transformers 5.23 looks whether `kernels` is installed in another module, too."""
    import transformers.modeling_utils

    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
    model = build()
    model.set_attn_implementation(HUB)
    assert model.config._attn_implementation == HUB
    fastkv.patch(model, "momentkv", budget=SMALL)
    generate(model, *prompt())
    assert flash_attn.CALLS
