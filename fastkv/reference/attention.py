"""Attention over the retained tokens, mixed with an estimate of the evicted ones, by their moments or their centroids.

The evicted set enters as one more partial of a split softmax (m, l, acc) = (log Z_E, 1, f_E), so mixing (MomentKV
Eq. 12) is the merge that split-KV attention does anyway: w = sigmoid(log Z_R - log Z_E), out = w f_R + (1 - w) f_E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .centroids import Centroids, centroid_estimate
from .moments import Moments, compute_dtype, moment_estimate
from .ragged import unpack

QUERY_CHUNK = 256  # queries per logits tile: bounds prefill scratch at [B, Hq, QUERY_CHUNK, N] without changing results


def masked_softmax(logits: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis where `visible`; rows with nothing visible give zeros.

    Returns: probabilities and log-sum-exp (-inf for empty rows).
    """
    logits = logits.masked_fill(~visible, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny), (total.log() + top)[..., 0]


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(x / c), or x unchanged without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets, from the attention over each.

    Args: out_* [..., D] and lse_* [...], the log-sum-exp of each set's logits (-inf for an empty set).
    Returns: (out [..., D], lse [...]); an empty partner returns the other side exactly.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    floor = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf less -inf is no number
    return torch.exp(lse_a - floor)[..., None] * out_a + torch.exp(lse_b - floor)[..., None] * out_b, lse


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv, G, T, D] over keys [B, Hkv, N, D]; visible broadcasts to [B, Hkv, 1, T, N].

    Returns: out [B, Hkv, G, T, Dv], lse [B, Hkv, G, T], probabilities [B, Hkv, G, T, N].
    """
    batch, heads, groups, num, dim = q.shape
    logits = (q.reshape(batch, heads, groups * num, dim) * scale) @ keys.transpose(-1, -2)
    logits = softcapped(logits, softcap).reshape(batch, heads, groups, num, -1)
    probs, lse = masked_softmax(logits, visible)
    out = probs.reshape(batch, heads, groups * num, -1) @ values
    return out.reshape(batch, heads, groups, num, -1), lse, probs


def _mix(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    mass: str = "jensen",
    centroids: Centroids | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix out [B, Hq, T, Dv], lse [B, Hq, T] with what is known of the evicted set: its centroids, else its moments.

    Returns: out, lse_evicted, lse_all.
    """
    if centroids is not None:
        value, log_mass = centroid_estimate(q, centroids, scale, softcap)
    elif moments is None or order is None or moments.order is None:
        return out, torch.full_like(lse, float("-inf")), lse
    else:
        value, log_mass = moment_estimate(q, moments, scale, softcap, order, mass)
    mixed, total = merge_partials(out, lse, value.to(out.dtype), log_mass.to(out.dtype))
    return mixed, log_mass.to(lse.dtype), total


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    finite_slots: bool = False,
    mass: str = "jensen",
    centroids: Centroids | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query per sequence over the first `lengths` slots and the moments of what was evicted (MomentKV Eq. 12).

    Args:
        q: [B, Hq, D] post-RoPE.  keys: [B, Hkv, C, D].  values: [B, Hkv, C, Dv].  lengths: [B, Hkv] int, valid slots.
        moments: of the evicted tokens, or None.  order: 1, 0 (means only) or None (no correction).
        attention: optional [B, Hkv, C] fp32, to which the group mean of the attention weights is added in place.
        starts: [B, Hkv + 1] int32 if heads share slots unequally; then keys, values and attention are slabs [B, S, ...]
            (see `ragged`).  width: at least every length; S if None.
        finite_slots: promise that slots past `lengths` hold finite numbers; saves a copy of the values.
        mass: "jensen" or "cosh", of the moments (`moment_estimate`).
        centroids: of the evicted tokens, used instead of the moments; their mass is always "cosh".
    Returns: out [B, Hq, Dv] in the dtype of q, lse_retained and lse_evicted [B, Hq] (-inf where empty). A head with
        nothing retained and nothing evicted returns zeros.
    Raises: FastKVError if Hq is not a multiple of Hkv or shapes disagree.
    """
    if starts is not None:
        width = keys.shape[1] if width is None else width
        stored = (unpack(keys, starts, width), unpack(values, starts, width), lengths)
        received = None if attention is None else attention.new_zeros(*lengths.shape, width)
        results = decode_attention(
            *(q, *stored, moments, scale, softcap),
            order=order,
            attention=received,
            finite_slots=finite_slots,
            mass=mass,
            centroids=centroids,
        )
        if attention is not None and received is not None:
            add_to_slab(attention, starts, received)
        return results
    batch, num_heads, dim = q.shape
    heads, slots = keys.shape[1:3]
    groups = check_groups("decode_attention", num_heads, heads)
    check_shape("decode_attention", "keys", keys, (batch, heads, slots, dim))
    check_shape("decode_attention", "values", values, (batch, heads, slots, None))
    check_shape("decode_attention", "lengths", lengths, (batch, heads))
    dtype = compute_dtype(q)
    held = torch.arange(slots, device=q.device) < lengths[..., None]
    grouped = q.to(dtype).reshape(batch, heads, groups, 1, dim)
    values = values.to(dtype) if finite_slots else torch.where(held[..., None], values.to(dtype), 0)
    out, lse, probs = _attend(grouped, keys.to(dtype), values, held[:, :, None, None], scale, softcap)
    lse = lse.reshape(batch, num_heads, 1)
    out = out.reshape(batch, num_heads, 1, -1)
    out, lse_evicted, lse_all = _mix(out, lse, q.unsqueeze(2), moments, scale, softcap, order, mass, centroids)
    if attention is not None:
        share = torch.exp(lse - lse_all).nan_to_num(0.0).reshape(batch, heads, groups, 1)
        attention.add_((probs[:, :, :, 0] * share).mean(2).to(attention.dtype))
    return out[:, :, 0].to(q.dtype), lse[..., 0], lse_evicted[..., 0]


def add_to_slab(slab: Tensor, starts: Tensor, rows: Tensor) -> None:
    """Add rows [B, Hkv, N] to the first N slots of every head's stretch of the slab [B, S], in place.

    Rows beyond what a head owns must be zero.
    """
    index = starts[:, :-1, None].long() + torch.arange(rows.shape[-1], device=rows.device)
    slab.scatter_add_(1, index.clamp(max=slab.shape[1] - 1).flatten(1), rows.flatten(1))


def append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Store one token per head in the first free slot, in place. Every head must have one.

    Args: keys, values [B, Hkv, C, D]; positions [B, Hkv, C]; lengths [B, Hkv]; k, v [B, Hkv, 1, D]; position [B] or
        [B, Hkv]; starts [B, Hkv + 1] if the first three are slabs [B, S, ...]: then a full head stores nothing.
    """
    position = position.to(positions.dtype).reshape(len(position), -1, 1).expand(*lengths.shape, 1)
    if starts is None:
        slot = lengths.long()[..., None]
        keys.scatter_(2, slot[..., None].expand_as(k), k.to(keys.dtype))
        values.scatter_(2, slot[..., None].expand_as(v), v.to(values.dtype))
        positions.scatter_(2, slot, position)
        lengths.add_(1)
        return
    slot = starts[:, :-1] + lengths
    free = slot < starts[:, 1:]
    place = torch.arange(len(slot), device=slot.device)[:, None].expand_as(slot)[free], slot[free].long()
    for slab, new in ((keys, k), (values, v), (positions, position)):
        slab[place] = new[:, :, 0][free].to(slab.dtype)
    lengths.add_(free)


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
    softcap: float | None = None,
    *,
    order: int | None = 1,
    attention: Tensor | None = None,
    starts: Tensor | None = None,
    width: int | None = None,
    mass: str = "jensen",
    centroids: Centroids | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append one token and attend to everything including it: `append`, then `decode_attention`.

    Slots past `lengths` must hold finite numbers, as those of a `LayerState` do.
    Mutates keys, values, positions, lengths, seen (by one) and, if given, attention. Arguments and results as there;
    q [B, Hq, D], k, v [B, Hkv, 1, D], seen [B] int64: true tokens absorbed so far, the position of the new one;
    width: at least every length after the append.
    """
    append(keys, values, positions, lengths, k, v, seen, starts)
    seen.add_(1)
    return decode_attention(
        *(q, keys, values, lengths, moments, scale, softcap),
        order=order,
        attention=attention,
        starts=starts,
        width=width,
        finite_slots=True,
        mass=mass,
        centroids=centroids,
    )


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
    softcap: float | None = None,
    *,
    order: int | None = 1,
    mass: str = "jensen",
    centroids: Centroids | None = None,
) -> tuple[Tensor, Tensor]:
    """A block of T queries over the retained slots, the moments (or the centroids) and, causally, the block itself.

    Everything retained or evicted is older than the block, so only the block needs a causal mask.

    Args:
        q: [B, Hq, T, D].  keys, values: [B, Hkv, C, D] with `lengths` [B, Hkv] valid slots.
        new_keys, new_values: [B, Hkv, T, D].  new_valid: [B, T] bool, false for padding.
        mass, centroids: as in `decode_attention`.
    Returns: out [B, Hq, T, Dv] in the dtype of q and lse [B, Hq, T] over retained, block and moments together (-inf,
        and zeros in out, for a query that sees nothing).
    """
    batch, num_heads, num, dim = q.shape
    heads, slots = keys.shape[1:3]
    groups = check_groups("prefill_attention", num_heads, heads)
    check_shape("prefill_attention", "new_keys", new_keys, (batch, heads, num, dim))
    check_shape("prefill_attention", "new_valid", new_valid, (batch, num))
    dtype = compute_dtype(q)
    held = torch.arange(slots, device=q.device) < lengths[..., None]
    usable = torch.cat([held, new_valid[:, None].expand(batch, heads, num)], 2)
    all_keys = torch.cat([keys, new_keys], 2).to(dtype)
    all_values = torch.where(usable[..., None], torch.cat([values, new_values], 2).to(dtype), 0)
    index = torch.arange(slots + num, device=q.device)
    outs, lses = [], []
    for start in range(0, num, QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        part = q[:, :, rows]
        size = part.shape[2]
        end = slots + start + size  # later keys are in the future of every query of this chunk
        causal = index[:end] <= index[slots + start : end, None]
        visible = (usable[:, :, None, :end] & causal)[:, :, None]
        grouped = part.to(dtype).reshape(batch, heads, groups, size, dim)
        out, lse, _ = _attend(grouped, all_keys[:, :, :end], all_values[:, :, :end], visible, scale, softcap)
        out, lse = out.reshape(batch, num_heads, size, -1), lse.reshape(batch, num_heads, size)
        out, _, lse = _mix(out, lse, part, moments, scale, softcap, order, mass, centroids)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
