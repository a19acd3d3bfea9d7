"""How keys and values are stored: in the model's dtype, or as codes of 8 or 4 bits with a scale.

A format turns rows [..., D] into codes and scales, each row by itself, and back. Rounding is half to even, divisions
are in fp32 and correctly rounded, so codes are the same bits on every backend for the same fp32 numbers. Rows are
finite. Decoded rows are fp32 (those of "model" as they are).

`name`: the stored tensors of a row of D numbers; what a number x is read back as:

- model: D numbers in the model's dtype; x.
- int8: D codes int8, s fp32; s c with c = round(x / s), s = max |x| / 127. |error| <= s / 2.
- fp8: D codes e4m3, s fp32; s c with c = e4m3(x / s), s = max |x| / 448. |error| <= max(|x| / 16, s / 1024).
- int4: D codes of 4 bits, and for each 32 numbers m and z int8; s (c - z) with c = clamp(round(y / s) + z, 0, 15), y =
  x H (`rotated`, with sums in fp64, so that their order leaves no trace in fp32) and s = `step_of(m)`; the row then
  turned back. |error of y| <= s / 2. Rotation before rounding: QuaRot, arXiv:2404.00456, Sec. 4.2; asymmetric groups
  of each token: KIVI, arXiv:2402.02750, Sec. 3.
- k8v4: keys as int8, values as int4: an error of a key changes which values are read, one of a value only itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backend import INT4_GROUP as GROUP
from ..errors import FastKVError

TINY = torch.finfo(torch.float32).tiny  # scales below are 0: devices differ in what they make of subnormal numbers
Stored = tuple[Tensor, Tensor | None]


class SlotFormat:
    """How the keys and how the values of slots are stored.

    Attributes: name: what `fastkv.patch(..., slots=name)` calls it.  keys, values: the format of each.
    """

    name: str
    keys: RowFormat
    values: RowFormat

    @property
    def plain(self) -> bool:
        """Whether rows are stored as they are."""
        return self.keys.bits == 0


@dataclass(frozen=True)
class RowFormat(SlotFormat):
    """Rows as they are, in the model's dtype; base of all formats that keys and values can have.

    Class attributes: bits: of the code of a number.
    """

    name: str = "model"
    bits: ClassVar[int] = 0

    keys = values = property(lambda self: self)  # of both the same

    def width(self, dim: int) -> int:
        """Elements of the codes of a row of `dim` numbers."""
        return dim // 2 if self.bits == 4 else dim

    def dim(self, width: int) -> int:
        """The inverse of `width`."""
        return 2 * width if self.bits == 4 else width

    def empty(self, place: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Stored:
        """Codes and scales for rows [*place, dim] of a model's dtype: all zero, which decodes to zeros."""
        return torch.zeros(*place, dim, dtype=dtype, device=device), None

    def encode(self, rows: Tensor) -> Stored:
        """Codes [..., width] and scales of rows [..., D] in any float dtype."""
        return rows, None

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows [..., D] that codes and scales stand for, in that dtype; plain ones as they are."""
        return codes


@dataclass(frozen=True)
class Scaled(RowFormat):
    """A code of 8 bits for each number and a scale for each row: codes [..., D], scales fp32 [...].

    Attributes: codes: dtype that numbers are rounded to.  stored: dtype of the tensor, which holds the bits of `codes`:
        torch moves no rows of float8 on a CPU.  largest: code of the row's largest number.
    """

    codes: torch.dtype = torch.int8
    stored: torch.dtype = torch.int8
    largest: float = 127.0
    bits: ClassVar[int] = 8

    def empty(self, place: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Stored:
        """Zeros."""
        codes = torch.zeros(*place, dim, dtype=self.stored, device=device)
        return codes, torch.zeros(place, dtype=torch.float32, device=device)

    def encode(self, rows: Tensor) -> Stored:
        """c = round(x / s) with s = max |x| / largest; all 0 where s is no normal number."""
        rows = rows.float()
        scales = rows.abs().amax(-1) / self.largest
        small = scales < TINY
        codes = (rows / scales.masked_fill(small, torch.inf)[..., None]).clamp(-self.largest, self.largest)
        codes = codes.to(self.codes) if self.codes.is_floating_point else codes.round().to(self.codes)
        return codes.view(self.stored), scales.masked_fill_(small, 0.0)

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """x ~ s c, of whole numbers without a copy in fp32; of e4m3, c / 256 times 256 s."""
        assert scales is not None
        if not self.codes.is_floating_point:
            return torch.mul(scales[..., None], codes, out=torch.empty(codes.shape, dtype=dtype, device=codes.device))
        # Sign, exponent and fraction of fp16, whose bias is 8 more. A CPU converts float8 one number after another.
        halves = codes.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~0x4000)
        return (halves.view(torch.float16) * (256 * scales)[..., None]).to(dtype)


@dataclass(frozen=True)
class Grouped(RowFormat):
    """A code of 4 bits for each number of the rotated row, a step and a zero point for each 32 of them.

    Codes uint8 [..., D / 2]: number j in the low, number j + D / 2 in the high four bits of byte j. Scales int8
    [..., D / 32, 2]: m and z of each group.
    """

    bits: ClassVar[int] = 4

    def empty(self, place: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Stored:
        """Zeros: codes and zero points of 0."""
        codes = torch.zeros(*place, dim // 2, dtype=torch.uint8, device=device)
        return codes, torch.zeros(*place, dim // GROUP, 2, dtype=torch.int8, device=device)

    def encode(self, rows: Tensor) -> Stored:
        """Of each group y of the rotated row: the smallest step s >= max((max y - min y) / 15, max |y| / 127),
        z = round(-min y / s) and c = clamp(round(y / s) + z, 0, 15).
        """
        groups = rotated(rows.double()).float().unflatten(-1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        need = torch.maximum((high - low) / 15, torch.maximum(high, -low) / 127)
        exponents = (((need.contiguous().view(torch.int32) + 0xFFFFF) >> 20) - 1016).clamp(-128, 127)
        step = step_of(exponents)
        zeros = (-low / step).round().clamp(-128, 127)
        codes = ((groups / step).round() + zeros).clamp(0, 15).to(torch.uint8).flatten(-2)
        first, second = codes.chunk(2, -1)
        return first | second << 4, torch.cat([exponents, zeros], -1).to(torch.int8)

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """y ~ s (c - z), turned back."""
        assert scales is not None
        half, low = codes.shape[-1], 0x0F0F0F0F
        four = codes.view(torch.int32)  # bytes
        numbers = torch.empty(*codes.shape[:-1], 2 * half, dtype=torch.float32, device=codes.device)
        numbers[..., :half] = (four & low).view(torch.uint8)
        numbers[..., half:] = (four >> 4).bitwise_and_(low).view(torch.uint8)
        exponents, zeros = scales.to(torch.int32)[..., None].unbind(-2)
        numbers.unflatten(-1, (-1, GROUP)).sub_(zeros).mul_(step_of(exponents))
        return rotated(numbers).to(dtype)


@dataclass(frozen=True)
class Mixed(SlotFormat):
    """Keys in one format, values in another."""

    name: str
    keys: RowFormat
    values: RowFormat


@dataclass(frozen=True)
class Codec:
    """What slots are encoded and decoded with: here as their format says, and so as any other codec does, bit for bit.

    Attributes: backend: whose it is.
    """

    backend: str = "reference"

    def encode(self, form: RowFormat, rows: Tensor) -> Stored:
        """`form.encode`."""
        return form.encode(rows)

    def decode(self, form: RowFormat, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`form.decode`."""
        return form.decode(codes, scales, dtype)

    def read(self, slots: Any, names: Sequence[str], dtype: torch.dtype) -> list[Tensor] | None:
        """`Slots.read` in one piece, or None: it is then done tensor by tensor."""
        return None


def step_of(exponents: Tensor) -> Tensor:
    """The step of each int32 m from -128 to 127: (1 + (m mod 8) / 8) 2^floor(m / 8), fp32 with three bits after the
    point, so m is the upper bits of the step.
    """
    return (exponents + 1016 << 20).view(torch.float32)


def rotated(rows: Tensor) -> Tensor:
    """rows [..., D] times the normalised Hadamard matrix H = H^T = H^-1, in fp32 (fp64 for fp64 rows).

    H[i, j] = (-1)^popcount(i & j) / sqrt(n) in each block of n numbers, n the largest power of two that divides D.
    """
    dim = rows.shape[-1]
    size = dim & -dim
    # A compiled step makes the matrix anew, on the device: it looks into no cache.
    made = hadamard.__wrapped__ if torch.compiler.is_compiling() else hadamard
    matrix = made(size, rows.device, torch.float64 if rows.dtype == torch.float64 else torch.float32)
    with torch.autocast(rows.device.type, enabled=False):  # codes are the same bits wherever they are made
        return (rows.to(matrix.dtype).unflatten(-1, (-1, size)) @ matrix).mul_(size**-0.5).flatten(-2)


@cache
def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The Hadamard matrix [size, size] of 1 and -1, size a power of two."""
    index = torch.arange(size, device=device)
    parity = index[:, None] & index
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1 - 2 * (parity & 1)).to(dtype)


PLAIN = RowFormat()
INT8 = Scaled("int8")
FP8 = Scaled("fp8", torch.float8_e4m3fn, torch.uint8, 448.0)
INT4 = Grouped("int4")
K8V4 = Mixed("k8v4", INT8, INT4)
FORMATS: dict[str, SlotFormat] = {one.name: one for one in (PLAIN, INT8, FP8, INT4, K8V4)}

SPECIFIED = Codec()


def slot_format(name: str) -> SlotFormat:
    """The format of that name. Raises FastKVError for an unknown one."""
    if not isinstance(name, str) or name not in FORMATS:
        raise FastKVError(f"slots must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
