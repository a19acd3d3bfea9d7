"""Attention in pieces: dot products that also run in the interpreter, softmax in base 2, partials of a split softmax.

The interpreter cannot compute in bf16 (neither arithmetic nor `tl.dot`), so every loaded tile goes to `_dot`, which
upcasts there, or to `.to(tl.float32)`. Softmax is in base 2: scores carry a factor log2(e), log-sums are log2.

A partial (top, total, acc) stands for a set of tokens: top [M] the largest base-2 logit, total [M] = sum 2^(logit-top),
acc [M, D] = sum 2^(logit-top) v. The evicted set is one more partial (see `_evicted`). Rows are the query heads of
one KV head, padded to M. A pair is a (sequence, KV head); its pointers are already offset when they get here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._arguments import PartPointers, ResultPointers
from ._codes import (
    INTERP,
    _factors,
    _packed,
    _slot_rows,
    _store_encoded,
    _turned,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot32(a, b):
    """a @ b for fp32 operands at fp32 accuracy: never TF32."""
    if INTERP:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="bf16x6")


@triton.jit
def _dot(a, b):
    """a @ b with fp32 accumulation, for operands of one dtype: fp16 and bf16 on tensor cores, fp32 at full accuracy."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        return _dot32(a, b)
    else:
        return tl.dot(a, b)


@triton.jit
def _sum_products(a, b):
    """Sums [M] of a * b [M, N] over N, with every product rounded before it is added.

    Compilers would fuse a thread's product with the addition of its neighbour's: both then hold sums of their own that
    differ in the last bit, and it is not defined which of them the program goes on with.
    """
    return tl.sum(tl.fma(a, b, 0.0), 1)


@triton.jit
def _tanh(x):
    """tanh to fp32 accuracy, also near zero, where 2 sigmoid(2x) - 1 cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    outer = (1 - decay) / (1 + decay)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -outer, outer))


@triton.jit
def _logits2(products, scaling):
    """Base-2 logits: log2(e) times what `Scaling` makes of products."""
    if scaling.softcap is not None:
        return scaling.softcap * LOG2E * _tanh(products * (scaling.scale / scaling.softcap))
    else:
        return products * (scaling.scale * LOG2E)


@triton.jit
def _empty(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The partial of no tokens: top, total [ROWS] and acc [ROWS, COLUMNS]."""
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    return top, total, tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _softmax_update(top, total, acc, logits2):
    """One step of the online softmax over the last axis; -inf everywhere is an empty set, never NaN.

    Args: top, total [M], acc [M, D] so far (start: -inf, 0, 0); logits2 [M, N], base 2, -inf where masked.
    Returns: top, total, acc rescaled to the new top, and weights [M, N] still to be multiplied into acc.
    """
    new_top = tl.maximum(top, tl.max(logits2, 1))
    floor = tl.where(new_top == -float("inf"), 0.0, new_top)
    decay = tl.exp2(top - floor)
    weights = tl.exp2(logits2 - floor[:, None])
    return new_top, total * decay + tl.sum(weights, 1), acc * decay[:, None], weights


@triton.jit
def _normalise(total, acc):
    """acc / total, zero where total is zero."""
    return acc * tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)[:, None]


@triton.jit
def _rows_mask(inside, cols, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask of a row-wise tile; over rows only where the head fills the block, which keeps 16-byte copies."""
    if D == BLOCK_D:
        return inside[:, None]
    else:
        return inside[:, None] & (cols < D)[None, :]


@triton.jit
def _load_query(q_ptr, GROUP: tl.constexpr):
    rows, cols = tl.arange(0, GROUP.M), tl.arange(0, GROUP.BLOCK_D)
    mask = _rows_mask(rows < GROUP.G, cols, GROUP.D, GROUP.BLOCK_D)
    return tl.load(q_ptr + rows[:, None] * GROUP.D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _turned_query(q, scales_ptr, D: tl.constexpr):
    """The queries as they are multiplied with stored keys."""
    if _packed(scales_ptr):
        return _turned(q.to(tl.float32), D).to(q.dtype)
    else:
        return q


@triton.jit
def _turned_rest(q, scales_ptr, D: tl.constexpr):
    """What the dtype of q leaves of the turned queries; None for nothing."""
    if not _packed(scales_ptr):
        return  # None by its name would be a number to triton 3.6
    elif q.dtype == tl.float32:
        return
    else:
        turned = _turned(q.to(tl.float32), D)
        return (turned - turned.to(q.dtype).to(tl.float32)).to(q.dtype)


@triton.jit
def _bias2(bias_ptr, slot, inside):
    """Addends of the base-2 logits of slots, 0 outside."""
    return tl.load(bias_ptr + slot, mask=inside, other=0.0) * LOG2E


@triton.jit
def _attend_slots(
    top, total, acc, q, rest, state, logits_ptr, start, stop, pool, scaling, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add slots [start, stop) of a pair to a partial; if logits_ptr [G, pool] is given, write the base-2 logits there.

    With scales, slots hold codes; with a bias, it is added to their logits. q, rest: `_turned_query`, `_turned_rest`.
    """
    D: tl.constexpr = GROUP.D
    rows, cols = tl.arange(0, GROUP.M), tl.arange(0, GROUP.BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        inside = slot < stop
        mask = _rows_mask(inside, cols, D, GROUP.BLOCK_D)
        k = _slot_rows(state.keys_ptr, state.key_scales_ptr, slot, inside, mask, cols, q.dtype, D)
        products = _dot(q, tl.trans(k))
        if rest is not None:
            products += _dot(rest, tl.trans(k))
        if state.key_scales_ptr is not None and not _packed(state.key_scales_ptr):
            products *= _factors(state.key_scales_ptr, slot, inside)[None, :]
        logits = _logits2(products, scaling)
        if state.bias_ptr is not None:
            logits += _bias2(state.bias_ptr, slot, inside)[None, :]
        if logits_ptr is not None:
            place = rows.to(tl.int64)[:, None] * pool + slot[None, :]
            tl.store(logits_ptr + place, logits, mask=(rows < GROUP.G)[:, None] & inside[None, :])
        logits = tl.where(inside[None, :], logits, -float("inf"))
        v = _slot_rows(state.values_ptr, state.value_scales_ptr, slot, inside, mask, cols, q.dtype, D)
        top, total, acc, weights = _softmax_update(top, total, acc, logits)
        if state.value_scales_ptr is not None and not _packed(state.value_scales_ptr):
            weights *= _factors(state.value_scales_ptr, slot, inside)[None, :]
        acc += _dot(weights.to(v.dtype), v)
    return top, total, acc


@triton.jit
def _attend_token(top, total, acc, q, k, v, scaling):
    """Add one token, k and v [M, BLOCK_D] with equal rows, to a partial. Returns the partial and its logits [M]."""
    products = _sum_products(q.to(tl.float32), k.to(tl.float32))
    logit = _logits2(products, scaling)
    new_top = tl.maximum(top, logit)
    decay, weight = tl.exp2(top - new_top), tl.exp2(logit - new_top)
    acc = acc * decay[:, None] + weight[:, None] * v.to(tl.float32)
    return new_top, total * decay + weight, acc, logit


@triton.jit
def _load_token(pointer, wanted, dtype: tl.constexpr, GROUP: tl.constexpr):
    """A token [D] in every row of [M, BLOCK_D]: loads are 16 bytes wide and the layout is that of q."""
    M: tl.constexpr = GROUP.M
    token = tl.arange(0, GROUP.BLOCK_D)[None, :] + tl.zeros([M, 1], tl.int32)
    return tl.load(pointer + token, mask=(token < GROUP.D) & wanted, other=0.0).to(dtype)


@triton.jit
def _store_token(codes_ptr, scales_ptr, token, slot, free, D: tl.constexpr):
    """Encode a token, the equal rows [M, BLOCK_D], 0 beyond D, into a slot if it is free. Returns: as `_stored`."""
    if _packed(scales_ptr):  # one row of them: its products are in fp64
        token = tl.max(token.to(tl.float32), 0)[None, :]
    copies = tl.arange(0, token.shape[0])
    return _store_encoded(codes_ptr, scales_ptr, token, slot + 0 * copies, (copies == 0) & free, D)


@triton.jit
def _append_token(
    top, total, acc, q, rest, k, v, state, logits_ptr, length, position, capacity, pool, scaling, GROUP: tl.constexpr
):
    """Add the new token, k and v of `_load_token`, to a partial and store it in slot `length` of a pair, if there is
    one.

    With scales it is stored as codes, and attended to as they will be read; with keys of 4 bits q and rest are rotated,
    with values of 4 bits acc. Its bias is 0.
    """
    M: tl.constexpr = GROUP.M
    D: tl.constexpr = GROUP.D
    rows, cols = tl.arange(0, M), tl.arange(0, GROUP.BLOCK_D)
    free = length < capacity
    if state.key_scales_ptr is None:
        place = length * D + cols[None, :] + tl.zeros([M, 1], tl.int32)
        once = (cols < D)[None, :] & (rows == 0)[:, None] & free
        tl.store(state.keys_ptr + place, k, mask=once)
        tl.store(state.values_ptr + place, v, mask=once)
    else:
        k, v = tl.where((cols < D)[None, :], k, 0.0), tl.where((cols < D)[None, :], v, 0.0)
        k = _store_token(state.keys_ptr, state.key_scales_ptr, k, length, free, D)
        v = _store_token(state.values_ptr, state.value_scales_ptr, v, length, free, D)
    tl.store(state.positions_ptr + length, position.to(tl.int32), mask=free)
    if state.bias_ptr is not None:
        tl.store(state.bias_ptr + length, 0.0, mask=free)
    if rest is not None:
        q = q.to(tl.float32) + rest.to(tl.float32)
    top, total, acc, logit = _attend_token(top, total, acc, q, k, v, scaling)
    if logits_ptr is not None:
        tl.store(logits_ptr + rows.to(tl.int64) * pool + length, logit, mask=(rows < GROUP.G) & free)
    return top, total, acc


@triton.jit
def _own_parts(parts, pair, number, GROUP: tl.constexpr):
    """Where a pair keeps its partials: accs [number, G, D], tops and totals [G, number], and its ticket."""
    first = pair * number * GROUP.G
    accs_ptr, tops_ptr, totals_ptr = parts.accs_ptr + first * GROUP.D, parts.tops_ptr + first, parts.totals_ptr + first
    return PartPointers(accs_ptr, tops_ptr, totals_ptr, parts.tickets_ptr + pair)


@triton.jit
def _store_sums(parts, part, top, total, number, GROUP: tl.constexpr):
    """Write top and total of partial `part` of a pair, of `number`."""
    rows = tl.arange(0, GROUP.M)
    tl.store(parts.tops_ptr + rows * number + part, top, mask=rows < GROUP.G)
    tl.store(parts.totals_ptr + rows * number + part, total, mask=rows < GROUP.G)


@triton.jit
def _store_partial(parts, part, top, total, acc, number, GROUP: tl.constexpr):
    """Write partial `part` of a pair, of `number`."""
    rows, cols = tl.arange(0, GROUP.M), tl.arange(0, GROUP.BLOCK_D)
    place = (part * GROUP.G + rows)[:, None] * GROUP.D + cols[None, :]
    tl.store(parts.accs_ptr + place, acc, mask=(rows < GROUP.G)[:, None] & (cols < GROUP.D)[None, :])
    _store_sums(parts, part, top, total, number, GROUP)


@triton.jit
def _load_sums(parts, chosen, there, number, GROUP: tl.constexpr):
    """Tops and totals [M, BLOCK] of partials `chosen` [BLOCK], of `number`; those of nothing for what is not there."""
    rows = tl.arange(0, GROUP.M)[:, None]
    place, mask = rows * number + chosen[None, :], (rows < GROUP.G) & there[None, :]
    tops = tl.load(parts.tops_ptr + place, mask=mask, other=-float("inf"), cache_modifier=".cg")
    return tops, tl.load(parts.totals_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_accs(parts, cols, number, there, GROUP: tl.constexpr):
    """Columns `cols` of the accs of partials `number` [BLOCK] that are there: [BLOCK, M, cols]."""
    rows = tl.arange(0, GROUP.M)[None, :, None]
    place = (number[:, None, None] * GROUP.G + rows) * GROUP.D + cols[None, None, :]
    mask = there[:, None, None] & (rows < GROUP.G) & (cols < GROUP.D)[None, None, :]
    return tl.load(parts.accs_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_sums(tops, totals):
    """Partials [M, PARTS] as one: top [M], total [M] and the weight [M, PARTS] of each acc."""
    top = tl.max(tops, 1)
    weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top)[:, None])
    return top, _sum_products(weights, totals), weights


@triton.jit
def _merge_accs(accs, weights):
    """Weighted sum [M, D] of accs [PARTS, M, D]; weights [M, PARTS]."""
    return tl.sum(accs * tl.trans(weights)[:, :, None], 0)


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
def _add_sink(top, total, sink):
    """Add a token of logit `sink` and value zero to a partial: its top and total, and the factor of its acc."""
    sink2 = sink.to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink2)
    floor = tl.where(new_top == -float("inf"), 0.0, new_top)
    decay = tl.exp2(top - floor)
    return new_top, total * decay + tl.exp2(sink2 - floor), decay


@triton.jit
def _sink(sink_ptr, lse2, GROUP: tl.constexpr):
    """The learned sinks [G] beside everything else: log2-sum-exp [M] with them, and the share that they leave."""
    rows = tl.arange(0, GROUP.M)
    sink = tl.load(sink_ptr + rows, mask=rows < GROUP.G, other=-float("inf"))
    top, total, rest = _add_sink(lse2, 1.0, sink)  # lse2 is finite, also of nothing
    return top + tl.log2(total), rest / total


@triton.jit
def _store_lse(lse_ptr, top, total, GROUP: tl.constexpr):
    """Natural log-sum-exp of a partial; -inf for an empty one."""
    rows = tl.arange(0, GROUP.M)
    tl.store(lse_ptr + rows, (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, mask=rows < GROUP.G)


@triton.jit
def _add_attention(
    attention_ptr, logits_ptr, lse2, length, capacity, pool, ROWS: tl.constexpr, BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """attention[slot] += mean over the group of 2^(logit - lse2) for slots [0, length) of `capacity`.

    lse2: [M], of which ROWS >= G are worked on.
    """
    G: tl.constexpr = GROUP.G
    rows = tl.arange(0, ROWS)
    if ROWS < GROUP.M:
        lse2 = tl.sum(tl.where(rows[:, None] == tl.arange(0, GROUP.M)[None, :], lse2[None, :], 0.0), 1)
    for first in range(0, length, BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        owned = slot < capacity  # a mask by length would make loads narrow
        place = rows.to(tl.int64)[:, None] * pool + slot[None, :]
        mask = (rows < G)[:, None] & owned[None, :]
        logits = tl.load(logits_ptr + place, mask=mask, other=-float("inf"), cache_modifier=".cg")
        before = tl.load(attention_ptr + slot, mask=owned, other=0.0)
        logits = tl.where((slot < length)[None, :], logits, -float("inf"))
        share = tl.sum(tl.exp2(logits - lse2[:, None]), 0) / G
        tl.store(attention_ptr + slot, before + share, mask=owned)


@triton.jit
def _barrier(HIP: tl.constexpr):
    """Every thread's loads and stores are done before any thread goes on; a release by one of them then covers all.

    On AMD (CDNA) `tl.debug_barrier` is a bare s_barrier, past which a wave's stores may still be under way.
    """
    if HIP:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v,~{memory}", [tl.program_id(0)], tl.int32, False, 1
        )
    tl.debug_barrier()


@triton.jit
def _count_token(lengths_ptr, seen_ptr, pair, held, HEADS: tl.constexpr):
    """The token is stored: lengths becomes `held`; the first head of a sequence also counts it in seen."""
    tl.store(lengths_ptr + pair, held)
    if pair % HEADS == 0:
        place = seen_ptr + pair // HEADS
        tl.store(place, tl.load(place) + 1)


@triton.jit
def _of_token(ptr, row, pair, size: tl.constexpr, HEADS: tl.constexpr):
    """Where a pair of the batch finds its `size` elements of the token; row: from one sequence to the next."""
    return ptr + pair // HEADS * row + pair % HEADS * size


@triton.jit
def _home(rows_ptr, page, pair, HEADS: tl.constexpr):
    """Where a pair of the batch lives: the row of the state, and the number of its pair there, or in the row's page.

    rows_ptr: [B] int64, None where batch row b lives in state row b.  page: see `_page`.
    """
    if rows_ptr is None:
        return pair // HEADS, pair
    else:
        row = tl.load(rows_ptr + pair // HEADS).to(tl.int64)
        if page is None:
            return row, row * HEADS + pair % HEADS
        else:
            return row, pair % HEADS


@triton.jit
def _page(pointer, row, page):
    """A tensor's part in the page of a row; the tensor itself where it is no view of pages.

    page: units of 16 bytes from one page to the next, None without pages; so the compiler sees that parts are aligned.
    """
    if page is None:
        return pointer
    else:
        return pointer + row * page * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _own_results(results, pair, GROUP: tl.constexpr):
    """Where the results of a pair belong."""
    first = pair * GROUP.G
    return ResultPointers(
        results.out_ptr + first * GROUP.D, results.lse_retained_ptr + first, results.lse_evicted_ptr + first
    )


@triton.jit
def _store_nothing(results, GROUP: tl.constexpr):
    """Attention over nothing, of a pair that is nobody's."""
    M: tl.constexpr = GROUP.M
    BLOCK_D: tl.constexpr = GROUP.BLOCK_D
    rows, cols = tl.arange(0, M), tl.arange(0, BLOCK_D)
    place, mask = rows[:, None] * GROUP.D + cols[None, :], (rows < GROUP.G)[:, None] & (cols < GROUP.D)[None, :]
    tl.store(results.out_ptr + place, tl.zeros([M, BLOCK_D], results.out_ptr.dtype.element_ty), mask=mask)
    tl.store(results.lse_retained_ptr + rows, -float("inf"), mask=rows < GROUP.G)
    tl.store(results.lse_evicted_ptr + rows, -float("inf"), mask=rows < GROUP.G)


@triton.jit
def _stretch(starts_ptr, pair, slots, HEADS: tl.constexpr):
    """Where the slots of a pair begin and how many it owns: all `slots` of its own, or with starts_ptr [B, HEADS + 1]
    a stretch of the `slots` of its sequence."""
    if starts_ptr is None:
        return pair * slots, slots
    else:
        starts_ptr += (pair // HEADS) * (HEADS + 1) + pair % HEADS
        first = tl.load(starts_ptr)
        return (pair // HEADS) * slots + first, tl.load(starts_ptr + 1) - first


@triton.constexpr_function
def _bits(number: int) -> int:
    """Of the number: steps of a bisection among so many and one."""
    return number.bit_length()


@triton.jit
def _dealt(starts_ptr, row, program, share_of, splits, HEADS: tl.constexpr, MOST: tl.constexpr):
    """Which head of a sequence one of its HEADS * splits programs works for, where heads have unequally many slots, and
    as many programs as these need, at least one and at most MOST.

    What a head holds would not do: it changes while programs begin.

    Args: starts_ptr [B, HEADS + 1].  program: its number; -1 asks about head `share_of`.
    Returns: the head, HEADS if there is nothing to do; its first program, and how many it has.
    """
    programs = HEADS * splits
    WIDTH: tl.constexpr = triton.next_power_of_2(HEADS)
    head = tl.arange(0, WIDTH)
    starts_ptr += row * (HEADS + 1) + head
    here = head < HEADS
    size = tl.load(starts_ptr + 1, mask=here, other=0) - tl.load(starts_ptr, mask=here, other=0)
    total, least = tl.sum(size, 0), tl.maximum(tl.cdiv(tl.max(size, 0), MOST), 1)
    few, many = programs - HEADS, programs
    # In how many shares: `few` never need more programs than there are. After a while loop triton would no longer know
    # what is aligned.
    for _ in tl.static_range(_bits(HEADS)):
        middle = (few + many + 1) // 2
        each = tl.cdiv(size, tl.maximum(tl.cdiv(total, middle), least))
        fits = tl.sum(tl.where(here, tl.maximum(each, 1), 0), 0) <= programs
        few, many = tl.where(fits, middle, few), tl.where(fits, many, middle - 1)
    share = tl.maximum(tl.cdiv(total, few), least)
    each = tl.where(here, tl.maximum(tl.cdiv(size, share), 1), 0)
    end = tl.sum(tl.where(head[:, None] <= head[None, :], each[:, None], 0), 0)
    own = tl.where(program < 0, share_of, tl.sum((here & (end <= program)).to(tl.int32), 0))
    mine = head == own
    count = tl.sum(tl.where(mine, each, 0), 0)
    return own, tl.sum(tl.where(mine, end, 0), 0) - count, count


@triton.jit
def _in_scratch(starts_ptr, base, pair, own, slots, HEADS: tl.constexpr):
    """`_stretch`'s beginning `base` for pair `own` of a state, as it is in scratch for all slots of a batch."""
    if starts_ptr is None:
        return base + (pair - own) * slots
    else:
        return base + (pair - own) // HEADS * slots
