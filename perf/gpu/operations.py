"""What of the library each check and timing is about: kernels, and the equations they are compared with, as files.

A row counts while these files are the same, so that repairing one kernel repeats its checks and its timings only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..engine import closure, digest


@dataclass(frozen=True)
class Operation:
    """Modules of `fastkv.kernels` and of `fastkv.reference`, and which checks have to be green before it is timed.

    Attributes: needs: checks, by name; those with "/" are of the device, with the correction behind it.
    """

    kernels: tuple[str, ...]
    reference: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def files(self) -> set[str]:
        """Paths of these modules and of those of the same two rooms that they import."""
        kernels = closure(*(f"fastkv.kernels.{name}" for name in self.kernels))
        reference = closure(*(f"fastkv.reference.{name}" for name in self.reference))
        mine = {path for path in kernels if path.startswith("fastkv/kernels/")}
        return mine | {path for path in reference if path.startswith("fastkv/reference/")}

    def checks(self, heads: str) -> tuple[str, ...]:
        """Names of the rows of the checks that it needs, at these heads."""
        rows = ((*one.split("/"), "bfloat16")[:2] for one in self.needs)
        return tuple(f"{name}[{heads}-{how}]" for name, how in rows)


EVICTED = ("moments", "centroids", "attention")
OPERATIONS: dict[str, Operation] = {
    "decode_centroids": Operation(
        ("decode_attention",), EVICTED, ("decode_centroids", "ticket/centroids", "graph/centroids")
    ),
    "decode_step": Operation(("decode_attention",), EVICTED, ("decode_step", "ticket/moments", "graph/moments")),
    "decode_cosh": Operation(("decode_attention",), EVICTED),
    "decode_slab": Operation(("decode_attention",), EVICTED),
    **{
        f"decode_{slots}": Operation(("decode_attention",), (*EVICTED, "slots"), (f"decode_{slots}",))
        for slots in ("int8", "fp8", "int4")
    },
    "decode_vector": Operation(("vector_decode",), EVICTED),
    "prefill_centroids": Operation(("prefill_attention",), EVICTED, ("prefill_centroids",)),
    "prefill_attention": Operation(("prefill_attention",), EVICTED, ("prefill_attention",)),
    "evict": Operation(("evict", "moment_scores"), ("selection", "moments"), ("evict", "moment_scores")),
    "moment_scores": Operation(("moment_scores",), ("moments",)),
    "compact": Operation(("compact", "select"), ("selection", "moments"), ("compact",)),
    "keydiff_scores": Operation(("key_scores",), ("geometry",), ("keydiff_scores",)),
    "manifold_scores": Operation(("key_scores",), ("geometry",), ("manifold_scores",)),
    "leverage_scores": Operation(("leverage",), ("geometry",), ("leverage_scores",)),
    "window_scores": Operation(("window_scores",), ("scores",), ("window_scores",)),
    "noncausal_attention_mass": Operation(("noncausal_mass",), ("geometry", "scores"), ("noncausal_attention_mass",)),
}


@cache
def code_of(operation: str, *functions: Callable[..., Any]) -> str:
    """Digest of an operation's files (of none, if it has no name) and of the functions that check or time it."""
    files = OPERATIONS[operation].files() if operation else set()
    return digest(files, *(inspect.getsource(function) for function in functions))


@cache
def whole(policy: str, correction: str, *functions: Callable[..., Any]) -> str:
    """Digest of what a whole model runs: the library with all kernels but those of other corrections and policies."""
    from fastkv import policies

    others = [] if correction.startswith("vector") else ["fastkv.kernels.vector_decode"]
    others += ["fastkv.policies", "fastkv.kernels.leverage", "fastkv.kernels.noncausal_mass"]
    found = closure("fastkv", "fastkv.kernels.operations", rooms=("fastkv",), without=others)
    rules = closure(type(policies.get(policy)).__module__, rooms=("fastkv",))
    found |= {path for path in rules if path.startswith("fastkv/policies/") and not path.endswith("__init__.py")}
    return digest(found, *(inspect.getsource(function) for function in functions))
