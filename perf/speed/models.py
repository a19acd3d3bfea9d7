"""The models of the measurements: random weights of named shapes, their prompts and what is known of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fastkv.lab.shapes import SHAPES as NAMED
from fastkv.lab.shapes import TIED, UNTIED, Shape, gemma

PROBE = 64  # tokens of the prompt whose logits must agree
SHAPES = {
    **NAMED,
    "qwen3-8b": Shape("qwen3", (151_936, 4096, 12_288, 36, 32, 8, 128), (UNTIED,)),
    "qwen3-small": Shape("qwen3", (1000, 256, 768, 4, 8, 2, 64), (TIED,)),
    "gemma-3-small": gemma(1000, 256, 1024, 6, 4, 2, 64),
    "llama-toy": Shape("llama", (97, 32, 48, 2, 4, 2, 16), (UNTIED,)),
    "gemma-3-toy": gemma(97, 32, 48, 6, 4, 2, 16, window=16),
}
TITLES = {  # for tables and plots
    "llama-small": "Llama, 4 layers of 256",
    "qwen3-small": "Qwen3, 4 layers of 256",
    "gemma-3-small": "Gemma 3, 6 layers of 256",
}


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of that name."""
    return SHAPES[name].build(device, dtype)


def prompt(name: str, batch: int, length: int, device: torch.device) -> Tensor:
    """Seeded token ids [batch, length], without the special ones."""
    words = SHAPES[name].sizes[0]
    return torch.randint(3, words, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def checksum(model: Any, name: str) -> str:
    """CRC-32 of the stock model's logits for a short prompt, bit for bit."""
    logits = model(prompt(name, 1, PROBE, model.device)).logits
    return f"{zlib.crc32(logits.float().cpu().numpy().tobytes()):08x}"


def weight_bytes(model: Module) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, of which it needs one row."""
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = table is model.get_output_embeddings().weight  # type: ignore[operator]
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)
