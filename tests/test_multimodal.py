"""Models that see and hear: prompts with images and sounds, whole and in blocks, in every turn, against stock models.

Budgets hold everything unless a test says otherwise, so that logits have to be those of the stock model.
"""

import pytest
import torch

import fastkv
from fastkv.reference import attention_ahead

from .models import raises
from .multimodal import AUDIO, HEAR, ROTARY_3D, SEE, build, generated, medium, prompt, text, told, types
from .pairwise import covering, named
from .states import attention

LARGE = fastkv.Budget(tokens=300, sinks=2, recent=4)
SMALL = fastkv.Budget(tokens=16, sinks=2, recent=4)


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def patch(model, budget=LARGE, policy="momentkv", **options):
    return fastkv.patch(model, policy, budget, **{"evict_every": 4, **options})


def calls(module):
    """How many tokens each call of a module reads, as it is called."""
    seen = []
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(args[0].shape[1]), with_kwargs=True)
    return seen


@pytest.mark.parametrize("name, base, block", covering([*SEE, *HEAR], ["sdpa", "eager"], [None, 5, 8], together=1))
def test_a_prompt_with_an_image_or_a_sound_is_read_as_by_the_stock_model(name, base, block):
    model, given = build(name, base), prompt(name)
    want, (steps, _) = model(**given).logits, generated(model, given)
    other = prompt(name) | medium(name, 6)[1]
    assert (model(**other).logits - want).abs().max() > 0.1, "another image or sound would show"
    patch(model, prefill_block=block)
    close(model(**given).logits, want)
    close(generated(model, given)[0], steps)


@pytest.mark.parametrize("name, block", covering(SEE, [None, 8], together=1))
def test_images_in_both_turns_and_rows_that_are_padded(name, block):
    model = build(name)
    own, given = medium(name)
    rows = [torch.cat([text(9, 1), own, text(14, 2)], 1), torch.cat([text(4, 3), own, text(8, 4)], 1)]
    pad = rows[0].shape[1] - rows[1].shape[1]
    ids = torch.cat([rows[0], torch.cat([torch.zeros(1, pad, dtype=torch.long), rows[1]], 1)])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    given = {key: torch.cat([one, one.flip(-1) if one.is_floating_point() else one]) for key, one in given.items()}
    both = {"input_ids": ids, "attention_mask": mask, **types(name, ids), **given}
    want, (steps, _) = model(**both).logits, generated(model, both)
    patch(model, prefill_block=block)
    close(model(**both).logits[mask.bool()], want[mask.bool()])
    close(generated(model, both)[0], steps)


def test_tokens_of_an_image_see_each_other_beside_a_past():
    """Were they read causally it would show, in the first turn and in the second."""
    model, given = build("gemma3"), prompt("gemma3")
    want = model(**given).logits
    assert (model(**given | {"token_type_ids": 0 * given["input_ids"]}).logits - want).abs().max() > 0.1
    patch(model)
    cache = model(given["input_ids"][:, :10]).past_key_values
    rest = given | {"input_ids": given["input_ids"][:, 10:]}
    assert rest["input_ids"].shape[1] > 4
    close(model(**rest, past_key_values=cache).logits, want[:, 10:])


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_blocks_cut_no_image(base):
    """Four tokens of an image at 21: a block ends before it, or, if it is shorter than the image, behind it."""
    model, given = build("gemma3", base), prompt("gemma3")
    want = model(**given).logits
    read = calls(model.model.language_model.layers[0])
    for block, expected in ((8, [8, 8, 5, 8, 8, 5]), (3, [3] * 7 + [4] + [3] * 5 + [2]), (25, [25, 17])):
        patch(model, prefill_block=block)
        read.clear()
        close(model(**given).logits, want)
        assert read == expected
        fastkv.unpatch(model)


def test_masks_of_the_whole_prompt_are_not_made_for_blocks(monkeypatch):
    """They would grow with the square of the prompt."""
    model, given = build("gemma3"), prompt("gemma3")
    patch(model, prefill_block=8)
    decoder, widest = model.model.language_model, []
    stock = type(decoder).forward

    def forward(self, *args, attention_mask=None, **kwargs):
        widest.extend(mask.shape[-1] * mask.shape[-2] for mask in attention_mask.values() if mask is not None)
        return stock(self, *args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(decoder, "_fastkv_decoder_forward", forward.__get__(decoder))
    model(**given)
    assert max(widest) <= 8 * (8 + 7)


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl"])
def test_a_prepared_mask_cannot_be_cut(name):
    model, given = build(name), prompt(name)
    total = given["input_ids"].shape[1]
    prepared = torch.ones(1, 1, total, total, dtype=torch.bool).tril()
    positions = torch.arange(total)[None]
    patch(model, prefill_block=8)
    raises("2-D", model, **given | {"attention_mask": prepared, "position_ids": positions})
    patch(model)
    assert model(**given | {"attention_mask": prepared, "position_ids": positions}).logits.isfinite().all()


@pytest.mark.parametrize("block", [None, 8])
def test_a_base_model_that_lengthens_its_prompt(block):
    """Qwen2-Audio makes one placeholder as long as its sound, and a mask to match."""
    model, sound = build("qwen2_audio"), medium("qwen2_audio")[1]
    given = told("qwen2_audio", text(21), torch.full((1, 1), AUDIO), text(17, 2)) | sound
    want = model(**given).logits
    assert want.shape[1] > given["input_ids"].shape[1]
    patch(model, prefill_block=block)
    close(model(**given).logits, want)


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen3_vl"])
def test_kvzip_reads_images_again(name):
    """What is fed again are the embeddings of the image, not of its placeholders, and they stand behind the first."""
    model, given = build(name), prompt(name)
    want = model(**given).logits
    decoder = model.model.language_model
    patch(model, SMALL, "kvzip")
    calls, stock = [], decoder._fastkv_decoder_forward
    decoder._fastkv_decoder_forward = lambda **kwargs: calls.append(kwargs) or stock(**kwargs)
    close(model(**given).logits, want)
    (embeds, places), (embeds_again, places_again) = [(call["inputs_embeds"], call["position_ids"]) for call in calls]
    assert torch.equal(embeds_again[:, -embeds.shape[1] :], embeds)
    if places is not None:
        assert int(places_again.min()) == int(places.max()) + 1
    assert generated(model, given)[0].isfinite().all()


# Positions in three dimensions.

SOME_3D = [named(name, slow=name not in ("qwen2_vl", "qwen3_vl")) for name in ROTARY_3D]


def likeliest(logits):
    """The likeliest tokens [B, 1] that are text, after the last one."""
    return logits[:, -1:, :110].argmax(-1)


def steps(model, cache, token, new=5):
    """Logits of plain steps from a token, each the likeliest after the one before; no positions are given."""
    found = []
    for _ in range(new):
        logits = model(input_ids=token, past_key_values=cache).logits[:, -1:]
        token = likeliest(logits)
        found.append(logits)
    return torch.cat(found, 1)


def alone(name, given, new=5):
    """Logits of the same steps by a stock model that reads everything anew for each."""
    model, found = build(name), []
    for _ in range(new):
        given = given | told(name, given["input_ids"], likeliest(model(**given).logits))
        found.append(model(**given).logits[:, -1:])
    return torch.cat(found, 1)


@pytest.mark.parametrize("name, block", covering(ROTARY_3D, [None, 8], together=1))
def test_caches_know_their_own_positions(name, block, tmp_path):
    """The model remembers those of the last prompt only, which may have been another cache's."""
    seen, read = prompt(name), told("llava", text(30, 7))
    want = [alone(name, given) for given in (seen, read)]
    model = patch(build(name), prefill_block=block)
    outs = [model(**given) for given in (seen, read)]
    caches, tokens = [out.past_key_values for out in outs], [likeliest(out.logits) for out in outs]
    caches[0].save(tmp_path / "cache")
    for twin in (caches[0].clone(), fastkv.FastKVCache.load(tmp_path / "cache", model), caches[0].fork(2)):
        generated(model, seen)  # something else in between
        close(steps(model, twin, tokens[0].repeat(len(twin.compressed[0].state.seen), 1))[:1], want[0])
    for cache, token, expected in reversed([*zip(caches, tokens, want)]):
        close(steps(model, cache, token), expected)
    caches[0].reset()
    out = model(**read, past_key_values=caches[0])
    close(steps(model, caches[0], likeliest(out.logits)), want[1])
    ids = read["input_ids"]
    rows = {"input_ids": torch.cat([ids[:, :3], ids], 1), "attention_mask": (torch.arange(33) > 2).long()[None]}
    found = []
    for cache in (caches[0], fastkv.FastKVCache(model)):  # positions count padding in both, or in neither
        cache.reset()
        model(**rows, past_key_values=cache)
        found.append(model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 34)).logits)
    assert torch.equal(*found)


def test_a_stock_cache_does_not_tell_how_far_images_are_ahead():
    model, given = build("qwen2_vl"), prompt("qwen2_vl")
    cache = model(**given, use_cache=True).past_key_values
    raises("read the prefix with a patched model", fastkv.compress, cache, model, "keydiff", 64)


@pytest.mark.parametrize("name", SOME_3D)
def test_a_generated_turn_after_another_prompt(name):
    """generate, too, would go on from the positions of the last prompt."""
    given, turn = prompt(name), text(11, 8)

    def second(model, between):
        _, out = generated(model, given)
        between()
        return generated(model, told(name, out.sequences, turn), past_key_values=out.past_key_values)[0]

    want = second(build(name), lambda: None)
    model = patch(build(name))
    close(second(model, lambda: generated(model, told("llava", text(40, 9)))), want)


@pytest.mark.parametrize("name", SOME_3D)
def test_what_positions_cannot_serve_is_refused(name):
    model, given = build(name), prompt(name)
    patch(model, SMALL, "compactor")
    raises("three dimensions", model, **given)
    words = told("llava", given["input_ids"] % 110 + 3)
    assert generated(model, words)[0].isfinite().all()
    patch(model)
    cache = model(words["input_ids"]).past_key_values
    given["attention_mask"] = torch.cat([torch.ones_like(words["input_ids"]), given["attention_mask"]], -1)
    raises("pass them, or use generate", model, **given, past_key_values=cache)


def test_graphs_of_a_step_continue_after_an_image():
    given = prompt("qwen3_vl")
    want = alone("qwen3_vl", given, 4)
    model = patch(build("qwen3_vl"), static=True)
    cache = fastkv.FastKVCache(model)
    token = likeliest(model(**given, past_key_values=cache).logits)
    step = fastkv.capture_decode(model, cache, 1)
    for place in range(4):
        logits = step(token)
        close(logits, want[:, place])
        token = likeliest(logits[:, None])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num", [1, 70])
def test_attention_over_later_tokens_equals_brute_force(num, softcap):
    q, k, v = (torch.randn(2, heads, num, dim, dtype=torch.float64) for heads, dim in ((6, 8), (2, 8), (2, 5)))
    ahead = (torch.rand(2, num, num) < 0.3).triu(1)
    want, total, _ = attention(q, k, v, 0.4, ahead[:, None], softcap)
    torch.testing.assert_close(attention_ahead(q, k, v, ahead, 0.4, softcap), (want, total))
