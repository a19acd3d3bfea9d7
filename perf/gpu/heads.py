"""Attention heads of named models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Attention heads of a named model: query heads, KV heads, elements per head."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads("llama-3.1-8b", 32, 8, 128)  # Qwen3-4B has the same heads
GEMMA = Heads("gemma-3-12b", 16, 8, 256)
