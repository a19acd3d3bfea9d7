"""Kernels on slots of 8 and 4 bits: codes are those of the reference bit for bit, attention and moments those of the
numbers that codes stand for, computed in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastkv import Budget
from fastkv.kernels import _codes, decode_attention, operations, prefill_attention
from fastkv.kernels._launch import INTERPRET, pow2
from fastkv.reference import FORMATS, rotated

from . import test_kernels_decode as decode
from . import test_kernels_evict as evict
from . import test_kernels_prefill as prefill
from .conftest import examples
from .models import raises
from .pairwise import covering
from .states import encoded, launched, make_spec, sinks, splits
from .test_slots import module, run

SLOTS = ["int8", "fp8", "int4", "k8v4"]
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


@triton.jit
def _round_trip_kernel(rows_ptr, codes_ptr, scales_ptr, read_ptr, N: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    row, cols = tl.arange(0, N), tl.arange(0, B)
    place, mask = row[:, None] * D + cols[None, :], (row[:, None] >= 0) & (cols[None, :] < D)
    rows = tl.load(rows_ptr + place, mask=mask, other=0.0)
    read = _codes._store_encoded(codes_ptr, scales_ptr, rows, row, row >= 0, D)
    tl.store(read_ptr + place, read, mask=mask)


@triton.jit
def _numbers_kernel(codes_ptr, out_ptr):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + place, _codes._numbers(tl.load(codes_ptr + place), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_is_read_exactly(codes, dtype):
    """All bits but those of NaN, zeros with their sign."""
    given = torch.arange(256, dtype=torch.uint8).view(codes)
    out = torch.empty(256, dtype=dtype)
    _numbers_kernel[1,](given if codes == torch.int8 else given.view(torch.uint8), out, num_warps=2)
    wanted = given.float() / 256
    assert torch.equal(out.float()[wanted.isfinite()], wanted[wanted.isfinite()])
    assert torch.equal(out.signbit()[wanted == 0], wanted.signbit()[wanted == 0])


@triton.jit
def _packed_kernel(codes_ptr, scales_ptr, out_ptr, N: tl.constexpr, D: tl.constexpr):
    slot = tl.arange(0, N)
    rows = _codes._rotated_rows(codes_ptr, scales_ptr, slot, slot < N, 0, D, D, out_ptr.dtype.element_ty)
    tl.store(out_ptr + slot[:, None] * D + tl.arange(0, D)[None, :], rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_packed_codes_are_rounded_once(dtype):
    """Every code, with steps and zero points of all sizes; fp16 has no numbers beyond 65504."""
    num, dim, source = 256, 64, torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (num, dim // 2), generator=source).to(torch.uint8)
    scales = torch.randint(-128, 128, (num, dim // 32, 2), generator=source).to(torch.int8)
    scales[:4, 0] = torch.tensor([[-128, -128], [127, 127], [-128, 127], [127, -128]])
    out = torch.empty(num, dim, dtype=dtype)
    _packed_kernel[1,](codes, scales, out, num, dim)
    step = 2.0 ** ((scales[..., 0].int() + 1016) // 8 - 127) * (1 + (scales[..., 0].int() % 8) / 8)
    numbers = torch.cat([codes & 15, codes >> 4], -1).view(num, dim // 32, 32) - scales[..., 1:].float()
    wanted = (numbers.double() * step[..., None].double()).view(num, dim)
    if dtype == torch.bfloat16 and INTERPRET:  # which cuts bits off where hardware rounds
        wanted = (wanted.float().view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert torch.equal(out, wanted.to(dtype))


def every_size(slots):
    """Rows [16, 4096] fp32: every code's neighbourhood, ties between codes, and rows of zeros and of subnormals."""
    top = 448.0 if slots == "fp8" else 127.0
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float() if slots == "fp8" else codes.view(torch.int8).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= top)].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    row = torch.cat([numbers, ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9))])
    row = torch.nn.functional.pad(row, (0, 1024 - len(row)), value=top)
    rows = [row, row / 3, row * 1e-3, row * 7e4, torch.randn(1024), torch.randn(1024) * 1e-6]
    rows += [torch.zeros(1024), torch.full((1024,), 1e-38), torch.full((1024,), -2.5)]
    rows += [torch.randn(1024) * 10.0**size for size in range(7)]
    return torch.stack(rows)


@pytest.mark.parametrize("slots, dim", [("int8", 1024), ("fp8", 1024), *(("int4", n) for n in (32, 96, 128, 256, 512))])
def test_codes_are_those_of_the_reference(slots, dim):
    rows, form = every_size(slots)[:, :dim], FORMATS[slots]
    want, scales = form.encode(rows)
    codes, mine, read = torch.empty_like(want), torch.empty_like(scales), torch.empty_like(rows)
    _round_trip_kernel[(1,)](rows.contiguous(), codes, mine, read, N=16, D=dim, B=triton.next_power_of_2(dim))
    assert torch.equal(mine, scales) and torch.equal(codes, want)
    assert torch.equal(rotated(read) if slots == "int4" else read, form.decode(want, scales))


def fits(slots, dim):
    """Whether heads of that size can be stored so."""
    return slots in ("int8", "fp8") or dim % 32 == 0


def lse_slack(slots, dtype):
    """A rotated query has twice the digits of its dtype, 16 in bf16: logits lose a little, not only the values."""
    return 1e-4 if slots == "int4" and dtype == torch.bfloat16 else 1e-6


def check_decode(case, slots, *args):
    decode.check(coded(case, slots), *args, lse_slack=lse_slack(slots, case.q.dtype))


def coded(case, slots):
    """A case of `test_kernels_decode` with slots of that format."""
    case.state = encoded(case.state, slots)
    return case


def wide_enough(name, slots, dtype):
    return fits(slots, decode.SHAPES[name][3])


@pytest.mark.parametrize(
    "name, slots, dtype", covering(decode.SHAPES, SLOTS, decode.DTYPES, where=wide_enough, together=1)
)
def test_decode_shapes(name, slots, dtype):
    batch, heads, groups, dim, room, lengths, gone = decode.SHAPES[name]
    check_decode(decode.Case.make(batch, heads, groups, dim, room, dtype, lengths, gone), slots)


@pytest.mark.parametrize(
    "slots, order, softcap, attention, append, number",
    covering(["model", *SLOTS], [None, 0, 1], [None, 3.0], [True, False], [True, False], [1, 4]),
)
def test_decode_variants(slots, order, softcap, attention, append, number):
    with splits(number):
        case = decode.Case.make(2, 2, 3, 64, 24, torch.float32, (23, 0, 1, 14), (0, 0, 7, 70))
        check_decode(decode.sunk(case), slots, softcap, order, append, attention)


@pytest.mark.parametrize("dim, parts", [(128, 1), (256, 3)])
def test_no_program_alone_reads_a_wide_head_in_4_bits(monkeypatch, dim, parts):
    """Two read slots and one what is evicted, in a workspace that was made for a single one."""
    tiles = launched(monkeypatch, decode_attention)
    with splits(1):
        check_decode(decode.Case.make(1, 1, 2, dim, 40, torch.bfloat16, (37,), (9,)), "int4")
    assert {tile.PARTS for tile, _, _ in tiles} == {parts}


@settings(max_examples=examples(500), deadline=None)
@given(
    slots=st.sampled_from(["model", "model", *SLOTS]), dtype=st.sampled_from(decode.DTYPES),
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]), groups=st.integers(1, 16),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]), lengths=st.lists(st.integers(0, 39), min_size=1, max_size=4),
    gone=st.lists(st.integers(0, 40), min_size=1, max_size=4), parts=st.sampled_from([None, None, 1, 5, 18]),
    without=st.none() | st.lists(st.integers(0, 24), min_size=1, max_size=4), order=st.sampled_from([None, 0, 1]),
    softcap=st.sampled_from([None, 2.0, 30.0]), append=st.booleans(), attention=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 30.0]), number=st.sampled_from([1, 2, 4]), seed=st.integers(0, 1000),
    data=st.data(),
)  # fmt: skip
def test_decode_property(
    slots, dtype, shape, groups, dim, lengths, gone, parts, without, order, softcap, append, attention, spread, number,
    seed, data,
):  # fmt: skip
    """Of all formats, beside tokens without values, and whatever is remembered of the evicted."""
    codes = slots != "model"
    dim = 96 if codes and not fits(slots, dim) else dim
    with splits(number):
        how = {"spread": 1.0 if codes else spread, "seed": seed, "parts": parts}
        case = decode.Case.make(*shape, groups, dim, 40, dtype, lengths, gone, **how)
        if without is not None and not codes and parts is None:
            decode.check_vector(case, 24, without, softcap, order, append)
            return
        case.state.sink_logits = data.draw(sinks(shape[1] * groups), "sinks")
        check_decode(case, slots, softcap, order, append, attention)


@pytest.mark.parametrize(
    "slots, dtype, dim, softcap, chip",
    covering(SLOTS, decode.DTYPES, [64, 80, 128, 256, 512], [None, 5.0], ["", "90", "100"], slow=(128, 512)),
)
def test_prefill(monkeypatch, slots, dtype, dim, softcap, chip):
    """Where tiles are those of a chip with more room, and where 4 bits are decoded beforehand."""
    monkeypatch.setattr(prefill_attention, "chip_of", lambda device: chip)
    if dim == 512 and dtype == torch.float32:
        dim = 256
    dim = dim if fits(slots, dim) else 96
    block, state = prefill.case(heads=2, dim=dim, dtype=dtype)
    stored = encoded(state, slots)
    form = FORMATS[slots]
    bits, turned = form.values.bits, form.keys.bits == 4
    tile = prefill_attention.tile_of(pow2(dim), dtype, chip, bits, turned, capped=softcap is not None, order=1)
    if tile is None:  # read as slots of the decoded rows are
        spec, decoded = make_spec(0.125, softcap), {name: stored.exact[name].to(dtype) for name in ("keys", "values")}
        state.exact = replace(state.exact, **decoded)
        found, expected = (prefill_attention.prefill_attention(*block, one, spec) for one in (stored, state))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        stored = state
    prefill.check(block, stored, softcap=softcap, lse_slack=lse_slack(slots, dtype))


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("slots", SLOTS)
def test_codes_are_read_where_compilers_manage(slots, width):
    """Triton before 3.9 stops at a pipeline of what PTX converts for sm_100; rotated queries spill on sm_90."""
    bits, turned = FORMATS[slots].values.bits, FORMATS[slots].keys.bits == 4
    tiles = {chip: prefill_attention.tile_of(width, torch.bfloat16, chip, bits, turned) for chip in ("90", "100")}
    assert tiles["100"] is None or tiles["100"].stages == 1
    assert (tiles["90"] is None) == (width > (64 if turned else 128 if bits == 4 else 512))


@settings(max_examples=examples(300), deadline=None)
@given(
    slots=st.sampled_from(["model", "model", *SLOTS]), shape=st.sampled_from([(1, 2), (2, 1), (2, 2)]),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    gone=st.lists(st.integers(0, 9), min_size=1, max_size=4), dtype=st.sampled_from(decode.DTYPES),
    dim=st.sampled_from([16, 64, 80, 128, 256]), scores=st.sampled_from(["normal", "ties", "equal"]),
    drop=st.integers(0, 20), sinks=st.integers(0, 8), recent=st.integers(0, 50), order=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 1000),
)  # fmt: skip
@example(slots="int8", shape=(2, 2), lengths=[90], gone=[3], dtype=torch.bfloat16, dim=64, scores="normal", drop=16,
         sinks=2, recent=3, order=1, seed=0)  # fmt: skip
def test_evict(slots, shape, lengths, gone, dtype, dim, scores, drop, sinks, recent, order, seed):
    dim = 96 if slots != "model" and not fits(slots, dim) else dim
    case = evict.Case.make(*shape, dim, 90, dtype, lengths, gone, scores=scores, seed=seed)
    case.state = encoded(case.state, slots)
    evict.check(case, 90 - drop, sinks, recent, order)


@pytest.mark.parametrize(
    "slots, heads, policy, correction",
    covering(SLOTS, ["uniform", "adaptive"], ["momentkv", "keydiff", "snapkv"], ["moments", "centroids"], together=1),
)
def test_a_layer_does_what_the_reference_does(slots, heads, policy, correction):
    how = {"budget": Budget(tokens=12, sinks=2, recent=4, heads=heads), "prefill_block": 10, "correction": correction}
    layer, other = (module(slots, policy, backend=backend, **how) for backend in ("triton", "reference"))
    torch.testing.assert_close(run(layer, 20, 6), run(other, 20, 6), atol=2e-5, rtol=1e-4)
    for name in ("seen", "exact.lengths"):
        assert torch.equal(dict(layer.state.named_tensors())[name], dict(other.state.named_tensors())[name])


def test_refusals():
    case = decode.Case.make(1, 2, 2, 64, 24, torch.float32, (23,), (7,))
    for slots in SLOTS:
        state = encoded(case.state, slots)
        state.exact.key_scales = state.exact.key_scales[:, :, :3]
        given = case.q, case.k, case.v, state, case.spec(None, 1)
        raises("key_scales", operations.decode_step, *given)
        state.exact.key_scales = None
        raises(f"got slots='{slots}' without scales; use backend='reference'", operations.decode_step, *given)
