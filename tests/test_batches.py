"""A row of a batch is the row alone: padding, very different lengths, rows that end early, beams, drafts."""

import pytest
import torch

import fastkv
from fastkv import FastKVError, corrections

from .models import ROLLS_BACK, build, generate, policy, prompt
from .pairwise import FOLLOWERS, covering, each
from .test_vector_cache import mapping

NAMES = fastkv.policies.names()
POLICIES = {name: fastkv.policies.get(name) for name in NAMES}
TOKENS, EVERY, DISTINCT = 14, 3, 400
LENGTHS = (40, 1, 19)


@pytest.fixture(autouse=True)
def exact_means(monkeypatch):
    """Sums that differ in a last bit may be rounded to different bf16 numbers; what is asked here is less than that."""
    monkeypatch.setattr(corrections.kinds, "MEANS", torch.float32)


def small(**options):
    return fastkv.Budget(tokens=TOKENS, sinks=2, recent=3, **options)


def go_together(name, mode):
    """Whether a policy can be in one of the modes below; test_refusals says how it says no."""
    chosen = POLICIES[name]
    refused = {"blocks": chosen.second_reading, "adaptive": not chosen.adaptive, "vector": name == "duoattention"}
    return not refused.get(mode)


def patch(model, name, directory, mode, **options):
    """Patch in one of the modes below; False if policy and mode do not go together."""
    chosen = policy(name, directory, model)
    if not go_together(name, mode):
        return False
    if mode == "blocks":
        options["prefill_block"] = 16
    if mode == "vector":
        options |= {"correction": "vector+moments", "vector": mapping(model)}
    heads = "adaptive" if mode == "adaptive" else "uniform"
    fastkv.patch(model, chosen, small(heads=heads), evict_every=EVERY, **options)
    return True


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


def roll(model, ids, mask, more):
    """Read a prompt and then the given tokens one by one: logits of the row's last token, then of each; the cache."""
    seen = mask.sum(-1, keepdim=True)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    last = torch.where(mask.bool(), torch.arange(ids.shape[1]), 0).amax(-1)
    cache = fastkv.FastKVCache(model)
    out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    logits = [out.logits[torch.arange(len(ids)), last]]
    for step in range(more.shape[1]):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        token = more[:, step : step + 1]
        out = model(token, attention_mask=mask, position_ids=seen + step, past_key_values=cache)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1), cache


def held(cache, layer, row):
    """For every head of a row, the sets of positions with and without a value."""
    state = cache.layers[layer].state
    tiers = [state.exact] if state.approx is None else [state.exact, state.approx]
    return [
        [set(tier["positions"][row, head, : int(tier.lengths[row, head])].tolist()) for tier in tiers]
        for head in range(state.heads)
    ]


def assert_alone(model, ids, mask, more):
    """Each row of the batch gives the logits, and keeps the tokens, that it gives and keeps alone."""
    together, cache = roll(model, ids, mask, more)
    assert torch.isfinite(together).all()
    for row in range(len(ids)):
        real = mask[row].bool()
        if not real.any():
            continue
        alone, own = roll(model, ids[row : row + 1, real], mask[row : row + 1, real], more[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=0)
        assert torch.equal(together[row].argmax(-1), alone[0].argmax(-1))
        for layer in range(4):
            assert held(cache, layer, row) == held(own, layer, 0)
            assert torch.equal(cache.moments(layer).count[row], own.moments(layer).count[0])


@pytest.mark.parametrize(
    "name,mode", covering(NAMES, ["whole", "adaptive", "vector"], together=1, where=go_together, slow=FOLLOWERS)
)
def test_a_row_of_a_batch_is_the_row_alone(name, mode, tmp_path):
    model, ids = distinct()
    if not patch(model, name, tmp_path, mode):
        return
    batch, mask = rows_of(ids, LENGTHS, 40)
    assert_alone(model, batch, mask, ids[40:64].view(3, 8))


@pytest.mark.parametrize(
    "name,mode", [*each(NAMES, ["whole"], often=()), *[(name, "blocks") for name in ("momentkv", "tova", "h2o")]]
)
def test_padding_on_the_right(name, mode, tmp_path):
    model, ids = distinct()
    if not patch(model, name, tmp_path, mode):
        return
    batch, mask = rows_of(ids, LENGTHS, 40, "right")
    assert_alone(model, batch, mask, ids[40:64].view(3, 8))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_other_families_too(name, tmp_path):
    """Sliding-window layers beside compressed ones; norms on queries and keys."""
    model, ids = distinct(name)
    patch(model, "momentkv", tmp_path, "whole")
    batch, mask = rows_of(ids, LENGTHS, 40)
    full = roll(model, batch, mask, ids[40:64].view(3, 8))[0]
    for row, length in enumerate(LENGTHS):
        alone, more = ids[row : row + length][None], ids[40 + 8 * row : 48 + 8 * row][None]
        torch.testing.assert_close(full[row], roll(model, alone, torch.ones_like(alone), more)[0][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name,mode", covering(NAMES, ["blocks", "adaptive"], together=1, where=go_together, slow=FOLLOWERS)
)
def test_an_empty_row_touches_nobody(name, mode, tmp_path):
    """A row that is padding and nothing else stays finite, and the others are as they are without it."""
    model, ids = distinct()
    if not patch(model, name, tmp_path, mode):
        return
    batch, mask = rows_of(ids, (40, 0), 40)
    got, cache = roll(model, batch, mask, ids[40:52].view(2, 6))
    alone, own = roll(model, batch[:1], mask[:1], ids[40:46][None])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[0], alone[0], atol=1e-4, rtol=0)
    for layer in range(4):
        assert held(cache, layer, 0) == held(own, layer, 0)
        assert ((cache.stored(layer) + cache.moments(layer).count)[1] == 6).all(), "what was generated counts"


@pytest.mark.parametrize("mode", ["whole", "adaptive"])
def test_rows_that_end_early(mode, tmp_path):
    """Rows that reach the end token are filled up with padding; the others go on as they would alone."""
    model = build()
    patch(model, "momentkv", tmp_path, mode)
    ids, mask = prompt()
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


@pytest.mark.parametrize(
    "name,mode", covering(["momentkv", "h2o", "compactor"], ["whole", "adaptive", "vector"], together=1)
)
def test_beams_of_a_batch_are_the_beams_of_each_row(name, mode, tmp_path):
    """With evictions and reordering in between; each row's best two of three beams, in order."""
    model = build()
    patch(model, name, tmp_path, mode)
    ids, mask = prompt()
    options = {"num_beams": 3, "num_return_sequences": 2, "new": 12}
    together = generate(model, ids, mask, **options)[:, -12:].view(3, 2, 12)
    for row, pad in enumerate((0, 7, 19)):
        assert torch.equal(together[row], generate(model, ids[row : row + 1, pad:], **options)[:, -12:])


@pytest.mark.parametrize("mode", ["whole", "adaptive", "vector"])
def test_reordering_moves_every_tensor(mode, tmp_path):
    """Rows swapped in the middle of decoding go on as if each had always been in the other place."""
    model, ids = distinct()
    patch(model, "h2o", tmp_path, mode)
    batch, mask = rows_of(ids, LENGTHS, 40)
    more, order = ids[40:70].view(3, 10), torch.tensor([2, 0, 0])
    full, _ = roll(model, batch[order], mask[order], more[order])
    _, cache = roll(model, batch, mask, more[:, :4])
    cache.reorder_cache(order)
    for step in range(4, 10):
        seen = torch.tensor(LENGTHS)[order, None] + step
        ones = torch.ones(3, 41 + step, dtype=torch.long)
        ones[:, :40] = mask[order]
        token = more[order, step : step + 1]
        out = model(token, attention_mask=ones, position_ids=seen, past_key_values=cache)
        torch.testing.assert_close(out.logits[:, -1], full[:, step + 1], atol=1e-4, rtol=0)


def test_several_samples_of_a_row_are_independent(tmp_path):
    """Sampling three continuations draws what three copies of the row draw."""
    model = build()
    patch(model, "momentkv", tmp_path, "whole")
    ids, mask = prompt()
    options = {"do_sample": True, "top_k": 5}
    torch.manual_seed(3)
    several = generate(model, ids, mask, num_return_sequences=3, **options)
    torch.manual_seed(3)
    assert torch.equal(several, generate(model, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), **options))
    assert len({tuple(row.tolist()) for row in several[:3]}) > 1


@pytest.mark.parametrize(
    "name,mode",
    covering(
        ["momentkv", "keydiff", "compactor", "h2o", "duoattention"],
        ["whole", "adaptive", "vector"],
        together=1,
        where=go_together,
    ),
)
def test_drafts_that_are_rejected_leave_no_trace(name, mode, tmp_path):
    """Prompt lookup on a text that repeats itself: accepted and rejected drafts, and every token counted once."""
    model, ids = distinct()
    if not patch(model, name, tmp_path, mode):
        return
    text = ids[:12].repeat(4)[None]
    if not ROLLS_BACK:
        with pytest.raises(FastKVError, match="announces roll-backs"):
            generate(model, text, new=12, prompt_lookup_num_tokens=3)
        return
    out = generate(model, text, new=12, prompt_lookup_num_tokens=3, return_dict_in_generate=True)
    again = generate(model, text, new=12, prompt_lookup_num_tokens=3)
    assert torch.equal(out.sequences, again)
    cache = out.past_key_values
    for layer in range(4):
        cache.layers[layer].accept()
        total = cache.stored(layer) + cache.moments(layer).count
        assert torch.equal(total, torch.full_like(total, cache.get_seq_length()))
        assert all(len(set().union(*tiers)) == sum(map(len, tiers)) for tiers in held(cache, layer, 0))
    assert 48 <= cache.get_seq_length() < text.shape[1] + 12


def test_drafts_for_a_batch_are_refused_and_leave_the_model_usable(tmp_path):
    model = build()
    patch(model, "momentkv", tmp_path, "whole")
    ids, mask = prompt()
    expected = generate(model, ids, mask)
    with pytest.raises(ValueError, match="batch" if ROLLS_BACK else "announces roll-backs"):
        generate(model, ids, mask, prompt_lookup_num_tokens=3)
    assert torch.equal(generate(model, ids, mask), expected)
