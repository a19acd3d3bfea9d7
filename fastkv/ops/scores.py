"""Scores: how much each cached token matters. And which of them stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..backend import implementation
from ..reference import Moments, Selection, compute_dtype
from .operator import operator


def _per_key(keys: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=compute_dtype(keys))


def _of_first(keys: Tensor, *rest: Any) -> Tensor:
    return _per_key(keys)


def _of_scores(scores: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(scores)


def _of_second(first: Tensor | None, keys: Tensor, *rest: Any) -> Tensor:
    return _per_key(keys)


@operator(_of_first)
def keydiff_scores(
    keys: Tensor, anchor: str = "mean", *, distance: str = "cosine", mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`reference.keydiff_scores`. Kernel: two passes over the keys for the anchors mean and normalized_mean."""
    reference.check_keydiff(anchor, distance)
    if anchor not in ("mean", "normalized_mean"):  # the paper's ablation has no kernel
        return reference.keydiff_scores(keys, anchor, distance=distance, mask=mask)
    function = implementation("keydiff_scores", backend, keys.device.type)
    return function(keys, anchor, distance=distance, mask=mask)


@operator(_of_first)
def manifold_scores(
    keys: Tensor, window: int | None = None, metric: str = "l2", *, mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`reference.manifold_scores`. Kernel: two passes over the keys."""
    return implementation("manifold_scores", backend, keys.device.type)(keys, window, metric, mask=mask)


@operator(_of_first)
def sketched_leverage(
    keys: Tensor, sketch: Tensor | None, method: str, mask: Tensor | None, centre: bool, backend: str = "auto"
) -> Tensor:
    """`reference.sketched_leverage`. Kernel: two passes over the keys around a small Cholesky factorisation."""
    if sketch is None or method not in ("cholesky", "srht"):  # the paper's ablation: torch.linalg on any device
        backend = "reference"
    function = implementation("sketched_leverage", backend, keys.device.type)
    return function(keys, sketch, method, mask=mask, centre=centre)


def _sketch_output(keys: Tensor, columns: int, *rest: Any) -> Tensor:
    return keys.new_empty(keys.shape[-1], columns, dtype=torch.float32)


@operator(_sketch_output)
def sketch(keys: Tensor, columns: int, method: str, seed: int) -> Tensor:
    """`reference.make_sketch` from a seed: a compiled step cannot make generators."""
    made = reference.make_sketch(keys, columns, method, torch.Generator().manual_seed(seed))
    assert made is not None
    return made


def leverage_scores(
    pre_rope_keys: Tensor,
    sketch_dim: int | None = 64,
    method: str = "cholesky",
    generator: torch.Generator | int | None = None,
    *,
    mask: Tensor | None = None,
    centre: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`reference.leverage_scores`; generator may also be a seed."""
    if isinstance(generator, int) and method != "exact" and sketch_dim and sketch_dim < pre_rope_keys.shape[-1]:
        made: Tensor | None = sketch(pre_rope_keys, sketch_dim, method, generator)
    else:
        random = None if isinstance(generator, int) else generator
        made = reference.make_sketch(pre_rope_keys, sketch_dim, method, random)
    return sketched_leverage(pre_rope_keys, made, method, mask, centre, backend)


@operator(_of_second)
def noncausal_attention_mass(
    q: Tensor,
    keys: Tensor,
    scale: float,
    chunk: int = 256,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`reference.noncausal_attention_mass`. Kernel: one launch up to chunks of 256."""
    function = implementation("noncausal_attention_mass", backend, q.device.type)
    return function(q, keys, scale, chunk, softcap=softcap, mask=mask)


@operator(_of_second)
def window_attention(
    q: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
    log_mass: Tensor | None = None,
    pool: int = 1,
    backend: str = "auto",
) -> Tensor:
    """`reference.observed_attention`: pooled attention of queries that see the valid keys up to their own position.

    Kernel: three launches, no logits in memory.
    """
    return implementation("observed_attention", backend, q.device.type)(
        q,
        keys,
        scale,
        softcap,
        positions=positions,
        query_positions=query_positions,
        valid=valid,
        query_valid=query_valid,
        log_mass=log_mass,
        pool=pool,
    )


def window_scores(q: Tensor, keys: Tensor, scale: float, pool: int = 7, *, backend: str = "auto") -> Tensor:
    """`reference.window_scores`: `window_attention` of all queries to all keys."""
    reference.check_pool(pool)
    return window_attention(q, keys, scale, pool=pool, backend=backend)


@operator(_of_second)
def moment_scores(
    attention: Tensor | None, keys: Tensor, values: Tensor, moments: Moments, scale: float, backend: str = "auto"
) -> Tensor:
    """`reference.moment_scores`. Kernel: one launch."""
    return implementation("moment_scores", backend, keys.device.type)(attention, keys, values, moments, scale)


@operator(_of_scores)
def z_scores(
    scores: Tensor, mask: Tensor, bonus: Tensor | None = None, weight: float = 1.0, *, backend: str = "auto"
) -> Tensor:
    """`reference.z_scores`. Kernel: one launch."""
    return implementation("z_scores", backend, scores.device.type)(scores, mask, bonus, weight)


def _selected(scores: Tensor, positions: Tensor, valid: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(valid), valid.new_empty(valid.shape[:2], dtype=torch.int64)


@operator(_selected)
def select(
    scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, tokens: int, *, backend: str = "auto"
) -> Selection:
    """`reference.select`. Kernel: one launch, bisection instead of sorting."""
    return implementation("select", backend, scores.device.type)(scores, positions, valid, protected, tokens)
