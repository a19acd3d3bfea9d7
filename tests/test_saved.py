"""Saved, cloned and forked caches go on exactly as the original would, and a file never loads a lie."""

import functools
import json
import os
import re
import signal
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fastkv
from fastkv import FastKVCache, policies
from fastkv.backend import Parallel
from fastkv.integrations.transformers import serialization as saved

from .conftest import examples
from .models import build, compressed_layers, generate, policy, prompt, raises
from .pairwise import each
from .processes import run
from .test_head_shares import shares_of
from .test_policy_matrix import EVERY, NAMES, small
from .test_vector_cache import mapping

MIXED = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def read_prompt(model, new=10, cache=None):
    """A cache that has read a padded prompt and decoded into the middle of an eviction period, the tokens and mask."""
    ids, mask = prompt()
    cache = cache or FastKVCache(model)
    tokens = generate(model, ids, mask, new=new, past_key_values=cache)
    return cache, tokens, torch.cat([mask, torch.ones(len(mask), new, dtype=torch.long)], 1)


def go_on(model, cache, tokens, mask):
    """Logits of 6 decoded tokens, of a second prompt and of another token: evictions in every way there is."""
    seen, mask = [], mask[:, : tokens.shape[1]]
    word = tokens[:, -1:]
    for part in [None] * 6 + [prompt(len(tokens), 23, (0, 0, 0), seed=5)[0], None]:
        word = word if part is None else part
        more = cache.get_seq_length() + word.shape[1] - mask.shape[1]
        mask = torch.cat([mask, mask.new_ones(len(mask), more)], 1)
        out = model(word, attention_mask=mask, past_key_values=cache)
        seen.append(out.logits)
        word = out.logits[:, -1:].argmax(-1)
    return torch.cat(seen, 1)


def contents(cache):
    """Every tensor and number of a cache, for exact comparison."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if index in compressed_layers(cache):
            state = layer.state
            found |= {f"{index}.{name}": tensor.clone() for name, tensor in state.named_tensors()}
            slots = ((one.filled, one.limit) for one in state.tiers.values())
            found[f"{index}"] = (layer.seen, layer.cache.workspace.clock.now.steps, *slots)
        else:
            found |= {f"{index}.keys": layer.keys.clone(), f"{index}.values": layer.values.clone()}
            found[f"{index}"] = (layer.get_seq_length(),)
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype


def check_round_trip(model, path):
    """Save, load, clone; all three go on bit for bit alike, and a second file is byte for byte the first."""
    cache, tokens, mask = read_prompt(model)
    cache.save(path)
    before = contents(cache)
    again = FastKVCache.load(path, model)
    twin = cache.clone()
    assert_same(contents(again), before)
    assert again.get_seq_length() == cache.get_seq_length()
    again.save(path.with_name("again"))
    assert path.read_bytes() == path.with_name("again").read_bytes()
    size, state = path.stat().st_size, sum(tensor.nbytes for tensor in before.values() if hasattr(tensor, "nbytes"))
    assert 0 < size - state < 16_000, "the header and nothing else comes on top"
    expected = go_on(model, twin, tokens, mask)
    assert_same(contents(cache), before)
    assert torch.equal(go_on(model, again, tokens, mask), expected)
    assert torch.equal(go_on(model, cache, tokens, mask), expected)
    assert_same(contents(cache), contents(again))
    assert_same(contents(cache), contents(twin))
    assert not torch.equal(contents(cache)["1.seen"], before["1.seen"])


@pytest.mark.parametrize("name", each(NAMES, often=("expected-attention", "triattention")))
def test_every_policy(name, tmp_path):
    check_round_trip(fastkv.patch(build(), policy(name, tmp_path), small(), evict_every=EVERY), tmp_path / "cache")


MOMENTS = {"correction": "moments", "evict_every": EVERY}
LIMITS = {"sinks": 2, "recent": 4}
BUDGETS = {
    "keep": fastkv.Budget(keep=0.3, **LIMITS),
    "bytes": fastkv.Budget(bytes=40_000, **LIMITS),
    "weights": fastkv.Budget(tokens=20, **LIMITS, layers=[1, 2, 1, 3]),
    "pyramid-adaptive": fastkv.Budget(tokens=20, **LIMITS, layers="pyramid", heads="adaptive"),
}
WIDE = partial(build, head_dim=32)
SETTINGS = {  # how a model is made and patched
    **{f"{name} adaptive": (build, name, small(heads="adaptive"), MOMENTS) for name in ("h2o", "keydiff", "kvzip")},
    **{f"{budget} {block}": (build, "snapkv", BUDGETS[budget], {"prefill_block": block})
       for budget, block in zip(BUDGETS, [None, 16, None, 16])},
    **{f"{slots} {heads}": (WIDE, "snapkv", small(heads=heads), {"evict_every": EVERY, "slots": slots})
       for slots, heads in zip(("int8", "fp8", "int4", "k8v4"), ("adaptive", "uniform", "adaptive", "adaptive"))},
    "calibrated": (build, "keydiff", small(heads=shares_of(build())), {"evict_every": EVERY}),
    "vector": (build, "h2o", small(), MOMENTS | {"vector": mapping(build(), r2=MIXED), "correction": "vector+moments"}),
    **{name: (partial(build, name), "keydiff", small(), MOMENTS) for name in ("gemma3", "qwen3_moe", "deepseek_v3")},
    **{f"{name} {dtype}": (lambda name=name, dtype=dtype: build(name).to(dtype), "h2o", small(), MOMENTS)
       for name, dtype in (("llama", torch.float16), ("gemma3", torch.bfloat16), ("llama", torch.float64))},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(setting, tmp_path):
    """Gemma's sliding-window layers are transformers' and saved too."""
    make, name, budget, options = SETTINGS[setting]
    check_round_trip(fastkv.patch(make(), name, budget, **options), tmp_path / "cache")


def test_kernels_and_reference_read_each_others_files(tmp_path):
    """Kernels keep a half-precision copy of cross / count: it is read where it was saved and made where it was not."""
    model, step = build(num_hidden_layers=2).bfloat16(), torch.finfo(torch.bfloat16)
    ids, mask = prompt(1, 30, (3,))
    files = {}
    for backend in ("reference", "triton"):
        fastkv.patch(model, "momentkv", small(), evict_every=EVERY, backend=backend)
        files[backend] = tmp_path / backend
        model(ids, attention_mask=mask).past_key_values.save(files[backend])
    for saved_by in files:
        for read_by in files:
            fastkv.patch(model, "momentkv", small(), evict_every=EVERY, backend=read_by)
            cache = FastKVCache.load(files[saved_by], model)
            moments = cache.moments(1)
            assert (moments.slope is not None) == (read_by == "triton")
            if moments.slope is not None:
                exact = moments.cross.double() / moments.count.clamp(min=1).double()[..., None, None]
                near = (moments.slope.double() - exact).abs() <= step.eps * exact.abs() + step.tiny
                assert near.all() and moments.slope.any()
            cache.save(tmp_path / "again")
            if saved_by == read_by:
                assert (tmp_path / "again").read_bytes() == files[read_by].read_bytes()


def test_what_may_still_be_rolled_back_is_not_saved(tmp_path):
    model = fastkv.patch(build("gemma3"), "keydiff", small(), evict_every=EVERY)
    cache = FastKVCache(model)
    cache.activate_past_recording()
    model(prompt(1, 50, (0,))[0], past_key_values=cache)
    raises(r"may still be rolled back.*cache\.crop\(0\)", cache.save, tmp_path / "cache")


def test_rows_may_be_chosen_before_saving(tmp_path):
    """Without the row of the longest head, the room that kernels are told of is larger than any head."""
    model = fastkv.patch(build(), "snapkv", small(heads="adaptive"), evict_every=EVERY)
    whole, tokens, mask = read_prompt(model)
    for row in range(3):
        cache = whole.clone()
        cache.batch_select_indices(torch.tensor([row]))
        cache.save(tmp_path / "cache")
        again = FastKVCache.load(tmp_path / "cache", model)
        rows = tokens[row : row + 1], mask[row : row + 1]
        assert torch.equal(go_on(model, again, *rows), go_on(model, cache, *rows))


# What is refused.


@functools.cache
def saved_bytes():
    """A model and the file of a small cache of it, made once."""
    import tempfile

    model = fastkv.patch(build(), "h2o", small(heads="adaptive"), correction="mean", evict_every=EVERY)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        cache, _, _ = read_prompt(model)
        cache.save(Path(directory) / "cache")
        return model, (Path(directory) / "cache").read_bytes()


def refused(path, model, sentence):
    """Loading fails with one sentence that names the file."""
    raises(rf"(?=.*{re.escape(str(path))}).*({sentence})", FastKVCache.load, path, model)


@settings(max_examples=examples(500))
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), early=st.booleans())
def test_any_flipped_bit_is_noticed(place, bit, early, tmp_path_factory):
    model, content = saved_bytes()
    index = int(place * (struct.unpack("<Q", content[:8])[0] + 8 if early else len(content)))
    broken = bytearray(content)
    broken[index] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(broken)
    refused(path, model, r"is damaged|cannot be read as a saved cache|without the header|has format")


@settings(max_examples=examples(100))
@given(share=st.floats(0, 1, exclude_max=True), more=st.sampled_from([b"", b"\0", b"more"]))
def test_any_truncation_is_noticed(share, more, tmp_path_factory):
    model, content = saved_bytes()
    path = tmp_path_factory.getbasetemp() / "truncated"
    path.write_bytes(content[: int(share * len(content))] if not more else content + more)
    refused(path, model, "cannot be read as a saved cache")


def test_other_files(tmp_path):
    model, _ = saved_bytes()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "json").write_text(json.dumps({"format": "something else"}))
    torch.save({"keys": torch.zeros(3)}, tmp_path / "pickle")
    for name in ("", "empty", "json", "pickle"):
        refused(tmp_path / name, model, "cannot be read as a saved cache")
    refused(tmp_path / "none", model, "No such file or directory")
    mapping(model).save(tmp_path / "vector")
    refused(tmp_path / "vector", model, r"expected a saved cache, got one without the header fastkv\.cache")


def rewritten(path, content, change=None, tensors=None):
    """The file with a changed header or tensors and a digest that fits: a forgery, or a file of another version."""
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[saved.HEADER].partition(" ")[2])
    held = load_file(path)
    if tensors:
        tensors(held)
    header = (change(header) or header) if change else header
    words = json.dumps(header)
    save_file(held, path, {saved.HEADER: f"{saved._digest(words, held)} {words}"})
    return path


def test_newer_versions(tmp_path):
    model, content = saved_bytes()
    FastKVCache.load(rewritten(tmp_path / "same", content), model)
    new = rewritten(tmp_path / "new", content, lambda header: header.update(version=2))
    refused(new, model, "has format 2, but this fastkv reads formats up to 1; update fastkv")


def of_layer(name, value):
    """A field of the second layer in the header is another."""
    return lambda header: header["layers"][1].update({name: value})


@pytest.mark.parametrize(
    "change",
    [lambda header: [header],
     *(lambda header, name=name: header.pop(name) and None for name in ("version", "layers", "settings")),
     lambda header: header.update(version="1"), lambda header: header["layers"].pop() and None,
     lambda header: header["layers"].__setitem__(1, {"cumulative_length": 3}),
     lambda header: header["layers"][1].pop("exact.filled") and None,
     lambda header: header["settings"].update(dtype="torch.float16"), *(of_layer("seen", value) for value in (-1, 10)),
     *(of_layer("steps", value) for value in (True, EVERY)), *(of_layer("tokens.0", value) for value in (21, "20")),
     of_layer("approx.0", 20), of_layer("exact.filled", 1), of_layer("exact.limit", 10_000)],
)  # fmt: skip
def test_forged_headers(change, tmp_path):
    model, content = saved_bytes()
    refused(rewritten(tmp_path / "forged", content, change), model, "is damaged|was saved with")


@pytest.mark.parametrize(
    "name, value",
    [("exact.keys", None), ("exact.memory", None), ("exact.keys", lambda t: t.half()),
     ("exact.values", lambda t: t[:, 1:].clone()), ("exact.lengths", lambda t: t[:1].clone()),
     ("exact.lengths", lambda t: t[0].clone()), *(("exact.lengths", value) for value in (1000, -1)),
     *(("exact.starts", value) for value in (5, lambda t: t * 2)),
     *(("exact.positions", value) for value in (-1, 10_000)), ("moments.count", 0), ("seen", 10_000)],
)  # fmt: skip
def test_forged_tensors(name, value, tmp_path):
    """Numbers that would make a kernel read outside its slots are refused even under a digest that fits."""

    def forge(held):
        tensor = held.pop(f"1.{name}")
        if isinstance(value, int):
            tensor.flatten()[0] = value
        if value is not None:
            held[f"1.{name}"] = value(tensor) if callable(value) else tensor

    model, content = saved_bytes()
    refused(rewritten(tmp_path / "forged", content, tensors=forge), model, "is damaged")


def test_other_models_and_settings(tmp_path):
    model, path = build(), tmp_path / "cache"
    options = {"evict_every": EVERY, "correction": "moments"}
    fastkv.patch(model, "snapkv", small(), **options)
    read_prompt(model)[0].save(path)
    qwen = fastkv.patch(build("qwen3"), "snapkv", small(), **options)
    refused(path, qwen, r"holds a cache of another model \(llama, 4 layers of width 48.*got qwen3, 4 layers")
    deeper = fastkv.patch(build(num_hidden_layers=5, layer_types=None), "snapkv", small(), **options)
    refused(path, deeper, r"another model \(llama, 4 layers.*got llama, 5 layers")
    half = fastkv.patch(build().to(torch.bfloat16), "snapkv", small(), **options)
    refused(path, half, r"saved with dtype=torch\.float32, got dtype=torch\.bfloat16; load and patch")
    vector = {"correction": "vector+moments", "vector": mapping(model)}
    others = {
        "policy=snapkv, got policy=keydiff;": {"policy": "keydiff"},
        r"policy\.window=32, got policy\.window=16;": {"policy": policies.get("snapkv", window=16)},
        r"budget\.tokens=20, got budget\.tokens=24;": {"budget": small(tokens=24)},
        "budget.recent=4, budget.sinks=2, got budget.recent=5, budget.sinks=1;": {"budget": small(sinks=1, recent=5)},
        r"budget\.heads=uniform, got budget\.heads=adaptive;": {"budget": small(heads="adaptive")},
        "correction=moments, got correction=mean;": {"correction": "mean"},
        "budget.heads": {"budget": small(heads=shares_of(model))},
        "was saved with slots=model, got slots=int8": {"slots": "int8"},
        f"evict_every={EVERY}, got evict_every=8;": {"evict_every": 8},
        "correction=moments, vector=None, got correction=vector[+]moments, vector=": vector,
    }
    for sentence, other in others.items():
        refused(path, fastkv.patch(model, **{"policy": "snapkv", "budget": small(), **options, **other}), sentence)
    raises("needs a patched model", FastKVCache.load, path, fastkv.unpatch(model))
    fastkv.patch(model, "snapkv", small(), prefill_block=16, backend="triton", **options)
    FastKVCache.load(path, model)


def test_another_map_or_pattern_is_refused(tmp_path):
    model, path = build(), tmp_path / "cache"
    options = {"correction": "vector", "evict_every": EVERY}
    fastkv.patch(model, "snapkv", small(), vector=mapping(model), **options)
    read_prompt(model)[0].save(path)
    refused(path, fastkv.patch(model, "snapkv", small(), vector=mapping(model), **options), "vector=.*, got vector=")
    fastkv.patch(model, policy("duoattention", tmp_path), small(), evict_every=EVERY)
    read_prompt(model)[0].save(path)
    moved = tmp_path / "moved.tsv"
    moved.write_bytes((tmp_path / "pattern.tsv").read_bytes())
    fastkv.patch(model, fastkv.policies.get("duoattention", pattern=str(moved)), small(), evict_every=EVERY)
    FastKVCache.load(path, model)
    other = tmp_path / "other.tsv"
    other.write_text("1.0\t0.1\n" * 4)
    fastkv.patch(model, fastkv.policies.get("duoattention", pattern=str(other)), small(), evict_every=EVERY)
    refused(path, model, r"heads of \[6, 34\] tokens in layer 1, but policy 'duoattention' now gives them \[34, 6\]")


def test_what_cannot_be_saved(tmp_path):
    model = fastkv.patch(build("gemma3"), "keydiff", small(), evict_every=EVERY)
    path = tmp_path / "cache"
    path.write_text("old")
    cache = FastKVCache(model)
    raises("an empty cache cannot be saved; run the model with it first", cache.save, path)
    read_prompt(model, cache=cache)
    raises("cannot be written", cache.save, tmp_path / "no" / "directory")
    raises("cannot be written", cache.save, tmp_path)
    raises("cannot be written", cache.save, os.devnull)  # which would become a file
    cache.workspace.parallel = Parallel(0, 2)
    raises("by one process, but 2 share this model's heads; load it without", cache.save, path)
    raises("by one process, but 2 share this model's heads; load it without", saved.read, path, cache, model)
    assert path.read_text() == "old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache"]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from tests.models import build
from tests.test_saved import read_prompt, small
import fastkv

model = fastkv.patch(build(), "keydiff", small())
cache, _, _ = read_prompt(model, new=3)
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
cache.save(sys.argv[1])
"""


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    """Killed with the new file safe on disk and not yet in place."""
    path, model = tmp_path / "cache", fastkv.patch(build(), "keydiff", small())
    read_prompt(model)[0].save(path)
    old = path.read_bytes()
    code, _, errors = run(KILLED, tmp_path / "process", str(path))
    assert code == -signal.SIGKILL, errors
    names = {one.name for one in tmp_path.iterdir()} - {"process"}
    assert path.read_bytes() == old and len(names) == 2, "the new file was being written"
    FastKVCache.load(path, model)
    read_prompt(model, new=5)[0].save(path)
    assert FastKVCache.load(path, model).get_seq_length() == 54
