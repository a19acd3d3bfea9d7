"""Models that accelerate spread over devices: hooks, weights kept elsewhere, and each layer's state where the layer is.

There is one real device here. The second is meta, which has shapes and no data: enough to see where things are.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

import fastkv
from fastkv.cpu import operations
from fastkv.integrations.transformers.cache import is_static

from .models import build, compressed_layers, generate, prompt, raises, small
from .pairwise import covering

HALVES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
HALVES |= {f"model.layers.{layer}": "cpu" for layer in range(4)}
CASES = {
    "llama": ("momentkv", {}), "qwen3": ("snapkv", {"prefill_block": 16}), "gemma3": ("keydiff", {}),
    "mistral": ("criticalkv", {}),
}  # fmt: skip


def patched(name, model=None):
    policy, options = CASES[name]
    return fastkv.patch(build(name) if model is None else model, policy, small(), evict_every=4, **options)


def written(model):
    return generate(model, *prompt(), new=15)


def dispatched(model):
    return dispatch_model(model, HALVES, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("name, first", [("llama", True), ("qwen3", False), ("gemma3", True), ("mistral", False)])
def test_dispatched_models_write_the_same(name, first):
    """Patched before they are dispatched, or after."""
    model = dispatched(patched(name)) if first else patched(name, dispatched(build(name)))
    assert len([m for m in model.modules() if hasattr(m, "_hf_hook")]) > 4, "hooks are there"
    assert torch.equal(written(model), written(patched(name)))


def test_scores_that_wait_for_a_gpu_are_not_captured():
    model = build()
    for policy, waits in (("compactor", False), ("leverage", False), (fastkv.policies.Leverage(method="svd"), True)):
        assert fastkv.policies.get(policy).waits is waits
    on_gpu = copy.copy(model)
    object.__setattr__(on_gpu, "parameters", lambda: [SimpleNamespace(device=torch.device("cuda"))])
    waiting = fastkv.policies.CriticalKV(base=fastkv.policies.Compactor(method="eig"))
    raises("scores wait for the GPU; use method='cholesky' or leave static out", is_static, on_gpu, True, waiting)
    assert not is_static(on_gpu, None, waiting) and is_static(on_gpu, None, fastkv.policies.get("compactor"))
    assert is_static(model, True, waiting), "a CPU waits for nothing"


def test_unpatching_keeps_hooks():
    ids, mask = prompt()
    model = dispatched(build())
    hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    forwards = {name: module.forward for name, module in model.named_modules()}
    fastkv.unpatch(fastkv.patch(model, budget=small()))
    assert {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooks
    assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert torch.equal(generate(model, ids, mask), generate(build(), ids, mask))


@pytest.mark.parametrize("name, where", [("llama", "cpu"), ("gemma3", "disk")])
def test_weights_that_are_fetched_for_every_layer(name, where, tmp_path):
    """Weights stay in memory or on disk and are brought in while a module runs."""
    model = patched(name)
    offload = cpu_offload if where == "cpu" else lambda m, **kw: disk_offload(m, tmp_path, **kw)
    offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert torch.equal(written(model), written(patched(name)))


def test_offloaded_models_are_patched_before(tmp_path):
    """Weights that are elsewhere cannot be looked at: one sentence, and the model still runs."""
    ids, mask = prompt()
    build().save_pretrained(tmp_path / "model")
    split = {**HALVES, "model.layers.2": "disk", "model.layers.3": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=split, offload_folder=str(tmp_path))
    want = generate(build(), ids, mask)
    assert torch.equal(generate(model, ids, mask), want)
    raises("meta device", fastkv.patch, model, budget=small())
    assert torch.equal(generate(model, ids, mask), want)


def split(model, half=2):
    """The layers from `half` on, and what follows them, on meta; accelerate's hooks move what they are given."""
    for module in (*model.model.layers[half:], model.model.norm, model.lm_head):
        module.to("meta")
        add_hook_to_module(module, AlignDevicesHook(execution_device=torch.device("meta"), place_submodules=True))
    return model


def devices_of(cache):
    """For each compressed layer, where the tensors of its state are."""
    states = [cache.layers[layer].state for layer in compressed_layers(cache)]
    return [{tensor.device.type for _, tensor in state.named_tensors()} for state in states]


@pytest.mark.parametrize("policy, static", [("momentkv", False), ("keydiff", True)])
def test_the_state_lives_where_its_layer_does(policy, static):
    model = split(fastkv.patch(build(), policy, small(), evict_every=3, static=static))
    ids, _ = prompt(2, 40, (0, 0))
    cache = model(ids).past_key_values
    for _ in range(7):
        out = model(ids[:, :1], past_key_values=cache, position_ids=torch.full((2, 1), 40))
        assert out.logits.device.type == "meta"
    assert devices_of(cache) == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]
    assert [str(layer.device) for layer in cache.layers] == ["cpu", "cpu", "meta", "meta"]
    assert all(layer.seen == 47 for layer in cache.layers[:2])
    assert devices_of(cache.clone()) == devices_of(cache.fork(2)) == devices_of(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    assert devices_of(cache) == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


@pytest.fixture
def defaults():
    """Sets torch's default dtype and device for a test, after what was made with others is forgotten."""

    def set_to(dtype, device):
        operations.fused_as_expected.cache_clear()
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)

    yield set_to
    set_to(torch.float32, None)


@pytest.mark.parametrize(
    "policy, dtype",
    covering(["keydiff", "momentkv", "fastkv", "compactor", "h2o"], [torch.float64, torch.bfloat16], together=1),
)
def test_the_default_dtype_does_not_matter(policy, dtype, defaults):
    (ids, mask), model = prompt(), fastkv.patch(build("llama"), policy, small(), evict_every=4, prefill_block=16)
    want = generate(model, ids, mask, new=15)
    defaults(dtype, None)
    assert operations.serves(torch.ones(1, 8, dtype=torch.float32), 8, None)
    assert torch.equal(generate(model, ids, mask, new=15), want)


@pytest.mark.parametrize("policy", ["keydiff", "momentkv", "snapkv"])
def test_the_default_device_does_not_matter(policy, defaults):
    make = lambda: fastkv.FastKVAttention(4, 2, 16, policy, small(), evict_every=4, prefill_block=16)  # noqa: E731
    tokens = [torch.randn(2, heads, 60, 16) for heads in (4, 2, 2)]

    def read(module):
        return torch.cat([module(*part) for part in zip(*(one.split([50, *[1] * 10], 2) for one in tokens))], 2)

    want = read(make())
    defaults(torch.float32, "meta")
    assert torch.equal(read(make()), want)


@pytest.mark.parametrize("policy, options", [("fastkv", {}), ("compactor", {"prefill_block": 16}), ("kvzip", {})])
def test_the_default_device_decides_nothing(policy, options):
    """Not where seeds, positions and plans are: there are no numbers on this one."""
    model, (ids, _), found = build(), prompt(), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            cache = fastkv.FastKVCache(fastkv.patch(model, policy, small(), evict_every=4, **options))
            logits = [model(part, past_key_values=cache).logits for part in (ids, *ids[:, :9].split(1, 1))]
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found)
