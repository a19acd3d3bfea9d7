"""The rotary embedding and its inverse in registers: which numbers of a head turn together, and by how much."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..rotary import Rotary
from ._codes import INTERP

ROUND = tl.constexpr(1.5 * 2**23)  # whoever adds it to an fp32 number rounds it to an integer


class Turn(NamedTuple):
    """How rows are turned: positions [B, H, N] int32, frequencies [R/2] fp32, scaling. Absent: not at all."""

    positions_ptr: Any = None
    frequencies_ptr: Any = None
    scaling: Any = None

    @classmethod
    def of(cls, positions: Tensor, rotary: Rotary) -> Turn:
        """By a rotary embedding."""
        return cls(positions, rotary.frequencies, float(rotary.scaling))


class Pairing(NamedTuple):
    """Which numbers turn, of constants: R of them, from START on, next to each other or else in halves."""

    R: int = 0
    START: int = 0
    INTERLEAVED: bool = False

    @classmethod
    def of(cls, rotary: Rotary, dim: int) -> Pairing:
        """Of a head of that size."""
        return cls(rotary.size, rotary.start % dim, rotary.interleaved)


@triton.jit
def _cos_sin(angle):
    """Of fp32 angles below 2^22, to about 1e-7. The nearest multiple of pi/2 is taken off in three parts."""
    if INTERP:  # its fma rounds twice
        return tl.cos(angle), tl.sin(angle)
    else:
        turns = (angle * 0.6366197723675814 + ROUND) - ROUND
        rest = tl.fma(turns, -1.57079601287841796875, angle)
        rest = tl.fma(turns, -3.1391647326017846353e-07, rest)
        rest = tl.fma(turns, -5.390302529957764765e-15, rest)
        square = rest * rest
        sin = (-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1
        sin = sin * square * rest + rest
        cos = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
        cos = cos * square * square - 0.5 * square + 1.0
        quadrant = turns.to(tl.int32)
        swapped = (quadrant & 1) != 0
        found_cos = tl.where(swapped, sin, cos)
        found_sin = tl.where(swapped, cos, sin)
        found_cos = tl.where(((quadrant + 1) & 2) != 0, -found_cos, found_cos)
        return found_cos, tl.where((quadrant & 2) != 0, -found_sin, found_sin)


@triton.jit
def _members(pair, D: tl.constexpr, R: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two numbers of a head of D in each pair: first those that turn, then the others by twos."""
    if INTERLEAVED:
        first, second = START + 2 * pair, START + 2 * pair + 1
    else:
        first, second = START + pair, START + pair + R // 2
    if R < D:  # else the compiler sees that they lie side by side
        rest = 2 * pair - R
        first = tl.where(rest >= 0, rest + tl.where(rest < START, 0, R), first)
        second = tl.where(rest >= 0, rest + 1 + tl.where(rest + 1 < START, 0, R), second)
    return first, second


@triton.jit
def _turned_back(
    row_ptr, rows, real, position, turn, column, R: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rows [N, D] as they were before they were turned to `position` [N]; row_ptr [N, 1]: where they lie."""
    place = column - START
    turned = (place >= 0) & (place < R)
    if INTERLEAVED:
        first, pair = place % 2 == 0, place // 2
        other = tl.where(first, column + 1, column - 1)
    else:
        first = place < R // 2
        pair = tl.where(first, place, place - R // 2)
        other = tl.where(first, column + R // 2, column - R // 2)
    others = tl.load(row_ptr + other[None, :], mask=real[:, None] & turned[None, :], other=0.0).to(tl.float32)
    frequency = tl.load(turn.frequencies_ptr + pair, mask=turned, other=0.0)
    cos, sin = _cos_sin(position.to(tl.float32)[:, None] * frequency[None, :])
    back = rows * (cos / turn.scaling) + others * (tl.where(first[None, :], sin, -sin) / turn.scaling)
    return tl.where(turned[None, :], back, rows)
