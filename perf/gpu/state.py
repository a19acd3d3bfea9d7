"""What checks share: a random cache layer, and how results are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastkv import corrections
from fastkv.corrections import Shape
from fastkv.reference import LayerState, Moments, Recovery, SlotFormat, Slots
from fastkv.reference.gather import pack
from fastkv.rotary import Rotary

from .heads import Heads
from .place import Place

NAN = float("nan")
TINY = 1e-5  # of the largest value
TRUNCATED = {torch.float16: 2e-4, torch.bfloat16: 8e-3}  # the interpreter truncates where hardware rounds


@dataclass
class Finding:
    """One comparison: largest absolute error and its limit; a limit of 0 asks for equality."""

    name: str
    error: float
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN never is."""
        return self.error <= self.limit


def ragged(
    place: Place,
    heads: Heads,
    dtype: torch.dtype,
    batch: int = 2,
    slots: int = 0,
    correction: str = "moments",
    seed: int = 0,
) -> LayerState:
    """A random layer with an empty head and a one-token one: lengths + count = seen. The last slot of every head is
    free, what slots without a token hold is NaN, and the kernel's half-precision slope is the true one.

    Args: correction: name of what remembers the evicted tokens; for less than first-order moments take "moments".
    """
    torch.manual_seed(seed)
    slots, kind = slots or place.slots, corrections.get(correction)
    num, dim, device = heads.num_kv_heads, heads.head_dim, place.device
    lengths = torch.randint(2, slots, (batch, num), device=device)
    lengths.view(-1)[:3] = torch.tensor([0, 1, slots - 1], device=device)
    seen = lengths.amax(1) + 17
    count = seen[:, None] - lengths
    everyone = torch.rand(batch, num, int(seen.max()), device=device)
    ahead = torch.arange(everyone.shape[-1], device=device) >= seen[:, None, None]
    order = everyone.masked_fill(ahead, 2.0).argsort(-1)[..., :slots].int()
    held = torch.arange(slots, device=device) < lengths[..., None]
    keys, values = randn(place, dtype, batch, num, slots, dim), randn(place, dtype, batch, num, slots, dim)
    old_keys = randn(place, torch.float32, batch, num, int(count.max()), dim) + 0.3
    old_values = randn(place, torch.float32, batch, num, int(count.max()), dim) - old_keys
    gone = torch.arange(old_keys.shape[2], device=device) < count[..., None]
    moments = Moments.empty(batch, num, dim, dim, device, order=kind.order, spread=kind.spread)
    moments = moments.add(old_keys, old_values, gone)
    if moments.cross is not None:
        size = moments.count.clamp(min=1)[..., None, None]
        moments.slope = (moments.cross / size).to(dtype)
        moments.cross = moments.slope.float() * size
    parts = kind.empty(batch, Shape(num, dim, dim, dtype.itemsize), slots, device)
    if parts is not None:
        parts = parts.add(old_keys, old_values, gone)
    keys[~held], values[~held] = NAN, NAN
    slots_of = Slots(keys, values, lengths.int(), order.masked_fill(~held, -7))
    return LayerState(slots_of, seen, moments, parts=parts)


def slab(state: LayerState) -> LayerState:
    """The same layer with heads that own stretches of unequal length of one slab; each has at least one free slot."""
    slots = state.exact
    batch, num = slots.lengths.shape
    room = slots.lengths + 1 + torch.arange(num, device=slots.lengths.device) % 3
    starts = torch.zeros(batch, num + 1, dtype=torch.int32, device=room.device)
    starts[:, 1:] = room.cumsum(-1)
    made = {}
    for name, rows in slots.moving().items():
        made[name] = rows.new_zeros(batch, num * (slots.limit + 3), *rows.shape[3:])
        pack(made[name], starts, rows)
    exact = Slots(lengths=slots.lengths.clone(), starts=starts, limit=int(room.max()), **made)
    return LayerState(exact, state.seen, state.moments, parts=state.parts)


def with_keys_only(state: LayerState) -> LayerState:
    """The same layer with as many tokens again that keep their key only, and a random map that recovers values."""
    slots, (heads, dim) = state.exact, (state.heads, state.exact.keys.shape[-1])
    keys, lengths, positions = (rows.flip(0).contiguous() for rows in (slots.keys, slots.lengths, slots.positions))
    device = keys.device
    frequencies = 1e4 ** (-torch.arange(dim // 2, device=device) / (dim // 2))
    recovery = Recovery(
        torch.randn(heads, dim, dim, device=device) / dim**0.5,
        *Rotary(frequencies).table(2 * int(state.seen.max()) + 8),
    )
    approx = Slots(keys, None, lengths, positions.clamp(min=0))
    seen = state.seen + lengths.amax(1)
    moments = replace(state.moments, count=(seen[:, None] - slots.lengths - lengths).to(state.moments.count.dtype))
    if moments.cross is not None and moments.slope is not None:
        moments.cross = moments.slope.float() * moments.count.clamp(min=1)[..., None, None]
    return LayerState(slots, seen, moments, approx, recovery=recovery)


def encoded(state: LayerState, form: SlotFormat) -> LayerState:
    """The same layer with pairs stored in that format; rows of NaN have scales of NaN."""
    if form.plain:
        return state
    slots = state.exact
    assert slots.values is not None
    (keys, key_scales), (values, value_scales) = form.encode(slots.keys), form.encode(slots.values)
    codes = dict(keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)
    return replace(state, exact=replace(slots, **codes, format=form, decodes_to=slots.dtype))


def copied(state: LayerState, dtype: torch.dtype | None = None) -> LayerState:
    """A copy; with a dtype, everything floating is in it, and the kernel's half-precision slope is left out."""
    twin = copy.deepcopy(state)
    if dtype is not None:
        twin.moments.slope = None
        for name, tensor in list(twin.named_tensors()):
            if tensor.is_floating_point():
                twin.replace(name, tensor.to(dtype))
        if twin.recovery is not None:
            twin.recovery = Recovery(*(t.to(dtype) for t in vars(twin.recovery).values()))
    return twin


def in_order(state: LayerState) -> list[Tensor]:
    """Positions, keys and values by position, and lengths: what does not depend on which slot holds what."""
    slots, mask = state.exact, ~state.exact.valid
    order = torch.where(mask, 2**30, slots["positions"]).argsort(-1)
    rows = [slots[name].gather(2, order[..., None].expand_as(slots[name])) for name in ("keys", "values")]
    rows = [one.masked_fill(mask[..., None], 0) for one in rows]
    return [slots["positions"].gather(-1, order).masked_fill(mask, 0), *rows, slots.lengths]


def compare(states: Sequence[LayerState], label: str) -> list[Finding]:
    """A changed state against the same change in float64 and in float32: sets exactly, moments within the limit."""
    got, truth, _ = states
    names = ("positions", "keys", "values", "lengths")
    pairs = zip(names, in_order(got), in_order(truth))
    findings = [equal(label + name, mine, want.to(mine.dtype)) for name, mine, want in pairs]
    m, t, p = (state.moments for state in states)
    findings.append(equal(f"{label}count", m.count, t.count))
    for name in ("key_mean", "value_mean", "cross"):
        findings.append(close(label + name, getattr(m, name), getattr(t, name), getattr(p, name)))
    slope = t.cross / t.count.clamp(min=1)[..., None, None]
    tiny = TINY if m.slope.is_cuda else TRUNCATED[m.slope.dtype]
    return [*findings, close(f"{label}slope", m.slope, slope, slope.to(m.slope.dtype), tiny)]


def randn(place: Place, dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers rounded to `dtype`."""
    return torch.randn(*shape, device=place.device).to(dtype)


def equal(name: str, got: Tensor, want: Tensor) -> Finding:
    """Number of elements that differ, NaN equal to NaN; the limit is none."""
    same = (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want
    return Finding(name, float((~same).sum()))


def close(name: str, got: Tensor, want: Tensor, plain: Tensor, tiny: float = TINY) -> Finding:
    """Largest error where the truth is finite; infinite where the infinities differ."""
    if not torch.equal(got.isinf(), want.isinf()):
        return Finding(name, float("inf"))
    finite = ~want.isinf()
    got, want, plain = (t[finite].double() for t in (got, want, plain))
    if not want.numel():
        return Finding(name, 0.0)
    limit = 2 * float((plain - want).abs().max()) + tiny * max(1.0, float(want.abs().max()))
    return Finding(name, float((got - want).abs().max()), limit)


def attention_findings(place: Place, dtype: torch.dtype, got: tuple, run: Callable) -> list[Finding]:
    """Compare results with `run(dtype)`, which calls the reference on inputs of that dtype."""
    truth, plain = run(torch.float64), run(dtype)
    with torch.autocast(place.device.type, dtype):
        half = run(dtype)
    names = ("out", "lse", "lse_evicted", "attention")
    findings = [close("out", got[0], truth[0], half[0], TRUNCATED[dtype] if place.toy else TINY)]
    return findings + [close(n, *each) for n, *each in zip(names[1:], got[1:], truth[1:], plain[1:])]
