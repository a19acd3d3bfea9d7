"""The largest weight that any query gives each key, where all see all: N of the default policy, and KVzip's score.

Twins of `reference.peak_attention` and `reference.most_attended`: max over queries i of exp(s q_i.k_j - lse_i), where
lse_i is of all keys and the sink, or given. One launch, and one before it that finds lse, and who is asked; no logits
in memory. Programs own queries there, keys here, and a maximum is the same in any order. `peaks_to_keep` makes N of the
maxima; it, `pool_scores` and `chunk_mean` are one kernel.
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
from .blocks import SCAN, _of_rank, _real_before
from .expected_attention import COLUMNS, TINY, _lengths
from .noncausal_mass import Tile
from .slot_signals import in_order

# padded head_dim: (rows, columns, warps)
TILES = {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 64, 4), 128: (64, 64, 4), 256: (32, 32, 8), 512: (32, 32, 8)}
ROWS = 64  # keys of a program that pools them


@triton.jit
def _tile(rows_ptr, first, number, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Rows [ROWS, BD] from `first` on of a matrix [number, D], 0 beyond."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < number)[:, None] & (column < D)[None, :]
    return tl.load(rows_ptr + row[:, None] * D + column[None, :], mask=inside, other=0.0)


@triton.jit
def _queries(q, head, token, asks, TILE: tl.constexpr):
    """Some queries of a head, of all sequences; 0 where not asked."""
    own, batch = (head % (TILE.HEADS * TILE.G)).to(tl.int64), (head // (TILE.HEADS * TILE.G)).to(tl.int64)
    column, far = tl.arange(0, TILE.BD), tl.where(asks, token, 0).to(tl.int64)
    row_ptr = q.ptr + batch * q.stride_b + own * q.stride_h + far * q.stride_t
    return tl.load(row_ptr[:, None] + column[None, :], mask=asks[:, None] & (column < TILE.D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "N", "every", "asking"])  # the length of a prompt
def _lse_kernel(
    q: View, keys_ptr, valid_ptr, tokens_ptr, sink_ptr, lse_ptr, scaling: Scaling, T, N, every, asking,
    TILE: tl.constexpr,
):  # fmt: skip
    """lse of BLOCK_M queries of one head, in units of log 2, inf for those that see nothing; and which they are, -1 for
    none: one in `every` of the block's real ones.
    """
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    D: tl.constexpr = TILE.D
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    number = tl.program_id(1)  # of a head of queries, of all sequences; divided while it has 32 bits
    head, kv, batch = number.to(tl.int64), (number // G).to(tl.int64), (number // (HEADS * G)).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block_ptr = valid_ptr + batch * HEADS * N + N - T
    _, real = _real_before(block_ptr, 0, T, SCAN)
    least = tl.program_id(0) * BLOCK_M * every
    most = tl.minimum(least + (BLOCK_M - 1) * every, real - 1)
    token = _of_rank(block_ptr, row * every, least, most, T)
    asks = (row < asking) & (row * every < real)
    q = _queries(q, number, token, asks, TILE)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, N, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
        k = _tile(keys_ptr + kv * N * D, start, N, D, TILE.BD, BLOCK_N)
        k = tl.where(there[:, None], k, 0.0)  # what is not real may be no number
        logits = _logits2(_dot(q, tl.trans(k)), scaling)
        logits = tl.where(there[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
    if sink_ptr is not None:
        top, total, _ = _add_sink(top, total, tl.load(sink_ptr + number % (HEADS * G)))
    sees = asks & (total > 0)
    lse = tl.where(sees, top + tl.log2(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(lse_ptr + head * asking + row, lse, mask=row < asking)
    if number % (HEADS * G) == 0:
        tl.store(tokens_ptr + batch * asking + row, tl.where(asks, token, -1), mask=row < asking)


@triton.jit(do_not_specialize=["N", "asking"])  # the length of a prompt
def _peak_kernel(
    q: View, keys_ptr, valid_ptr, tokens_ptr, lse_ptr, peak_ptr, scaling: Scaling, N, asking, TILE: tl.constexpr
):
    """The largest weight of BLOCK_N keys of one head. tokens_ptr None: all queries are asked."""
    G: tl.constexpr = TILE.G
    D: tl.constexpr = TILE.D
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    kv, batch = tl.program_id(1).to(tl.int64), (tl.program_id(1) // TILE.HEADS).to(tl.int64)  # of all sequences
    first = tl.program_id(0) * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)
    real = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
    k = _tile(keys_ptr + kv * N * D, first, N, D, TILE.BD, BLOCK_N)
    k = tl.trans(tl.where(real[:, None], k, 0.0))
    most = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for group in range(0, G):
        head = kv * G + group
        for start in range(0, asking, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            token = row
            if tokens_ptr is not None:
                token = tl.load(tokens_ptr + batch * asking + row, mask=row < asking, other=-1)
            asked = _queries(q, tl.program_id(1) * G + group, token, (row < asking) & (token >= 0), TILE)
            logits = _logits2(_dot(asked, k), scaling)
            lse = tl.load(lse_ptr + head * asking + row, mask=row < asking, other=float("inf"))
            most = tl.maximum(most, tl.max(logits - lse[:, None], 0))
    tl.store(peak_ptr + kv * N + key, tl.exp2(tl.where(real, most, -float("inf"))), mask=key < N)


class _Case:
    """What both kernels are launched with: the tensors, and the numbers that follow from their shapes."""

    def __init__(self, q: Tensor, keys: Tensor, valid: Tensor, scale: float, softcap: float | None) -> None:
        dim = q.shape[-1]
        check_head_dim("peak_attention", dim)
        assert q.stride(-1) == 1
        self.q, self.keys, self.valid = View.of(q), keys.contiguous(), valid.contiguous()
        self.rows, self.columns, warps = TILES[pow2(dim, 16)]
        self.scaling, (self.batch, self.num_heads, self.num) = Scaling(scale, softcap), q.shape[:3]
        heads = keys.shape[1]
        tile = Tile(heads, self.num_heads // heads, dim, pow2(dim, 16), self.rows, self.columns)
        self.flags = {"TILE": tile, "num_warps": warps, "num_stages": stages(2)}

    def made(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for a result of each sequence."""
        return torch.empty(self.batch, *shape, dtype=dtype, device=self.keys.device)

    def lse(self, every: int, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, Hq, R] fp32, base 2, of the R queries that are asked, and which they are, [B, R] int32."""
        asking = triton.cdiv(self.num, every)
        lse, tokens = self.made(self.num_heads, asking), self.made(asking, dtype=torch.int32)
        _lse_kernel[(triton.cdiv(asking, self.rows), self.batch * self.num_heads)](
            self.q, self.keys, self.valid, tokens, sink_logits, lse, self.scaling, self.num, self.keys.shape[2], every,
            asking, **self.flags,
        )  # fmt: skip
        return lse, tokens

    def peaks(self, lse: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[B, Hkv, N] fp32, for lse in base 2; tokens: the queries, None for all."""
        heads, num = self.keys.shape[1:3]
        peak = self.made(heads, num)
        _peak_kernel[(triton.cdiv(num, self.columns), self.batch * heads)](
            self.q, self.keys, self.valid, tokens, lse, peak, self.scaling, num, lse.shape[2], **self.flags
        )
        return peak


def peak_attention(
    q: Tensor, keys: Tensor, scale: float, softcap: float | None = None, *,
    valid: Tensor, every: int, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`reference.peak_attention`: the largest weight that any asked query gives each key.

    Args: q [B, Hq, T, D] with unit stride along D, keys [B, Hkv, N, D] post-RoPE; valid [B, Hkv, N] bool; every: one
        real query in so many is asked; sink_logits [Hq].
    Returns: [B, Hkv, N] fp32, 0 where not valid. Cost: two launches; a copy of keys with gaps; no host sync.
    """
    check_peak(q, keys, valid)
    check_like("peak_attention", (q.shape[1],), sink_logits=sink_logits)
    if not valid.numel() or not q.numel():
        return torch.zeros(valid.shape, dtype=torch.float32, device=q.device)
    assert q.shape[2] <= keys.shape[2]
    case = _Case(q, keys, valid, scale, softcap)
    return case.peaks(*case.lse(every, sink_logits))


def most_attended(q: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """`reference.most_attended`: the largest share of what a query attends to that it gives each key.

    Args: q [B, Hq, T, D] with unit stride along D, keys [B, Hkv, N, D] post-RoPE; lse [B, Hq, T]: of all that each
        query attends to.
    Returns: [B, Hkv, N] fp32. Cost: one launch; a copy of keys with gaps; no host sync.
    """
    valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=q.device)
    check_peak(q, keys, valid, lse)
    if not valid.numel() or not lse.numel():
        return torch.zeros(valid.shape, dtype=torch.float32, device=q.device)
    return _Case(q, keys, valid, scale, softcap).peaks((lse.float() * LOG2E.value).contiguous())


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
