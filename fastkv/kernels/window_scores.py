"""Mean attention weight that the last W queries give each key: SnapKV (arXiv:2404.14469) before pooling, TOVA.

    s[b, h, n] = mean over valid queries w and heads g of exp(l[g, w, n]) / (sum_m exp(l[g, w, m]) + mass[g, w])

Twin of `reference.window_attention` where a query sees a key iff the key is valid and not later than the query; `mass`
is that of the evicted tokens. TOVA is W = 1, averaged over KV heads by the caller. Rows are (query, head of the group).

Launches: partial log-sums per split of the keys; their merge, with the mass; column sums, keys in registers.
Bytes: keys twice, 8 bytes per row and split, 4 N out.
Does not handle: more than one window in flight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_groups, check_shape
from ._arguments import Scaling, View
from ._attention import LOG2E, _bias2, _dot, _logits2
from ._launch import check_head_dim, check_like, pow2, stages

# padded head_dim: (keys per tile, warps, stages)
BLOCKS = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 8, 2), 512: (32, 8, 1)}
MAX_ROWS = 64  # queries times heads per tile
LEAST_KEYS = 512  # of a split
MAX_SPLITS = 32
NOWHERE = tl.constexpr(2**31 - 1)  # the position of what is not a token: after every query


class Known(NamedTuple):
    """What else is known: positions of keys [B, Hkv, N] int32, NOWHERE where not valid, of queries [B, W]; addends of
    logits [B, Hkv, N]. Absent: every query sees every key; there are none.
    """

    places_ptr: Any = None
    query_places_ptr: Any = None
    bias_ptr: Any = None


class Tile(NamedTuple):
    """Constants of a launch: heads, their numbers, padded ones; rows and keys at a time."""

    HEADS: int
    G: int
    D: int
    BD: int
    ROWS: int
    BLOCK_N: int


@triton.jit
def _logit_tile(q, k, row, place, bias, known, batch, kv, scaling, W, TILE: tl.constexpr):
    """Base-2 logits of rows (query, head of the group) and the keys k; -inf where not seen."""
    G: tl.constexpr = TILE.G
    rows = row < W * G
    query = (row // G).to(tl.int64)
    column = tl.arange(0, TILE.BD)[None, :]
    q_ptrs = q.ptr + batch * q.stride_b + (kv * G + row % G) * q.stride_h + query * q.stride_t
    asked = tl.load(q_ptrs[:, None] + column, mask=rows[:, None] & (column < TILE.D), other=0.0)
    logits = _logits2(_dot(asked, tl.trans(k)), scaling)
    if bias is not None:
        logits += bias[None, :]
    until = tl.full([1], NOWHERE - 1, tl.int64)
    if known.query_places_ptr is not None:
        until = tl.load(known.query_places_ptr + batch * W + query, mask=rows, other=0).to(tl.int64)
    return tl.where(rows[:, None] & (place[None, :] <= until[:, None]), logits, -float("inf"))


@triton.jit
def _key_tile(keys, known, first, high, head, N, TILE: tl.constexpr):
    """Keys of a head from `first` on, 0 where not valid, and their positions, NOWHERE where not valid."""
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    index = first + tl.arange(0, TILE.BLOCK_N)
    place = tl.where(index < high, 0, NOWHERE)
    if known.places_ptr is not None:
        place = tl.load(known.places_ptr + head * N + index, mask=index < high, other=NOWHERE)
    column = tl.arange(0, TILE.BD)[None, :]
    keys_ptr = keys.ptr + (head // HEADS) * keys.stride_b + (head % HEADS) * keys.stride_h
    keys_ptr += tl.full([], 1, tl.int64) * first * keys.stride_t
    spot = keys_ptr + tl.arange(0, TILE.BLOCK_N)[:, None] * keys.stride_t + column
    return tl.load(spot, mask=(place < NOWHERE)[:, None] & (column < D), other=0.0), place


@triton.jit
def _biases(bias_ptr, head_start, first, high, BLOCK_N: tl.constexpr):
    """Addends of the base-2 logits of the keys of `_key_tile`; None without."""
    if bias_ptr is None:
        return
    else:
        index = first + tl.arange(0, BLOCK_N)
        return _bias2(bias_ptr + head_start, index, index < high)


@triton.jit
def _lse_kernel(
    q: View, keys: View, known: Known, tops_ptr, totals_ptr, scaling: Scaling, W, N, keys_per_split, TILE: tl.constexpr
):
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    ROWS: tl.constexpr = TILE.ROWS
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(2).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    low = tl.program_id(0) * keys_per_split
    high = tl.minimum(low + keys_per_split, N)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(low, high, BLOCK_N):
        k, place = _key_tile(keys, known, first, high, head, N, TILE)
        bias = _biases(known.bias_ptr, head * N, first, high, BLOCK_N)
        logits = _logit_tile(q, k, row, place, bias, known, batch, kv, scaling, W, TILE)
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
    spot = (head * tl.num_programs(0) + tl.program_id(0)) * W * G + row
    tl.store(tops_ptr + spot, top, mask=row < W * G)
    tl.store(totals_ptr + spot, total, mask=row < W * G)


@triton.jit
def _merge_kernel(
    tops_ptr, totals_ptr, mass_ptr, query_valid_ptr, lse_ptr, shares_ptr, W, SPLITS, HEADS: tl.constexpr,
    G: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = row < W * G
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if mass_ptr is not None:
        mass = tl.load(mass_ptr + (batch * HEADS * G + kv * G + row % G) * W + row // G, mask=rows, other=0.0)
        top = mass * LOG2E
        total = tl.where(mass == -float("inf"), 0.0, 1.0)
    for split in range(0, SPLITS):
        place = (head * SPLITS + split) * W * G + row
        more = tl.load(tops_ptr + place, mask=rows, other=-float("inf"))
        new_top = tl.maximum(top, more)
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor)
        total += tl.load(totals_ptr + place, mask=rows, other=0.0) * tl.exp2(more - floor)
        top = new_top
    tl.store(lse_ptr + head * W * G + row, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=rows)
    queries = W
    asks = rows
    if query_valid_ptr is not None:
        every = tl.arange(0, QUERIES)
        flags = tl.load(query_valid_ptr + batch * W + every, mask=every < W, other=0) != 0
        queries = tl.maximum(tl.sum(flags.to(tl.int32), 0), 1)
        asks = tl.load(query_valid_ptr + batch * W + row // G, mask=rows, other=0) != 0
    share = tl.where(asks & (total > 0), 1.0 / (queries * G).to(tl.float32), 0.0)
    tl.store(shares_ptr + head * W * G + row, share, mask=rows)


@triton.jit
def _column_kernel(
    q: View, keys: View, known: Known, lse_ptr, shares_ptr, scores_ptr, scaling: Scaling, W, N, TILE: tl.constexpr
):
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    ROWS: tl.constexpr = TILE.ROWS
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, place = _key_tile(keys, known, tl.program_id(0) * BLOCK_N, N, head, N, TILE)
    bias = _biases(known.bias_ptr, head * N, tl.program_id(0) * BLOCK_N, N, BLOCK_N)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, W * G, ROWS):
        row = first + tl.arange(0, ROWS)
        logits = _logit_tile(q, k, row, place, bias, known, batch, kv, scaling, W, TILE)
        lse = tl.load(lse_ptr + head * W * G + row, mask=row < W * G, other=0.0)
        share = tl.load(shares_ptr + head * W * G + row, mask=row < W * G, other=0.0)
        lse = tl.where(share > 0, lse, 0.0)
        logits = tl.where(share[:, None] > 0, logits - lse[:, None], -float("inf"))
        sums += tl.sum(tl.exp2(logits) * share[:, None], 0)
    tl.store(scores_ptr + head * N + index, sums, mask=index < N)


def window_scores(
    *, q: Tensor, keys: Tensor, scale: float, softcap: float | None = None, positions: Tensor | None = None,
    query_positions: Tensor | None = None, valid: Tensor | None = None, query_valid: Tensor | None = None,
    log_mass: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean attention weight that W queries give each key.

    Args:
        q: [B, Hq, W, D], keys: [B, Hkv, N, D]: any strides, unit stride along D.  valid: [B, Hkv, N] bool.
        positions: [B, Hkv, N] int32 and query_positions: [B, W] int: a query sees keys up to its own position.
        query_valid: [B, W] bool, the mean runs over these.  log_mass: [B, Hq, W] fp32 of the evicted tokens.
        bias: [B, Hkv, N] fp32, addends of the logits.
    Returns: [B, Hkv, N] fp32.  Cost: three launches, no host sync.
    """
    batch, num_heads, num, dim = q.shape
    heads, length = keys.shape[1:3]
    groups = check_groups("window_scores", num_heads, heads)
    check_shape("window_scores", "keys", keys, (batch, heads, length, dim))
    check_head_dim("window_scores", dim)
    check_like("window_scores", (batch, heads, length), positions=positions, valid=valid, bias=bias)
    check_like("window_scores", (batch, num), query_positions=query_positions, query_valid=query_valid)
    check_like("window_scores", (batch, num_heads, num), log_mass=log_mass)
    assert q.stride(-1) == keys.stride(-1) == 1 and (positions is None) == (query_positions is None)
    scores = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    if not scores.numel() or not num:
        return scores.zero_()
    width = pow2(dim, 16)
    tile, warps, depth = BLOCKS[width]
    rows = min(MAX_ROWS, pow2(num * groups, 16))
    split = triton.cdiv(max(LEAST_KEYS, triton.cdiv(length, MAX_SPLITS)), tile) * tile
    splits = triton.cdiv(length, split)
    tops, totals = torch.empty(2, batch, heads, splits, num * groups, dtype=torch.float32, device=q.device)
    lse, shares = torch.empty(2, batch, heads, num * groups, dtype=torch.float32, device=q.device)
    tiles, places = triton.cdiv(num * groups, rows), positions  # what is not valid comes after every query
    if valid is not None:
        places = torch.where(valid, 0 if positions is None else positions, NOWHERE.value).to(torch.int32)
    inputs = View.of(q), View.of(keys), Known(places, query_positions, bias)
    numbers, sizes = (Scaling(scale, softcap), num, length), Tile(heads, groups, dim, width, rows, tile)
    launch = {"TILE": sizes, "num_warps": warps, "num_stages": stages(depth)}
    _lse_kernel[(splits, tiles, batch * heads)](*inputs, tops, totals, *numbers, split, **launch)
    _merge_kernel[(tiles, batch * heads)](
        tops, totals, log_mass, None if query_valid is None else query_valid.view(torch.uint8), lse, shares, num,
        splits, HEADS=heads, G=groups, ROWS=rows, QUERIES=pow2(num),
    )  # fmt: skip
    _column_kernel[(triton.cdiv(length, tile), batch * heads)](*inputs, lse, shares, scores, *numbers, **launch)
    return scores
