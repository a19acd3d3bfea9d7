"""One query per sequence over the retained slots and the moments of the evicted tokens, append included: one launch.

    out = (sum_j e^{s_j} v_j + Z_E f_E) / (sum_j e^{s_j} + Z_E),   s_j = softcap(scale q.k_j)
    log Z_E = log n + scale q.k_mean,   f_E = v_mean + (scale / n) S^T q

or, with a spread or with centroids, what `_evicted` says; a learned sink adds e^sink to the sum below the line.
Source: MomentKV (arXiv:2606.01563, Eqs. 9, 11, 12); split softmax as in Flash-Decoding; the evicted set is one more
partial, so mixing is free. Program (pair, s) reads a share of the slots, program (pair, splits) the moments or
centroids, and the last of a pair to arrive merges; with many pairs one program does it all. Twins:
`fastkv.reference.decode_step`, `moment_estimate` and `centroid_estimate`.

Bytes per pair: 4 L D for keys and values in half precision, 2 L (D + 4) in 8 bits, 9 L D / 8 in 4; 2 D^2 for the matrix
(4 D^2 in fp32), 4 D a centroid.
Does not handle: more than 16 query heads per KV head, Dv != Dk, head_dim above 512 (256 in float32 and on AMD),
float64, windows, padding. In float32 with head_dim 256 it spills registers (250 bytes on sm_90).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import LayerState, Spec
from ._attention import (
    _add_attention,
    _append_token,
    _attend_slots,
    _barrier,
    _count_token,
    _home,
    _in_scratch,
    _load_accs,
    _load_query,
    _load_sums,
    _load_token,
    _merge_accs,
    _merge_sums,
    _mix,
    _page,
    _sink,
    _store_lse,
    _store_nothing,
    _store_partial,
    _stretch,
    _turned_query,
    _turned_rest,
)
from ._codes import _codes_of, _packed, _scales_of, _turned
from ._evicted import CENTROIDS, Terms, _evicted_partial
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
    chip_of,
    decode_outputs,
    num_programs,
    num_sms,
    on_hip,
    pool_of,
    pow2,
    stages,
)

# padded head_dim -> slots, matrix rows, stages
BLOCKS = {64: (64, 64, 3), 128: (64, 64, 3), 256: (32, 32, 3), 512: (16, 32, 3)}
FP32_BLOCKS = {64: (32, 32, 2), 128: (32, 32, 2), 256: (16, 16, 2)}
BLOCK_C = 16  # centroids at a time
MERGE_TILE = 16384  # elements of partials summed at once: all of the usual shapes, so that no load waits for another


@triton.jit(do_not_specialize=["page"])
def _decode_attention_kernel(
    q_ptr, keys_ptr, values_ptr, lengths_ptr, count_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr,
    sizes_ptr, k_ptr, v_ptr, positions_ptr, seen_ptr, attention_ptr, key_scales_ptr, value_scales_ptr,
    bias_ptr, out_ptr, lse_retained_ptr, lse_evicted_ptr, accs_ptr, tops_ptr, totals_ptr, logits_ptr, tickets_ptr,
    starts_ptr, sink_ptr, rows_ptr, page, slots, pool, centroids, scale, softcap,
    HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, MERGE_P: tl.constexpr, MERGE_M: tl.constexpr, MERGE_D: tl.constexpr, ORDER: tl.constexpr,
    SPREAD: tl.constexpr, HAS_CAP: tl.constexpr, HIP: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    # Optional parts are switched on by their pointer: k_ptr (append), attention_ptr (collect it), starts_ptr (ragged),
    # sink_ptr, rows_ptr, bias_ptr, key_scales_ptr (slots hold codes). A pair of the batch is pair `own` of its page or
    # state; scratch and results follow the batch.
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, HEADS)
    if rows_ptr is not None:
        if row == 0:
            if split == 0:
                _store_nothing(out_ptr, lse_retained_ptr, lse_evicted_ptr, pair, G, M, D, BLOCK_D)
            return
    keys_ptr = _page(keys_ptr, row, page)
    values_ptr = _page(values_ptr, row, page)
    key_scales_ptr = _page(key_scales_ptr, row, page)
    value_scales_ptr = _page(value_scales_ptr, row, page)
    bias_ptr = _page(bias_ptr, row, page)
    lengths_ptr = _page(lengths_ptr, row, page)
    positions_ptr = _page(positions_ptr, row, page)
    starts_ptr = _page(starts_ptr, row, page)
    attention_ptr = _page(attention_ptr, row, page)
    seen_ptr = _page(seen_ptr, row, page)
    count_ptr = _page(count_ptr, row, page)
    key_mean_ptr = _page(key_mean_ptr, row, page)
    value_mean_ptr = _page(value_mean_ptr, row, page)
    matrix_ptr = _page(matrix_ptr, row, page)
    spread_ptr = _page(spread_ptr, row, page)
    sizes_ptr = _page(sizes_ptr, row, page)
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    base, capacity = _stretch(starts_ptr, own, slots, HEADS)
    length = tl.load(lengths_ptr + own)
    count = tl.load(count_ptr + own)
    held = length
    if k_ptr is not None:
        held = tl.minimum(length + 1, capacity)
    q_ptr += pair * G * D
    keys_ptr = _codes_of(keys_ptr, key_scales_ptr, base, D)
    values_ptr = _codes_of(values_ptr, value_scales_ptr, base, D)
    key_scales_ptr = _scales_of(key_scales_ptr, base, D)
    value_scales_ptr = _scales_of(value_scales_ptr, base, D)
    if bias_ptr is not None:
        bias_ptr += base
    out_ptr += pair * G * D
    if ORDER == 0 or ORDER == 1:
        key_mean_ptr += own * D
        value_mean_ptr += own * D
    if ORDER == 1:
        matrix_ptr += own * D * D
    if attention_ptr is not None:
        attention_ptr += base
        logits_ptr += _in_scratch(starts_ptr, base, pair, own, slots, HEADS)
    if sink_ptr is not None:
        sink_ptr += (pair % HEADS) * G

    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    if split < SPLITS:
        q = _load_query(q_ptr, G, M, D, BLOCK_D)
        last = split == SPLITS - 1  # whose share is the smallest
        if k_ptr is not None:  # loaded before anything has to be waited for
            k = _load_token(k_ptr + pair * D, last, q_ptr.dtype.element_ty, D, M, BLOCK_D)
            v = _load_token(v_ptr + pair * D, last, q_ptr.dtype.element_ty, D, M, BLOCK_D)
        rest = _turned_rest(q, key_scales_ptr, D)
        q = _turned_query(q, key_scales_ptr, D)
        share = tl.cdiv(length, SPLITS)
        start = split * share
        top, total, acc = _attend_slots(
            top, total, acc, q, rest, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, bias_ptr, logits_ptr,
            start, tl.minimum(start + share, length), pool, scale, softcap, G, M, D, BLOCK_D, BLOCK_N, HAS_CAP, INTERP,
        )  # fmt: skip
        if k_ptr is not None:
            if last:
                top, total, acc = _append_token(
                    top, total, acc, q, rest, k, v, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                    bias_ptr, positions_ptr + base, logits_ptr, length, length + count, capacity, pool, scale, softcap,
                    G, M, D, BLOCK_D, HAS_CAP,
                )  # fmt: skip
        if _packed(value_scales_ptr):
            acc = _turned(acc, D)

    if PARTS == 1:
        moment_top = tl.full([M], -float("inf"), tl.float32)
        moment_total = tl.zeros([M], tl.float32)
        moment_acc = tl.zeros([M, BLOCK_D], tl.float32)
        if ORDER is not None:
            moment_top, moment_total, moment_acc = _evicted_partial(
                q_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr, sizes_ptr, own, count, centroids, scale,
                softcap, G, M, D, BLOCK_D, BLOCK_K, BLOCK_C, ORDER, SPREAD, HAS_CAP, INTERP,
            )  # fmt: skip
        lse2, weight, moment_weight = _mix(top, total, moment_top, moment_total)
        if sink_ptr is not None:
            lse2, rest = _sink(sink_ptr, lse2, G, M)
            weight, moment_weight = weight * rest, moment_weight * rest
        mixed = acc * weight[:, None] + moment_acc * moment_weight[:, None]
        place, mask = rows[:, None] * D + cols[None, :], (rows < G)[:, None] & (cols < D)[None, :]
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=mask)
        _store_lse(lse_retained_ptr + pair * G, top, total, G, M)
        _store_lse(lse_evicted_ptr + pair * G, moment_top, moment_total, G, M)
        _barrier(HIP)  # the logits are written and every thread has read length
        if attention_ptr is not None:
            _add_attention(attention_ptr, logits_ptr, lse2, held, capacity, pool, G, M, MERGE_M, BLOCK_S)
        if k_ptr is not None:
            _count_token(lengths_ptr, seen_ptr, own, held, HEADS)
    else:
        if ORDER is not None:
            if split == SPLITS:
                top, total, acc = _evicted_partial(
                    q_ptr, key_mean_ptr, value_mean_ptr, matrix_ptr, spread_ptr, sizes_ptr, own, count, centroids,
                    scale, softcap, G, M, D, BLOCK_D, BLOCK_K, BLOCK_C, ORDER, SPREAD, HAS_CAP, INTERP,
                )  # fmt: skip
        accs_ptr += pair * PARTS * G * D
        tops_ptr += pair * PARTS * G
        totals_ptr += pair * PARTS * G
        _store_partial(accs_ptr, tops_ptr, totals_ptr, split, top, total, acc, PARTS, G, M, D, BLOCK_D)
        _barrier(HIP)  # orders every thread's stores before the ticket; Triton <= 3.8 would not
        if tl.atomic_add(tickets_ptr + pair, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            heads, of_slots = tl.arange(0, MERGE_M), (tl.arange(0, MERGE_P) < SPLITS)[None, :]
            tops, totals = _load_sums(tops_ptr, totals_ptr, 0, PARTS, MERGE_P, PARTS, G, MERGE_M)
            accs = _load_accs(accs_ptr, tl.arange(0, MERGE_D), 0, PARTS, MERGE_P, G, MERGE_M, D)
            nothing = -float("inf")
            all_top, all_total, shares = _merge_sums(tl.where(of_slots, tops, nothing), totals)
            moment_top, moment_total, moment_share = _merge_sums(tl.where(of_slots, nothing, tops), totals)
            lse2, weight, moment_weight = _mix(all_top, all_total, moment_top, moment_total)
            if sink_ptr is not None:
                lse2, rest = _sink(sink_ptr, lse2, G, MERGE_M)
                weight, moment_weight = weight * rest, moment_weight * rest
            weights = shares * weight[:, None] + moment_share * moment_weight[:, None]
            for first in tl.static_range(0, D, MERGE_D):
                part = first + tl.arange(0, MERGE_D)
                if first > 0:
                    accs = _load_accs(accs_ptr, part, 0, PARTS, MERGE_P, G, MERGE_M, D)
                place, mask = heads[:, None] * D + part[None, :], (heads < G)[:, None] & (part < D)[None, :]
                tl.store(out_ptr + place, _merge_accs(accs, weights).to(out_ptr.dtype.element_ty), mask=mask)
            _store_lse(lse_retained_ptr + pair * G, all_top, all_total, G, MERGE_M)
            _store_lse(lse_evicted_ptr + pair * G, moment_top, moment_total, G, MERGE_M)
            if attention_ptr is not None:
                _add_attention(attention_ptr, logits_ptr, lse2, held, capacity, pool, G, MERGE_M, MERGE_M, BLOCK_S)
            if k_ptr is not None:
                _count_token(lengths_ptr, seen_ptr, own, held, HEADS)
            tl.store(tickets_ptr + pair, 0)


def _constants(
    dtype: torch.dtype, matrix: torch.dtype | None, heads: int, groups: int, head_dim: int, slots: int, programs: int,
    order: int | None, spread: bool, capped: bool, hip: bool, coded: bool, packed: bool,
) -> tuple[dict, int, int]:  # fmt: skip
    """Constexpr arguments, warps and pipeline stages.

    matrix: dtype of the moment matrix; slots: of a head; programs: see `num_programs`; order: of the moments, CENTROIDS
    or None; spread: see `_evicted`; coded: whether slots hold codes; packed: of 4 bits.
    """
    padded = pow2(head_dim, 64)
    programs = max(programs, 2) if packed and padded > 128 else programs  # one alone has to spill registers
    splits, parts = programs, programs
    if order is not None and programs > 1:  # one is for the evicted set; 2 of 3 read slots rather than 1 of 2
        splits = max(programs - 1, 2)
        parts = splits + 1
    block_n, block_k, num_stages = (FP32_BLOCKS if dtype == torch.float32 else BLOCKS)[padded]
    if block_n < triton.cdiv(slots, splits) <= 2 * block_n and dtype != torch.float32 and not hip:
        block_n, num_stages = 2 * block_n, 2  # a share in one tile, in the same memory
    tight = packed and not hip and (padded == 256 or dtype == torch.float32)  # no registers for a tile on its way
    if tight or (coded and dtype == torch.float32):
        block_n = MIN_ROWS  # codes and the numbers that they become, in registers at once
    elif packed:  # twice the queries, and keys that were codes
        block_n = min(block_n, 32)
    if packed:
        num_stages = 1 if tight else 2
    if capped or tight or (order == 1 and spread):
        block_k = min(block_k, 32)  # with 64, triton spills: 3.9 on sm_90 for a cap, 3.7 on sm_100 for a spread
    if matrix == torch.float32 or order == CENTROIDS.value:
        block_k = 32 if hip or padded > 256 else 16  # their exact products need several times the registers
    # With 16, ptxas spills 36 bytes for sm_80 to fit a third program beside two; shared memory has no room for it.
    block_c = 2 * BLOCK_C if padded == 128 and not hip and not capped else BLOCK_C
    merge_rows = pow2(groups)
    merge_dims = min(padded, max(16, MERGE_TILE // (pow2(parts) * merge_rows)))
    constants = dict(
        HEADS=heads, G=groups, M=MIN_ROWS, D=head_dim, BLOCK_D=padded, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_C=block_c, BLOCK_S=attention_slots(merge_rows), SPLITS=splits, PARTS=parts, MERGE_P=pow2(parts),
        MERGE_M=merge_rows, MERGE_D=merge_dims, ORDER=order, SPREAD=spread, HAS_CAP=capped, HIP=hip,
    )  # fmt: skip
    wide = padded > 256 or (padded == 256 and (tight or dtype == torch.float32))
    return constants, 8 if wide else 4, num_stages


def most_registers(constants: dict, coded: bool, chip: str) -> dict[str, int]:
    """Launch options. With centroids, triton 3.9 and sm_80, ptxas spills to fit a third program beside two, for which
    shared memory has no room. chip: see `chip_of`.
    """
    spills = constants["ORDER"] == CENTROIDS.value and constants["BLOCK_D"] == 128 and not coded
    return {"maxnreg": 255} if spills and chip == "80" else {}


def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch: everything contiguous, or rows of it in pages, nothing copied, no host sync; shapes as in
    `reference.decode_step`. Of row 0 results are zero and -inf.

    Keys and values have the dtype of q, or are codes with scales (see `_codes`), statistics are fp32, the matrix of the
    moments cross in fp32 or cross / count in half precision; `state.scratch` is a `Workspace`, made if it is empty.

    Returns: out [B, Hq, D] in the dtype of q, lse_retained and lse_evicted [B, Hq] fp32, natural log (-inf if empty).
    Raises: FastKVError for shapes, strides or dtypes that are not as above.
    """
    op, slots, starts, moments = "decode_step", state.exact, state.exact.starts, state.moments
    keys, values, attention = slots.keys, slots.values, slots.attention
    assert values is not None
    groups = check_decode(op, q, state, addressed(op, keys, starts), addressed(op, values, starts))
    _, heads, capacity, _ = addressed(op, keys, starts).shape
    dim = q.shape[-1]
    known = Terms.of(op, spec.evicted(state), dim)
    check_like(op, (heads * groups,), sink_logits=state.sink_logits)
    check_contiguous(op, q=q, k=k, v=v)
    page = check_rows(
        op, state, keys=keys, values=values, key_scales=slots.key_scales, value_scales=slots.value_scales,
        bias=slots.bias, lengths=slots.lengths, count=moments.count, key_mean=known.key_mean,
        value_mean=known.value_mean, matrix=known.matrix, spread=known.spread, sizes=known.sizes, attention=attention,
        positions=slots.positions, seen=state.seen, starts=starts,
    )  # fmt: skip
    batch = state.batch
    pairs, pool, collects = batch * heads, pool_of(batch, slots), attention is not None
    programs = num_programs(pairs, slots.limit, num_sms(q.device))
    constants, num_warps, num_stages = _constants(
        q.dtype, None if known.matrix is None else known.matrix.dtype, heads, groups, dim, slots.limit, programs,
        known.order, known.spread is not None, spec.softcap is not None, on_hip(), not slots.format.plain,
        slots.format.values.bits == 4,
    )  # fmt: skip
    room, several = Workspace.of(state.scratch), constants["PARTS"] > 1
    if room is None and (several or collects):
        room = Workspace.allocate(batch, heads, groups, slots.limit, dim, q.device, attention=collects, pool=pool)
    parts = room if several else None
    out, lse_retained, lse_evicted = decode_outputs(q)
    positions, seen = (slots.positions, state.seen) if k is not None else (None, None)
    _decode_attention_kernel[pairs, constants["PARTS"]](
        q, keys, values, slots.lengths, moments.count, known.key_mean, known.value_mean, known.matrix, known.spread,
        known.sizes, k, v, positions, seen, attention, slots.key_scales, slots.value_scales, slots.bias, out,
        lse_retained, lse_evicted,
        parts and parts.accs, parts and parts.tops, parts and parts.totals,
        room.logits if room is not None and collects else None, parts and parts.tickets,
        starts, state.sink_logits, state.rows, page, capacity, pool, known.num, spec.scale, spec.softcap or 1.0,
        **constants, INTERP=INTERPRET, num_warps=num_warps, num_stages=stages(num_stages),
        **most_registers(constants, not slots.format.plain, chip_of(q.device)),
    )  # fmt: skip
    return out, lse_retained, lse_evicted
