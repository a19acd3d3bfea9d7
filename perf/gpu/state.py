"""What checks share: where they run, a random cache layer, and how results are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastkv.reference import LayerState, Moments, Slots

from .heads import GEMMA, LLAMA, TOY, Heads

NAN = float("nan")
TINY = 1e-5  # of the largest value
TRUNCATED = {torch.float16: 2e-4, torch.bfloat16: 8e-3}  # the interpreter truncates where hardware rounds
ODD = (Heads("d80-group7", 14, 2, 80), Heads("d96-group3", 6, 2, 96), Heads("d64-mha", 4, 4, 64))


@dataclass(frozen=True)
class Place:
    """Where checks run: device, and whether this is a dry run on toy shapes in the interpreter."""

    device: torch.device
    toy: bool = False

    @property
    def shapes(self) -> tuple[Heads, ...]:
        """Heads to check."""
        return (TOY,) if self.toy else (LLAMA, GEMMA, *ODD)

    def dtypes(self, heads: Heads) -> tuple[torch.dtype, ...]:
        """Half-precision types to check on these heads; every further one costs many compilations."""
        if self.toy:
            return (torch.float16,)
        return (torch.bfloat16, torch.float16) if heads is LLAMA else (torch.bfloat16,)

    @property
    def half(self) -> torch.dtype:
        """What is timed: bf16; fp16 in the interpreter, which cannot compute in bf16."""
        return torch.float16 if self.toy else torch.bfloat16

    @property
    def slots(self) -> int:
        """Slots per head; not a multiple of any tile on the GPU."""
        return 40 if self.toy else 1008

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots where the kernels choose by size: below and above one scan."""
        return (self.slots,) if self.toy else (self.slots, 4112)


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


def ragged(place: Place, heads: Heads, dtype: torch.dtype, batch: int = 2, slots: int = 0, seed: int = 0) -> LayerState:
    """A random layer with an empty head and a one-token one: lengths + count = seen. The last slot of every head is
    free, what slots without a token hold is NaN, and the kernel's half-precision slope is the true one.
    """
    torch.manual_seed(seed)
    slots = slots or place.slots
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
    moments = Moments.empty(batch, num, dim, dim, device).add(old_keys, old_values, gone)
    size = moments.count.clamp(min=1)[..., None, None]
    moments.slope = (moments.cross / size).to(dtype)
    moments.cross = moments.slope.float() * size
    keys[~held], values[~held] = NAN, NAN
    slots_of = Slots(keys, values, lengths.int(), order.masked_fill(~held, -7))
    return LayerState(slots_of, seen, moments)


def copied(state: LayerState, dtype: torch.dtype | None = None) -> LayerState:
    """A copy; with a dtype, everything floating is in it, and the kernel's half-precision slope is left out."""
    twin = copy.deepcopy(state)
    if dtype is not None:
        twin.moments.slope = None
        for name, tensor in list(twin.named_tensors()):
            if tensor.is_floating_point():
                twin.replace(name, tensor.to(dtype))
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
