"""Attention by torch's fused CPU kernel, whose log-sum-exp lets partial results be merged."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..reference import Centroids, Moments, append, centroid_estimate, merge_partials, moment_estimate, unpack
from ..reference.attention import add_to_slab

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(backend: str, q: Tensor, values: Tensor, softcap: float | None) -> bool:
    """Whether attention of q [..., D] to values [..., Dv] can run here; the reference does what cannot."""
    plain = softcap is None and q.dtype in DTYPES and q.shape[-1] == values.shape[-1]
    return backend == "auto" and q.device.type == "cpu" and plain and fused_as_expected()


@cache
def fused_as_expected() -> bool:
    """Whether this torch's kernel takes a mask beside causality and lets several query heads read the same keys.

    Neither is documented of an operator that is torch's own, so it is asked once, with an example.
    """
    q, room = torch.linspace(-3, 2, 96).cos().view(1, 4, 3, 8), torch.linspace(-1, 5, 192).sin().view(2, 1, 4, 3, 8)
    keys, values = room[:, :, :2]  # where further heads would be read, there is memory
    mask = torch.tensor([float("-inf"), 0.0, 0.0])
    try:
        out, lse = attend(q, keys, values, 0.7, mask[None, None, None], causal=True)
    except RuntimeError:
        return False
    keys, values = (part.repeat_interleave(2, 1) for part in (keys, values))
    logits = 0.7 * q @ keys.transpose(-1, -2) + mask + torch.full((3, 3), float("-inf")).triu(1)
    logits[:, :, 0] = 0.0  # the first query sees nothing
    pairs = (out, (logits.softmax(-1) @ values)), (lse, logits.logsumexp(-1))
    return all(torch.allclose(found[:, :, 1:], want[:, :, 1:], atol=1e-5) for found, want in pairs)


def hiding(mask: Tensor | None) -> Tensor | None:
    """The mask, or None if it lets everything through on a CPU: the reference then copies nothing."""
    return None if mask is None or (mask.device.type == "cpu" and bool(mask.all())) else mask


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, T, D] to keys and values [B, Hkv, N, D], in fp32 whatever their dtype.

    Args: mask: 0 or -inf, broadcasts to [B, Hq, T, N]; causal: query i sees keys 0 ... i, as far as the mask lets it.
    Returns: out [B, Hq, T, D] and lse [B, Hq, T], fp32; both 0 where a query sees nothing.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(q.float(), keys.float(), values.float(), is_causal=causal, attn_mask=mask, scale=scale)
    return out, lse


def observed(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`attend`, and the weights [B, Hkv, T, N], for as many heads of queries as of keys."""
    q, keys, values = q.float(), keys.float(), values.float()
    logits = (q * scale) @ keys.transpose(-1, -2) + mask
    weights = logits.softmax(-1)
    lse = logits.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(top - lse)
    return weights @ values, lse, weights


def unused(lengths: Tensor, slots: int) -> Tensor:
    """The mask [B, Hkv, 1, slots] that hides what lies beyond lengths [B, Hkv]."""
    held = torch.arange(slots, device=lengths.device) < lengths[..., None, None]
    return torch.where(held, 0.0, float("-inf"))


def estimate(
    q: Tensor, moments: Moments | None, centroids: Centroids | None, scale: float, order: int | None, mass: str
) -> tuple[Tensor, Tensor] | None:
    """What is known of the evicted tokens, as value and log mass; None if that is nothing."""
    if centroids is not None:
        return centroid_estimate(q, centroids, scale)
    if moments is None or order is None or moments.order is None:
        return None
    return moment_estimate(q, moments, scale, None, order, mass)


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
    append(keys, values, positions, lengths, k, v, seen, starts)
    seen.add_(1)
    batch, num_heads, dim = q.shape
    heads = lengths.shape[1]
    if starts is not None:
        width = keys.shape[1] if width is None else width
        keys, values = unpack(keys, starts, width), unpack(values, starts, width)
    grouped = q.reshape(batch, heads, num_heads // heads, dim)
    mask = unused(lengths, keys.shape[2])
    weights = None
    if attention is None:
        out, lse = attend(grouped, keys, values, scale, mask)
    else:
        out, lse, weights = observed(grouped, keys, values, scale, mask)
    known, total = estimate(q[:, :, None], moments, centroids, scale, order, mass), lse
    if known is None:
        evicted = torch.full_like(lse, float("-inf"))
    else:
        value, evicted = known[0].reshape(out.shape), known[1].reshape(lse.shape)
        out, total = merge_partials(out, lse, value, evicted)
    if attention is not None and weights is not None:
        received = (weights * torch.exp(lse - total)[..., None]).mean(2)
        if starts is None:
            attention += received
        else:
            add_to_slab(attention, starts, received)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, num_heads), evicted.reshape(batch, num_heads)


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
    padding = torch.where(new_valid, 0.0, float("-inf"))[:, None, None]
    out, lse = attend(q, new_keys, new_values, scale, padding, causal=True)
    lse = lse.masked_fill((new_valid.cumsum(-1) == 0)[:, None], float("-inf"))  # of rows that see nothing: 0 so far
    if keys.shape[2]:
        lengths = lengths.repeat_interleave(groups, 1)
        past, past_lse = attend(q, keys, values, scale, unused(lengths, keys.shape[2]))
        out, lse = merge_partials(out, lse, past, past_lse.masked_fill((lengths == 0)[..., None], float("-inf")))
    known = estimate(q, moments, None, scale, order, mass)
    if known is not None:
        out, lse = merge_partials(out, lse, *known)
    return out.to(q.dtype), lse
