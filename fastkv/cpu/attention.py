"""Attention by torch's fused CPU kernel, whose log-sum-exp lets partial results be merged."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..reference import Centroids, Moments, append, merge_partials, unpack
from ..reference.attention import add_to_slab
from .estimate import estimate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 2  # queries of a head for which it is faster to read its keys once for each than once for all


def serves(backend: str, q: Tensor, values: Tensor, softcap: float | None) -> bool:
    """Whether attention of q [..., D] to values [..., Dv] can run here; the reference does what cannot."""
    plain = softcap is None and q.dtype in DTYPES and q.shape[-1] == values.shape[-1]
    return backend == "auto" and q.device.type == "cpu" and plain and fused_as_expected()


@cache
def fused_as_expected() -> bool:
    """Whether this torch's kernel takes a mask beside causality and lets several query heads read the same keys.

    Neither is documented of an operator that is torch's own, so it is asked once, with an example.
    """
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    q = torch.linspace(-3, 2, 96, **plain).cos().view(1, 4, 3, 8)
    room = torch.linspace(-1, 5, 192, **plain).sin().view(2, 1, 4, 3, 8)
    keys, values = room[:, :, :2]  # where further heads would be read, there is memory
    mask = torch.tensor([float("-inf"), 0.0, 0.0], **plain)
    try:
        out, lse = attend(q, keys, values, 0.7, mask[None, None, None], causal=True)
    except RuntimeError:
        return False
    keys, values = (part.repeat_interleave(2, 1) for part in (keys, values))
    logits = 0.7 * q @ keys.transpose(-1, -2) + mask + torch.full((3, 3), float("-inf"), **plain).triu(1)
    logits[:, :, 0] = 0.0  # the first query sees nothing
    pairs = (out, (logits.softmax(-1) @ values)), (lse, logits.logsumexp(-1))
    return all(torch.allclose(found[:, :, 1:], want[:, :, 1:], atol=1e-5) for found, want in pairs)


def hiding(mask: Tensor | None) -> Tensor | None:
    """The mask, or None if it lets everything through on a CPU: the reference then copies nothing."""
    return None if mask is None or (mask.device.type == "cpu" and bool(mask.all())) else mask


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, T, D] to keys and values [B, Hkv, N, D].

    Args: mask: 0 or -inf, broadcasts to [B, Hq, T, N]; causal: query i sees keys 0 ... i, as far as the mask lets it;
        dtype: of the factors of all products, whatever comes in; sums are in fp32.
    Returns: out [B, Hq, T, D] and lse [B, Hq, T], fp32; both 0 where a query sees nothing.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, keys, values = (rows.to(dtype) for rows in (q, keys, values))
    out, lse = fused(q, keys, values, is_causal=causal, attn_mask=mask, scale=scale)
    return out.float(), lse


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it. Without, products of converted slots are faster."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and supported()


def observed(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`attend`, and the weights [B, Hkv, T, N], for as many heads of queries as of keys."""
    shape, slots = q.shape, keys.shape[2]
    q, keys, values = (rows.float().reshape(-1, *rows.shape[2:]) for rows in (q, keys, values))
    logits = torch.baddbmm(mask.view(-1, 1, slots), q, keys.transpose(1, 2), alpha=scale)
    weights = logits.softmax(-1)
    lse = logits.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(top - lse)
    out = torch.bmm(weights, values)
    return out.view(*shape[:3], -1), lse.view(shape[:3]), weights.view(*shape[:3], slots)


def unused(lengths: Tensor, slots: int, groups: int, length: int | None) -> Tensor:
    """The mask that hides slots beyond lengths [B, Hkv], [B, Hkv * groups, 1, slots]; [1, 1, 1, slots] if all have one
    `length` in common.
    """
    if length is not None:
        return edge(slots)[slots - length : 2 * slots - length].view(1, 1, 1, slots)
    return showing(torch.arange(slots, device="cpu") < lengths.repeat_interleave(groups, 1)[..., None, None])


def showing(visible: Tensor) -> Tensor:
    """The mask that hides what is not visible, 0 or -inf, fp32."""
    return torch.full_like(visible, float("-inf"), dtype=torch.float32).masked_fill_(visible, 0.0)


def common(lengths: Tensor) -> int | None:
    """The length of every head, None if they differ. Looking costs a CPU less than one small operator."""
    first, *others = lengths.flatten().tolist()
    return first if others.count(first) == len(others) else None


@cache
def edge(slots: int) -> Tensor:
    """0 so many times, then -inf: each mask for one common length is a stretch of it."""
    return showing(torch.arange(2 * slots, device="cpu") < slots)


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    moments: Moments | None,
    scale: float,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    mass: str = "jensen",
    centroids: Centroids | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step` without softcap."""
    length = common(lengths) if starts is None else None
    if length is None:
        append(keys, values, positions, lengths, k, v, seen, starts)
    else:  # as `append` does it, by whole rows
        for slots, new in ((keys, k), (values, v), (positions, seen[:, None, None])):
            slots.select(2, length).copy_(new.select(2, 0))
        lengths.add_(1)
        length += 1
    seen.add_(1)
    if starts is not None:
        width = keys.shape[1] if width is None else width
        keys, values = unpack(keys, starts, width), unpack(values, starts, width)
    (batch, num_heads, dim), heads, num = q.shape, lengths.shape[1], keys.shape[2]
    groups, weights = num_heads // heads, None
    # The kernel uses the processor's bfloat16 instructions for several rows only.
    native = groups > 1 and q.dtype == torch.bfloat16 and multiplies_bfloat16()
    apart = attention is None and groups <= FEW and not native
    rows = q[:, :, None] if apart else q.reshape(batch, heads, groups, dim)
    mask = unused(lengths, num, groups if apart else 1, length)
    if attention is None:
        out, lse = attend(rows, keys, values, scale, mask, dtype=q.dtype if native else torch.float32)
    else:
        out, lse, weights = observed(rows, keys, values, scale, mask)
    known, total = estimate(q[:, :, None], moments, centroids, scale, order, mass), lse
    if known is None:
        evicted = torch.full_like(lse, float("-inf"))
    else:
        value, evicted = known[0].reshape(out.shape), known[1].reshape(lse.shape)
        out, total = merge_partials(out, lse, value, evicted)
    if weights is not None:
        assert attention is not None
        share = torch.exp(lse - total) / groups
        received = (share[:, :, None] @ weights)[:, :, 0]
        if starts is None:
            attention += received
        else:
            add_to_slab(attention, starts, received)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, num_heads), evicted.reshape(batch, num_heads)


def window_attention(
    q: Tensor, keys: Tensor, scale: float, visible: Tensor, query_valid: Tensor, log_mass: Tensor | None
) -> Tensor:
    """`reference.window_attention` without softcap, where every valid query sees something."""
    (batch, num_heads, num, dim), (heads, slots) = q.shape, keys.shape[1:3]
    groups = num_heads // heads
    rows = q.float().reshape(batch * heads, groups * num, dim)
    logits = torch.bmm(rows * scale, keys.float().reshape(batch * heads, slots, dim).transpose(1, 2))
    # A number, not -inf, so that queries of padding, which may see nothing, get weights that can be left out.
    hidden = torch.finfo(logits.dtype).min
    logits.view(batch, heads, groups, num, slots).masked_fill_(~visible[:, :, None], hidden)
    weights = logits.softmax(-1)
    share = query_valid.float() / (groups * query_valid.sum(-1, keepdim=True).clamp(min=1))
    share = share[:, None, None].expand(batch, heads, groups, num).reshape(batch * heads, 1, -1)
    if log_mass is not None:
        lse = logits.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(top - lse)
        share = share * torch.sigmoid(lse - log_mass.float().reshape(lse.shape))[:, None]
    return torch.bmm(share, weights).view(batch, heads, slots)


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_valid: Tensor,
    moments: Moments | None,
    scale: float,
    *,
    order: int | None = 1,
    mass: str = "jensen",
) -> tuple[Tensor, Tensor]:
    """`reference.prefill_attention` without softcap: the block by itself, causally, merged with what came before it."""
    groups = q.shape[1] // lengths.shape[1]
    padding = showing(new_valid)[:, None, None]
    out, lse = attend(q, new_keys, new_values, scale, padding, causal=True)
    lse = lse.masked_fill((new_valid.cumsum(-1) == 0)[:, None], float("-inf"))  # of rows that see nothing: 0 so far
    if keys.shape[2]:
        past, past_lse = attend(q, keys, values, scale, unused(lengths, keys.shape[2], groups, common(lengths)))
        empty = (lengths == 0).repeat_interleave(groups, 1)[..., None]
        out, lse = merge_partials(out, lse, past, past_lse.masked_fill(empty, float("-inf")))
    known = estimate(q, moments, None, scale, order, mass)
    if known is not None:
        out, lse = merge_partials(out, lse, *known)
    return out.to(q.dtype), lse
