"""How a choice gets into the slots, and what leaves into what is remembered."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..corrections import Pairs
from ..policies import Reread, Signals
from ..reference import LayerState, Selection, compact_in_copy, pack
from . import key_only
from .layout import LayerConfig
from .selection import protected


def store(
    state: LayerState,
    signals: Signals,
    selection: Selection,
    num: int,
    rule: LayerConfig,
    *,
    full: bool,
    anew: bool,
) -> None:
    """Keep the selected candidates, of which the last `num` are a new block, and remember the others.

    full: whether the layer was out of room, so that something was selected. anew: as of `prefill.absorb_block`.
    """
    exact, layout = state.exact, rule.layout
    held, kept = exact.filled + num, exact.limit - layout.spare  # of the longest head
    if full:
        most = signals.keys.shape[2]
        if not layout.adaptive:
            most -= layout.least  # which a head keeps that has so many
            if not anew:  # what it held beyond what it keeps was decoded since the last eviction
                most = min(most, num + max(exact.filled - kept, 0))
        remember(state, signals, selection.kept, max(most, 0), rule)
    if state.approx is not None:
        state.seen.add_(signals.valid[:, 0, signals.valid.shape[2] - num :].sum(-1))
        key_only.store(state, signals, selection, rule, full=full)
    else:
        if exact.starts is None:  # counts tokens, keeps what is known of them, and clears sums, too
            known = None if exact.memory is None else signals.memory
            ops.compact(signals.valid, selection, _newest(signals, num), known, state, rule.spec)
        else:
            _store_in_slabs(state, signals, selection, num, rule, full, anew)
        exact.filled = min(exact.limit - layout.spare, held) if full else held
        if exact.starts is None:
            return
    for slots in state.tiers.values():  # what they receive is added up anew
        if slots.attention is not None:
            slots.attention.zero_()


def _newest(signals: Signals, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions of the last `num` candidates."""
    new = signals.keys.shape[2] - num
    return signals.keys[:, :, new:], signals.values[:, :, new:], signals.positions[:, :, new:]


def _store_in_slabs(
    state: LayerState, signals: Signals, selection: Selection, num: int, rule: LayerConfig, full: bool, anew: bool
) -> None:
    """`store` where heads share slots unequally."""
    exact, layout, parallel = state.exact, rule.layout, rule.plan.parallel
    known = None if exact.memory is None else signals.memory
    choice = signals.valid, selection, _newest(signals, num), known, state, rule.spec

    def deal() -> None:
        if not full or not layout.adaptive:
            exact.redeal(layout.capacities("exact"))
            return
        counts = parallel.gather(selection.counts)
        left = (counts.shape[1] * layout.total - counts.sum(-1, keepdim=True)) // counts.shape[1]
        capacities = counts + left + layout.spare
        exact.trade(parallel.own(capacities), capacities)

    moves = anew or (full and layout.adaptive)
    if moves and exact.filled:
        compact_in_copy(ops.compact, *choice, deal)
        return
    if moves:
        deal()
    ops.compact(*choice)


def remember(state: LayerState, signals: Signals, kept: Tensor, most: int, rule: LayerConfig) -> None:
    """Let the candidates that leave join what is remembered besides the moments; before slots move.

    Args: kept [B, Hkv, N] bool, which stay.  most: at least as many as leave any head.
    """
    if state.parts is not None and most:
        pairs = (signals.keys, signals.values, signals.positions)
        ops.remember(*pairs, signals.valid, kept, most, state, rule.spec)


def match(candidates: Signals, reread: Reread, state: LayerState, rule: LayerConfig) -> None:
    """Biases and values of the slots such that they attend as all candidates did; see `Matching`.

    Args: candidates: of the whole prompt; what was chosen of it is in the slots, as it is stored there.
    """
    exact, spec = state.exact, rule.spec
    free = exact.valid & ~ops.protected(exact["positions"], state.seen, spec.sinks, spec.recent)
    every = Pairs(candidates.keys, candidates.values, candidates.valid & ~protected(candidates, state.seen, rule))
    kept = Pairs(exact["keys"], exact["values"], free)
    assert rule.config.correction.match is not None
    bias, fitted = rule.config.correction.match.matched(reread.queries, reread.asked, every, kept, spec)
    codes, scales = exact.encode("values", fitted.to(exact.dtype))
    for name, rows in (("values", codes), ("value_scales", scales), ("bias", bias)):
        if rows is None:
            continue
        (now,) = exact.stored(name)
        rows = torch.where(free.view(*free.shape, *(1,) * (now.ndim - 3)), rows, now)
        if exact.starts is None:
            now.copy_(rows)  # a view of the slots
        else:
            pack(exact.starts, [(getattr(exact, name), rows)])
