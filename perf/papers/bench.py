"""The model, its texts, which are read once and compressed as often as asked, and questions about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastkv import Budget, patch, policies, unpatch
from fastkv.calibration.fits import context_nll
from fastkv.integrations.transformers import rotations, selfcheck
from fastkv.integrations.transformers.cache import FastKVCache
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import facts
from fastkv.lab.reading import Reading, forced

from .row import PLAIN


@dataclass(frozen=True)
class Asked:
    """A question that the full cache answers.

    Attributes: ids: of the question and of the reply up to the value.  value: tokens.  depth: of the fact in the text,
        0 to 1.  kind: of fact.
    """

    ids: list[int]
    value: list[int]
    depth: float
    kind: str


@dataclass(frozen=True)
class Cache:
    """A way to compress: policy, how the budget is shared, in blocks or whole, and correction with its maps.

    halves: whether a quarter of the room holds tokens with one of key and value, twice as many.
    """

    policy: Any
    heads: str = "uniform"
    layers: str = "uniform"
    block: int | None = None
    correction: Any = "none"
    vector: Any = None
    halves: bool = False


def caches(row: str) -> dict[str, Cache]:
    """Those that a row of rows.yaml compares."""
    own, found = {one.name for one in fields(Cache)}, {}
    for name, way in PLAIN[row].caches.items():
        policy = policies.get(way["policy"], **{key: value for key, value in way.items() if key not in own})
        found[name] = Cache(**{**{key: value for key, value in way.items() if key in own}, "policy": policy})
    return found


class Bench:
    """What rows measure with.

    Attributes: quick: smallest sizes, to try the command.  trusting: the full cache is always right.
    """

    def __init__(self, model: Any, tokenizer: Any, quick: bool = False, trusting: bool = False) -> None:
        self.model, self.tokenizer, self.quick, self.trusting = model, tokenizer, quick, trusting

    def size(self, whole: int, quick: int) -> int:
        return quick if self.quick else whole

    @cached_property
    def rotary(self) -> dict[int, Any]:
        return rotations(self.model, range(self.model.config.num_hidden_layers), halves=True)

    def stretch(self, length: int, seed: int, source: str = "topics") -> Tensor:
        """Tokens [1, length] of a text from a random place; source: as in `facts.stretch`."""
        return torch.tensor([facts.stretch(self.tokenizer, source, length, Random(f"papers {seed}"))])

    @contextmanager
    def cache(self, text: Text | Tensor, policy: Any, budget: Budget, **options: Any) -> Iterator[FastKVCache]:
        """The compressed cache of a text, with the model patched; tokens [1, N] are read for this cache alone."""
        # Every `patch` finds out anew how the model turns its keys, which takes longer than a small text.
        with mock.patch.object(selfcheck, "rotations", lambda *args, **kwargs: self.rotary):
            try:
                if isinstance(text, Text):
                    yield text.reading.compressed(policy, alike(budget), **options)
                else:
                    patch(self.model, policy, alike(budget), **options)
                    yield self.model(text, logits_to_keep=1)[CACHE]
            finally:
                unpatch(self.model)

    def ask(self, sample: facts.Sample, text: Text) -> list[Asked]:
        """The questions that the full cache answers.

        As in RULER, the reply begins with the words before the value, and the value is what has to follow.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        whole, found = self.tokenizer.decode(sample.prefix), list[Asked]()
        for one in sample.questions:
            before = one.fact[: one.fact.rindex(one.answer)].rstrip()
            depth = max(whole.find(one.fact), 0) / max(len(whole), 1)
            found.append(Asked(one.ids + encode(before), encode(f" {one.answer}"), depth, one.kind))
        right, _ = self.answers(text.full(), found)
        return [one for one, good in zip(found, right) if good or self.trusting]

    def answers(self, cache: Any, asked: Sequence[Asked]) -> tuple[list[bool], float | None]:
        """Teacher-forced on the values, all questions at once; uses the cache up.

        Returns: of each question whether it is right, which is a value all of whose tokens are the most likely ones;
            the mean NLL of the values' tokens, of all questions.
        """
        if not asked:
            return [], None
        cache.batch_repeat_interleave(len(asked))
        right, said = [], []
        rests = [one.ids + one.value[:-1] for one in asked]
        for row, one in zip(forced(self.model, cache, rests, torch.float64), asked):
            wanted, value = torch.tensor(one.value), row[len(one.ids) - 1 :]
            right.append(bool((value.argmax(-1) == wanted).all()))
            said.append(-value.gather(-1, wanted[:, None])[:, 0])
        return right, torch.cat(said).mean().item()


class Text:
    """A text that was read once.

    Attributes: ids [1, N].  layers: per layer q [1, Hq, N, D], k [1, Hkv, N, D], v [1, Hkv, N, Dv], post-RoPE, and the
        scale of its attention.  full: makes the stock cache of it.
    """

    def __init__(self, bench: Bench, ids: Tensor) -> None:
        self.bench, self.ids, self.reading = bench, ids, Reading.of(unpatch(bench.model), ids)
        self.layers = [(*tokens[:3], attends[0]) for tokens, attends in self.reading.layers]
        self.full = self.reading.full

    @cached_property
    def nll(self) -> float:
        """Mean NLL of the text's own tokens, nats."""
        model = unpatch(self.bench.model)
        return float(context_nll(model.get_decoder()(self.ids)[0], self.ids, model.get_output_embeddings()))

    def pre_rope(self, index: int) -> Tensor:
        """Keys of a layer before the rotation, [1, Hkv, N, D]."""
        k = self.layers[index][1]
        return self.bench.rotary[index].unrotate(k, torch.arange(k.shape[2]).expand(k.shape[:3]))


def alike(budget: Budget) -> Budget:
    """The budget with heads that are alike, as the papers have them, unless it says how they share."""
    return replace(budget, heads="uniform") if budget.heads == "calibrated" else budget
