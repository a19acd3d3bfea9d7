"""Split softmax for one query per sequence: device functions of `decode_attention` and `vector_decode`.

A partial (top, total, acc) stands for a set of tokens: top [M] the largest base-2 logit, total [M] = sum 2^(logit-top),
acc [M, D] = sum 2^(logit-top) v. The evicted set is one more partial (see `_evicted`). Rows are the query heads of
one KV head, padded to M. A pair is a (sequence, KV head); its pointers are already offset when they get here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import LN2, _dot, _logits2, _softmax_update


@triton.jit
def _rows_mask(inside, cols, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask of a row-wise tile; over rows only where the head fills the block, which keeps 16-byte copies."""
    if D == BLOCK_D:
        return inside[:, None]
    else:
        return inside[:, None] & (cols < D)[None, :]


@triton.jit
def _load_query(q_ptr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    mask = _rows_mask(rows < G, cols, D, BLOCK_D)
    return tl.load(q_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_slots(
    top, total, acc, q, keys_ptr, values_ptr, logits_ptr, start, stop, pool, scale, softcap,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Add slots [start, stop) to a partial; if logits_ptr [G, pool] is given, write the base-2 logits there."""
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        inside = slot < stop
        mask = _rows_mask(inside, cols, D, BLOCK_D)
        offset = slot[:, None] * D + cols[None, :]
        k = tl.load(keys_ptr + offset, mask=mask, other=0.0)
        logits = _logits2(_dot(q, tl.trans(k), INTERP), scale, softcap, HAS_CAP)
        if logits_ptr is not None:
            place = rows.to(tl.int64)[:, None] * pool + slot[None, :]
            tl.store(logits_ptr + place, logits, mask=(rows < G)[:, None] & inside[None, :])
        logits = tl.where(inside[None, :], logits, -float("inf"))
        v = tl.load(values_ptr + offset, mask=mask, other=0.0)
        top, total, acc, weights = _softmax_update(top, total, acc, logits)
        acc += _dot(weights.to(v.dtype), v, INTERP)
    return top, total, acc


@triton.jit
def _attend_keys(
    q_ptr, keys_ptr, positions_ptr, cos_ptr, sin_ptr, logits_ptr, start, stop, pool, scale, softcap,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_A: tl.constexpr,
    HAS_CAP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Partial of slots [start, stop) with k~ in place of the value, in halves: top, total, first and second half."""
    HALF: tl.constexpr = D // 2
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_H)
    heads = _rows_mask(rows < G, cols, HALF, BLOCK_H)
    q_first = tl.load(q_ptr + rows[:, None] * D + cols[None, :], mask=heads, other=0.0)
    q_second = tl.load(q_ptr + rows[:, None] * D + HALF + cols[None, :], mask=heads, other=0.0)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc_first, acc_second = tl.zeros([M, BLOCK_H], tl.float32), tl.zeros([M, BLOCK_H], tl.float32)
    for begin in range(start, stop, BLOCK_A):
        slot = begin + tl.arange(0, BLOCK_A)
        inside = slot < stop
        mask = _rows_mask(inside, cols, HALF, BLOCK_H)
        place = slot[:, None] * D + cols[None, :]
        first = tl.load(keys_ptr + place, mask=mask, other=0.0)
        second = tl.load(keys_ptr + HALF + place, mask=mask, other=0.0)
        products = _dot(q_first, tl.trans(first), INTERP) + _dot(q_second, tl.trans(second), INTERP)
        logits = _logits2(products, scale, softcap, HAS_CAP)
        if logits_ptr is not None:
            spot = rows.to(tl.int64)[:, None] * pool + slot[None, :]
            tl.store(logits_ptr + spot, logits, mask=(rows < G)[:, None] & inside[None, :])
        logits = tl.where(inside[None, :], logits, -float("inf"))
        position = tl.load(positions_ptr + slot, mask=inside, other=0).to(tl.int64)
        angle = position[:, None] * HALF + cols[None, :]
        c = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        x, y = first.to(tl.float32), second.to(tl.float32)
        new_top, total, acc_first, weights = _softmax_update(top, total, acc_first, logits)
        acc_second *= tl.exp2(top - tl.where(new_top == -float("inf"), 0.0, new_top))[:, None]
        top = new_top
        weights = weights.to(first.dtype)
        acc_first += _dot(weights, (x * c + y * s).to(first.dtype), INTERP)
        acc_second += _dot(weights, (y * c - x * s).to(first.dtype), INTERP)
    return top, total, acc_first, acc_second


@triton.jit
def _attend_token(top, total, acc, q, k, v, scale, softcap, HAS_CAP: tl.constexpr):
    """Add one token, k and v [M, BLOCK_D] with equal rows, to a partial. Returns the partial and its logits [M]."""
    products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    logit = _logits2(products, scale, softcap, HAS_CAP)
    new_top = tl.maximum(top, logit)
    decay, weight = tl.exp2(top - new_top), tl.exp2(logit - new_top)
    acc = acc * decay[:, None] + weight[:, None] * v.to(tl.float32)
    return new_top, total * decay + weight, acc, logit


@triton.jit
def _append_token(
    top, total, acc, q, k_ptr, v_ptr, keys_ptr, values_ptr, positions_ptr, logits_ptr, length, position,
    capacity, pool, scale, softcap, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Add the new token to a partial and store it in slot `length`, if there is one."""
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    # Every row loads the same token, so that loads are 16 bytes wide and k has the layout of q.
    token = cols[None, :] + tl.zeros([M, 1], tl.int32)
    inside = tl.broadcast_to((cols < D)[None, :], M, BLOCK_D)
    k = tl.load(k_ptr + token, mask=inside, other=0.0).to(keys_ptr.dtype.element_ty)
    v = tl.load(v_ptr + token, mask=inside, other=0.0).to(values_ptr.dtype.element_ty)
    free = length < capacity
    once = inside & (rows == 0)[:, None] & free
    tl.store(keys_ptr + length * D + token, k, mask=once)
    tl.store(values_ptr + length * D + token, v, mask=once)
    tl.store(positions_ptr + length, position.to(tl.int32), mask=free)
    top, total, acc, logit = _attend_token(top, total, acc, q, k, v, scale, softcap, HAS_CAP)
    if logits_ptr is not None:
        tl.store(logits_ptr + rows.to(tl.int64) * pool + length, logit, mask=(rows < G) & free)
    return top, total, acc


@triton.jit
def _store_partial(
    accs_ptr, tops_ptr, totals_ptr, part, top, total, acc,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write partial number `part` to accs [parts, G, D], tops and totals [parts, G]."""
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    row = part * G + rows
    tl.store(accs_ptr + row[:, None] * D + cols[None, :], acc, mask=(rows < G)[:, None] & (cols < D)[None, :])
    tl.store(tops_ptr + row, top, mask=rows < G)
    tl.store(totals_ptr + row, total, mask=rows < G)


@triton.jit
def _store_halves(
    accs_ptr, tops_ptr, totals_ptr, part, top, total, first, second,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`_store_partial` of an acc in halves."""
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_H)
    row = part * G + rows
    place, mask = row[:, None] * D + cols[None, :], (rows < G)[:, None] & (cols < D // 2)[None, :]
    tl.store(accs_ptr + place, first, mask=mask)
    tl.store(accs_ptr + D // 2 + place, second, mask=mask)
    tl.store(tops_ptr + row, top, mask=rows < G)
    tl.store(totals_ptr + row, total, mask=rows < G)


@triton.jit
def _merge_tops(tops_ptr, totals_ptr, FIRST: tl.constexpr, COUNT: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """Of partials [FIRST, FIRST + COUNT): common top [M], total [M] and the weight [COUNT, M] of each acc."""
    rows = tl.arange(0, M)
    index = (FIRST + tl.arange(0, COUNT))[:, None] * G + rows[None, :]
    mask = (rows < G)[None, :]
    tops = tl.load(tops_ptr + index, mask=mask, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(totals_ptr + index, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top)[None, :])
    return top, tl.sum(weights * totals, 0), weights


@triton.jit
def _merge_accs(
    accs_ptr, weights, cols,
    FIRST: tl.constexpr, COUNT: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Weighted sum [M, cols] of the accs of partials [FIRST, FIRST + COUNT)."""
    rows = tl.arange(0, M)[None, :, None]
    index = (FIRST + tl.arange(0, COUNT))[:, None, None] * G + rows
    place = index * D + cols[None, None, :]
    mask = (rows < G) & (cols < D)[None, None, :]
    return tl.sum(tl.load(accs_ptr + place, mask=mask, other=0.0, cache_modifier=".cg") * weights[:, :, None], 0)


@triton.jit
def _weigh_keys(
    keys_ptr, weight_ptr, cols, dtype: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, MERGE_D: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Columns `cols` [MERGE_D] of keys [G, D], rounded to dtype, times weight [D, D]."""
    rows = tl.arange(0, M)
    product = tl.zeros([M, MERGE_D], tl.float32)
    for first in range(0, D, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        heads = (rows < G)[:, None] & (dims < D)[None, :]
        spot = keys_ptr + rows[:, None] * D + dims[None, :]
        key = tl.load(spot, mask=heads, other=0.0, cache_modifier=".cg").to(dtype)
        inside = (dims < D)[:, None] & (cols < D)[None, :]
        weight = tl.load(weight_ptr + dims[:, None] * D + cols[None, :], mask=inside, other=0.0)
        product += _dot(key, weight.to(dtype), INTERP)
    return product


@triton.jit
def _mix(top_a, total_a, top_b, total_b):
    """Two sets together: log2-sum-exp [M] (0 if both are empty) and the factors of their accs in the average."""
    top = tl.maximum(top_a, top_b)
    floor = tl.where(top == -float("inf"), 0.0, top)
    scale_a, scale_b = tl.exp2(top_a - floor), tl.exp2(top_b - floor)
    total = scale_a * total_a + scale_b * total_b
    divisor = tl.where(total > 0, total, 1.0)  # an empty set weighs nothing: its scale is zero
    return floor + tl.log2(divisor), scale_a / divisor, scale_b / divisor


@triton.jit
def _store_lse(lse_ptr, top, total, G: tl.constexpr, M: tl.constexpr):
    """Natural log-sum-exp of a partial; -inf for an empty one."""
    rows = tl.arange(0, M)
    tl.store(lse_ptr + rows, (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, mask=rows < G)


@triton.jit
def _add_attention(
    attention_ptr, logits_ptr, lse2, length, pool, G: tl.constexpr, M: tl.constexpr, BLOCK_S: tl.constexpr
):
    """attention[slot] += mean over the group of 2^(logit - lse2) for slots [0, length)."""
    rows = tl.arange(0, M)
    for first in range(0, length, BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        inside = slot < length
        mask = (rows < G)[:, None] & inside[None, :]
        place = rows.to(tl.int64)[:, None] * pool + slot[None, :]
        logits = tl.load(logits_ptr + place, mask=mask, other=-float("inf"), cache_modifier=".cg")
        share = tl.sum(tl.exp2(logits - lse2[:, None]), 0) / G
        before = tl.load(attention_ptr + slot, mask=inside, other=0.0)
        tl.store(attention_ptr + slot, before + share, mask=inside)


@triton.jit
def _count_token(lengths_ptr, seen_ptr, pair, held, HEADS: tl.constexpr):
    """The token is stored: lengths becomes `held`; the first head of a sequence also counts it in seen."""
    tl.store(lengths_ptr + pair, held)
    if pair % HEADS == 0:
        place = seen_ptr + pair // HEADS
        tl.store(place, tl.load(place) + 1)
