"""What a GPU run keeps: one JSON file per section, rewritten after every case, so that a stopped run can go on."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Heads:
    """Attention heads of a named model: query heads, KV heads, elements per head."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


LLAMA = Heads("llama-3.1-8b", 32, 8, 128)  # Qwen3-4B has the same heads
GEMMA = Heads("gemma-3-12b", 16, 8, 256)
TOY = Heads("toy", 4, 2, 32)
SAME_HEADS = {"llama-3.1-8b": ("Llama-3.1-8B", "Qwen3-4B"), "gemma-3-12b": ("Gemma-3-12B",), "toy": ("toy",)}


HALF = 2  # bytes of a half-precision element
LENGTHS, BATCHES = (128, 256, 512, 1024, 4096, 16_384), (1, 8, 32, 128)
FIRST = ((1, 1024), (32, 4096), (8, 1024), (1, 4096), (32, 1024), (1, 512), (8, 4096), (128, 1024), (1, 128))


def shapes() -> list[tuple[int, int]]:
    """(batch, tokens), the most important first."""
    return [*FIRST, *((b, n) for b in BATCHES for n in LENGTHS if (b, n) not in FIRST)]


def moment_bytes(dim: int, order: int | None) -> int:
    """Of one KV head that one decode step reads: count, means in fp32, slope in half precision."""
    return 0 if order is None else 8 + 8 * dim + (HALF * dim * dim if order == 1 else 0)


def decode_bytes(heads: Heads, batch: int, length: int, order: int | None) -> int:
    """Slots, moments, the query and its output, the appended token."""
    dim = heads.head_dim
    each = 2 * HALF * dim * (length + 1 + heads.groups) + moment_bytes(dim, order)
    return batch * heads.num_kv_heads * each


class Deadline:
    """When to start nothing new."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def over(self, seconds: float = 0.0) -> bool:
        """Whether fewer than `seconds` are left."""
        return time.monotonic() + seconds > self.end


@dataclass
class Results:
    """The rows of one section.

    Attributes:
        path: the JSON file.  environment: see `perf.environment.gpu_environment`.
        complete: whether every case of the section has a row.  rows: one dictionary a case, each with an "id".
    """

    path: Path
    environment: Row
    complete: bool = False
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, environment: Row, fresh: bool = False) -> Results:
        """Continue the file, or start it: also if it comes from other sources, another GPU or other versions."""
        if path.exists() and not fresh:
            stored = json.loads(path.read_text())
            keys = ("source", "device", "driver", "torch", "triton")
            if all(stored["environment"].get(key) == environment.get(key) for key in keys):
                return cls(path, stored["environment"], stored["complete"], stored["rows"])
        return cls(path, environment)

    def has(self, name: str) -> bool:
        """Whether the case has a row."""
        return any(row["id"] == name for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Replace the file in one step, so that a killed run leaves a readable one. JSON has no NaN or infinity."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"section": self.path.stem, "environment": self.environment, "complete": self.complete}
        text = json.dumps({**content, "rows": [_plain(row) for row in self.rows]}, indent=1, allow_nan=False)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(self.path)


def _plain(value: Any) -> Any:
    """The value with non-finite numbers as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def red_ops(checks: Results, needed: tuple[str, ...]) -> list[str]:
    """Of the operations needed, those with a failed check or none at all."""
    good = {row["op"] for row in checks.rows} - {row["op"] for row in checks.rows if not row["passed"]}
    return [op for op in needed if op not in good]
