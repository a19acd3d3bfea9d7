"""Policies: which tokens stay; a file has those that look at the same. `names()` lists them, `get(name)` makes one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import FastKVError
from .attention import H2O, RKV, TOVA, PyramidKV, SnapKV
from .base import LayerFacts, MomentUse, Policy, QueryStatistics, Reread, SecondReading, Shares, Signals
from .compactor import Compactor, Leverage, NonCausal
from .expected import ExpectedAttention, TriAttention
from .fastkv import FastKV, FastKVReread
from .keys import KeyDiff, KNorm, LagKV, Manifold, WindowedManifold
from .positions import DuoAttention, Random, Streaming
from .reread import AttentionMatching, KVzip
from .values import CriticalKV, MomentKV

ALL: tuple[type[Policy], ...] = (
    MomentKV, KeyDiff, Manifold, WindowedManifold, Compactor, Leverage, NonCausal, FastKV, FastKVReread,
    SnapKV, PyramidKV, TOVA, H2O, KNorm, CriticalKV, KVzip, DuoAttention,
    LagKV, RKV, ExpectedAttention, TriAttention, AttentionMatching, Streaming, Random,
)  # fmt: skip

BASE = (LayerFacts, MomentUse, Policy, QueryStatistics, Reread, SecondReading, Shares, Signals)

__all__ = ["ALL", "get", "names", *(made.__name__ for made in (*BASE, *ALL))]


def names() -> list[str]:
    """The names that `fastkv.patch(model, policy=...)` accepts."""
    return [policy.name for policy in ALL]


def get(name: str | Policy, **hyper: Any) -> Policy:
    """The policy called `name` with the given hyper-parameters; a Policy is returned as it is.

    Raises: FastKVError for an unknown name (the error lists the known ones) or an unknown hyper-parameter.
    """
    if isinstance(name, Policy):
        if hyper:
            raise FastKVError(f"hyper-parameters {sorted(hyper)} came with a ready policy; set them where it is made")
        return name
    found = next((policy for policy in ALL if policy.name == name), None)
    if found is None:
        raise FastKVError(f"unknown policy {name!r}; choose one of {', '.join(names())}")
    known = [field.name for field in fields(found)]
    unknown = sorted(set(hyper) - set(known))
    if unknown:
        raise FastKVError(
            f"policy {name!r} has no hyper-parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    return found(**hyper)
