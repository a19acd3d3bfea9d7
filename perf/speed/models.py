"""Random-weight models of named shapes, with the same numbers under every version of transformers.

Imports torch and transformers only, so that a peer's own environment can build the same model.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM

LONGEST = 262_144  # positions
PROBE = 64  # tokens of the prompt whose logits must agree


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        title: for tables and plots.  model_type: of transformers.  config: what differs from that type's defaults.
    """

    title: str
    model_type: str
    config: dict[str, Any]


def _shape(title: str, model_type: str, sizes: tuple[int, ...], **more: Any) -> Shape:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return Shape(title, model_type, dict(zip(names, sizes)) | more)


def _gemma(title: str, sizes: tuple[int, ...], **more: Any) -> Shape:
    """Every sixth layer attends to everything, the others to a window."""
    return _shape(title, "gemma3_text", sizes, sliding_window_pattern=6, query_pre_attn_scalar=sizes[-1], **more)


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
SHAPES = {
    "llama-3.1-8b": _shape("Llama-3.1-8B", "llama", (128_256, 4096, 14_336, 32, 32, 8, 128), **UNTIED),
    "llama-3.2-3b": _shape("Llama-3.2-3B", "llama", (128_256, 3072, 8192, 28, 24, 8, 128), **TIED),
    "qwen3-4b": _shape("Qwen3-4B", "qwen3", (151_936, 2560, 9728, 36, 32, 8, 128), **TIED),
    "qwen3-8b": _shape("Qwen3-8B", "qwen3", (151_936, 4096, 12_288, 36, 32, 8, 128), **UNTIED),
    "gemma-3-12b": _gemma("Gemma-3-12B", (262_208, 3840, 15_360, 48, 16, 8, 256), sliding_window=1024, **TIED),
    "llama-small": _shape("Llama, 4 layers of 256", "llama", (1000, 256, 688, 4, 4, 2, 64), **UNTIED),
    "qwen3-small": _shape("Qwen3, 4 layers of 256", "qwen3", (1000, 256, 768, 4, 8, 2, 64), **TIED),
    "gemma-3-small": _gemma("Gemma 3, 6 layers of 256", (1000, 256, 1024, 6, 4, 2, 64), sliding_window=1024, **TIED),
    "llama-toy": _shape("Llama, toy", "llama", (97, 32, 48, 2, 4, 2, 16), **UNTIED),
    "gemma-3-toy": _gemma("Gemma 3, toy", (97, 32, 48, 6, 4, 2, 16), sliding_window=16, **TIED),
}


@torch.no_grad()
def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of that shape. Every matrix is drawn by a generator seeded with its name; vectors stay as made."""
    shape = SHAPES[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(shape.model_type, max_position_embeddings=LONGEST, **ids, **shape.config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for key, weight in model.named_parameters():
        if weight.ndim > 1:
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(key.encode()))
            weight.normal_(0, 0.02, generator=generator)
    return model


def prompt(name: str, batch: int, length: int, device: torch.device) -> Tensor:
    """Seeded token ids [batch, length], without the special ones."""
    words = SHAPES[name].config["vocab_size"]
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
