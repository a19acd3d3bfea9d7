"""Slots that hold codes of 8 or 4 bits: read and written in registers. Twins of `Scaled` and `Grouped` in
`fastkv.reference.slots`.

A code c of 8 bits in a row with scale s stands for s c. Kernels never multiply a tile with its scales where a product
follows:

    scale q.k = (s_k scale) (q.c_k);   sum_j w_j v_j = sum_j (w_j s_j) c_j

Codes are read as c / 256 (exact in bf16 and fp16) and scales as 256 s, so that a weight times a scale is about as large
as the value in fp16, too. Codes are the dtype of their tensor: int8 are integers, uint8 the bits of e4m3, which are
converted with integers, because sm_80 and gfx942 (e4m3fnuz) have no instruction for them. For NVIDIA, PTX converts four
codes at a time.

Codes of 4 bits stand for s (c - z) in rotated rows, s and z of every 32 numbers, and become those numbers in registers
(12 bits at most: exact in bf16 where |c - z| < 16). Products and sums are of rotated rows: q is turned once, the sum
of values turned back once. Every byte is read for both of its numbers, by neighbours, so that tiles are as wide as the
head. In fp16, rows and queries are no longer than 65504.

Tensors of scales are None-switched: without them a tile is what it is, and the code compiles to what it was. Scales
of int8 are m and z of codes of 4 bits, read as one int16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import INTERPRET

INTERP = tl.constexpr(INTERPRET)
UNIT = tl.constexpr(256.0)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # scales below are 0
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 2^23: beside it, fp32 has no bits after the point
SIXTEEN = tl.constexpr(0x41800000)  # bits of 16.0; those of 16 + c have c << 19 more

# PTX that makes two pairs of halves, $0 and $1, of four codes in one register, $2: each as the code / 256. Half as many
# instructions as a conversion of one code after another, and none of those that a GPU does at a quarter or an eighth of
# its speed. A byte beside 0x43 (bf16) or 0x64 (fp16) is a number: 128 and its lower 7 bits, 1024 and all 8.
INT8_BF16 = tl.constexpr("""
\t{ .reg .b32 %w<5>;
\tprmt.b32 %w0, $2, 0, 0x4140;
\tprmt.b32 %w1, $2, 0, 0x4342;
\tlop3.b32 %w2, %w0, 0x00800080, 0xBF00BF00, 0xEA;  // -1/2, or -1 for a negative code
\tlop3.b32 %w3, %w1, 0x00800080, 0xBF00BF00, 0xEA;
\tlop3.b32 %w0, %w0, 0x007F007F, 0x43004300, 0xEA;
\tlop3.b32 %w1, %w1, 0x007F007F, 0x43004300, 0xEA;
\tmov.b32 %w4, 0x3B803B80;  // 1 / 256
\tfma.rn.bf16x2 $0, %w0, %w4, %w2;
\tfma.rn.bf16x2 $1, %w1, %w4, %w3; }
""")
INT8_FP16 = tl.constexpr("""
\t{ .reg .b32 %w<4>;
\txor.b32 %w0, $2, 0x80808080;  // code + 128
\tmov.b32 %w2, 0x1C001C00;  // 1 / 256
\tmov.b32 %w3, 0xC480C480;  // -(1024 + 128) / 256
\tprmt.b32 %w1, %w0, 0x64646464, 0x4140;
\tprmt.b32 %w0, %w0, 0x64646464, 0x4342;
\tfma.rn.f16x2 $0, %w1, %w2, %w3;
\tfma.rn.f16x2 $1, %w0, %w2, %w3; }
""")
FP8_BF16 = tl.constexpr("""
\t{ .reg .b32 %w<4>;
\tand.b32 %w0, $2, 0x80808080;
\tshr.u32 %w1, $2, 4;
\tlop3.b32 %w0, %w1, 0x07070707, %w0, 0xEA;  // sign, four zeros and three bits of the exponent
\tshl.b32 %w1, $2, 4;
\tand.b32 %w1, %w1, 0xF0F0F0F0;  // its last bit and the mantissa
\tmov.b32 %w2, 0x77807780;  // 2^112: as bits of bf16 codes are 2^-120 times as large, below 2^-6, too
\tmov.b32 %w3, 0x80008000;  // -0
\tprmt.b32 $0, %w1, %w0, 0x5140;
\tprmt.b32 $1, %w1, %w0, 0x7362;
\tfma.rn.bf16x2 $0, $0, %w2, %w3;
\tfma.rn.bf16x2 $1, $1, %w2, %w3; }
""")
FP8_FP16 = tl.constexpr("""
\t{ .reg .b32 %w<2>;
\tand.b32 %w0, $2, 0x80808080;
\tshr.u32 %w1, $2, 1;
\tlop3.b32 %w0, %w1, 0x3F3F3F3F, %w0, 0xEA;
\tshl.b32 %w1, $2, 7;
\tand.b32 %w1, %w1, 0x80808080;
\tprmt.b32 $0, %w1, %w0, 0x5140;
\tprmt.b32 $1, %w1, %w0, 0x7362; }
""")

# And four codes of 4 bits, the bytes of $2 from bit $3 on, as s (c - z): s is in $7 and $8, -(z + 128), or -(z + 1024)
# in fp16, in $9 and $10.
# The difference is exact, so that a number is rounded once.
INT4 = """
\t{ .reg .b32 %w<4>;
\tshr.u32 %w0, $2, $3;
\tand.b32 %w0, %w0, 0x0F0F0F0F;
\tmov.b32 %w2, ONE;
\tmov.b32 %w3, 0x80008000;  // -0
\tprmt.b32 %w1, %w0, UPPER, 0x4140;
\tprmt.b32 %w0, %w0, UPPER, 0x4342;
\tfma.rn.TYPE %w1, %w1, %w2, $9;
\tfma.rn.TYPE %w0, %w0, %w2, $10;
\tfma.rn.TYPE $0, %w1, $7, %w3;
\tfma.rn.TYPE $1, %w0, $8, %w3; }
"""
INT4_BF16, INT4_FP16 = (
    tl.constexpr(INT4.replace("TYPE", kind).replace("ONE", one).replace("UPPER", upper))
    for kind, one, upper in (("bf16x2", "0x3F803F80", "0x43434343"), ("f16x2", "0x3C003C00", "0x64646464"))
)


@triton.constexpr_function
def _packed(scales_ptr):
    """Whether slots with these scales hold codes of 4 bits."""
    return scales_ptr is not None and scales_ptr.dtype.element_ty == tl.int8


@triton.jit
def _codes_of(codes_ptr, scales_ptr, slot, D: tl.constexpr):
    """Where the row of a slot begins."""
    if _packed(scales_ptr):
        return codes_ptr + slot * (D // 2)
    else:
        return codes_ptr + slot * D


@triton.jit
def _scales_of(scales_ptr, slot, D: tl.constexpr):
    """Where the scales of a slot begin; None without scales."""
    if scales_ptr is None:
        return  # as in `_page`
    elif _packed(scales_ptr):
        return scales_ptr + slot * (2 * (D // 32))
    else:
        return scales_ptr + slot


@triton.jit
def _turned(rows, D: tl.constexpr):
    """Rows [N, BLOCK] in fp32 or fp64, 0 beyond D, times the Hadamard matrix of each block; see `rotated`."""
    N: tl.constexpr = rows.shape[0]
    BLOCK: tl.constexpr = rows.shape[1]
    SIZE: tl.constexpr = D & -D
    for bit in tl.static_range(9):
        if (1 << bit) < SIZE:
            pairs = tl.reshape(rows, [N, BLOCK // (2 << bit), 2, 1 << bit])
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            both = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
            rows = tl.reshape(both, [N, BLOCK])
    return rows * (SIZE**-0.5)


@triton.jit
def _spread_out(parts, BLOCK: tl.constexpr):
    """Columns [N, P] of parts as [N, BLOCK], each BLOCK / P times."""
    N: tl.constexpr = parts.shape[0]
    P: tl.constexpr = parts.shape[1]
    return tl.reshape(tl.broadcast_to(parts[:, :, None], [N, P, BLOCK // P]), [N, BLOCK])


@triton.jit
def _step_of(exponents):
    """`step_of` of the reference."""
    return ((exponents + 1016) << 20).to(tl.float32, bitcast=True)


@tl.core.builtin
def _on_cuda(_semantic: Any = None) -> bool:
    """Whether a kernel is compiled for NVIDIA, so that it may contain PTX."""
    return _semantic.builder.options.backend_name == "cuda"


@tl.core.builtin
def _halves(
    codes: Any,
    ptx: tl.constexpr,
    dtype: tl.constexpr,
    more: Any = (),
    further: tl.constexpr = "",
    _semantic: Any = None,
) -> tl.tensor:
    """A tile of codes converted by PTX as above, to fp16 or bf16; what else it is given, and in which registers."""
    # As if it had effects: without, triton would convert what threads read one code at a time, of values down their
    # columns, as their product wants them. Now they read 16 codes of a row, and exchange the numbers.
    registers = "=&r,=&r,r" + getattr(further, "value", further)
    return tl.inline_asm_elementwise(
        ptx, registers, [codes, *more], dtype=dtype.value, is_pure=False, pack=4, _semantic=_semantic
    )


@triton.jit
def _rotated_rows(
    codes_ptr, scales_ptr, slot, inside, begin, D: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr = tl.float32
):
    """Numbers [begin, begin + BLOCK) of the rotated rows of slots [N] that hold codes of 4 bits, in that dtype; 0 where
    not inside and beyond D. begin: a multiple of min(BLOCK, 32).
    """
    W: tl.constexpr = D // 2
    # So many neighbours share a group and are all in the low or all in the high bits of their bytes.
    SHARED: tl.constexpr = 32 if D % 64 == 0 else 16
    PART: tl.constexpr = SHARED if BLOCK >= SHARED else BLOCK
    column = begin + tl.arange(0, BLOCK)
    mask = inside[:, None]
    if BLOCK > D:
        mask = mask & (column < D)[None, :]
    codes = tl.load(codes_ptr + (slot[:, None] * W + (column % W)[None, :]), mask=mask, other=0)
    piece = tl.arange(0, BLOCK // PART)
    group = begin // 32 + piece // (32 // PART)
    both_ptr = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    known = inside[:, None] & (group < D // 32)[None, :]
    both = tl.load(both_ptr + (slot[:, None] * (D // 32) + group[None, :]), mask=known, other=0).to(tl.int32)
    step, zero = _step_of((both << 24) >> 24), (both >> 8).to(tl.float32)
    high = (begin + PART * piece >= W)[None, :]
    halves: tl.constexpr = False if INTERP else _on_cuda() and dtype != tl.float32
    if halves:
        least: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        shift = _spread_out(tl.where(high, 4, 0), BLOCK) + tl.zeros(codes.shape, tl.int32)
        steps, offsets = _spread_out(step.to(dtype), BLOCK), _spread_out((-least - zero).to(dtype), BLOCK)
        ptx: tl.constexpr = INT4_BF16 if dtype == tl.bfloat16 else INT4_FP16
        return _halves(codes, ptx, dtype, (shift, steps, offsets), ",r,r,r,r,r,r,r,r")
    else:
        bits = _spread_out(tl.where(high, 0xF0, 0x0F), BLOCK)
        shift = _spread_out(tl.where(high, 15, 19), BLOCK)
        numbers = (((codes.to(tl.int32) & bits) << shift) | SIXTEEN).to(tl.float32, bitcast=True)  # 16 + c
        # Both products are exact, so it does not matter whether they are fused with the difference.
        return (numbers * _spread_out(step, BLOCK) - _spread_out(step * (zero + 16), BLOCK)).to(dtype)


@triton.jit
def _numbers(codes, dtype: tl.constexpr):
    """A tile of codes as numbers / 256 in that dtype; any other tile as it is."""
    halves: tl.constexpr = False if INTERP else _on_cuda() and dtype != tl.float32
    if codes.dtype == tl.int8:
        if halves:
            return _halves(codes, INT8_BF16 if dtype == tl.bfloat16 else INT8_FP16, dtype)
        else:
            return (codes.to(tl.float32) * (1 / UNIT)).to(dtype)
    elif codes.dtype == tl.uint8:
        if halves:
            return _halves(codes, FP8_BF16 if dtype == tl.bfloat16 else FP8_FP16, dtype)
        else:
            wide = codes.to(tl.uint16)  # as bits of fp16 they are 2^-8 times as large, below 2^-6, too
            return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return codes


@triton.jit
def _factors(scales_ptr, slot, inside):
    """What `_numbers` of these slots are multiplied with, fp32; 0 where not inside."""
    return tl.load(scales_ptr + slot, mask=inside, other=0.0) * UNIT


@triton.jit
def _slot_rows(codes_ptr, scales_ptr, slot, inside, mask, cols, dtype: tl.constexpr, D: tl.constexpr):
    """Rows of slots [N] in that dtype, 0 where not in the mask: as they are, `_numbers`, or `_rotated_rows`."""
    if _packed(scales_ptr):
        return _rotated_rows(codes_ptr, scales_ptr, slot, inside, 0, D, cols.shape[0], dtype)
    else:
        return _numbers(tl.load(codes_ptr + (slot[:, None] * D + cols[None, :]), mask=mask, other=0.0), dtype)


@triton.jit
def _exact(tile, scales_ptr, slot, inside):
    """A tile of rows in fp32: `_numbers` times their scales, if there are any."""
    if scales_ptr is None:
        return tile.to(tl.float32)
    else:
        return _numbers(tile, tl.float32) * _factors(scales_ptr, slot, inside)[:, None]


@triton.jit
def _plain_rows(codes_ptr, scales_ptr, slot, inside, begin, D: tl.constexpr, BLOCK: tl.constexpr):
    """`_rotated_rows` turned back. BLOCK: the padded head, or a power of two up to 32 and begin a multiple of it."""
    SIZE: tl.constexpr = D & -D
    if BLOCK >= D:
        return _turned(_rotated_rows(codes_ptr, scales_ptr, slot, inside, 0, D, BLOCK), D)
    else:  # of H = A x B, A has rows of that many numbers, of which only `own` is wanted, B their BLOCK numbers
        block, own = begin // SIZE * SIZE, begin % SIZE // BLOCK
        rows = tl.zeros([slot.shape[0], BLOCK], tl.float32)
        for other in range(0, SIZE // BLOCK):
            bits = own & other
            for shift in tl.static_range(4, -1, -1):
                bits = bits ^ (bits >> (1 << shift))
            part = _rotated_rows(codes_ptr, scales_ptr, slot, inside, block + BLOCK * other, D, BLOCK)
            rows += tl.where((bits & 1) == 0, part, -part)
        return _turned(rows, BLOCK) * (SIZE // BLOCK) ** -0.5


@triton.jit
def _e4m3(x):
    """Bits of e4m3 of fp32 numbers up to 448, half to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent counts from 7 rather than 127
    subnormal = ((tl.abs(x) * 512 + HALF_EVEN) - HALF_EVEN).to(tl.int32)
    return (tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _rounded(x):
    """x to the nearest integer, half to even, for |x| < 2^22."""
    return (x + HALF_EVEN) - HALF_EVEN


@triton.jit
def _encoded(rows, dtype: tl.constexpr):
    """Codes [N, D] in that dtype and scales [N] of fp32 rows: the bits of the reference."""
    largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    top = tl.max(tl.abs(rows), 1)
    scales = tl.div_rn(top, tl.full(top.shape, largest, tl.float32))
    scales = tl.where(scales < TINY, 0.0, scales)
    divisor = tl.where(scales == 0, float("inf"), scales)[:, None] + tl.zeros(rows.shape, tl.float32)
    x = tl.minimum(tl.maximum(tl.div_rn(rows, divisor), -largest), largest)
    if dtype == tl.int8:
        return _rounded(x).to(tl.int8), scales
    else:
        return _e4m3(x), scales


@triton.jit
def _grouped(rows, D: tl.constexpr):
    """Codes of 4 bits, steps and zero points [N, P, 32], [N, P], [N, P] of fp32 rows [N, BLOCK], 0 beyond D."""
    N: tl.constexpr = rows.shape[0]
    P: tl.constexpr = rows.shape[1] // 32
    groups = tl.reshape(_turned(rows.to(tl.float64), D).to(tl.float32), [N, P, 32])
    low, high = tl.min(groups, 2), tl.max(groups, 2)
    size = tl.maximum(high, -low)
    need = tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32))
    need = tl.maximum(need, tl.div_rn(size, tl.full(low.shape, 127.0, tl.float32)))
    exponents = ((need.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - 1016
    exponents = tl.minimum(tl.maximum(exponents, -128), 127)
    step = _step_of(exponents)
    zeros = tl.minimum(tl.maximum(_rounded(tl.div_rn(-low, step)), -128.0), 127.0)
    numbers = _rounded(tl.div_rn(groups, step[:, :, None] + tl.zeros(groups.shape, tl.float32)))
    codes = tl.minimum(tl.maximum(numbers + zeros[:, :, None], 0.0), 15.0)
    return codes, exponents, zeros


@triton.jit
def _stored(rows, codes_ptr, scales_ptr, D: tl.constexpr):
    """What is stored of fp32 rows [N, BLOCK], 0 beyond D: codes [N, BLOCK], of 4 bits only the first D / 2 of them, and
    scales at `_scale_places`; and the rows as they are read from now on, rotated if of 4 bits, fp32.
    """
    N: tl.constexpr = rows.shape[0]
    BLOCK: tl.constexpr = rows.shape[1]
    if _packed(scales_ptr):
        numbers, exponents, zeros = _grouped(rows, D)
        read = tl.reshape((numbers - zeros[:, :, None]) * _step_of(exponents)[:, :, None], [N, BLOCK])
        codes = tl.reshape(numbers.to(tl.int32), [N, BLOCK])
        upper = (tl.arange(0, BLOCK)[None, :] + tl.zeros([N, 1], tl.int32) + D // 2) % BLOCK
        codes = codes | (tl.gather(codes, upper, 1) << 4)
        scales = (exponents & 0xFF) | (zeros.to(tl.int32) << 8)
        return codes.to(tl.uint8), scales.to(tl.int16), read
    else:
        codes, scales = _encoded(rows, codes_ptr.dtype.element_ty)
        return codes, scales, _numbers(codes, tl.float32) * (scales * UNIT)[:, None]


@triton.jit
def _code_places(codes_ptr, scales_ptr, slot, live, D: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers [N, BLOCK] to the codes of slots [N] and which of them there are, of slots that are live."""
    cols = tl.arange(0, BLOCK)[None, :]
    if _packed(scales_ptr):
        return codes_ptr + (slot[:, None] * (D // 2) + cols), live[:, None] & (cols < D // 2)
    else:
        return codes_ptr + (slot[:, None] * D + cols), live[:, None] & (cols < D)


@triton.jit
def _scale_places(scales_ptr, slot, live, D: tl.constexpr, BLOCK: tl.constexpr):
    """The same of their scales: [N] fp32, or [N, P] int16."""
    if _packed(scales_ptr):
        both_ptr = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        group = tl.arange(0, BLOCK // 32)[None, :]
        return both_ptr + (slot[:, None] * (D // 32) + group), live[:, None] & (group < D // 32)
    else:
        return scales_ptr + slot, live


@triton.jit
def _store_encoded(codes_ptr, scales_ptr, rows, slot, live, D: tl.constexpr):
    """Encode rows [N, BLOCK] (0 beyond D) into slots [N] that are live. Returns: the rows as `_stored` does."""
    BLOCK: tl.constexpr = rows.shape[1]
    codes, scales, read = _stored(rows.to(tl.float32), codes_ptr, scales_ptr, D)
    place, mask = _code_places(codes_ptr, scales_ptr, slot, live, D, BLOCK)
    tl.store(place, codes, mask=mask)
    place, mask = _scale_places(scales_ptr, slot, live, D, BLOCK)
    tl.store(place, scales, mask=mask)
    return read
