"""One query per sequence over the retained slots and the moments of the evicted tokens, append included: one launch.

    out = (sum_j e^{s_j} v_j + Z_E f_E) / (sum_j e^{s_j} + Z_E),   s_j = softcap(scale q.k_j)
    log Z_E = log n + scale q.k_mean,   f_E = v_mean + (scale / n) S^T q

or, with centroids, what `_evicted` says; a learned sink adds e^sink to the sum below the line.
Source: MomentKV (arXiv:2606.01563, Eqs. 9, 11, 12); split softmax as in Flash-Decoding; the evicted set is one more
partial, so mixing is free. Program (pair, s) reads a share of the slots, those beyond `splits` the moments or a share
of the centroids, and the last of a pair to arrive merges; with many pairs one program does it all. Twins:
`fastkv.reference.decode_step`, `moment_estimate` and `centroid_estimate`.

Bytes per pair: 4 L D for keys and values in half precision, 2 L (D + 4) in 8 bits, 9 L D / 8 in 4; 2 D^2 for the matrix
(4 D^2 in fp32), 4 D a centroid.
Does not handle: more than 16 query heads per KV head, Dv != Dk, head_dim above 512 (256 in float32 and on AMD),
float64, windows, padding. In float32 with head_dim 256 it spills registers (250 bytes on sm_90).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import LayerState, Spec
from ._arguments import (
    PAIRS,
    EvictedPointers,
    Group,
    PartPointers,
    ResultPointers,
    Scaling,
    StatePointers,
    TokenPointers,
)
from ._attention import (
    _add_attention,
    _append_token,
    _attend_slots,
    _barrier,
    _count_token,
    _dealt,
    _empty,
    _home,
    _in_scratch,
    _load_accs,
    _load_query,
    _load_sums,
    _load_token,
    _merge_accs,
    _merge_sums,
    _mix,
    _of_token,
    _own_parts,
    _own_results,
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
    MIN_ROWS,
    attention_slots,
    cdiv,
    check_decode,
    check_rows,
    chip_of,
    decode_outputs,
    decode_programs,
    num_sms,
    on_hip,
    pool_of,
    pow2,
    slots_each,
    stages,
    workspace,
)

# padded head_dim -> slots, matrix rows, stages
BLOCKS = {64: (64, 64, 3), 128: (64, 64, 3), 256: (32, 32, 3), 512: (16, 32, 3)}
FP32_BLOCKS = {64: (32, 32, 2), 128: (32, 32, 2), 256: (16, 16, 2)}
BLOCK_C = {128: 64, 256: 32, 512: 16}  # centroids at a time in half precision, by the padded head_dim
CENTROID = 2.2  # slots that cost as much as one (perf.counts)
MERGE_TILE = 16384  # elements of partials summed at once: all of the usual shapes, so that no load waits for another


class Sizes(NamedTuple):
    """Slots of a pair, or of a sequence where heads have unequally many; of the whole batch; centroids of a pair: UNIT
    times as many.
    """

    slots: Any
    pool: Any
    centroids: Any


class DecodeTile(NamedTuple):
    """Constants of a launch: GROUP and its columns and rows while partials are merged, MERGE; SPLITS programs for the
    slots of a pair, PARTS in all, with those for what it evicted; slots, rows of the matrix, centroids, and slots whose
    attention is added, at a time.

    UNIT: a launch is given so many times as many slots. Multiples of 16 are compilations of their own: there is one for
    a cache of equal heads, but unequal ones have other numbers in each layer, and 16 times these are all alike.
    """

    HEADS: int
    GROUP: Group
    MERGE: Group
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_C: int
    BLOCK_S: int
    SPLITS: int
    PARTS: int
    MERGE_P: int
    UNIT: int = 1

    def shared(self) -> DecodeTile:
        """For unequal heads, which are dealt as many programs as a launch has: layers of all sizes share it."""
        few = self._replace(SPLITS=2, PARTS=2 + self.PARTS - self.SPLITS) if self.SPLITS > 2 else self
        return few._replace(UNIT=16)


@triton.jit(do_not_specialize=["page"])
def _decode_attention_kernel(
    token: TokenPointers, state: StatePointers, evicted: EvictedPointers, results: ResultPointers, parts: PartPointers,
    logits_ptr, sink_ptr, rows_ptr, page, sizes: Sizes, scaling: Scaling, TILE: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    # Optional parts are switched on by their pointer: k_ptr of the token (append), attention_ptr (collect it),
    # starts_ptr (ragged), sink_ptr, rows_ptr, bias_ptr, key_scales_ptr (slots hold codes). A pair of the batch is pair
    # `own` of its page or state; scratch and results follow the batch.
    HEADS: tl.constexpr = TILE.HEADS
    GROUP: tl.constexpr = TILE.GROUP
    MERGE: tl.constexpr = TILE.MERGE
    MERGE_D: tl.constexpr = MERGE.BLOCK_D
    SPLITS: tl.constexpr = TILE.SPLITS
    PARTS: tl.constexpr = TILE.PARTS
    EVICTED: tl.constexpr = PARTS - SPLITS if PARTS > SPLITS else 1
    G: tl.constexpr = GROUP.G
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    DEALT: tl.constexpr = state.starts_ptr is not None and SPLITS > 1
    UNIT: tl.constexpr = TILE.UNIT
    slots_each, pool = sizes.slots // UNIT, sizes.pool // UNIT
    programs, all_parts = SPLITS, PARTS  # that read slots of a pair; partials that lie together
    if DEALT:
        programs, all_parts = tl.num_programs(1) - (PARTS - SPLITS), tl.num_programs(1) * HEADS
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own = _home(rows_ptr, page, pair, HEADS)
    if rows_ptr is not None:
        if row == 0:
            if split == 0:
                _store_nothing(_own_results(results, pair, GROUP), GROUP)
            return
    of_slots, splits, first_part, piece = split < programs, SPLITS, 0, tl.maximum(split - programs, 0)
    if DEALT:
        starts_ptr = _page(state.starts_ptr, row, page)
        kv = (pair % HEADS).to(tl.int32)
        program = tl.where(of_slots, kv * programs + split, -1)
        head, first_part, splits = _dealt(
            starts_ptr, own // HEADS, program, kv, programs, HEADS, TILE.MERGE_P - EVICTED
        )
        if head == HEADS:
            return
        pair, own = pair - kv + head, own - kv + head
        split = program - first_part
    results = _own_results(results, pair, GROUP)
    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])
    evicted = EvictedPointers(*[p if p is None else _page(p, row, page) for p in evicted])
    base, capacity = _stretch(state.starts_ptr, own, slots_each, HEADS)
    length = tl.load(state.lengths_ptr + own)
    count = tl.load(evicted.count_ptr + own)
    held = length
    if token.k_ptr is not None:
        held = tl.minimum(length + 1, capacity)
    q_ptr = _of_token(token.q_ptr, token.q_row, pair, G * D, HEADS)
    slots = StatePointers(
        _codes_of(state.keys_ptr, state.key_scales_ptr, base, D),
        _codes_of(state.values_ptr, state.value_scales_ptr, base, D),
        _scales_of(state.key_scales_ptr, base, D),
        _scales_of(state.value_scales_ptr, base, D),
        *[p if p is None else p + base for p in (state.bias_ptr, state.positions_ptr, state.attention_ptr)],
    )
    if slots.attention_ptr is not None:
        logits_ptr += _in_scratch(state.starts_ptr, base, pair, own, slots_each, HEADS)
    if sink_ptr is not None:
        sink_ptr += (pair % HEADS) * G

    centroids = sizes.centroids
    if centroids is not None:
        centroids = centroids // UNIT
    top, total, acc = _empty(M, GROUP.BLOCK_D)

    if of_slots:
        q = _load_query(q_ptr, GROUP)
        last = split == splits - 1  # whose share is the smallest
        if token.k_ptr is not None:  # loaded before anything has to be waited for
            k_ptr = _of_token(token.k_ptr, token.k_row, pair, D, HEADS)
            v_ptr = _of_token(token.v_ptr, token.v_row, pair, D, HEADS)
            k = _load_token(k_ptr, last, q_ptr.dtype.element_ty, GROUP)
            v = _load_token(v_ptr, last, q_ptr.dtype.element_ty, GROUP)
        rest = _turned_rest(q, slots.key_scales_ptr, D)
        q = _turned_query(q, slots.key_scales_ptr, D)
        share = tl.cdiv(length, splits)
        start = split * share
        stop = tl.minimum(start + share, length)
        top, total, acc = _attend_slots(
            top, total, acc, q, rest, slots, logits_ptr, start, stop, pool, scaling, GROUP, TILE.BLOCK_N
        )
        if token.k_ptr is not None:
            if last:
                top, total, acc = _append_token(
                    top, total, acc, q, rest, k, v, slots, logits_ptr, length, length + count, capacity, pool,
                    scaling, GROUP,
                )  # fmt: skip
        if _packed(slots.value_scales_ptr):
            acc = _turned(acc, D)

    if PARTS == 1:
        moment_top, moment_total, moment_acc = _empty(M, GROUP.BLOCK_D)
        if evicted.key_mean_ptr is not None:
            moment_top, moment_total, moment_acc = _evicted_partial(
                q_ptr, evicted, own, count, centroids, piece, scaling, GROUP, TILE.BLOCK_K, TILE.BLOCK_C, EVICTED
            )  # fmt: skip
        lse2, weight, moment_weight = _mix(top, total, moment_top, moment_total)
        if sink_ptr is not None:
            lse2, rest = _sink(sink_ptr, lse2, GROUP)
            weight, moment_weight = weight * rest, moment_weight * rest
        mixed = acc * weight[:, None] + moment_acc * moment_weight[:, None]
        rows, cols = tl.arange(0, M), tl.arange(0, GROUP.BLOCK_D)
        place, mask = rows[:, None] * D + cols[None, :], (rows < G)[:, None] & (cols < D)[None, :]
        tl.store(results.out_ptr + place, mixed.to(results.out_ptr.dtype.element_ty), mask=mask)
        _store_lse(results.lse_retained_ptr, top, total, GROUP)
        _store_lse(results.lse_evicted_ptr, moment_top, moment_total, GROUP)
        _barrier(HIP)  # the logits are written and every thread has read length
        if slots.attention_ptr is not None:
            _add_attention(slots.attention_ptr, logits_ptr, lse2, held, capacity, pool, MERGE.M, TILE.BLOCK_S, GROUP)
        if token.k_ptr is not None:
            _count_token(state.lengths_ptr, state.seen_ptr, own, held, HEADS)
    else:
        if evicted.key_mean_ptr is not None:
            if not of_slots:
                top, total, acc = _evicted_partial(
                    q_ptr, evicted, own, count, centroids, piece, scaling, GROUP, TILE.BLOCK_K, TILE.BLOCK_C, EVICTED
                )  # fmt: skip
        tickets_ptr = parts.tickets_ptr + pair
        number, numbers = split, tl.arange(0, TILE.MERGE_P)
        there, with_slots = numbers < splits + (PARTS - SPLITS), (numbers < splits)[None, :]
        if DEALT:
            parts = _own_parts(parts, pair // HEADS, all_parts, GROUP)
            rest = HEADS * programs + (pair % HEADS).to(tl.int32) * EVICTED
            number = tl.where(split < 0, rest + piece, first_part + split)
            numbers = tl.where(numbers < splits, first_part + numbers, rest + numbers - splits)
        else:
            parts = _own_parts(parts, pair, all_parts, GROUP)
        _store_partial(parts, number, top, total, acc, all_parts, GROUP)
        _barrier(HIP)  # orders every thread's stores before the ticket; Triton <= 3.8 would not
        if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == splits + (PARTS - SPLITS) - 1:
            heads = tl.arange(0, MERGE.M)
            tops, totals = _load_sums(parts, numbers, there, all_parts, MERGE)
            accs = _load_accs(parts, tl.arange(0, MERGE_D), numbers, there, MERGE)
            nothing = -float("inf")
            all_top, all_total, shares = _merge_sums(tl.where(with_slots, tops, nothing), totals)
            moment_top, moment_total, moment_share = _merge_sums(tl.where(with_slots, nothing, tops), totals)
            lse2, weight, moment_weight = _mix(all_top, all_total, moment_top, moment_total)
            if sink_ptr is not None:
                lse2, rest = _sink(sink_ptr, lse2, MERGE)
                weight, moment_weight = weight * rest, moment_weight * rest
            weights = shares * weight[:, None] + moment_share * moment_weight[:, None]
            for first in tl.static_range(0, D, MERGE_D):
                part = first + tl.arange(0, MERGE_D)
                if first > 0:
                    accs = _load_accs(parts, part, numbers, there, MERGE)
                place, mask = heads[:, None] * D + part[None, :], (heads < G)[:, None] & (part < D)[None, :]
                mixed = _merge_accs(accs, weights)
                tl.store(results.out_ptr + place, mixed.to(results.out_ptr.dtype.element_ty), mask=mask)
            _store_lse(results.lse_retained_ptr, all_top, all_total, MERGE)
            _store_lse(results.lse_evicted_ptr, moment_top, moment_total, MERGE)
            if slots.attention_ptr is not None:
                _add_attention(
                    slots.attention_ptr, logits_ptr, lse2, held, capacity, pool, MERGE.M, TILE.BLOCK_S, MERGE
                )
            if token.k_ptr is not None:
                _count_token(state.lengths_ptr, state.seen_ptr, own, held, HEADS)
            tl.store(tickets_ptr, 0)


def _constants(
    dtype: torch.dtype, known: Terms, heads: int, groups: int, head_dim: int, slots: int, programs: int, capped: bool,
    chip: str, coded: bool, packed: bool, ragged: bool,
) -> tuple[DecodeTile, int, int]:  # fmt: skip
    """Tile, warps and pipeline stages.

    known: of the evicted tokens; slots: of a head, on average; programs: see `decode_programs`; chip: see `chip_of`;
    coded: whether slots hold codes; packed: of 4 bits; ragged: whether heads have unequally many.
    """
    hip = chip == "hip"
    padded, order, centroids = pow2(head_dim, 64), known.order, known.num or 0
    matrix = known.pointers.key_mean_ptr if order == CENTROIDS else known.pointers.matrix_ptr
    programs = max(programs, 2) if packed and padded > 128 else programs  # one alone has to spill registers
    exact = matrix is not None and (matrix.dtype == torch.float32 or (order == CENTROIDS and dtype == torch.float32))
    block_c = MIN_ROWS if exact else BLOCK_C[max(padded, 128)]
    splits, parts = programs, programs
    if order is not None and programs > 1:  # some are for the evicted set; 2 of 3 read slots rather than 1 of 2
        work = CENTROID * centroids
        evicted = max(min(round(programs * work / (slots + work)), cdiv(centroids, block_c), programs - 2), 1)
        splits = max(programs - evicted, 2)
        parts = splits + evicted
    block_n, block_k, num_stages = (FP32_BLOCKS if dtype == torch.float32 else BLOCKS)[padded]
    if block_n < cdiv(slots, splits) <= 2 * block_n and dtype != torch.float32 and not hip:
        block_n, num_stages = 2 * block_n, 2  # a share in one tile, in the same memory
    tight = packed and not hip and (padded == 256 or dtype == torch.float32)  # no registers for a tile on its way
    if tight or (coded and dtype == torch.float32):
        block_n = MIN_ROWS  # codes and the numbers that they become, in registers at once
    elif packed:  # twice the queries, and keys that were codes
        block_n = min(block_n, 32 if hip else 64)
    if packed:
        num_stages = 1 if tight else 2
    if capped or tight:
        block_k = min(block_k, 32)  # with 64, triton 3.9 spills on sm_90 for a cap
    if exact:
        block_k = 32 if hip or padded > 256 else 16  # exact products need several times the registers
    elif order == CENTROIDS:
        block_k = padded
    merge_rows = pow2(groups)
    most = pow2(parts) * (4 if ragged and splits > 1 else 1)  # partials of a head
    merge_dims = min(padded, max(16, MERGE_TILE // (most * merge_rows)))
    tile = DecodeTile(
        heads, Group(groups, MIN_ROWS, head_dim, padded), Group(groups, merge_rows, head_dim, merge_dims), block_n,
        block_k, block_c, attention_slots(merge_rows), splits, parts, most,
    )  # fmt: skip
    wide = padded > 256 or (padded == 256 and (tight or dtype == torch.float32))
    return tile, 8 if wide else 4, num_stages


def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step`: one launch, nothing copied, no host sync. `out` is what it returns if that is like q.

    Everything is contiguous, or rows of it in pages; of q, k and v what each sequence has is. Of row 0 results are zero
    and -inf. Keys and values have the dtype of q, or are codes with scales (see `_codes`), statistics are fp32, the
    matrix is cross in fp32 or cross / count in half precision; `state.scratch` is of `workspace`, made if it is empty.

    Raises: FastKVError for shapes, strides or dtypes that are not as above.
    """
    op, slots, starts, moments = "decode_step", state.exact, state.exact.starts, state.moments
    groups, _, heads, capacity, dim = check_decode(op, q, k, v, state)
    known = Terms.of(op, spec.evicted(state), dim)
    appended = ("positions",) if k is not None else ()
    pointers = StatePointers.of(
        slots, *PAIRS, "bias", "attention", "lengths", "starts", *appended, seen=state.seen if appended else None
    )
    evicted = known.pointers._replace(count_ptr=moments.count)
    page = check_rows(op, state, pointers, evicted)
    pairs, pool, collects = state.batch * heads, pool_of(state.batch, slots), slots.attention is not None
    programs = decode_programs(pairs, slots, num_sms(q.device))
    tile, num_warps, num_stages = _constants(
        q.dtype, known, heads, groups, dim, slots_each(slots), programs, spec.softcap is not None,
        chip_of(q.device), not slots.format.plain, slots.format.values.bits == 4, starts is not None,
    )  # fmt: skip
    scratch, several = state.scratch, tile.PARTS > 1
    if not scratch and (several or collects):
        scratch = workspace(heads * groups, state)
    parts = PartPointers(*scratch[:4]) if several else PartPointers()
    # With centroids, on sm_80, ptxas spills to fit a third program beside two, for which shared memory has no room.
    spills = known.order == CENTROIDS and tile.GROUP.BLOCK_D == 128 and chip_of(q.device) == "80"
    results = decode_outputs(q, out)
    grid = pairs, tile.PARTS
    tile = tile if starts is None else tile.shared()
    sizes = Sizes(*(None if number is None else number * tile.UNIT for number in (capacity, pool, known.num)))
    _decode_attention_kernel[grid](
        TokenPointers.of(q, k, v), pointers, evicted, results, parts, scratch[4] if collects else None,
        state.sink_logits, state.rows, page, sizes, Scaling(spec.scale, spec.softcap), TILE=tile, HIP=on_hip(),
        num_warps=num_warps, num_stages=stages(num_stages),
        **({"maxnreg": 255} if spills else {}),
    )  # fmt: skip
    return tuple(results)
