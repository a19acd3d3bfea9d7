"""A peer of our own: the usual split-KV decode attention in two Triton kernels, written for comparison only.

Each program of the first kernel reads a share of the keys of one (sequence, KV head) for all query heads of the group
and writes a partial softmax; the second kernel merges the partials. No moments, no append, no lengths: what decode
attention in serving frameworks does, with the launch structure they use. Shares no code with fastkv/kernels.

Bytes: 4 L D per (sequence, KV head) in half precision, and the partials once out and once in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET = bool(triton.knobs.runtime.interpret)
TILES = {64: (64, 3), 128: (64, 3), 256: (32, 3)}  # head_dim: keys per step, pipeline stages


@triton.jit
def _multiply(a, b, INTERP: tl.constexpr):
    if INTERP:  # the interpreter cannot multiply half-precision matrices
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _split_kernel(
    q_ptr, keys_ptr, values_ptr, acc_ptr, lse_ptr, length, scale,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    """One share of the keys: acc [M, D], normalised, and its base-2 log-sum-exp."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, M), tl.arange(0, D)
    q = tl.load(q_ptr + (pair * G + row[:, None]) * D + column[None, :], mask=row[:, None] < G, other=0.0)
    share = tl.cdiv(length, SPLITS)
    end = tl.minimum((split + 1) * share, length)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for begin in range(split * share, end, BLOCK_N):
        index = begin + tl.arange(0, BLOCK_N)
        place = (pair * length + index[:, None]) * D + column[None, :]
        k = tl.load(keys_ptr + place, mask=index[:, None] < end, other=0.0)
        logits = _multiply(q, tl.trans(k), INTERP) * (scale * 1.4426950408889634)
        logits = tl.where(index[None, :] < end, logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[:, None])
        v = tl.load(values_ptr + place, mask=index[:, None] < end, other=0.0)
        acc = acc * decay[:, None] + _multiply(weights.to(v.dtype), v, INTERP)
        total = total * decay + tl.sum(weights, 1)
        top = new_top
    inside = row < G
    part = (pair * SPLITS + split) * G + row
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, -float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(acc_ptr + part[:, None] * D + column[None, :], acc, mask=inside[:, None])
    tl.store(lse_ptr + part, lse, mask=inside)


@triton.jit
def _merge_kernel(
    acc_ptr, lse_ptr, out_ptr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """One query head: the partials, weighted by their share of the mass."""
    head = tl.program_id(0).to(tl.int64)
    pair, row = head // G, head % G
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, D)
    part = (pair * SPLITS + split) * G + row
    lse = tl.load(lse_ptr + part, mask=split < SPLITS, other=-float("inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    acc = tl.load(acc_ptr + part[:, None] * D + column[None, :], mask=split[:, None] < SPLITS, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + head * D + column, out.to(out_ptr.dtype.element_ty))


def choose_splits(pairs: int, length: int, programs: int = 264) -> int:
    """Shares per pair, a power of two: about two programs on each of 132 SMs, but no share below 64 keys."""
    splits = 1
    while 2 * splits * pairs <= programs and length >= 2 * splits * 64:
        splits *= 2
    return splits


def scratch(q: Tensor, keys: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for the partials: acc [B * Hkv, splits, G, D] and lse [B * Hkv, splits, G], fp32."""
    batch, num_heads, dim = q.shape
    heads = keys.shape[1]
    shape = batch * heads, splits, num_heads // heads
    return q.new_empty(*shape, dim, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def split_kv_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    room: tuple[Tensor, Tensor] | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of one query per sequence over all given keys, in two launches.

    Args: q [B, Hq, D]; keys, values [B, Hkv, L, D], L >= 1; all contiguous; D 64, 128 or 256 (16 or 32 in the
        interpreter); scale: logit multiplier; room: `scratch` for the same `splits`, made if None.
    Returns: [B, Hq, D] in the dtype of q.
    """
    batch, num_heads, dim = q.shape
    heads, length = keys.shape[1:3]
    groups = num_heads // heads
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    splits = choose_splits(batch * heads, length) if splits is None else splits
    acc, lse = scratch(q, keys, splits) if room is None else room
    out = torch.empty_like(q)
    tile, depth = TILES.get(dim, (32, 2))
    _split_kernel[batch * heads, splits](
        q, keys, values, acc, lse, length, scale,
        G=groups, M=max(16, triton.next_power_of_2(groups)), D=dim, BLOCK_N=tile, SPLITS=splits, INTERP=INTERPRET,
        num_warps=4, num_stages=depth,
    )  # fmt: skip
    _merge_kernel[(batch * num_heads,)](
        acc, lse, out, G=groups, D=dim, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), num_warps=4
    )
    return out
