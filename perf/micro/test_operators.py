"""What changes a cache layer: decode steps by correction, prompt blocks, compaction, eviction, centroids."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fastkv import ops, reference

from . import states
from .conftest import check

FREE, BLOCK = 16, 128
CORRECTIONS: dict[str, dict[str, Any]] = {  # what is remembered of evicted tokens, and how it takes part
    "none": {"held": {"order": None}, "rest": {"order": None}},
    "mean": {"held": {"order": 0}, "rest": {"order": 0}},
    "moments": {"held": {"order": 1}, "rest": {}},
    "centroids": {"held": {"num_centroids": 32}, "rest": {"order": None}},
}


@pytest.fixture
def layer(heads: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Makes a random layer of the heads and device of this test."""
    sizes = heads.num_kv_heads, heads.head_dim
    return lambda tokens, batch=1, **rest: states.filled(batch, *sizes, tokens, dtype=dtype, device=device, **rest)


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
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_decode_step(timed: Any, correction: str, batch: int, tokens: int, layer: Any, block: Any) -> None:
    held, rest = CORRECTIONS[correction]["held"], CORRECTIONS[correction]["rest"]

    def make() -> tuple:
        q, k, v = block(1, batch)
        return layer(tokens, batch, free=FREE, **held), q[:, :, 0], k, v

    state, *token = make()
    got = states.decode_step(ops, copy.deepcopy(state), *token, **rest)[0]
    check(got, states.decode_step(reference, state, *token, **rest)[0])
    timed(
        make,
        lambda state, *token: states.decode_step(ops, state, *token, **rest),
        lambda state, *token: state.lengths.fill_(tokens),
    )


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_prefill_attention(timed: Any, tokens: int, layer: Any, block: Any, device: torch.device) -> None:
    valid = torch.ones(1, BLOCK, dtype=torch.bool, device=device)
    state, new = layer(tokens), block(BLOCK)
    got, want = (states.prefill_attention(module, state, *new, valid)[0] for module in (ops, reference))
    check(got, want)
    timed(
        lambda: (layer(tokens), *block(BLOCK)),
        lambda state, *new: states.prefill_attention(ops, state, *new, valid),
    )


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_select_and_compact(timed: Any, tokens: int, heads: Any, layer: Any, block: Any, device: torch.device) -> None:
    shape = 1, heads.num_kv_heads, tokens + BLOCK
    positions = torch.arange(shape[2], dtype=torch.int32, device=device).expand(shape).contiguous()
    valid = torch.ones(shape, dtype=torch.bool, device=device)
    guard = reference.protected(positions, torch.tensor([shape[2]], device=device), states.SINKS, states.RECENT)
    new = positions[..., tokens:].contiguous()

    def run(state: states.State, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, module: Any = ops) -> None:
        kept = module.select(scores, positions, valid, guard, tokens)
        states.compact(module, state, k, v, new, valid, kept)

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

    def reset(state: states.State, attention: torch.Tensor) -> None:
        state.lengths.fill_(slots)

    def make() -> tuple:
        state = layer(tokens, free=FREE)
        state.lengths.fill_(slots)
        state.seen.fill_(slots)
        return state, torch.rand(state.positions.shape, device=state.keys.device)

    def run(state: states.State, attention: torch.Tensor, module: Any = ops) -> None:
        states.evict(module, state, states.moment_scores(state, attention), tokens)

    cell = make()
    other = copy.deepcopy(cell)
    run(*cell)
    run(*other, module=reference)
    check(cell[0].moments.cross, other[0].moments.cross)
    timed(make, run, reset)


@pytest.mark.parametrize("num", [32, 64])
def test_centroids(timed: Any, num: int, layer: Any, block: Any) -> None:
    """Sixteen evicted tokens a head join the centroids."""
    timed(lambda: (layer(FREE, num_centroids=num), *block(FREE)[1:]), states.add_to_centroids)
