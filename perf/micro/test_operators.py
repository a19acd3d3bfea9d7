"""Operators: decode steps by correction, prompt blocks, compaction, eviction, centroids, scores and selection."""

from typing import Any

import pytest
import torch

from fastkv import corrections, ops, reference
from fastkv.reference import LayerState
from perf.gpu.clock import tokens
from perf.gpu.place import Place

from . import states
from .conftest import check

FREE, BLOCK = 16, 128
NUM = {"cpu": 4096, "cuda": 65_536}  # keys
CALLS = {
    "keydiff_scores": lambda module, q, keys: module.keydiff_scores(keys),
    "manifold_scores": lambda module, q, keys: module.manifold_scores(keys),
    "leverage_scores": lambda module, q, keys: module.leverage_scores(keys),
    "noncausal_attention_mass": lambda module, q, keys: module.noncausal_attention_mass(q, keys, states.SCALE),
    "window_scores": lambda module, q, keys: module.window_scores(q[:, :, -32:], keys, states.SCALE),
}


@pytest.fixture
def layer(heads: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Makes a random layer of the heads and device of this test."""

    def make(tokens: int, batch: int = 1, **rest: Any) -> LayerState:
        sizes = batch, heads.num_kv_heads, heads.head_dim, tokens
        state = states.filled(*sizes, dtype=dtype, device=device, **rest)
        state.scratch = ops.workspace(heads.num_heads, state, states.spec())
        return state

    return make


@pytest.fixture
def block(heads: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Makes q, k and v of so many new tokens."""
    return lambda num, batch=1: tokens(Place(device), heads, batch, num, dtype)


@pytest.mark.parametrize("batch,tokens", [(1, 1024), (8, 1024), (1, 4096)], ids=lambda n: str(n))
@pytest.mark.parametrize("correction", corrections.names())
def test_decode_step(compared: Any, correction: str, batch: int, tokens: int, layer: Any, block: Any) -> None:
    def make() -> tuple:
        q, k, v = block(1, batch)
        state = layer(tokens, batch, free=FREE, correction=correction)
        return state, state.exact.lengths.clone(), q[:, :, 0], k, v

    def run(module: Any, state: LayerState, before: torch.Tensor, *token: torch.Tensor) -> torch.Tensor:
        return module.decode_step(*token, state, states.spec(correction))[0]

    compared(make, run, lambda state, before, *token: state.exact.lengths.copy_(before))


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_prefill_attention(compared: Any, tokens: int, layer: Any, block: Any, device: torch.device) -> None:
    valid = torch.ones(1, BLOCK, dtype=torch.bool, device=device)

    def run(module: Any, state: LayerState, *new: torch.Tensor) -> torch.Tensor:
        return module.prefill_attention(*new, valid, state, states.spec())[0]

    compared(lambda: (layer(tokens), *block(BLOCK)), run)


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_select_and_compact(compared: Any, tokens: int, candidates: Any, layer: Any, block: Any) -> None:
    positions, valid, guard = candidates(tokens + BLOCK)
    new = positions[..., tokens:].contiguous()

    def make() -> tuple:
        return layer(tokens), *block(BLOCK)[1:], torch.rand(positions.shape, device=positions.device)

    def run(module: Any, state: LayerState, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = module.select(scores, positions, valid, guard, tokens)
        module.compact(valid, chosen, (k, v, new), None, state, states.spec())
        return state.moments.cross

    compared(make, run)


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_evict(compared: Any, tokens: int, layer: Any) -> None:
    """Score by attention times residual, and drop 16 tokens a head: what one flush costs."""
    slots = tokens + FREE

    def reset(state: LayerState, attention: torch.Tensor) -> None:
        state.exact.lengths.fill_(slots)

    def make() -> tuple:
        state = layer(tokens, free=FREE)
        state.seen.fill_(slots)
        cell = state, torch.rand(state.exact.positions.shape, device=state.seen.device)
        reset(*cell)
        return cell

    def run(module: Any, state: LayerState, attention: torch.Tensor) -> torch.Tensor:
        exact = state.exact
        scores = module.moment_scores(attention, exact.keys, exact.values, state.moments, states.SCALE)
        valid = torch.ones_like(exact.positions, dtype=torch.bool)
        chosen = module.select(scores, exact.positions, valid, ~valid, tokens)
        module.compact(valid, chosen, None, None, state, states.spec(tokens=tokens))
        return state.moments.cross

    compared(make, run, reset)


@pytest.mark.parametrize("tokens", [512, 1024])
def test_centroids(timed: Any, tokens: int, layer: Any, block: Any, device: torch.device) -> None:
    """Sixteen evicted tokens a head join the centroids of a layer of that many tokens."""

    def make() -> tuple:
        keys, values = block(FREE)[1:]
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=device)
        positions = torch.arange(FREE, dtype=torch.int32, device=device).expand(valid.shape).contiguous()
        return keys, values, positions, valid, ~valid, FREE, layer(tokens, correction="centroids")

    timed(make, lambda *cell: ops.remember(*cell, states.spec("centroids")))


@pytest.mark.parametrize("op", CALLS)
def test_scores(timed: Any, op: str, block: Any, device: torch.device) -> None:
    num, call = NUM[device.type], CALLS[op]
    q, keys, _ = block(BLOCK)
    check(call(ops, q, keys), call(reference, q, keys))
    timed(lambda: block(num)[:2], lambda q, keys: call(ops, q, keys))


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_select(compared: Any, tokens: int, candidates: Any) -> None:
    positions, valid, guard = candidates(tokens + BLOCK)

    def make() -> tuple:
        return (torch.rand(positions.shape, device=positions.device),)

    compared(make, lambda module, scores: module.select(scores, positions, valid, guard, tokens).kept.float())
