"""A text is read once, and every question about it goes on from a copy of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..integrations.transformers.stock import CACHE
from ..prefix import answers, ends_of, forked

__all__ = ["HELP", "QUESTION", "answers", "ends_of", "forked", "read", "split"]

QUESTION = ("later", "seen")
HELP = (
    "later: the text is read, and compressed, before the question is known; seen: text and question are read together"
)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Any:
    """The cache that the model, patched or not, has after tokens [B, N]."""
    return model(ids.to(model.device), logits_to_keep=1, use_cache=True)[CACHE]


def split(tokenizer: Any, prompt: str, question: str) -> tuple[Tensor, Tensor]:
    """Tokens [1, N] and [1, T] of a prompt before and from its question on, which is its end.

    Only the first part gets the tokenizer's special tokens.
    """
    before = prompt.removesuffix(question)
    parts = (tokenizer(before, verbose=False), tokenizer(question, add_special_tokens=False, verbose=False))
    first, second = (torch.tensor([part.input_ids]) for part in parts)
    return first, second
