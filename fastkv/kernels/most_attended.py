"""The largest share of what a query attends to that any query gives each key: what a second reading says (KVzip).

Twin of `reference.most_attended`: max over queries i of exp(s q_i.k_j - lse_i). One launch, no logits in memory. A
program owns keys and reads all queries, out of the L2 cache. Bytes: keys and queries once; 4 N Hkv out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import check_most_attended
from ._arguments import Scaling, View
from ._attention import LOG2E, _dot, _logits2
from ._launch import cdiv, check_head_dim, pow2, stages
from .noncausal_mass import Tile

# padded head_dim: (rows, columns, warps)
TILES = {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 64, 4), 128: (64, 64, 4), 256: (32, 32, 8), 512: (32, 32, 8)}


@triton.jit(do_not_specialize=["T", "N"])  # the length of a prompt
def _most_attended_kernel(q: View, keys: View, lse_ptr, most_ptr, scaling: Scaling, T, N, TILE: tl.constexpr):
    """The largest weight of BLOCK_N keys of one head; lse_ptr in units of log 2."""
    HEADS: tl.constexpr = TILE.HEADS
    G: tl.constexpr = TILE.G
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    pair = tl.program_id(1)  # of all sequences; divided while it has 32 bits
    kv, head, batch = pair.to(tl.int64), (pair % HEADS).to(tl.int64), (pair // HEADS).to(tl.int64)
    key, column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, TILE.BD)
    wide = (column < TILE.D)[None, :]
    rows_ptr = keys.ptr + batch * keys.stride_b + head * keys.stride_h + key.to(tl.int64) * keys.stride_t
    k = tl.load(rows_ptr[:, None] + column[None, :], mask=(key < N)[:, None] & wide, other=0.0)
    k = tl.trans(k)
    most = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for group in range(0, G):
        own_ptr = q.ptr + batch * q.stride_b + (head * G + group) * q.stride_h
        for start in range(0, T, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            rows_ptr = own_ptr + row.to(tl.int64) * q.stride_t
            asked = tl.load(rows_ptr[:, None] + column[None, :], mask=(row < T)[:, None] & wide, other=0.0)
            logits = _logits2(_dot(asked, k), scaling)
            lse = tl.load(lse_ptr + (kv * G + group) * T + row, mask=row < T, other=float("inf"))
            most = tl.maximum(most, tl.max(logits - lse[:, None], 0))
    tl.store(most_ptr + kv * N + key, tl.exp2(most), mask=key < N)


def most_attended(q: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """`reference.most_attended`: one launch, no host sync; q and keys have unit stride along D."""
    groups, (batch, heads, num, dim) = check_most_attended(q, keys, lse), keys.shape
    check_head_dim("most_attended", dim)
    assert q.stride(-1) == keys.stride(-1) == 1
    most = torch.zeros(batch, heads, num, dtype=torch.float32, device=q.device)
    if most.numel() and lse.numel():
        rows, columns, warps = TILES[pow2(dim, 16)]
        _most_attended_kernel[(cdiv(num, columns), batch * heads)](
            View.of(q), View.of(keys), (lse.float() * LOG2E.value).contiguous(), most, Scaling(scale, softcap),
            q.shape[2], num, TILE=Tile(heads, groups, dim, pow2(dim, 16), rows, columns), num_warps=warps,
            num_stages=stages(2),
        )  # fmt: skip
    return most
