"""A text is read once, and every question about it goes on from a copy of the cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..integrations.transformers.cache import FastKVCache

QUESTION = ("later", "seen")
HELP = (
    "later: the text is read, and compressed, before the question is known; seen: text and question are read together"
)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Any:
    """The cache that the model, patched or not, has after tokens [B, N]."""
    return model(ids.to(model.device), logits_to_keep=1, use_cache=True).past_key_values


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, cache: Any, seen: Tensor, questions: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """What greedy decoding writes after each question, at most `tokens` tokens, without the one that ends it.

    Args: cache: of the tokens `seen` [1, N], which stays as it is.  questions: tokens that come after them.
    """
    num, most = len(questions), max(map(len, questions))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = torch.tensor([[pad] * (most - len(one)) + [*one] for one in questions])
    mask = torch.tensor([[0] * (most - len(one)) + [1] * len(one) for one in questions])
    prompts = torch.cat([seen.expand(num, -1).to(model.device), rows.to(model.device)], 1)
    mask = torch.cat([torch.ones_like(prompts[:, : seen.shape[1]]), mask.to(model.device)], 1)
    how = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": pad}
    written = model.generate(prompts, attention_mask=mask, past_key_values=forked(cache, num), **how)
    ends = ends_of(model)
    return [list(takewhile(lambda one: one not in ends, row)) for row in written[:, prompts.shape[1] :].tolist()]


def forked(cache: Any, num: int) -> Any:
    """A copy of a compressed or a stock cache, with every sequence so many times."""
    if isinstance(cache, FastKVCache):
        return cache.fork(num)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(num)
    return twin


def ends_of(model: Any) -> set[int]:
    """The tokens after which nothing is written."""
    known = model.generation_config.eos_token_id
    return set() if known is None else {known} if isinstance(known, int) else set(known)


def split(tokenizer: Any, prompt: str, question: str) -> tuple[Tensor, Tensor]:
    """Tokens [1, N] and [1, T] of a prompt before and from its question on, which is its end.

    Only the first part gets the tokenizer's special tokens.
    """
    before = prompt.removesuffix(question)
    parts = (tokenizer(before, verbose=False), tokenizer(question, add_special_tokens=False, verbose=False))
    first, second = (torch.tensor([part.input_ids]) for part in parts)
    return first, second
