"""Padding is never absorbed, however few tokens a forward has: a lone token may be padding too."""

import pytest
import torch

import fastkv
from fastkv import Budget, FastKVCache

from .models import account, build, generate, policy, prompt
from .pairwise import covering
from .test_batches import distinct, rows_of
from .test_vector_cache import mapping

LENGTHS = (33, 28, 1)
SETTINGS = {  # how a layer stores its tokens
    "moments": ("momentkv", {}),
    "centroids": ("fastkv", {}),
    "attention": ("h2o", {"correction": "mean"}),
    "adaptive": ("keydiff", {"correction": "none"}),
    "fixed": ("duoattention", {}),
    "vector": ("keydiff", {"correction": "vector+moments"}),
}


def patched(model, setting, directory, tokens=14, **options):
    name, extra = SETTINGS[setting]
    vector = mapping(model) if setting == "vector" else None
    budget = Budget(tokens=tokens, sinks=2, recent=3, heads="adaptive" if setting == "adaptive" else "uniform")
    return fastkv.patch(model, policy(name, directory), budget, vector=vector, **extra, **options)


def read(model, cache, ids, mask):
    """Logits of the last tokens; `mask` is also that of what came before, and says where each token is in its row."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


@pytest.mark.parametrize(
    "setting,block,side,static",
    covering(SETTINGS, [1, 2, 16, 32, None], ["left", "right"], [False, True], together=1),
)
def test_a_prompt_whose_last_block_is_one_token(setting, block, side, static, tmp_path):
    model, ids = distinct()
    patched(model, setting, tmp_path, prefill_block=block, evict_every=3, static=static)
    batch, mask = rows_of(ids, LENGTHS, 33, side)
    cache = FastKVCache(model)
    logits = read(model, cache, batch, mask)
    assert logits.isfinite().all()
    account(cache, mask.sum(-1))
    for step in range(4):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        assert read(model, cache, ids[40 + 3 * step : 43 + 3 * step, None], mask).isfinite().all()
        account(cache, mask.sum(-1))


@pytest.mark.parametrize("setting,static", covering(SETTINGS, [False, True], together=1))
def test_turns_of_one_token_that_is_padding_for_some_rows(setting, static, tmp_path):
    """One row or another, all of them, and several times between evictions."""
    model, ids = distinct()
    patched(model, setting, tmp_path, evict_every=3, static=static)
    batch, mask = rows_of(ids, LENGTHS, 33)
    cache = FastKVCache(model)
    read(model, cache, batch, mask)
    turns = [(1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1)]
    for step, real in enumerate(turns):
        mask = torch.cat([mask, torch.tensor(real)[:, None]], 1)
        token = ids[40 + 3 * step : 43 + 3 * step, None] * mask[:, -1:]
        assert read(model, cache, token, mask).isfinite().all()
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
    fastkv.patch(model, "momentkv", Budget(tokens=100, sinks=2, recent=3), static=static)
    cache = FastKVCache(model)
    got = [read(model, cache, batch, mask)]
    for end in range(21, 29):
        got.append(read(model, cache, text[:, end - 1 : end], full[:, :end]))
    torch.testing.assert_close(torch.cat(got, 1)[full.bool()], want[full.bool()], atol=1e-4, rtol=0)


@pytest.mark.parametrize("block", [1, 16])
def test_blocks_of_one_token_through_generate(block):
    """A row that is padded on the left continues as it does alone; there is room for everything."""
    model, ids = distinct()
    batch, mask = rows_of(ids, LENGTHS, 33)
    want = [generate(model, ids[row : row + size][None], new=8)[0, -8:] for row, size in enumerate(LENGTHS)]
    fastkv.patch(model, "keydiff", Budget(tokens=100, sinks=2, recent=3), prefill_block=block)
    out = generate(model, batch, mask, new=8, return_dict_in_generate=True)
    account(out.past_key_values, mask.sum(-1) + 7)
    assert torch.equal(out.sequences[:, -8:], torch.stack(want))


@pytest.mark.parametrize("static", [False, True])
def test_generate_never_looks_for_padding_in_its_own_steps(static, monkeypatch):
    """To look is to wait for the device; only masks that others made are looked at."""
    looked = []
    stock = fastkv.integrations.transformers.forward.ends_in_padding
    monkeypatch.setattr(
        fastkv.integrations.transformers.forward, "ends_in_padding", lambda mask: looked.append(mask) or stock(mask)
    )
    model = build()
    fastkv.patch(model, "keydiff", Budget(tokens=20, sinks=2, recent=3), static=static)
    ids, mask = prompt(3, 30, (0, 3, 9))
    out = generate(model, ids, mask, new=8, return_dict_in_generate=True)
    assert not looked
    wider = torch.cat([mask, mask.new_ones(3, 8)], 1)
    model(out.sequences[:, -1:], attention_mask=wider, past_key_values=out.past_key_values)
    assert len(looked) == 1
