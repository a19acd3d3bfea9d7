"""Numbers at the edge: every dtype, huge logits, equal keys, zero values, one dominating key, and rows that are NaN."""

import itertools

import pytest
import torch
from torch import randn

import fastkv
from fastkv import FastKVAttention, ops
from fastkv.calibration.fits import save_curves

from .models import VOCAB, account, build, generate, prompt
from .pairwise import FOLLOWERS, covering, each
from .states import attention, make_spec, make_state
from .test_batches import NAMES, POLICIES, go_together, held, patch
from .test_deferred import curve
from .test_module import one_layer, rotary, statistics

B, HQ, HKV, D = 2, 4, 2, 16
SCALE = D**-0.5
TOKENS, EVERY = 12, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALONE = [name for name in NAMES if not POLICIES[name].second_reading]


def integers(*shape, largest=50):
    """Whole numbers, which every dtype here holds exactly, so that logits are exact in fp32."""
    return torch.randint(-largest, largest + 1, shape).float()


def huge(num):
    """Logits of up to 1e4 in size, of both signs, and often exactly equal at the top."""
    q, k, v = integers(B, HQ, num, D), integers(B, HKV, num, D), torch.randn(B, HKV, num, D)
    q[:, :, ::2] = 50 * q[:, :, ::2].sign()
    k[:, :, ::3] = 50 * k[:, :, ::3].sign()
    k[:, :, 1] = k[:, :, 0] = q[:, ::2, 0] = q[:, 1::2, 0] = 50.0
    return q, k, v


def one_dominates(num):
    """Every query gives all its weight to one token, which is neither a sink nor recent."""
    q, k, v = torch.ones(B, HQ, num, D), torch.zeros(B, HKV, num, D), torch.randn(B, HKV, num, D)
    k[:, :, 5] = 100.0
    return q, k, v


KINDS = {
    "huge": huge,
    "equal_keys": lambda num: (integers(B, HQ, num, D, largest=3), torch.ones(B, HKV, num, D), randn(B, HKV, num, D)),
    "zero_values": lambda num: (randn(B, HQ, num, D), randn(B, HKV, num, D), torch.zeros(B, HKV, num, D)),
    "zero_keys": lambda num: (randn(B, HQ, num, D), torch.zeros(B, HKV, num, D), randn(B, HKV, num, D)),
    "one_dominates": one_dominates,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def cast(tensors, dtype):
    return [tensor.to(dtype) for tensor in tensors]


@each_dtype
@each_kind
def test_attention_is_softmax_at_any_logits(kind, dtype):
    """Over slots, in one step of decoding and for a prompt block; default tolerances of the dtype.

    A block is merged with its past by their log-sum-exps, of which fp32 rounds off half a unit in the last place."""
    q, k, v = cast(KINDS[kind](24), dtype)
    lengths = torch.tensor([[16, 9], [1, 16]])
    out, _, none = ops.decode_attention(q[:, :, 20], k[:, :, :16], v[:, :, :16], lengths, None, SCALE)
    state, real = make_state(k[:, :, :16], v[:, :, :16], lengths.int()), torch.ones(B, 8, dtype=torch.bool)
    block, *_ = ops.prefill_attention(*(one[:, :, 16:] for one in (q, k, v)), real, state, make_spec(SCALE))
    assert (none == float("-inf")).all()
    largest = SCALE * (q.double() @ k.double().repeat_interleave(HQ // HKV, 1).transpose(-1, -2)).abs().max().item()
    column = torch.arange(24)
    causal = column <= torch.arange(16, 24)[:, None]
    stored = column < lengths[..., None, None]
    expected, *_ = attention(q[:, :, 20:21], k, v, SCALE, stored)
    torch.testing.assert_close(out, expected[:, :, 0].to(dtype))
    expected, *_ = attention(q[:, :, 16:], k, v, SCALE, (stored | (column >= 16)) & causal)
    lost = torch.finfo(torch.float32).eps / 2 * largest
    limits = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
    torch.testing.assert_close(block, expected.to(dtype), rtol=limits[dtype], atol=1e-5 + lost)


# One layer, all policies: prompt in blocks, decoding, evictions.


def layer(name, directory, **options):
    budget = fastkv.Budget(tokens=TOKENS, sinks=2, recent=3)
    options = {"rotary": rotary(), "output": torch.randn(HQ * D, HQ * D), "queries": statistics(), **options}
    options = {"evict_every": EVERY, **options}
    return FastKVAttention(HQ, HKV, D, one_layer(name, directory), budget, **options)


def steps(module, q, k, v, prompt=24, block=None):
    """Feed a prompt and then one token after the other; yields each new token with the state before it."""
    module(*(one[:, :, :prompt] for one in (q, k, v)))
    for index in range(prompt, q.shape[2]):
        exact, token = module.state.exact, slice(index, index + 1)
        before = exact["keys"].clone(), exact["values"].clone(), exact.lengths.clone()
        yield index, before, module(*(one[:, :, token] for one in (q, k, v)))


@pytest.mark.parametrize("name,dtype", each(ALONE, DTYPES))
def test_a_layer_attends_to_what_it_retains(name, dtype, tmp_path):
    """Whatever the numbers: finite state, every token counted, and each output the softmax over what was retained."""
    for kind, make in KINDS.items():
        q, k, v = cast(make(32), dtype)
        module = layer(name, tmp_path, correction="none", prefill_block=10, output=torch.randn(64, 64, dtype=dtype))
        for index, (keys, values, lengths), out in steps(module, q, k, v):
            token = slice(index, index + 1)
            keys, values = torch.cat([keys, k[:, :, token]], 2), torch.cat([values, v[:, :, token]], 2)
            column = torch.arange(keys.shape[2])
            visible = (column < lengths[..., None, None]) | (column == keys.shape[2] - 1)
            expected, *_ = attention(q[:, :, token], keys, values, SCALE, visible)
            torch.testing.assert_close(out, expected.to(dtype))
            total = module.stored() + module.moments().count
            assert torch.equal(total, torch.full_like(total, index + 1))
        floats = [tensor for _, tensor in module.state.named_tensors() if tensor.is_floating_point()]
        assert all(torch.isfinite(tensor).all() for tensor in floats), kind


FACTORS = {"llama": 40.0, "qwen3": 2000.0, "gemma3": 2000.0}


def sharpen(model, factor):
    """Multiply all queries: logits of this tiny model grow to the order of 1e4."""
    for block in model.model.layers:
        attention = block.self_attn
        weight = getattr(attention, "q_norm", attention.q_proj).weight
        weight.copy_((weight + 1) * factor - 1 if "gemma" in model.config.model_type else weight * factor)


@pytest.mark.parametrize("name,sharp,dtype", covering(["llama", "qwen3", "gemma3"], [False, True], DTYPES, together=1))
def test_models_in_every_dtype(name, sharp, dtype):
    """A wide budget changes no bit of the prompt; a small one stays finite, counts every token and repeats itself."""
    model, (ids, mask) = build(name), prompt()
    if sharp:
        sharpen(model, FACTORS[name])
    model = model.to(dtype)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    with fastkv.patched(model, budget=100):
        got = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(got[mask.bool()], expected[mask.bool()])
    runs = []
    for heads in ("uniform", "adaptive", "uniform", "adaptive"):
        budget = fastkv.Budget(tokens=16, sinks=2, recent=4, heads=heads)
        fastkv.patch(model, "momentkv", budget, prefill_block=16, evict_every=EVERY)
        out = generate(model, ids, mask, new=8, return_dict_in_generate=True, output_logits=True)
        assert all(torch.isfinite(logits).all() for logits in out.logits)
        cache, full = out.past_key_values, 1 if name == "gemma3" else 0
        account(cache, mask.sum(-1) + 7, sinks=2, recent=4)
        runs.append((out.logits, cache.layers[full].state))
    for (first, state), (second, twin) in zip(runs[:2], runs[2:]):
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state.named_tensors(), twin.named_tensors()))


# Rows that are not numbers.


VALUES = {"whole": float("nan"), "blocks": float("inf"), "adaptive": float("nan"), "vector": float("inf")}
POISON = VOCAB - 1  # no prompt holds it, and it is never generated


def poisoned(model, value):
    """The model with an embedding of NaN or infinity for one token; nothing else of it changes."""
    model.get_input_embeddings().weight[POISON] = value
    return model


def clean_rows(model, ids, mask, bad):
    """Logits [steps, rows, V] of a batch of three, without those of the second row, which is poisoned if `bad`."""
    ids = ids.clone()
    if bad:
        ids[1, 30:33] = POISON
    options = {"return_dict_in_generate": True, "output_logits": True, "suppress_tokens": [POISON]}
    out = generate(model, ids, mask, new=8, **options)
    logits = torch.stack(out.logits)
    assert torch.isfinite(logits[:, 1]).all() != bad
    return logits[:, [0, 2]], out.past_key_values


@pytest.mark.parametrize("name,mode", covering(NAMES, list(VALUES), together=1, where=go_together, slow=FOLLOWERS))
def test_a_row_of_nan_touches_nobody(name, mode, tmp_path):
    """Bit for bit. Where heads share slots, the width of a step is that of the batch's longest head, which a poisoned
    row may be: sums over other widths differ in the last bit, and what is kept does not."""
    model = poisoned(build(), VALUES[mode])
    patch(model, name, tmp_path, mode)
    ids, mask = prompt()
    expected, before = clean_rows(model, ids, mask, False)
    got, after = clean_rows(model, ids, mask, True)
    if mode == "adaptive":
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    else:
        assert torch.equal(got, expected)
    for layer, row in itertools.product(range(4), (0, 2)):
        assert held(before, layer, row) == held(after, layer, row)


def test_a_row_of_nan_does_not_decide_the_share_of_others(tmp_path):
    """Budget(quality=...) gives a batch what its most demanding row needs; NaN demands nothing that can be known."""
    model, path = poisoned(build(), float("nan")), tmp_path / "context.json"
    save_curves(path, [curve(model, "keydiff")])
    fastkv.patch(model, "keydiff", fastkv.Budget(quality=0.5, calibration=path, sinks=2, recent=4), evict_every=EVERY)
    ids, mask = prompt()
    got, cache = clean_rows(model, ids, mask, True)
    assert torch.isfinite(got).all()
    two = generate(model, ids[[0, 2]], mask[[0, 2]], new=8, return_dict_in_generate=True).past_key_values
    assert torch.equal(cache.stored(0)[[0, 2]], two.stored(0))
    assert int(two.moments(0).count.max()) > 0
