"""A cache layer as operators take it, with random tokens and heads of named models, for single operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkv import corrections
from fastkv.cache.layout import Layout
from fastkv.reference import FORMATS, Centroids, LayerState, Recovery, Spec
from fastkv.rotary import Rotary

SCALE = 0.1
EVICTED = 5000  # tokens in the statistics of a random layer
SINKS, RECENT = 4, 8


@dataclass(frozen=True)
class Heads:
    """Attention heads of a named model: query heads, KV heads, elements per head."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads("llama-3.1-8b", 32, 8, 128)  # Qwen3-4B has the same heads
GEMMA = Heads("gemma-3-12b", 16, 8, 256)


def spec(correction: str = "moments", tokens: int = 0, backend: str = "auto", **rest: Any) -> Spec:
    """How such a layer attends, and shrinks to so many tokens."""
    return Spec(SCALE, None, corrections.get(correction), backend, tokens, sinks=SINKS, recent=RECENT, **rest)


def random_rows(codes: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Fill rows with normal numbers, in place; with any codes, and scales that are small, where there are scales."""
    if scales is None:
        codes.normal_()
        return
    codes.copy_(torch.randint(0, 120, codes.shape, device=codes.device))  # as e4m3 it is no NaN
    if scales.is_floating_point():
        scales.fill_(0.01)
    else:
        scales.copy_(torch.tensor([-24, 8], device=scales.device))  # steps of an eighth, zero in the middle


def filled(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    tokens: int,
    *,
    free: int = 0,
    correction: str = "moments",
    attention: bool = False,
    slots: str = "model",
    shares: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LayerState:
    """Random numbers, never zeros, which run faster than data: room for `tokens` pairs per head, and `free` slots.

    Args: correction: name of what remembers evicted tokens; attention: whether that of each slot is added up; slots:
        how pairs are stored; shares: of `tokens` that each head has, None for equal heads.
    """
    kind, half = corrections.get(correction), dtype.itemsize == 2
    room = tuple(round(share * tokens) for share in shares or (1.0,) * num_kv_heads)
    pairs, keys_only = kind.split(room, tokens, SINKS + RECENT, None, (True,) * num_kv_heads)
    held = dict(approx=keys_only, order=kind.order, slope=half, attention=attention, format=FORMATS[slots])
    layout = Layout(pairs, kind, mean=tokens, spare=free, **held)  # type: ignore[arg-type]
    like = torch.empty(batch, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
    state = layout.allocate(like, like)
    state.fill()
    for tier, lengths in zip(state.tiers.values(), (pairs, keys_only)):
        assert tier.positions is not None
        random_rows(tier.keys, tier.key_scales)
        if tier.bias is not None:
            tier.bias.normal_()
        tier.lengths.copy_(torch.tensor(lengths))
        tier.positions.copy_(torch.arange(tier.positions.shape[-1]))
        if tier.values is not None:
            random_rows(tier.values, tier.value_scales)
    state.seen.copy_(state.stored[:, 0] + EVICTED)
    moments = state.moments
    moments.count.fill_(EVICTED)
    for mean in (moments.key_mean, moments.value_mean):
        if mean is not None:
            mean.normal_(0, 0.1)
    if moments.cross is not None:
        slope = (0.1 * torch.randn_like(moments.cross)).to(dtype)
        moments.cross.copy_(slope.float() * EVICTED)
        if moments.slope is not None:
            moments.slope.copy_(slope)
    if isinstance(state.parts, Centroids):
        state.parts.count.fill_(EVICTED / state.parts.num)
        state.parts.spread.uniform_(0, EVICTED / state.parts.num)
        state.parts.keys.normal_()
        state.parts.values.normal_()
    if state.approx is not None:
        frequencies = 1e4 ** (-torch.arange(head_dim // 2, device=device) / (head_dim // 2))
        weight = torch.randn(num_kv_heads, head_dim, head_dim, device=device) / head_dim**0.5
        state.recovery = Recovery(weight, *Rotary(frequencies).table(state.approx.limit))
    return state
