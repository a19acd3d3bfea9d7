"""Slots that hold codes of 8 bits: read and written in registers. Twins of `Scaled` in `fastkv.reference.slots`.

A code c of a row with scale s stands for s c. Kernels never multiply a tile with its scales where a product follows:

    scale q.k = (s_k scale) (q.c_k);   sum_j w_j v_j = sum_j (w_j s_j) c_j

Codes are read as c / 256 (exact in bf16 and fp16) and scales as 256 s, so that a weight times a scale is about as large
as the value in fp16, too. Codes are the dtype of their tensor: int8 are integers, uint8 the bits of e4m3, which are
converted with integers, because sm_80 and gfx942 (e4m3fnuz) have no instruction for them. Both rows of a tensor and
their scales are None-switched: without scales a tile is what it is, and the code compiles to what it was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

UNIT = tl.constexpr(256.0)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # scales below are 0
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 2^23: beside it, fp32 has no bits after the point


@triton.jit
def _numbers(codes, dtype: tl.constexpr):
    """A tile of codes as numbers / 256 in that dtype; any other tile as it is."""
    if codes.dtype == tl.int8:
        return (codes.to(tl.float32) * (1 / UNIT)).to(dtype)
    elif codes.dtype == tl.uint8:
        wide = codes.to(tl.uint16)  # as bits of fp16 they are 2^-8 times as large, below 2^-6, too
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return codes


@triton.jit
def _factors(scales_ptr, slot, inside):
    """What `_numbers` of these slots are multiplied with, fp32; 0 where not inside."""
    return tl.load(scales_ptr + slot, mask=inside, other=0.0) * UNIT


@triton.jit
def _exact(tile, scales_ptr, slot, inside):
    """A tile of rows in fp32: `_numbers` times their scales, if there are any."""
    if scales_ptr is None:
        return tile.to(tl.float32)
    else:
        return _numbers(tile, tl.float32) * _factors(scales_ptr, slot, inside)[:, None]


@triton.jit
def _e4m3(x):
    """Bits of e4m3 of fp32 numbers up to 448, half to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent counts from 7 rather than 127
    subnormal = ((tl.abs(x) * 512 + HALF_EVEN) - HALF_EVEN).to(tl.int32)
    return (tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


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
        return ((x + HALF_EVEN) - HALF_EVEN).to(tl.int8), scales
    else:
        return _e4m3(x), scales


@triton.jit
def _store_encoded(codes_ptr, scales_ptr, rows, place, mask, row_place, row_mask):
    """Encode rows [N, D] (0 beyond the head), store codes at place [N, D] and scales at row_place [N].

    Returns: the rows as they are read from now on, fp32.
    """
    codes, scales = _encoded(rows.to(tl.float32), codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + place, codes, mask=mask)
    tl.store(scales_ptr + row_place, scales, mask=row_mask)
    return _numbers(codes, tl.float32) * (scales * UNIT)[:, None]
