"""What is checked of a model type: one function each, for tests and for the list of models alike.

A check takes a `Subject`, a tiny stock model with what it computes unpatched, and leaves the model unpatched. It
returns what is refused or could not be checked, by a word for it, with a sentence why; and raises AssertionError where
the patched model is wrong. A FastKVError that it lets through means that fastkv refuses the whole check.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import DynamicCache

import fastkv
from fastkv.integrations.transformers.layer import FastKVLayer

from . import pictures, tiny
from .tiny import IMAGE

PROMPT, PADDING, NEW, BLOCK = 40, 5, 8, 13
EVERY = 4
ROOM = fastkv.Budget(tokens=256, sinks=2, recent=4)
SMALL = fastkv.Budget(tokens=16, sinks=2, recent=4)
TINY = fastkv.Budget(tokens=8, sinks=2, recent=2)
CLOSE = 1e-4  # for logits up to 5; others are scaled
ROUNDING = 1e-2  # that recurrences make of it, in the stock model too
# Keys, attention at every step, values and output, no rotation.
POLICIES = ("keydiff", "h2o", "criticalkv", "compactor")


@dataclass(eq=False)
class Subject:
    """A stock model and what it computes.

    Attributes:
        name: of its kind.  model: in eval mode, fp32.
        ids, mask: [2, PROMPT], the second row begins with padding.
    """

    name: str
    model: torch.nn.Module

    def __post_init__(self):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, IMAGE, (2, PROMPT), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.ids[1, :PADDING] = self.mask[1, :PADDING] = 0

    @cached_property
    def logits(self):
        """Of the prompt."""
        return read(self.model, self.ids, self.mask).logits

    @cached_property
    def answer(self):
        """Greedy tokens and their logits."""
        return answer(self.model, self.ids, self.mask)

    @cached_property
    def pieces(self):
        """Logits of the prompt that is read in blocks; as a whole if the stock model cannot."""
        cache = DynamicCache(config=text(self.model))
        try:
            return in_turns(self.model, self.ids, self.mask, range(0, PROMPT, BLOCK), cache)
        except tiny.BROKEN:
            return self.logits

    def ways(self, block=BLOCK):
        """Options of patch with which prompts are read: whole, and in blocks unless that is refused."""
        try:
            with fastkv.patched(self.model, prefill_block=block):
                return {}, {"prefill_block": block}
        except fastkv.FastKVError:
            return ({},)

    def touch(self):
        """Compute all of this, while nothing has been patched yet."""
        return self.logits, self.answer


def first_line(error):
    """What an exception says, in one line."""
    return str(error).strip().split("\n")[0]


def text(model):
    """The config of the text model."""
    return model.config.get_text_config(decoder=True)


def read(model, ids, mask=None, cache=None, **given):
    """Output for tokens [B, T] that go on from a cache; mask [B, all tokens so far], without padding None."""
    if cache is None or cache.get_seq_length() == 0:
        for module in model.modules():  # what some multimodal models remember of the last conversation
            if "rope_deltas" in module.__dict__:
                module.rope_deltas = None
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given)


def answer(model, ids, mask, new=NEW, **given):
    """Greedy tokens [B, PROMPT + new] and their logits [B, new, V]."""
    options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for module in model.modules():
        if "rope_deltas" in module.__dict__:
            module.rope_deltas = None
    out = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options, **given)
    return out.sequences, torch.stack(out.logits, 1)


def in_turns(model, ids, mask, starts, cache):
    """Logits of tokens that are read in several calls, which begin at `starts`."""
    places = zip(starts, [*starts[1:], ids.shape[1]])
    return torch.cat([read(model, ids[:, start:end], mask[:, :end], cache).logits for start, end in places], 1)


def decode(model, cache, token, mask, steps):
    """Logits [B, steps, V] of greedy steps from a token [B, 1] on; mask [B, tokens in the cache], or none, as a
    compiled loop takes steps."""
    found = []
    for _ in range(steps):
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        found.append(read(model, token, mask, cache).logits)
        token = found[-1].argmax(-1)
    return torch.cat(found, 1)


def difference(got, want):
    """Largest difference of logits, as if the largest were 5."""
    return float((got - want).abs().max() * 5 / want.abs().max())


def same(got, want, what, mask=None):
    """Assert that logits are equal to rounding, where the mask is 1."""
    if mask is not None:
        got, want = got[mask.bool()], want[mask.bool()]
    assert got.shape == want.shape, f"{what}: {list(got.shape)} instead of {list(want.shape)}"
    assert got.isfinite().all(), f"{what}: logits are not finite"
    off = difference(got, want)
    assert off <= CLOSE, f"{what}: logits differ by {off:.1e}"


def equal(got, want, what):
    """Assert that tensors are equal, bit for bit."""
    assert torch.equal(got, want), f"{what}: not equal"


def patched(subject, budget=SMALL, policy="momentkv", **options):
    """The model, patched for the length of a with block."""
    return fastkv.patched(subject.model, policy, budget, evict_every=EVERY, **options)


def compressed(cache):
    """Indices and layers that fastkv keeps."""
    return [(index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)]


def like_stock(subject, want, **options):
    """With room for everything: logits of the prompt, then greedy tokens and their logits, all as the stock model's."""
    with patched(subject, ROOM, **options):
        same(read(subject.model, subject.ids, subject.mask).logits, want, "prompt", subject.mask)
        tokens, logits = answer(subject.model, subject.ids, subject.mask)
    same(logits, subject.answer[1], "generated")
    equal(tokens, subject.answer[0], "greedy tokens")


def whole(subject):
    """A prompt read whole equals the stock model, with room for all tokens."""
    like_stock(subject, subject.logits)


def blocks(subject):
    """A prompt read in blocks equals the stock model, with room for all tokens."""
    real = subject.mask.bool()
    off = difference(subject.pieces[real], subject.logits[real])
    if off <= CLOSE:
        like_stock(subject, subject.logits, prefill_block=BLOCK)
        return {}
    with patched(subject, ROOM, prefill_block=BLOCK):
        same(read(subject.model, subject.ids, subject.mask).logits, subject.pieces, "prompt", subject.mask)
        if off <= ROUNDING:
            return {}
        if difference(subject.pieces[:1], subject.logits[:1]) > ROUNDING:
            return {"blocks": "the stock model itself computes something else when it reads a prompt in pieces"}
    return {"blocks of padded batches": "the stock model itself computes something else when it reads them in pieces"}


def turns(subject):
    """A second turn on the same cache, and single tokens, equal the stock model."""
    model, ids, mask = subject.model, subject.ids, subject.mask
    try:
        want = in_turns(model, ids, mask, (0, 25, 38, 39), DynamicCache(config=text(model)))
    except tiny.BROKEN as error:
        return {"turns": f"the stock model fails by itself ({first_line(error)})"}
    with patched(subject, ROOM):
        got = in_turns(model, ids, mask, (0, 25, 38, 39), fastkv.FastKVCache(model))
    same(got, want, "second turn", mask)
    return {}


def evictions(subject):
    """After evictions, stored + evicted = seen for every head, the budget is kept, and attention has changed."""
    for options in subject.ways():
        with patched(subject, correction="none", **options):
            model, cache = subject.model, fastkv.FastKVCache(subject.model)
            last = read(model, subject.ids, subject.mask, cache).logits[:, -1:]
            logits = decode(model, cache, last.argmax(-1), subject.mask, 2 * EVERY + 1)
            seen = subject.mask.sum(-1) + 2 * EVERY + 1
            assert logits.isfinite().all(), "logits are not finite"
            assert int(cache.get_seq_length()) == PROMPT + 2 * EVERY + 1, "the cache counts tokens wrong"
            for index, layer in compressed(cache):
                stored, evicted = cache.stored(index), cache.moments(index).count
                equal((stored + evicted).long(), seen[:, None].expand(stored.shape), f"layer {index}, stored + evicted")
                equal(layer.state.seen, seen, f"layer {index}, seen")
                assert int(stored.max()) <= SMALL.tokens + EVERY, f"layer {index} keeps more than its budget"
                assert bool((evicted > 0).all()), f"layer {index} has evicted nothing"
    with patched(subject, ROOM):
        cache = fastkv.FastKVCache(subject.model)
        last = read(subject.model, subject.ids, subject.mask, cache).logits[:, -1:]
        full = decode(subject.model, cache, last.argmax(-1), subject.mask, 2 * EVERY + 1)
    assert difference(logits, full) > 100 * CLOSE, "attention does not matter in this model"


def kept_only(subject):
    """Without a correction, evicted tokens are as if they had never been in the stock model's cache."""
    model, ids = subject.model, subject.ids[:1]
    token, positions = ids[:, :1], torch.tensor([[PROMPT]])
    with patched(subject, policy="streaming", correction="none"):
        cache = fastkv.FastKVCache(model)
        read(model, ids, cache=cache)
        got = model(input_ids=token, past_key_values=cache, position_ids=positions, use_cache=True).logits
    stock = DynamicCache(config=text(model))
    read(model, ids, cache=stock)
    kept = torch.tensor([0, 1, *range(PROMPT - SMALL.tokens + 2, PROMPT)])
    for index, _ in compressed(cache):
        layer = stock.layers[index]
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    want = model(input_ids=token, past_key_values=stock, position_ids=positions, use_cache=True).logits
    same(got, want, "a step after evictions")


def policies(subject):
    """Policies that read more than keys run on whole prompts and on blocks, or are refused."""
    refused = {}
    for policy in POLICIES:
        try:
            for options in subject.ways():
                with patched(subject, policy=policy, **options):
                    _, logits = answer(subject.model, subject.ids, subject.mask, 2 * EVERY)
                    assert logits.isfinite().all(), f"{policy}: logits are not finite"
        except fastkv.FastKVError as error:
            refused[policy] = first_line(error)
    return refused


def static_steps(subject):
    """Steps of a static cache, without a mask, compute the same and change tensors in place only."""
    model, ids, mask = subject.model, subject.ids, subject.mask

    def places(cache):
        return [tensor.data_ptr() for tensor in cache.changed()]

    with patched(subject, static=False):
        cache = fastkv.FastKVCache(model)
        want = decode(model, cache, read(model, ids, mask, cache).logits[:, -1:].argmax(-1), mask, 2 * EVERY + 1)
    with patched(subject, static=True):
        cache = fastkv.FastKVCache(model)
        first = decode(model, cache, read(model, ids, mask, cache).logits[:, -1:].argmax(-1), None, 1)
        before = places(cache)
        rest = decode(model, cache, first.argmax(-1), None, 2 * EVERY)
        assert places(cache) == before, "tensors of a static cache move"
    same(torch.cat([first, rest], 1), want, "static steps")


def copies(subject):
    """`clone`, `fork`, a choice of rows, and `reset`."""
    model, ids, mask = subject.model, subject.ids, subject.mask
    with patched(subject):
        cache = fastkv.FastKVCache(model)

        def go_on(cache, rows=(0, 1)):
            rows = torch.tensor(rows)
            return decode(model, cache, ids[rows, :1], mask[rows], EVERY + 1)

        read(model, ids, mask, cache)
        twin, forked, chosen = cache.clone(), cache.fork(2), cache.clone()
        chosen.batch_select_indices(torch.tensor([1]))
        want = go_on(cache)
        equal(go_on(twin), want, "a clone")
        same(go_on(forked, (0, 0, 1, 1)), want.repeat_interleave(2, 0), "a fork")
        same(go_on(chosen, (1,)), want[1:], "a choice of rows")
        assert cache.nbytes() > 0
        cache.reset()
        read(model, ids, mask, cache)
        equal(go_on(cache), want, "after reset")


def saved(subject):
    """A saved and loaded cache continues bit for bit."""
    model, ids, mask = subject.model, subject.ids, subject.mask
    with patched(subject), tempfile.TemporaryDirectory() as folder:
        cache, file = fastkv.FastKVCache(model), Path(folder) / "cache"
        read(model, ids, mask, cache)
        cache.save(file)
        twin = fastkv.FastKVCache.load(file, model)
        equal(decode(model, twin, ids[:, :1], mask, 2), decode(model, cache, ids[:, :1], mask, 2), "a loaded cache")


def beams(subject):
    """Beam search finds the same, with room for all tokens."""
    search = partial(answer, subject.model, subject.ids, subject.mask, 6, num_beams=2)
    want = search()[0]
    with patched(subject, ROOM):
        equal(search()[0], want, "beams")


def kernels(subject):
    """The kernels compute what the reference does, in the interpreter if there is no GPU."""
    found = []
    for backend in ("reference", "triton"):
        with patched(subject, TINY, backend=backend, **subject.ways(6)[-1]):
            cache = fastkv.FastKVCache(subject.model)
            prompt = read(subject.model, subject.ids[:1, :12], cache=cache).logits
            found.append(torch.cat([prompt, decode(subject.model, cache, subject.ids[:1, :1], None, 1)], 1))
    same(found[1], found[0], "kernels")


def images(subject):
    """A prompt with an image, whole and in blocks, and a second turn with and without one, equal the stock model."""
    model = subject.model
    given = pictures.given(subject.name, model)
    if given is None:
        return pictures.unchecked(model, images=False)
    first, second = given
    words = pictures.Turn(second.ids[:, :6], {})  # the second turn before its image
    limits, turns = pictures.unchecked(model, images=True), {}

    def generated():
        return answer(model, first.ids, torch.ones_like(first.ids), **first.given)

    def conversation(turn, cache):
        """The first turn and then another, over the same cache."""
        one = read(model, first.ids, cache=cache, **first.given).logits
        return torch.cat([one, read(model, turn.ids, cache=cache, **turn.given).logits], 1)

    want = generated()
    blind = torch.full_like(first.ids, 7).where(first.ids >= IMAGE, first.ids)
    without = answer(model, blind, torch.ones_like(blind))
    assert difference(without[1], want[1]) > 100 * CLOSE, "the image does not matter in this model"
    for name, turn in {"text after images": words, "images in a second turn": second}.items():
        try:
            turns[name] = turn, conversation(turn, DynamicCache(config=text(model)))
        except tiny.BROKEN as error:
            limits[name] = f"the stock model fails by itself ({first_line(error)})"
    for options in subject.ways(8):
        with patched(subject, ROOM, **options):
            tokens, logits = generated()
            same(logits, want[1], "generated after an image")
            equal(tokens, want[0], "greedy tokens after an image")
            for name, (turn, wanted) in turns.items():
                try:
                    same(conversation(turn, fastkv.FastKVCache(model)), wanted, name)
                except fastkv.FastKVError as error:
                    limits[name] = first_line(error)
        with patched(subject, SMALL, **options):
            assert generated()[1].isfinite().all(), "logits after an image are not finite"
    return limits


def heads(subject):
    """Heads that were calibrated keep all tokens of the budget, and no more."""
    model, text = subject.model, torch.randint(3, IMAGE, (160,), generator=torch.Generator().manual_seed(4))
    budget = replace(SMALL, heads=fastkv.calibrate_heads(model, text=text))
    for options in subject.ways():
        with patched(subject, budget, policy="keydiff", **options):
            cache = fastkv.FastKVCache(model)
            read(model, text[None], cache=cache)
            kept = torch.cat([cache.stored(index)[0] for index, _ in compressed(cache)])
            assert int(kept.sum()) == SMALL.tokens * len(kept), f"heads keep {kept.tolist()}"


def unpatched(subject):
    """Training works with the patch; without it everything is as before, bit for bit."""
    model = subject.model
    with patched(subject), torch.enable_grad():
        model.train()
        model(input_ids=subject.ids, attention_mask=subject.mask, labels=subject.ids).loss.backward()
        model.eval()
        model.zero_grad()
    equal(read(model, subject.ids, subject.mask).logits, subject.logits, "prompt")
    tokens, logits = answer(model, subject.ids, subject.mask)
    equal(tokens, subject.answer[0], "greedy tokens")
    equal(logits, subject.answer[1], "generated")


# In the order in which they run; the last one sees what the others left behind.
CHECKS = {
    check.__name__: check
    for check in (whole, blocks, turns, evictions, kept_only, policies, static_steps, copies, saved, beams, kernels,
                  images, heads, unpatched)
}  # fmt: skip
OF_ATTENTION = ("whole", "blocks", "evictions", "kept_only", "unpatched")  # once more with the other attention function
