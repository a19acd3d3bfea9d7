"""How keys and values are stored: in the model's dtype, or in 8 or 4 bits."""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import fastkv
from fastkv import Budget, FastKVAttention, FastKVError, cpu, reference
from fastkv.cpu import slots as compiled_slots
from fastkv.reference import FORMATS, FP8, INT4, INT8, PLAIN, rotated, step_of

from .conftest import examples
from .models import build, raises
from .pairwise import covering
from .states import compiled_step

B, HQ, HKV, D = 2, 4, 2, 64
WIDE = {"head_dim": 32}  # what groups of four bits need
ALIKE = ["int8", "fp8", "int4"]  # for keys and values
CODED = [*ALIKE, "k8v4"]
HEADS = ["uniform", "adaptive"]
CPU = torch.device("cpu")
each_format = pytest.mark.parametrize("slots", CODED)


def made(num, dtype=torch.float32, seed=0, dim=D):
    """Random q, k and v of num tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, num, dim, generator=generator).to(dtype) for heads in (HQ, HKV, HKV))


def module(slots="model", policy="keydiff", **options):
    """A layer that keeps 24 tokens a head and evicts every 5."""
    budget = options.pop("budget", Budget(tokens=24, sinks=2, recent=4, heads=options.pop("heads", "uniform")))
    return FastKVAttention(HQ, HKV, D, policy, budget, evict_every=5, slots=slots, **options)


def run(layer, length=60, steps=20, dtype=torch.float32, seed=0):
    """Attention of a layer over a prompt and so many steps after it, [B, HQ, length + steps, D]."""
    parts = zip(*(part.split([length, *[1] * steps], 2) for part in made(length + steps, dtype, seed)))
    return torch.cat([layer(*part) for part in parts], 2)


@st.composite
def rows(draw):
    """[3, D] fp32 of sizes that differ by row and by number, some of them all zero or all equal."""
    dim = draw(st.sampled_from([32, 64, 96, 128]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    made = torch.randn(3, dim, generator=generator) * 10.0 ** draw(st.integers(-3, 3))
    made = made * 10.0 ** torch.linspace(0, draw(st.integers(0, 3)), dim)
    made[0] = draw(st.sampled_from([0.0, 1.0, -3.5]))
    return made


@given(rows())
def test_eight_bits_round_by_half_a_step(x):
    codes, scales = INT8.encode(x)
    assert torch.equal(scales, x.abs().amax(-1) / 127)
    error = (INT8.decode(codes, scales) - x).abs()
    assert bool((error <= scales[:, None] * (0.5 + 1e-4)).all())
    codes, scales = FP8.encode(x)
    error = (FP8.decode(codes, scales) - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scales[:, None] / 1024) * (1 + 1e-5)).all())


@given(rows())
def test_four_bits_round_by_half_a_step_of_the_rotated_row(x):
    y = rotated(x)
    assume(y.amax() - y.amin() < 15 * 61440)  # the largest step there is
    codes, scales = INT4.encode(x)
    step = step_of(scales[..., 0].int())
    error = (rotated(INT4.decode(codes, scales)) - y).abs().unflatten(-1, (-1, 32))
    assert bool((error <= step[..., None] * (0.5 + 1e-4) + 1e-6 * y.abs().amax()).all())
    groups = y.unflatten(-1, (-1, 32))
    need = torch.maximum((groups.amax(-1) - groups.amin(-1)) / 15, groups.abs().amax(-1) / 127)
    assert bool((step >= need).all())
    assert bool(((step < need * 1.126) | (scales[..., 0] == -128)).all())


def test_packing_puts_number_j_beside_j_plus_half():
    codes, scales = INT4.encode(rotated(torch.arange(64.0) % 16)[None])  # rotated twice: as it was
    assert scales[0].tolist() == [[0, 0]] * 2
    assert codes[0].tolist() == [j % 16 * 17 for j in range(32)]


def test_rotation_is_its_own_inverse_and_orthogonal():
    x = torch.randn(5, 96, dtype=torch.float64)
    assert torch.allclose(rotated(rotated(x)), x)
    h = rotated(torch.eye(32, dtype=torch.float64))
    expected = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]) / 32**0.5
    assert torch.allclose(h, expected.double())


def test_scales_that_are_no_normal_numbers_are_zero():
    for stored in (INT8, FP8):
        codes, scales = stored.encode(torch.full((1, 4), 1e-38))
        assert not scales.any() and not codes.any()


@pytest.mark.parametrize("slots, heads, backend", covering(CODED, HEADS, ["reference", "cpu"]))
def test_attention_is_close_to_that_of_plain_slots(slots, heads, backend):
    options = {"policy": "snapkv", "heads": heads, "backend": backend}
    assert torch.equal(*(run(module(name, **options), steps=0) for name in ("model", slots)))  # a prompt as it is
    plain, coded = (run(module(name, budget=Budget(tokens=99), backend=backend)) for name in ("model", slots))
    allowed = {"int8": 0.01, "fp8": 0.04, "int4": 0.13, "k8v4": 0.09}[slots]
    assert 0 < (plain - coded).norm() / plain.norm() < allowed


@pytest.mark.parametrize("slots, heads, correction", covering(CODED, HEADS, ["none", "moments", "centroids"]))
def test_the_cpu_agrees_with_the_reference(slots, heads, correction):
    options = {"policy": "snapkv", "heads": heads, "correction": correction, "prefill_block": 16}
    one, other = (module(slots, backend=backend, **options) for backend in ("reference", "cpu"))
    assert torch.allclose(run(one), run(other), atol=1e-4)
    for (name, mine), (_, theirs) in zip(one.state.named_tensors(), other.state.named_tensors(), strict=True):
        if name in ("seen", "exact.lengths"):
            assert torch.equal(mine, theirs)
    assert torch.equal(one.moments().count, other.moments().count)


@pytest.mark.parametrize("slots, heads, backend", covering(CODED, HEADS, ["reference", "cpu"]))
def test_moving_never_rounds(slots, heads, backend):
    layer = module(slots, policy="snapkv", heads=heads, prefill_block=16, backend=backend)
    run(layer)
    exact, stored = layer.state.exact, FORMATS[slots]
    _, keys, values = made(80)
    for name, given_rows in (("keys", keys), ("values", values)):
        form = getattr(stored, name)
        once = form.decode(*form.encode(given_rows))
        index = exact["positions"].long()[..., None].expand(-1, -1, -1, D)
        assert torch.equal(exact[name][exact.valid], once.gather(2, index.clamp(0, 79))[exact.valid])


COMPILED = cpu.library("slots")
compiled = pytest.mark.skipif(isinstance(COMPILED, str), reason=f"slots.cpp: {COMPILED}")


def coded(name, heads, dim, filled, size=1.0, seed=0):
    """Slots of two batch rows, up to `filled` of 80 in use, with biases where the seed is odd."""
    generator, form = torch.Generator().manual_seed(seed), FORMATS[name]
    keys, values = (size * torch.randn(2, heads, 80, dim, generator=generator) for _ in range(2))
    (codes, scales), (value_codes, value_scales) = form.keys.encode(keys), form.values.encode(values)
    lengths = torch.randint(1, filled + 1, (2, heads), generator=generator, dtype=torch.int32)
    bias = torch.randn(2, heads, 80, generator=generator) if seed % 2 else None
    stored = {"key_scales": scales, "value_scales": value_scales, "format": form, "decodes_to": torch.float32}
    return reference.Slots(codes, value_codes, lengths, bias=bias, filled=filled, **stored)


@compiled
@each_format
@settings(max_examples=examples(25))
@given(
    st.sampled_from([32, 64, 96, 256]), st.sampled_from([(1, 1), (2, 3), (3, 4), (1, 9)]), st.integers(1, 70),
    st.sampled_from([0.01, 1, 30]), st.integers(0, 999),
)  # fmt: skip
def test_compiled_attention_is_that_of_decoded_slots(slots, dim, sizes, filled, size, seed):
    heads, groups = sizes
    slots = coded(slots, heads, dim, filled, size, seed)
    q = torch.randn(2, heads, groups, dim, generator=torch.Generator().manual_seed(seed))
    received = torch.zeros(2, heads, 80)
    out, lse = compiled_step(q, slots, 0.2, received)
    logits = 0.2 * q @ slots["keys"].mT + (0 if slots.bias is None else slots.biases(filled)[:, :, None])
    logits = logits.masked_fill(~slots.valid[:, :, None], -torch.inf)
    weights = logits.softmax(-1)
    pairs = (out, weights @ slots["values"]), (lse, logits.logsumexp(-1)), (received[..., :filled], weights.mean(2))
    for (found, exact), allowed in zip(pairs, (1e-4 * size, 1e-5 * (1 + size), 1e-4)):
        assert torch.allclose(found, exact, rtol=1e-5, atol=allowed)
    assert bool((received[..., :filled].masked_select(~slots.valid) == 0).all()) and not received[..., filled:].any()


@compiled
@settings(max_examples=examples(100))
@given(rows(), st.sampled_from(ALIKE), st.sampled_from([1e-38, 1e-20, 1.0, 1e30]))
def test_compiled_codes_are_the_same_bits(x, name, size):
    form, x = FORMATS[name], x * size
    codes, scales = form.encode(x)
    found = compiled_slots.encode_rows(form, x)
    assert torch.equal(found[0], codes) and torch.equal(found[1], scales)
    decoded, want = compiled_slots.decode_rows(form, codes, scales, torch.float32), form.decode(codes, scales)
    assert torch.equal(compiled_slots.decode_rows(form, codes, scales, torch.bfloat16), decoded.bfloat16())
    if name == "int4":  # turned back in another order
        assert torch.allclose(decoded, want, rtol=0, atol=1e-6 * float(want.abs().max()))
    else:
        assert torch.equal(decoded, want)


@compiled
@pytest.mark.parametrize("slots", ["int8", "fp8"])
def test_compiled_codes_round_half_to_even(slots):
    form, x = FORMATS[slots], torch.zeros(1, 64)
    x[0, 0] = form.largest  # the step is 1
    x[0, 1:33] = torch.arange(32) + 0.5 if slots == "int8" else torch.arange(16, 32, 0.5)  # there every other is a code
    x[0, 33:64] = torch.arange(31) / (2 if slots == "int8" else 1024)  # e4m3's below normal numbers are 1 / 512 apart
    assert torch.equal(compiled_slots.encode_rows(form, x)[0], form.encode(x)[0])


@compiled
@pytest.mark.parametrize("slots", ALIKE)
def test_every_code_is_read_alike(slots):
    form, codes = FORMATS[slots], torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F] if slots == "fp8" else codes  # no NaN is written
    codes = codes.repeat_interleave(32).view(form.empty((), 32, torch.float32, CPU)[0].dtype).view(len(codes), 32)
    scales = form.empty((len(codes),), form.dim(32), torch.float32, CPU)[1]
    scales = torch.randint(-100, 100, scales.shape, generator=torch.Generator().manual_seed(0)).to(scales.dtype)
    found, want = compiled_slots.decode_rows(form, codes, scales, torch.float32), form.decode(codes, scales)
    assert torch.allclose(found, want, rtol=0, atol=1e-6 * float(want.abs().max()))


@compiled
@pytest.mark.parametrize("place", [0, 15, 16, 37, 48])
def test_compiled_attention_finds_the_largest_logit(place):
    slots = coded("int8", 2, 64, 49)
    slots.lengths.fill_(49)
    slots.bias = torch.zeros(2, 2, 80)
    slots.bias[:, :, place] = 300
    out, lse = compiled_step(torch.randn(2, 2, 3, 64), slots, 0.1)
    assert torch.allclose(out, slots["values"][:, :, place, None].expand_as(out), atol=1e-5)
    assert bool((lse > 200).all())


@compiled
@each_format
def test_compiled_attention_depends_on_neither_batch_nor_threads(slots):
    whole, q, threads = coded(slots, 3, 64, 50), torch.randn(2, 3, 5, 64), torch.get_num_threads()
    out, lse = compiled_step(q, whole, 0.2)
    torch.set_num_threads(1)
    for row in range(2):
        mine = {name: part[row : row + 1] for name, part in whole.moving().items()}
        alone = dataclasses.replace(whole, **mine, lengths=whole.lengths[row : row + 1])
        found = compiled_step(q[row : row + 1], alone, 0.2)
        assert torch.equal(found[0][0], out[row]) and torch.equal(found[1][0], lse[row])
    torch.set_num_threads(threads)


@compiled
@each_format
def test_compiled_attention_copies_no_slots(slots):
    given_slots, q, bound = coded(slots, 2, 64, 64), torch.randn(2, 2, 3, 64), 4096
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        compiled_step(q, given_slots, 0.2)
    made = sum(max(event.self_cpu_memory_usage, 0) for event in found.key_averages())
    assert made <= bound, f"{made} bytes"


@each_format
@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_slots_are_decoded_where_nothing_compiles(slots, heads, monkeypatch):
    options = {"policy": "snapkv", "heads": heads, "backend": "cpu", "prefill_block": 16}
    plain = run(module(slots, **options))
    monkeypatch.setattr(cpu, "library", lambda name: "no compiler")
    assert torch.allclose(run(module(slots, **options)), plain, atol=1e-5)


def test_a_missing_compiler_is_a_sentence(monkeypatch):
    error = RuntimeError("No working C++ compiler found\nin: c++, g++")
    monkeypatch.setattr(cpu, "built", mock.Mock(side_effect=error))
    assert cpu.library.__wrapped__("slots") == "RuntimeError: No working C++ compiler found"


@each_format
def test_what_leaves_the_prompt_is_remembered_before_it_is_rounded(slots):
    layers = [module(name, correction="moments", backend="reference") for name in ("model", slots)]
    for layer in layers:
        run(layer, steps=0)
    one, other = (layer.moments() for layer in layers)
    assert torch.equal(one.key_mean, other.key_mean) and torch.equal(one.cross, other.cross)


@pytest.mark.parametrize(("slots", "ratio"), [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30), ("k8v4", 0.42)])
def test_bytes_of_a_slot_at_128_numbers(slots, ratio):
    sizes = []
    for name in ("model", slots):
        layer = FastKVAttention(4, 2, 128, "keydiff", Budget(tokens=1024), slots=name)
        layer.allocate(1, dtype=torch.bfloat16)
        sizes.append(sum(tensor.nbytes for tensor in layer.state.exact.moving().values()))
    assert sizes[1] <= ratio * sizes[0]


@each_format
@pytest.mark.parametrize(("dtype", "same"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_centroids_follow_tokens_not_codes(slots, dtype, same):
    found = {}
    for name in ("model", slots):
        layer = FastKVAttention(4, 2, 128, "snapkv", Budget(tokens=1000), slots=name, correction="centroids")
        layer.allocate(1, dtype=dtype)
        found[name] = layer.state.parts.num
    assert found[slots] == 1000 * 512 // (16 * 520)
    assert (found["model"] == found[slots]) == same


def sentence(match):
    """A refusal: one sentence that says what to do instead."""
    return pytest.raises(FastKVError, match=match + r".*; (use|leave) |must be one of")


def test_refusals():
    with sentence("slots must be one of auto, int8, fp8, int4, k8v4, got 'int2'"):
        module("int2")
    with sentence("correction='vector' stores keys without their values"):
        module("int8", correction="vector")
    layer = FastKVAttention(4, 2, 48, "keydiff", 64, slots="int4")
    with sentence("slots='int4' needs keys and values of a multiple of 32 numbers, got 48"):
        layer.allocate(1)


# Whole layers and models.


@each_format
def test_module_is_saved_loaded_and_moved(slots, tmp_path):
    layer, twin = module(slots), module(slots)
    run(layer)
    twin.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert twin.state.exact.dtype == torch.float32
    assert torch.equal(run(twin, seed=1), run(layer, seed=1))
    codes = layer.state.exact.keys.clone()
    layer.to(torch.bfloat16)
    assert layer.state.exact.dtype == torch.bfloat16 and torch.equal(layer.state.exact.keys, codes)
    assert layer.state.exact.key_scales.dtype == twin.state.exact.key_scales.dtype
    run(layer, dtype=torch.bfloat16)
    fresh = module(slots)
    fresh.load_state_dict(layer.state_dict())
    assert fresh.state.exact.dtype == torch.bfloat16
    other = module("int8" if slots != "int8" else "fp8")
    raises(f"slots='{slots}' were saved, this module has slots=", other.load_state_dict, layer.state_dict())


@pytest.mark.parametrize("slots", ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8"))])
def test_compiled_steps_are_eager_steps(slots):
    one, other = (module(slots, policy="snapkv", correction="centroids") for _ in range(2))
    torch._dynamo.reset()
    q, k, v = made(40)
    for layer in (one, other):
        layer(*(part[:, :, :28] for part in (q, k, v)))
    compiled = torch.compile(other, backend="aot_eager")
    for at in range(28, 40):
        token = [part[:, :, at : at + 1] for part in (q, k, v)]
        assert torch.allclose(compiled(*token), one(*token), atol=1e-5)


def test_codes_do_not_depend_on_autocast():
    rows = torch.randn(3, 5, 64)
    want = INT4.encode(rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, INT4.encode(rows), want))


@pytest.mark.parametrize(
    ("budget", "options", "name"),
    [("2x", {}, "int8"), ("16x", {}, "int8"),  # heads of 16 numbers, no whole group of 32
     (64, {}, "model"), (Budget(keep=0.5), {}, "model"), ("2x", {"slots": "model"}, "model"),
     *((Budget(bytes=200_000, sinks=2, recent=4), options, "int8") for options in ({}, {"correction": "moments"}))],
    ids=str,
)  # fmt: skip
def test_budgets_in_bytes_are_spent_on_codes(budget, options, name):
    model = fastkv.patch(build(), "snapkv", budget, **options)
    assert fastkv.FastKVCache(model).compressed[0].cache.config.slots.name == name


def test_sixteen_times_smaller():
    """Codes of 4 bits where heads have whole groups; latents stay as they are; a module follows the same rule."""
    layer = FastKVAttention(4, 2, 64, "keydiff", "16x")
    q = torch.randn(1, 4, 2048, 64, generator=torch.Generator().manual_seed(0))
    layer(q, q[:, :2], q[:, 2:])
    assert layer.config.slots is INT4
    assert 0.9 < layer.cache.nbytes() * 16 / (2048 * 2 * 2 * 64 * 2) <= 1
    latent = fastkv.patch(build("deepseek_v3"), "knorm", "2x")
    assert fastkv.FastKVCache(latent).compressed[0].cache.config.slots is PLAIN


def test_rows_of_8_bits_are_decoded_without_another_copy(monkeypatch):
    want = INT8.decode(*(stored := INT8.encode(torch.randn(3, 5, 8)))).bfloat16()
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert torch.equal(INT8.decode(*stored, torch.bfloat16), want)
