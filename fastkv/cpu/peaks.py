"""`peak_attention` and `most_attended` on a CPU, compiled from peaks.cpp on first use."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from . import compiled

POINTERS = ("queries", "keys", "valid", "asked", "sinks", "lse", "out")
SIZES = ("batch", "heads", "groups", "number", "length", "dim", "threads")


class Peaks(Structure):
    """`Peaks` of peaks.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in SIZES),
        *((name, c_float) for name in ("scale", "softcap")),
    )


def serves(q: Tensor) -> bool:
    """Whether `peaks` takes these queries. The first question compiles it."""
    return q.dtype in (torch.float32, torch.bfloat16, torch.float16) and compiled.available("peaks")


def peaks(
    q: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None,
    valid: Tensor,
    asked: Tensor,
    sink_logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Arguments and result as in `reference.peak_attention`; lse as in `reference.most_attended`, None to find it."""
    (batch, num_heads, number, dim), (heads, length) = q.shape, keys.shape[1:3]
    rows = [rows.float().contiguous() for rows in (q, keys)]
    masks = [mask.contiguous() for mask in (valid, asked)]
    sinks, lse = (None if one is None else one.float().contiguous() for one in (sink_logits, lse))
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    pointers = (None if one is None else one.data_ptr() for one in (*rows, *masks, sinks, lse, out))
    sizes = batch, heads, num_heads // heads, number, length, dim, torch.get_num_threads()
    compiled.call("peaks", "peak_attention", Peaks(*pointers, *sizes, scale, softcap or 0.0))
    return out
