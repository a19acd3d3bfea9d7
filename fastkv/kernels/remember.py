"""Evicted tokens join the centroids of their head, in place: which pairs merge, and when, is `Centroids.add`.

Of the centroids in use, oldest first, every second one is a mover. A round offers each mover to its cheapest partner
among the others, joins the cheapest offers, equal ones by age, and swaps the halves, until M are left. Chan's merge:

    w = n_a / (n_a + n_b);   x_b += w (x_a - x_b);   spread_b += spread_a + n_b w mean((k_a - k_b)^2)

Rows of a working set stay where they are in scratch; `order` lists those in use by age, and what writes a row of a
partner only reads rows of movers. So nothing is atomic, and the same tokens always give the same bits. Products are of
coordinates away from the mean of all, which merges do not move, so that they lose no digits.

Launches: one where few tokens leave (an eviction while decoding), one program a head. For a prompt, one that orders
them and, per BLOCK of them, five: each token finds its nearest seed, one program for SEEKING of them; seeds become
means, one program for RECEIVERS of them; both once more, among the means; parts join the centroids, one program a head.
Numbers read from L2 per token and head, by each choice: (Dk + Dv) SEEDS / RECEIVERS, twice, and 2 (Dk + Dv) SEEDS /
SEEKING; in a round of u, u^2 (Dk + Dv) / 64.

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
from ..reference.centroids import BLOCK, CHOICES, FINE, MEDIUM, SETTLED, STEP, TURN, few_enough
from ._arguments import EvictedPointers, View
from ._attention import _barrier, _dot32, _home, _page, _sum_products
from ._launch import cdiv, check_centroids, check_head_dim, check_like, check_rows, on_hip, pow2, stages
from .slot_signals import in_order

FEW = 64  # tokens that one program lists, and joins if there is room for their centroids
ALONE = 1024  # centroids and tokens that one program joins
SEEKING = 32  # tokens that a program finds seeds for
MANY = 128  # movers that four warps compare, a fourth of rows beyond 64 columns
# One compilation for all of them.
VARYING = ["N", "num", "few", "first", "block", "stride_i", "stride_pb", "stride_ph", "page"]
END, MIDDLE, SMALL = tl.constexpr(FINE), tl.constexpr(MEDIUM), tl.constexpr(SETTLED)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LAST = tl.constexpr(2**31 - 1)
PER_TOKEN, PER_COLUMN = tl.constexpr(STEP), tl.constexpr(TURN)


class Tile(NamedTuple):
    """Constants of a launch.

    Attributes: DK, DV: numbers of a key and a value; BK, BV: padded.  R: tokens listed at most.  LANES: movers, or
        centroids, at a time.  MOVERS, PARTNERS, DIMS: of offers at a time, dimensions of them.  RECEIVERS: partners
        merged at a time.  TOKENS: added up at a time.  SCAN: candidates looked at.
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
    DIMS: int = 32
    RECEIVERS: int = 16
    TOKENS: int = 32
    SCAN: int = 1024

    @classmethod
    def of(cls, heads: int, dim: int, value_dim: int, lanes: int, most: int = 16) -> Tile:
        """For heads of these sizes."""
        return cls(heads, dim, value_dim, pow2(dim, 16), pow2(value_dim, 16), lanes, pow2(most, 16))


class Room(NamedTuple):
    """A head's scratch: keys [rows, DK], values [rows, DV], centre [DK + DV], then sizes, spreads, two lists of rows by
    age, offers and who they are for, squared lengths of keys and of values from the centre, each [rows].

    Rows are multiples of 16, indices are stored as floats.
    """

    keys_ptr: Any
    values_ptr: Any
    centre_ptr: Any
    sizes_ptr: Any
    spreads_ptr: Any
    orders_ptr: Any
    offers_ptr: Any
    partners_ptr: Any
    far_keys_ptr: Any
    far_values_ptr: Any


@triton.jit
def _room(room_ptr, pair, rows, TILE: tl.constexpr):
    """Where the scratch of a pair is; see `room_size`."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    keys = room_ptr + pair * (rows * (DK + DV + 8) + DK + DV)
    values = keys + rows * DK
    centre = values + rows * DV
    sizes = centre + DK + DV
    return Room(
        keys, values, centre, sizes, sizes + rows, sizes + 2 * rows, sizes + 4 * rows, sizes + 5 * rows,
        sizes + 6 * rows, sizes + 7 * rows,
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
def _put_far(far_ptr, centre_ptr, row, inside, cols, x, D: tl.constexpr):
    """Store the squared lengths of rows x [R, C] from the centre."""
    middle = tl.load(centre_ptr + cols, mask=cols < D, other=0.0)[None, :]
    away = tl.where(inside[:, None] & (cols < D)[None, :], x - middle, 0.0)
    tl.store(far_ptr + row, _sum_products(away, away), mask=inside)


@triton.jit
def _products(base_ptr, centre_ptr, own, owns, other, others, D: tl.constexpr, TILE: tl.constexpr):
    """Scalar products [MOVERS, PARTNERS] of own and other rows, away from the centre."""
    MOVERS: tl.constexpr = TILE.MOVERS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    DIMS: tl.constexpr = TILE.DIMS
    dots = tl.zeros([MOVERS, PARTNERS], tl.float32)
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        middle = tl.load(centre_ptr + cols, mask=cols < D, other=0.0)[None, :]
        mine, theirs = _tile(base_ptr, own, owns, cols, D), _tile(base_ptr, other, others, cols, D)
        dots += _dot32(mine - middle, tl.trans(theirs - middle))
    return dots


@triton.jit
def _cheaper(least, best, cost, partner):
    """The cheapest so far of each row of costs, and its partner, the oldest of equals, which have come before."""
    low = tl.min(cost, 1)
    oldest = tl.min(tl.where(cost == low[:, None], partner[None, :], LAST), 1)
    return tl.minimum(low, least), tl.where(low < least, oldest, best)


@triton.jit
def _offer(room, order_ptr, first, used, half, scale_k, scale_v, TILE: tl.constexpr):
    """Write the cheapest merge of movers [first, first + MOVERS) and the partner it is with, the oldest of equals."""
    DK: tl.constexpr = TILE.DK
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
        dots = scale_k * _products(room.keys_ptr, room.centre_ptr, own, owns, other, others, DK, TILE)
        dots += scale_v * _products(room.values_ptr, room.centre_ptr + DK, own, owns, other, others, TILE.DV, TILE)
        distance = tl.maximum(-2 * dots + ours[:, None] + theirs[None, :], 0.0)
        cost = distance / (share[:, None] + 1 / tl.load(room.sizes_ptr + other, mask=others, other=1.0)[None, :])
        cost = tl.where(others[None, :], cost, float("inf"))
        least, best = _cheaper(least, best, cost, partner)
    tl.store(room.offers_ptr + mover, least, mask=owns)
    tl.store(room.partners_ptr + mover, best.to(tl.float32), mask=owns)


@triton.jit
def _accepted(offers_ptr, movers, joins, LANES: tl.constexpr):
    """Which movers [LANES] make the `joins` cheapest offers, the oldest of equals: costs sort like their bits."""
    mover = tl.arange(0, LANES)
    cost = tl.load(offers_ptr + mover, mask=mover < movers, other=float("inf")).to(tl.int32, bitcast=True)
    cost = tl.where(mover < movers, cost, LAST)
    last = tl.zeros([], tl.int32)  # in the end the cost of the last one accepted
    for level in range(0, 31):
        more = last + (tl.full([], 1, tl.int32) << (30 - level))
        last = tl.where(tl.sum((cost < more).to(tl.int32), 0) < joins, more, last)
    cheaper, equal = (cost < last).to(tl.int32), (cost == last).to(tl.int32)
    left = joins - tl.sum(cheaper, 0)
    return (cheaper != 0) | ((equal != 0) & (tl.cumsum(equal, 0) <= left))


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
    _put_far(room.far_keys_ptr, room.centre_ptr, row, changed, dk, k, DK)
    _put_far(room.far_values_ptr, room.centre_ptr + DK, row, changed, dv, v, DV)


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
    return tl.minimum(used - num, tl.maximum(used // share, 1))


@triton.jit
def _scales(room, order_ptr, used, SCAN: tl.constexpr):
    """What squared distances of keys and of values are multiplied with: one over their variance."""
    tokens = tl.zeros([SCAN], tl.float32)
    keys = tl.zeros([SCAN], tl.float32)
    values = tl.zeros([SCAN], tl.float32)
    for first in range(0, used, SCAN):
        place = first + tl.arange(0, SCAN)
        row = tl.load(order_ptr + place, mask=place < used, other=0.0).to(tl.int32)
        size = tl.load(room.sizes_ptr + row, mask=place < used, other=0.0)
        tokens += size
        keys += size * tl.load(room.far_keys_ptr + row, mask=place < used, other=0.0)
        values += size * tl.load(room.far_values_ptr + row, mask=place < used, other=0.0)
    number = tl.maximum(tl.sum(tokens, 0), 1.0)
    return 1 / tl.maximum(tl.sum(keys, 0) / number, TINY), 1 / tl.maximum(tl.sum(values, 0) / number, TINY)


@triton.jit
def _settle(room, parts, own, rows, num, used, TILE: tl.constexpr, HIP: tl.constexpr):
    """All rounds of a head, and its centroids written to where they are kept, as those of pair `own`."""
    half = tl.zeros([], tl.int32)
    while used > num:
        order, joins = room.orders_ptr + half * rows, _joins(used, num)
        scale_k, scale_v = _scales(room, order, used, TILE.LANES)
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
def _list_used(parts, room, own, num, LANES: tl.constexpr):
    """Copy sizes and spreads of a head's centroids and list those in use. Returns: how many."""
    used = tl.zeros([], tl.int32)
    for first in range(0, num, LANES):
        part = first + tl.arange(0, LANES)
        size = tl.load(parts.sizes_ptr + own * num + part, mask=part < num, other=0.0)
        some = (size > 0).to(tl.int32)
        tl.store(room.sizes_ptr + part, size, mask=part < num)
        spread = tl.load(parts.spread_ptr + own * num + part, mask=part < num, other=0.0)
        tl.store(room.spreads_ptr + part, spread, mask=part < num)
        tl.store(room.orders_ptr + used + tl.cumsum(some, 0) - 1, part.to(tl.float32), mask=some != 0)
        used += tl.sum(some, 0)
    return used


@triton.jit
def _centre(base_ptr, centre_ptr, parts_ptr, sizes_ptr, own, num, total, D: tl.constexpr, TILE: tl.constexpr):
    """Copy a head's centroids to the first `num` rows, before those that come, and write the mean of all `total`."""
    DIMS: tl.constexpr = TILE.DIMS
    RECEIVERS: tl.constexpr = TILE.RECEIVERS
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        sums, tokens = tl.zeros([DIMS], tl.float32), tl.zeros([], tl.float32)
        for start in range(0, total, RECEIVERS):
            row = start + tl.arange(0, RECEIVERS)
            known = _tile(parts_ptr + own * num * D, row, row < num, cols, D)
            place = base_ptr + row.to(tl.int64)[:, None] * D + cols[None, :]
            tl.store(place, known, mask=(row < num)[:, None] & (cols < D)[None, :])
            x = tl.where((row < num)[:, None], known, _tile(base_ptr, row, (row >= num) & (row < total), cols, D))
            size = tl.load(sizes_ptr + row, mask=row < total, other=0.0)
            sums += tl.sum(x * size[:, None], 0)
            tokens += tl.sum(size, 0)
        tl.store(centre_ptr + cols, sums / tl.maximum(tokens, 1.0), mask=cols < D)


@triton.jit
def _join(room, parts, own, rows, num, coming, TILE: tl.constexpr, HIP: tl.constexpr):
    """What comes, oldest first in rows from `num` on with sizes and spreads, joins the centroids of pair `own`."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    RECEIVERS: tl.constexpr = TILE.RECEIVERS
    used = _list_used(parts, room, own, num, TILE.LANES)
    for start in range(0, coming, TILE.LANES):
        lane = start + tl.arange(0, TILE.LANES)
        tl.store(room.orders_ptr + used + lane, (num + lane).to(tl.float32), mask=lane < coming)
    _barrier(HIP)  # sizes are read by other threads than wrote them
    _centre(room.keys_ptr, room.centre_ptr, parts.key_mean_ptr, room.sizes_ptr, own, num, num + coming, DK, TILE)
    _centre(
        room.values_ptr, room.centre_ptr + DK, parts.value_mean_ptr, room.sizes_ptr, own, num, num + coming, DV, TILE
    )
    _barrier(HIP)  # and so are rows and their centre
    dk, dv = tl.arange(0, TILE.BK), tl.arange(0, TILE.BV)
    for first in range(0, num + coming, RECEIVERS):
        row = first + tl.arange(0, RECEIVERS)
        there = row < num + coming
        _put_far(room.far_keys_ptr, room.centre_ptr, row, there, dk, _tile(room.keys_ptr, row, there, dk, DK), DK)
        v = _tile(room.values_ptr, row, there, dv, DV)
        _put_far(room.far_values_ptr, room.centre_ptr + DK, row, there, dv, v, DV)
    _barrier(HIP)  # and their lengths
    _settle(room, parts, own, rows, num, used + coming, TILE, HIP)


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
    _barrier(HIP)  # the list is read by other threads than wrote it
    r = tl.arange(0, R)
    live = r < gone
    index = tl.load(listed + r, mask=live, other=0.0).to(tl.int32)
    position = tl.load(candidates.positions_ptr + batch * stride_pb + kv * stride_ph + index, mask=live, other=LAST)
    older = (position[None, :] < position[:, None]) | (
        (position[None, :] == position[:, None]) & (r[None, :] < r[:, None])
    )
    to = num + tl.sum((older & live[None, :]).to(tl.int32), 1)
    tl.store(room.sizes_ptr + to, tl.full([R], 1.0, tl.float32), mask=live)
    tl.store(room.spreads_ptr + to, tl.zeros([R], tl.float32), mask=live)
    _copy(_of_head(new_keys, pair, TILE.HEADS), room.keys_ptr, index, to, live, DK, TILE.DIMS)
    _copy(_of_head(new_values, pair, TILE.HEADS), room.values_ptr, index, to, live, DV, TILE.DIMS)
    _join(room, parts, own, rows, num, gone, TILE, HIP)


@triton.jit
def _of_head(new, pair, HEADS: tl.constexpr):
    """The rows of a head."""
    start = new.ptr + (pair // HEADS) * new.stride_b + (pair % HEADS) * new.stride_h
    return View(start, new.stride_b, new.stride_h, new.stride_t)


@triton.jit
def _rows_of(new, index, inside, cols, D: tl.constexpr):
    """Tokens [N] of a head in fp32; zero where not inside."""
    place = new.ptr + index.to(tl.int64)[:, None] * new.stride_t + cols[None, :]
    return tl.load(place, mask=inside[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _copy(new, base_ptr, index, to, live, D: tl.constexpr, DIMS: tl.constexpr):
    """Tokens `index` of a head into rows `to`."""
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        x = _rows_of(new, index, live, cols, D)
        tl.store(base_ptr + to[:, None] * D + cols[None, :], x, mask=live[:, None] & (cols < D)[None, :])


class Fresh(NamedTuple):
    """Tokens that leave a prompt: keys and values; index [B, Hkv, N], of them by age; gone [B, Hkv], how many leave."""

    new_keys: View
    new_values: View
    index_ptr: Any
    gone_ptr: Any


@triton.jit
def _coming(fresh, pair, first, block):
    """How many of a pair's tokens [first, first + block) there are."""
    return tl.minimum(tl.maximum(tl.load(fresh.gone_ptr + pair).to(tl.int32) - first, 0), block)


@triton.jit
def _oldest(new, index_ptr, cols, D: tl.constexpr, N: tl.constexpr):
    """The oldest token, N times: away from it tokens are compared and added, as they could be from any other."""
    index = tl.load(index_ptr) + tl.zeros([N], tl.int64)
    return _rows_of(new, index, index >= 0, cols, D)  # in wide loads, as other rows


@triton.jit
def _unit(new, index_ptr, coming, few, D: tl.constexpr, TILE: tl.constexpr):
    """One over the variance of the seeds."""
    DIMS: tl.constexpr = TILE.DIMS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    variance = tl.zeros([], tl.float32)
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        oldest = _oldest(new, index_ptr, cols, D, PARTNERS)
        sums, squares = tl.zeros([DIMS], tl.float32), tl.zeros([DIMS], tl.float32)
        for start in range(0, few, PARTNERS):
            seed = start + tl.arange(0, PARTNERS)
            index = tl.load(index_ptr + seed * coming // few, mask=seed < few, other=0)
            x = tl.where((seed < few)[:, None], _rows_of(new, index, seed < few, cols, D) - oldest, 0.0)
            sums += tl.sum(x, 0)
            squares += tl.sum(tl.fma(x, x, 0.0), 0)  # as in `_sum_products`
        mean = sums / few
        variance += tl.sum(squares, 0) / few - tl.sum(tl.fma(mean, mean, 0.0), 0)
    return 1 / tl.maximum(variance, TINY)


@triton.jit
def _nearness(
    new, index_ptr, means_ptr, own, owns, seed, seeds, D: tl.constexpr, AGAIN: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Squared distances [MOVERS, PARTNERS] of tokens and seeds, but for what all seeds of a token have in common.

    seed: tokens; AGAIN: rows of the means that they have become.
    """
    MOVERS: tl.constexpr = TILE.MOVERS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    DIMS: tl.constexpr = TILE.DIMS
    dots, far = tl.zeros([MOVERS, PARTNERS], tl.float32), tl.zeros([PARTNERS], tl.float32)
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        mine = _rows_of(new, own, owns, cols, D) - _oldest(new, index_ptr, cols, D, MOVERS)
        if AGAIN:
            theirs = _tile(means_ptr, seed, seeds, cols, D)
        else:
            theirs = _rows_of(new, seed, seeds, cols, D)
        theirs -= _oldest(new, index_ptr, cols, D, PARTNERS)
        dots += _dot32(mine, tl.trans(theirs))
        far += _sum_products(theirs, theirs)
    return far[None, :] - 2 * dots


@triton.jit(do_not_specialize=VARYING)
def _nearest_kernel(
    fresh: Fresh, nearest_ptr, room_ptr, first, block, few, num, rows, stride_i, AGAIN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The nearest seed of each token of a head that has more than few, or AGAIN the nearest mean; of a seed, itself."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    MOVERS: tl.constexpr = TILE.MOVERS
    PARTNERS: tl.constexpr = TILE.PARTNERS
    pair, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * MOVERS + tl.arange(0, MOVERS)
    coming = _coming(fresh, pair, first, block)
    if coming <= few or tl.program_id(1) * MOVERS >= coming:
        return
    index_ptr = fresh.index_ptr + pair * stride_i + first
    keys, values = _of_head(fresh.new_keys, pair, TILE.HEADS), _of_head(fresh.new_values, pair, TILE.HEADS)
    scale_k, scale_v = _unit(keys, index_ptr, coming, few, DK, TILE), _unit(values, index_ptr, coming, few, DV, TILE)
    room = _room(room_ptr, pair, rows, TILE)
    owns = token < coming
    own = tl.load(index_ptr + token, mask=owns, other=0)
    least = tl.full([MOVERS], float("inf"), tl.float32)
    best = tl.zeros([MOVERS], tl.int32)
    for start in range(0, few, PARTNERS):
        number = start + tl.arange(0, PARTNERS)
        there = number < few
        if AGAIN:
            seed = num + number
        else:
            seed = tl.load(index_ptr + number * coming // few, mask=there, other=0)
        cost = scale_k * _nearness(keys, index_ptr, room.keys_ptr, own, owns, seed, there, DK, AGAIN, TILE)
        cost += scale_v * _nearness(values, index_ptr, room.values_ptr, own, owns, seed, there, DV, AGAIN, TILE)
        least, best = _cheaper(least, best, tl.where(there[None, :], cost, float("inf")), number)
    itself = (token * few + coming - 1) // coming
    best = tl.where(itself * coming // few == token, itself, best)
    tl.store(nearest_ptr + pair * block + token, best, mask=owns)


@triton.jit(do_not_specialize=VARYING)
def _gather_kernel(fresh: Fresh, nearest_ptr, room_ptr, first, block, few, num, rows, stride_i, TILE: tl.constexpr):
    """Rows of the working set behind the centroids: each seed as the mean of its tokens, or tokens where few come."""
    DK: tl.constexpr = TILE.DK
    DV: tl.constexpr = TILE.DV
    RECEIVERS: tl.constexpr = TILE.RECEIVERS
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * RECEIVERS + tl.arange(0, RECEIVERS)
    coming = _coming(fresh, pair, first, block)
    there = part < tl.minimum(coming, few)
    index_ptr = fresh.index_ptr + pair * stride_i + first
    room, to = _room(room_ptr, pair, rows, TILE), num + part
    keys, values = _of_head(fresh.new_keys, pair, TILE.HEADS), _of_head(fresh.new_values, pair, TILE.HEADS)
    if coming <= few:
        index = tl.load(index_ptr + part, mask=there, other=0)
        _copy(keys, room.keys_ptr, index, to, there, DK, TILE.DIMS)
        _copy(values, room.values_ptr, index, to, there, DV, TILE.DIMS)
        tl.store(room.sizes_ptr + to, tl.full([RECEIVERS], 1.0, tl.float32), mask=there)
        tl.store(room.spreads_ptr + to, tl.zeros([RECEIVERS], tl.float32), mask=there)
    else:
        chosen = nearest_ptr + pair * block
        size, spread = _means(keys, index_ptr, chosen, coming, room.keys_ptr, part, to, there, DK, TILE)
        _means(values, index_ptr, chosen, coming, room.values_ptr, part, to, there, DV, TILE)
        tl.store(room.sizes_ptr + to, size, mask=there)
        tl.store(room.spreads_ptr + to, tl.where(size > 1, tl.maximum(spread, 0.0) / DK, 0.0), mask=there)


@triton.jit
def _means(new, index_ptr, chosen_ptr, coming, base_ptr, part, to, there, D: tl.constexpr, TILE: tl.constexpr):
    """Write the means of the tokens that chose parts [RECEIVERS]. Returns: how many did, and their squares."""
    DIMS: tl.constexpr = TILE.DIMS
    TOKENS: tl.constexpr = TILE.TOKENS
    RECEIVERS: tl.constexpr = TILE.RECEIVERS
    spread = tl.zeros([RECEIVERS], tl.float32)
    size = tl.zeros([RECEIVERS], tl.float32)
    for first in range(0, D, DIMS):
        cols = first + tl.arange(0, DIMS)
        oldest = _oldest(new, index_ptr, cols, D, TOKENS)
        sums, size = tl.zeros([RECEIVERS, DIMS], tl.float32), tl.zeros([RECEIVERS], tl.float32)
        for start in range(0, coming, TOKENS):
            token = start + tl.arange(0, TOKENS)
            chose = tl.load(chosen_ptr + token, mask=token < coming, other=-1)
            mine = (part[:, None] == chose[None, :]).to(tl.float32)
            index = tl.load(index_ptr + token, mask=token < coming, other=0)
            x = _rows_of(new, index, token < coming, cols, D) - oldest
            sums += _dot32(mine, x)
            size += tl.sum(mine, 1)
            spread += tl.sum(mine * _sum_products(x, x)[None, :], 1)
        mean = sums / tl.maximum(size, 1.0)[:, None]
        spread -= size * _sum_products(mean, mean)
        place = base_ptr + to[:, None] * D + cols[None, :]
        mean += _oldest(new, index_ptr, cols, D, RECEIVERS)
        tl.store(place, mean, mask=there[:, None] & (cols < D)[None, :])
    return size, spread


@triton.jit(do_not_specialize=VARYING)
def _join_kernel(
    fresh: Fresh, parts: EvictedPointers, room_ptr, rows_ptr, page, first, block, few, num, rows, TILE: tl.constexpr,
    HIP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, own = _home(rows_ptr, page, pair, TILE.HEADS)
    if rows_ptr is not None:
        if row == 0:
            return
    parts = EvictedPointers(*[p if p is None else _page(p, row, page) for p in parts])
    coming = tl.minimum(_coming(fresh, pair, first, block), few)
    _join(_room(room_ptr, pair, rows, TILE), parts, own, rows, num, coming, TILE, HIP)


def _pointers(parts: Centroids) -> EvictedPointers:
    """Of parts, for a kernel."""
    return EvictedPointers(None, parts.keys, parts.values, None, parts.spread, parts.count)


def room_size(rows: int, dim: int, value_dim: int) -> int:
    """Numbers of scratch for a head whose working set has so many rows, see `_room`."""
    return rows * (dim + value_dim + 8) + dim + value_dim


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
    pairs, where, most = batch * heads, (state.rows, page), min(most, num)
    alone = most <= FEW and parts.num + most <= ALONE
    few = most if alone else few_enough(parts.num)
    rows, lanes, hip = working_rows(parts.num, few), pow2(cdiv(parts.num + few, 2), 32), on_hip()
    room = torch.empty(pairs * room_size(rows, dim, value_dim), dtype=torch.float32, device=keys.device)
    if alone:
        _few_kernel[(pairs,)](
            View.of(keys), View.of(values), Leaving(positions, valid.view(torch.uint8), kept.view(torch.uint8)),
            *positions.stride()[:2], known, room, *where, num, parts.num, rows,
            TILE=Tile.of(heads, dim, value_dim, lanes, few), HIP=hip,
            num_warps=_warps(max(dim, value_dim), lanes, hip), num_stages=stages(2),
        )  # fmt: skip
        return
    fresh = Fresh(View.of(keys), View.of(values), *in_order(positions.contiguous(), valid, kept))
    nearest = torch.empty(pairs, min(BLOCK, most), dtype=torch.int32, device=keys.device)
    tile = Tile.of(heads, dim, value_dim, 32)
    joining = tile._replace(LANES=lanes, MOVERS=16 if hip else 32)
    for first in range(0, most, BLOCK):
        block = min(BLOCK, most - first)
        for choice in range(CHOICES if block > few else 1):
            if block > few:
                _nearest_kernel[pairs, cdiv(block, SEEKING)](
                    fresh, nearest, room, first, block, few, parts.num, rows, num, AGAIN=choice > 0,
                    TILE=tile._replace(MOVERS=SEEKING), num_stages=stages(2),
                )  # fmt: skip
            _gather_kernel[pairs, cdiv(min(block, few), tile.RECEIVERS)](
                fresh, nearest, room, first, block, few, parts.num, rows, num, TILE=tile, num_stages=stages(2)
            )
        _join_kernel[(pairs,)](
            fresh, known, room, *where, first, block, few, parts.num, rows, TILE=joining, HIP=hip,
            num_warps=4 if hip else 8, num_stages=stages(2),
        )  # fmt: skip
