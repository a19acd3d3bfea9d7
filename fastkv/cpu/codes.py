"""A decode step's attention to slots, plain or codes, on a CPU, compiled from codes.cpp on first use.

torch decodes 8 and 4 bits before it multiplies, which takes longer than attention; copies heads of unequal length to
equal ones; and converts all of bfloat16 to float32. Without a C++ compiler (`compiled`), and for float16, it does all
that.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..reference import RowFormat, Slots, Stored
from . import compiled

WIDE, LONGEST = 16, 512  # a row has a multiple of so many numbers, and at most so many
PLAIN = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Three = c_int64 * 3


class Coded(Structure):
    """`Coded` of codes.cpp."""

    _fields_ = (("codes", c_void_p), ("scales", c_void_p), ("code_strides", Three), ("scale_strides", Three))

    @staticmethod
    def of(codes: Tensor, scales: Tensor | None) -> Coded:
        """Codes [B, Hkv, N, width] and scales [B, Hkv, N, ...]; or [B, N, ...] of heads that share slots. Plain rows
        have no scales.
        """
        return _coded(*_place(codes), *(_place(scales) if scales is not None else (None, 0, ())), codes.ndim == 3)


def _place(part: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return part.data_ptr(), part.element_size(), part.stride()


@lru_cache(maxsize=1024)
def _coded(
    codes: int, code_size: int, code_strides: tuple[int, ...],
    scales: int | None, scale_size: int, scale_strides: tuple[int, ...], shared: bool,
) -> Coded:  # fmt: skip
    """Of places; every step of a layer asks for the same."""
    strides = []
    for size, (batch, *rest) in ((code_size, code_strides), (scale_size, scale_strides or (0, 0, 0))):
        head, slot = (0, rest[0]) if shared else rest[:2]
        strides.append(Three(size * batch, size * head, size * slot))
    return Coded(codes, scales, *strides)


class Rows(Structure):
    """`Rows` of codes.cpp."""

    _fields_ = (
        ("coded", Coded),
        *((name, c_void_p) for name in ("rows", "halves")),
        *((name, c_int64) for name in ("batch", "heads", "slots", "dim", "threads")),
        ("root", c_double),
    )


class Token(Structure):
    """`Token` of codes.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "positions", "seen")),
        ("position_strides", c_int64 * 2),
        *((name, c_int64) for name in ("seen_stride", "room")),
        ("root", c_double),
    )

    @classmethod
    def of(cls, k: Tensor, v: Tensor, slots: Slots, seen: Tensor) -> Token:
        """k, v [B, Hkv, 1, D], contiguous, in the dtype of plain slots, else fp32."""
        assert slots.positions is not None
        batch, *head = slots.positions.stride()[:-1]
        pointers = k.data_ptr(), v.data_ptr(), slots.positions.data_ptr(), seen.data_ptr()
        strides = (c_int64 * 2)(batch, *head)
        return cls(*pointers, strides, seen.stride(0), slots.keys.shape[-2], root(k.shape[-1]))


class Attention(Structure):
    """`Attention` of codes.cpp."""

    _fields_ = (
        *((name, Coded) for name in ("keys", "values")),
        ("token", Token),
        *((name, c_void_p) for name in ("lengths", "starts", "queries", "bias", "out", "lse", "weights")),
        *((name, c_int64) for name in ("batch", "heads", "rows", "dim", "slots", "threads", "length_stride")),
        *((name, c_float) for name in ("scale", "root")),
    )


NOTHING = Token()


def serves(form: RowFormat, dim: int) -> bool:
    """Whether rows of `dim` numbers are handled here. The first question compiles."""
    return not form.plain and dim % WIDE == 0 and dim <= LONGEST and compiled.available("codes")


def attends(slots: Slots, dim: int) -> bool:
    """Whether `attend` can be used for these slots. The first question compiles."""
    if not slots.format.plain:
        return serves(slots.format.keys, dim)
    keys, values = slots.keys, slots.values
    alike = values is not None and values.dtype == keys.dtype and keys.stride(-1) == values.stride(-1) == 1
    fits = alike and keys.dtype in PLAIN and dim % WIDE == 0 and dim <= LONGEST
    return fits and compiled.available("codes")


@cache
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


def appends(slots: Slots, seen: Tensor) -> bool:
    """Whether `attend` can store a token, too, where it can be used."""
    positions, lengths = slots.positions, slots.lengths
    plain = positions is not None and positions.dtype == torch.int32 and positions.stride(-1) == 1
    counted = lengths.dtype == torch.int32 and lengths.stride(-1) == 1 and seen.dtype == torch.int64
    ours = torch.is_inference_mode_enabled() or not lengths.is_inference()  # PyTorch refuses to write to others
    return plain and counted and ours and slots.bias is None


def attend(
    q: Tensor,
    slots: Slots,
    scale: float,
    weights: Tensor | None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the G query heads of each KV head to its slots in use, as `attends` says.

    Args: q [B, Hkv, G, D] in any float dtype.  weights: None, or where they are written, fp32 [B, Hkv, G, N].
        k, v [B, Hkv, 1, D], seen [B]: a token that is appended first, as `appends` says, and `seen` is then one more.
    Returns: out [B, Hkv, G, D] and lse [B, Hkv, G], fp32.
    """
    (batch, heads, rows, dim), number, lengths, starts = q.shape, slots.filled, slots.lengths, slots.starts
    if lengths.dtype != torch.int32 or lengths.stride(-1) != 1:  # an operator may be given other integers
        lengths = lengths.to(torch.int32).contiguous()
    if starts is not None:
        starts = starts.to(torch.int32).contiguous()
    queries, bias = q.float().contiguous(), slots.biases(number)
    if bias is not None:
        bias = bias.float().contiguous()
    out, lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, q.shape[:3]))
    assert slots.values is not None
    token = NOTHING
    if k is not None and v is not None and seen is not None:
        stored = slots.keys.dtype if slots.format.plain else torch.float32
        k, v = k.to(stored).contiguous(), v.to(stored).contiguous()
        token = Token.of(k, v, slots, seen)
    given = Attention(
        Coded.of(slots.keys, slots.key_scales),
        Coded.of(slots.values, slots.value_scales),
        token,
        lengths.data_ptr(),
        None if starts is None else starts.data_ptr(),
        queries.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if weights is None else weights.data_ptr(),
        *(batch, heads, rows, dim, number, torch.get_num_threads(), lengths.stride(0)),
        *(scale, root(dim)),
    )
    name = PLAIN[slots.keys.dtype] if slots.format.plain else slots.format.name
    compiled.call("codes", f"attend_{name}", given)
    return out, lse
