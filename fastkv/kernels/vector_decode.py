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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_shape
from ..reference import LayerState, Spec
from ._arguments import EvictedPointers, Group, PartPointers, ResultPointers, Scaling, StatePointers, TokenPointers
from ._attention import (
    _add_attention,
    _append_token,
    _attend_slots,
    _barrier,
    _count_token,
    _dot,
    _empty,
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
    _of_token,
    _own_parts,
    _own_results,
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
    MIN_ROWS,
    addressed,
    attention_slots,
    check_contiguous,
    check_decode,
    check_rows,
    decode_outputs,
    num_programs,
    num_sms,
    on_hip,
    pool_of,
    pow2,
    stages,
    workspace,
)

# padded head_dim -> slots, matrix rows, stages
BLOCKS = {64: (64, 64, 3), 128: (64, 64, 2), 256: (32, 32, 2), 512: (16, 64, 2)}
FP32_BLOCKS = {64: (32, 16, 2), 128: (32, 16, 2), 256: (16, 16, 2)}
BLOCK_A = {64: 32, 128: 32, 256: 16, 512: 16}  # slots without values
MERGE_TILE = 2048  # elements of partials summed at once


@triton.jit
def _attend_keys(
    q_ptr, keys_ptr, positions_ptr, cos_ptr, sin_ptr, logits_ptr, start, stop, pool, scaling, GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Partial of slots [start, stop) with k~ in place of the value, in halves: top, total, first and second half."""
    G: tl.constexpr = GROUP.G
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    BLOCK_H: tl.constexpr = GROUP.BLOCK_D // 2
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
        products = _dot(q_first, tl.trans(first)) + _dot(q_second, tl.trans(second))
        logits = _logits2(products, scaling)
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
        acc_first += _dot(weights, (x * c + y * s).to(first.dtype))
        acc_second += _dot(weights, (y * c - x * s).to(first.dtype))
    return top, total, acc_first, acc_second


@triton.jit
def _store_halves(parts, part, top, total, first, second, PARTS: tl.constexpr, GROUP: tl.constexpr):
    """`_store_partial` of an acc in halves."""
    D: tl.constexpr = GROUP.D
    rows, cols = tl.arange(0, GROUP.M), tl.arange(0, GROUP.BLOCK_D // 2)
    place = (part * GROUP.G + rows)[:, None] * D + cols[None, :]
    mask = (rows < GROUP.G)[:, None] & (cols < D // 2)[None, :]
    tl.store(parts.accs_ptr + place, first, mask=mask)
    tl.store(parts.accs_ptr + D // 2 + place, second, mask=mask)
    _store_sums(parts, part, top, total, PARTS, GROUP)


@triton.jit
def _weigh_keys(
    keys_ptr, weight_ptr, cols, dtype: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, MERGE_D: tl.constexpr,
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
        product += _dot(key, weight.to(dtype))
    return product


class Sizes(NamedTuple):
    """Slots of a pair, or of a sequence where its heads have unequally many, with and without values; of the whole
    batch, all and those without values.
    """

    slots: Any
    approx_slots: Any
    pool: Any
    approx_pool: Any


class RecoveryPointers(NamedTuple):
    """Of `Recovery`: weight [Hkv, D, D], cos and sin [P, D / 2]."""

    weight_ptr: Any
    cos_ptr: Any
    sin_ptr: Any


class VectorTile(NamedTuple):
    """Constants of a launch: slots with values, without, and rows of matrices at a time; SPLITS programs for the first,
    APPROX for the second; MERGE_M query heads and MERGE_D columns while partials are merged.
    """

    HEADS: int
    GROUP: Group
    BLOCK_N: int
    BLOCK_A: int
    BLOCK_K: int
    BLOCK_S: int
    SPLITS: int
    APPROX: int
    MERGE_M: int
    MERGE_D: int


@triton.jit(do_not_specialize=["page"])
def _vector_decode_kernel(
    token: TokenPointers, state: StatePointers, approx: StatePointers, recovery: RecoveryPointers,
    evicted: EvictedPointers, results: ResultPointers, parts: PartPointers, logits_ptr, sink_ptr, rows_ptr, page,
    sizes: Sizes, scaling: Scaling, TILE: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = TILE.HEADS
    GROUP: tl.constexpr = TILE.GROUP
    SPLITS: tl.constexpr = TILE.SPLITS
    APPROX: tl.constexpr = TILE.APPROX
    MERGE_D: tl.constexpr = TILE.MERGE_D
    G: tl.constexpr = GROUP.G
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    # Partials: SPLITS of slots with values, APPROX of slots without, one of the moments, one place for the merged keys.
    PARTS: tl.constexpr = SPLITS + APPROX + (evicted.key_mean_ptr is not None)
    # A pair of the batch is pair `own` of its page or state; scratch and results follow the batch.
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, HEADS)
    results = _own_results(results, pair, GROUP)
    if rows_ptr is not None:
        if row == 0:
            if split == 0:
                _store_nothing(results, GROUP)
            return
    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])
    approx = StatePointers(*[p if p is None else _page(p, row, page) for p in approx])
    evicted = EvictedPointers(*[p if p is None else _page(p, row, page) for p in evicted])
    base, capacity = _stretch(state.starts_ptr, own, sizes.slots, HEADS)
    approx_base, approx_capacity = _stretch(approx.starts_ptr, own, sizes.approx_slots, HEADS)
    length, approx_length = tl.load(state.lengths_ptr + own), tl.load(approx.lengths_ptr + own)
    count = tl.load(evicted.count_ptr + own)
    q_ptr = _of_token(token.q_ptr, token.q_row, pair, G * D, HEADS)
    out_ptr = results.out_ptr
    slots = StatePointers(
        state.keys_ptr + base * D,
        state.values_ptr + base * D,
        None,
        None,
        *[p if p is None else p + base for p in (state.bias_ptr, state.positions_ptr, state.attention_ptr)],
    )
    approx_logits_ptr = logits_ptr  # [G, pool], the slots with values first
    if logits_ptr is not None:
        approx_logits_ptr += sizes.pool - sizes.approx_pool
        approx_logits_ptr += _in_scratch(approx.starts_ptr, approx_base, pair, own, sizes.approx_slots, HEADS)
        logits_ptr += _in_scratch(state.starts_ptr, base, pair, own, sizes.slots, HEADS)
    tickets_ptr = parts.tickets_ptr + pair
    parts = _own_parts(parts, pair, PARTS + 1, GROUP)
    rows = tl.arange(0, M)

    if split < SPLITS:
        q = _load_query(q_ptr, GROUP)
        top, total, acc = _empty(M, GROUP.BLOCK_D)
        last = split == SPLITS - 1
        if token.k_ptr is not None:
            k_ptr = _of_token(token.k_ptr, token.k_row, pair, D, HEADS)
            v_ptr = _of_token(token.v_ptr, token.v_row, pair, D, HEADS)
            k = _load_token(k_ptr, last, slots.keys_ptr.dtype.element_ty, GROUP)
            v = _load_token(v_ptr, last, slots.values_ptr.dtype.element_ty, GROUP)
        share = tl.cdiv(length, SPLITS)
        stop = tl.minimum(split * share + share, length)
        top, total, acc = _attend_slots(
            top, total, acc, q, None, slots, logits_ptr, split * share, stop, sizes.pool, scaling, GROUP, TILE.BLOCK_N
        )
        if token.k_ptr is not None:
            if last:
                top, total, acc = _append_token(
                    top, total, acc, q, None, k, v, slots, logits_ptr, length, length + approx_length + count, capacity,
                    sizes.pool, scaling, GROUP,
                )  # fmt: skip
        _store_partial(parts, split, top, total, acc, PARTS, GROUP)
    elif split < SPLITS + APPROX:
        share = tl.cdiv(approx_length, APPROX)
        start = (split - SPLITS) * share
        top, total, first, second = _attend_keys(
            q_ptr, approx.keys_ptr + approx_base * D, approx.positions_ptr + approx_base, recovery.cos_ptr,
            recovery.sin_ptr, approx_logits_ptr, start, tl.minimum(start + share, approx_length), sizes.pool, scaling,
            GROUP, TILE.BLOCK_A,
        )  # fmt: skip
        _store_halves(parts, split, top, total, first, second, PARTS, GROUP)
    elif evicted.key_mean_ptr is not None:
        top, total, acc = _moment_partial(q_ptr, evicted, own, count, scaling, GROUP, TILE.BLOCK_K)
        _store_partial(parts, split, top, total, acc, PARTS, GROUP)

    _barrier(HIP)  # orders every thread's stores before the ticket; Triton <= 3.8 would not
    if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        of_slots, of_keys = tl.arange(0, SPLITS), SPLITS + tl.arange(0, APPROX)
        of_rest = SPLITS + APPROX + tl.arange(0, 1)
        exact_tops, exact_totals = _load_sums(parts, of_slots, of_slots >= 0, PARTS, GROUP)
        approx_tops, approx_totals = _load_sums(parts, of_keys, of_keys >= 0, PARTS, GROUP)
        exact_top, exact_total, shares = _merge_sums(exact_tops, exact_totals)
        approx_top, approx_total, approx_shares = _merge_sums(approx_tops, approx_totals)
        held_lse2, exact_factor, approx_factor = _mix(exact_top, exact_total, approx_top, approx_total)
        held_total = tl.where((exact_total > 0) | (approx_total > 0), 1.0, 0.0)
        held_top = tl.where(held_total > 0, held_lse2, -float("inf"))
        moment_top, moment_total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
        if evicted.key_mean_ptr is not None:
            last_top, last_total = _load_sums(parts, of_rest, of_rest >= 0, PARTS, GROUP)
            moment_top, moment_total, _ = _merge_sums(last_top, last_total)
        lse2, held_factor, moment_factor = _mix(held_top, held_total, moment_top, moment_total)
        if sink_ptr is not None:
            lse2, rest = _sink(sink_ptr + (pair % HEADS) * G, lse2, GROUP)
            held_factor, moment_factor = held_factor * rest, moment_factor * rest
        _store_lse(results.lse_retained_ptr, held_top, held_total, GROUP)
        _store_lse(results.lse_evicted_ptr, moment_top, moment_total, GROUP)

        merged_ptr = parts.accs_ptr + PARTS * G * D
        for begin in range(0, D, MERGE_D):
            part = begin + tl.arange(0, MERGE_D)
            place, mask = rows[:, None] * D + part[None, :], (rows < G)[:, None] & (part < D)[None, :]
            accs = _load_accs(parts, part, of_keys, of_keys >= 0, GROUP)
            tl.store(merged_ptr + place, _merge_accs(accs, approx_shares) * approx_factor[:, None], mask=mask)
        _barrier(HIP)  # merged keys are written before other threads read them
        weight_ptr = recovery.weight_ptr + (pair % HEADS) * D * D
        for begin in range(0, D, MERGE_D):
            part = begin + tl.arange(0, MERGE_D)
            place, mask = rows[:, None] * D + part[None, :], (rows < G)[:, None] & (part < D)[None, :]
            dtype: tl.constexpr = q_ptr.dtype.element_ty
            accs = _load_accs(parts, part, of_slots, of_slots >= 0, GROUP)
            mixed = _weigh_keys(merged_ptr, weight_ptr, part, dtype, G, M, D, TILE.BLOCK_K, MERGE_D)
            mixed += _merge_accs(accs, shares) * exact_factor[:, None]
            mixed *= held_factor[:, None]
            if evicted.key_mean_ptr is not None:
                moments_ptr = parts.accs_ptr + (SPLITS + APPROX) * G * D
                moment = tl.load(moments_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
                mixed += moment * moment_factor[:, None]
            tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=mask)
        held = length
        if token.k_ptr is not None:
            held = tl.minimum(length + 1, capacity)
            _count_token(state.lengths_ptr, state.seen_ptr, own, held, HEADS)
        if slots.attention_ptr is not None:
            _add_attention(
                slots.attention_ptr, logits_ptr, lse2, held, capacity, sizes.pool, TILE.MERGE_M, TILE.BLOCK_S, GROUP
            )
        if approx.attention_ptr is not None:
            _add_attention(
                approx.attention_ptr + approx_base, approx_logits_ptr, lse2, approx_length, approx_capacity, sizes.pool,
                TILE.MERGE_M, TILE.BLOCK_S, GROUP,
            )  # fmt: skip
        tl.store(tickets_ptr, 0)


def _constants(
    heads: int, groups: int, head_dim: int, splits: int, approx: int, dtype: torch.dtype,
    matrix: torch.dtype | None, hip: bool,
) -> tuple[VectorTile, int, int]:  # fmt: skip
    """Tile, warps and pipeline stages."""
    padded = pow2(head_dim, 64)
    exact = dtype == torch.float32
    block_n, block_k, num_stages = (FP32_BLOCKS if exact else BLOCKS)[padded]
    if matrix == torch.float32 and not exact:
        block_k = 32 if hip or padded > 256 else 16  # its exact product needs several times the registers
    merge_d = max(16, MERGE_TILE // (max(splits, approx, 2) * MIN_ROWS))
    tile = VectorTile(
        heads, Group(groups, MIN_ROWS, head_dim, padded), block_n, min(BLOCK_A[padded], block_n), block_k,
        attention_slots(pow2(groups)), splits, approx, pow2(groups), merge_d,
    )  # fmt: skip
    return tile, 8 if padded > 256 or (exact and padded == 256) else 4, num_stages


def vector_decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_step` with tokens that have a key but no value, in one launch: `state.recovery` has its weight in the
    dtype of q or fp32, cos and sin in fp32. The position of the token is lengths + approx.lengths + count.
    """
    op, exact, approx, moments, recovery = "decode_step", state.exact, state.approx, state.moments, state.recovery
    assert approx is not None and recovery is not None
    if exact.bias is not None:
        raise FastKVError(
            f"{op} adds no bias beside tokens without values, got one {list(exact.bias.shape)}; use backend='reference'"
        )
    groups, stored, heads, slots, dim = check_decode(op, q, k, v, state, approx.keys)
    check_shape(op, "approx.keys", addressed(op, approx.keys, approx.starts), (stored, heads, None, dim))
    check_shape(op, "weight", recovery.weight, (heads, dim, dim))
    check_shape(op, "cos", recovery.cos, (None, dim // 2))
    known = Terms.of(op, spec.evicted(state), dim)
    check_contiguous(op, weight=recovery.weight, cos=recovery.cos, sin=recovery.sin)
    appended = ("positions",) if k is not None else ()
    pointers = StatePointers.of(
        exact, "keys", "values", "attention", "lengths", "starts", *appended, seen=state.seen if appended else None
    )
    others = StatePointers.of(approx, "keys", "positions", "attention", "lengths", "starts")
    evicted = known.pointers._replace(count_ptr=moments.count)
    page = check_rows(op, state, pointers, others, evicted)
    batch = state.batch
    pairs, approx_slots, approx_pool = batch * heads, approx.keys.shape[-2], pool_of(batch, approx)
    splits, parts = (num_programs(2 * pairs, tier.limit, num_sms(q.device)) for tier in (exact, approx))
    pool = pool_of(batch, exact) + approx_pool
    collects = exact.attention is not None or approx.attention is not None
    scratch = state.scratch or workspace(heads * groups, state)
    matrix = evicted.matrix_ptr
    tile, num_warps, num_stages = _constants(
        heads, groups, dim, splits, parts, q.dtype, None if matrix is None else matrix.dtype, on_hip()
    )
    results = decode_outputs(q, out)
    _vector_decode_kernel[pairs, splits + parts + (known.order is not None)](
        TokenPointers.of(q, k, v), pointers, others, RecoveryPointers(recovery.weight, recovery.cos, recovery.sin),
        evicted, results, PartPointers(*scratch[:4]), scratch[4] if collects else None, state.sink_logits, state.rows,
        page, Sizes(slots, approx_slots, pool, approx_pool), Scaling(spec.scale, spec.softcap), TILE=tile, HIP=on_hip(),
        num_warps=num_warps, num_stages=stages(num_stages),
    )  # fmt: skip
    return tuple(results)
