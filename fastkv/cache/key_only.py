"""VECTOR: where two tokens may keep their key only, in the room of one pair, and their values come from a linear map.

Source: VECTOR, arXiv:2605.23258, Sec. 3.2. Selection in two steps: the policy's best tokens stay, and among them those
keep their value where the map errs most. Where the map reads the keys of all heads of a layer, these choose together:
they keep the same tokens, in slots of the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..policies import Signals
from ..reference import LayerState, Moments, Selection, Slots, Spec, in_order, merge_partials, pack, predicted_values
from .layout import LayerConfig
from .selection import keep_values


def estimated(keys: Tensor, positions: Tensor, rule: LayerConfig) -> Tensor:
    """What the map makes of post-RoPE keys [B, Hkv, N, Dk] at `positions`: [B, Hkv, N, Dv] fp32."""
    assert rule.rotary is not None and rule.weight is not None
    return predicted_values(rule.rotary.unrotate(keys.float(), positions), rule.weight)


def attend(q: Tensor, out: Tensor, lse: Tensor, state: LayerState, rule: LayerConfig) -> Tensor:
    """Add the tokens without values to the attention `out` [B, Hq, T, Dv] with log-sum-exp `lse` [B, Hq, T]."""
    approx = state.approx
    assert approx is not None
    if not approx.filled:
        return out
    # All slots where they lie, a copy only where heads are unequal.
    equal = approx.starts is None
    keys, positions = (approx.keys, approx.positions) if equal else (approx["keys"], approx["positions"])
    assert positions is not None
    values = estimated(keys, positions, rule).to(out.dtype)
    only = LayerState(Slots(keys, values, approx.lengths), state.seen, Moments(state.moments.count))
    k, v = (rows.new_zeros(*rows.shape[:2], q.shape[2], rows.shape[-1]) for rows in (keys, values))
    none = torch.zeros(len(q), q.shape[2], dtype=torch.bool, device=q.device)
    spec = Spec(rule.spec.scale, rule.spec.softcap, backend=rule.spec.backend)
    more, more_lse, _ = ops.prefill_attention(q, k, v, none, only, spec)
    return merge_partials(out, lse, more, more_lse)[0].to(out.dtype)


def store(state: LayerState, signals: Signals, selection: Selection, rule: LayerConfig, *, full: bool) -> None:
    """Sort the selected candidates into tokens with and without values and merge the others into the moments."""
    exact, approx, spare = state.exact, state.approx, rule.layout.spare
    assert approx is not None
    index = torch.arange(signals.keys.shape[2], device=signals.keys.device)
    without = (index >= exact.filled) & (index < exact.filled + approx.filled)
    with_value = selection.kept & ~without
    if full:
        errors = (signals.values.float() - estimated(signals.keys, signals.positions, rule)).square().sum(-1)
        with_value = keep_values(signals, selection.kept, torch.where(without, -1.0, errors), state.seen, rule)
    gone = signals.valid & ~selection.kept
    state.moments.copy_(state.moments.add(signals.keys, signals.values, gone))
    num = signals.keys.shape[2]
    place(exact, signals, with_value, min(num, exact.limit - spare))
    place(approx, signals, selection.kept & ~with_value, min(num, approx.limit))


def place(slots: Slots, signals: Signals, chosen: Tensor, width: int) -> None:
    """Put the chosen candidates, at most `width` of a head, into the slots in order of position."""
    index = in_order(signals.positions, chosen)[..., :width]
    for name in ("keys", "values", "positions", "memory"):
        slab, rows = getattr(slots, name), getattr(signals, name)
        if slab is None:
            continue
        spread = index if rows.ndim == 3 else index[..., None].expand(-1, -1, -1, rows.shape[-1])
        taken = rows.gather(2, spread).to(slab.dtype)
        if name == "memory":  # of tokens to come nothing is known; `pack` repeats the last row
            known = torch.arange(width, device=index.device) < chosen.sum(-1, keepdim=True)
            taken = pad(torch.where(known, taken, 0), (0, int(slots.starts is not None)))
        if slots.starts is None:
            slab[:, :, :width] = taken
        else:
            pack(slots.starts, [(slab, taken)])
    slots.lengths.copy_(chosen.sum(-1))
    slots.filled = width
