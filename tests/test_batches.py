"""A row of a batch is the row alone: padding, very different lengths, rows that end early, beams, drafts."""

from itertools import product

import pytest
import torch

import fastkv
from fastkv import corrections

from .models import account, build, generate, held, policy, prompt
from .pairwise import FOLLOWERS, covering
from .states import assert_same
from .test_vector_cache import mapping

NAMES = fastkv.policies.names()
POLICIES = {name: fastkv.policies.get(name) for name in NAMES}
TOKENS, EVERY, DISTINCT = 14, 3, 400
LENGTHS = (40, 1, 19)


@pytest.fixture(autouse=True)
def exact_means(monkeypatch):
    """Sums that differ in a last bit may be rounded to different bf16 numbers; what is asked here is less than that."""
    monkeypatch.setattr(corrections, "MEANS", torch.float32)


def small(**options):
    return fastkv.Budget(tokens=TOKENS, sinks=2, recent=3, **options)


def go_together(name, mode, *_):
    """Whether a policy can be in one of the modes below; test_refusals says how it says no."""
    chosen = POLICIES[name]
    refused = {"blocks": chosen.second_reading, "adaptive": not chosen.adaptive, "vector": name == "duoattention"}
    return not refused.get(mode)


def patch(model, name, directory, mode, **options):
    """Patch in one of the modes below."""
    chosen = policy(name, directory, model)
    assert go_together(name, mode)
    if mode == "blocks":
        options["prefill_block"] = 16
    if mode == "vector":
        options |= {"correction": "vector+moments", "vector": mapping(model)}
    heads = "adaptive" if mode == "adaptive" else "uniform"
    fastkv.patch(model, chosen, small(heads=heads), evict_every=EVERY, **options)


def distinct(name="llama", **changes):
    """A model and 100 ids of which none occurs twice: equal tokens would tie, and ties follow the last bit."""
    generator = torch.Generator().manual_seed(5)
    return build(name, vocab_size=DISTINCT, **changes), 3 + torch.randperm(DISTINCT - 3, generator=generator)[:100]


def rows_of(ids, lengths, width, side="left"):
    """The ids cut into rows [B, width] of these lengths, padded on one side, and their mask."""
    batch = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        batch[row, place], mask[row, place] = ids[row : row + length], 1
    return batch, mask


def read(model, cache, ids, mask):
    """Logits of the last tokens; `mask` is also that of what came before, and says where each token is in its row."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


def roll(model, ids, mask, more):
    """Read a prompt and then the given tokens one by one: logits of the row's last token, then of each; the cache."""
    cache, last = fastkv.FastKVCache(model), torch.where(mask.bool(), torch.arange(ids.shape[1]), 0).amax(-1)
    logits = [read(model, cache, ids, mask)[torch.arange(len(ids)), last]]
    for token in more.split(1, 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits.append(read(model, cache, token, mask)[:, -1])
    return torch.stack(logits, 1), cache


def assert_alone(model, ids, mask, more):
    """Each row of the batch gives the logits, and keeps the tokens, that it gives and keeps alone."""
    together, cache = roll(model, ids, mask, more)
    assert torch.isfinite(together).all()
    for row in range(len(ids)):
        real = mask[row].bool()
        if not real.any():
            continue
        alone, own = roll(model, ids[row : row + 1, real], mask[row : row + 1, real], more[row : row + 1])
        # Processors multiply other batches in another order, and layers of random weights magnify a last bit up to a
        # hundredfold; in float64 it is 1e-15.
        torch.testing.assert_close(together[row], alone[0], atol=5e-4, rtol=0)
        assert torch.equal(together[row].argmax(-1), alone[0].argmax(-1))
        for layer in range(4):
            assert held(cache, layer, row) == held(own, layer, 0)
            assert torch.equal(cache.moments(layer).count[row], own.moments(layer).count[0])


RIGHT = {"duoattention": "whole", "fastkv": "adaptive", "keydiff": "vector", "tova": "blocks", "h2o": "blocks"}


@pytest.mark.parametrize(
    "name,mode,side",
    [*covering(NAMES, ["whole", "adaptive", "vector"], ["left"], together=1, where=go_together, slow=FOLLOWERS),
     *((name, mode, "right") for name, mode in RIGHT.items())],
)  # fmt: skip
def test_a_row_of_a_batch_is_the_row_alone(name, mode, side, tmp_path):
    """With padding on its left or on its right."""
    model, ids = distinct()
    patch(model, name, tmp_path, mode)
    batch, mask = rows_of(ids, LENGTHS, 40, side)
    assert_alone(model, batch, mask, ids[40:64].view(3, 8))


@pytest.mark.parametrize("mode", ["whole", "adaptive"])
def test_rows_that_end_early(mode, tmp_path):
    """Rows that reach the end token are filled up with padding; the others go on as they would alone."""
    model, (ids, mask) = build(), prompt()
    patch(model, "momentkv", tmp_path, mode)
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    free = model.generate(ids, attention_mask=mask, **options, eos_token_id=None)[:, 50:]
    end = int(free[1, 4])  # the second row ends here at the latest
    together = model.generate(ids, attention_mask=mask, **options, eos_token_id=end)[:, 50:]
    lengths = []
    for row, pad in enumerate((0, 7, 19)):
        alone = model.generate(ids[row : row + 1, pad:], **options, eos_token_id=end)[0, 50 - pad :]
        lengths.append(len(alone))
        assert torch.equal(together[row, : len(alone)], alone)
        assert (together[row, len(alone) :] == 0).all()
    assert lengths[1] <= 5 < max(lengths)


# Padding is never absorbed, however few tokens a forward has: a lone token may be padding too.

ODD = (33, 28, 1)  # tokens of rows
SETTINGS = [  # how a layer stores its tokens: moments, centroids, attention, in a slab of two kinds, without values
    *product(("momentkv", "fastkv", "h2o", "duoattention"), ["whole"]),
    *product(["keydiff"], ("adaptive", "vector")),
]


@pytest.mark.parametrize(
    "setting,block,side,static", covering(SETTINGS, [1, 2, 16, 32, None], ["left", "right"], [False, True], together=1)
)
def test_a_prompt_whose_last_block_is_one_token(setting, block, side, static, tmp_path):
    model, ids = distinct()
    patch(model, setting[0], tmp_path, setting[1], prefill_block=block, static=static)
    batch, mask = rows_of(ids, ODD, 33, side)
    cache = fastkv.FastKVCache(model)
    assert read(model, cache, batch, mask).isfinite().all()
    account(cache, mask.sum(-1))
    for step in range(4):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        assert read(model, cache, ids[40 + 3 * step : 43 + 3 * step, None], mask).isfinite().all()
        account(cache, mask.sum(-1))


@pytest.mark.parametrize(
    "setting,end,static", covering(SETTINGS, ["alone", "left", "right"], [False, True], together=1)
)
def test_one_token_behind_the_blocks_of_a_prompt_is_decoded(setting, end, static, tmp_path):
    """If it is no padding in any row: as if it came by itself. The next evictions are counted from there."""
    model, ids = distinct()
    patch(model, setting[0], tmp_path, setting[1], prefill_block=16, static=static)
    lengths = (33,) if end == "alone" else (33, 28, 20)
    batch, mask = rows_of(ids, lengths, 33, "right" if end == "right" else "left")
    once, parts = fastkv.FastKVCache(model), fastkv.FastKVCache(model)
    calls = [(once, slice(0, 33)), (parts, slice(0, 32)), (parts, slice(32, 33))]
    logits = [read(model, cache, batch[:, now], mask[:, : now.stop])[:, -1] for cache, now in calls]
    torch.testing.assert_close(logits[0], logits[2], atol=1e-5, rtol=0)
    assert once.workspace.clock.now.steps == (end != "right")
    for mine, other in zip(once.compressed, parts.compressed, strict=True):
        assert_same(mine.state, other.state)


@pytest.mark.parametrize("policy", ["keydiff", "kvzip"])
def test_masks_that_are_not_numbers(policy):
    """Kernels want rows without gaps, and a part of a mask of booleans is no copy."""
    model, ids = distinct()
    budget, block = fastkv.Budget(tokens=20, sinks=2, recent=4), None if policy == "kvzip" else 16
    fastkv.patch(model, policy, budget, backend="triton", prefill_block=block)
    batch, mask = rows_of(ids, ODD, 33, "left")
    want, got = (model(batch, attention_mask=one).logits[:, -1] for one in (mask, mask.bool()))
    assert torch.equal(got, want)


@pytest.mark.parametrize("setting,static", covering(SETTINGS, [False, True], together=1))
def test_turns_of_one_token_that_is_padding_for_some_rows(setting, static, tmp_path):
    """One row or another, all of them, and several times between evictions."""
    model, ids = distinct()
    patch(model, setting[0], tmp_path, setting[1], static=static)
    batch, mask = rows_of(ids, ODD, 33)
    cache = fastkv.FastKVCache(model)
    read(model, cache, batch, mask)
    turns = [(1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1)]
    for step, real in enumerate(turns):
        mask = torch.cat([mask, torch.tensor(real)[:, None]], 1)
        assert read(model, cache, ids[40 + 3 * step : 43 + 3 * step, None] * mask[:, -1:], mask).isfinite().all()
        account(cache, mask.sum(-1))


@pytest.mark.parametrize("name,static", [("llama", True), ("gemma3", False)])
def test_rows_go_on_as_if_their_padding_were_not_there(name, static):
    """With room for everything, the logits of real tokens are those of the stock model, which masks padding."""
    model, ids = distinct(name)
    batch, mask = rows_of(ids, (20, 7, 1), 20)
    turns = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 0, 1]])
    full = torch.cat([mask, turns], 1)
    text = torch.cat([batch, ids[40:64].view(3, 8)], 1) * full
    want = model(text, attention_mask=full, position_ids=(full.cumsum(-1) - 1).clamp(min=0)).logits
    fastkv.patch(model, "momentkv", fastkv.Budget(tokens=100, sinks=2, recent=3), static=static)
    cache = fastkv.FastKVCache(model)
    parts = [slice(0, 20), *(slice(at, at + 1) for at in range(20, 28))]
    got = torch.cat([read(model, cache, text[:, part], full[:, : part.stop]) for part in parts], 1)
    torch.testing.assert_close(got[full.bool()], want[full.bool()], atol=1e-4, rtol=0)


@pytest.mark.parametrize("block", [1, 16])
def test_blocks_of_one_token_through_generate(block):
    """A row that is padded on the left continues as it does alone; there is room for everything."""
    model, ids = distinct()
    batch, mask = rows_of(ids, ODD, 33)
    want = [generate(model, ids[row : row + size][None], new=8)[0, -8:] for row, size in enumerate(ODD)]
    fastkv.patch(model, "keydiff", fastkv.Budget(tokens=100, sinks=2, recent=3), prefill_block=block)
    out = generate(model, batch, mask, new=8, return_dict_in_generate=True)
    account(out.past_key_values, mask.sum(-1) + 7)
    assert torch.equal(out.sequences[:, -8:], torch.stack(want))


@pytest.mark.parametrize("static", [False, True])
def test_generate_never_looks_for_padding_in_its_own_steps(static, monkeypatch):
    """To look is to wait for the device; only masks that others made are looked at."""
    model, (ids, mask) = build(), prompt(3, 30, (0, 3, 9))
    fastkv.patch(model, "keydiff", fastkv.Budget(tokens=20, sinks=2, recent=3), static=static)
    forward, looked = fastkv.integrations.transformers.forward, []
    stock = forward.ends_in_padding
    monkeypatch.setattr(forward, "ends_in_padding", lambda mask: looked.append(mask) or stock(mask))
    out = generate(model, ids, mask, new=8, return_dict_in_generate=True)
    assert not looked
    wider = torch.cat([mask, mask.new_ones(3, 8)], 1)
    model(out.sequences[:, -1:], attention_mask=wider, past_key_values=out.past_key_values)
    assert len(looked) == 1


def test_heads_that_trade_ask_for_no_new_scratch():
    model = build(num_hidden_layers=1)
    budget = fastkv.Budget(tokens=40, sinks=2, recent=4, heads="adaptive")
    fastkv.patch(model, "keydiff", budget, prefill_block=32, backend="triton")
    assert len(model(prompt(1, 300, (0,))[0]).past_key_values.workspace.scratch) == 1
