"""What a layer remembers of the tokens it evicted, and what that adds to attention: one kind a file."""

from __future__ import annotations

import hashlib

from ..errors import FastKVError
from ..reference import LayerState
from .base import COSH, MEAN, MOMENTS, Correction, Pairs, Shape
from .centroids import CENTROIDS, CentroidCorrection
from .matching import MATCHING
from .ridge import RIDGE
from .vector import VECTOR, VECTOR_MEAN, VECTOR_MOMENTS

NONE = Correction()
ALL = (NONE, MEAN, MOMENTS, COSH, CENTROIDS, RIDGE, MATCHING, VECTOR, VECTOR_MEAN, VECTOR_MOMENTS)
OBJECTS: dict[str, Correction] = {}  # that were passed to `get`, by what operators are told of them

__all__ = ["ALL", "NONE", "CentroidCorrection", "Correction", "Pairs", "Shape", "get", "names", "reading"]


def names() -> list[str]:
    """What `fastkv.patch(..., correction=...)` accepts besides "auto", which is what the policy brings."""
    return [correction.name for correction in ALL]


def get(name: str | bool | Correction | None) -> Correction:
    """The correction called `name`; True is "moments", False and None are "none"; an object is itself.

    Raises: FastKVError for an unknown name.
    """
    if isinstance(name, Correction):
        OBJECTS[text_of(name)] = name
        return name
    if name is None or isinstance(name, bool):
        name = "moments" if name else "none"
    found = next((correction for correction in ALL if correction.name == name), None)
    if found is None:
        raise FastKVError(f"correction must be one of auto, {', '.join(names())}, got {name!r}")
    return found


def text_of(correction: Correction) -> str:
    """A word that `of_text` makes the correction of: its name, or what tells an object from that."""
    named = next((one for one in ALL if one == correction), None)
    if named is not None:
        return named.name
    return f"{correction.name}-{hashlib.sha256(repr(correction).encode()).hexdigest()[:16]}"


def of_text(text: str) -> Correction:
    """The inverse of `text_of`, for what `get` has seen in this process."""
    return OBJECTS.get(text) or get(text)


def reading(state: LayerState, order: int | None) -> Correction:
    """The correction that mixes in what a state knows of evicted tokens, of moments no more than this order."""
    if state.parts is not None:
        return next(one for one in ALL if one.kind == state.parts.kind)
    known = state.moments.order
    wanted = None if order is None or known is None else min(order, known)
    return next(one for one in ALL if (one.order, one.kind) == (wanted, None))
