"""How an operation is registered: one opaque torch operator, declared mutation, a fake, a choice of backend inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..errors import FastKVError
from ..reference import Centroids, Moments
from ..reference.moments import MASSES

LIBRARY = torch.library.Library("fastkv", "DEF")
STATISTICS = "Tensor count, Tensor? key_mean, Tensor? value_mean, Tensor? cross, Tensor? slope, Tensor? spread"
CHANGED_STATISTICS = (
    "Tensor(s!) count, Tensor(t!)? key_mean, Tensor(u!)? value_mean, Tensor(v!)? cross, Tensor(w!)? slope, "
    "Tensor(x!)? spread"
)
PARTS = "Tensor? part_count, Tensor? part_keys, Tensor? part_values, Tensor? part_spread"
CHANGED_SLOTS = "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) positions, Tensor(d!) lengths"

Function = Callable[..., Any]


def operator(schema: str, fake: Function) -> Callable[[Function], Function]:
    """Register the decorated function as `torch.ops.fastkv.<name of the schema>` for every device."""
    name = schema.partition("(")[0]

    def register(function: Function) -> Function:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastkv::{name}", fake, lib=LIBRARY)
        return function

    return register


def run(function: Function, *arguments: Any) -> Any:
    """Call the operator that the function was registered as.

    Tensors on a CPU that no compiler or mode looks at go to the function itself: to pass some thirty arguments through
    the dispatcher is a part of a small decode step that shows.
    """
    if not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
        first = next(a for a in arguments if isinstance(a, Tensor))
        if type(first) is Tensor and first.device.type == "cpu":
            return function(*arguments)
    return getattr(torch.ops.fastkv, function.__name__[1:])(*arguments)


def flat(moments: Moments) -> tuple[Tensor | None, ...]:
    """The tensors of `STATISTICS`."""
    return moments.count, moments.key_mean, moments.value_mean, moments.cross, moments.slope, moments.spread


def flat_parts(centroids: Centroids | None) -> tuple[Tensor | None, ...]:
    """The tensors of `PARTS`."""
    if centroids is None:
        return None, None, None, None
    return centroids.tensors()


def joined_parts(*parts: Tensor | None) -> Centroids | None:
    """The inverse of `flat_parts`."""
    count, keys, values, spread = parts
    if count is None or keys is None or values is None or spread is None:
        return None
    return Centroids(count, keys, values, spread)


def check_mass(mass: str, moments: Moments) -> None:
    """Raise FastKVError for a mass that `reference.moment_estimate` refuses."""
    if mass not in MASSES or (mass == "cosh" and moments.order is not None and moments.spread is None):
        raise FastKVError(
            f"mass must be one of {', '.join(MASSES)}, and cosh needs moments with a spread, got {mass!r} and spread "
            f"{moments.spread}; make them with Moments.empty(..., spread=True)"
        )


def nothing(*arguments: Any) -> None:
    """Fake of an operator that only changes its arguments."""
