"""Attention heads of named models, the shapes that are timed, and the bytes that a decode step has to move."""

from __future__ import annotations

from dataclasses import dataclass


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
ODD = (Heads("d80-group7", 14, 2, 80), Heads("d96-group3", 6, 2, 96), Heads("d64-mha", 4, 4, 64))
HALF = 2  # bytes of a half-precision element
KEY = ((1, 1024), (32, 4096), (8, 1024), (1, 4096), (32, 1024), (8, 4096))  # batch and tokens, what counts most first
# Tokens of each KV head as a share of the mean, unequal as calibrated heads are.
SHARES = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)
PROMPTS = ((1, 2048), (8, 512), (1, 8192))  # batch and tokens of a prompt's block
OTHERS = ((1, 512), (128, 1024), (1, 128), (128, 4096))


def moment_bytes(dim: int, order: int | None) -> int:
    """Of one KV head that one decode step reads: count, means in fp32, slope in half precision."""
    return 0 if order is None else 8 + 8 * dim + (HALF * dim * dim if order == 1 else 0)


def decode_bytes(heads: Heads, batch: int, length: int, order: int | None, row: int = 0) -> int:
    """Slots, moments, the query and its output, the appended token.

    Args: row: bytes of a key or value of a slot; 0: in half precision.
    """
    dim = heads.head_dim
    each = 2 * HALF * dim * (1 + heads.groups) + 2 * (row or HALF * dim) * length + moment_bytes(dim, order)
    return batch * heads.num_kv_heads * each
