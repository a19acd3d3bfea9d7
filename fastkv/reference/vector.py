"""Values recovered from keys: attention over slots of which only the key is stored (VECTOR).

The value of such a slot is approximated as W^T k~, with k~ its key before the rotary embedding. Since that is linear, a
kernel needs no matrix product per token: sum_j p_j W^T k~_j = W^T sum_j p_j k~_j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .attention import _attend, _mix, add_to_slab, append
from .moments import Moments, compute_dtype
from .ragged import unpack


def unrotate(keys: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of keys [B, Hkv, N, D] at positions [B, Hkv, N].

    The convention is HF's rotate_half: dimension i is paired with i + D/2. cos, sin: [P, D/2], row p for position p.
    """
    first, second = keys.chunk(2, dim=-1)
    index = positions.long()
    c, s = cos.to(keys.dtype)[index], sin.to(keys.dtype)[index]
    return torch.cat([first * c + second * s, second * c - first * s], -1)


def _collect(attention: Tensor | None, starts: Tensor | None, received: Tensor) -> None:
    """Add what slots received [B, Hkv, N] to attention, if it is collected."""
    if attention is None:
        return
    if starts is None:
        attention.add_(received.to(attention.dtype))
    else:
        add_to_slab(attention, starts, received.to(attention.dtype))


def vector_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    approx_attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    approx_starts: Tensor | None = None,
    approx_width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_attention` with further slots that hold a key but no value.

    Args: q [B, Hq, D]; keys, values, lengths, moments, scale, softcap, order, attention, starts, width: as in
        `decode_attention`.
        approx_keys: [B, Hkv, A, D] post-RoPE.  approx_positions: [B, Hkv, A] int.  approx_lengths: [B, Hkv] int.
        weight: [Hkv, Dk, Dv], value = k~ @ weight.  cos, sin: [P, D/2], no rotary scaling factor.
        approx_attention: [B, Hkv, A], as `attention`.  approx_starts, approx_width: as `starts` and `width`; either
            kind of slots can be slabs.
    Returns: out [B, Hq, Dv] in the dtype of q, lse_retained over both kinds of slots and lse_evicted, [B, Hq].
    Raises: FastKVError if Hq is not a multiple of Hkv or shapes disagree.
    """
    if starts is not None:
        width = keys.shape[1] if width is None else width
        keys, values = unpack(keys, starts, width), unpack(values, starts, width)
    if approx_starts is not None:
        approx_width = approx_keys.shape[1] if approx_width is None else approx_width
        approx_keys = unpack(approx_keys, approx_starts, approx_width)
        approx_positions = unpack(approx_positions, approx_starts, approx_width)
    batch, num_heads, dim = q.shape
    heads, slots = keys.shape[1:3]
    extra = approx_keys.shape[2]
    groups = check_groups("vector_decode_attention", num_heads, heads)
    check_shape("vector_decode_attention", "keys", keys, (batch, heads, slots, dim))
    check_shape("vector_decode_attention", "values", values, (batch, heads, slots, None))
    check_shape("vector_decode_attention", "approx_keys", approx_keys, (batch, heads, extra, dim))
    check_shape("vector_decode_attention", "approx_positions", approx_positions, (batch, heads, extra))
    check_shape("vector_decode_attention", "weight", weight, (heads, dim, values.shape[-1]))
    dtype = compute_dtype(q)
    held = torch.arange(slots, device=q.device) < lengths[..., None]
    approx = torch.arange(extra, device=q.device) < approx_lengths[..., None]
    visible = torch.cat([held, approx], 2)
    index = torch.where(approx, approx_positions, 0)  # the position of an unused slot may be anything
    recovered = unrotate(approx_keys.to(dtype), index, cos, sin) @ weight.to(dtype)
    all_keys = torch.cat([keys.to(dtype), approx_keys.to(dtype)], 2)
    all_values = torch.where(visible[..., None], torch.cat([values.to(dtype), recovered], 2), 0)
    grouped = q.to(dtype).reshape(batch, heads, groups, 1, dim)
    out, lse, probs = _attend(grouped, all_keys, all_values, visible[:, :, None, None], scale, softcap)
    out, lse = out.reshape(batch, num_heads, 1, -1), lse.reshape(batch, num_heads, 1)
    out, lse_evicted, lse_all = _mix(out, lse, q.unsqueeze(2), moments, scale, softcap, order)
    share = torch.exp(lse - lse_all).nan_to_num(0.0).reshape(batch, heads, groups, 1)
    received = (probs[:, :, :, 0] * share).mean(2)
    _collect(attention, starts, received[..., :slots])
    _collect(approx_attention, approx_starts, received[..., slots:])
    return out[:, :, 0].to(q.dtype), lse[..., 0], lse_evicted[..., 0]


def vector_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    seen: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    moments: Moments,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    approx_attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    approx_starts: Tensor | None = None,
    approx_width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append one token to the slots with values and attend to everything including it.

    The token's position is lengths + approx_lengths + moments.count, the number of tokens before it.
    Mutates keys, values, positions, lengths, seen (by one) and, if given, attention and approx_attention. Arguments and
    results as in `vector_decode_attention`; k, v [B, Hkv, 1, D], positions [B, Hkv, C] or slab, seen [B] int64.
    """
    append(keys, values, positions, lengths, k, v, lengths + approx_lengths + moments.count, starts)
    seen.add_(1)
    approx = (approx_keys, approx_positions, approx_lengths, weight, cos, sin)
    return vector_decode_attention(
        q,
        keys,
        values,
        lengths,
        *approx,
        moments,
        scale,
        softcap,
        order=order,
        attention=attention,
        approx_attention=approx_attention,
        starts=starts,
        width=width,
        approx_starts=approx_starts,
        approx_width=approx_width,
    )
