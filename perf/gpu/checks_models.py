"""Whole decode steps on a device: captured and compiled ones beside eager ones, kernels beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastkv

from .checks_device import syncs_raise
from .models import EVERY, Kind, small_model
from .place import Place, forget_compiled
from .state import Finding, equal

# Median over steps of |compiled - eager| / |eager| of the logits. An inductor graph keeps in float32 what eager steps
# round to bf16 in between (2^-8 each), and a close choice of what to evict may fall the other way.
COMPILED = 0.05
OTHER_CHOICES = 0.1  # share of greedy tokens in which kernels and reference may differ


def logits_of(place: Place, model: Any, ids: Tensor, fed: Tensor, how: str) -> Tensor:
    """Logits [B, T, V] after each of the tokens fed [B, T] behind a prompt; no step waits for the device."""
    cache = fastkv.FastKVCache(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    positions = torch.full_like(fed[:, :1], ids.shape[1])
    step: Callable[[Tensor], Tensor] = lambda token: model(  # noqa: E731
        token, past_key_values=cache, position_ids=positions
    ).logits[:, -1]
    if how == "captured":
        step = fastkv.capture_decode(model, cache, len(ids))
    elif how == "compiled":
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        step = lambda token: call(token, past_key_values=cache, position_ids=positions).logits[:, -1]  # noqa: E731
    found = []

    def decode(tokens: Tensor) -> None:
        for token in tokens.split(1, 1):
            found.append(step(token.contiguous()).clone())
            positions.add_(1)

    warm = 2 * EVERY + 1  # everything is compiled and recorded by then
    decode(fed[:, :warm])
    with syncs_raise(place):
        decode(fed[:, warm:])
    return torch.stack(found, 1)


def check_steps(place: Place, family: str, kind: Kind, how: str) -> list[Finding]:
    """Captured steps equal eager ones bit for bit; compiled ones, fed the same tokens, are as close as `COMPILED`."""
    forget_compiled()
    model = small_model(place, family)
    kind.patch(place, model, place.backend, static=True)
    ids = torch.randint(3, 256, (2, 40 if place.toy else 160), device=place.device)
    fed = torch.randint(3, 256, (2, 12 if place.toy else 24), device=place.device)
    want = logits_of(place, model, ids, fed, "eager")
    with place.stance:
        got = logits_of(place, model, ids, fed, how)
    if how == "captured":
        return [equal("logits", got, want)]
    errors = (got.double() - want.double()).norm(dim=(0, 2)) / want.double().norm(dim=(0, 2))
    return [Finding("relative error of the logits, median", float(errors.median()), COMPILED)]


def check_kinds(place: Place, kind: Kind) -> list[Finding]:
    """Prompts and steps of a kind of cache: the kernels choose nearly the tokens that the reference does.

    Half-precision sums differ in their last bits, so that a close choice may fall the other way: at most one token in
    ten differs while both are fed the same tokens.
    """
    model = small_model(place, "llama")
    ids = torch.randint(3, 256, (4, 40 if place.toy else 300), device=place.device)
    fed = torch.randint(3, 256, (4, 6 if place.toy else 60), device=place.device)
    chosen = []
    for backend in ("reference", place.backend):
        kind.patch(place, model, backend, prefill_block=None if place.toy else 64, static=False)
        cache = model(ids).past_key_values
        chosen.append(torch.cat([model(one, past_key_values=cache).logits.argmax(-1) for one in fed.split(1, 1)], 1))
    return [Finding("tokens that differ", float((chosen[0] != chosen[1]).float().mean()), OTHER_CHOICES)]
