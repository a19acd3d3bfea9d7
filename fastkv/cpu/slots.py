"""A decode step on a CPU, over slots that are plain or codes, compiled from slots.cpp on first use.

torch decodes 8 and 4 bits before it multiplies, which takes longer than attention; copies heads of unequal length to
equal ones; converts all of 16 bits to float32; and is called a dozen times. Without a C++ compiler (`cpu.library`) the
reference does all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..reference import Centroids, Evicted, LayerState, Moments, RowFormat, Slots, Spec, Stored

WIDE, LONGEST = 16, 512  # a row has a multiple of so many numbers, and at most so many
PLAIN = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MEANS = (torch.float32, torch.bfloat16)  # of centroids
C, Three = cpu.structs("slots"), c_int64 * 3
POINTERS = ("keys", "values", "count", "spread", "whole", "cross")  # of what stands for the evicted, in C++ and here
Rows = tuple[Tensor, Tensor, Tensor]  # keys, values and positions of tokens
MIXED = {
    Centroids: {"count": "count", "keys": "keys", "values": "values", "spread": "spread"},
    Moments: {"whole": "count", "keys": "key_mean", "values": "value_mean", "cross": "cross"},
}
PARTS = {kind: attrgetter(*names.values()) for kind, names in MIXED.items()}
LAID = "keys", "values", "key_scales", "value_scales", "positions", "bias", "memory", "lengths", "starts"  # of slots
laid_out, in_layer = attrgetter(*LAID), attrgetter(*(f"exact.{name}" for name in (*LAID, "attention")), "seen")


def rows_at(part: Tensor | None, shared: bool) -> Any:
    """Rows [B, Hkv, C, ...], [B, S, ...] of heads that share slots, or none. None where a row is in several pieces."""
    if part is None:
        return C.Moving()
    axes = 2 if shared else 3
    size, strides = part.element_size(), part.stride()
    numbers = 1
    for more, stride in zip(part.shape[: axes - 1 : -1], strides[: axes - 1 : -1]):
        if stride != numbers:
            return None
        numbers *= more
    of_head = (0, strides[1]) if shared else strides[1:3]
    return C.Moving(part.data_ptr(), Three(*(size * stride for stride in (strides[0], *of_head))), size * numbers)


def coded_at(codes: Tensor | None, scales: Tensor | None) -> Any:
    """Codes [B, Hkv, N, width] and scales [B, Hkv, N, ...]; or [B, N, ...] of heads that share slots; or neither. Plain
    rows have no scales. None where a row is in several pieces.
    """
    parts = [rows_at(part, codes is not None and codes.ndim == 3) for part in (codes, scales)]
    return None if None in parts else C.Coded(*parts)


def serves(form: RowFormat, dim: int) -> bool:
    """Whether rows of `dim` numbers are handled here. The first question compiles."""
    return not form.plain and dim % WIDE == 0 and dim <= LONGEST and cpu.available("slots")


def rows_of(rows: Tensor, coded: Any) -> Any:
    """rows [B, Hkv, N, D], fp32 or bf16 and contiguous, and where they are codes."""
    place = (None, rows.data_ptr()) if rows.dtype == torch.bfloat16 else (rows.data_ptr(), None)
    return C.Rows(coded, *place, *rows.shape, torch.get_num_threads())


def in_four(part: Tensor, place: int) -> Tensor:
    """A tensor whose first `place` axes are of rows, as one with three of them."""
    return part if place == 3 else part.reshape(1, 1, -1, *part.shape[place:])


def encode_rows(form: RowFormat, rows: Tensor) -> Stored:
    """`form.encode(rows)` of rows [..., D]; the same bits."""
    if not serves(form, rows.shape[-1]):
        return form.encode(rows)
    rows, place = rows.float().contiguous(), rows.ndim - 1
    codes, scales = form.empty(rows.shape[:-1], rows.shape[-1], torch.float32, rows.device)
    assert scales is not None
    coded = coded_at(in_four(codes, place), in_four(scales, place))  # views
    cpu.call("slots", f"encode_{form.name}", rows_of(in_four(rows, place), coded))
    return codes, scales


def decode_rows(form: RowFormat, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`form.decode(codes, scales)` [..., D] in that dtype; the same bits except for the order of sums that turn rows
    back.
    """
    if scales is None or not serves(form, form.dim(codes.shape[-1])):
        return form.decode(codes, scales).to(dtype)
    place = codes.ndim - 1
    made = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    rows = torch.empty(*codes.shape[:-1], form.dim(codes.shape[-1]), dtype=made, device=codes.device)
    parts = in_four(codes, place), in_four(scales, place)  # copies stay until the call is over
    coded = coded_at(*parts)
    if coded is None:
        return form.decode(codes, scales).to(dtype)
    cpu.call("slots", f"decode_{form.name}", rows_of(in_four(rows, place), coded))
    return rows.to(dtype)


class Told:
    """What C++ is told of some tensors, found once for them: the same in every step.

    Attributes: things: that it was found for.  place: an address among them. Tensors that become shared between
        processes move, all of a state at once, so one address tells; to ask every tensor for its own is slow.
        given: the struct; None where C++ cannot be used.
    """

    def __init__(self, things: tuple[Any, ...], place: int, given: Any) -> None:
        self.things, self.place, self.given = things, place, given

    def holds(self, things: tuple[Any, ...], place: int) -> bool:
        """Whether they are still the same."""
        return self.place == place and len(self.things) == len(things) and all(map(is_, self.things, things))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # what is copied or read from a file has other tensors, and finds its own


def told(slots: Slots) -> Any:
    """The slots for C++; None where a row is in several pieces, and unless what says which of them are whose is int32
    and heads lie side by side. The first question compiles.
    """
    things, standing, place = laid_out(slots), slots.standing, slots.keys.data_ptr()
    if standing is None or not standing.holds(things, place):
        slots.standing = standing = Told(things, place, described(slots))
    return standing.given


def described(slots: Slots) -> Any:
    """`told`, anew."""
    lengths, starts = slots.lengths, slots.starts
    owned = [lengths] if starts is None else [lengths, starts]
    if any(part.dtype != torch.int32 or part.stride(-1) != 1 for part in owned) or not cpu.available("slots"):
        return None
    parts = [coded_at(slots.keys, slots.key_scales), coded_at(slots.values, slots.value_scales)]
    parts += [rows_at(part, starts is not None) for part in (slots.positions, slots.bias, slots.memory)]
    if None in parts:
        return None
    first, by = (None, 0) if starts is None else (starts.data_ptr(), starts.stride(0))
    sizes = *lengths.shape, slots.keys.shape[-2], slots.format.keys.dim(slots.keys.shape[-1]), slots.value_dim
    return C.Slots(*parts, lengths.data_ptr(), first, *sizes, lengths.stride(0), by)


def attends(slots: Slots, dim: int) -> bool:
    """Whether `step` can attend to slots that C++ was told of."""
    keys, values, received = slots.keys, slots.values, slots.attention
    if values is None or slots.value_dim != dim:
        return False
    if received is not None and (received.dtype != torch.float32 or received.stride(-1) != 1):
        return False
    if not slots.format.plain:
        return serves(slots.format.keys, dim)
    return values.dtype == keys.dtype and keys.dtype in PLAIN and dim % WIDE == 0 and dim <= LONGEST


def mixes(known: Evicted | None) -> bool:
    """Whether `step` can mix that into attention: what each head has of it lies in one piece."""
    if known is None:
        return True
    if type(known) not in MIXED:
        return False
    count, *means = known.tensors()
    if isinstance(known, Moments):
        fits = count.dtype == torch.int64 and all(part.dtype == torch.float32 for part in means)
    else:
        keys, values, spread = means
        fits = count.dtype == spread.dtype == torch.float32 and values.dtype == keys.dtype and keys.dtype in MEANS
    return fits and all(tensor[0].is_contiguous() for tensor in known.tensors())


def attention(state: LayerState, spec: Spec, dim: int) -> Any:
    """What is the same for C++ in every step of a layer; None where it cannot be used: with a softcap, tokens without
    values, and what `attending` refuses.
    """
    if state.approx is not None or spec.softcap is not None:
        return None
    known, standing, place = spec.evicted(state), state.standing, state.exact.keys.data_ptr()
    parts = PARTS.get(type(known))
    every = in_layer(state) + ((known,) if parts is None else parts(known))
    if standing is None or not standing.holds(every, place):
        state.standing = standing = Told(every, place, attending(state, known, dim))
    return standing.given


def attending(state: LayerState, known: Evicted | None, dim: int) -> Any:
    """`attention`, anew. A token that comes is stored in the same call if it is told where tokens are counted."""
    slots, seen, received, given = state.exact, state.seen, state.exact.attention, C.Attention()
    if told(slots) is None or not (attends(slots, dim) and mixes(known)):
        return None
    given.slots = told(slots)
    if received is not None:
        given.received, given.received_strides = received.data_ptr(), (c_int64 * 2)(*received.stride()[:2])
    plain = slots.positions is not None and slots.positions.dtype == torch.int32
    if plain and slots.bias is None and seen.dtype == torch.int64:
        given.token.seen, given.token.seen_stride = seen.data_ptr(), seen.stride(0)
    for name, part in () if known is None else MIXED[type(known)].items():
        tensor = getattr(known, part)
        if tensor is not None:
            setattr(given.evicted, name, tensor.data_ptr())
            given.evicted.strides[POINTERS.index(name)] = tensor.element_size() * tensor.stride(0)
    if isinstance(known, Centroids):
        given.evicted.number, given.evicted.halves = known.num, known.keys.dtype == torch.bfloat16
    stored = PLAIN[slots.keys.dtype] if slots.format.plain else slots.format.name
    given.dim, given.attend = dim, cpu.bound("slots", f"attend_{stored}", given)
    return given


def stores(given: Any, slots: Slots) -> bool:
    """Whether a token is stored in the same call: not in tensors of inference mode outside of it, as PyTorch has it."""
    return bool(given.token.seen) and (torch.is_inference_mode_enabled() or not slots.lengths.is_inference())


def run(given: Any, state: LayerState, spec: Spec, batch: int, rows: int, *places: Tensor | None) -> None:
    """One step in C++.

    Args: rows: queries of a head.  places: queries, out, keys and values of the token, lse, mass, cos and sin of C++'s
        Attention; None for none.
    """
    slots, sinks, token, chosen = state.exact, state.sink_logits, given.token, state.rows
    addresses = [None if one is None else one.data_ptr() for one in places]
    given.queries, given.out, token.keys, token.values, given.lse, given.mass, given.cos, given.sin = addresses
    chosen = None if chosen is None else dense(chosen, torch.int64)
    given.batch, given.chosen = batch, None if chosen is None else chosen.data_ptr()
    bias = slots.biases(slots.filled)
    bias = None if bias is None else dense(bias, torch.float32)
    sinks = None if sinks is None else dense(sinks.detach(), torch.float32)
    given.bias = None if bias is None else bias.data_ptr()
    given.sinks = None if sinks is None else sinks.data_ptr()
    given.rows, given.number, given.scale, given.threads = rows, slots.filled, spec.scale, torch.get_num_threads()
    given.attend()


def step(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, spec: Spec, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`reference.decode_step`; None where it has to be done otherwise, and nothing has happened: in float64, where
    there is no `attention`, and in chosen rows of slots with biases. Of another batch the reference says what is wrong.

    Args: into: where attention may be written to, [B, Hq, D].
    """
    (batch, num_heads, dim), slots = q.shape, state.exact
    given = None if q.dtype == torch.float64 or batch != state.batch else attention(state, spec, dim)
    storing = given is not None and stores(given, slots)
    if given is None or (state.rows is not None and not storing):
        return None
    rows = dense(q, torch.float32)
    out = torch.empty_like(rows) if into is None or into.dtype != rows.dtype or not into.is_contiguous() else into
    lse, mass = rows.new_empty(batch, num_heads), rows.new_empty(batch, num_heads)
    if k is not None and v is not None:
        if storing:
            stored = slots.keys.dtype if slots.format.plain else torch.float32
            k, v = dense(k, stored), dense(v, stored)
        else:
            reference.append(slots, k, v, state.seen)
            state.seen.add_(1)
            k = v = None
    run(given, state, spec, batch, num_heads // slots.lengths.shape[1], rows, out, k, v, lse, mass, None, None)
    return out if out is into else dense(out, q.dtype), lse, mass


def step_before_rope(
    q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor], state: LayerState, spec: Spec
) -> Tensor | None:
    """Attention of `step` [B, 1, Hq * D], whose token C++ turns as `rotated` does.

    Args: q [B, 1, Hq * D], k and v [B, 1, Hkv * D], contiguous, fp32; turns: cos and sin [B or 1, 1, D].
    Returns: None where it has to be done otherwise, and nothing has happened.
    """
    cos, sin = turns
    slots, dim = state.exact, cos.shape[-1]
    batch, heads = slots.lengths.shape
    given = attention(state, spec, dim)
    fits = q.shape[0] == batch and k.shape[-1] == v.shape[-1] == heads * dim
    if given is None or given.dim != dim or not fits or not stores(given, slots):
        return None
    if slots.format.plain and slots.keys.dtype != torch.float32:
        return None
    cos, sin, out = dense(cos, torch.float32), dense(sin, torch.float32), torch.empty_like(q)
    given.turn_stride = dim if cos.shape[0] > 1 else 0
    run(given, state, spec, batch, q.shape[-1] // (heads * dim), q, out, k, v, None, None, cos, sin)
    return out


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries [B, Hq, 1, D] and keys [B, Hkv, 1, D] fp32 of a token as RoPE turns them, number i with i + D/2; cos and
    sin of its angles [B or 1, 1, D]. The same bits as torch's. None where it has to be done otherwise.
    """
    batch, heads, _, dim = q.shape
    if dim > LONGEST or not cpu.available("slots"):
        return None
    q, k, cos, sin = (dense(part, torch.float32) for part in (q, k, cos, sin))
    turned = torch.empty_like(q), torch.empty_like(k)
    places = (part.data_ptr() for part in (q, k, *turned, cos, sin))
    sizes = batch, heads, k.shape[1], dim, dim if len(cos) > 1 else 0
    cpu.call("slots", "rotate_heads", C.Rotating(*places, *sizes))
    return turned


def dense(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous rows of that dtype. To ask first is quicker than a conversion that has nothing to do."""
    return (rows if rows.dtype == dtype else rows.to(dtype)).contiguous()


def compact(
    slots: Slots, valid: Tensor, kept: Tensor, known: Tensor | None, count: Tensor | None, block: Rows | None
) -> bool:
    """Let tokens go, in place: those that are not `kept`, [B, Hkv, N] bool of the first slots of every head, and of a
    block behind them. A token that stays in a slot before the new length is not moved; those of the block come last.

    Args: valid [B, Hkv, N] bool: which are tokens; known [B, Hkv, N]: a number of each, which becomes the memory of
        those that stay; count [B, Hkv] int64: grows by how many leave; None for none; block: keys, values and int32
        positions of new tokens, None for none.

    Returns: whether it was done; without a compiler, for slots that it does not know, where a row is in several pieces,
        and unless `valid` are the slots in use, nothing happens.
    """
    used, leaving, coming = valid.shape[-1], None, None
    if block is None:
        leaving = _leaving(slots, valid, kept, known, count)
    else:
        used -= block[0].shape[2]
        old, new = (None, None) if known is None else (known[..., :used], known[..., used:])
        if used:
            leaving = _leaving(slots, valid[..., :used], kept[..., :used], old, count)
        coming = _coming(slots, kept[..., used:], block, new, behind=used > 0)
    if (used and leaving is None) or (block is not None and coming is None):
        return False
    if leaving is not None and not cpu.call("slots", "leave_slots", leaving):
        return False
    if coming is not None:
        form = slots.format
        cpu.call("slots", f"keep_{PLAIN[slots.keys.dtype] if form.plain else form.name}", coming)
    return True


def _leaving(slots: Slots, valid: Tensor, kept: Tensor, known: Tensor | None, count: Tensor | None) -> Any:
    """What C++ is told of the tokens in slots, as `compact` has them; None where it cannot do it."""
    there = told(slots)
    if there is None or (count is not None and not count.is_contiguous()):
        return None
    valid, kept = valid.contiguous(), kept.contiguous()
    known = None if known is None or slots.memory is None else dense(known, torch.float32)
    addresses = (None if one is None else one.data_ptr() for one in (valid, kept, known, count))
    given = C.Leaving(there, *addresses, kept.shape[-1])
    given.alive = valid, kept, known
    return given


def read(slots: Slots, names: Sequence[str], dtype: torch.dtype) -> list[Tensor] | None:
    """`Slots.read` of heads that share slots, or of codes, in one compiled call, with zeros behind the tokens in use.
    None where it has to be done otherwise.
    """
    values, form, known = slots.values, slots.format, told(slots)
    named = {*names} <= {"keys", "values", "positions", "memory"}
    if known is None or values is None or dtype != torch.float32 or not named:
        return None
    if form.plain:
        ready = slots.starts is not None and slots.keys.dtype == values.dtype == torch.float32
    else:
        ready = serves(form.keys, known.dim) and serves(form.values, known.value_dim)
    if not ready:
        return None
    shape, dims = (*slots.lengths.shape, slots.filled), {"keys": (known.dim,), "values": (known.value_dim,)}
    made = {}
    for name in names:
        one = getattr(slots, name)
        made[name] = one.new_empty(*shape, *dims.get(name, ()), dtype=dtype if name in dims else one.dtype)
    given = C.Reading(known, **{f"to_{name}": one.data_ptr() for name, one in made.items()})
    given.number, given.threads = slots.filled, torch.get_num_threads()
    cpu.call("slots", f"read_{PLAIN[dtype] if form.plain else form.name}", given)
    return [made[name] for name in names]


def _coming(slots: Slots, kept: Tensor, block: Rows, known: Tensor | None, behind: bool) -> Any:
    """Likewise of a block's. Args: behind: whether they come behind those in slots; else these are empty."""
    (keys, values, new), form, there = block, slots.format, told(slots)
    if there is None or slots.values is None or slots.positions is None or slots.bias is not None:
        return None
    if form.plain:
        ready = slots.keys.dtype == slots.values.dtype and slots.keys.dtype in PLAIN
    else:
        ready = serves(form.keys, keys.shape[-1]) and serves(form.values, values.shape[-1])
    stored = slots.keys.dtype if form.plain else torch.float32
    rows = [one.to(stored) for one in (keys, values)]
    rows = [*(one if one.stride(-1) == 1 else one.contiguous() for one in rows), new]
    if known is not None and slots.memory is not None:
        rows.append(known.float())
    places = [rows_at(one, False) for one in rows]
    if not ready or None in places:
        return None
    kept = kept.contiguous()
    given = C.Keeping(there, *places, *[C.Moving()] * (4 - len(places)), kept.data_ptr(), keys.shape[2], behind)
    given.threads, given.alive = torch.get_num_threads(), (kept, rows)
    return given
