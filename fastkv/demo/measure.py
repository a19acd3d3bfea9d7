"""What one cache does to one model: right answers, bytes, speed, and the error of attention itself.

Greedy decoding gives the reference answer exactly if, fed the reference answer word by word, the model's best next word
is the reference's next word every time. So one pass over the reference answer tells whether the answer is right, and
every cache is compared on the same inputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import FastKVError
from ..integrations.transformers import modules, stock
from ..integrations.transformers.cache import FastKVCache
from .tasks import generate

SPEED_STEPS = 32  # decode steps that are timed: two evictions at the default evict_every


@dataclass(frozen=True)
class Questions:
    """Equally long prompts of one task, prompts [N, P] and reference answers [N, A] as tokens.

    The last `question` tokens of each prompt are the question; `each` prompts in a row share the text before it.
    """

    task: str
    prompts: Tensor
    answers: Tensor
    question: int
    each: int = 1


@dataclass(frozen=True)
class Measured:
    """What a cache did to the N questions of a task.

    Attributes:
        right: [N] bool, whether greedy decoding gives the reference answer.
        attention: [layers, N, A - 1, Hq * Dv], attention output of every layer for the words of the reference answer.
        nbytes: bytes of the cache per sequence.
        kept: tokens per KV head that stay, mean over layers; None for a stock cache.
        tokens_per_second: decoded, all sequences together; None if it was not timed.
    """

    right: Tensor
    attention: Tensor
    nbytes: int
    kept: float | None
    tokens_per_second: float | None


def make_questions(
    tokenizer: PreTrainedTokenizerBase, task: str, context: int, samples: int, seed: int, each: int = 1
) -> Questions:
    """`each` questions to each of `samples` texts of `context` tokens, answer included; seeds count up from `seed`."""
    drawn = [generate(task, context, seed + index, each) for index in range(samples)]
    prompts = tokenizer([f"{one.context} {question}" for one in drawn for question in one.questions]).input_ids
    answers = tokenizer([answer for one in drawn for answer in one.answers], add_special_tokens=False).input_ids
    question = tokenizer(drawn[0].questions[0], add_special_tokens=False).input_ids
    return Questions(task, torch.tensor(prompts), torch.tensor(answers), len(question), each)


@torch.no_grad()
def measure(
    model: PreTrainedModel, questions: Questions, *, timed: bool = False, question_later: bool = False
) -> Measured:
    """Read the prompts, then decode the reference answers one word at a time. The model's own cache is used.

    question_later: read, and compress, the text before the question is known, once for all questions to it.
    """
    (rows, length), prompts, cache = questions.prompts.shape, questions.prompts, None
    if question_later:
        text, prompts = prompts.split([length - questions.question, questions.question], 1)
        cache = model(text[:: questions.each], logits_to_keep=1, use_cache=True).past_key_values
        if questions.each > 1:
            cache.batch_repeat_interleave(questions.each)
    out = model(prompts, past_key_values=cache, logits_to_keep=1, use_cache=True)
    cache = out.past_key_values
    logits = [out.logits[:, -1]]
    with record_attention(model) as recorded:
        for word in questions.answers[:, :-1].split(1, dim=1):
            logits.append(model(word, past_key_values=cache).logits[:, -1])
    guesses = torch.stack(logits, 1).argmax(-1)
    attention = torch.stack([torch.cat(steps, 1) for steps in recorded.values()])
    nbytes, kept, speed = cache_bytes(cache) // rows, kept_tokens(cache), None
    if timed:
        word, start = questions.answers[:, -1:], time.perf_counter()
        for _ in range(SPEED_STEPS):
            word = model(word, past_key_values=cache).logits[:, -1:].argmax(-1)
        speed = rows * SPEED_STEPS / (time.perf_counter() - start)
    return Measured((guesses == questions.answers).all(-1), attention, nbytes, kept, speed)


def relative_error(attention: Tensor, full: Tensor) -> float:
    """Mean of |o - o_full| / |o_full| over layers, sequences and tokens; both [layers, N, A - 1, Hq * Dv]."""
    return ((attention - full).norm(dim=-1) / full.norm(dim=-1)).mean().item()


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors of a compressed or stock cache, all sequences together."""
    if isinstance(cache, FastKVCache):
        return cache.nbytes()
    assert isinstance(cache, DynamicCache)
    return sum(stock.nbytes(layer) for layer in cache.layers)


def kept_tokens(cache: Any) -> float | None:
    """Tokens per KV head that the cache keeps after an eviction, mean over layers; None for a stock cache."""
    if not isinstance(cache, FastKVCache):
        return None
    tokens = [layer.cache.rule.layout.total for layer in cache.compressed if layer.cache.rule is not None]
    return sum(tokens) / len(tokens)


@contextmanager
def record_attention(model: PreTrainedModel) -> Iterator[dict[int, list[Tensor]]]:
    """Collect what every attention module hands to its output projection, [N, T, Hq * Dv] for each forward.

    Yields: by index of the layer; of layers that attend, those with a sliding window included.
    Raises: FastKVError for an attention module whose output projection is not found.
    """
    found = modules.attentions(model)
    recorded: dict[int, list[Tensor]] = {layer: [] for layer in found}

    def keep(steps: list[Tensor], module: Module, args: tuple[Tensor, ...]) -> None:
        steps.append(args[0].detach().clone())

    with ExitStack() as hooks:
        for layer, module in found.items():
            projection = modules.output(module)
            if projection is None:
                raise FastKVError(
                    "attention is recorded where it enters the output projection, expected one named "
                    f"{', '.join(modules.OUTPUTS)}, got none in {type(module).__name__}; try another model"
                )
            hooks.enter_context(projection.register_forward_pre_hook(partial(keep, recorded[layer])))
        yield recorded
