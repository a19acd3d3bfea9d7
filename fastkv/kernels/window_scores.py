"""Mean attention weight that the last W queries give each key: SnapKV (arXiv:2404.14469) before pooling, TOVA.

    s[b, h, n] = mean over valid queries w and heads g of exp(l[g, w, n]) / (sum_m exp(l[g, w, m]) + mass[g, w])

Twin of `reference.window_attention` where a query sees a key iff the key is valid and not later than the query; `mass`
is that of the evicted tokens. TOVA is W = 1, averaged over KV heads by the caller. Rows are (query, head of the group).

Launches: partial log-sums per split of the keys; their merge, with the mass; column sums, keys in registers.
Bytes: keys twice, 8 bytes per row and split, 4 N out.
Does not handle: more than one window in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_groups, check_shape
from ._arguments import Scaling
from ._attention import LOG2E, _bias2, _dot, _logits2
from ._launch import check_head_dim, check_like, pow2, stages

# padded head_dim: (keys per tile, warps, stages)
BLOCKS = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 8, 2), 512: (32, 8, 1)}
MAX_ROWS = 64  # queries times heads per tile
LEAST_KEYS = 512  # of a split
MAX_SPLITS = 32
NOWHERE = tl.constexpr(2**31 - 1)  # the position of what is not a token: after every query


@triton.jit
def _logit_tile(
    q_ptr, k, row, place, bias, query_places_ptr, batch, kv, scaling, W,
    stride_qb, stride_qh, stride_qt,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of rows (query, head of the group) and the keys k; -inf where not seen."""
    rows = row < W * G
    query = (row // G).to(tl.int64)
    column = tl.arange(0, BD)[None, :]
    q_ptrs = q_ptr + batch * stride_qb + (kv * G + row % G) * stride_qh + query * stride_qt
    q = tl.load(q_ptrs[:, None] + column, mask=rows[:, None] & (column < D), other=0.0)
    logits = _logits2(_dot(q, tl.trans(k)), scaling)
    if bias is not None:
        logits += bias[None, :]
    until = tl.full([1], NOWHERE - 1, tl.int64)
    if CAUSAL:
        until = tl.load(query_places_ptr + batch * W + query, mask=rows, other=0).to(tl.int64)
    return tl.where(rows[:, None] & (place[None, :] <= until[:, None]), logits, -float("inf"))


@triton.jit
def _key_tile(
    keys_ptr, places_ptr, first, high, head, batch, kv, N, stride_kb, stride_kh, stride_kt,
    D: tl.constexpr, BD: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """Keys from `first` on, 0 where not valid, and their positions, NOWHERE where not valid."""
    index = first + tl.arange(0, BLOCK_N)
    place = tl.where(index < high, 0, NOWHERE)
    if HAS_PLACES:
        place = tl.load(places_ptr + head * N + index, mask=index < high, other=NOWHERE)
    column = tl.arange(0, BD)[None, :]
    keys_ptr += batch * stride_kb + kv * stride_kh + tl.full([], 1, tl.int64) * first * stride_kt
    spot = keys_ptr + tl.arange(0, BLOCK_N)[:, None] * stride_kt + column
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
    q_ptr, keys_ptr, places_ptr, bias_ptr, query_places_ptr, tops_ptr, totals_ptr,
    scaling: Scaling, W, N, keys_per_split, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    low = tl.program_id(0) * keys_per_split
    high = tl.minimum(low + keys_per_split, N)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(low, high, BLOCK_N):
        k, place = _key_tile(
            keys_ptr, places_ptr, first, high, head, batch, kv, N, stride_kb, stride_kh, stride_kt,
            D, BD, BLOCK_N, HAS_PLACES,
        )  # fmt: skip
        bias = _biases(bias_ptr, head * N, first, high, BLOCK_N)
        logits = _logit_tile(
            q_ptr, k, row, place, bias, query_places_ptr, batch, kv, scaling, W, stride_qb, stride_qh, stride_qt,
            G, D, BD, CAUSAL,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
    spot = (head * tl.num_programs(0) + tl.program_id(0)) * W * G + row
    tl.store(tops_ptr + spot, top, mask=row < W * G)
    tl.store(totals_ptr + spot, total, mask=row < W * G)


@triton.jit
def _merge_kernel(
    tops_ptr, totals_ptr, mass_ptr, query_valid_ptr, lse_ptr, shares_ptr, W, SPLITS,
    HEADS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    HAS_MASS: tl.constexpr, HAS_QUERIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = row < W * G
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_MASS:
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
    if HAS_QUERIES:
        every = tl.arange(0, QUERIES)
        flags = tl.load(query_valid_ptr + batch * W + every, mask=every < W, other=0) != 0
        queries = tl.maximum(tl.sum(flags.to(tl.int32), 0), 1)
        asks = tl.load(query_valid_ptr + batch * W + row // G, mask=rows, other=0) != 0
    share = tl.where(asks & (total > 0), 1.0 / (queries * G).to(tl.float32), 0.0)
    tl.store(shares_ptr + head * W * G + row, share, mask=rows)


@triton.jit
def _column_kernel(
    q_ptr, keys_ptr, places_ptr, bias_ptr, query_places_ptr, lse_ptr, shares_ptr, scores_ptr,
    scaling: Scaling, W, N, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, place = _key_tile(
        keys_ptr, places_ptr, tl.program_id(0) * BLOCK_N, N, head, batch, kv, N, stride_kb, stride_kh, stride_kt,
        D, BD, BLOCK_N, HAS_PLACES,
    )  # fmt: skip
    bias = _biases(bias_ptr, head * N, tl.program_id(0) * BLOCK_N, N, BLOCK_N)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, W * G, ROWS):
        row = first + tl.arange(0, ROWS)
        logits = _logit_tile(
            q_ptr, k, row, place, bias, query_places_ptr, batch, kv, scaling, W, stride_qb, stride_qh, stride_qt,
            G, D, BD, CAUSAL,
        )  # fmt: skip
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
    causal, tiles = positions is not None, triton.cdiv(num * groups, rows)
    places = positions  # what is not valid comes after every query
    if valid is not None:
        places = torch.where(valid, 0 if positions is None else positions, NOWHERE.value).to(torch.int32)
    inputs = (q, keys, scores if places is None else places, bias, query_positions if causal else scores)
    strides = (*q.stride()[:3], *keys.stride()[:3])
    sizes = {"HEADS": heads, "G": groups, "D": dim, "BD": width, "ROWS": rows, "BLOCK_N": tile, "CAUSAL": causal}
    sizes |= {"HAS_PLACES": places is not None}
    launch = {"num_warps": warps, "num_stages": stages(depth)}
    _lse_kernel[(splits, tiles, batch * heads)](
        *inputs, tops, totals, Scaling(scale, softcap), num, length, split, *strides, **sizes, **launch
    )
    _merge_kernel[(tiles, batch * heads)](
        tops, totals, tops if log_mass is None else log_mass,
        tops if query_valid is None else query_valid.view(torch.uint8), lse, shares, num, splits,
        HEADS=heads, G=groups, ROWS=rows, QUERIES=pow2(num), HAS_MASS=log_mass is not None,
        HAS_QUERIES=query_valid is not None,
    )  # fmt: skip
    _column_kernel[(triton.cdiv(length, tile), batch * heads)](
        *inputs, lse, shares, scores, Scaling(scale, softcap), num, length, *strides, **sizes, **launch
    )
    return scores
