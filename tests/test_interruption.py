"""Ctrl-C at any moment inside `generate`: afterwards the model generates, and is unpatched, as if nothing had been."""

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import fastkv

from .models import build, generate, policy, prompt, small
from .pairwise import covering
from .test_exact import snapshot

NEW, EVERY = 10, 3
MODES = {"whole": {}, "blocks": {"prefill_block": 16}, "adaptive": {"prefill_block": 16}}


def patched(name, mode, directory):
    budget = small(heads="adaptive" if mode == "adaptive" else "uniform")
    return fastkv.patch(build(), policy(name, directory), budget, evict_every=EVERY, **MODES[mode])


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


def interrupted(model, where, call, *args, **options):
    """generate, which ends at the n-th call of a module or of its streamer."""
    handle = None if where == "streamer" else model.get_submodule(where).register_forward_hook(Interrupt(call))
    options |= {"streamer": Streamer(call)} if handle is None else {}
    with pytest.raises(KeyboardInterrupt):
        generate(model, *args, new=NEW, **options)
    if handle is not None:
        handle.remove()


# The n-th call of a hook is in the prompt for small n (four blocks of it, or one) and in decoding afterwards.
PLACES = {
    "while the first layer reads the prompt": ("model.layers.0.self_attn", 1),
    "between two layers, in the prompt": ("model.layers.1.self_attn.q_proj", 1),
    "in the second forward": ("model.layers.2.self_attn", 2), "after the prompt, before the logits": ("model.norm", 1),
    "between two layers, in decoding": ("model.layers.2.mlp", 8),
    "between two layers, when something is evicted": ("model.layers.1.self_attn", 4 + EVERY),
    "in the streamer": ("streamer", 6),
}  # fmt: skip


@pytest.mark.parametrize("place, mode", covering(PLACES, MODES, together=1))
def test_the_model_is_as_good_as_new(place, mode, tmp_path):
    """And a cache that was interrupted, whose layers may disagree on how much they have seen, after `reset`."""
    model = patched("h2o", mode, tmp_path)
    before, cache = snapshot(model), fastkv.FastKVCache(model)
    ids, mask = prompt(1, 50, (0,)) if place == "in the streamer" else prompt()
    expected = generate(patched("h2o", mode, tmp_path), ids, mask, new=NEW)
    interrupted(model, *PLACES[place], ids, mask, past_key_values=cache)
    assert snapshot(model) == before, "nothing is left on the model"
    assert torch.equal(generate(model, ids, mask, new=NEW), expected)
    cache.reset()
    assert torch.equal(generate(model, ids, mask, new=NEW, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["kvzip", "momentkv"])
def test_two_readings_and_drafts(name, tmp_path):
    """Interrupted while the prompt is read a second time (KVzip), or while drafts await a verdict, if any do."""
    ids, mask = prompt(1, 50, (0,))
    options = {} if name == "kvzip" else {"prompt_lookup_num_tokens": 3}
    expected = generate(patched(name, "whole", tmp_path), ids, mask, new=NEW, **options)
    model = patched(name, "whole", tmp_path)
    for call in (1, 2, 4):
        interrupted(model, "model.layers.1.self_attn", call, ids, mask, **options)
        assert torch.equal(generate(model, ids, mask, new=NEW, **options), expected)
