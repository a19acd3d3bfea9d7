"""A decode step's attention to slots, plain or codes, on a CPU, compiled from codes.cpp on first use.

torch decodes 8 and 4 bits before it multiplies, which takes longer than attention; copies heads of unequal length to
equal ones; and converts all of bfloat16 to float32. Without a C++ compiler (`compiled`), and for float16, it does all
that.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..reference import RowFormat, Slots, Stored
from ..reference.state import SCALES
from . import compiled

WIDE, LONGEST = 16, 512  # a row has a multiple of so many numbers, and at most so many
PLAIN = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Three = c_int64 * 3


class Coded(Structure):
    """`Coded` of codes.cpp."""

    _fields_ = (("codes", c_void_p), ("scales", c_void_p), ("code_strides", Three), ("scale_strides", Three))

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor | None, first: int = 0) -> Coded:
        """Codes [B, Hkv, N, width] and scales [B, Hkv, N, ...] from slot `first` on; or [B, N, ...] of heads that share
        slots. Plain rows have no scales.
        """
        shared = codes.ndim == 3
        pointers, strides = [], []
        for part in (codes, scales):
            if part is None:
                pointers.append(0)
                strides.append(Three(0, 0, 0))
                continue
            batch, *rest = (size * part.element_size() for size in part.stride())
            head, slot = (0, rest[0]) if shared else rest[:2]
            pointers.append(part.data_ptr() + first * slot)
            strides.append(Three(batch, head, slot))
        return cls(*pointers, *strides)


class Rows(Structure):
    """`Rows` of codes.cpp."""

    _fields_ = (
        ("coded", Coded),
        *((name, c_void_p) for name in ("rows", "halves")),
        *((name, c_int64) for name in ("batch", "heads", "slots", "dim", "threads")),
        ("root", c_double),
    )


class Attention(Structure):
    """`Attention` of codes.cpp."""

    _fields_ = (
        *((name, Coded) for name in ("keys", "values")),
        *((name, c_void_p) for name in ("lengths", "starts", "queries", "bias", "out", "lse", "weights")),
        *((name, c_int64) for name in ("batch", "heads", "rows", "dim", "slots", "threads")),
        *((name, c_float) for name in ("scale", "root")),
    )


def serves(form: RowFormat, dim: int) -> bool:
    """Whether rows of `dim` numbers are handled here. The first question compiles."""
    return not form.plain and dim % WIDE == 0 and dim <= LONGEST and compiled.available("codes")


def attends(slots: Slots, dim: int) -> bool:
    """Whether `attend` can be used for these slots. The first question compiles."""
    if not slots.format.plain:
        return serves(slots.format.keys, dim)
    rows = (slots.keys, slots.values)
    alike = all(part is not None and part.dtype == slots.keys.dtype and part.stride(-1) == 1 for part in rows)
    fits = alike and slots.keys.dtype in PLAIN and dim % WIDE == 0 and dim <= LONGEST
    return fits and compiled.available("codes")


def root(dim: int) -> float:
    """1 / sqrt(n), n the largest power of two that divides `dim`: `reference.rotated`."""
    return float((dim & -dim) ** -0.5)


def rows_of(rows: Tensor, coded: Coded) -> Rows:
    """rows [B, Hkv, N, D], fp32 or bf16 and contiguous, and where they are codes."""
    place = (None, rows.data_ptr()) if rows.dtype == torch.bfloat16 else (rows.data_ptr(), None)
    return Rows(coded, *place, *rows.shape, torch.get_num_threads(), root(rows.shape[-1]))


def in_four(part: Tensor, place: int) -> Tensor:
    """A tensor whose first `place` axes are of rows, as one with three of them."""
    return part if place == 3 else part.reshape(1, 1, -1, *part.shape[place:])


def encode(form: RowFormat, rows: Tensor) -> Stored:
    """`form.encode(rows)` of rows [..., D], D as `serves` says; the same bits."""
    rows, place = rows.float().contiguous(), rows.ndim - 1
    codes, scales = form.empty(rows.shape[:-1], rows.shape[-1], torch.float32, rows.device)
    assert scales is not None
    coded = Coded.of(in_four(codes, place), in_four(scales, place))  # views
    compiled.call("codes", f"encode_{form.name}", rows_of(in_four(rows, place), coded))
    return codes, scales


def store(slots: Slots, k: Tensor, v: Tensor, slot: int) -> None:
    """Keys and values [B, Hkv, 1, D] of a token, encoded, into that slot of every head, in place."""
    for rows, (name, scales) in zip((k, v), SCALES.items()):
        rows, coded = rows.float().contiguous(), Coded.of(getattr(slots, name), getattr(slots, scales), slot)
        compiled.call("codes", f"encode_{getattr(slots.format, name).name}", rows_of(rows, coded))


def decode(form: RowFormat, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`form.decode(codes, scales)` [..., D] in that dtype; the same bits except for the order of sums that turn rows
    back.
    """
    place = codes.ndim - 1
    made = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    rows = torch.empty(*codes.shape[:-1], form.dim(codes.shape[-1]), dtype=made, device=codes.device)
    parts = in_four(codes, place), in_four(scales, place)  # copies stay until the call is over
    compiled.call("codes", f"decode_{form.name}", rows_of(in_four(rows, place), Coded.of(*parts)))
    return rows.to(dtype)


def attend(q: Tensor, slots: Slots, scale: float, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of the G query heads of each KV head to its slots in use, as `attends` says.

    Args: q [B, Hkv, G, D] in any float dtype.  weights: None, or where they are written, fp32 [B, Hkv, G, N].
    Returns: out [B, Hkv, G, D] and lse [B, Hkv, G], fp32.
    """
    (batch, heads, rows, dim), number = q.shape, slots.filled
    counts = (slots.lengths, slots.starts)  # an operator may be given other integers than slots have
    lengths, starts = (None if part is None else part.to(torch.int32).contiguous() for part in counts)
    queries, bias = q.float().contiguous(), slots.biases(number)
    bias = None if bias is None else bias.float().contiguous()
    out, lse = (torch.empty(batch, heads, rows, *last, dtype=torch.float32, device=q.device) for last in ((dim,), ()))
    pointers = (
        None if part is None else part.data_ptr() for part in (lengths, starts, queries, bias, out, lse, weights)
    )
    coded = (Coded.of(getattr(slots, name), getattr(slots, scales)) for name, scales in SCALES.items())
    sizes = batch, heads, rows, dim, number, torch.get_num_threads()
    name = PLAIN[slots.keys.dtype] if slots.format.plain else slots.format.name
    compiled.call("codes", f"attend_{name}", Attention(*coded, *pointers, *sizes, scale, root(dim)))
    return out, lse
