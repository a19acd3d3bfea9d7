"""What slots are encoded and decoded with where a backend has functions of its own for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import implementation, resolve
from ..reference import Codec, RowFormat, Stored


@dataclass(frozen=True)
class BackendCodec(Codec):
    """That of a backend, which may be "auto": C++ on a CPU. On a GPU kernels convert most rows by themselves."""

    def encode(self, form: RowFormat, rows: Tensor) -> Stored:
        """`form.encode`."""
        if not self._compiled(rows):
            return super().encode(form, rows)
        stored: Stored = implementation("encode_rows", "cpu", "cpu")(form, rows)
        return stored

    def decode(self, form: RowFormat, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`form.decode`, in that dtype."""
        if not self._compiled(codes):
            return super().decode(form, codes, scales, dtype)
        rows: Tensor = implementation("decode_rows", "cpu", "cpu")(form, codes, scales, dtype)
        return rows

    def _compiled(self, rows: Tensor) -> bool:
        """Whether C++ converts these; torch compiles a step whole, and leaves nothing to C++."""
        return resolve(self.backend, rows.device) == "cpu" and not torch.compiler.is_compiling()
