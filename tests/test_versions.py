"""What fastkv takes for granted about transformers, one assumption a test; a broken one says what changed.

Run this file first with a new version of transformers: whatever fails here names the place in fastkv that leans on it.
"""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from fastkv.integrations.transformers.forward import prepares_masks
from fastkv.integrations.transformers.layer import FastKVLayer, WindowLayer
from fastkv.integrations.transformers.stock import CACHE
from fastkv.parallel import MESHES

from . import multimodal
from .models import FAMILIES, build, prompt

FOUND = Version(transformers.__version__)
ROOT = Path(__file__).parent.parent
TRANSFORMERS = ROOT / "fastkv" / "integrations" / "transformers"
ASSUMPTIONS = {}
BROKEN = (AttributeError, ImportError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)


def assumed(place, sentence):
    """Register a check that returns whether what `sentence` says still holds; `place` is what leans on it."""

    def register(check):
        file = next(one / place for one in (TRANSFORMERS, ROOT / "fastkv") if (one / place).is_file()).relative_to(ROOT)
        ASSUMPTIONS[check.__name__] = (check, f"transformers {FOUND}: {sentence}, which {file.as_posix()} relies on")
        return check

    return register


def complaint(name):
    """The sentence of a broken assumption, None if it holds."""
    check, sentence = ASSUMPTIONS[name]
    try:
        return None if check() else sentence
    except BROKEN as error:
        return f"{sentence} ({type(error).__name__}: {str(error).splitlines()[0]})"


def names(function):
    """Names of its parameters."""
    return list(inspect.signature(function).parameters)


class Recorder(FastKVLayer):
    """A layer that remembers what a cache asks of it, and is otherwise a stock layer."""

    def __init__(self):
        from transformers.cache_utils import CacheLayerMixin

        CacheLayerMixin.__init__(self)
        self.calls, self.is_compileable, self.batch_size = [], True, 1

    def __getattribute__(self, name):
        if name in ASKED:
            return lambda *args, **kwargs: self.calls.append((name, args)) or ASKED[name]
        return object.__getattribute__(self, name)


ASKED = {
    "update": ("keys", "values"),
    "get_seq_length": 8,
    "get_mask_sizes": (3, 8),
    "get_max_length": -1,
    "get_max_cache_shape": -1,
    "reorder_cache": None,
    "batch_repeat_interleave": None,
    "batch_select_indices": None,
    "reset": None,
    "crop": None,
}


def recording_cache():
    from transformers.cache_utils import Cache

    layers = [Recorder(), Recorder()]
    return Cache(layers=layers), layers


# The cache and its layers.


@assumed("layer.py", "Cache no longer hands what it is asked on to the layers that it is given")
def caches_ask_their_layers():
    cache, layers = recording_cache()
    found = cache.update("k", "v", 1)
    one = found == ("keys", "values") and layers[1].calls[0][1][:2] == ("k", "v") and not layers[0].calls
    lengths = cache.get_seq_length() == cache.get_seq_length(1) == 8 and cache.get_mask_sizes(3, 1) == (3, 8)
    asked = ("get_mask_sizes", (3,)) in layers[1].calls
    wanted = [("reorder_cache", "a"), ("batch_repeat_interleave", 2), ("batch_select_indices", "b"), ("crop", -2)]
    for name, argument in wanted:
        getattr(cache, name)(argument)
    cache.reset()
    calls = [*((name, (argument,)) for name, argument in wanted), ("reset", ())]
    return one and lengths and asked and all(set(calls) <= set(layer.calls) for layer in layers)


@assumed("layer.py", "Cache.is_compileable no longer follows from its layers")
def cache_compiles_if_its_layers_do():
    cache, layers = recording_cache()
    before = cache.is_compileable
    layers[0].is_compileable = False
    return before and not cache.is_compileable


@assumed("layer.py", "a cache layer has a new abstract method, or another constructor")
def layers_are_complete():
    return not FastKVLayer.__abstractmethods__ and not WindowLayer.__abstractmethods__ and Recorder()


@assumed("layer.py", "cache layers announce roll-backs (activate_past_recording) in other versions than 5.14 and later")
def roll_backs_are_announced():
    from transformers.cache_utils import Cache

    return hasattr(Cache, "activate_past_recording") == (Version("5.14") <= FOUND)


@assumed("cache.py", "DynamicCache(config=...) makes other layers than DynamicLayer and DynamicSlidingWindowLayer")
def stock_layers_are_dynamic():
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=FAMILIES["gemma3"][1].get_text_config(decoder=True)).layers
    kinds = [type(layer) for layer in layers]
    return kinds == [DynamicSlidingWindowLayer, DynamicLayer] * 2 and layers[0].sliding_window == 16


@assumed("layer.py", "DynamicSlidingWindowLayer no longer keeps its last sliding_window - 1 tokens as keys and values")
def sliding_layers_keep_their_window():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=4)
    rows = torch.arange(6.0).view(1, 1, 6, 1)
    keys, values = layer.update(rows, -rows)
    kept = torch.equal(layer.keys, rows[:, :, 3:]) and torch.equal(layer.values, -rows[:, :, 3:])
    return kept and torch.equal(keys, rows) and layer.cumulative_length == layer.get_seq_length() == 6


# Masks.


def causal_mask(mask, cache=None, name="llama", tokens=3):
    from transformers.masking_utils import create_causal_mask

    given = {"config": build(name).config, "inputs_embeds": torch.zeros(2, tokens, 8), "attention_mask": mask}
    return create_causal_mask(**given, **{CACHE: cache}, position_ids=None)


@assumed("forward.py", "generate no longer makes the mask of its next step in _update_model_kwargs_for_generation")
def generate_makes_the_next_mask():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    given = {"attention_mask": torch.tensor([[0, 1, 1]]), "use_cache": True}
    made = build()._update_model_kwargs_for_generation(CausalLMOutputWithPast(), given)["attention_mask"]
    return made.tolist() == [[0, 1, 1, 1]]


@assumed("forward.py", "create_causal_mask no longer returns a prepared 4-D mask as it is")
def prepared_masks_are_kept():
    from transformers.masking_utils import _preprocess_mask_arguments

    ones = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    return causal_mask(ones, tokens=1) is ones and names(_preprocess_mask_arguments)[:4] == [
        *("config", "inputs_embeds", "attention_mask", CACHE)
    ]


@assumed("attention.py", "a cache whose mask covers the new tokens only no longer gets a mask [B, 1, T, T]")
def masks_cover_what_the_cache_says():
    cache, _ = recording_cache()
    padding = torch.ones(2, 11, dtype=torch.long)
    padding[0, :9] = 0
    mask = causal_mask(padding, cache)
    return mask.shape == (2, 1, 3, 3) and mask[0, 0].tolist()[1:] == [[False, True, False], [False, True, True]]


@assumed("forward.py", "a model with sliding windows no longer takes a dict of prepared masks")
def prepared_masks_can_be_a_dict():
    model, (ids, _) = build("gemma3"), prompt(1, 8, (0,))
    ones = torch.ones(8, 8).tril().bool()[None, None]
    got = model(ids, attention_mask={"full_attention": ones, "sliding_attention": ones}, use_cache=False)
    return torch.allclose(got.logits, model(ids, use_cache=False).logits, atol=1e-5)


# generate.


@assumed("forward.py", "generate no longer asks the instance's _prepare_cache_for_generation")
def generate_asks_for_a_cache():
    model, (ids, _), seen = build(), prompt(1, 8, (0,)), []

    def prepare(generation_config, model_kwargs, *args, **kwargs):
        seen.append((generation_config.cache_implementation, str(args[0] if args else kwargs["generation_mode"])))
        model_kwargs[CACHE] = DynamicCache(config=model.config)
        seen.append(model_kwargs[CACHE])

    model._prepare_cache_for_generation = prepare
    out = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
    stock = names(type(model)._prepare_cache_for_generation)[1:4]
    asked = stock == ["generation_config", "model_kwargs", "generation_mode"] and len(seen) == 2
    return asked and out[CACHE] is seen[1] and seen[0][0] in (None, "dynamic")


# Models.


@assumed("forward.py", "the base model of Gemma 3 no longer makes its decoder's masks, as a dict")
def base_models_that_make_masks_are_known():
    found = {}
    for name in ("gemma3", "qwen3_vl"):
        model = multimodal.build(name)
        given = multimodal.prompt(name)
        hook = model.get_decoder().register_forward_pre_hook(
            lambda m, a, k, name=name: found.update({name: k["attention_mask"]}), with_kwargs=True
        )
        model(**given)
        hook.remove()
        if prepares_masks(model.base_model) != isinstance(found[name], dict):
            return False
    return set(found["gemma3"]) == {"full_attention", "sliding_attention"}


@assumed("prompt.py", "DeepStack hands features of visual tokens to the decoder by other names")
def deepstack_is_called_what_it_was():
    model, seen = multimodal.build("qwen3_vl"), {}
    model.get_decoder().register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    model(**multimodal.prompt("qwen3_vl"))
    rows = seen["deepstack_visual_embeds"][0].shape[0]
    return seen["visual_pos_masks"].sum() == rows == 16


@assumed("forward.py", "a model with positions in three dimensions keeps their offset elsewhere")
def offsets_of_positions_are_kept_where_they_were():
    model, given = multimodal.build("qwen3_vl"), multimodal.prompt("qwen3_vl")
    multimodal.generated(model, given)
    # An image of 4 x 4 tokens takes 4 positions.
    kept = model.base_model.rope_deltas.tolist() == [[4 - 16]]
    return kept and names(type(model)._prepare_position_ids_for_generation)[1:] == ["inputs_tensor", "model_kwargs"]


@assumed("attention.py", "the attention interface is called with other arguments, or drops keywords")
def attention_functions_are_called_as_before():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def probe(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **kwargs):
        seen.append((query.shape, key.shape, value.shape, scaling, softcap, kwargs["fastkv_layer"]))
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("fastkv_probe", probe)
    for name in FAMILIES:
        model = build(name, "eager")
        module = next(m for m in model.modules() if hasattr(m, "k_proj"))
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = "fastkv_probe"
        add = lambda m, a, k: (a, {**k, "fastkv_layer": "handed over"})  # noqa: E731
        module.register_forward_pre_hook(add, with_kwargs=True)
        model(prompt(1, 5, (0,))[0])
    shapes = all((q, k, v) == ((1, 4, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)) for q, k, v, *_ in seen)
    capped = [name for name, (*_, softcap, handed) in zip(FAMILIES, seen) if softcap is not None]
    handed = all(rest[-1] == "handed over" and isinstance(rest[3], float) for rest in seen)
    return shapes and handed and capped == ["gemma2"] and len(seen) == len(FAMILIES)


@assumed("parallel.py", "a model keeps the mesh of tensor parallelism neither in _device_mesh nor in device_mesh")
def the_mesh_is_where_it_was():
    new, old = MESHES
    if hasattr(transformers.PreTrainedModel, new):
        return transformers.PreTrainedModel._device_mesh is None
    from transformers.distributed import utils  # 5.10 gives the attribute to parallel models only

    return f"model.{old} = device_mesh" in inspect.getsource(utils)


@pytest.mark.parametrize("name", ASSUMPTIONS)
def test_assumption_holds(name):
    found = complaint(name)
    if found:
        pytest.fail(found, pytrace=False)


# The checks can fail, and then say one sentence.


def test_a_mask_that_is_made_again_is_one_sentence(monkeypatch):
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "create_causal_mask", lambda **given: given["attention_mask"].clone())
    assert "no longer returns a prepared 4-D mask" in complaint("prepared_masks_are_kept")
