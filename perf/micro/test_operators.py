"""What changes a cache layer: decode steps by correction, prompt blocks, compaction, eviction, centroids."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fastkv import corrections, ops, reference
from fastkv.reference import LayerState

from . import states
from .conftest import check

FREE, BLOCK = 16, 128


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

    def make(num: int, batch: int = 1) -> list[torch.Tensor]:
        return [
            torch.randn(batch, n, num, heads.head_dim, device=device, dtype=dtype)
            for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        ]

    return make


@pytest.mark.parametrize("batch,tokens", [(1, 1024), (8, 1024), (1, 4096)], ids=lambda n: str(n))
@pytest.mark.parametrize("correction", corrections.names())
def test_decode_step(timed: Any, correction: str, batch: int, tokens: int, layer: Any, block: Any) -> None:
    spec = states.spec(correction)

    def make() -> tuple:
        q, k, v = block(1, batch)
        state = layer(tokens, batch, free=FREE, correction=correction)
        return state, state.exact.lengths.clone(), q[:, :, 0], k, v

    def run(state: LayerState, before: torch.Tensor, *token: torch.Tensor, module: Any = ops) -> torch.Tensor:
        return module.decode_step(*token, state, spec)[0]

    cell = make()
    check(run(*copy.deepcopy(cell)), run(*cell, module=reference))
    timed(make, run, lambda state, before, *token: state.exact.lengths.copy_(before))


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_prefill_attention(timed: Any, tokens: int, layer: Any, block: Any, device: torch.device) -> None:
    valid = torch.ones(1, BLOCK, dtype=torch.bool, device=device)

    def run(state: LayerState, *new: torch.Tensor, module: Any = ops) -> torch.Tensor:
        return module.prefill_attention(*new, valid, state, states.spec())[0]

    def make() -> tuple:
        return layer(tokens), *block(BLOCK)

    cell = make()
    check(run(*cell), run(*cell, module=reference))
    timed(make, run)


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_select_and_compact(timed: Any, tokens: int, heads: Any, layer: Any, block: Any, device: torch.device) -> None:
    shape = 1, heads.num_kv_heads, tokens + BLOCK
    positions = torch.arange(shape[2], dtype=torch.int32, device=device).expand(shape).contiguous()
    valid = torch.ones(shape, dtype=torch.bool, device=device)
    guard = reference.protected(positions, torch.tensor([shape[2]], device=device), states.SINKS, states.RECENT)
    new = positions[..., tokens:].contiguous()

    def run(state: LayerState, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, module: Any = ops) -> None:
        chosen = module.select(scores, positions, valid, guard, tokens)
        module.compact(valid, chosen, (k, v, new), state, states.spec())

    def make() -> tuple:
        return layer(tokens), *block(BLOCK)[1:], torch.rand(shape, device=device)

    cell = make()
    other = copy.deepcopy(cell)
    run(*cell)
    run(*other, module=reference)
    check(cell[0].moments.cross, other[0].moments.cross)
    timed(make, run)


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_evict(timed: Any, tokens: int, layer: Any) -> None:
    """Score by attention times residual, and drop 16 tokens a head: what one flush costs."""
    slots = tokens + FREE

    def reset(state: LayerState, attention: torch.Tensor) -> None:
        state.exact.lengths.fill_(slots)

    def make() -> tuple:
        state = layer(tokens, free=FREE)
        state.exact.lengths.fill_(slots)
        state.seen.fill_(slots)
        return state, torch.rand(state.exact.positions.shape, device=state.seen.device)

    def run(state: LayerState, attention: torch.Tensor, module: Any = ops) -> None:
        exact = state.exact
        scores = module.moment_scores(attention, exact.keys, exact.values, state.moments, states.SCALE)
        module.evict(scores, None, state, states.spec(tokens=tokens))

    cell = make()
    other = copy.deepcopy(cell)
    run(*cell)
    run(*other, module=reference)
    check(cell[0].moments.cross, other[0].moments.cross)
    timed(make, run, reset)


@pytest.mark.parametrize("tokens", [512, 1024])
def test_centroids(timed: Any, tokens: int, layer: Any, block: Any, device: torch.device) -> None:
    """Sixteen evicted tokens a head join the centroids of a layer of that many tokens."""

    def make() -> tuple:
        keys, values = block(FREE)[1:]
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=device)
        positions = torch.arange(FREE, dtype=torch.int32, device=device).expand(valid.shape).contiguous()
        return keys, values, positions, valid, ~valid, FREE, layer(tokens, correction="centroids")

    timed(make, lambda *cell: ops.remember(*cell, states.spec("centroids")))
