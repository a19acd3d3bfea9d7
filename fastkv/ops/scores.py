"""Scores: how much each cached token matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cpu, reference
from ..backend import uses_kernels
from ..reference import Moments
from ..reference.moments import compute_dtype
from ._register import STATISTICS, flat, operator, run


def _per_key(keys: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=compute_dtype(keys))


def _of_first(keys: Tensor, *rest: Any) -> Tensor:
    return _per_key(keys)


def _of_second(first: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    return _per_key(keys)


@operator("keydiff_scores(Tensor keys, str anchor, str distance, Tensor? mask, str backend) -> Tensor", _of_first)
def _keydiff_scores(keys: Tensor, anchor: str, distance: str, mask: Tensor | None, backend: str) -> Tensor:
    # Median and pairwise anchors are the paper's ablation and have no kernel.
    if not uses_kernels(backend, keys.device) or anchor not in ("mean", "normalized_mean"):
        return reference.keydiff_scores(keys, anchor, distance=distance, mask=cpu.hiding(mask))
    from ..kernels.key_scores import keydiff_scores

    return keydiff_scores(keys=keys, anchor=anchor, distance=distance, mask=mask)


def keydiff_scores(
    keys: Tensor, anchor: str = "mean", *, distance: str = "cosine", mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`reference.keydiff_scores`. Kernel: two passes over the keys for the anchors mean and normalized_mean."""
    reference.check_keydiff(anchor, distance)
    return run(_keydiff_scores, keys, anchor, distance, mask, backend)


@operator("manifold_scores(Tensor keys, int? window, str metric, Tensor? mask, str backend) -> Tensor", _of_first)
def _manifold_scores(keys: Tensor, window: int | None, metric: str, mask: Tensor | None, backend: str) -> Tensor:
    if not uses_kernels(backend, keys.device):
        return reference.manifold_scores(keys, window, metric, mask=cpu.hiding(mask))
    from ..kernels.key_scores import manifold_scores

    return manifold_scores(keys=keys, window=window, metric=metric, mask=mask)


def manifold_scores(
    keys: Tensor, window: int | None = None, metric: str = "l2", *, mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`reference.manifold_scores`. Kernel: two passes over the keys."""
    return run(_manifold_scores, keys, window, metric, mask, backend)


@operator(
    "leverage_scores(Tensor keys, Tensor? sketch, str method, Tensor? mask, bool centre, str backend) -> Tensor",
    _of_first,
)
def _leverage_scores(
    keys: Tensor, sketch: Tensor | None, method: str, mask: Tensor | None, centre: bool, backend: str
) -> Tensor:
    # Unsketched, QR and SVD leverage are the paper's ablation: torch.linalg on any device.
    if sketch is None or method not in ("cholesky", "srht") or not uses_kernels(backend, keys.device):
        return reference.sketched_leverage(keys, sketch, method, mask=mask, centre=centre)
    from ..kernels.leverage import leverage_scores

    return leverage_scores(keys=keys, sketch=sketch, mask=mask, centre=centre)


def _sketch_output(keys: Tensor, columns: int, *rest: Any) -> Tensor:
    return keys.new_empty(keys.shape[-1], columns, dtype=torch.float32)


@operator("sketch(Tensor keys, int columns, str method, int seed, str backend) -> Tensor", _sketch_output)
def _sketch(keys: Tensor, columns: int, method: str, seed: int, backend: str) -> Tensor:
    sketch = reference.make_sketch(keys, columns, method, torch.Generator().manual_seed(seed))
    assert sketch is not None
    return sketch


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
    """`reference.leverage_scores`. Kernel: two passes over the keys around a small Cholesky factorisation.

    generator: also its seed, which a compiled step needs, because it cannot make generators.
    """
    if isinstance(generator, int) and method != "exact" and sketch_dim and sketch_dim < pre_rope_keys.shape[-1]:
        sketch: Tensor | None = run(_sketch, pre_rope_keys, sketch_dim, method, generator, backend)
    else:
        random = None if isinstance(generator, int) else generator
        sketch = reference.make_sketch(pre_rope_keys, sketch_dim, method, random)
    return run(_leverage_scores, pre_rope_keys, sketch, method, mask, centre, backend)


@operator(
    "noncausal_attention_mass(Tensor q, Tensor keys, float scale, int chunk, float? softcap, Tensor? mask, "
    "str backend) -> Tensor",
    _of_second,
)
def _noncausal_attention_mass(
    q: Tensor, keys: Tensor, scale: float, chunk: int, softcap: float | None, mask: Tensor | None, backend: str
) -> Tensor:
    if not uses_kernels(backend, q.device):
        return reference.noncausal_attention_mass(q, keys, scale, chunk, softcap=softcap, mask=mask)
    from ..kernels.noncausal_mass import noncausal_attention_mass

    return noncausal_attention_mass(q=q, keys=keys, scale=scale, chunk=chunk, softcap=softcap, mask=mask)


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
    return run(_noncausal_attention_mass, q, keys, scale, chunk, softcap, mask, backend)


@operator(
    "window_scores(Tensor q, Tensor keys, float scale, float? softcap, Tensor? positions, Tensor? query_positions, "
    "Tensor? valid, Tensor? query_valid, Tensor? log_mass, int pool, str backend) -> Tensor",
    _of_second,
)
def _window_scores(
    q: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None,
    positions: Tensor | None,
    query_positions: Tensor | None,
    valid: Tensor | None,
    query_valid: Tensor | None,
    log_mass: Tensor | None,
    pool: int,
    backend: str,
) -> Tensor:
    masks = {"query_valid": query_valid, "log_mass": log_mass}
    if uses_kernels(backend, q.device):
        from ..kernels.window_scores import window_scores

        where = {"positions": positions, "query_positions": query_positions, "valid": valid}
        scores = window_scores(q=q, keys=keys, scale=scale, softcap=softcap, **where, **masks)
        return reference.pool_scores(scores, pool, positions, valid)
    visible = None
    if valid is not None:
        visible = valid[:, :, None]
    if positions is not None and query_positions is not None:
        past = positions[:, :, None] <= query_positions[:, None, :, None]
        visible = past if visible is None else visible & past
    if visible is not None and query_valid is not None and cpu.serves(backend, q, keys, softcap):
        scores = cpu.window_attention(q, keys, scale, visible, query_valid, log_mass)
    else:
        scores = reference.window_attention(q, keys, scale, softcap, visible=visible, **masks)
    return reference.pool_scores(scores, pool, positions, valid)


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
    backend: str = "auto",
) -> Tensor:
    """`reference.window_attention` where a query sees the valid keys up to its own position.

    Args: positions, valid [B, Hkv, N]; query_positions, query_valid [B, W]; log_mass [B, Hq, W]; all may be None.
    Kernel: three launches, no logits in memory.
    """
    return run(
        _window_scores, q, keys, scale, softcap, positions, query_positions, valid, query_valid, log_mass, 1, backend
    )


def window_scores(q: Tensor, keys: Tensor, scale: float, pool: int = 7, *, backend: str = "auto") -> Tensor:
    """`reference.window_scores`. Kernel: three launches, no logits in memory."""
    reference.check_pool(pool)
    return run(_window_scores, q, keys, scale, None, None, None, None, None, None, pool, backend)


def _scores_of_slots(attention: Tensor | None, keys: Tensor, *rest: Any) -> Tensor:
    return _per_key(keys)


@operator(
    f"moment_scores(Tensor? attention, Tensor keys, Tensor values, {STATISTICS}, float scale, str backend) -> Tensor",
    _scores_of_slots,
)
def _moment_scores(
    attention: Tensor | None,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    spread: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    if not uses_kernels(backend, keys.device):
        residual = reference.moment_residual(keys, values, Moments(count, key_mean, value_mean, cross), scale)
        return residual if attention is None else attention * residual
    from ..kernels.moment_scores import moment_scores

    return moment_scores(
        attention=attention,
        keys=keys,
        values=values,
        lengths=torch.full(keys.shape[:2], keys.shape[2], dtype=torch.int32, device=keys.device),
        value_mean=value_mean,
        matrix=cross if slope is None else slope,
        count=count,
        scale=scale,
        out=torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device),
    )


def moment_scores(
    attention: Tensor | None, keys: Tensor, values: Tensor, moments: Moments, scale: float, *, backend: str = "auto"
) -> Tensor:
    """`attention * reference.moment_residual(...)`, or the residual alone (MomentKV Eq. 10). Kernel: one launch.

    Args: attention [B, Hkv, N] or None; keys, values [B, Hkv, N, D].  Returns: [B, Hkv, N] fp32.
    """
    return run(_moment_scores, attention, keys, values, *flat(moments), scale, backend)
