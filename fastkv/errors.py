"""The one exception of fastkv, and the shape and dtype checks that raise it.

Every message answers four questions in one sentence: what was wrong, what is expected, what was given, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class FastKVError(ValueError):
    """Something fastkv was asked to do cannot be done; nothing has been changed."""


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """Raise FastKVError unless `tensor.shape` matches `expected` (None matches any size)."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(e is not None and s != e for s, e in zip(shape, expected)):
        want = "[" + ", ".join("any" if e is None else str(e) for e in expected) + "]"
        raise FastKVError(f"{op}: {name} must have shape {want}, got {list(shape)}; check the layout [B, H, N, D]")


def check_groups(op: str, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads per KV head, or raise FastKVError if they do not divide."""
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise FastKVError(
            f"{op}: the number of query heads must be a multiple of the number of KV heads, got {num_heads} and "
            f"{num_kv_heads}; pass keys at KV-head resolution, not repeated"
        )
    return num_heads // num_kv_heads
