"""Scores: how much each cached token matters. And which of them stay.

Operations without a body here have signature and docstring of the reference's function of that name, and one more
keyword, `backend`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..backend import implementation
from ..reference import compute_dtype
from .operator import by_keyword, operator


def _of_first(keys: Tensor, *rest: Any) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=compute_dtype(keys))


def _of_second(first: Tensor | None, *rest: Any) -> Tensor:
    return _of_first(*rest)


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


# Kernel: two passes over the keys.
manifold_scores = operator(_of_first)(by_keyword(reference.manifold_scores))


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
    """`reference.make_sketch` from a seed: a compiled step cannot make generators.

    It is drawn and sent to a device once; then a copy never leaves it, which a captured graph can repeat.
    """
    return _drawn(keys.shape[-1], columns, method, seed, keys.device).clone()


@functools.lru_cache(maxsize=64)
def _drawn(dim: int, columns: int, method: str, seed: int, device: torch.device) -> Tensor:
    """The sketch [dim, columns] fp32 of that seed: the same for keys of every dtype."""
    keys = torch.empty(1, 1, 0, dim, device=device)
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


# Kernel: one launch up to chunks of 256.
noncausal_attention_mass = operator(_of_second)(by_keyword(reference.noncausal_attention_mass))

# Kernel: two launches, no logits in memory.
peak_attention = operator(_of_second)(by_keyword(reference.peak_attention))

# Kernel: one launch.
most_attended = operator(_of_second)(by_keyword(reference.most_attended))

# Kernel: three launches, no logits in memory.
observed_attention = operator(_of_second)(by_keyword(reference.observed_attention))


def window_scores(q: Tensor, keys: Tensor, scale: float, pool: int = 7, *, backend: str = "auto") -> Tensor:
    """`reference.window_scores`: `observed_attention` of all queries to all keys."""
    reference.check_pool(pool)
    return observed_attention(q, keys, scale, pool=pool, backend=backend)


# Kernel: one launch.
moment_scores = operator(_of_second)(by_keyword(reference.moment_scores))


def _selected(scores: Tensor, positions: Tensor, valid: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(valid), valid.new_empty(valid.shape[:2], dtype=torch.int64)


# Kernel: one launch, bisection instead of sorting.
select = operator(_selected)(by_keyword(reference.select))
