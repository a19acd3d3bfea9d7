"""How keys and values are stored: in the model's dtype, or in 8 or 4 bits."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastkv
from fastkv import Budget, FastKVAttention, FastKVError, reference
from fastkv.reference import AUTO, FORMATS, FP8, INT4, INT8, rotated, step_of

B, HQ, HKV, D = 2, 4, 2, 64
CODED = ["int8", "fp8", "int4"]
each_format = pytest.mark.parametrize("slots", CODED)


def made(num, dtype=torch.float32, seed=0, dim=D):
    """Random q, k and v of num tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, num, dim, generator=generator).to(dtype) for heads in (HQ, HKV, HKV))


def module(slots="auto", policy="keydiff", **options):
    """A layer that keeps 24 tokens a head and evicts every 5."""
    heads = options.pop("heads", "uniform")
    budget = options.pop("budget", Budget(tokens=24, sinks=2, recent=4, heads=heads))
    return FastKVAttention(HQ, HKV, D, policy, budget, evict_every=5, slots=slots, **options)


def run(layer, length=60, steps=20, dtype=torch.float32, seed=0):
    """Attention of a layer over a prompt and so many steps after it, [B, HQ, length + steps, D]."""
    q, k, v = made(length + steps, dtype, seed)
    outs = [layer(q[:, :, :length], k[:, :, :length], v[:, :, :length])]
    for at in range(length, length + steps):
        outs.append(layer(*(part[:, :, at : at + 1] for part in (q, k, v))))
    return torch.cat(outs, 2)


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
    codes, scales = INT4.encode(x)
    y, step = rotated(x), step_of(scales[..., 0].int())
    error = (rotated(INT4.decode(codes, scales)) - y).abs().unflatten(-1, (-1, 32))
    assert bool((error <= step[..., None] * (0.5 + 1e-4) + 1e-6 * y.abs().amax()).all())
    groups = y.unflatten(-1, (-1, 32))
    need = torch.maximum((groups.amax(-1) - groups.amin(-1)) / 15, groups.abs().amax(-1) / 127)
    assert bool((step >= need).all())
    assert bool(((step < need * 1.126) | (scales[..., 0] == -128)).all())


def test_packing_puts_number_j_beside_j_plus_half():
    y = torch.arange(64.0) % 16
    codes, scales = INT4.encode(rotated(y)[None])  # rotated twice: as it was
    assert scales[0].tolist() == [[0, 0]] * 2
    assert codes[0].tolist() == [j % 16 * 17 for j in range(32)]


def test_rotation_is_its_own_inverse_and_orthogonal():
    x = torch.randn(5, 96, dtype=torch.float64)
    assert torch.allclose(rotated(rotated(x)), x)
    h = rotated(torch.eye(32, dtype=torch.float64))
    expected = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]) / 32**0.5
    assert torch.allclose(h, expected.double())


@pytest.mark.parametrize("name", FORMATS)
def test_empty_slots_are_zeros_of_the_shapes_that_encode_makes(name):
    stored = FORMATS[name]
    codes, scales = stored.encode(torch.randn(2, 3, 128, dtype=torch.bfloat16))
    empty = stored.empty((2, 3), 128, torch.bfloat16, torch.device("cpu"))
    assert not stored.decode(*empty).any()
    for one, like in zip((codes, scales), empty):
        assert (one is None) == (like is None)
        assert one is None or (one.shape == like.shape and one.dtype == like.dtype)
    assert stored.dim(codes.shape[-1]) == 128
    assert stored.nbytes(128, 2) * 6 == sum(one.nbytes for one in empty if one is not None)


def test_scales_that_are_no_normal_numbers_are_zero():
    for stored in (INT8, FP8):
        codes, scales = stored.encode(torch.full((1, 4), 1e-38))
        assert not scales.any() and not codes.any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
@each_format
def test_attention_is_close_to_that_of_plain_slots(slots, heads, backend):
    options = {"policy": "snapkv", "heads": heads, "backend": backend}
    plain, coded = run(module(**options), steps=0), run(module(slots, **options), steps=0)
    assert torch.equal(plain, coded)  # a first prompt is read as it is
    plain, coded = (run(module(name, budget=Budget(tokens=99), backend=backend)) for name in ("auto", slots))
    allowed = {"int8": 0.01, "fp8": 0.04, "int4": 0.13}[slots]
    error = (plain - coded).norm() / plain.norm()
    assert 0 < error < allowed


@pytest.mark.parametrize("correction", ["none", "moments", "centroids"])
@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
@each_format
def test_the_cpu_agrees_with_the_reference(slots, heads, correction):
    options = {"policy": "snapkv", "heads": heads, "correction": correction, "prefill_block": 16}
    one, other = (module(slots, backend=backend, **options) for backend in ("reference", "cpu"))
    assert torch.allclose(run(one), run(other), atol=1e-4)
    for (name, mine), (_, theirs) in zip(one.state.named_tensors(), other.state.named_tensors(), strict=True):
        if name in ("seen", "exact.lengths"):
            assert torch.equal(mine, theirs)
    assert torch.equal(one.moments().count, other.moments().count)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
@each_format
def test_moving_never_rounds(slots, heads, backend):
    layer = module(slots, policy="snapkv", heads=heads, prefill_block=16, backend=backend)
    run(layer)
    exact, stored = layer.state.exact, FORMATS[slots]
    _, keys, values = made(80)
    for name, given_rows in (("keys", keys), ("values", values)):
        once = stored.decode(*stored.encode(given_rows))
        index = exact["positions"].long()[..., None].expand(-1, -1, -1, D)
        assert torch.equal(exact[name][exact.valid], once.gather(2, index.clamp(0, 79))[exact.valid])


@each_format
def test_what_leaves_the_prompt_is_remembered_before_it_is_rounded(slots):
    layers = [module(name, correction="moments", backend="reference") for name in ("auto", slots)]
    for layer in layers:
        run(layer, steps=0)
    one, other = (layer.moments() for layer in layers)
    assert torch.equal(one.key_mean, other.key_mean) and torch.equal(one.cross, other.cross)


@each_format
def test_copies_keep_their_format(slots):
    layer = module(slots)
    run(layer)
    twin = copy.deepcopy(layer)
    assert twin.state.exact.format == FORMATS[slots] and twin.state.exact.dtype == torch.float32
    assert torch.equal(run(twin, seed=1), run(layer, seed=1))


@pytest.mark.parametrize(("slots", "ratio"), [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30)])
def test_bytes_of_a_slot_at_128_numbers(slots, ratio):
    sizes = {}
    for name in ("auto", slots):
        layer = FastKVAttention(4, 2, 128, "keydiff", Budget(tokens=1024), slots=name)
        layer.allocate(1, dtype=torch.bfloat16)
        sizes[name] = sum(tensor.nbytes for tensor in layer.state.exact.moving().values())
    assert sizes[slots] <= ratio * sizes["auto"]


def sentence(match):
    """A refusal: one sentence that says what to do instead."""
    return pytest.raises(FastKVError, match=match + ".*; use |must be one of")


def test_refusals():
    with sentence("slots must be one of auto, int8, fp8, int4, got 'int2'"):
        module("int2")
    with sentence("correction='ridge' changes values"):
        module("int8", policy="grkv")
    layer = FastKVAttention(4, 2, 48, "keydiff", 64, slots="int4")
    with sentence("slots='int4' needs keys and values of a multiple of 32 numbers, got 48"):
        layer.allocate(1)
    layer = module("int8", backend="triton")
    with pytest.raises(FastKVError, match="not slots='int8'"):
        layer.allocate(1)


def test_plain_is_the_default():
    layer = module()
    run(layer)
    assert layer.state.exact.format is AUTO and layer.state.exact.key_scales is None
    assert not any("scales" in name for name, _ in layer.state.named_tensors())
    assert reference.slot_format("auto") is AUTO and fastkv.FastKVAttention is FastKVAttention
