"""Where the slots of a KV head are, equal for all heads or a stretch of a slab each, and rows read or moved there.

A pair is a (sequence, KV head). Layout of slabs: `fastkv.reference.ragged`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stretch(starts_ptr, pair, slots, HEADS: tl.constexpr):
    """Where the slots of a pair begin and how many it owns: all `slots` of its own, or with starts_ptr [B, HEADS + 1]
    a stretch of the `slots` of its sequence."""
    if starts_ptr is None:
        return pair * slots, slots
    else:
        starts_ptr += (pair // HEADS) * (HEADS + 1) + pair % HEADS
        first = tl.load(starts_ptr)
        return (pair // HEADS) * slots + first, tl.load(starts_ptr + 1) - first


@triton.jit
def _some(vector, first, R: tl.constexpr, TILE: tl.constexpr):
    """Elements [first, first + TILE) of an int vector [R] in registers; 0 past its end."""
    match = (first + tl.arange(0, TILE))[:, None] == tl.arange(0, R)[None, :]
    return tl.sum(tl.where(match, vector[None, :], 0), 1)


@triton.jit
def _load_rows(base_ptr, slots, live, cols, D: tl.constexpr):
    mask = live[:, None] & (cols < D)[None, :]
    return tl.load(base_ptr + slots[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _holes(victims, drop, length, tokens, R: tl.constexpr):
    """Which victims [R] leave a hole in [0, tokens), and the slot of the survivor beyond that fills it."""
    index = tl.arange(0, R)
    live = index < drop
    tail = tokens + index
    same = (victims[:, None] == tail[None, :]) & live[:, None]
    stays = (tail < length) & (tl.sum(same.to(tl.int32), 0) == 0)
    hole = live & (victims < tokens)
    rank_hole, rank_tail = tl.cumsum(hole.to(tl.int32), 0), tl.cumsum(stays.to(tl.int32), 0)
    match = (rank_hole[:, None] == rank_tail[None, :]) & stays[None, :]
    return hole, tl.sum(tl.where(match, tail[None, :], 0), 1)


@triton.jit
def _add_spread(
    spread_ptr, keys_ptr, victims, drop, mean, step, weight, cols,
    D: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """spread += sum over the victims of (k - mean)^2 + weight step^2, averaged over the head."""
    squares = weight * step * step
    for first in range(0, drop, TILE):
        live = first + tl.arange(0, TILE) < drop
        away = _load_rows(keys_ptr, _some(victims, first, R, TILE), live, cols, D).to(tl.float32) - mean[None, :]
        squares += tl.sum(tl.where(live[:, None], away * away, 0.0), 0)
    _store_spread(spread_ptr, squares, D)


@triton.jit
def _store_spread(spread_ptr, squares, D: tl.constexpr):
    """Add the mean of squares [cols], zero beyond D, to the spread of a head."""
    tl.store(spread_ptr, tl.load(spread_ptr) + tl.sum(squares, 0) / D)


@triton.jit
def _move_rows(base_ptr, drop, hole, to_slot, from_slot, cols, D: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr):
    for first in range(0, drop, TILE):
        live = _some(hole.to(tl.int32), first, R, TILE) > 0
        rows = _load_rows(base_ptr, _some(from_slot, first, R, TILE), live, cols, D)
        place = base_ptr + _some(to_slot, first, R, TILE)[:, None] * D + cols[None, :]
        tl.store(place, rows, mask=live[:, None] & (cols < D)[None, :])
