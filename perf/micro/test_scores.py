"""Scores of every key: KeyDiff, ManifoldKV, leverage, non-causal mass, window; and the selection by a score."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastkv import ops, reference

from .conftest import check
from .states import SCALE

WINDOW, BLOCK = 32, 128
NUM = {"cpu": 4096, "cuda": 65_536}  # keys
CALLS = {
    "keydiff_scores": lambda module, q, keys: module.keydiff_scores(keys),
    "manifold_scores": lambda module, q, keys: module.manifold_scores(keys),
    "leverage_scores": lambda module, q, keys: module.leverage_scores(keys),
    "noncausal_attention_mass": lambda module, q, keys: module.noncausal_attention_mass(q, keys, SCALE),
    "window_scores": lambda module, q, keys: module.window_scores(q[:, :, -WINDOW:], keys, SCALE),
}


@pytest.mark.parametrize("op", CALLS)
def test_scores(timed: Any, op: str, heads: Any, device: torch.device, dtype: torch.dtype) -> None:
    num, call = NUM[device.type], CALLS[op]

    def make() -> tuple:
        q = torch.randn(1, heads.num_heads, num, heads.head_dim, device=device, dtype=dtype)
        return q, torch.randn(1, heads.num_kv_heads, num, heads.head_dim, device=device, dtype=dtype)

    q, keys = make()
    check(call(ops, q[:, :, -BLOCK:], keys[:, :, -BLOCK:]), call(reference, q[:, :, -BLOCK:], keys[:, :, -BLOCK:]))
    timed(make, lambda q, keys: call(ops, q, keys))


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_select(timed: Any, tokens: int, candidates: Any) -> None:
    positions, valid, guard = candidates(tokens + BLOCK)

    def make() -> tuple:
        return (torch.rand(positions.shape, device=positions.device),)

    def run(scores: torch.Tensor, module: Any = ops) -> torch.Tensor:
        return module.select(scores, positions, valid, guard, tokens).kept

    cell = make()
    assert torch.equal(run(*cell), run(*cell, module=reference))
    timed(make, run)
