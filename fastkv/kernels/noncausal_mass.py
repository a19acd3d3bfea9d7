"""Attention each key receives from the queries of its chunk, past and future: Compactor, Sec. 3.3, before pooling.

Tokens are cut into chunks of C consecutive real tokens. Within a chunk, without a causal mask,
mass_j = mean over the group of sum_i softmax(scale * q_i . k_j over j)[j]. The ragged last chunk has neither padded
rows nor padded columns: the masses of a chunk of r tokens sum to r. Twin of `reference.noncausal_attention_mass`.

C <= 256, where the keys fit on chip: one program per (chunk, KV head, sequence) holds the keys of the chunk and loops
over its queries; a tile holds whole rows of the softmax, so there is one pass and no row statistics. Otherwise: a pass
for the row log-sums, then programs that own columns. No atomics.
Bytes: keys and queries once (twice for large chunks), 4 N out. Real tokens are addressed through a list if there is a
mask. Does not handle: pooling (`pool.pool_scores`), and masks that differ within a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_groups, check_shape
from ._arguments import Scaling, View
from ._attention import LOG2E, _add_sink, _dot, _logits2
from ._launch import cdiv, check_head_dim, check_like, on_hip, pow2, stages

ON_CHIP = 256  # largest chunk of the single pass
# padded head_dim: (query rows, warps) of the single pass; its columns are the chunk
SINGLE = {16: (64, 4), 32: (64, 4), 64: (64, 8), 128: (64, 8), 256: (32, 8), 512: (16, 8)}
# padded head_dim: (rows, columns, warps) of the two passes
DOUBLE = {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 64, 4), 128: (64, 64, 4), 256: (32, 32, 8), 512: (32, 32, 8)}


class Tile(NamedTuple):
    """Constants of a launch: heads, their numbers, padded ones; BLOCK_M queries and BLOCK_N keys at a time."""

    HEADS: int
    G: int
    D: int
    BD: int
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def _address(order_ptr, head, N, rank, inside):
    """Index of the tokens of the given ranks, int64."""
    index = rank.to(tl.int64)
    if order_ptr is not None:
        index = tl.load(order_ptr + head * N + rank, mask=inside, other=0)
    return index


@triton.jit
def _rows(base_ptr, index, inside, stride, D: tl.constexpr, BD: tl.constexpr):
    """Rows [len(index), BD], 0 where not inside."""
    column = tl.arange(0, BD)[None, :]
    return tl.load(base_ptr + index[:, None] * stride + column, mask=inside[:, None] & (column < D), other=0.0)


@triton.jit(do_not_specialize=["N", "chunk"])  # the length of a prompt
def _lse_kernel(
    q: View, keys: View, order_ptr, count_ptr, lse_ptr, sink_ptr, scaling: Scaling, N, chunk, TILE: tl.constexpr
):
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    tiles = tl.cdiv(chunk, BLOCK_M)
    low = tl.program_id(0) // tiles * chunk
    real = tl.minimum(low + chunk, N)
    if order_ptr is not None:
        real = tl.minimum(real, tl.load(count_ptr + head).to(tl.int32))
    row = low + tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    asks = row < real
    q_base = q.ptr + batch * q.stride_b + (kv * G + tl.program_id(2)) * q.stride_h
    asked = _rows(q_base, _address(order_ptr, head, N, row, asks), asks, q.stride_t, D, BD)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(low, real, BLOCK_N):
        rank = first + tl.arange(0, BLOCK_N)
        index = _address(order_ptr, head, N, rank, rank < real)
        k = _rows(keys.ptr + batch * keys.stride_b + kv * keys.stride_h, index, rank < real, keys.stride_t, D, BD)
        logits = _logits2(_dot(asked, tl.trans(k)), scaling)
        logits = tl.where((rank < real)[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), 1)
        top = new_top
    if sink_ptr is not None:
        top, total, _ = _add_sink(top, total, tl.load(sink_ptr + kv * G + tl.program_id(2)))
    place = (head * G + tl.program_id(2)) * N + row
    inside = (row < low + chunk) & (row < N)
    tl.store(lse_ptr + place, tl.where(asks, top + tl.log2(tl.where(asks, total, 1.0)), 0.0), mask=inside)


@triton.jit(do_not_specialize=["N", "chunk"])  # the length of a prompt
def _column_kernel(
    q: View, keys: View, order_ptr, count_ptr, lse_ptr, mass_ptr, sink_ptr, scaling: Scaling, N, chunk,
    TILE: tl.constexpr,
):  # fmt: skip
    # lse_ptr None: a tile holds whole rows of the softmax.
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    batch, kv = head // HEADS, head % HEADS
    tiles = tl.cdiv(chunk, BLOCK_N)
    low = tl.program_id(0) // tiles * chunk
    high = tl.minimum(low + chunk, N)
    real = high
    if order_ptr is not None:
        real = tl.minimum(high, tl.load(count_ptr + head).to(tl.int32))
    rank = low + tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    index = _address(order_ptr, head, N, rank, rank < high)
    k = _rows(keys.ptr + batch * keys.stride_b + kv * keys.stride_h, index, rank < real, keys.stride_t, D, BD)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for group in range(0, G):
        q_base = q.ptr + batch * q.stride_b + (kv * G + group) * q.stride_h
        for first in range(low, real, BLOCK_M):
            row = first + tl.arange(0, BLOCK_M)
            asks = row < real
            asked = _rows(q_base, _address(order_ptr, head, N, row, asks), asks, q.stride_t, D, BD)
            logits = _logits2(_dot(asked, tl.trans(k)), scaling)
            logits = tl.where((rank < real)[None, :], logits, -float("inf"))
            share = tl.where(asks, 1.0, 0.0)
            if lse_ptr is not None:
                top = tl.load(lse_ptr + (head * G + group) * N + row, mask=asks, other=0.0)
                weights = tl.exp2(logits - top[:, None])
            else:
                top = tl.max(logits, 1)
                if sink_ptr is not None:
                    sink2 = tl.load(sink_ptr + kv * G + group).to(tl.float32) * LOG2E
                    top = tl.maximum(top, sink2)
                weights = tl.exp2(logits - top[:, None])
                total = tl.sum(weights, 1)
                if sink_ptr is not None:
                    total += tl.exp2(sink2 - top)
                share /= total
            sums += tl.sum(weights * share[:, None], 0)
    tl.store(mass_ptr + head * N + index, sums / G, mask=rank < high)


def noncausal_attention_mass(
    q: Tensor, keys: Tensor, scale: float, chunk: int = 256, *, softcap: float | None = None,
    mask: Tensor | None = None, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`reference.noncausal_attention_mass`; q and keys have any strides, unit stride along D.

    Cost: one launch up to chunk = 256, else two; with a mask an argsort of it; no host sync.
    """
    batch, num_heads, num, dim = q.shape
    heads = keys.shape[1]
    groups = check_groups("noncausal_attention_mass", num_heads, heads)
    check_shape("noncausal_attention_mass", "keys", keys, (batch, heads, num, dim))
    check_head_dim("noncausal_attention_mass", dim)
    if chunk < 1:
        raise FastKVError(f"noncausal_attention_mass: chunk must be at least 1 token, got {chunk}; the paper uses 256")
    check_like("noncausal_attention_mass", (num_heads,), sink_logits=sink_logits)
    assert q.stride(-1) == keys.stride(-1) == 1
    mass = torch.empty(batch, heads, num, dtype=torch.float32, device=q.device)
    if not mass.numel():
        return mass
    order = count = None
    if mask is not None:
        check_like("noncausal_attention_mass", (batch, heads, num), mask=mask)
        order, count = mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True), mask.sum(-1)
    block, chunk = pow2(chunk, 16), min(chunk, num)
    width = pow2(dim, 16)
    inputs, numbers = (View.of(q), View.of(keys), order, count), (Scaling(scale, softcap), num, chunk)
    chunks, pairs = cdiv(num, chunk), batch * heads
    (rows, columns, warps), lse = DOUBLE[width], None
    # Elements of keys in shared memory beside the queries: AMD has 64 KiB, fp32 needs copies.
    if block <= ON_CHIP and block * width <= (16 if on_hip() or q.element_size() == 4 else 64) << 10:
        (rows, warps), columns = SINGLE[width], block
    else:
        lse = torch.empty(batch, num_heads, num, dtype=torch.float32, device=q.device)
    flags = {"TILE": Tile(heads, groups, dim, width, rows, columns), "num_warps": warps, "num_stages": stages(2)}
    if lse is not None:
        _lse_kernel[(chunks * cdiv(chunk, rows), pairs, groups)](*inputs, lse, sink_logits, *numbers, **flags)
    grid = chunks * cdiv(chunk, columns), pairs
    _column_kernel[grid](*inputs, lse, mass, sink_logits, *numbers, **flags)
    return mass
