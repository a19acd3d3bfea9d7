"""Corrections: what a layer remembers of evicted tokens, and what that adds to attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import FastKVError
from ..reference import LayerState
from .kinds import CENTROIDS, MEAN, MOMENTS, VECTOR, VECTOR_MEAN, VECTOR_MOMENTS, Correction, Shape
from .matching import Matching, Pairs

NONE = Correction()
MATCHING = Correction("matching", match=Matching())
ALL = (NONE, MEAN, MOMENTS, CENTROIDS, MATCHING, VECTOR, VECTOR_MEAN, VECTOR_MOMENTS)

__all__ = ["ALL", "NONE", "Correction", "Matching", "Pairs", "Shape", "get", "names", "reading"]


def names() -> list[str]:
    """The names that `fastkv.patch(..., correction=...)` accepts besides "auto", which is the policy's own."""
    return [correction.name for correction in ALL]


def get(name: str | bool | Correction | None, **options: Any) -> Correction:
    """The correction called `name`, with the given options.

    True is "moments"; False and None are "none"; a Correction is returned as it is.

    Raises: FastKVError for an unknown name or option.
    """
    if isinstance(name, Correction):
        return name
    if name is None or isinstance(name, bool):
        name = "moments" if name else "none"
    found = next((correction for correction in ALL if correction.name == name), None)
    if found is None:
        raise FastKVError(f"correction must be one of auto, {', '.join(names())}, got {name!r}")
    unknown = sorted(options.keys() - set(found.options))
    if unknown:
        known = ", ".join(found.options) or "none"
        raise FastKVError(f"correction {name!r} has no option {', '.join(unknown)}; it has {known}")
    return replace(found, **options) if options else found


def reading(state: LayerState, order: int | None) -> Correction:
    """The correction that mixes in what a state knows of evicted tokens, of moments no more than this order."""
    if state.parts is not None:
        return next(one for one in ALL if one.kind == state.parts.kind)
    known = state.moments.order
    wanted = None if order is None or known is None else min(order, known)
    return next(one for one in ALL if (one.order, one.kind) == (wanted, None))
