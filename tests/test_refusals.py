"""What cannot work is refused in one sentence, and the model is as it was."""

import pickle
from functools import partial

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import BloomConfig, BloomForCausalLM

import fastkv
from fastkv import Budget
from fastkv.integrations.transformers.attention import fastkv_attention

from .models import build, generate, prompt, raises
from .test_exact import snapshot

ARGUMENTS = {
    "negative budget": ({"budget": -1}, "at least 1"),
    "zero budget": ({"budget": 0}, "at least 1"),
    "fractional budget": ({"budget": 12.5}, "whole number"),
    "boolean budget": ({"budget": True}, "whole number"),
    "budget below sinks + recent": ({"budget": 35}, r"sinks \+ recent = 4 \+ 32"),
    "unknown policy": ({"policy": "h3o"}, "momentkv, keydiff, manifold, .*, streaming, random"),
    "zero block": ({"prefill_block": 0}, "prefill_block must be a whole number of at least 1"),
    "fractional eviction": ({"evict_every": 1.5}, "evict_every must be a whole number of at least 1"),
    "unknown correction": ({"correction": "second"}, "auto, none, mean, moments"),
    "unknown backend": ({"backend": "cuda"}, "backend must be one of auto, reference, cpu, triton"),
    "wrong number of layer weights": ({"budget": Budget(tokens=64, layers=[1, 2])}, "2 weights, but the model has 4"),
    "a layer below sinks + recent": ({"budget": Budget(tokens=64, layers=[1, 1, 1, 9])}, "fewer than sinks"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments(case):
    options, expected = ARGUMENTS[case]
    model = build()
    before = snapshot(model)
    raises(expected, fastkv.patch, model, **options)
    assert snapshot(model) == before


BUDGETS = {
    "nothing given": ({}, "exactly one of tokens, keep, bytes, compress, quality, got none"),
    "two units": ({"tokens": 64, "keep": 0.5}, "tokens and keep"),
    "keep of zero": ({"keep": 0.0}, r"in \(0, 1\]"),
    "keep above one": ({"keep": 1.5}, r"in \(0, 1\]"),
    "quality above one": ({"quality": 1.5}, r"quality must be in \(0, 1\]"),
    "one weight": ({"tokens": 64, "layers": 3}, "positive weights"),
    "no file": ({"quality": 0.9, "calibration": 3}, "calibration must be a file, got 3"),
    "zero weight": ({"tokens": 64, "layers": [1, 0]}, "positive weights"),
    "no weights": ({"tokens": 64, "layers": []}, "positive weights"),
    "negative sinks": ({"tokens": 64, "sinks": -1}, "sinks must be an integer of at least 0"),
    "no sinks": ({"tokens": 64, "sinks": None}, "sinks must be an integer of at least 0 and at most 2.40, got None"),
    "fractional recent": ({"tokens": 64, "recent": 2.5}, "recent must be an integer"),
    "zero bytes": ({"bytes": 0}, "bytes must be an integer"),
    "unknown layers": ({"tokens": 64, "layers": "cone"}, "uniform', 'pyramid'"),
    "negative weight": ({"tokens": 64, "layers": [1, -1]}, "positive weights"),
    "unknown heads": ({"tokens": 64, "heads": "random"}, "heads must be 'calibrated'"),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_bad_budgets(case):
    options, expected = BUDGETS[case]
    raises(expected, Budget, **options)


def meta_model():
    with torch.device("meta"):
        return build()


BLOOM = {"n_layer": 1, "hidden_size": 8, "n_head": 2, "vocab_size": 9}
MODELS = {
    "a non-model": (lambda: "llama", "needs a transformers model, got str"),
    "a plain module": (lambda: torch.nn.Linear(2, 2), "needs a transformers model, got Linear"),
    "a model on meta": (meta_model, "meta device"),
    "all layers sliding": (lambda: build("mistral", sliding_window=16), "no full-attention layer"),
    "a refused type": (lambda: BloomForCausalLM(BloomConfig(**BLOOM)), "bloom is not supported: it biases attention"),
    "flex attention": (lambda: build(base="flex_attention"), "got 'flex_attention'"),
    "soft-cap on sdpa": (lambda: with_base(build("gemma2", "eager"), "sdpa"), "sdpa ignores attn_logit_softcapping"),
}


def with_base(model, base):
    """Older transformers load Gemma 2 with sdpa, newer ones refuse to; set it the way the older ones leave it."""
    model.config._attn_implementation_internal = base
    return model


@pytest.mark.parametrize("case", MODELS)
def test_unusable_models(case):
    make, expected = MODELS[case]
    model = make()
    before = snapshot(model) if isinstance(model, torch.nn.Module) else None
    raises(expected, fastkv.patch, model, budget=64)
    if before is not None:
        assert snapshot(model) == before


def test_prefix_and_prompt_tuning():
    """Of a model in its adapter, and of one that was taken out; it stays as it was."""
    base, tuning = build(), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    adapted = get_peft_model(build(), tuning)
    raises("get_base_model", fastkv.patch, adapted)
    base.peft_config = adapted.peft_config
    before = snapshot(base)
    raises("prefix and prompt tuning", fastkv.patch, base)
    assert snapshot(base) == before


def test_continuous_batching():
    model = fastkv.patch(build(), budget=64)
    for entry in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        raises("continuous batching", getattr(model, entry), [[5, 6, 7]])
    attention = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    raises("paged cache", fastkv_attention, attention, q, k, k, None, cache=object())


ONES = partial(torch.ones, dtype=torch.bool)
REFUSED_CALLS = {  # to what has read 36 tokens of 3 rows: rows and tokens that come, and what comes with them
    "rows": (1, 10, {}, "holds 3 sequences, got 1"),
    "rows of a step": (1, 1, {}, "holds 3 sequences, got 1"),
    "4-D mask": (3, 10, {"attention_mask": ONES(3, 1, 10, 46)}, "4-D attention mask over 46 keys"),
    "4-D mask of a step": (3, 1, {"attention_mask": ONES(3, 1, 1, 37)}, "4-D attention mask over 37 keys"),
    "4-D mask of two parts": (3, 8, {"attention_mask": torch.eye(8).bool().expand(3, 1, 8, 8)}, "hides earlier new"),
    "rows of the mask": (3, 10, {"attention_mask": ONES(2, 46)}, r"for 3 sequences, got \[2, 46\]"),
    "columns of the mask": (3, 10, {"attention_mask": ONES(3, 12)}, "each of the 10 new tokens, and for the 36 before"),
    "rows of a 4-D mask": (3, 8, {"attention_mask": ONES(2, 1, 8, 8).tril()}, "for 3 sequences, got"),
    "mask of one axis": (3, 10, {"attention_mask": ONES(46)}, "must have 2 or 4 dimensions"),
    "positions": (3, 10, {"position_ids": torch.arange(46).expand(3, -1)}, "a number for each of the 10 new tokens"),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_cache_that_refused_a_call_goes_on(call, static):
    """Sliding windows, too: one layer in two of Gemma 3."""
    model = fastkv.patch(build("gemma3"), "keydiff", Budget(tokens=20, sinks=2, recent=4))
    ids, mask = prompt(3, 36, pads=(0, 7, 30))  # of the last row windows hold padding
    caches = [fastkv.FastKVCache(model, static=static) for _ in range(2)]
    for cache in caches:
        model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
    rows, num, given, expected = REFUSED_CALLS[call]
    raises(expected, model, ids[:rows, :num], past_key_values=caches[0], **given)
    raises("cannot be cropped because evicted pairs are gone", caches[0].crop, -1)
    places = mask.cumsum(-1)[:, -1:]
    for new in range(3):  # without a mask: windows know by themselves what is padding
        given = [model(ids[:, :1], position_ids=places + new, past_key_values=cache).logits for cache in caches]
        assert torch.equal(*given)


@pytest.mark.parametrize("name, static", [("llama", False), ("llama", True), ("gemma3", False), ("gemma3", True)])
def test_a_forward_that_failed_half_way(name, static):
    """Some layers have its tokens and others do not; of Gemma 3, one with a sliding window."""
    types = {"layer_types": ["full_attention", "sliding_attention"] * 2} if name == "gemma3" else {}
    model, (ids, _) = build(name, **types), prompt(1, 50, (0,))
    fastkv.patch(model, "keydiff", Budget(tokens=20, sinks=2, recent=4), static=static)
    cache = model(ids[:, :40]).past_key_values
    want = model(ids, past_key_values=fastkv.FastKVCache(model)).logits
    fails = model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 40:], past_key_values=cache)
    fails.remove()
    raises("failed half way", model, ids[:, 40:], past_key_values=cache)
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, want)


def test_a_cache_keeps_a_row():
    cache = fastkv.patch(build(), budget=64)(prompt(3, 50)[0]).past_key_values
    raises("repeated once or more often, got 0", cache.batch_repeat_interleave, 0)
    raises("needs at least one row", cache.batch_select_indices, torch.tensor([], dtype=torch.long))
    assert len(cache.stored(0)) == 3


def test_caches_need_a_patched_model_and_a_compressed_layer():
    raises("needs a patched model", fastkv.FastKVCache, build())
    cache = fastkv.FastKVCache(fastkv.patch(build("gemma3"), budget=64))
    raises("layer 1 is empty", cache.stored, 1)
    raises(r"layer 0 is not compressed; the compressed layers are \[1, 3\]", cache.slots, 0)


# What is refused while a patched model is used: the sentence, and the model is as good as before.


def with_assistant(model, ids):
    generate(model, ids, assistant_model=fastkv.patch(build(), budget=64))


def with_drafts(model, ids):
    """Into a cache that the user brought: what is taken back of its prompt would stay in it."""
    generate(model, ids.repeat(1, 2), past_key_values=fastkv.FastKVCache(model), prompt_lookup_num_tokens=3)


def generating(**options):
    return lambda model, ids: generate(model, ids, **options)


def with_crops(*crops):
    """A use of what may be rolled back by four tokens."""

    def use(model, ids):
        cache = model(ids).past_key_values
        cache.activate_past_recording()
        model(ids[:, :4], past_key_values=cache)
        for crop in crops:
            cache.crop(crop)

    return use


def with_gradients(model, ids):
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()


def with_prepared_mask(model, ids):
    model(ids, attention_mask=torch.ones(1, 1, 50, 50, dtype=torch.bool))


def with_cache_of(**sizes):
    """A use of what a model of other sizes has read."""

    def use(model, ids):
        other = fastkv.patch(build(**sizes), "keydiff", Budget(tokens=20, sinks=2, recent=4))
        model(ids[:, :1], past_key_values=other(ids).past_key_values)

    return use


def with_layer(use, *args):
    """A use of the first layer of a cache that has read."""
    return lambda model, ids: getattr(model(ids).past_key_values.layers[0], use)(*args)


CHUNKS = generating(prefill_chunk_size=16)
USES = {
    "patched assistant": ({}, with_assistant, "cannot be the assistant"),
    "drafts for kvzip": ({"policy": "kvzip"}, generating(prompt_lookup_num_tokens=3),
                         "which a second reading and Budget.* compress at once"),
    **{
        f"{kind} cache": ({}, generating(cache_implementation=kind), f"cache_implementation='{kind}' conflicts")
        for kind in ("static", "quantized", "offloaded")
    },
    "paged cache": ({}, generating(cache_implementation="paged"), "continuous batching brings its own paged cache"),
    "crop": ({}, with_layer("crop", -3), "cannot be cropped because evicted pairs are gone"),
    "crop to a length": ({}, with_layer("crop", 30), "cannot be cropped because evicted pairs are gone"),
    "mask of a step alone": ({}, lambda model, ids: model(ids[:, :1], past_key_values=model(ids).past_key_values,
                                                          attention_mask=torch.ones(1, 1)), "for the 50 before them"),
    "chunks and a share": ({"budget": Budget(keep=0.5)}, CHUNKS, "prefill_chunk_size hands a prompt over"),
    "chunks and kvzip": ({"policy": "kvzip"}, CHUNKS, "prefill_chunk_size hands a prompt over in parts"),
    "crop after a crop": ({}, with_crops(-1, -1), "cannot be cropped because evicted pairs are gone"),
    "crop of more than was recorded": ({}, with_crops(-5), "cannot roll back 5 tokens"),
    "another patch": ({}, lambda model, ids: fastkv.patch(model, "nothing"), "unknown policy"),
    "drafts for a cache of kvzip": ({"policy": "kvzip"}, with_drafts, "cannot be cropped"),
    "gradients": ({"prefill_block": 16}, with_gradients, "has no gradient; read the prompt whole"),
    "4-D mask and blocks": ({"prefill_block": 16}, with_prepared_mask, "needs a 2-D padding mask"),
    "4-D mask and kvzip": ({"policy": "kvzip"}, with_prepared_mask, "needs a 2-D padding mask"),
    "embeddings for kvzip": ({"policy": "kvzip"}, lambda model, ids: model(inputs_embeds=model.model.embed_tokens(ids)),
                             "pass input_ids, not inputs_embeds"),
    "other heads": ({"policy": "keydiff"}, with_cache_of(num_key_value_heads=4),
                    r"of \(4, 16, 16\), got \(2, 16, 16\)"),
    "more layers": ({}, with_cache_of(num_hidden_layers=6), "needs a cache of 4 layers, got one of 6"),
    "fewer layers": ({}, with_cache_of(num_hidden_layers=2), "needs a cache of 4 layers, got one of 2"),
    "pickling": ({}, lambda model, ids: pickle.dumps(model), "cannot be pickled; call fastkv.unpatch"),
    "positions of one's own": ({"policy": "expected-attention"},
                               lambda model, ids: model(ids, position_ids=torch.arange(50)[None] + 9),
                               "position_ids that say something else"),
    "offloading": ({}, with_layer("offload"), "not offloaded"),
    "prefetching": ({}, with_layer("prefetch"), "not offloaded"),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_refused_uses_leave_the_model_as_it_was(use):
    options, attempt, expected = USES[use]
    model = fastkv.patch(build(), **{"budget": Budget(tokens=20, sinks=2, recent=4), **options})
    ids, _ = prompt(1, 50, (0,))
    before, tokens = snapshot(model), generate(model, ids)
    raises(expected, attempt, model, ids)
    assert snapshot(model) == before and torch.equal(generate(model, ids), tokens)


def test_caches_of_inference_mode_stay_in_it():
    """PyTorch's own refusal; the model goes on."""
    model, (ids, _) = fastkv.patch(build(), budget=Budget(tokens=20, sinks=2, recent=4)), prompt(1, 50, (0,))
    tokens = generate(model, ids)
    with torch.inference_mode():
        cache = model(ids).past_key_values
    with pytest.raises(RuntimeError, match="inference tensor"):
        model(ids[:, :1], past_key_values=cache)
    assert torch.equal(generate(model, ids), tokens)


def test_a_cache_needs_its_model_patched():
    """The stock model would attend to nothing before the new tokens."""
    model, (ids, _) = fastkv.patch(build(), budget=64), prompt(1, 50, (0,))
    cache = model(ids).past_key_values
    fastkv.unpatch(model)
    raises("of a model that is not patched", model, ids[:, :1], past_key_values=cache)
    raises("unpatch needs a model, got NoneType", fastkv.unpatch, None)
    raises("needs a patched model, got NoneType", fastkv.FastKVCache, None)


def test_an_unpatched_model_can_be_pickled():
    model, (ids, _) = build(), prompt(1, 20, (0,))
    again = pickle.loads(pickle.dumps(fastkv.unpatch(fastkv.patch(model, budget=64))))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_wrapper_is_refused_and_what_it_wraps_is_not():
    raises("got a OptimizedModule around it", fastkv.patch, torch.compile(build(), backend="eager"), budget=64)


def test_a_dtype_that_came_after_the_patch():
    model = fastkv.patch(build(), "compactor", 64).to(torch.bfloat16)
    raises("patched in torch.float32 and is torch.bfloat16 now", model, prompt(1, 50, (0,))[0])


def test_windows_of_a_static_cache_cannot_take_tokens_back():
    model, (ids, _) = fastkv.patch(build("gemma3"), "keydiff", 64), prompt(1, 50, (0,))
    drafts = {"past_key_values": fastkv.FastKVCache(model, static=True), "prompt_lookup_num_tokens": 3}
    raises("make a FastKVCache.model, static=False.", generate, model, ids, **drafts)


def test_a_tuple_of_blocks():
    model, (ids, _) = build(), prompt(1, 50, (0,))
    fastkv.patch(model, "keydiff", 64, prefill_block=16)
    (rows, *_), out = model.model(ids, return_dict=False), model.model(ids)
    assert torch.equal(rows, out.last_hidden_state)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_second_readings_with_gradients_on(name):
    """As who forgets torch.no_grad() calls them; layers beside the compressed ones are put back after it."""
    model, (ids, _) = build(name, "eager" if name == "gemma2" else None), prompt(1, 50, (0,))
    fastkv.patch(model, "kvzip", Budget(tokens=20, sinks=2, recent=4))
    with torch.enable_grad():
        given = model(ids[:, :1], past_key_values=model(ids).past_key_values).logits
    with torch.no_grad():
        assert torch.equal(model(ids[:, :1], past_key_values=model(ids).past_key_values).logits, given)
