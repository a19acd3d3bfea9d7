"""What operations take, made from a few tensors: one layer's state and its spec. And what kernels run with."""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import strategies as st

from fastkv import corrections, reference
from fastkv.cache.pages import PageFormat
from fastkv.cpu import slots as compiled
from fastkv.kernels import _launch as launch
from fastkv.kernels import vector_decode
from fastkv.policies import LayerFacts, Signals
from fastkv.reference import FORMATS, LayerState, Moments, Slots, Spec, unpack

workspace, num_programs, PER_SM = launch.workspace, launch.num_programs, launch.PER_SM
BACKENDS = ["reference", "cpu", "triton"]
GAP = 5  # slots of a slab that no head owns
OF_ORDER = {None: "none", 0: "mean", 1: "moments"}  # the corrections that read moments of this order


def randn(*shape, seed=0, dtype=torch.float64):
    """The same numbers for every seed and shape."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def attention(q, keys, values, scale, visible=None, softcap=None, sinks=None):
    """Of q [B, Hq, T, D] over keys and values [B, Hkv, N, ...] where visible [B, 1 or Hkv, T, N], in float64.

    Args: sinks: [Hq], one more column of the logits, without a value.
    Returns: out, log-sum-exp and weights [B, Hq, T, N]; zeros where nothing is seen."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, 1) for part in (keys, values))
    logits = scale * q.double() @ keys.mT
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if visible is not None:
        visible = visible.repeat_interleave(q.shape[1] // visible.shape[1], 1)
        logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : keys.shape[2]]
    return weights @ values, logits.logsumexp(-1), weights


def make_spec(scale=1.0, softcap=None, order=None, *, correction=None, **rest):
    """A spec whose correction has a name or, without one, reads moments up to `order`."""
    return Spec(scale, softcap, corrections.get(correction or OF_ORDER[order]), **rest)


def make_state(keys, values, lengths, positions=None, seen=None, moments=None, *, starts=None, attention=None,
               limit=-1, **rest):  # fmt: skip
    """A state of these tensors, not of copies; nothing seen and nothing evicted unless it is said.

    Args: rest: approx, parts, recovery and scratch of `LayerState`."""
    if seen is None:
        seen = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
    if moments is None:
        moments = Moments(torch.zeros_like(lengths, dtype=torch.int64))
    return LayerState(Slots(keys, values, lengths, positions, starts, attention, limit=limit), seen, moments, **rest)


FACTS = {one.name for one in fields(LayerFacts)}


def best_slots(scores, state, spec):
    """Which slots are in use, and which of those stay where every head keeps `spec.tokens`, or of a slab `spec.spare`
    fewer than it owns; scores [B, Hkv, N] of the first N slots, all of those in use among them."""
    slots, num = state.exact, scores.shape[-1]
    positions = slots.positions if slots.starts is None else unpack([slots.positions], slots.starts, num)[0]
    valid = torch.arange(num) < slots.lengths[..., None]
    guard = reference.protected(positions, state.seen, spec.sinks, spec.recent)
    if slots.starts is None:
        return valid, reference.select(scores, positions, valid, guard, spec.tokens)
    tokens = (slots.starts.diff() - spec.spare).clamp(min=0)
    return valid, reference.select_each(scores, positions, valid, guard, tokens)


def shrink(module, scores, state, spec):
    """Let the slots of lowest score leave, by a backend's `compact`."""
    module.compact(*best_slots(scores, state, spec), None, None, state, spec)


def make_signals(scale=1.0, layer=0, decoding=False, **rest):
    """Signals of candidates and of the facts of a layer, whichever is given; nothing was evicted unless it is said."""
    facts = {name: rest.pop(name) for name in FACTS & rest.keys()}
    batch, heads, _, dim = rest["keys"].shape
    rest.setdefault("moments", Moments.empty(batch, heads, dim, rest["values"].shape[-1], order=None))
    return Signals(layer=LayerFacts(layer, scale, **facts), decoding=decoding, **rest)


def changed(signals, **given):
    """`replace`, of what is known of the layer too."""
    facts = {name: given.pop(name) for name in FACTS & given.keys()}
    return replace(signals, layer=replace(signals.layer, **facts), **given)


@st.composite
def sinks(draw, num_heads, sizes=(0.0, 1.0, 1e4)):
    """Learned attention sinks [Hq], of some heads -inf; None for a model without."""
    size = draw(st.sampled_from((None, *sizes)))
    if size is None:
        return None
    made = size * torch.randn(num_heads, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made[: draw(st.integers(0, num_heads))] = -torch.inf
    return made.to(draw(st.sampled_from((torch.float32, torch.bfloat16))))


def cycled(numbers, batch, heads):
    """One of the numbers per (sequence, head)."""
    return torch.tensor([numbers[i % len(numbers)] for i in range(batch * heads)]).view(batch, heads)


def copied(state, dtype=None):
    """The same numbers in memory of their own, and floating ones in `dtype`, if there is one."""
    twin = copy.deepcopy(state)
    for name, tensor in list(twin.named_tensors()):
        if dtype is not None and tensor.is_floating_point():
            twin.replace(name, tensor.to(dtype))
    return twin


def encoded(state, slots):
    """A copy whose pairs are stored in that format; rows of NaN have scales of NaN."""
    twin, form = copied(state), FORMATS[slots]
    if form.plain:
        return twin
    keys, key_scales = form.keys.encode(twin.exact.keys)
    values, value_scales = form.values.encode(twin.exact.values)
    twin.exact = replace(
        twin.exact, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales, format=form,
        decodes_to=twin.exact.dtype,
    )  # fmt: skip
    return twin


def assert_same(state, expected, but=()):
    """Every tensor is equal bit for bit, unused slots included, except for those with one of these names."""
    mine, theirs = dict(state.named_tensors()), dict(expected.named_tensors())
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - set(but):
        assert torch.equal(mine[name].nan_to_num(1e4), theirs[name].to(mine[name].dtype).nan_to_num(1e4)), name


@contextmanager
def uninitialised_is_nan():
    """What `torch.empty` and its like make is NaN of both signs, or the largest integer: what nobody writes shows."""

    def signed(make):
        def made(*size, **how):
            room = make(*size, **how)
            if room.is_floating_point() and room.dim():
                room[..., ::2].abs_().neg_()
            return room

        return made

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                patch.setattr(owner, name, signed(getattr(owner, name)))
            assert torch.empty(2).isnan().all() and torch.empty(2).signbit().any()
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def splits(number):
    """The decode kernels split the slots of a head so often, which is otherwise a function of the shape."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, vector_decode):
            patch.setattr(module, "num_programs", lambda pairs, slots, sms: number)
        yield


def launched(monkeypatch, module):
    """What `_constants` of a kernel's module says of every launch from now on: tile, warps and stages."""
    made, known = [], module._constants
    monkeypatch.setattr(module, "_constants", lambda *given: made.append(known(*given)) or made[-1])
    return made


def in_pages(state, rows, pages):
    """A copy of the state whose row b lies in page rows[b] of so many; the others are full of garbage."""
    form = PageFormat.of(state)
    buffer = torch.randint(1, 120, (pages, form.nbytes + 32 * 16), dtype=torch.uint8)  # a stride beyond the page
    buffer[0] = 0
    placed = form.view(buffer).at(torch.tensor(rows))
    placed.put(state)
    return placed


def deal(capacities):
    """starts [B, Hkv + 1] int32 and the size of the slab, for capacities [B][Hkv]."""
    owned = torch.tensor(capacities)
    starts = torch.cat([torch.zeros(len(owned), 1, dtype=torch.long), owned.cumsum(1)], 1)
    return starts.int(), int(starts.max()) + GAP


def slab_of(rows, starts, size):
    """A slab whose heads own the first rows of rows [B, Hkv, N, ...]; what is no row is 7."""
    slab = torch.full((len(rows), size, *rows.shape[3:]), 7, dtype=rows.dtype)
    for b, row in enumerate(starts.tolist()):
        for h, (first, end) in enumerate(itertools.pairwise(row)):
            own = rows[b, h, : end - first]
            slab[b, first : first + len(own)] = own
    return slab


def in_slab(state, *capacities):
    """A copy of a state of equal heads, the heads of whose tiers own so many slots each, [B][Hkv]."""
    made = copied(state)
    for tier, owned in zip(made.tiers.values(), capacities):
        starts, size = deal(owned)
        for name in (*tier.moving(), *(["attention"] if tier.attention is not None else [])):
            setattr(tier, name, slab_of(getattr(tier, name), starts, size))
        tier.starts, tier.limit, tier.filled = starts, max(map(max, owned)), max(map(max, owned))
    return made


def compiled_step(q, slots, scale, received=None):
    """What the compiled step of a CPU makes of q [B, Hkv, G, D] and slots: out [B, Hkv, G, D] and lse [B, Hkv, G].

    received: where what slots receive is added, as `Slots.attention`."""
    slots.attention = received
    counted = Moments(torch.zeros(slots.lengths.shape, dtype=torch.int64))
    state = LayerState(slots, torch.zeros(len(q), dtype=torch.int64), counted)
    out, lse, mass = compiled.step(q.flatten(1, 2), None, None, state, Spec(scale))
    assert bool((mass == -torch.inf).all())
    return out.view(q.shape), lse.view(q.shape[:3])
