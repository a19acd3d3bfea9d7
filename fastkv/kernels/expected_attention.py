"""The attention that Gaussian queries are expected to give each key (Expected Attention, arXiv:2510.00636).

    logit_i = s (m.k_i + s/2 k_i.C k_i);   attention_i = mean over the query heads of softmax_i(logit)

Twin of `reference.expected_attention`. Launches: programs of the first take a tile of keys and multiply it with the
covariance C of one query head; those of the second find the largest logit of a query head and the sum of its weights;
those of the third add up the weights of the query heads of a KV head.
Bytes per KV head with G query heads: 2 G N D for keys in half precision, 4 G D^2 for covariances, which every tile
reads again from L2, and 16 G N for logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import check_groups
from ._arguments import View
from ._attention import _dot32, _sum_products
from ._launch import check_head_dim, check_like, pow2, stages

TILES = {64: (32, 16, 4), 128: (32, 16, 4), 256: (32, 32, 8), 512: (16, 32, 8)}  # padded D -> keys, rows of C, warps
BLOCK = 1024


class Tile(NamedTuple):
    """Constants of a launch: KV heads and query heads of each; numbers of a key, padded; keys and rows of C at once."""

    HEADS: int
    G: int
    D: int
    BD: int
    BLOCK_N: int
    BLOCK_K: int


@triton.jit(do_not_specialize=["N"])  # the length of a prompt
def _logit_kernel(keys: View, valid_ptr, mean_ptr, covariance_ptr, logits_ptr, scale, N, TILE: tl.constexpr):
    HEADS: tl.constexpr = TILE.HEADS
    D: tl.constexpr = TILE.D
    BD: tl.constexpr = TILE.BD
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    head = tl.program_id(0).to(tl.int64)  # of queries, of all sequences
    kv = head // TILE.G
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = tl.load(valid_ptr + kv * N + key, mask=key < N, other=0) != 0
    keys_ptr = keys.ptr + (kv // HEADS) * keys.stride_b + (kv % HEADS) * keys.stride_h
    row_ptr = keys_ptr + key.to(tl.int64)[:, None] * keys.stride_t
    column = tl.arange(0, BD)
    turned = tl.zeros([BLOCK_N, BD], tl.float32)
    for first in range(0, D, BLOCK_K):
        some = first + tl.arange(0, BLOCK_K)
        k = tl.load(row_ptr + some[None, :], mask=real[:, None] & (some < D)[None, :], other=0.0)
        place = head * D * D + some[:, None] * D + column[None, :]
        c = tl.load(covariance_ptr + place, mask=(some < D)[:, None] & (column < D)[None, :], other=0.0)
        turned += _dot32(k.to(tl.float32), c)
    k = tl.load(row_ptr + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + head * D + column, mask=column < D, other=0.0)
    logit = scale * _sum_products(k, turned * (scale / 2) + mean[None, :])
    tl.store(logits_ptr + head * N + key, tl.where(real, logit, -float("inf")), mask=key < N)


@triton.jit(do_not_specialize=["N"])
def _sum_kernel(logits_ptr, sums_ptr, N, G: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    own_ptr = logits_ptr + head * N
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(own_ptr + index, mask=index < N, other=-float("inf")))
    top = tl.max(tops, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, BLOCK):
        index = first + tl.arange(0, BLOCK)
        totals += tl.exp(tl.load(own_ptr + index, mask=index < N, other=-float("inf")) - top)
    total = tl.sum(totals, 0)
    tl.store(sums_ptr + head * 2, top)
    tl.store(sums_ptr + head * 2 + 1, 1.0 / tl.where(total > 0, total * G, 1.0))


@triton.jit(do_not_specialize=["N"])
def _weight_kernel(logits_ptr, sums_ptr, attention_ptr, N, G: tl.constexpr, BLOCK: tl.constexpr):
    kv = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights = tl.zeros([BLOCK], tl.float32)
    for member in range(0, G):
        head = kv * G + member
        logits = tl.load(logits_ptr + head * N + index, mask=index < N, other=-float("inf"))
        weights += tl.exp(logits - tl.load(sums_ptr + head * 2)) * tl.load(sums_ptr + head * 2 + 1)
    tl.store(attention_ptr + kv * N + index, weights, mask=index < N)


def expected_attention(keys: Tensor, mean: Tensor, covariance: Tensor, scale: float, *, valid: Tensor) -> Tensor:
    """`reference.expected_attention`.

    Args: keys [B, Hkv, N, D], unit stride along D; mean [B, Hq, 1, D] and covariance [B, Hq, D, D] fp32, contiguous;
        valid [B, Hkv, N] bool.
    Returns: [B, Hkv, N] fp32, 0 where not valid. Cost: three launches; no host sync.
    Raises: FastKVError for shapes or strides that do not fit.
    """
    op, (batch, heads, num, dim) = "expected_attention", keys.shape
    check_head_dim(op, dim)
    num_heads = mean.shape[1]
    groups = check_groups(op, num_heads, heads)
    check_like(op, (batch, num_heads, 1, dim), mean=mean)
    check_like(op, (batch, num_heads, dim, dim), covariance=covariance)
    valid = valid.contiguous()
    check_like(op, (batch, heads, num), valid=valid)
    assert keys.stride(-1) == 1
    attention = torch.empty(batch, heads, num, dtype=torch.float32, device=keys.device)
    if not attention.numel():
        return attention
    padded = pow2(dim, 64)
    some, rows, num_warps = TILES[padded]
    logits = torch.empty(batch, num_heads, num, dtype=torch.float32, device=keys.device)
    _logit_kernel[batch * num_heads, triton.cdiv(num, some)](
        View.of(keys), valid.view(torch.uint8), mean, covariance, logits, scale, num,
        TILE=Tile(heads, groups, dim, padded, some, rows), num_warps=num_warps, num_stages=stages(2),
    )  # fmt: skip
    sums = torch.empty(batch, num_heads, 2, dtype=torch.float32, device=keys.device)
    _sum_kernel[(batch * num_heads,)](logits, sums, num, G=groups, BLOCK=BLOCK)
    grid = batch * heads, triton.cdiv(num, BLOCK)
    _weight_kernel[grid](logits, sums, attention, num, G=groups, BLOCK=BLOCK)
    return attention
