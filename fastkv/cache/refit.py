"""Values of tokens that stay, refitted to attention where the correction says so; and biases of slots."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..corrections import Pairs
from ..policies import Reread, Signals
from ..reference import LayerState, pack, visible_keys
from ..reference.attention import grouped_logits, masked_softmax
from . import signals
from .layout import LayerConfig
from .selection import protected


def refit(
    candidates: Signals, scores: Tensor, kept: Tensor, q: Tensor, valid: Tensor, state: LayerState, rule: LayerConfig
) -> Signals:
    """The candidates with other values, in the slots as well; nothing has moved yet.

    Args: scores [B, Hkv, N]; kept [B, Hkv, N] bool, those that stay; q [B, Hq, T, D] and valid [B, T]: of the block.
    """
    full, rest = _attention(candidates, kept, q, valid, state, rule)
    strategy, exact = rule.config.correction.refit, state.exact
    assert strategy is not None
    anchors = int(strategy.anchors * rule.layout.total)
    best = ops.select(
        scores, candidates.positions, kept, torch.zeros_like(kept), anchors, backend=candidates.layer.backend
    ).kept
    free = kept & ~best & ~protected(candidates, state.seen, rule)
    candidates = replace(candidates, values=strategy.refitted(candidates.values, full, rest, free))
    if exact.starts is None:  # where heads share slots, all of them are written anew
        assert exact.values is not None
        exact.values[:, :, : exact.filled] = candidates.values[:, :, : exact.filled]
    return candidates


def _attention(
    candidates: Signals, kept: Tensor, q: Tensor, valid: Tensor, state: LayerState, rule: LayerConfig
) -> tuple[Tensor, Tensor]:
    """What the block's last queries give to all candidates and to those that stay, [B, Hkv, G * W, N] each."""
    assert rule.config.correction.refit is not None
    last = signals.last_tokens(valid, rule.config.correction.refit.queries)
    q = q.gather(2, last[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    valid = valid.gather(1, last)
    seen = visible_keys(candidates.positions, signals.positions_before(state.seen[:, None], valid), candidates.valid)
    assert seen is not None
    seen = (seen & valid[:, None, :, None])[:, :, None]
    logits = grouped_logits(q, candidates.keys, rule.spec.scale, rule.spec.softcap)
    beside = signals.mass_beside(q, None, state)

    def attention(seen: Tensor) -> Tensor:
        weights, lse = masked_softmax(logits, seen)
        if beside is not None:
            weights = weights * torch.sigmoid(lse - beside.view_as(lse)).nan_to_num(0.0)[..., None]
        return weights.flatten(2, 3)

    return attention(seen), attention(seen & kept[:, :, None, None])


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
        now = exact.stored(name)
        rows = torch.where(free.view(*free.shape, *(1,) * (now.ndim - 3)), rows, now)
        if exact.starts is None:
            now.copy_(rows)  # a view of the slots
        else:
            pack(getattr(exact, name), exact.starts, rows)
