"""The largest weight that any query gives each key, where all see all: N of the default policy, and KVzip's score.

Twins of `reference.peak_attention` and `reference.most_attended`: max over queries i of exp(s q_i.k_j - lse_i), where
lse_i is of all keys and the sink, or given. One launch, and one before it that finds lse; no logits in memory. Programs
own queries there, keys here, and a maximum is the same in any order.
Before, `every_query` chooses who is asked, and after it `peaks_to_keep` makes N of the maxima.
Bytes: an owner reads its own once and all of the others, out of the L2 cache; 4 (T Hq + N Hkv) out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..reference import check_peak, check_pool
from ._arguments import Scaling, View
from ._attention import LOG2E, _add_sink, _dot, _logits2
from ._launch import check_head_dim, check_like, pow2, stages
from .blocks import _real_before
from .expected_attention import COLUMNS, TINY, _lengths
from .slot_signals import in_order

# padded head_dim: (rows, columns, warps)
TILES = {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 64, 4), 128: (64, 64, 4), 256: (32, 32, 8), 512: (32, 32, 8)}
ROWS, BLOCK = 64, 2048  # queries or keys of a program that copies or pools them; masks read at once


@triton.jit
def _tile(rows_ptr, first, number, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Rows [ROWS, BD] from `first` on of a matrix [number, D], 0 beyond."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < number)[:, None] & (column < D)[None, :]
    return tl.load(rows_ptr + row[:, None] * D + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["T", "N"])  # the length of a prompt
def _lse_kernel(
    q_ptr, keys_ptr, valid_ptr, asked_ptr, sink_ptr, lse_ptr, scaling: Scaling, T, N,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """lse of BLOCK_M queries of one head, in units of log 2; inf for those that are not asked or see nothing."""
    head = tl.program_id(1).to(tl.int64)  # of queries, of all sequences
    kv = head // G
    first = tl.program_id(0) * BLOCK_M
    q = _tile(q_ptr + head * T * D, first, T, D, BD, BLOCK_M)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, N, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        real = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
        k = _tile(keys_ptr + kv * N * D, start, N, D, BD, BLOCK_N)
        k = tl.where(real[:, None], k, 0.0)  # what is not real may be no number
        logits = _logits2(_dot(q, tl.trans(k)), scaling)
        logits = tl.where(real[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
    if sink_ptr is not None:
        top, total, _ = _add_sink(top, total, tl.load(sink_ptr + head % (HEADS * G)))
    row = first + tl.arange(0, BLOCK_M)
    asks = tl.load(asked_ptr + head // (HEADS * G) * T + row, mask=row < T, other=0) != 0
    sees = asks & (total > 0)
    lse = tl.where(sees, top + tl.log2(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(lse_ptr + head * T + row, lse, mask=row < T)


@triton.jit(do_not_specialize=["T", "N"])  # the length of a prompt
def _peak_kernel(
    q_ptr, keys_ptr, valid_ptr, lse_ptr, peak_ptr, scaling: Scaling, T, N,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest weight of BLOCK_N keys of one head."""
    kv = tl.program_id(1).to(tl.int64)  # of keys, of all sequences
    first = tl.program_id(0) * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)
    real = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
    k = _tile(keys_ptr + kv * N * D, first, N, D, BD, BLOCK_N)
    k = tl.trans(tl.where(real[:, None], k, 0.0))
    most = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for group in range(0, G):
        head = kv * G + group
        for start in range(0, T, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = _tile(q_ptr + head * T * D, start, T, D, BD, BLOCK_M)
            logits = _logits2(_dot(q, k), scaling)
            lse = tl.load(lse_ptr + head * T + row, mask=row < T, other=float("inf"))
            most = tl.maximum(most, tl.max(logits - lse[:, None], 0))
    tl.store(peak_ptr + kv * N + key, tl.exp2(tl.where(real, most, -float("inf"))), mask=key < N)


class _Case:
    """What both kernels are launched with: the tensors, contiguous, and the numbers that follow from their shapes."""

    def __init__(self, q: Tensor, keys: Tensor, valid: Tensor, scale: float, softcap: float | None) -> None:
        dim = q.shape[-1]
        check_head_dim("peak_attention", dim)
        self.q, self.keys, self.valid = (tensor.contiguous() for tensor in (q, keys, valid))
        self.rows, self.columns, warps = TILES[pow2(dim, 16)]
        self.numbers = Scaling(scale, softcap), q.shape[2], keys.shape[2]
        groups = q.shape[1] // keys.shape[1]
        self.flags = {"G": groups, "D": dim, "BD": pow2(dim, 16), "BLOCK_M": self.rows, "BLOCK_N": self.columns}
        self.flags |= {"num_warps": warps, "num_stages": stages(2)}

    def lse(self, asked: Tensor, sink_logits: Tensor | None) -> Tensor:
        """[B, Hq, T] fp32, base 2."""
        batch, num_heads, asking = self.q.shape[:3]
        lse = torch.empty(batch, num_heads, asking, dtype=torch.float32, device=self.q.device)
        _lse_kernel[(triton.cdiv(asking, self.rows), batch * num_heads)](
            self.q, self.keys, self.valid, asked, sink_logits, lse, *self.numbers, HEADS=self.keys.shape[1],
            **self.flags,
        )  # fmt: skip
        return lse

    def peaks(self, lse: Tensor) -> Tensor:
        """[B, Hkv, N] fp32, for lse in base 2."""
        batch, heads, num = self.keys.shape[:3]
        peak = torch.empty(batch, heads, num, dtype=torch.float32, device=self.q.device)
        _peak_kernel[(triton.cdiv(num, self.columns), batch * heads)](
            self.q, self.keys, self.valid, lse, peak, *self.numbers, **self.flags
        )
        return peak


def peak_attention(
    q: Tensor, keys: Tensor, scale: float, softcap: float | None = None, *,
    valid: Tensor, asked: Tensor, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`reference.peak_attention`: the largest weight that any asked query gives each key.

    Args: q [B, Hq, T, D], keys [B, Hkv, N, D] post-RoPE; valid [B, Hkv, N] bool; asked [B, T] bool; sink_logits [Hq].
    Returns: [B, Hkv, N] fp32, 0 where not valid. Cost: two launches; copies of what is not contiguous; no host sync.
    """
    check_peak(q, keys, valid)
    check_like("peak_attention", (q.shape[0], q.shape[2]), asked=asked)
    check_like("peak_attention", (q.shape[1],), sink_logits=sink_logits)
    if not valid.numel() or not asked.numel():
        return torch.zeros(valid.shape, dtype=torch.float32, device=q.device)
    case = _Case(q, keys, valid, scale, softcap)
    return case.peaks(case.lse(asked.contiguous(), sink_logits))


def most_attended(q: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """`reference.most_attended`: the largest share of what a query attends to that it gives each key.

    Args: q [B, Hq, T, D], keys [B, Hkv, N, D] post-RoPE; lse [B, Hq, T]: of all that each query attends to.
    Returns: [B, Hkv, N] fp32. Cost: one launch; copies of what is not contiguous; no host sync.
    """
    valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=q.device)
    check_peak(q, keys, valid, lse)
    if not valid.numel() or not lse.numel():
        return torch.zeros(valid.shape, dtype=torch.float32, device=q.device)
    return _Case(q, keys, valid, scale, softcap).peaks((lse.float() * LOG2E.value).contiguous())


@triton.jit(do_not_specialize=["T", "N", "every", "asking"])
def _every_kernel(
    queries: View, valid_ptr, chosen_ptr, asked_ptr, T, N, every, asking, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of queries, of all sequences
    batch, first = head // HEADS, tl.program_id(1) * ROWS
    valid_ptr += batch * KV * N + N - T
    before, total = _real_before(valid_ptr, first, T, BLOCK)
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    real = (tl.load(valid_ptr + row, mask=row < T, other=0) != 0).to(tl.int32)
    rank = before + tl.cumsum(real, 0) - real  # among the real ones; all others come after them
    rank = tl.where(real != 0, rank, total + row - rank)
    picked, place = (row < T) & (rank % every == 0), rank // every
    queries_ptr = queries.ptr + batch * queries.stride_b + (head % HEADS) * queries.stride_h
    inside = picked[:, None] & (column < D)[None, :]
    q = tl.load(queries_ptr + row.to(tl.int64)[:, None] * queries.stride_t + column[None, :], mask=inside, other=0.0)
    tl.store(chosen_ptr + (head * asking + place)[:, None] * D + column[None, :], q, mask=inside)
    if head % HEADS == 0:
        tl.store(asked_ptr + batch * asking + place, real.to(tl.uint8), mask=picked)


def every_query(queries: Tensor, valid: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """`reference.every_query`: queries [B, Hq, T, D], unit stride along D; valid [B, Hkv, N] bool. Cost: one launch."""
    batch, heads, num, dim = queries.shape
    valid, asking = valid.contiguous(), triton.cdiv(num, every)
    assert queries.stride(-1) == 1 and len(valid) == batch and num <= valid.shape[2]
    chosen = torch.empty(batch, heads, asking, dim, dtype=queries.dtype, device=queries.device)
    asked = torch.empty(batch, asking, dtype=torch.bool, device=queries.device)
    if asked.numel():
        _every_kernel[batch * heads, triton.cdiv(num, ROWS)](
            View.of(queries), valid.view(torch.uint8), chosen, asked.view(torch.uint8), num, valid.shape[2], every,
            asking, HEADS=heads, KV=valid.shape[1], D=dim, BD=pow2(dim, 16), ROWS=ROWS, BLOCK=BLOCK,
        )  # fmt: skip
    return chosen, asked


@triton.jit(do_not_specialize=["N"])
def _pool_kernel(
    most_ptr, values: View, memory_ptr, positions_ptr, order_ptr, counts_ptr, out_ptr, N, HEADS: tl.constexpr,
    D: tl.constexpr, POOL: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # values_ptr, memory_ptr None: means of scores. positions_ptr None: whatever chunk of the text a neighbour is in.
    kv = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    most_ptr, order_ptr, out_ptr = most_ptr + kv * N, order_ptr + kv * N, out_ptr + kv * N
    count = tl.load(counts_ptr + kv).to(tl.int32)
    own = tl.load(order_ptr + rank, mask=rank < N, other=0)
    if positions_ptr is not None:
        positions_ptr += kv * N
        chunk = tl.load(positions_ptr + own, mask=rank < count, other=0) // CHUNK
    total = tl.zeros([ROWS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for step in range(0, POOL):
        near = rank + step - POOL // 2
        inside = (near >= 0) & (near < count)
        index = tl.load(order_ptr + near, mask=inside, other=0).to(tl.int32)
        if positions_ptr is not None:
            inside &= tl.load(positions_ptr + index, mask=inside, other=0) // CHUNK == chunk
        weight = tl.load(most_ptr + index, mask=inside, other=0.0)
        if values.ptr is not None:
            weight *= _lengths(values, kv, index, N, HEADS, D, COLUMNS)
        total += tl.where(inside, weight, 0.0)
        number += inside.to(tl.float32)
    if memory_ptr is not None:
        known = tl.where(rank < count, tl.maximum(total / tl.maximum(number, 1.0), TINY), 0.0)
        known = tl.maximum(tl.load(memory_ptr + kv * N + own, mask=rank < N, other=0.0), known)
    elif positions_ptr is not None:
        known = tl.where(rank < count, total / tl.maximum(number, 1.0), 0.0)
    else:  # beyond the ends is nothing
        known = total / POOL
    tl.store(out_ptr + own, known, mask=rank < N)


def _pooled(
    scores: Tensor, values: Tensor | None, memory: Tensor | None, positions: Tensor, valid: Tensor, pool: int,
    chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """The two launches of means over neighbours."""
    check_like("pool", valid.shape, scores=scores, memory=memory, positions=positions, valid=valid)
    order, counts = in_order(positions, valid)
    out = torch.empty_like(scores)
    if out.numel():
        view = View(None, 0, 0, 0) if values is None else View.of(values)
        _pool_kernel[counts.numel(), triton.cdiv(valid.shape[2], ROWS)](
            scores, view, memory, positions if chunk else None, order, counts, out, valid.shape[2],
            HEADS=valid.shape[1], D=0 if values is None else values.shape[-1], POOL=pool, CHUNK=chunk or 1, ROWS=ROWS,
        )  # fmt: skip
    return out


def pool_scores(scores: Tensor, pool: int, positions: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """`reference.pool_scores`: scores fp32, positions int32, valid bool [B, Hkv, N], contiguous. Cost: as below."""
    if pool == 1 or positions is None or valid is None:
        return reference.pool_scores(scores, pool)
    check_pool(pool)
    return _pooled(scores, None, None, positions, valid, pool)


def chunk_mean(scores: Tensor, chunk: int, positions: Tensor, valid: Tensor) -> Tensor:
    """`reference.chunk_mean`: scores fp32, positions int32, valid bool [B, Hkv, N], contiguous. Cost: as below."""
    return _pooled(scores, None, None, positions, valid, 2 * chunk - 1, chunk)


def peaks_to_keep(most: Tensor, values: Tensor, memory: Tensor, positions: Tensor, valid: Tensor, pool: int) -> Tensor:
    """`reference.peaks_to_keep`.

    Args: most, memory fp32, positions int32, valid bool [B, Hkv, N], contiguous; values [B, Hkv, N, Dv], unit stride
        along Dv.
    Cost: two launches, and a sort of many candidates; values are read `pool` times.
    """
    assert values.stride(-1) == 1
    return _pooled(most, values, memory, positions, valid, pool)
