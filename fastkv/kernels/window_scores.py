"""Mean attention weight that the last W queries give each key: SnapKV (arXiv:2404.14469) before pooling, TOVA, H2O.

    s[b, h, n] = mean over observed queries w and heads g of exp(l[g, w, n]) / (sum_m exp(l[g, w, m]) + mass[g, w])

Twin of `reference.observed_attention`; `mass` is that of the evicted tokens and the sink. TOVA is W = 1, averaged over
KV heads by the caller; H2O observes all queries. Rows are (query, head of the group); query w is the real token of
rank R - W + w of the R that a sequence has in the block, wherever its padding is, or none.

Launches: partial log-sums per split of the keys, and which tokens the queries are; column sums, keys in registers, of
weights whose log-sums each program merges, in the order of the splits.
Bytes: keys twice, 8 bytes per row and split, which every tile of keys reads again from L2, 4 N out.
Does not handle: more than one window in flight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_groups, check_shape
from ._arguments import Scaling, View
from ._attention import LOG2E, _add_sink, _bias2, _dot, _logits2
from ._launch import cdiv, check_head_dim, check_like, pow2, stages
from .blocks import SCAN, _of_rank, _real_before
from .noncausal_mass import Tile

# padded head_dim: (keys per tile, warps, stages)
BLOCKS = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 8, 2), 512: (32, 8, 1)}
MAX_ROWS = 64  # queries times heads per tile
LEAST_KEYS = 512  # of a split
MAX_SPLITS = 32  # of all tiles of rows together
NOWHERE = tl.constexpr(2**31 - 1)  # the position of what is not a token: after every query


class Known(NamedTuple):
    """What is known of N candidates: positions int32 [B, Hkv, N], bytes that say which are real, addends of logits; of
    the T queries: log of the mass of evicted tokens [B, Hq, T], and sinks [Hq]. Absent: the last three, where there are
    none.
    """

    places_ptr: Any
    valid_ptr: Any
    bias_ptr: Any = None
    mass_ptr: Any = None
    sink_ptr: Any = None


class Parts(NamedTuple):
    """What one launch tells the other: tops, totals [B, Hkv, splits, W G] of rows, tokens [B, W] int32 of the block
    that the queries are, -1 for none, and queried [B] fp32, how many are.
    """

    tops_ptr: Any
    totals_ptr: Any
    tokens_ptr: Any
    queried_ptr: Any


@triton.jit
def _logit_tile(q, k, row, token, place, bias, known, batch, kv, scaling, T, N, TILE: tl.constexpr):
    """Base-2 logits of rows (query, head of the group), which ask as tokens of the block, -1 for none, and the keys k;
    -inf where not seen.
    """
    G: tl.constexpr = TILE.G
    HEADS: tl.constexpr = TILE.HEADS
    asks = token >= 0
    column = tl.arange(0, TILE.BD)[None, :]
    far = tl.where(asks, token, 0).to(tl.int64)
    q_ptrs = q.ptr + batch * q.stride_b + (kv * G + row % G) * q.stride_h + far * q.stride_t
    asked = tl.load(q_ptrs[:, None] + column, mask=asks[:, None] & (column < TILE.D), other=0.0)
    logits = _logits2(_dot(asked, tl.trans(k)), scaling)
    if bias is not None:
        logits += bias[None, :]
    until = tl.load(known.places_ptr + batch * HEADS * N + N - T + far, mask=asks, other=-1)
    return tl.where(place[None, :] <= until[:, None], logits, -float("inf"))


@triton.jit
def _key_tile(keys, known, first, high, head, N, TILE: tl.constexpr):
    """Keys of a head from `first` on, 0 where not valid, and their positions, NOWHERE where not valid."""
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    index = first + tl.arange(0, TILE.BLOCK_N)
    real = tl.load(known.valid_ptr + head * N + index, mask=index < high, other=0) != 0
    place = tl.load(known.places_ptr + head * N + index, mask=real, other=NOWHERE)
    column = tl.arange(0, TILE.BD)[None, :]
    keys_ptr = keys.ptr + (head // HEADS) * keys.stride_b + (head % HEADS) * keys.stride_h
    keys_ptr += tl.full([], 1, tl.int64) * first * keys.stride_t
    spot = keys_ptr + tl.arange(0, TILE.BLOCK_N)[:, None] * keys.stride_t + column
    return tl.load(spot, mask=real[:, None] & (column < D), other=0.0), place


@triton.jit
def _biases(bias_ptr, head_start, first, high, BLOCK_N: tl.constexpr):
    """Addends of the base-2 logits of the keys of `_key_tile`; None without."""
    if bias_ptr is None:
        return
    else:
        index = first + tl.arange(0, BLOCK_N)
        return _bias2(bias_ptr + head_start, index, index < high)


@triton.jit(do_not_specialize=["W", "T", "N"])  # the length of a prompt
def _lse_kernel(
    q: View, keys: View, known: Known, parts: Parts, scaling: Scaling, W, T, N, keys_per_split, TILE: tl.constexpr
):
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    ROWS: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(2).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block_ptr = known.valid_ptr + batch * HEADS * N + N - T
    _, real = _real_before(block_ptr, 0, T, SCAN)
    rank = real - W + row // G
    token = _of_rank(block_ptr, rank, real - W, real - 1, T)
    token = tl.where((rank >= 0) & (row < W * G), token, -1)
    if (tl.program_id(1) == 0) & (kv == 0):
        tl.store(parts.tokens_ptr + batch * W + row // G, token, mask=(row % G == 0) & (row < W * G))
        if tl.program_id(0) == 0:
            tl.store(parts.queried_ptr + batch, tl.minimum(real, W).to(tl.float32))
    low = tl.program_id(1) * keys_per_split
    high = tl.minimum(low + keys_per_split, N)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(low, high, BLOCK_N):
        k, place = _key_tile(keys, known, first, high, head, N, TILE)
        bias = _biases(known.bias_ptr, head * N, first, high, BLOCK_N)
        logits = _logit_tile(q, k, row, token, place, bias, known, batch, kv, scaling, T, N, TILE)
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
    spot = (head * tl.num_programs(1) + tl.program_id(1)) * W * G + row
    tl.store(parts.tops_ptr + spot, top, mask=row < W * G)
    tl.store(parts.totals_ptr + spot, total, mask=row < W * G)


@triton.jit
def _merged(parts, known, row, token, head, W, T, splits, TILE: tl.constexpr):
    """Of rows, over all splits, the evicted tokens and the sink: the largest base-2 logit, and one over the sum of
    weights beside it, 0 for a row that sees nothing. A log-sum would round once more, where logits are large.
    """
    G: tl.constexpr = TILE.G
    HEADS: tl.constexpr = TILE.HEADS
    asks = token >= 0
    top = tl.full(row.shape, -float("inf"), tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    if known.mass_ptr is not None:
        own = (head * G + row % G) * T + token
        mass = tl.load(known.mass_ptr + own, mask=asks, other=-float("inf"))
        top = mass * LOG2E
        total = tl.where(mass == -float("inf"), 0.0, 1.0)
    if known.sink_ptr is not None:
        top, total, _ = _add_sink(top, total, tl.load(known.sink_ptr + (head % HEADS) * G + row % G))
    for split in range(0, splits):
        place = (head * splits + split) * W * G + row
        more = tl.load(parts.tops_ptr + place, mask=asks, other=-float("inf"))
        new_top = tl.maximum(top, more)
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor)
        total += tl.load(parts.totals_ptr + place, mask=asks, other=0.0) * tl.exp2(more - floor)
        top = new_top
    sees = asks & (total > 0)
    return tl.where(sees, top, 0.0), tl.where(sees, 1.0 / tl.where(sees, total, 1.0), 0.0)


@triton.jit(do_not_specialize=["W", "T", "N", "splits"])
def _column_kernel(
    q: View, keys: View, known: Known, parts: Parts, scores_ptr, scaling: Scaling, W, T, N, splits, TILE: tl.constexpr
):
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    ROWS: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, place = _key_tile(keys, known, tl.program_id(0) * BLOCK_N, N, head, N, TILE)
    bias = _biases(known.bias_ptr, head * N, tl.program_id(0) * BLOCK_N, N, BLOCK_N)
    share = 1.0 / (tl.maximum(tl.load(parts.queried_ptr + batch), 1.0) * G)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, W * G, ROWS):
        row = first + tl.arange(0, ROWS)
        token = tl.load(parts.tokens_ptr + batch * W + row // G, mask=row < W * G, other=-1)
        top, part = _merged(parts, known, row, token, head, W, T, splits, TILE)
        logits = _logit_tile(q, k, row, token, place, bias, known, batch, kv, scaling, T, N, TILE)
        sums += tl.sum(tl.exp2(logits - top[:, None]) * part[:, None], 0)
    tl.store(scores_ptr + head * N + index, sums * share, mask=index < N)


def observed_attention(
    q: Tensor, keys: Tensor, positions: Tensor, valid: Tensor, scale: float, softcap: float | None = None, *,
    window: int | None = None, log_mass: Tensor | None = None, sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.observed_attention` of contiguous tensors; q and keys have any strides, unit stride along D.

    Cost: two launches, no host sync.  Raises: FastKVError for shapes or strides that do not fit.
    """
    op, (batch, num_heads, num, dim) = "observed_attention", q.shape
    heads, length = keys.shape[1:3]
    groups = check_groups(op, num_heads, heads)
    check_shape(op, "keys", keys, (batch, heads, length, dim))
    check_head_dim(op, dim)
    check_like(op, (batch, heads, length), positions=positions, valid=valid, bias=bias)
    check_like(op, (batch, num_heads, num), log_mass=log_mass)
    check_like(op, (num_heads,), sink_logits=sink_logits)
    assert q.stride(-1) == keys.stride(-1) == 1
    if num > length:
        raise FastKVError(f"{op}: queries are those of the last candidates, got {num} queries of {length}")
    scores = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    queried = torch.empty(batch, 1, 1, dtype=torch.float32, device=q.device)
    if not scores.numel() or not num:
        return scores.zero_(), queried.zero_()
    watched, width = num if window is None else min(window, num), pow2(dim, 16)
    tile, warps, depth = BLOCKS[width]
    rows = min(MAX_ROWS, pow2(watched * groups, 16))
    tiles = cdiv(watched * groups, rows)
    most = max(MAX_SPLITS // tiles, 1)
    split = cdiv(max(LEAST_KEYS, cdiv(length, most)), tile) * tile
    splits = cdiv(length, split)
    tops, totals = torch.empty(2, batch, heads, splits, watched * groups, dtype=torch.float32, device=q.device)
    tokens = torch.empty(batch, watched, dtype=torch.int32, device=q.device)
    parts = Parts(tops, totals, tokens, queried)
    inputs = View.of(q), View.of(keys), Known(positions, valid.view(torch.uint8), bias, log_mass, sink_logits), parts
    numbers, sizes = (Scaling(scale, softcap), watched, num, length), Tile(heads, groups, dim, width, rows, tile)
    launch = {"TILE": sizes, "num_warps": warps, "num_stages": stages(depth)}
    _lse_kernel[(tiles, splits, batch * heads)](*inputs, *numbers, split, **launch)
    _column_kernel[(cdiv(length, tile), batch * heads)](*inputs, scores, *numbers, splits, **launch)
    return scores, queried
