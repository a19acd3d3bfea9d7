"""`Centroids.add` on a CPU, in place, compiled from joins.cpp on first use."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from ..reference import Centroids, centroids
from . import compiled

CONSTANTS = ("BLOCK", "FINE", "MEDIUM", "COARSE", "SETTLED", "ROOMY", "STEP", "TURN")
POINTERS = ("count", "spread", "keys", "values", "fresh_keys", "fresh_values", "inside")
SIZES = ("places", "num", "fresh", "key_dim", "value_dim", "halves", "threads")


class Joining(Structure):
    """`Joining` of joins.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in (*SIZES, *map(str.lower, CONSTANTS))),
    )


def serves(parts: Centroids) -> bool:
    """Whether `join` handles these centroids. The first question compiles it."""
    means = parts.keys.dtype
    fits = means in (torch.float32, torch.bfloat16) and all(tensor.is_contiguous() for tensor in parts.tensors())
    return fits and compiled.available("joins")


def join(parts: Centroids, keys: Tensor, values: Tensor, inside: Tensor) -> None:
    """`parts` become `parts.add(keys, values, inside)`, in place.

    Args: keys [B, Hkv, N, Dk] and values [B, Hkv, N, Dv] in any float dtype; inside [B, Hkv, N] bool.
    """
    fresh = [rows.float().contiguous() for rows in (keys, values)]
    tensors = [parts.count, parts.spread, parts.keys, parts.values, *fresh, inside.contiguous()]
    sizes = parts.count[..., 0].numel(), parts.num, keys.shape[2], keys.shape[-1], values.shape[-1]
    halves = parts.keys.dtype == torch.bfloat16
    constants = (getattr(centroids, name) for name in CONSTANTS)
    given = Joining(*(one.data_ptr() for one in tensors), *sizes, halves, torch.get_num_threads(), *constants)
    compiled.call("joins", "join_centroids", given)
