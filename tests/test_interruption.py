"""Ctrl-C at any moment inside `generate`: afterwards the model generates, and is unpatched, as if nothing had been."""

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import fastkv

from .models import ROLLS_BACK, build, generate, policy, prompt
from .pairwise import covering
from .test_exact import snapshot

NEW, EVERY = 10, 3
MODES = {"whole": {}, "blocks": {"prefill_block": 16}, "adaptive": {"prefill_block": 16}}


def patched(name, mode, directory):
    model = build()
    heads = "adaptive" if mode == "adaptive" else "uniform"
    budget = fastkv.Budget(tokens=20, sinks=2, recent=4, heads=heads)
    return fastkv.patch(model, policy(name, directory), budget, evict_every=EVERY, **MODES[mode])


class Interrupt:
    """Raises KeyboardInterrupt at its n-th call."""

    def __init__(self, call):
        self.left = call

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Streamer(BaseStreamer, Interrupt):
    put = Interrupt.__call__

    def end(self):
        pass


def by_streamer(model, call):
    return {"streamer": Streamer(call)}, None


def by_hook(where):
    def install(model, call):
        module = model.get_submodule(where)
        return {}, module.register_forward_hook(Interrupt(call))

    return install


# The n-th call of a hook is in the prompt for small n (four blocks of it, or one) and in decoding afterwards.
PLACES = {
    "while the first layer reads the prompt": (by_hook("model.layers.0.self_attn"), 1),
    "between two layers, in the prompt": (by_hook("model.layers.1.self_attn.q_proj"), 1),
    "in the second forward": (by_hook("model.layers.2.self_attn"), 2),
    "after the prompt, before the logits": (by_hook("model.norm"), 1),
    "between two layers, in decoding": (by_hook("model.layers.2.mlp"), 8),
    "between two layers, when something is evicted": (by_hook("model.layers.1.self_attn"), 4 + EVERY),
    "in the streamer": (by_streamer, 6),
}


@pytest.mark.parametrize("place, mode", covering(PLACES, MODES, together=1))
def test_the_model_is_as_good_as_new(place, mode, tmp_path):
    model = patched("h2o", mode, tmp_path)
    before = snapshot(model)
    ids, mask = prompt(1, 50, (0,)) if place == "in the streamer" else prompt()
    expected = generate(patched("h2o", mode, tmp_path), ids, mask, new=NEW)
    install, call = PLACES[place]
    options, handle = install(model, call)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, mask, new=NEW, **options)
    if handle is not None:
        handle.remove()
    assert snapshot(model) == before, "nothing is left on the model"
    assert torch.equal(generate(model, ids, mask, new=NEW), expected)


@pytest.mark.parametrize(
    "where, call", [("model.layers.0.self_attn", 5), ("model.layers.2.self_attn", 1), ("model.norm", 5)]
)
def test_a_cache_that_was_interrupted_is_usable_after_reset(where, call):
    """Layers may disagree on how much they have seen; `reset` makes them agree on nothing."""
    model = fastkv.patch(build(), "momentkv", fastkv.Budget(tokens=20, sinks=2, recent=4), evict_every=EVERY)
    ids, mask = prompt()
    expected = generate(model, ids, mask, new=NEW)
    cache = fastkv.FastKVCache(model)
    handle = model.get_submodule(where).register_forward_hook(Interrupt(call))
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, mask, new=NEW, past_key_values=cache)
    handle.remove()
    cache.reset()
    assert torch.equal(generate(model, ids, mask, new=NEW, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["kvzip", "duoattention", "momentkv"])
def test_two_readings_and_drafts(name, tmp_path):
    """Interrupted while the prompt is read a second time (KVzip), or while drafts await a verdict, if any do."""
    ids, mask = prompt(1, 50, (0,))
    options = {} if name == "kvzip" or not ROLLS_BACK else {"prompt_lookup_num_tokens": 3}
    expected = generate(patched(name, "whole", tmp_path), ids, mask, new=NEW, **options)
    model = patched(name, "whole", tmp_path)
    for call in (1, 2, 4):
        handle = model.model.layers[1].self_attn.register_forward_hook(Interrupt(call))
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, mask, new=NEW, **options)
        handle.remove()
        assert torch.equal(generate(model, ids, mask, new=NEW, **options), expected)
