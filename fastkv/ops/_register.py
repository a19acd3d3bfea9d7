"""How an operation is registered: one opaque torch operator, declared mutation, a fake, a choice of backend inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference import Moments

LIBRARY = torch.library.Library("fastkv", "DEF")
STATISTICS = "Tensor count, Tensor? key_mean, Tensor? value_mean, Tensor? cross, Tensor? slope"
CHANGED_STATISTICS = (
    "Tensor(s!) count, Tensor(t!)? key_mean, Tensor(u!)? value_mean, Tensor(v!)? cross, Tensor(w!)? slope"
)
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


def flat(moments: Moments) -> tuple[Tensor | None, ...]:
    """The tensors of `STATISTICS`."""
    return moments.count, moments.key_mean, moments.value_mean, moments.cross, moments.slope


def nothing(*arguments: Any) -> None:
    """Fake of an operator that only changes its arguments."""
