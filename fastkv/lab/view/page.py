"""The page: one HTML file with everything in it. Numbers travel as 16-bit integers, compressed, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...calibration.files import replace_file

TEMPLATE = Path(__file__).parent / "page.html"
PLACE = "/*DATA*/"
TOP, LEVELS = 4.0, 255  # errors are stored as roots, from 0 to TOP


def packed(arrays: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Arrays of whole numbers from 0 to 65535, one after the other, as text; and where each begins."""
    flat = [array.flatten().to(torch.int32).numpy().astype("<u2") for array in arrays]
    starts = [sum(len(one) for one in flat[:index]) for index in range(len(flat))]
    return base64.b64encode(zlib.compress(b"".join(one.tobytes() for one in flat), 9)).decode(), starts


def coded(error: Tensor) -> Tensor:
    """Relative errors as whole numbers from 0 to `LEVELS`, finer where they are small."""
    return (LEVELS * (error.clamp(0, TOP) / TOP).sqrt()).round()


def written(data: dict[str, Any], path: Path) -> None:
    """Write the page of that data; no text in it can end the script that it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    replace_file(path, TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text).encode())
