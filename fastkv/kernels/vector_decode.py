"""Decode attention where some slots hold only a key: their values are W^T k~, k~ the key before the rotary embedding.

    out = (sum_j e^{s_j} v_j + W^T sum_i e^{s_i} k~_i + Z_E f_E) / Z,   k~ = rotate(k, -position)

Source: VECTOR; linearity makes W one product per query instead of one per token. Split and merged as in
`decode_attention`, with the same device functions: program (pair, s) takes slots with values, then slots without,
then the moments; the last to arrive multiplies with W and merges. One launch. Twin: `reference.decode_step`.

Bytes per pair: 4 L D for slots with values, 2 A D for those without plus 4 A D of the cos and sin table (L2), 2 D^2
for W and for the moment matrix each. Does not handle: partial rotary dimensions, rotary scaling factors, and what
`decode_attention` does not. In float32 with head_dim 256 it spills registers (52 bytes on sm_90).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_shape
from ..reference import LayerState, Spec
from ._attention import (
    _add_attention,
    _append_token,
    _attend_slots,
    _barrier,
    _count_token,
    _dot,
    _home,
    _in_scratch,
    _load_accs,
    _load_query,
    _load_sums,
    _load_token,
    _logits2,
    _merge_accs,
    _merge_sums,
    _mix,
    _page,
    _rows_mask,
    _sink,
    _softmax_update,
    _store_lse,
    _store_nothing,
    _store_partial,
    _store_sums,
    _stretch,
)
from ._evicted import Terms, _moment_partial
from ._launch import (
    INTERPRET,
    MIN_ROWS,
    Workspace,
    addressed,
    attention_slots,
    check_contiguous,
    check_decode,
    check_like,
    check_rows,
    decode_outputs,
    num_programs,
    num_sms,
    on_hip,
    pool_of,
    pow2,
    stages,
)

# padded head_dim -> slots, matrix rows, stages
BLOCKS = {64: (64, 64, 3), 128: (64, 64, 2), 256: (32, 32, 2), 512: (16, 64, 2)}
FP32_BLOCKS = {64: (32, 16, 2), 128: (32, 16, 2), 256: (16, 16, 2)}
BLOCK_A = {64: 32, 128: 32, 256: 16, 512: 16}  # slots without values
MERGE_TILE = 2048  # elements of partials summed at once


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
def _store_halves(
    accs_ptr, tops_ptr, totals_ptr, part, top, total, first, second,
    PARTS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`_store_partial` of an acc in halves."""
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_H)
    place, mask = (part * G + rows)[:, None] * D + cols[None, :], (rows < G)[:, None] & (cols < D // 2)[None, :]
    tl.store(accs_ptr + place, first, mask=mask)
    tl.store(accs_ptr + D // 2 + place, second, mask=mask)
    _store_sums(tops_ptr, totals_ptr, part, top, total, PARTS, G, M)


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


@triton.jit(do_not_specialize=["page"])
def _vector_decode_kernel(
    q_ptr, keys_ptr, values_ptr, lengths_ptr, approx_keys_ptr, approx_positions_ptr, approx_lengths_ptr, weight_ptr,
    cos_ptr, sin_ptr, count_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, k_ptr, v_ptr, positions_ptr, seen_ptr,
    out_ptr, lse_retained_ptr, lse_evicted_ptr, attention_ptr, approx_attention_ptr, accs_ptr, tops_ptr, totals_ptr,
    logits_ptr, tickets_ptr, starts_ptr, approx_starts_ptr, sink_ptr, rows_ptr, page, slots, approx_slots, pool,
    approx_pool, scale, softcap,
    HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr,
    APPROX: tl.constexpr, MERGE_M: tl.constexpr, MERGE_D: tl.constexpr, ORDER: tl.constexpr, HAS_CAP: tl.constexpr,
    HIP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    # Partials: SPLITS of slots with values, APPROX of slots without, one of the moments, one place for the merged keys.
    PARTS: tl.constexpr = SPLITS + APPROX + (ORDER is not None)
    # A pair of the batch is pair `own` of its page or state; scratch and results follow the batch.
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, HEADS)
    if rows_ptr is not None:
        if row == 0:
            if split == 0:
                _store_nothing(out_ptr, lse_retained_ptr, lse_evicted_ptr, pair, G, M, D, BLOCK_D)
            return
    keys_ptr = _page(keys_ptr, row, page)
    values_ptr = _page(values_ptr, row, page)
    lengths_ptr = _page(lengths_ptr, row, page)
    positions_ptr = _page(positions_ptr, row, page)
    starts_ptr = _page(starts_ptr, row, page)
    attention_ptr = _page(attention_ptr, row, page)
    approx_keys_ptr = _page(approx_keys_ptr, row, page)
    approx_positions_ptr = _page(approx_positions_ptr, row, page)
    approx_lengths_ptr = _page(approx_lengths_ptr, row, page)
    approx_starts_ptr = _page(approx_starts_ptr, row, page)
    approx_attention_ptr = _page(approx_attention_ptr, row, page)
    seen_ptr = _page(seen_ptr, row, page)
    count_ptr = _page(count_ptr, row, page)
    matrix_ptr = _page(matrix_ptr, row, page)
    key_mean_ptr = _page(key_mean_ptr, row, page)
    value_mean_ptr = _page(value_mean_ptr, row, page)
    base, capacity = _stretch(starts_ptr, own, slots, HEADS)
    approx_base, approx_capacity = _stretch(approx_starts_ptr, own, approx_slots, HEADS)
    length, approx_length = tl.load(lengths_ptr + own), tl.load(approx_lengths_ptr + own)
    count = tl.load(count_ptr + own)
    q_ptr += pair * G * D
    out_ptr += pair * G * D
    keys_ptr += base * D
    values_ptr += base * D
    approx_logits_ptr = logits_ptr  # [G, pool], the slots with values first
    if logits_ptr is not None:
        approx_logits_ptr += pool - approx_pool
        approx_logits_ptr += _in_scratch(approx_starts_ptr, approx_base, pair, own, approx_slots, HEADS)
        logits_ptr += _in_scratch(starts_ptr, base, pair, own, slots, HEADS)
    accs_ptr += pair * (PARTS + 1) * G * D
    tops_ptr += pair * (PARTS + 1) * G
    totals_ptr += pair * (PARTS + 1) * G
    rows = tl.arange(0, M)

    if split < SPLITS:
        q = _load_query(q_ptr, G, M, D, BLOCK_D)
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, BLOCK_D], tl.float32)
        last = split == SPLITS - 1
        if k_ptr is not None:
            k = _load_token(k_ptr + pair * D, last, keys_ptr.dtype.element_ty, D, M, BLOCK_D)
            v = _load_token(v_ptr + pair * D, last, values_ptr.dtype.element_ty, D, M, BLOCK_D)
        share = tl.cdiv(length, SPLITS)
        top, total, acc = _attend_slots(
            top, total, acc, q, None, keys_ptr, values_ptr, None, None, None, logits_ptr, split * share,
            tl.minimum(split * share + share, length), pool, scale, softcap, G, M, D, BLOCK_D, BLOCK_N, HAS_CAP, INTERP,
        )  # fmt: skip
        if k_ptr is not None:
            if last:
                top, total, acc = _append_token(
                    top, total, acc, q, None, k, v, keys_ptr, values_ptr, None, None, None, positions_ptr + base,
                    logits_ptr, length, length + approx_length + count, capacity, pool, scale, softcap, G, M, D,
                    BLOCK_D, HAS_CAP,
                )  # fmt: skip
        _store_partial(accs_ptr, tops_ptr, totals_ptr, split, top, total, acc, PARTS, G, M, D, BLOCK_D)
    elif split < SPLITS + APPROX:
        share = tl.cdiv(approx_length, APPROX)
        start = (split - SPLITS) * share
        top, total, first, second = _attend_keys(
            q_ptr, approx_keys_ptr + approx_base * D, approx_positions_ptr + approx_base, cos_ptr, sin_ptr,
            approx_logits_ptr, start, tl.minimum(start + share, approx_length), pool, scale, softcap,
            G, M, D, BLOCK_D // 2, BLOCK_A, HAS_CAP, INTERP,
        )  # fmt: skip
        _store_halves(accs_ptr, tops_ptr, totals_ptr, split, top, total, first, second, PARTS, G, M, D, BLOCK_D // 2)
    elif ORDER is not None:
        top, total, acc = _moment_partial(
            q_ptr, key_mean_ptr + own * D, value_mean_ptr + own * D,
            matrix_ptr + own * D * D if ORDER == 1 else matrix_ptr, None, count, scale, softcap,
            G, M, D, BLOCK_D, BLOCK_K, ORDER, 0, HAS_CAP, INTERP,
        )  # fmt: skip
        _store_partial(accs_ptr, tops_ptr, totals_ptr, split, top, total, acc, PARTS, G, M, D, BLOCK_D)

    _barrier(HIP)  # orders every thread's stores before the ticket; Triton <= 3.8 would not
    if tl.atomic_add(tickets_ptr + pair, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        exact_tops, exact_totals = _load_sums(tops_ptr, totals_ptr, 0, SPLITS, SPLITS, PARTS, G, M)
        approx_tops, approx_totals = _load_sums(tops_ptr, totals_ptr, SPLITS, APPROX, APPROX, PARTS, G, M)
        exact_top, exact_total, shares = _merge_sums(exact_tops, exact_totals)
        approx_top, approx_total, approx_shares = _merge_sums(approx_tops, approx_totals)
        held_lse2, exact_factor, approx_factor = _mix(exact_top, exact_total, approx_top, approx_total)
        held_total = tl.where((exact_total > 0) | (approx_total > 0), 1.0, 0.0)
        held_top = tl.where(held_total > 0, held_lse2, -float("inf"))
        moment_top, moment_total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
        if ORDER is not None:
            last_top, last_total = _load_sums(tops_ptr, totals_ptr, SPLITS + APPROX, 1, 1, PARTS, G, M)
            moment_top, moment_total, _ = _merge_sums(last_top, last_total)
        lse2, held_factor, moment_factor = _mix(held_top, held_total, moment_top, moment_total)
        if sink_ptr is not None:
            lse2, rest = _sink(sink_ptr + (pair % HEADS) * G, lse2, G, M)
            held_factor, moment_factor = held_factor * rest, moment_factor * rest
        _store_lse(lse_retained_ptr + pair * G, held_top, held_total, G, M)
        _store_lse(lse_evicted_ptr + pair * G, moment_top, moment_total, G, M)

        merged_ptr = accs_ptr + PARTS * G * D
        for begin in range(0, D, MERGE_D):
            part = begin + tl.arange(0, MERGE_D)
            place, mask = rows[:, None] * D + part[None, :], (rows < G)[:, None] & (part < D)[None, :]
            accs = _load_accs(accs_ptr, part, SPLITS, APPROX, APPROX, G, M, D)
            tl.store(merged_ptr + place, _merge_accs(accs, approx_shares) * approx_factor[:, None], mask=mask)
        _barrier(HIP)  # merged keys are written before other threads read them
        weight_ptr += (pair % HEADS) * D * D
        for begin in range(0, D, MERGE_D):
            part = begin + tl.arange(0, MERGE_D)
            place, mask = rows[:, None] * D + part[None, :], (rows < G)[:, None] & (part < D)[None, :]
            dtype: tl.constexpr = q_ptr.dtype.element_ty
            accs = _load_accs(accs_ptr, part, 0, SPLITS, SPLITS, G, M, D)
            mixed = _weigh_keys(merged_ptr, weight_ptr, part, dtype, G, M, D, BLOCK_K, MERGE_D, INTERP)
            mixed += _merge_accs(accs, shares) * exact_factor[:, None]
            mixed *= held_factor[:, None]
            if ORDER is not None:
                moments_ptr = accs_ptr + (SPLITS + APPROX) * G * D
                moment = tl.load(moments_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
                mixed += moment * moment_factor[:, None]
            tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=mask)
        held = length
        if k_ptr is not None:
            held = tl.minimum(length + 1, capacity)
            _count_token(lengths_ptr, seen_ptr, own, held, HEADS)
        if attention_ptr is not None:
            _add_attention(attention_ptr + base, logits_ptr, lse2, held, capacity, pool, G, M, MERGE_M, BLOCK_S)
        if approx_attention_ptr is not None:
            _add_attention(
                approx_attention_ptr + approx_base, approx_logits_ptr, lse2, approx_length, approx_capacity, pool,
                G, M, MERGE_M, BLOCK_S,
            )  # fmt: skip
        tl.store(tickets_ptr + pair, 0)


def _constants(
    heads: int, groups: int, head_dim: int, splits: int, approx: int, order: int | None, capped: bool,
    dtype: torch.dtype, matrix: torch.dtype | None, hip: bool,
) -> tuple[dict, int, int]:  # fmt: skip
    """Constexpr arguments, warps and pipeline stages."""
    padded = pow2(head_dim, 64)
    exact = dtype == torch.float32
    block_n, block_k, num_stages = (FP32_BLOCKS if exact else BLOCKS)[padded]
    if matrix == torch.float32 and not exact:
        block_k = 32 if hip or padded > 256 else 16  # its exact product needs several times the registers
    merge_d = max(16, MERGE_TILE // (max(splits, approx, 2) * MIN_ROWS))
    constants = dict(
        HEADS=heads, G=groups, M=MIN_ROWS, D=head_dim, BLOCK_D=padded, BLOCK_N=block_n,
        BLOCK_A=min(BLOCK_A[padded], block_n), BLOCK_K=block_k, BLOCK_S=attention_slots(pow2(groups)), SPLITS=splits,
        APPROX=approx, MERGE_M=pow2(groups), MERGE_D=merge_d, ORDER=order, HAS_CAP=capped, HIP=hip,
    )  # fmt: skip
    return constants, 8 if padded > 256 or (exact and padded == 256) else 4, num_stages


def vector_decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_step` with tokens that have a key but no value, in one launch; shapes as in `reference.decode_step`.

    `state.recovery`: weight in the dtype of q or fp32, cos and sin fp32, rotate_half pairing. `state.scratch`:
    `Workspace.allocate(..., sets=2)` for the larger tier and the slots of both, made if it is empty. The position of
    the token is lengths + approx.lengths + count.

    Raises: FastKVError for shapes, strides or dtypes that are not as above.
    """
    op, exact, approx, moments, recovery = "decode_step", state.exact, state.approx, state.moments, state.recovery
    keys, values, starts = exact.keys, exact.values, exact.starts
    assert approx is not None and recovery is not None and values is not None
    if exact.bias is not None:
        raise FastKVError(
            f"{op} adds no bias beside tokens without values, got one {list(exact.bias.shape)}; use backend='reference'"
        )
    groups = check_decode(op, q, state, addressed(op, keys, starts), addressed(op, values, starts), approx.keys)
    stored, heads, slots, dim = addressed(op, keys, starts).shape
    check_shape(op, "approx.keys", addressed(op, approx.keys, approx.starts), (stored, heads, None, dim))
    check_shape(op, "weight", recovery.weight, (heads, dim, dim))
    check_shape(op, "cos", recovery.cos, (None, dim // 2))
    known = Terms.of(op, spec.evicted(state), dim)
    check_like(op, (heads * groups,), sink_logits=state.sink_logits)
    check_contiguous(op, q=q, k=k, v=v, weight=recovery.weight, cos=recovery.cos, sin=recovery.sin)
    page = check_rows(
        op, state, keys=keys, values=values, lengths=exact.lengths, approx_keys=approx.keys,
        approx_positions=approx.positions, approx_lengths=approx.lengths, count=moments.count,
        key_mean=known.key_mean, value_mean=known.value_mean, matrix=known.matrix, positions=exact.positions,
        seen=state.seen, attention=exact.attention, approx_attention=approx.attention, starts=starts,
        approx_starts=approx.starts,
    )  # fmt: skip
    batch = state.batch
    pairs, approx_slots, approx_pool = batch * heads, approx.keys.shape[-2], pool_of(batch, approx)
    splits, parts = (num_programs(2 * pairs, tier.limit, num_sms(q.device)) for tier in (exact, approx))
    pool = pool_of(batch, exact) + approx_pool
    collects = exact.attention is not None or approx.attention is not None
    room = Workspace.of(state.scratch)
    if room is None:
        most = max(exact.limit, approx.limit)
        room = Workspace.allocate(batch, heads, groups, most, dim, q.device, attention=collects, sets=2, pool=pool)
    out, lse_retained, lse_evicted = decode_outputs(q)
    constants, num_warps, num_stages = _constants(
        heads, groups, dim, splits, parts, known.order, spec.softcap is not None, q.dtype,
        None if known.matrix is None else known.matrix.dtype, on_hip(),
    )  # fmt: skip
    positions, seen = (exact.positions, state.seen) if k is not None else (None, None)
    _vector_decode_kernel[pairs, splits + parts + (known.order is not None)](
        q, keys, values, exact.lengths, approx.keys, approx.positions, approx.lengths, recovery.weight, recovery.cos,
        recovery.sin, moments.count, known.key_mean, known.value_mean, known.matrix, k, v, positions, seen, out,
        lse_retained, lse_evicted, exact.attention, approx.attention, room.accs, room.tops, room.totals,
        room.logits if collects else None, room.tickets, starts, approx.starts, state.sink_logits,
        state.rows, page, slots, approx_slots, pool, approx_pool, spec.scale, spec.softcap or 1.0,
        **constants, INTERP=INTERPRET, num_warps=num_warps, num_stages=stages(num_stages),
    )  # fmt: skip
    return out, lse_retained, lse_evicted
