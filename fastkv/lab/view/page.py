"""The page: one HTML file with everything in it. Numbers travel compressed, in base64.

They lie where the compression finds what they have in common: those of one token side by side, because most heads evict
a token at about the same time, and first bytes apart from second ones, most of which are 0. Errors would take most of
the page, so they have few levels.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...calibration.files import replace_file

TEMPLATE = Path(__file__).parent / "page.html"
PLACE = "/*DATA*/"
TOP, LEVELS = 4.0, 31  # errors are stored as logarithms of 1 + error / FINE, from 0 to TOP
FINE = 0.01
SPEED = 6  # of the compression: higher ones take several times as long for a few percent


def packed(arrays: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Arrays [layers, heads, N] of whole numbers from 0 to 65535 as text, and where each begins once it is read.

    The text is that of all first bytes, then all second bytes; arrays follow each other as [N, layers * heads].
    """
    flat = [array.flatten(0, 1).T.flatten().numpy().astype("<u2") for array in arrays]
    starts = [0, *accumulate(len(one) for one in flat)][:-1]
    planes = np.concatenate(flat).view(np.uint8).reshape(-1, 2).T
    return base64.b64encode(zlib.compress(planes.tobytes(), SPEED)).decode(), starts


def coded(error: Tensor) -> Tensor:
    """Relative errors as whole numbers from 0 to `LEVELS`, finer where they are small."""
    return (LEVELS * (error.clamp(0, TOP) / FINE).log1p() / math.log1p(TOP / FINE)).round()


def written(data: dict[str, Any], path: Path) -> None:
    """Write the page of that data; no text in it can end the script that it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    replace_file(path, TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text).encode())
