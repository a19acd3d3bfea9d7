"""Attention over the retained tokens, mixed with an estimate of the evicted ones, by whatever is remembered of them.

The evicted set enters as one more partial of a split softmax (m, l, acc) = (log Z_E, 1, f_E), so mixing (MomentKV
Eq. 12) is the merge that split-KV attention does anyway: w = sigmoid(log Z_R - log Z_E), out = w f_R + (1 - w) f_E.
So does a learned sink s of a query head, (s, 1, 0): out = sigmoid(log Z - s) f, Z of everything else.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .gather import add_to_slab
from .moments import Evicted, Moments, compute_dtype
from .state import LayerState, Slots, Spec

QUERY_CHUNK = 64  # queries per logits tile: bounds prefill scratch at [B, Hq, QUERY_CHUNK, N] without changing results


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


def grouped_logits(
    q: Tensor, keys: Tensor, scale: float, softcap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Logits of the query heads of each group, [B, Hkv, G, T, N], for q [B, Hq, T, D] and keys [B, Hkv, N, D], and the
    addends [B, Hkv, N] of the keys.
    """
    (batch, num_heads, num, dim), heads, dtype = q.shape, keys.shape[1], compute_dtype(q)
    groups = check_groups("grouped_logits", num_heads, heads)
    logits = (q.to(dtype).reshape(batch, heads, groups * num, dim) * scale) @ keys.to(dtype).transpose(-1, -2)
    logits = softcapped(logits, softcap).view(batch, heads, groups, num, -1)
    return logits if bias is None else logits + bias[:, :, None, None].to(logits.dtype)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets, from the attention over each.

    Args: out_* [..., D] and lse_* [...], the log-sum-exp of each set's logits (-inf for an empty set).
    Returns: (out [..., D], lse [...]); an empty partner returns the other side exactly.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    floor = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf less -inf is no number
    return torch.exp(lse_a - floor)[..., None] * out_a + torch.exp(lse_b - floor)[..., None] * out_b, lse


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention whose softmax has one more logit, with the value zero (gpt-oss, arXiv:2508.10925, Sec. 2).

    Args: out [..., Dv] and lse [...]; sink broadcasts to lse, below inf, in any float dtype; None for no such logit.
    Returns: out and lse with it; where there is nothing besides, zeros and the sink.
    """
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.detach().to(lse.dtype).expand_as(lse))
    floor = total.clamp(min=torch.finfo(total.dtype).min)  # -inf less -inf is no number
    return torch.exp(lse - floor)[..., None] * out, total


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, T, D] over keys [B, Hkv, N, D]; visible broadcasts to [B, Hkv, 1, T, N]; bias [B, Hkv, N] or None.

    Returns: out [B, Hq, T, Dv], lse [B, Hq, T], probabilities [B, Hkv, G, T, N].
    """
    probs, lse = masked_softmax(grouped_logits(q, keys, scale, softcap, bias), visible)
    out = probs.flatten(2, 3) @ values
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3]), probs


def _mix(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    evicted: Evicted | None,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, T, Dv] and lse [B, Hq, T] with the evicted set and the sinks. Returns: out, lse_evicted, lse_all."""
    total, log_mass = lse, torch.full_like(lse, float("-inf"))
    if evicted is not None:
        value, log_mass = evicted.estimate(q, scale, softcap)
        log_mass = log_mass.to(lse.dtype)
        out, total = merge_partials(out, lse, value.to(out.dtype), log_mass)
    out, total = with_sink(out, total, None if sink_logits is None else sink_logits[:, None])
    return out, log_mass, total


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Evicted | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query per sequence over the first `lengths` slots and what is known of the evicted tokens (MomentKV Eq. 12).

    Args:
        q: [B, Hq, D] post-RoPE.  keys: [B, Hkv, C, D].  values: [B, Hkv, C, Dv].  lengths: [B, Hkv] int, valid slots.
        moments: of the evicted tokens, or their centroids, or None.  order: of moments: 1, 0 (means only) or None (no
            correction).
    Returns: out [B, Hq, Dv] in the dtype of q, lse_retained and lse_evicted [B, Hq] (-inf where empty). A head with
        nothing retained and nothing evicted returns zeros.
    Raises: FastKVError if Hq is not a multiple of Hkv or shapes disagree.
    """
    keys, values = check_decode(q, keys, values, lengths, moments)
    held = torch.arange(keys.shape[2], device=q.device) < lengths[..., None]
    evicted = moments.upto(order) if isinstance(moments, Moments) else moments
    return attend_rows(q, keys, values, held, None, evicted, None, scale, softcap)[:3]


def check_decode(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, moments: Evicted | None
) -> tuple[Tensor, Tensor]:
    """Raise FastKVError unless arguments of `decode_attention` fit together. Returns keys and values, of one slot that
    is not in use where there is none.
    """
    op = "decode_attention"
    check_shape(op, "q", q, (None, None, None))
    check_shape(op, "keys", keys, (len(q), None, None, q.shape[2]))
    batch, heads, slots, dim = keys.shape
    check_groups(op, q.shape[1], heads)
    check_shape(op, "values", values, (batch, heads, slots, None))
    check_shape(op, "lengths", lengths, (batch, heads))
    if moments is not None:
        moments.check(op, batch, heads, dim, values.shape[3])
    if not slots:
        keys, values = (part.new_zeros(batch, heads, 1, part.shape[3]) for part in (keys, values))
    return keys, values


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    bias: Tensor | None,
    evicted: Evicted | None,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`decode_attention` over the rows that are `held` [B, Hkv, C]; those that are not may hold anything.

    Args: bias [B, Hkv, C]: see `Slots`, None for none.

    Returns: out, lse_retained and lse_evicted as there, and what each row receives: [B, Hkv, C], mean over the group.
    """
    query, values = q[:, :, None], torch.where(held[..., None], values.to(compute_dtype(q)), 0)
    out, lse, probs = _attend(query, keys, values, held[:, :, None, None], scale, softcap, bias)
    out, lse_evicted, lse_all = _mix(out, lse, query, evicted, sink_logits, scale, softcap)
    share = torch.exp(lse - lse_all).nan_to_num(0.0).reshape(*keys.shape[:2], -1, 1)
    received = (probs[:, :, :, 0] * share).mean(2)
    return out[:, :, 0].to(q.dtype), lse[..., 0], lse_evicted[..., 0], received


def append(slots: Slots, k: Tensor, v: Tensor, position: Tensor) -> None:
    """Store one token per head in the first free slot, in place. Every head must have one; of a slab, a head that has
    none stores nothing.

    Args: k, v [B, Hkv, 1, D]; position [B] or [B, Hkv].
    """
    lengths, starts, rows = slots.lengths, slots.starts, slots.moving()
    position = position.reshape(len(position), -1, 1).expand(*lengths.shape, 1)
    new = slots.encoded(k, v, position)
    if starts is None:
        slot = lengths.long()[..., None]
        for name, held in rows.items():
            one = new[name].to(held.dtype)
            held.scatter_(2, slot.view(*slot.shape, *(1,) * (one.ndim - 3)).expand_as(one), one)
        lengths.add_(1)
        return
    last = starts[:, 1:] - 1
    free = lengths <= last - starts[:, :-1]
    slot = (starts[:, :-1] + lengths).minimum(last).long()  # no mask says where: a device would be waited for
    place = torch.arange(len(slot), device=slot.device)[:, None], slot
    for name, slab in rows.items():
        one = new[name][:, :, 0].to(slab.dtype)
        slab[place] = torch.where(free.view(*free.shape, *(1,) * (one.ndim - 2)), one, slab[place])
    lengths.add_(free)


def collect(slots: Slots, received: Tensor) -> None:
    """Add what the first slots of every head received, [B, Hkv, N], zero beyond what a head owns, if that is kept."""
    if slots.attention is None:
        return
    received = received.to(slots.attention.dtype)
    if slots.starts is None:
        slots.attention[..., : received.shape[-1]].add_(received)
    else:
        add_to_slab(slots.attention, slots.starts, received)


def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Append one token and attend to everything including it: one step of a layer.

    Tokens without a value attend with the value that is recovered from their key (VECTOR, `recovered_values`).
    Mutates slots, lengths, seen (by one) and, where it is kept, the attention that slots receive.

    Args: q [B, Hq, D] post-RoPE; k, v [B, Hkv, 1, D], both None to append nothing.
    Returns: out [B, Hq, Dv] in the dtype of q, lse_retained and lse_evicted [B, Hq] (-inf where empty).
    """
    exact, approx = state.exact, state.approx
    if k is not None and v is not None:
        append(exact, k, v, state.seen)
        state.seen.add_(1)
    keys, values, held = exact["keys"], exact["values"], exact.valid
    if approx is not None:
        more, recovered = recovered_values(state, compute_dtype(q))
        keys, values = torch.cat([keys.to(more.dtype), more], 2), torch.cat([values.to(more.dtype), recovered], 2)
        held = torch.cat([held, approx.valid], 2)
    bias = exact.biases(held.shape[2])
    out, lse, lse_evicted, received = attend_rows(
        q, keys, values, held, bias, spec.evicted(state), state.sink_logits, spec.scale, spec.softcap
    )
    collect(exact, received[..., : exact.filled])
    if approx is not None:
        collect(approx, received[..., exact.filled :])
    return out, lse, lse_evicted


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """A block of T queries over the retained tokens with value, the evicted ones and, causally, the block itself.

    Everything retained or evicted is older than the block, so only the block needs a causal mask.

    Args: q [B, Hq, T, D]; k, v [B, Hkv, T, D]; valid [B, T] bool, false for padding.
    Returns: out [B, Hq, T, Dv] in the dtype of q; lse [B, Hq, T] over all of them and the sinks (-inf, and zeros in
        out, for a query that sees nothing); lse_evicted [B, Hq, T] of the evicted ones alone (-inf for none).
    """
    keys, values, held = state.exact["keys"], state.exact["values"], state.exact.valid
    batch, num_heads, num, dim = q.shape
    heads, slots = keys.shape[1:3]
    check_groups("prefill_attention", num_heads, heads)
    check_shape("prefill_attention", "k", k, (batch, heads, num, dim))
    check_shape("prefill_attention", "valid", valid, (batch, num))
    dtype, evicted = compute_dtype(q), spec.evicted(state)
    usable = torch.cat([held, valid[:, None].expand(batch, heads, num)], 2)
    all_keys = torch.cat([keys, k], 2).to(dtype)
    all_values = torch.where(usable[..., None], torch.cat([values, v], 2).to(dtype), 0)
    bias = state.exact.biases(slots + num)
    index = torch.arange(slots + num, device=q.device)
    outs, lses, masses = [], [], []
    for start in range(0, num, QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        part = q[:, :, rows]
        end = slots + start + part.shape[2]  # later keys are in the future of every query of this chunk
        causal = index[:end] <= index[slots + start : end, None]
        visible = (usable[:, :, None, :end] & causal)[:, :, None]
        pairs, own = (all_keys[:, :, :end], all_values[:, :, :end]), None if bias is None else bias[..., :end]
        out, lse, _ = _attend(part, *pairs, visible, spec.scale, spec.softcap, own)
        out, mass, lse = _mix(out, lse, part, evicted, state.sink_logits, spec.scale, spec.softcap)
        outs.append(out.to(q.dtype))
        lses.append(lse)
        masses.append(mass)
    return torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(masses, 2)


def attention_ahead(
    q: Tensor, k: Tensor, v: Tensor, ahead: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a block's tokens over later ones of the same block, as in images whose tokens all see each other.

    A partial beside `prefill_attention`, see `merge_partials`.

    Args: q [B, Hq, T, D]; k [B, Hkv, T, D]; v [B, Hkv, T, Dv]; ahead [B or 1, T, T] bool, above the diagonal only.
    Returns: out [B, Hq, T, Dv] and lse [B, Hq, T], both fp32 (fp64 for fp64 inputs); zeros and -inf for a token that
        sees none.
    """
    (batch, num_heads, num, dim), heads = q.shape, k.shape[1]
    check_groups("attention_ahead", num_heads, heads)
    check_shape("attention_ahead", "k", k, (batch, heads, num, dim))
    check_shape("attention_ahead", "ahead", ahead, (None, num, num))
    dtype = compute_dtype(q)
    query, keys, values = q.to(dtype), k.to(dtype), v.to(dtype)
    outs, lses = [], []
    for start in range(0, num, QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        visible = ahead[:, None, None, rows, start:]
        out, lse, _ = _attend(query[:, :, rows], keys[:, :, start:], values[:, :, start:], visible, scale, softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def most_attended(q: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """For each key, the largest weight that any query gives it (KVzip, arXiv:2505.23416, Eq. 2): max exp(s - lse).

    Args: q [B, Hq, T, D]; keys [B, Hkv, N, D], all of them visible; lse [B, Hq, T]: of all that each query attends to,
        inf for a query that does not count.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 inputs), the maximum over queries and over the query heads of a KV head.
    """
    (batch, heads), dtype = keys.shape[:2], compute_dtype(q)
    most = torch.full(keys.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    groups = check_most_attended(q, keys, lse)
    q, total = q.unflatten(1, (heads, groups)), lse.to(dtype).unflatten(1, (heads, groups))
    # One head at a time on a CPU, in whose cache its logits fit.
    rows, some = (1, 1) if q.device.type == "cpu" else (batch, heads)
    for row, head in itertools.product(range(0, batch, rows), range(0, heads, some)):
        own = slice(row, row + rows), slice(head, head + some)
        known, best = keys[own].to(dtype), most[own]
        for part, mass in zip(q[own].split(QUERY_CHUNK, 3), total[own].split(QUERY_CHUNK, 3)):
            logits = grouped_logits(part.flatten(1, 2), known, scale, softcap)
            torch.maximum(best, logits.sub_(mass[..., None]).flatten(2, 3).amax(2), out=best)
    return most.exp()


def check_most_attended(q: Tensor, keys: Tensor, lse: Tensor) -> int:
    """Query heads per KV head. Raises: FastKVError for shapes that `most_attended` does not take."""
    check_shape("most_attended", "keys", keys, (q.shape[0], None, None, q.shape[-1]))
    check_shape("most_attended", "lse", lse, q.shape[:3])
    return check_groups("most_attended", q.shape[1], keys.shape[1])


def unrotate(keys: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of keys [B, Hkv, N, D] at positions [B, Hkv, N].

    The convention is HF's rotate_half: dimension i is paired with i + D/2. cos, sin: [P, D/2], row p for position p.
    """
    first, second = keys.chunk(2, dim=-1)
    index = positions.long()
    c, s = cos.to(keys.dtype)[index], sin.to(keys.dtype)[index]
    return torch.cat([first * c + second * s, second * c - first * s], -1)


def recovered_values(state: LayerState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [B, Hkv, A, Dk] of the tokens that have no value, and what `state.recovery` makes of them, [B, Hkv, A, Dv].

    Args: dtype: of both results and of the computation.
    """
    slots, recovery = state.approx, state.recovery
    assert slots is not None and recovery is not None
    keys = slots["keys"].to(dtype)
    index = torch.where(slots.valid, slots["positions"], 0)  # the position of an unused slot may be anything
    return keys, predicted_values(unrotate(keys, index, recovery.cos, recovery.sin), recovery.weight.to(dtype))


def predicted_values(keys: Tensor, weight: Tensor) -> Tensor:
    """Values [B, Hkv, N, Dv] that a linear map makes of keys [B, Hkv, N, Dk] before the rotary embedding.

    Args: weight [Hkv, Dk, Dv] of each head's own keys, or [Hkv, Hkv * Dk, Dv] of the keys of all heads, which then
        belong to the same tokens.
    """
    if weight.shape[1] != keys.shape[-1]:
        keys = keys.transpose(1, 2).flatten(2)[:, None]
    return keys @ weight
