"""The attention that Gaussian queries are expected to give each key (Expected Attention, arXiv:2510.00636).

    logit_i = s (m.k_i + s/2 k_i.C k_i);   expected_i = (epsilon + mean over the query heads of softmax_i(logit)) |v_i|

Twins of `reference.queries_ahead`, which finds m and C, and of `reference.expected_attention`. Launches of the latter:
programs of the first take a tile of keys, multiply it with the covariance C of one query head, and note the largest
logit of the tile and the sum of its weights; those of the second add up the weights of the query heads of a KV head.
Bytes per KV head with G query heads: 2 G N D for keys in half precision, 4 G D^2 for covariances, which every tile
reads again from L2, 2 N D for values, and 8 G N for logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..errors import check_groups, check_shape
from ..rotary import Rotary
from ._arguments import View
from ._attention import _dot32, _sum_products
from ._launch import cdiv, check_head_dim, check_like, chip_of, num_sms, pow2, stages
from ._rotary import Pairing, Turn, _cos_sin, _members

TILES = {64: (32, 16, 4), 128: (32, 16, 4), 256: (32, 32, 8), 512: (16, 32, 8)}  # padded D -> keys, rows of C, warps
KEYS = 128  # that a program weighs
COLUMNS = tl.constexpr(32)  # numbers of a value at once
AHEAD = {16: (16, 4), 32: (32, 4), 64: (32, 4), 128: (16, 8)}  # pairs of a head -> columns of a program, warps
AHEAD_80 = AHEAD | {64: (16, 4)}  # of sm_80, where more spill
ROWS, STRETCH = 32, 256  # queries at once, and at least in a stretch
NOTES = tl.constexpr(16)  # numbers: two are used, the others are for wide loads
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


class Tile(NamedTuple):
    """Constants of a launch: KV heads, query heads of each; numbers of a key, padded, of a value; keys, rows of C at
    once.
    """

    HEADS: int
    G: int
    D: int
    BD: int
    DV: int
    BLOCK_N: int
    BLOCK_K: int


@triton.jit(do_not_specialize=["N"])  # the length of a prompt
def _logit_kernel(
    keys: View, values: View, valid_ptr, mean_ptr, covariance_ptr, logits_ptr, sums_ptr, lengths_ptr, scale, N,
    TILE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    head = tl.program_id(1).to(tl.int64)  # of queries, of all sequences
    kv = head // TILE.G
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
    sums_ptr += (head * tl.num_programs(0) + tl.program_id(0)) * 2
    if tl.max(real.to(tl.int32), 0) == 0:  # slots that a shorter head than the longest does not have
        tl.store(logits_ptr + head * N + key, tl.full([BLOCK_N], -float("inf"), tl.float32), mask=key < N)
        tl.store(sums_ptr, -float("inf"))
        tl.store(sums_ptr + 1, 0.0)
        if head % TILE.G == 0:
            tl.store(lengths_ptr + kv * N + key, tl.zeros([BLOCK_N], tl.float32), mask=key < N)
        return
    keys_ptr = keys.ptr + (kv // HEADS) * keys.stride_b + (kv % HEADS) * keys.stride_h
    row_ptr = keys_ptr + key.to(tl.int64)[:, None] * keys.stride_t
    column = tl.arange(0, BD)
    turned = tl.zeros([BLOCK_N, BD], tl.float32)
    for first in range(0, D, BLOCK_K):
        some = first + tl.arange(0, BLOCK_K)
        k = tl.load(row_ptr + some[None, :], mask=real[:, None] & (some < D)[None, :], other=0.0)
        place = head * D * D + some[:, None] * D + column[None, :]
        c = tl.load(covariance_ptr + place, mask=(some < D)[:, None] & (column < D)[None, :], other=0.0)
        turned += _dot32(k.to(tl.float32), c)
    k = tl.load(row_ptr + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + head * D + column, mask=column < D, other=0.0)
    logit = tl.where(real, scale * _sum_products(k, turned * (scale / 2) + mean[None, :]), -float("inf"))
    top = tl.max(logit, 0)
    tl.store(logits_ptr + head * N + key, logit, mask=key < N)
    tl.store(sums_ptr, top)
    tl.store(sums_ptr + 1, tl.sum(tl.exp(logit - top), 0))
    if head % TILE.G == 0:
        tl.store(lengths_ptr + kv * N + key, _lengths(values, kv, key, N, HEADS, TILE.DV, COLUMNS), mask=key < N)


@triton.jit
def _softmax(sums_ptr, head, tiles, BLOCK: tl.constexpr):
    """The largest logit of a query head, 0 if it has none, and one over the sum of its weights."""
    sums_ptr += head * tiles * 2
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(sums_ptr + 2 * tile, mask=tile < tiles, other=-float("inf")))
    top = tl.max(tops, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        some = tl.load(sums_ptr + 2 * tile + 1, mask=tile < tiles, other=0.0)
        totals += some * tl.exp(tl.load(sums_ptr + 2 * tile, mask=tile < tiles, other=-float("inf")) - top)
    total = tl.sum(totals, 0)
    return top, 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def _lengths(values, kv, index, N, HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """|v| of the values `index` of a KV head, of all sequences; 0 beyond N."""
    values_ptr = values.ptr + (kv // HEADS) * values.stride_b + (kv % HEADS) * values.stride_h
    squares = tl.zeros([index.shape[0]], tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        spot = values_ptr + index.to(tl.int64)[:, None] * values.stride_t + column[None, :]
        v = tl.load(spot, mask=(index < N)[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(v * v, 1)
    return tl.sqrt(squares)


@triton.jit(do_not_specialize=["N", "tiles"])
def _weight_kernel(
    logits_ptr, sums_ptr, lengths_ptr, count_ptr, memory_ptr, valid_ptr, expected_ptr, epsilon, N, tiles,
    HEADS: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    asked = tl.load(count_ptr + kv // HEADS) > 0
    weights = tl.zeros([BLOCK], tl.float32)
    for member in range(0, G):
        head = kv * G + member
        top, share = _softmax(sums_ptr, head, tiles, BLOCK)
        logits = tl.load(logits_ptr + head * N + index, mask=index < N, other=-float("inf"))
        weights += tl.exp(logits - top) * share
    known = tl.maximum((weights / G + epsilon) * tl.load(lengths_ptr + kv * N + index, mask=index < N, other=0.0), TINY)
    asked = asked & (tl.load(valid_ptr + kv * N + index, mask=index < N, other=0) != 0)
    before = tl.load(memory_ptr + kv * N + index, mask=index < N, other=0.0)
    tl.store(expected_ptr + kv * N + index, tl.where(asked, known, before), mask=index < N)


class AheadTile(NamedTuple):
    """Constants of a launch: query heads and KV heads, numbers of a head; pairs of all, padded, and of a program's
    columns, queries at once; `Pairing`.
    """

    HEADS: int
    KV: int
    D: int
    PAIRS: int
    COLUMNS: int
    ROWS: int
    R: int
    START: int
    INTERLEAVED: bool


class Sums(NamedTuple):
    """Of the queries of a stretch, with members (a, b) of each pair, away from a centre that all stretches share:
    sum a a^T, sum a b^T, sum b b^T, each [D/2, D/2]; sum a, sum b, the centre of both, each [D/2]; how many they are,
    and the newest position.
    """

    one_one_ptr: Any
    one_two_ptr: Any
    two_two_ptr: Any
    one_ptr: Any
    two_ptr: Any
    centres_ptr: Any
    notes_ptr: Any


@triton.jit
def _sums(sums_ptr, part, D: tl.constexpr):
    """Where those of a stretch are."""
    HALF: tl.constexpr = D // 2
    sums_ptr += part * (3 * HALF * HALF + 2 * D + NOTES)
    lines = sums_ptr + 3 * HALF * HALF
    return Sums(
        sums_ptr, sums_ptr + HALF * HALF, sums_ptr + 2 * HALF * HALF, lines, lines + HALF, lines + D, lines + 2 * D
    )


@triton.jit
def _queries_back(queries_ptr, stride_t, row, asks, position, turn, pair, TILE: tl.constexpr):
    """Both members of some pairs of queries as they were before they were turned, 0 where not asked."""
    R: tl.constexpr = TILE.R
    D: tl.constexpr = TILE.D
    one, two = _members(pair, D, R, TILE.START, TILE.INTERLEAVED)
    inside = asks[:, None] & (pair < D // 2)[None, :]
    row_ptr = queries_ptr + row.to(tl.int64)[:, None] * stride_t
    first = tl.load(row_ptr + one[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + two[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = pair < R // 2
    frequency = tl.load(turn.frequencies_ptr + pair, mask=turned, other=0.0)
    cos, sin = _cos_sin(position.to(tl.float32)[:, None] * frequency[None, :])
    cos, sin = tl.where(turned[None, :], cos / turn.scaling, 1.0), sin / turn.scaling
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def _asking(turn, valid_ptr, own, row, T, sinks):
    """Positions of queries of a block, 0 beyond it, which of them are real, and which are asked."""
    position = tl.load(turn.positions_ptr + own + row, mask=row < T, other=0)
    real = tl.load(valid_ptr + own + row, mask=row < T, other=0) != 0
    return position, real, real & (position >= sinks)


@triton.jit
def _at(all, pair, column):
    """The numbers `column` of those of all pairs."""
    return tl.sum(tl.where(pair[:, None] == column[None, :], all[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["T", "N", "each"])
def _ahead_kernel(queries: View, valid_ptr, turn: Turn, sums_ptr, T, N, each, sinks, TILE: tl.constexpr):
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    PAIRS: tl.constexpr = TILE.PAIRS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    ROWS: tl.constexpr = TILE.ROWS
    head = tl.program_id(0).to(tl.int64)  # of queries, of all sequences
    own = head // HEADS * TILE.KV * N + N - T  # the block, of the first KV head
    queries_ptr = queries.ptr + (head // HEADS) * queries.stride_b + (head % HEADS) * queries.stride_h
    pair, column = tl.arange(0, PAIRS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Any centre will do, so that small differences are not lost: that of the last queries.
    row = tl.maximum(T - ROWS, 0) + tl.arange(0, ROWS)
    position, real, asks = _asking(turn, valid_ptr, own, row, T, sinks)
    first, second = _queries_back(queries_ptr, queries.stride_t, row, asks, position, turn, pair, TILE)
    number = tl.maximum(tl.sum(asks.to(tl.int32), 0), 1).to(tl.float32)
    first_centre, second_centre = tl.sum(first, 0) / number, tl.sum(second, 0) / number
    left_centre, right_centre = _at(first_centre, pair, column), _at(second_centre, pair, column)
    first_sum = tl.zeros([PAIRS], tl.float32)
    second_sum = tl.zeros([PAIRS], tl.float32)
    one_one = tl.zeros([PAIRS, COLUMNS], tl.float32)
    one_two = tl.zeros([PAIRS, COLUMNS], tl.float32)
    two_two = tl.zeros([PAIRS, COLUMNS], tl.float32)
    count = tl.zeros([], tl.int32)
    newest = tl.full([], -1, tl.int32)
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, T)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        position, real, asks = _asking(turn, valid_ptr, own, row, end, sinks)
        newest = tl.maximum(newest, tl.max(tl.where(real, position, -1), 0))
        count += tl.sum(asks.to(tl.int32), 0)
        first, second = _queries_back(queries_ptr, queries.stride_t, row, asks, position, turn, pair, TILE)
        first = tl.where(asks[:, None], first - first_centre[None, :], 0.0)
        second = tl.where(asks[:, None], second - second_centre[None, :], 0.0)
        if COLUMNS == PAIRS:
            left, right = first, second
        else:
            left, right = _queries_back(queries_ptr, queries.stride_t, row, asks, position, turn, column, TILE)
            left = tl.where(asks[:, None], left - left_centre[None, :], 0.0)
            right = tl.where(asks[:, None], right - right_centre[None, :], 0.0)
        first_sum += tl.sum(first, 0)
        second_sum += tl.sum(second, 0)
        one_one += _dot32(tl.trans(first), left)
        one_two += _dot32(tl.trans(first), right)
        two_two += _dot32(tl.trans(second), right)
    HALF: tl.constexpr = D // 2
    sums = _sums(sums_ptr, head * tl.num_programs(2) + tl.program_id(2), D)
    place = pair[:, None] * HALF + column[None, :]
    inside = (pair < HALF)[:, None] & (column < HALF)[None, :]
    tl.store(sums.one_one_ptr + place, one_one, mask=inside)
    tl.store(sums.one_two_ptr + place, one_two, mask=inside)
    tl.store(sums.two_two_ptr + place, two_two, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(sums.one_ptr + pair, first_sum, mask=pair < HALF)
        tl.store(sums.two_ptr + pair, second_sum, mask=pair < HALF)
        tl.store(sums.centres_ptr + pair, first_centre, mask=pair < HALF)
        tl.store(sums.centres_ptr + HALF + pair, second_centre, mask=pair < HALF)
        tl.store(sums.notes_ptr, count.to(tl.float32))
        tl.store(sums.notes_ptr + 1, newest.to(tl.float32))


@triton.jit(do_not_specialize=["stretches"])
def _turn_kernel(sums_ptr, turn: Turn, mean_ptr, covariance_ptr, count_ptr, stretches, horizon, TILE: tl.constexpr):
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    HALF: tl.constexpr = D // 2
    PAIRS: tl.constexpr = TILE.PAIRS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    ROWS: tl.constexpr = TILE.ROWS
    R: tl.constexpr = TILE.R
    head = tl.program_id(0).to(tl.int64)
    pair, column = tl.arange(0, PAIRS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (pair < HALF)[:, None] & (column < HALF)[None, :]
    there, across = pair[:, None] * HALF + column[None, :], column[None, :] * HALF + pair[:, None]
    first_mean = tl.zeros([PAIRS], tl.float32)
    second_mean = tl.zeros([PAIRS], tl.float32)
    one_one = tl.zeros([PAIRS, COLUMNS], tl.float32)
    one_two = tl.zeros([PAIRS, COLUMNS], tl.float32)
    two_one = tl.zeros([PAIRS, COLUMNS], tl.float32)
    two_two = tl.zeros([PAIRS, COLUMNS], tl.float32)
    count = tl.zeros([], tl.float32)
    newest = tl.full([], -1.0, tl.float32)
    for stretch in range(0, stretches):
        sums = _sums(sums_ptr, head * stretches + stretch, D)
        count += tl.load(sums.notes_ptr)
        newest = tl.maximum(newest, tl.load(sums.notes_ptr + 1))
        first_mean += tl.load(sums.one_ptr + pair, mask=pair < HALF, other=0.0)
        second_mean += tl.load(sums.two_ptr + pair, mask=pair < HALF, other=0.0)
        one_one += tl.load(sums.one_one_ptr + there, mask=inside, other=0.0)
        one_two += tl.load(sums.one_two_ptr + there, mask=inside, other=0.0)
        two_one += tl.load(sums.one_two_ptr + across, mask=inside, other=0.0)
        two_two += tl.load(sums.two_two_ptr + there, mask=inside, other=0.0)
    number = tl.maximum(count, 1.0)
    first_mean, second_mean = first_mean / number, second_mean / number  # away from the centre
    left, right = _at(first_mean, pair, column)[None, :], _at(second_mean, pair, column)[None, :]
    one_one = one_one / number - first_mean[:, None] * left
    one_two = one_two / number - first_mean[:, None] * right
    two_one = two_one / number - second_mean[:, None] * left
    two_two = two_two / number - second_mean[:, None] * right

    # The mean turn of what comes, and what it makes of C: R C R^T.
    turned = pair < R // 2
    frequency = tl.load(turn.frequencies_ptr + pair, mask=turned, other=0.0)
    cos = tl.zeros([PAIRS], tl.float32)
    sin = tl.zeros([PAIRS], tl.float32)
    for start in range(0, horizon, ROWS):
        step = start + 1 + tl.arange(0, ROWS)
        more_cos, more_sin = _cos_sin((newest + step.to(tl.float32))[:, None] * frequency[None, :])
        cos += tl.sum(tl.where((step <= horizon)[:, None], more_cos, 0.0), 0)
        sin += tl.sum(tl.where((step <= horizon)[:, None], more_sin, 0.0), 0)
    cos = tl.where(turned, cos / horizon * turn.scaling, 1.0)
    sin = tl.where(turned, sin / horizon * turn.scaling, 0.0)
    one, two = _members(pair, D, R, TILE.START, TILE.INTERLEAVED)
    if tl.program_id(1) == 0:
        sums = _sums(sums_ptr, head * stretches, D)
        first_mean += tl.load(sums.centres_ptr + pair, mask=pair < HALF, other=0.0)
        second_mean += tl.load(sums.centres_ptr + HALF + pair, mask=pair < HALF, other=0.0)
        mean_ptr += head * D
        tl.store(mean_ptr + one, first_mean * cos - second_mean * sin, mask=pair < HALF)
        tl.store(mean_ptr + two, second_mean * cos + first_mean * sin, mask=pair < HALF)
        if head % HEADS == 0:
            tl.store(count_ptr + head // HEADS, count.to(tl.int32).to(tl.int64))
    one_left = one_one * cos[:, None] - two_one * sin[:, None]
    one_right = one_two * cos[:, None] - two_two * sin[:, None]
    two_left = two_one * cos[:, None] + one_one * sin[:, None]
    two_right = two_two * cos[:, None] + one_two * sin[:, None]
    left, right = _members(column, D, R, TILE.START, TILE.INTERLEAVED)
    cos, sin = _at(cos, pair, column)[None, :], _at(sin, pair, column)[None, :]
    covariance_ptr += head * D * D
    one_ptr, two_ptr = covariance_ptr + one[:, None] * D, covariance_ptr + two[:, None] * D
    tl.store(one_ptr + left[None, :], one_left * cos - one_right * sin, mask=inside)
    tl.store(one_ptr + right[None, :], one_right * cos + one_left * sin, mask=inside)
    tl.store(two_ptr + left[None, :], two_left * cos - two_right * sin, mask=inside)
    tl.store(two_ptr + right[None, :], two_right * cos + two_left * sin, mask=inside)


def queries_ahead(
    queries: Tensor, positions: Tensor, valid: Tensor, rotary: Rotary, horizon: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.queries_ahead`: programs of the first launch add up a stretch of the queries of a head, those of the
    second turn the sums of all stretches. In the first each tile of columns reads the queries: one for heads of 64, two
    for 128, eight for 256. queries have unit stride along D. No host sync.
    """
    op, (batch, num_heads, num, dim) = "queries_ahead", queries.shape
    check_head_dim(op, dim)
    heads, candidates = valid.shape[1:]
    valid = valid.contiguous()
    check_like(op, (batch, heads, candidates), positions=positions, valid=valid)
    assert queries.stride(-1) == 1 and num <= candidates
    pairs = pow2(dim // 2, 16)
    if pairs not in AHEAD:  # three products of 256 rows: for sm_100 triton 3.7 compiles nothing of them
        return reference.queries_ahead(queries, positions, valid, rotary, horizon, sinks)
    columns, num_warps = (AHEAD_80 if chip_of(queries.device) == "80" else AHEAD)[pairs]
    tiles, pairing, turn = cdiv(dim // 2, columns), Pairing.of(rotary, dim), Turn.of(positions, rotary)
    programs = batch * num_heads * tiles
    stretches = max(1, min(2 * num_sms(queries.device) // max(programs, 1), num // STRETCH))
    each = cdiv(cdiv(num, stretches), ROWS) * ROWS
    covariance = torch.empty(batch, num_heads, dim, dim, dtype=torch.float32, device=queries.device)
    mean = torch.empty(batch, num_heads, 1, dim, dtype=torch.float32, device=queries.device)
    count = torch.empty(batch, 1, 1, dtype=torch.int64, device=queries.device)
    size = 3 * (dim // 2) ** 2 + 2 * dim + NOTES.value
    sums = torch.empty(batch * num_heads, stretches, size, dtype=torch.float32, device=queries.device)
    tile = AheadTile(num_heads, heads, dim, pairs, columns, ROWS, *pairing)
    _ahead_kernel[batch * num_heads, tiles, stretches](
        View.of(queries), valid.view(torch.uint8), turn, sums, num, candidates, each, sinks, TILE=tile,
        num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    _turn_kernel[batch * num_heads, cdiv(dim // 2, 16)](
        sums, turn, mean, covariance, count, stretches, horizon, TILE=tile._replace(COLUMNS=16),
        num_warps=8 if pairs > 64 else 4,
    )  # fmt: skip
    return mean, covariance, count


def expected_attention(
    keys: Tensor, values: Tensor, mean: Tensor, covariance: Tensor, count: Tensor, scale: float, epsilon: float,
    memory: Tensor, *, valid: Tensor,
) -> Tensor:  # fmt: skip
    """`reference.expected_attention` of contiguous tensors; keys and values have unit stride along D.

    Cost: two launches; no host sync.  Raises: FastKVError for shapes or strides that do not fit.
    """
    (batch, heads, num, dim), num_heads, op = keys.shape, mean.shape[1], "expected_attention"
    check_head_dim(op, dim)
    groups, valid = check_groups(op, num_heads, heads), valid.contiguous()
    check_like(op, (batch, num_heads, 1, dim), mean=mean)
    check_like(op, (batch, num_heads, dim, dim), covariance=covariance)
    check_like(op, (batch, 1, 1), count=count)
    check_like(op, (batch, heads, num), valid=valid, memory=memory)
    check_shape(op, "values", values, (batch, heads, num, None))
    assert keys.stride(-1) == values.stride(-1) == 1
    found = torch.empty_like(memory)
    if found.numel():
        logits = torch.empty(batch, num_heads, num, dtype=torch.float32, device=keys.device)
        padded = pow2(dim, 64)
        some, rows, num_warps = TILES[padded]
        tiles = cdiv(num, some)
        lengths, sums = torch.empty_like(found), logits.new_empty(batch, num_heads, tiles, 2)
        mask = valid.view(torch.uint8)
        _logit_kernel[tiles, batch * num_heads](
            View.of(keys), View.of(values), mask, mean, covariance, logits, sums, lengths, scale, num,
            TILE=Tile(heads, groups, dim, padded, values.shape[-1], some, rows), num_warps=num_warps,
            num_stages=stages(2),
        )  # fmt: skip
        _weight_kernel[batch * heads, cdiv(num, KEYS)](
            logits, sums, lengths, count, memory, mask, found, epsilon, num, tiles, HEADS=heads, G=groups, BLOCK=KEYS
        )
    return found
