"""Evicted tokens join the centroids of their head, in place: which pairs merge, and when, is `Centroids.add`.

Of the centroids in use, oldest first, every second one is a mover. A round offers each mover to its cheapest partner
among the others, joins the cheapest offers, equal ones by age, and swaps the halves, until M are left. Means of all
tokens do not change by merging, so each set of tokens that joins at once is centred once. A merge is Chan's:

    w = n_a / (n_a + n_b);   x_b += w (x_a - x_b);   spread_b += spread_a + n_b w mean((k_a - k_b)^2)

Rows of a working set stay where they are in scratch; `order` lists those in use by age, and every program that writes a
row of a partner only reads rows of movers. So nothing is atomic, and the same tokens always give the same bits.

Products of coordinates have to be as exact as in fp32, and tensor cores multiply bf16. So `_put` splits each
coordinate, away from the centre, into a sum of three: once, and again when something joins its row. A round only reads
them.

Launches: one where few tokens leave (an eviction while decoding), whose programs own a head. For a prompt, per BLOCK
tokens, one or more that list them and halve their groups, which programs own; one that gathers what is left, whose
programs own columns; one that splits it; two a round, whose programs own movers (offers) and partners (merges), down to
TOGETHER centroids; and one for all rounds from there, again one program a head. Bytes per token and head: 4 (Dk + Dv)
written in all halvings; in a round of u, 6 u^2 (Dk + Dv) / 128 read from L2.

Does not handle: means that are neither bf16 nor fp32, head_dim above 256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_shape
from ..reference import Centroids, LayerState, Spec
from ..reference.centroids import BLOCK, FINE, GROUP, MEDIUM, ROOMY, SETTLED, STEP, TURN, few_enough, left_of
from ._arguments import EvictedPointers, View
from ._attention import _barrier, _dot, _home, _page, _sum_products
from ._launch import (
    cdiv,
    check_centroids,
    check_head_dim,
    check_like,
    check_rows,
    chip_of,
    on_hip,
    pow2,
    stages,
)
from .slot_signals import in_order

TOGETHER = 144  # centroids of a head from which on one program does all rounds: launches would take longer
FEW = 64  # tokens that one program lists, and joins if there is room for their centroids
ALONE = 1024  # centroids and tokens that one program joins
MANY = 128  # movers that four warps compare, a fourth of rows beyond 64 columns
PROGRAMS = 128  # that halve groups at once, each with scratch of its own
# One compilation for all of them.
VARYING = ["N", "num", "most", "first", "level", "half", "stride_i", "stride_pb", "stride_ph", "page"]
END, MIDDLE, SMALL = tl.constexpr(FINE), tl.constexpr(MEDIUM), tl.constexpr(SETTLED)
FEWEST, ROOM = tl.constexpr(GROUP), tl.constexpr(ROOMY)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LAST = tl.constexpr(2**31 - 1)
PER_TOKEN, PER_COLUMN = tl.constexpr(STEP), tl.constexpr(TURN)


class Tile(NamedTuple):
    """Constants of a launch.

    Attributes: DK, DV: numbers of a key and a value; BK, BV: padded.  R: tokens listed at most.  LANES: movers, or
        centroids, at a time.  MOVERS, PARTNERS, DIMS: of offers at a time, dimensions of them.  RECEIVERS: partners
        merged at a time.  SLICE, ROWS: columns gathered by a program, and rows at a time.  SCAN: candidates looked at.
    """

    HEADS: int
    DK: int
    DV: int
    BK: int
    BV: int
    LANES: int
    R: int = 16
    MOVERS: int = 16
    PARTNERS: int = 64
    DIMS: int = 64
    RECEIVERS: int = 16
    SLICE: int = 32
    ROWS: int = 64
    SCAN: int = 1024

    @classmethod
    def of(cls, heads: int, dim: int, value_dim: int, lanes: int, most: int = 16) -> Tile:
        """For heads of these sizes."""
        return cls(heads, dim, value_dim, pow2(dim, 16), pow2(value_dim, 16), lanes, pow2(most, 16))


class Room(NamedTuple):
    """A head's scratch: keys [rows, DK], values [rows, DV], both as `_put` splits them, centre [DK + DV], then sizes,
    spreads, two lists of rows by age, offers and who they are for, squared lengths of keys and of values from the
    centre, each [rows], and notes [16].

    Rows are multiples of 16, indices are stored as floats. Notes: in use (two), tokens.
    """

    keys_ptr: Any
    values_ptr: Any
    split_keys_ptr: Any
    split_values_ptr: Any
    centre_ptr: Any
    sizes_ptr: Any
    spreads_ptr: Any
    orders_ptr: Any
    offers_ptr: Any
    partners_ptr: Any
    far_keys_ptr: Any
    far_values_ptr: Any
    notes_ptr: Any


@triton.jit
def _room(room_ptr, pair, rows, TILE: tl.constexpr):
    """Where the scratch of a pair is; see `room_size`."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    keys = room_ptr + pair * (rows // 2 * (5 * (DK + DV) + 16) + DK + DV + 16)
    values = keys + rows * DK
    split_keys = values + rows * DV
    split_values = split_keys + rows // 2 * 3 * DK
    centre = split_values + rows // 2 * 3 * DV
    sizes = centre + DK + DV
    return Room(
        keys, values, split_keys.to(tl.pointer_type(tl.bfloat16), bitcast=True),
        split_values.to(tl.pointer_type(tl.bfloat16), bitcast=True), centre, sizes, sizes + rows, sizes + 2 * rows,
        sizes + 4 * rows, sizes + 5 * rows, sizes + 6 * rows, sizes + 7 * rows, sizes + 8 * rows,
    )  # fmt: skip


@triton.jit
def _tile(base_ptr, row, inside, cols, D: tl.constexpr):
    """Rows of a matrix with D columns, in fp32; zero where not inside."""
    place = base_ptr + row.to(tl.int64)[:, None] * D + cols[None, :]
    return tl.load(place, mask=inside[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _keep(base_ptr, row, inside, cols, x, size, D: tl.constexpr):
    """Store means x [R, C] of size [R] tokens as rows of a matrix with D columns; bf16 as in `Centroids.rounded`."""
    if base_ptr.dtype.element_ty == tl.bfloat16:
        steps = size.to(tl.int32)[:, None] * PER_TOKEN + cols[None, :] * PER_COLUMN  # wraps around
        bits = x.to(tl.int32, bitcast=True) + ((steps >> 16) & 0xFFFF)
        x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(base_ptr + row[:, None] * D + cols[None, :], x, mask=inside[:, None] & (cols < D)[None, :])


@triton.jit
def _put(split_ptr, far_ptr, centre_ptr, row, inside, cols, x, D: tl.constexpr):
    """Store rows x [R, C], away from the centre, as sums of three bf16 numbers each, and their squared lengths.

    Products of these on tensor cores are as exact as in fp32. They are compared many times, and split once.
    """
    middle = tl.load(centre_ptr + cols, mask=cols < D, other=0.0)[None, :]
    mask = inside[:, None] & (cols < D)[None, :]
    away = tl.where(mask, x - middle, 0.0)
    high = away.to(tl.bfloat16)
    rest = away - high.to(tl.float32)
    medium = rest.to(tl.bfloat16)
    place = split_ptr + row[:, None] * (3 * D) + cols[None, :]
    tl.store(place, high, mask=mask)
    tl.store(place + D, medium, mask=mask)
    tl.store(place + 2 * D, (rest - medium.to(tl.float32)).to(tl.bfloat16), mask=mask)
    tl.store(far_ptr + row, _sum_products(away, away), mask=inside)


@triton.jit
def _split(split_ptr, row, inside, cols, D: tl.constexpr):
    """The three numbers of each coordinate that `_put` stores, the largest first; zero where not inside."""
    place = split_ptr + row[:, None] * (3 * D) + cols[None, :]
    mask = inside[:, None] & (cols < D)[None, :]
    high, medium = tl.load(place, mask=mask, other=0.0), tl.load(place + D, mask=mask, other=0.0)
    return high, medium, tl.load(place + 2 * D, mask=mask, other=0.0)


@triton.jit
def _products(split_ptr, own, owns, other, others, D: tl.constexpr, TILE: tl.constexpr):
    """Scalar products [MOVERS, PARTNERS] of own and other rows, away from the centre; the smallest terms first."""
    MOVERS: tl.constexpr = TILE.MOVERS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    DIMS: tl.constexpr = TILE.DIMS
    dots = tl.zeros([MOVERS, PARTNERS], tl.float32)
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        high, medium, low = _split(split_ptr, own, owns, cols, D)
        their_high, their_medium, their_low = _split(split_ptr, other, others, cols, D)
        dots += _dot(low, tl.trans(their_high))
        dots += _dot(medium, tl.trans(their_medium))
        dots += _dot(high, tl.trans(their_low))
        dots += _dot(medium, tl.trans(their_high))
        dots += _dot(high, tl.trans(their_medium))
        dots += _dot(high, tl.trans(their_high))
    return dots


@triton.jit
def _offer(room, order_ptr, first, used, half, scale_k, scale_v, TILE: tl.constexpr):
    """Write the cheapest merge of movers [first, first + MOVERS) and the partner it is with, the oldest of equals."""
    MOVERS: tl.constexpr = TILE.MOVERS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    mover = first + tl.arange(0, MOVERS)
    movers, partners = (used + 1 - half) // 2, (used + half) // 2
    owns = mover < movers
    own = tl.load(order_ptr + half + 2 * mover, mask=owns, other=0.0).to(tl.int32)
    share = 1 / tl.load(room.sizes_ptr + own, mask=owns, other=1.0)
    ours = scale_k * tl.load(room.far_keys_ptr + own, mask=owns, other=0.0)
    ours += scale_v * tl.load(room.far_values_ptr + own, mask=owns, other=0.0)
    least = tl.full([MOVERS], float("inf"), tl.float32)
    best = tl.zeros([MOVERS], tl.int32)
    for start in range(0, partners, PARTNERS):
        partner = start + tl.arange(0, PARTNERS)
        others = partner < partners
        other = tl.load(order_ptr + 1 - half + 2 * partner, mask=others, other=0.0).to(tl.int32)
        theirs = scale_k * tl.load(room.far_keys_ptr + other, mask=others, other=0.0)
        theirs += scale_v * tl.load(room.far_values_ptr + other, mask=others, other=0.0)
        dots = scale_k * _products(room.split_keys_ptr, own, owns, other, others, TILE.DK, TILE)
        dots += scale_v * _products(room.split_values_ptr, own, owns, other, others, TILE.DV, TILE)
        distance = tl.maximum(-2 * dots + ours[:, None] + theirs[None, :], 0.0)
        cost = distance / (share[:, None] + 1 / tl.load(room.sizes_ptr + other, mask=others, other=1.0)[None, :])
        cost = tl.where(others[None, :], cost, float("inf"))
        low = tl.min(cost, 1)
        oldest = tl.min(tl.where(cost == low[:, None], partner[None, :], LAST), 1)
        best = tl.where(low < least, oldest, best)
        least = tl.minimum(low, least)
    tl.store(room.offers_ptr + mover, least, mask=owns)
    tl.store(room.partners_ptr + mover, best.to(tl.float32), mask=owns)


@triton.jit
def _accepted(offers_ptr, movers, joins, LANES: tl.constexpr):
    """Which movers [LANES] make the `joins` cheapest offers, the oldest of equals: costs sort like their bits.

    Of a head that is done, where nothing joins, nobody has written offers.
    """
    mover = tl.arange(0, LANES)
    cost = tl.load(offers_ptr + mover, mask=mover < movers, other=float("inf")).to(tl.int32, bitcast=True)
    cost = tl.where(mover < movers, cost, LAST)
    last = tl.zeros([], tl.int32)  # in the end the cost of the last one accepted
    for level in range(0, 31):
        more = last + (tl.full([], 1, tl.int32) << (30 - level))
        last = tl.where(tl.sum((cost < more).to(tl.int32), 0) < joins, more, last)
    cheaper, equal = (cost < last).to(tl.int32), (cost == last).to(tl.int32)
    left = joins - tl.sum(cheaper, 0)
    return (joins > 0) & ((cheaper != 0) | ((equal != 0) & (tl.cumsum(equal, 0) <= left)))


@triton.jit
def _next(wanted, after, LANES: tl.constexpr):
    """The first mover after each of `after` that is wanted, [RECEIVERS, LANES]; LANES if there is none."""
    lane = tl.arange(0, LANES)[None, :]
    return tl.min(tl.where(wanted & (lane > after[:, None]), lane, LANES), 1)


@triton.jit
def _receive(room, order_ptr, target, first, used, half, TILE: tl.constexpr):
    """Merge into partners [first, first + RECEIVERS) the movers whose target [LANES] they are, oldest first."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    RECEIVERS: tl.constexpr = TILE.RECEIVERS
    LANES: tl.constexpr = TILE.LANES
    partner = first + tl.arange(0, RECEIVERS)
    mine = partner < (used + half) // 2
    row = tl.load(order_ptr + 1 - half + 2 * partner, mask=mine, other=0.0).to(tl.int32)
    dk, dv = tl.arange(0, TILE.BK), tl.arange(0, TILE.BV)
    size = tl.load(room.sizes_ptr + row, mask=mine, other=0.0)
    spread = tl.load(room.spreads_ptr + row, mask=mine, other=0.0)
    k, v = _tile(room.keys_ptr, row, mine, dk, DK), _tile(room.values_ptr, row, mine, dv, DV)
    wanted = mine[:, None] & (partner[:, None] == target[None, :])
    mover = _next(wanted, tl.full([RECEIVERS], -1, tl.int32), LANES)
    changed = mover < LANES
    while tl.min(mover, 0) < LANES:
        comes = mover < LANES
        gone = tl.load(order_ptr + half + 2 * mover, mask=comes, other=0.0).to(tl.int32)
        more = tl.load(room.sizes_ptr + gone, mask=comes, other=0.0)
        share = more / tl.maximum(size + more, 1.0)
        step = tl.where(comes[:, None], _tile(room.keys_ptr, gone, comes, dk, DK) - k, 0.0)
        spread += tl.load(room.spreads_ptr + gone, mask=comes, other=0.0) + size * share * (
            _sum_products(step, step) / DK
        )
        k += share[:, None] * step
        v += share[:, None] * tl.where(comes[:, None], _tile(room.values_ptr, gone, comes, dv, DV) - v, 0.0)
        size += more
        mover = _next(wanted, mover, LANES)
    tl.store(room.sizes_ptr + row, size, mask=changed)
    tl.store(room.spreads_ptr + row, spread, mask=changed)
    far = row.to(tl.int64)[:, None]
    tl.store(room.keys_ptr + far * DK + dk[None, :], k, mask=changed[:, None] & (dk < DK)[None, :])
    tl.store(room.values_ptr + far * DV + dv[None, :], v, mask=changed[:, None] & (dv < DV)[None, :])
    _put(room.split_keys_ptr, room.far_keys_ptr, room.centre_ptr, row, changed, dk, k, DK)
    _put(room.split_values_ptr, room.far_values_ptr, room.centre_ptr + DK, row, changed, dv, v, DV)


@triton.jit
def _age(order_ptr, next_ptr, accepted, used, half, LANES: tl.constexpr):
    """Write the list of rows that stay: without the accepted movers [LANES]."""
    lane = tl.arange(0, LANES)
    gone = accepted.to(tl.int32)
    until = tl.cumsum(gone, 0)
    place = half + 2 * lane
    row = tl.load(order_ptr + place, mask=place < used, other=0.0)
    tl.store(next_ptr + place - (until - gone), row, mask=(place < used) & (gone == 0))
    place = 1 - half + 2 * lane
    row = tl.load(order_ptr + place, mask=place < used, other=0.0)
    tl.store(next_ptr + place - (until - half * gone), row, mask=place < used)


@triton.jit
def _joins(used, num):
    """How many merge in a round."""
    share = tl.where(used <= SMALL, END, MIDDLE)
    return tl.maximum(tl.minimum(used - num, tl.maximum(used // share, 1)), 0)


@triton.jit
def _scales(room, order_ptr, used, tokens, SCAN: tl.constexpr):
    """What squared distances of keys and of values are multiplied with: one over their variance."""
    keys = tl.zeros([SCAN], tl.float32)
    values = tl.zeros([SCAN], tl.float32)
    for first in range(0, used, SCAN):
        place = first + tl.arange(0, SCAN)
        row = tl.load(order_ptr + place, mask=place < used, other=0.0).to(tl.int32)
        size = tl.load(room.sizes_ptr + row, mask=place < used, other=0.0)
        keys += size * tl.load(room.far_keys_ptr + row, mask=place < used, other=0.0)
        values += size * tl.load(room.far_values_ptr + row, mask=place < used, other=0.0)
    number = tl.maximum(tokens, 1.0)
    return 1 / tl.maximum(tl.sum(keys, 0) / number, TINY), 1 / tl.maximum(tl.sum(values, 0) / number, TINY)


@triton.jit
def _settle(room, parts, own, rows, num, used, tokens, half, TILE: tl.constexpr, HIP: tl.constexpr):
    """All rounds of a head that are left, and its centroids written to where they are kept, as those of pair `own`."""
    while used > num:
        order, joins = room.orders_ptr + half * rows, _joins(used, num)
        scale_k, scale_v = _scales(room, order, used, tokens, TILE.LANES)
        movers = (used + 1 - half) // 2
        for first in range(0, movers, TILE.MOVERS):
            _offer(room, order, first, used, half, scale_k, scale_v, TILE)
        _barrier(HIP)  # offers are compared by other threads than wrote them
        lane = tl.arange(0, TILE.LANES)
        accepted = _accepted(room.offers_ptr, movers, joins, TILE.LANES)
        target = tl.load(room.partners_ptr + lane, mask=accepted, other=-1.0).to(tl.int32)
        for first in range(0, (used + half) // 2, TILE.RECEIVERS):
            _receive(room, order, target, first, used, half, TILE)
        _age(order, room.orders_ptr + (1 - half) * rows, accepted, used, half, TILE.LANES)
        _barrier(HIP)  # rows and their list are read by other threads than wrote them
        used, half = used - joins, 1 - half
    for first in range(0, num, TILE.RECEIVERS):
        _store(room, room.orders_ptr + half * rows, parts, own * num, first, num, used, TILE)


@triton.jit
def _store(room, order_ptr, parts, base, first, num, used, TILE: tl.constexpr):
    """Write centroids [first, first + RECEIVERS) of num, those in use first, to where they are kept, from `base` on."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    dk, dv = tl.arange(0, TILE.BK), tl.arange(0, TILE.BV)
    place = first + tl.arange(0, TILE.RECEIVERS)
    there, kept = place < used, base + place
    row = tl.load(order_ptr + place, mask=there, other=0.0).to(tl.int32)
    size = tl.load(room.sizes_ptr + row, mask=there, other=0.0)
    tl.store(parts.sizes_ptr + kept, size, mask=place < num)
    tl.store(parts.spread_ptr + kept, tl.load(room.spreads_ptr + row, mask=there, other=0.0), mask=place < num)
    _keep(parts.key_mean_ptr, kept, place < num, dk, _tile(room.keys_ptr, row, there, dk, DK), size, DK)
    _keep(parts.value_mean_ptr, kept, place < num, dv, _tile(room.values_ptr, row, there, dv, DV), size, DV)


@triton.jit
def _place(room, first, end, TILE: tl.constexpr):
    """Split rows [first, first + RECEIVERS) of the working set, of `end`, whose centre is known by now."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    dk, dv = tl.arange(0, TILE.BK), tl.arange(0, TILE.BV)
    row = first + tl.arange(0, TILE.RECEIVERS)
    k, v = _tile(room.keys_ptr, row, row < end, dk, DK), _tile(room.values_ptr, row, row < end, dv, DV)
    _put(room.split_keys_ptr, room.far_keys_ptr, room.centre_ptr, row, row < end, dk, k, DK)
    _put(room.split_values_ptr, room.far_values_ptr, room.centre_ptr + DK, row, row < end, dv, v, DV)


@triton.jit
def _list_used(parts, room, own, num, LANES: tl.constexpr):
    """Copy sizes and spreads of a head's centroids and list those in use. Returns: how many, and their tokens."""
    used, tokens = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
    for first in range(0, num, LANES):
        part = first + tl.arange(0, LANES)
        size = tl.load(parts.sizes_ptr + own * num + part, mask=part < num, other=0.0)
        some = (size > 0).to(tl.int32)
        tl.store(room.sizes_ptr + part, size, mask=part < num)
        spread = tl.load(parts.spread_ptr + own * num + part, mask=part < num, other=0.0)
        tl.store(room.spreads_ptr + part, spread, mask=part < num)
        tl.store(room.orders_ptr + used + tl.cumsum(some, 0) - 1, part.to(tl.float32), mask=some != 0)
        used += tl.sum(some, 0)
        tokens += tl.sum(size, 0)
    return used, tokens


class Leaving(NamedTuple):
    """Candidates [B, Hkv, N]: positions, and bytes that say which are there and which of them stay."""

    positions_ptr: Any
    valid_ptr: Any
    kept_ptr: Any


@triton.jit
def _list_leaving(candidates, listed, row, N, R: tl.constexpr, SCAN: tl.constexpr):
    """List the candidates of a head that leave, R at most. Returns: how many."""
    gone = tl.zeros([], tl.int32)
    for start in range(0, N, SCAN):
        index = start + tl.arange(0, SCAN)
        leaves = tl.load(candidates.valid_ptr + row + index, mask=index < N, other=0) != 0
        leaves = leaves & (tl.load(candidates.kept_ptr + row + index, mask=index < N, other=1) == 0)
        place = gone + tl.cumsum(leaves.to(tl.int32), 0) - 1
        tl.store(listed + place, index.to(tl.float32), mask=leaves & (place < R))
        gone += tl.sum(leaves.to(tl.int32), 0)
    return tl.minimum(gone, R)


@triton.jit
def _fill(
    base_ptr, centre_ptr, parts_ptr, new_ptr, index, to, live, own, num, tokens, stride_t,
    sizes, D: tl.constexpr, R: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Rows of the working set: the centroids, then R candidates `index`, of row `to` each; and their centre."""
    for first in range(0, D, SLICE):
        cols = first + tl.arange(0, SLICE)
        x = tl.load(
            new_ptr + index.to(tl.int64)[:, None] * stride_t + cols[None, :],
            mask=live[:, None] & (cols < D)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        mask = live[:, None] & (cols < D)[None, :]
        tl.store(base_ptr + (num + to)[:, None] * D + cols[None, :], x, mask=mask)
        total = tl.sum(x, 0)
        for start in range(0, num, R):
            part = start + tl.arange(0, R)
            x = _tile(parts_ptr + own * num * D, part, part < num, cols, D)
            tl.store(base_ptr + part[:, None] * D + cols[None, :], x, mask=(part < num)[:, None] & (cols < D)[None, :])
            total += tl.sum(x * tl.load(sizes + part, mask=part < num, other=0.0)[:, None], 0)
        tl.store(centre_ptr + cols, total / tl.maximum(tokens, 1.0), mask=cols < D)


@triton.jit(do_not_specialize=VARYING)
def _few_kernel(
    new_keys: View, new_values: View, candidates: Leaving, stride_pb, stride_ph, parts: EvictedPointers, room_ptr,
    rows_ptr, page, N, num, rows, TILE: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    R: tl.constexpr = TILE.R
    pair = tl.program_id(0).to(tl.int64)
    batch, kv = pair // TILE.HEADS, pair % TILE.HEADS
    row, own = _home(rows_ptr, page, pair, TILE.HEADS)
    if rows_ptr is not None:
        if row == 0:
            return
    parts = EvictedPointers(*[p if p is None else _page(p, row, page) for p in parts])
    room = _room(room_ptr, pair, rows, TILE)
    listed = room.offers_ptr
    gone = _list_leaving(candidates, listed, pair * N, N, R, TILE.SCAN)
    used, tokens = _list_used(parts, room, own, num, TILE.LANES)
    _barrier(HIP)  # lists and sizes are read by other threads than wrote them
    r = tl.arange(0, R)
    live = r < gone
    index = tl.load(listed + r, mask=live, other=0.0).to(tl.int32)
    position = tl.load(candidates.positions_ptr + batch * stride_pb + kv * stride_ph + index, mask=live, other=LAST)
    older = (position[None, :] < position[:, None]) | (
        (position[None, :] == position[:, None]) & (r[None, :] < r[:, None])
    )
    to = tl.sum((older & live[None, :]).to(tl.int32), 1)
    tl.store(room.sizes_ptr + num + to, tl.full([R], 1.0, tl.float32), mask=live)
    tl.store(room.spreads_ptr + num + to, tl.zeros([R], tl.float32), mask=live)
    tl.store(room.orders_ptr + used + to, (num + to).to(tl.float32), mask=live)
    tokens += gone.to(tl.float32)
    keys = new_keys.ptr + batch * new_keys.stride_b + kv * new_keys.stride_h
    values = new_values.ptr + batch * new_values.stride_b + kv * new_values.stride_h
    _fill(
        room.keys_ptr, room.centre_ptr, parts.key_mean_ptr, keys, index, to, live, own, num, tokens, new_keys.stride_t,
        room.sizes_ptr, DK, R, TILE.SLICE,
    )  # fmt: skip
    _fill(
        room.values_ptr, room.centre_ptr + DK, parts.value_mean_ptr, values, index, to, live, own, num, tokens,
        new_values.stride_t, room.sizes_ptr, DV, R, TILE.SLICE,
    )  # fmt: skip
    _barrier(HIP)  # rows and their centre are read by other threads than wrote them
    for first in range(0, num + gone, TILE.RECEIVERS):
        _place(room, first, num + gone, TILE)
    _barrier(HIP)  # and what they are split into
    _settle(room, parts, own, rows, num, used + gone, tokens, tl.zeros([], tl.int32), TILE, HIP)


class Listed(NamedTuple):
    """What joins, of each pair a row: indices of tokens, or sizes and spreads of parts."""

    index_ptr: Any = None
    sizes_ptr: Any = None
    spreads_ptr: Any = None

    @classmethod
    def of(cls, parts: Centroids) -> Listed:
        """Parts."""
        return cls(None, parts.count, parts.spread)


@triton.jit
def _coming(gone_ptr, pair, first, most, level, num):
    """How many of a pair's tokens [first, first + most) join or, after `level` halvings, how many parts of them."""
    coming = tl.minimum(tl.maximum(tl.load(gone_ptr + pair).to(tl.int32) - first, 0), most)
    few = tl.maximum(num * ROOM, FEWEST)
    for _ in range(level):
        coming = tl.where(coming > few, (coming + 1) // 2, coming)
    return coming


@triton.jit
def _sizes(listed, row, inside):
    """Tokens of rows of the list."""
    if listed.sizes_ptr is None:
        size = inside.to(tl.float32)
    else:
        size = tl.load(listed.sizes_ptr + row, mask=inside, other=0.0)
    return size


@triton.jit
def _take(room, listed, first, coming, num, LANES: tl.constexpr):
    """Sizes and spreads of what comes, from row `first` of the list, into rows of the working set from `num` on.

    Returns: how many tokens.
    """
    tokens = tl.zeros([], tl.float32)
    for start in range(0, coming, LANES):
        lane = start + tl.arange(0, LANES)
        size = _sizes(listed, first + lane, lane < coming)
        spread = tl.zeros([LANES], tl.float32)
        if listed.spreads_ptr is not None:
            spread = tl.load(listed.spreads_ptr + first + lane, mask=lane < coming, other=0.0)
        tl.store(room.sizes_ptr + num + lane, size, mask=lane < coming)
        tl.store(room.spreads_ptr + num + lane, spread, mask=lane < coming)
        tokens += tl.sum(size, 0)
    return tokens


@triton.jit
def _gather(
    base_ptr, centre_ptr, parts_ptr, new_ptr, listed, sizes, own, first, num, coming, tokens, stride_t, cols,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns of the working set: of the centroids, then of what comes, from row `first` on; and their centre."""
    total = tl.zeros(cols.shape, tl.float32)
    width = (cols < D)[None, :]
    for start in range(0, num + coming, ROWS):
        row = start + tl.arange(0, ROWS)
        new = (row >= num) & (row < num + coming)
        x = _tile(parts_ptr + own * num * D, row, row < num, cols, D)
        index = (first + row - num).to(tl.int64)
        if listed.index_ptr is not None:
            index = tl.load(listed.index_ptr + index, mask=new, other=0)
        fresh = tl.load(new_ptr + index[:, None] * stride_t + cols[None, :], mask=new[:, None] & width, other=0.0)
        x = tl.where(new[:, None], fresh.to(tl.float32), x)
        tl.store(base_ptr + row[:, None] * D + cols[None, :], x, mask=(row < num + coming)[:, None] & width)
        size = tl.load(sizes + row, mask=row < num, other=0.0) + _sizes(listed, first + row - num, new)
        total += tl.sum(x * size[:, None], 0)
    tl.store(centre_ptr + cols, total / tl.maximum(tokens, 1.0), mask=cols < D)


@triton.jit(do_not_specialize=VARYING)
def _halve_kernel(
    new_keys: View, new_values: View, listed: Listed, gone_ptr, out: EvictedPointers, room_ptr, first, most, level, num,
    rows, stride_i, TILE: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """Every second row of a group joins its cheapest partner there; heads that have few rows left keep them."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    SLICE: tl.constexpr = TILE.SLICE
    LANES: tl.constexpr = TILE.LANES
    SIZE: tl.constexpr = 2 * LANES  # of a group
    pair, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, kv = pair // TILE.HEADS, pair % TILE.HEADS
    room = _room(room_ptr, pair * programs + program, SIZE, TILE)
    coming = _coming(gone_ptr, pair, first, most, level, num)
    many = coming > tl.maximum(num * ROOM, FEWEST)
    begin = pair * stride_i
    if listed.index_ptr is not None:
        begin += first
    listed = Listed(*[p if p is None else p + begin for p in listed])  # no function of triton 3.6 returns None
    keys = new_keys.ptr + batch * new_keys.stride_b + kv * new_keys.stride_h
    values = new_values.ptr + batch * new_values.stride_b + kv * new_values.stride_h
    lane = tl.arange(0, SIZE)
    tl.store(room.orders_ptr + lane, lane.to(tl.float32))  # all rows of a group, then those that stay
    tl.store(room.orders_ptr + SIZE + lane, 2 * lane.to(tl.float32))
    for start in range(program * SIZE, coming, programs * SIZE):
        here = tl.minimum(coming - start, SIZE)
        joins = tl.where(many, here // 2, 0)
        tokens = _take(room, listed, start, here, 0, SIZE)
        for column in range(0, DK, SLICE):
            _gather(
                room.keys_ptr, room.centre_ptr, out.key_mean_ptr, keys, listed, room.sizes_ptr, pair, start, 0, here,
                tokens, new_keys.stride_t, column + tl.arange(0, SLICE), DK, TILE.ROWS,
            )  # fmt: skip
        for column in range(0, DV, SLICE):
            _gather(
                room.values_ptr, room.centre_ptr + DK, out.value_mean_ptr, values, listed, room.sizes_ptr, pair, start,
                0, here, tokens, new_values.stride_t, column + tl.arange(0, SLICE), DV, TILE.ROWS,
            )  # fmt: skip
        _barrier(HIP)  # rows, their sizes and their centre are read by other threads than wrote them
        if joins > 0:
            for row in range(0, here, TILE.RECEIVERS):
                _place(room, row, here, TILE)
            _barrier(HIP)  # and what they are split into
            scale_k, scale_v = _scales(room, room.orders_ptr, here, tokens, LANES)
            for mover in range(0, joins, TILE.MOVERS):
                _offer(room, room.orders_ptr, mover, here, 1, scale_k, scale_v, TILE)
            _barrier(HIP)  # and offers
            mover = tl.arange(0, LANES)
            target = tl.load(room.partners_ptr + mover, mask=mover < joins, other=-1.0).to(tl.int32)
            for partner in range(0, here - joins, TILE.RECEIVERS):
                _receive(room, room.orders_ptr, target, partner, here, 1, TILE)
            _barrier(HIP)  # and what they are joined to
        stay = room.orders_ptr + tl.where(joins > 0, SIZE, 0)
        base = pair * rows + tl.where(many, start // 2, start)
        for row in range(0, here - joins, TILE.RECEIVERS):
            _store(room, stay, out, base, row, here - joins, here - joins, TILE)
        _barrier(HIP)  # the next group is written there


@triton.jit(do_not_specialize=VARYING)
def _gather_kernel(
    come: EvictedPointers, gone_ptr, parts: EvictedPointers, room_ptr, rows_ptr, page, first, most, level, num, rows,
    stride_i, TILE: tl.constexpr,
):  # fmt: skip
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    LANES: tl.constexpr = TILE.LANES
    SLICE: tl.constexpr = TILE.SLICE
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, TILE.HEADS)
    parts = EvictedPointers(*[p if p is None else _page(p, row, page) for p in parts])
    room = _room(room_ptr, pair, rows, TILE)
    coming = _coming(gone_ptr, pair, first, most, level, num)
    listed = Listed(None, come.sizes_ptr + pair * stride_i, come.spread_ptr + pair * stride_i)
    cols = tl.arange(0, SLICE)
    KEY_SLICES: tl.constexpr = (DK + SLICE - 1) // SLICE
    tokens = tl.zeros([], tl.float32)
    known = parts.sizes_ptr + own * num
    for start in range(0, num, LANES):
        lane = start + tl.arange(0, LANES)
        tokens += tl.sum(tl.load(known + lane, mask=lane < num, other=0.0), 0)
    for start in range(0, coming, LANES):
        lane = start + tl.arange(0, LANES)
        tokens += tl.sum(_sizes(listed, lane, lane < coming), 0)
    if part == 0:
        used, _ = _list_used(parts, room, own, num, LANES)
        _take(room, listed, 0, coming, num, LANES)
        for start in range(0, coming, LANES):
            lane = start + tl.arange(0, LANES)
            tl.store(room.orders_ptr + used + lane, (num + lane).to(tl.float32), mask=lane < coming)
        tl.store(room.notes_ptr, (used + coming).to(tl.float32))
        tl.store(room.notes_ptr + 2, tokens)
    if part < KEY_SLICES:
        _gather(
            room.keys_ptr, room.centre_ptr, parts.key_mean_ptr, come.key_mean_ptr + pair * stride_i * DK, listed, known,
            own, 0, num, coming, tokens, DK, part * SLICE + cols, DK, TILE.ROWS,
        )  # fmt: skip
    else:
        _gather(
            room.values_ptr, room.centre_ptr + DK, parts.value_mean_ptr, come.value_mean_ptr + pair * stride_i * DV,
            listed, known, own, 0, num, coming, tokens, DV, (part - KEY_SLICES) * SLICE + cols, DV, TILE.ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _place_kernel(gone_ptr, room_ptr, first, most, level, num, rows, TILE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    coming = _coming(gone_ptr, pair, first, most, level, num)
    _place(_room(room_ptr, pair, rows, TILE), tl.program_id(1) * TILE.RECEIVERS, num + coming, TILE)


@triton.jit(do_not_specialize=VARYING)
def _offer_kernel(room_ptr, num, rows, half, TILE: tl.constexpr):
    room = _room(room_ptr, tl.program_id(0).to(tl.int64), rows, TILE)
    used = tl.load(room.notes_ptr + half).to(tl.int32)
    first = tl.program_id(1) * TILE.MOVERS
    if used > num and first < (used + 1 - half) // 2:
        order = room.orders_ptr + half * rows
        scale_k, scale_v = _scales(room, order, used, tl.load(room.notes_ptr + 2), TILE.SCAN)
        _offer(room, order, first, used, half, scale_k, scale_v, TILE)


@triton.jit(do_not_specialize=VARYING)
def _receive_kernel(room_ptr, num, rows, half, TILE: tl.constexpr):
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    room = _room(room_ptr, pair, rows, TILE)
    order = room.orders_ptr + half * rows
    used = tl.load(room.notes_ptr + half).to(tl.int32)
    joins, movers = _joins(used, num), (used + 1 - half) // 2
    lane = tl.arange(0, TILE.LANES)
    accepted = _accepted(room.offers_ptr, movers, joins, TILE.LANES)
    target = tl.load(room.partners_ptr + lane, mask=accepted, other=-1.0).to(tl.int32)
    _receive(room, order, target, part * TILE.RECEIVERS, used, half, TILE)
    if part == 0:
        _age(order, room.orders_ptr + (1 - half) * rows, accepted, used, half, TILE.LANES)
        tl.store(room.notes_ptr + 1 - half, (used - joins).to(tl.float32))


@triton.jit(do_not_specialize=VARYING)
def _settle_kernel(
    parts: EvictedPointers, room_ptr, rows_ptr, page, num, rows, half, TILE: tl.constexpr, HIP: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    row, own = _home(rows_ptr, page, pair, TILE.HEADS)
    if rows_ptr is not None:
        if row == 0:
            return
    parts = EvictedPointers(*[p if p is None else _page(p, row, page) for p in parts])
    room = _room(room_ptr, pair, rows, TILE)
    used, tokens = tl.load(room.notes_ptr + half).to(tl.int32), tl.load(room.notes_ptr + 2)
    _settle(room, parts, own, rows, num, used, tokens, half, TILE, HIP)


def _parts(like: Centroids, shape: torch.Size, num: int) -> Centroids:
    """Scratch for parts on the way, `num` for each of [B, Hkv]; rounded at the end only."""
    place, device = (*shape, num), like.keys.device
    count, spread = (torch.empty(place, dtype=torch.float32, device=device) for _ in range(2))
    keys, values = (
        torch.empty(*place, rows.shape[-1], dtype=torch.float32, device=device) for rows in (like.keys, like.values)
    )
    return Centroids(count, keys, values, spread)


def _pointers(parts: Centroids) -> EvictedPointers:
    """Of parts, for a kernel."""
    return EvictedPointers(None, parts.keys, parts.values, None, parts.spread, parts.count)


def room_size(rows: int, dim: int, value_dim: int) -> int:
    """Numbers of scratch for a head whose working set has so many rows, see `_room`."""
    return rows // 2 * (5 * (dim + value_dim) + 16) + dim + value_dim + 16


def working_rows(num: int, most: int) -> int:
    """Rows of a working set of `num` centroids and at most `most` tokens."""
    return cdiv(num + most, 16) * 16


def _warps(dim: int, lanes: int, hip: bool) -> int:
    """Warps of a program with rows of `dim` columns and so many movers; AMD's have twice the threads."""
    many = MANY if dim <= 64 else MANY // 4
    return 8 if (dim > 128 or lanes > many) and not hip else 4


def remember(
    keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor, kept: Tensor, most: int, state: LayerState,
    spec: Spec,
) -> None:  # fmt: skip
    """Candidates that leave join the centroids of `state.parts`, in place; shapes as in `reference.remember`.

    One launch for at most FEW, which lists them itself; no host sync.
    Raises: FastKVError for shapes, strides or dtypes that do not fit.
    """
    op, parts = "remember", state.parts
    assert isinstance(parts, Centroids) and keys.stride(-1) == values.stride(-1) == positions.stride(-1) == 1
    batch, heads, num, dim = keys.shape
    value_dim = values.shape[-1]
    check_head_dim(op, max(dim, value_dim))
    check_shape(op, "values", values, (batch, heads, num, None))
    check_shape(op, "positions", positions, (batch, heads, num))
    check_like(op, (batch, heads, num), valid=valid, kept=kept)
    stored = batch if state.rows is None else len(parts.count)
    check_centroids(op, parts, (stored, heads, parts.num), dim, value_dim)
    known = _pointers(parts)
    page = check_rows(op, state, known)
    if not batch * heads * min(num, most):
        return
    new, where = (View.of(keys), View.of(values)), (state.rows, page)
    if most > FEW or parts.num + most > ALONE:
        index, gone = in_order(positions.contiguous(), valid, kept)
        _join_blocks(new, index, gone, parts, known, where, min(most, num))
        return
    rows = working_rows(parts.num, most)
    tile = Tile.of(heads, dim, value_dim, pow2(cdiv(parts.num + most, 2), 32), most)
    room = torch.empty(batch * heads * room_size(rows, dim, value_dim), dtype=torch.float32, device=keys.device)
    _few_kernel[(batch * heads,)](
        *new, Leaving(positions, valid.view(torch.uint8), kept.view(torch.uint8)), *positions.stride()[:2], known, room,
        *where, num, parts.num, rows, TILE=tile, HIP=on_hip(), num_stages=stages(2),
        num_warps=_warps(max(dim, value_dim), tile.LANES, on_hip()),
    )  # fmt: skip


def _join_blocks(
    new: tuple[View, View], index: Tensor, gone: Tensor, parts: Centroids, known: EvictedPointers,
    where: tuple[Tensor | None, int | None], most: int,
) -> None:  # fmt: skip
    """Tokens of a prompt, BLOCK of them at a time.

    Args: new: keys and values; index [B, Hkv, N]: of them by age; gone [B, Hkv]: how many leave; where: rows and page.
    """
    _, heads, num, dim = parts.keys.shape
    value_dim, pairs = parts.values.shape[-1], gone.numel()
    settling = Tile.of(heads, dim, value_dim, pow2(cdiv(TOGETHER, 2)))
    tile = settling._replace(RECEIVERS=8) if min(dim, value_dim) >= 128 else settling
    movers = 64 if chip_of(gone.device) == "90" else 32  # on sm_90 tiles that four warps multiply at once
    asking = tile._replace(MOVERS=movers, PARTNERS=64)
    few, block = few_enough(num), min(most, BLOCK)
    rows, halving = working_rows(num, min(block, few)), tile._replace(LANES=GROUP // 2)
    programs = min(cdiv(block, GROUP), cdiv(PROGRAMS, pairs))
    size = max(room_size(rows, dim, value_dim), programs * room_size(GROUP, dim, value_dim))
    room = torch.empty(pairs * size, dtype=torch.float32, device=gone.device)
    # Those of a head with few tokens are copied as they are.
    halves = [_parts(parts, gone.shape, working_rows(0, max(min(few, block), cdiv(block, 2))))]
    if cdiv(block, 2) > few:
        halves.append(_parts(parts, gone.shape, working_rows(0, max(few, cdiv(block, 4)))))
    launch = {"num_warps": _warps(max(dim, value_dim), 0, on_hip()), "num_stages": stages(2)}
    slices = cdiv(dim, tile.SLICE) + cdiv(value_dim, tile.SLICE)
    for first in range(0, most, BLOCK):
        now = total = min(BLOCK, most - first)
        level, half, coming, stride = 0, 0, (*new, Listed(index)), index.stride(1)
        while not level or total > few:
            left = halves[level % 2]
            _halve_kernel[pairs, programs](
                *coming, gone, _pointers(left), room, first, now, level, num, left.num, stride, TILE=halving,
                HIP=on_hip(), num_warps=_warps(max(dim, value_dim), GROUP, on_hip()), num_stages=stages(2),
            )  # fmt: skip
            total = min(total, max(few, cdiv(total, 2)))
            level, stride, coming = level + 1, left.num, (View.of(left.keys), View.of(left.values), Listed.of(left))
        total += num
        _gather_kernel[pairs, slices](
            _pointers(left), gone, known, room, *where, first, now, level, num, rows, stride,
            TILE=tile._replace(LANES=tile.SCAN), **launch,
        )  # fmt: skip
        _place_kernel[pairs, cdiv(total, tile.RECEIVERS)](gone, room, first, now, level, num, rows, TILE=tile, **launch)
        while total > max(num, TOGETHER):
            movers, partners = (total + 1 - half) // 2, (total + half) // 2
            lanes = pow2(cdiv(SETTLED if total <= SETTLED else num + few, 2))  # two compilations
            _offer_kernel[pairs, cdiv(movers, asking.MOVERS)](room, num, rows, half, TILE=asking, **launch)
            _receive_kernel[pairs, cdiv(partners, tile.RECEIVERS)](
                room, num, rows, half, TILE=tile._replace(LANES=lanes), num_warps=_warps(dim, lanes, on_hip()),
                num_stages=stages(2),
            )  # fmt: skip
            total, half = left_of(total, num), 1 - half
        _settle_kernel[(pairs,)](known, room, *where, num, rows, half, TILE=settling, HIP=on_hip(), **launch)
