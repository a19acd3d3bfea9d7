"""A text is read once, and every question about it goes on from a copy of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..integrations.transformers.stock import CACHE
from ..prefix import answers, ends_of, forked

__all__ = ["HELP", "QUESTION", "answers", "ends_of", "forced", "forked", "read", "split"]

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


@torch.no_grad()
def forced(model: Any, cache: Any, texts: list[list[int]], dtype: torch.dtype | None = torch.float32) -> list[Tensor]:
    """Log-probabilities [T, V] of what follows each token of a text, in `dtype`, one text a row of the cache.

    Args: cache: of what comes before, is used up; None for nothing.
    """
    rows = [torch.tensor(one, device=model.device) for one in texts]
    padded = pad_sequence(rows, batch_first=True)  # on the right, where nothing attends to it
    logits = model(padded, **{CACHE: cache}, use_cache=True).logits
    return [torch.log_softmax(row[: len(one)], -1, dtype=dtype) for row, one in zip(logits, texts)]
