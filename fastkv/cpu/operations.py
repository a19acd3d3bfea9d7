"""How a CPU does it fast: a decode step's attention where slots lie (`slots`), torch's fused attention for prompts,
estimates of the evicted in few operators, evictions in place that touch only the tokens that leave.

Each function has the arguments and results of the one of that name in `reference`, which says what they mean and does
what cannot be done here. A CPU's tensors may be looked at without waiting for a device, so shapes here may follow their
contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..errors import check_groups, check_shape
from ..reference import Centroids, Evicted, LayerState, Moments, Selection, Slots, Spec, centroids, merge_partials
from ..reference.scores import EPSILON, turned_ahead
from ..rotary import Rotary
from . import slots as compiled_slots

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOLLOWS_ROWS = ("decode_step",)
Estimate = tuple[Tensor, Tensor]
encode_rows, decode_rows = compiled_slots.encode_rows, compiled_slots.decode_rows  # of this backend, see `Codec`
read_slots, rotated, step_before_rope = compiled_slots.read, compiled_slots.rotated, compiled_slots.step_before_rope


def serves(q: Tensor, value_dim: int, softcap: float | None) -> bool:
    """Whether attention of q [..., D] to values of `value_dim` numbers can be torch's fused one; the reference does
    what cannot.
    """
    plain = softcap is None and q.dtype in DTYPES and q.shape[-1] == value_dim
    return plain and fused_as_expected()


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


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, T, D] to keys and values [B, Hkv, N, D].

    Args: mask: 0 or -inf, broadcasts to [B, Hq, T, N]; causal: query i sees keys 0 ... i, as far as the mask lets it.
    Returns: out [B, Hq, T, D] and lse [B, Hq, T], fp32; both 0 where a query sees nothing.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, keys, values = (rows.float() for rows in (q, keys, values))
    out, lse = fused(q, keys, values, is_causal=causal, attn_mask=mask, scale=scale)
    return out, lse


def showing(visible: Tensor) -> Tensor:
    """The mask that hides what is not visible, 0 or -inf, fp32."""
    return torch.full_like(visible, float("-inf"), dtype=torch.float32).masked_fill_(visible, 0.0)


def decode_step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_step`, in one compiled call where there is one.

    Args: out: where attention may be written to.
    """
    found = compiled_slots.step(q, k, v, state, spec, out)
    if found is None and state.rows is not None:
        return decode_step_of_rows(q, k, v, state, spec)
    return reference.decode_step(q, k, v, state, spec) if found is None else found


def decode_step_of_rows(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_step` where the batch lives in chosen rows, in place: rows that lie side by side are one batch. Of row 0
    results are zero and -inf.
    """
    assert state.rows is not None
    rows = state.rows.tolist()
    first, stop = rows[0], rows[0] + len(rows)
    if first > 0 and rows == list(range(first, stop)):
        return decode_step(q, k, v, state.stretch(first, stop), spec)
    out = q.new_zeros(*q.shape[:2], state.exact.value_dim)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=reference.compute_dtype(q))
    results = out, lse, lse.clone()
    for run in runs_of(rows):
        index = torch.tensor(run, device="cpu")
        new_q, new_k, new_v = (None if part is None else part.index_select(0, index) for part in (q, k, v))
        assert new_q is not None
        side = state.stretch(rows[run[0]], rows[run[-1]] + 1)
        for whole, part in zip(results, decode_step(new_q, new_k, new_v, side, spec)):
            whole.index_copy_(0, index, part.to(whole.dtype))
    return results


def runs_of(rows: list[int]) -> list[list[int]]:
    """Places of the rows that are somebody's, in ascending order of the rows, those that lie side by side together."""
    runs: list[list[int]] = []
    for place in sorted((place for place, row in enumerate(rows) if row > 0), key=rows.__getitem__):
        if runs and rows[place] == rows[runs[-1][-1]] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, state: LayerState, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.prefill_attention`: the block by itself, causally, merged with what came before it."""
    if not serves(q, v.shape[-1], spec.softcap):
        return reference.prefill_attention(q, k, v, valid, state, spec)
    shown = None if bool(valid.all()) else showing(valid)[:, None, None]
    out, lse = attend(q, k, v, spec.scale, shown, causal=True)
    lse = lse.masked_fill((valid.cumsum(-1) == 0)[:, None], float("-inf"))  # of rows that see nothing: 0 so far
    if state.exact.filled:
        out, lse = mixed(out, lse, *attend_slots(q, state.exact, spec.scale))
    known, mass = spec.evicted(state), torch.full_like(lse, float("-inf"))
    if known is not None:
        value, mass = estimated(q, known, spec.scale)
        out, lse = mixed(out, lse, value, mass)
    out, lse = reference.with_sink(out, lse, None if state.sink_logits is None else state.sink_logits[:, None])
    return out.to(q.dtype), lse, mass


def attend_slots(q: Tensor, slots: Slots, scale: float) -> Estimate:
    """Attention of q [B, Hq, T, D] to the slots in use, one head after another: padding takes as long as tokens do."""
    keys, values, bias = slots["keys"], slots["values"], slots.biases(slots.filled)
    rows = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [B, Hkv, G * T, D]: all of them see all
    out = torch.zeros_like(rows, dtype=torch.float32)
    lse = out.new_full(rows.shape[:3], float("-inf"))
    lengths = slots.lengths.tolist()
    if len({length for row in lengths for length in row}) == 1:
        own = [(slice(None), slice(None), lengths[0][0])]
    else:
        own = [(slice(b, b + 1), slice(h, h + 1), n) for b, row in enumerate(lengths) for h, n in enumerate(row)]
    for batch, head, length in own:
        if length:
            used = batch, head, slice(length)
            mask = None if bias is None else bias[used][:, :, None]
            out[batch, head], lse[batch, head] = attend(rows[batch, head], keys[used], values[used], scale, mask)
    return out.view(q.shape), lse.view(q.shape[:3])


def mixed(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Estimate:
    """`merge_partials` of fp32 [B, Hq, T, D] and [B, Hq, T], in place where it is compiled."""
    fits = out.shape[-1] % compiled_slots.WIDE == 0 and out.stride(-1) == other.stride(-1) == 1
    if not (fits and out.dtype == other.dtype == lse.dtype == torch.float32 and cpu.available("slots")):
        return merge_partials(out, lse, other, other_lse)
    strides = [(c_int64 * 3)(*one.stride()[:3]) for one in (out, other)]
    lse = lse.contiguous()
    given = out, lse, other, other_lse.contiguous(), *strides, *out.shape
    cpu.run("slots", "mix_partials", "Mixing", *given, torch.get_num_threads())
    return out, lse


def estimated(q: Tensor, known: Evicted, scale: float) -> Estimate:
    """`known.estimate(q, scale)`; of centroids without an operator for each term."""
    ready = q.shape[-1] % compiled_slots.WIDE == 0 and q.dtype != torch.float64 and cpu.available("slots")
    if not ready or not isinstance(known, Centroids) or known.count.dtype != torch.float32:
        return known.estimate(q, scale, None)
    keys, values = (means.flatten(0, 1).float() for means in (known.keys, known.values))
    rows = q.float().reshape(len(keys), -1, q.shape[-1])
    logits, mass = torch.bmm(rows, keys.transpose(1, 2)), rows.new_empty(rows.shape[:2])
    given = logits, rows, known.count.contiguous(), known.spread.contiguous(), mass, *logits.shape, q.shape[-1]
    cpu.run("slots", "weigh_centroids", "Weighing", *given, torch.get_num_threads(), scale)
    return torch.bmm(logits, values).view(*q.shape[:3], -1), mass.view(q.shape[:3])


def hiding(mask: Tensor | None) -> Tensor | None:
    """The mask, or None if it lets everything through: the reference then copies nothing."""
    return None if mask is None or bool(mask.all()) else mask


def keydiff_scores(
    keys: Tensor,
    anchor: str,
    *,
    distance: str,
    mask: Tensor | None,
    positions: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """`reference.keydiff_scores`; of cosines in one pass for the anchor and one for the scores."""
    means = distance == "cosine" and anchor in ("mean", "normalized_mean")
    plain = keys.ndim == 4 and (rotary is None or rotary.halves(keys.shape[3]))
    if not (means and plain and halves_fit(keys) and cpu.available("key_scores")):
        told = {"distance": distance, "positions": positions, "rotary": rotary}
        return reference.keydiff_scores(keys, anchor, mask=hiding(mask), **told)  # type: ignore[arg-type]
    check_alike("keydiff_scores", keys.shape[:3], mask=mask, positions=positions)
    (rows, strides), out = in_rows(keys), torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    valid = torch.ones_like(out, dtype=torch.bool) if mask is None else mask.contiguous()
    turn = (None, None, None) if rotary is None or positions is None else turns(rotary, positions)
    sizes = *rows.shape, strides, anchor == "normalized_mean", torch.get_num_threads(), EPSILON
    cpu.run("key_scores", "unlike", "Unlike", rows, *turn, valid, out, *sizes)
    return out


def queries_ahead(
    queries: Tensor, positions: Tensor, valid: Tensor, rotary: Rotary, horizon: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.queries_ahead`, with the products of few queries at a time, and no copy of them."""
    batch, heads, num, dim = queries.shape
    if not halves_fit(queries) or not cpu.available("expected"):
        return reference.queries_ahead(queries, positions, valid, rotary, horizon, sinks)
    check_alike("queries_ahead", positions.shape, valid=valid)
    places, real = (part[:, 0, -num:].contiguous() for part in (positions, valid))
    check_alike("queries_ahead", (batch, num), positions=places)
    turned = rotary.halves(dim)
    rows, strides = in_rows(queries if turned else rotary.unrotate(queries.float(), places[:, None]))
    *turn, places = turns(rotary, places, horizon) if turned else (None, None, places.int())
    mean, covariance = rows.new_empty(batch, heads, 1, dim), rows.new_empty(batch, heads, dim, dim)
    count = torch.empty(batch, 1, 1, dtype=torch.int64, device=rows.device)
    sizes = *queries.shape, torch.get_num_threads(), strides, horizon, sinks, rotary.scaling
    cpu.run("expected", "spread", "Queries", rows, *turn, places, real, mean, covariance, count, *sizes)
    if not turned:
        newest = torch.where(real, places, -1).amax(-1)[:, None, None]
        ahead = rotary.turn_ahead(newest, torch.arange(1, horizon + 1, device=rows.device))
        mean, covariance = turned_ahead(mean, covariance, rotary, ahead)
    return mean, covariance, count


def turns(rotary: Rotary, positions: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """cos and sin of all positions so far and `ahead` more, without the scaling, [P, R/2], and int32 positions, all of
    them below P: those of what is not valid are of older tokens.
    """
    last = int(positions.max()) if positions.numel() else 0
    return *turn_table(rotary, 1 << (last + ahead).bit_length()), positions.int().contiguous()


@lru_cache(maxsize=4)  # the layers of a model turn alike, and read the same positions
def turn_table(rotary: Rotary, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions below `length`."""
    with torch.inference_mode(False):  # which would leave its mark on what is kept
        return rotary.turn(torch.arange(length, device="cpu"))


def expected_attention(
    keys: Tensor,
    values: Tensor,
    mean: Tensor,
    covariance: Tensor,
    count: Tensor,
    scale: float,
    epsilon: float,
    memory: Tensor,
    *,
    valid: Tensor,
) -> Tensor:
    """`reference.expected_attention`, with the products of few keys at a time, and no copy of them."""
    if not halves_fit(keys) or mean.dtype != torch.float32 or not cpu.available("expected"):
        told = mean, covariance, count, scale, epsilon, memory
        return reference.expected_attention(keys, values, *told, valid=valid)
    op, (batch, heads, num, dim), num_heads = "expected_attention", keys.shape, mean.shape[1]
    groups = check_groups(op, num_heads, heads)
    check_alike(op, (batch, heads, num), valid=valid)
    check_alike(op, (batch, num_heads, 1, dim), mean=mean)
    check_alike(op, (batch, num_heads, dim, dim), covariance=covariance)
    check_alike(op, (batch, 1, 1), count=count)
    check_alike(op, (batch, heads, num), memory=memory)
    check_shape(op, "values", values, (batch, heads, num, None))
    (keys, key_strides), (values, value_strides) = in_rows(keys), in_rows(values)
    out = keys.new_empty(batch, heads, num)
    tensors = keys, values, *(one.contiguous() for one in (mean, covariance, count, memory.float(), valid)), out
    sizes = batch, heads, groups, num, dim, values.shape[-1], torch.get_num_threads()
    cpu.run("expected", "expected", "Expected", *tensors, *sizes, key_strides, value_strides, scale, epsilon)
    return out


def check_alike(op: str, shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise FastKVError unless what C++ will read is of that shape."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_shape(op, name, tensor, shape)


def halves_fit(rows: Tensor) -> bool:
    """Whether C++ reads rows [..., D] in two halves of whole vectors."""
    return rows.dtype in DTYPES and rows.shape[-1] % (2 * compiled_slots.WIDE) == 0


def in_rows(rows: Tensor) -> tuple[Tensor, Any]:
    """Rows [B, H, N, D] in fp32, each in one piece, and the strides of the other axes."""
    rows = rows.float()
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, compiled_slots.Three(*rows.stride()[:3])


def manifold_scores(keys: Tensor, window: int | None, metric: str, *, mask: Tensor | None) -> Tensor:
    """`reference.manifold_scores`."""
    return reference.manifold_scores(keys, window, metric, mask=hiding(mask))


def candidates(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    memory: Tensor | None,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    seen: Tensor,
    sinks: int,
    recent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.candidates`, with all but keys and values in one compiled call."""
    known = memory is None or memory.dtype == torch.float32
    plain = positions.dtype == lengths.dtype == torch.int32 and known
    if not plain or not cpu.available("choice"):
        told = k, v, valid, seen, sinks, recent
        return reference.candidates(keys, values, positions, memory, lengths, *told)
    (batch, heads, slots), block = positions.shape, k.shape[2]
    check_alike("candidates", (batch, heads, slots), memory=memory)
    check_alike("candidates", (batch, heads), lengths=lengths)
    check_alike("candidates", (batch, block), valid=valid)
    both = [reference.joined(old, new) if slots else old.new_empty(0) for old, new in ((keys, k), (values, v))]
    places = positions.new_empty(batch, heads, slots + block)
    real, guard = (torch.empty_like(places, dtype=torch.bool) for _ in range(2))
    every = torch.empty(places.shape if memory is not None else 0, dtype=torch.float32, device=places.device)
    old = (one if one is None else one.contiguous() for one in (positions, lengths, memory, valid, seen.long()))
    new = places, real, guard, every if memory is not None else None
    cpu.run("choice", "candidates", "Candidates", *old, *new, batch, heads, slots, block, sinks, recent)
    return both[0], both[1], places, real, guard, every


def slot_signals(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.slot_signals`, in one compiled call where slots count nothing."""
    slots, plain = state.exact, positions.dtype == state.exact.lengths.dtype == torch.int32
    if state.approx is not None or slots.attention is not None or not plain or not cpu.available("choice"):
        return reference.slot_signals(positions, state, spec)
    check_alike("slot_signals", (*slots.lengths.shape, positions.shape[-1]), positions=positions)
    valid, guard = (torch.empty(positions.shape, dtype=torch.bool, device=positions.device) for _ in range(2))
    given = (one.contiguous() for one in (positions, slots.lengths))
    sizes = *positions.shape, 0, spec.sinks, spec.recent
    nothing = positions.new_empty(0, dtype=torch.float32)
    seen = state.seen.long().contiguous()
    cpu.run("choice", "candidates", "Candidates", *given, None, None, seen, None, valid, guard, None, *sizes)
    return valid, guard, nothing, nothing.new_empty(0)


def needed_scores(unlike: Tensor, expected: Tensor | None, reread: Tensor | None, valid: Tensor) -> Tensor:
    """`reference.needed_scores`, in one compiled call."""
    reasons = unlike, expected, reread
    if not cpu.available("choice") or any(one is not None and one.dtype != torch.float32 for one in reasons):
        return reference.needed_scores(unlike, expected, reread, valid)
    check_alike("needed_scores", unlike.shape, expected=expected, reread=reread, valid=valid)
    out = torch.empty(unlike.shape, dtype=torch.float32, device=unlike.device)
    tensors = [one if one is None else one.contiguous() for one in (*reasons, valid)]
    cpu.run("choice", "needed", "Needed", *tensors, out, *heads_of(valid))
    return out


def select(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int | Tensor) -> Selection:
    """`reference.select`, or `select_each`, without sorting all."""
    if not cpu.available("choice") or positions.dtype != torch.int32:
        sorting: Any = reference.select if isinstance(tokens, int) else reference.select_each
        return sorting(scores, positions, valid, protected, tokens)  # type: ignore[no-any-return]
    shape = scores.shape
    check_alike("select", shape, positions=positions, valid=valid, protected=protected)
    found = Selection(valid.new_empty(shape), positions.new_empty(shape[:-1], dtype=torch.int64))
    numbers = torch.full_like(found.counts, tokens) if isinstance(tokens, int) else tokens.long().expand(shape[:-1])
    tensors = (one.contiguous() for one in (scores.float(), positions, valid, protected, numbers))
    cpu.run("choice", "choose", "Choosing", *tensors, *found, *heads_of(valid))
    return found


select_each = select


def heads_of(rows: Tensor) -> tuple[int, int, int]:
    """Of [B, Hkv, N]: B * Hkv, N and how many threads there are."""
    return rows.shape[:-1].numel(), rows.shape[-1], torch.get_num_threads()


def compact(
    valid: Tensor,
    selection: Selection,
    block: tuple[Tensor, Tensor, Tensor] | None,
    known: Tensor | None,
    state: LayerState,
    spec: Spec,
) -> None:
    """`reference.compact`, in place: only tokens that leave are copied out, only those that fill their slots are moved,
    and of a block only those that stay are stored."""
    slots, moments, kept = state.exact, state.moments, selection.kept
    used = valid.shape[-1] - (0 if block is None else block[0].shape[2])
    after: Moments | None = None
    if block is not None or moments.key_mean is not None:
        after, gone = moments, valid & ~kept
        if moments.key_mean is None:
            after = Moments(moments.count + gone.sum(-1))
        elif most := int(gone[..., :used].sum(-1).max()) if used else 0:
            leaving = gone[..., :used].to(torch.uint8).topk(most, dim=-1, sorted=False).indices.sort(-1).values
            after = after.add(*slots.pairs_at(leaving), hiding(gone.gather(-1, leaving)))
        if block is not None and moments.key_mean is not None:
            after = after.add(*block[:2], gone[..., used:])
    if not compiled_slots.compact(slots, valid, kept, known, moments.count if after is None else None, block):
        reference.compact(valid, selection, block, known, state, spec)
        return
    if after is not None:
        moments.copy_(after)
    if block is not None:
        state.seen.add_(valid[:, 0, used:].sum(-1))
        if slots.attention is not None:
            slots.attention.zero_()


def remember(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    valid: Tensor,
    kept: Tensor,
    most: int,
    state: LayerState,
    spec: Spec,
) -> None:
    """`reference.remember`; centroids without an operator for each term."""
    parts = state.parts
    fits = positions.dtype == torch.int32 and cpu.available("joins")
    ready = isinstance(parts, Centroids) and parts.keys.dtype in compiled_slots.MEANS and fits
    if not isinstance(parts, Centroids) or not ready or not all(one.is_contiguous() for one in parts.tensors()):
        reference.remember(keys, values, positions, valid, kept, most, state, spec)
        return
    check_alike("remember", keys.shape[:3], positions=positions, valid=valid, kept=kept)
    join(parts, keys, values, positions, valid, kept)


def most_attended(q: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """`reference.most_attended`, with the logits of few queries at a time, which never leave a core's cache."""
    if q.dtype not in DTYPES or not cpu.available("most_attended"):
        return reference.most_attended(q, keys, lse, scale, softcap)
    groups, (batch, heads, length, dim) = reference.check_most_attended(q, keys, lse), keys.shape
    rows = [rows.float().contiguous() for rows in (q, keys, lse)]
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    sizes = batch, heads, groups, q.shape[2], length, dim, torch.get_num_threads()
    cpu.run("most_attended", "most_attended", "MostAttended", *rows, out, *sizes, scale, softcap or 0.0)
    return out


# Compiled from joins.cpp and most_attended.cpp on first use.

CONSTANTS = ("BLOCK", "SEEDS", "ROOMY", "CHOICES", "FINE", "MEDIUM", "SETTLED", "STEP", "TURN")  # of `Centroids.add`


def join(parts: Centroids, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor, kept: Tensor) -> None:
    """`parts` become `parts.add` of the rows that are valid and not kept, in the order of their positions, in place.

    Args: keys [B, Hkv, N, Dk] and values [B, Hkv, N, Dv] in any float dtype; [B, Hkv, N]: positions int32, valid, kept.
    """
    (keys, key_strides), (values, value_strides) = in_rows(keys), in_rows(values)
    rows = (one.contiguous() for one in (positions, valid, kept))
    tensors = parts.count, parts.spread, parts.keys, parts.values, keys, values, *rows
    sizes = *parts.count.shape, keys.shape[2], keys.shape[-1], values.shape[-1]
    halves = parts.keys.dtype == torch.bfloat16
    constants = (getattr(centroids, name) for name in CONSTANTS)
    rest = *sizes, halves, torch.get_num_threads(), *constants
    cpu.run("joins", "join_centroids", "Joining", *tensors, key_strides, value_strides, *rest)
