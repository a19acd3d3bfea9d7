"""The model, its texts, and texts that are read once and compressed as often as asked.

A layer is compressed after its own attention, so a prompt that is read whole is the same for every policy and budget:
what attention was given (queries, keys, values) is kept, and handed to the product's own layers again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache

from fastkv import Budget, patched, policies
from fastkv.calibration.quality import context_nll
from fastkv.integrations.transformers import rotations, selfcheck
from fastkv.integrations.transformers.cache import FastKVCache
from fastkv.lab import facts


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
class Answers:
    """What a cache makes of Q questions: right, and the mean NLL of the values' tokens, of all questions."""

    right: list[bool]
    nll: float | None


class Bench:
    """What rows measure with.

    Attributes: text: source of statistics, as in `texts.read`.  quick: smallest sizes, to try the command.
        tick: called after each part of a row with its share of the row.  trusting: the full cache is always right.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, text: str = "topics", quick: bool = False, trusting: bool = False
    ) -> None:
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.quick, self.trusting = quick, trusting
        self.tick: Callable[[float], None] = lambda share: None

    @property
    def heads(self) -> int:
        """KV heads of a layer."""
        return int(self.model.config.num_key_value_heads)

    def size(self, whole: int, quick: int) -> int:
        """A number of tokens or texts."""
        return quick if self.quick else whole

    @cached_property
    def rotary(self) -> dict[int, Any]:
        """How each layer turns its keys."""
        return rotations(self.model, range(self.model.config.num_hidden_layers), halves=True)

    def stretch(self, length: int, seed: int, source: str | None = None) -> Tensor:
        """Tokens [1, length] of a text from a random place."""
        return torch.tensor([facts.stretch(self.tokenizer, source or self.text, length, Random(f"papers {seed}"))])

    def read(self, ids: Tensor, again: bool = False) -> Reading:
        """Read tokens [1, N] once, or, for KVzip, twice."""
        return Reading(self, ids, again)

    @contextmanager
    def cache(self, reading: Reading | Tensor, policy: Any, budget: Budget, **options: Any) -> Iterator[FastKVCache]:
        """The compressed cache of a text, with the model patched; tokens [1, N] are read for this cache alone."""
        # Every `patch` finds out anew how the model turns its keys, which takes longer than a small text.
        with (
            mock.patch.object(selfcheck, "rotations", lambda *args, **kwargs: self.rotary),
            patched(self.model, policy, alike(budget), **options),
        ):
            cache = FastKVCache(self.model, static=False)
            if isinstance(reading, Reading):
                reading.fill(cache)
            else:
                self.model(reading, past_key_values=cache, logits_to_keep=1)
            yield cache

    def ask(self, sample: facts.Sample, reading: Reading) -> list[Asked]:
        """The questions that the full cache answers.

        As in RULER, the reply begins with the words before the value, and the value is what has to follow.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        whole, found = self.tokenizer.decode(sample.prefix), list[Asked]()
        for one in sample.questions:
            before = one.fact[: one.fact.rindex(one.answer)].rstrip()
            depth = max(whole.find(one.fact), 0) / max(len(whole), 1)
            found.append(Asked(one.ids + encode(before), encode(f" {one.answer}"), depth, one.kind))
        right = self.answers(reading.full(), found).right
        return [one for one, good in zip(found, right) if good or self.trusting]

    def answers(self, cache: Any, asked: Sequence[Asked]) -> Answers:
        """Teacher-forced on the values, all questions at once; uses the cache up.

        Right is a value all of whose tokens are the most likely ones.
        """
        if not asked:
            return Answers([], None)
        rests = [one.ids + one.value[:-1] for one in asked]
        padded = torch.zeros(len(rests), max(map(len, rests)), dtype=torch.long)
        for row, rest in zip(padded, rests):
            row[: len(rest)] = torch.tensor(rest)
        cache.batch_repeat_interleave(len(asked))
        logits = self.model(padded, past_key_values=cache).logits
        right, said = [], []
        for row, one in zip(logits, asked):
            wanted = torch.tensor(one.value)
            value = row[len(one.ids) - 1 :][: len(wanted)].double().log_softmax(-1)
            right.append(bool((value.argmax(-1) == wanted).all()))
            said.append(-value.gather(-1, wanted[:, None])[:, 0])
        return Answers(right, torch.cat(said).mean().item())


class Reading:
    """What attention of every layer was given while a text was read.

    Attributes: ids [1, N].  layers: per layer q [1, Hq, N, D], k [1, Hkv, N, D], v [1, Hkv, N, Dv], post-RoPE, and the
        other arguments of `FastKVLayer.attend`.  again: what a second reading found, per layer, if there was one.
        hidden [1, N, H], after the last layer.
    """

    def __init__(self, bench: Bench, ids: Tensor, again: bool) -> None:
        self.bench, self.ids = bench, ids
        self.layers: list[tuple[Any, ...]] = []
        self.again: list[Any] = []
        policy = policies.get("kvzip" if again else "streaming")
        with patched(bench.model, policy, Budget(tokens=max(ids.shape[1], 64)), correction="none"):
            cache = FastKVCache(bench.model, static=False)
            for layer in cache.compressed:
                layer.attend = partial(self._attend, layer)  # type: ignore[method-assign]
                layer.commit = partial(self._commit, layer)  # type: ignore[method-assign]
            self.hidden = bench.model.get_decoder()(ids, past_key_values=cache, use_cache=True).last_hidden_state

    def _attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
        if not layer.rereading:
            self.layers.append((q, k, v, rest, named))
        return type(layer).attend(layer, q, k, v, *rest, **named)

    def _commit(self, layer: Any, keep: float | None) -> None:
        self.again.append(layer.reader.again)
        layer.reader = layer.cache

    def full(self) -> DynamicCache:
        """The stock cache after the text."""
        cache = DynamicCache(config=self.bench.model.config)
        for index, (_, k, v, *_) in enumerate(self.layers):
            cache.update(k, v, index)
        return cache

    def fill(self, cache: FastKVCache) -> None:
        """Hand the text to an empty cache, layer by layer."""
        for index, (layer, (q, k, v, rest, named)) in enumerate(zip(cache.compressed, self.layers)):
            if cache.config.policy.rereads:
                layer.hold()
            layer.update(k, v)
            valid, scale, softcap, _, *more = rest
            layer.attend(q, k, v, valid, scale, softcap, lambda q=q: q, *more, **named)
            if cache.config.policy.rereads:
                layer.reader.again = self.again[index]  # type: ignore[union-attr]
                layer.commit(None)

    @cached_property
    def nll(self) -> float:
        """Mean NLL of the text's own tokens, nats."""
        return float(context_nll(self.hidden, self.ids, self.bench.model.get_output_embeddings()))

    def pre_rope(self, index: int) -> Tensor:
        """Keys of a layer before the rotation, [1, Hkv, N, D]."""
        k = self.layers[index][1]
        return self.bench.rotary[index].unrotate(k, torch.arange(k.shape[2]).expand(k.shape[:3]))


def alike(budget: Budget) -> Budget:
    """The budget with heads that are alike, as the papers have them, unless it says how they share."""
    return replace(budget, heads="uniform") if budget.heads == "calibrated" else budget
