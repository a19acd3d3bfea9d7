"""Small random models for checks of whole decode steps, and the kinds of caches that they are patched with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import fastkv

from .place import Place

FAMILIES = ("llama", "gemma3")  # the second has rings of sliding-window layers beside the cache
EVERY = 4  # tokens between evictions


@dataclass(frozen=True)
class Kind:
    """A kind of cache: policy, correction, and whether heads are equal."""

    policy: str
    correction: str = "auto"
    heads: str = "uniform"

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.policy}-{self.correction}-{self.heads}"

    def patch(self, place: Place, model: Any, backend: str, **settings: Any) -> None:
        """Give the model such a cache, small enough for evictions all the time."""
        budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=self.heads)
        same: dict[str, Any] = dict(correction=self.correction, evict_every=EVERY)
        fastkv.patch(model, self.policy, budget, backend=backend, **same, **settings)


# The default first; then moments, unequal heads, sums of attention.
KINDS = (
    Kind("fastkv"),
    Kind("momentkv"),
    Kind("keydiff", "none", "adaptive"),
    Kind("h2o", "mean"),
)


def small_model(place: Place, family: str) -> Any:
    """A random model with real head sizes, seeded."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64 if place.toy else 512,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if place.toy else 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3 if place.toy else 0.1,
        "eos_token_id": None,
    }
    if family == "llama":
        made: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        layers = ["sliding_attention", "full_attention"]
        made = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=24, layer_types=layers))
    return made.to(place.device, torch.float32 if place.toy else torch.bfloat16).eval()
