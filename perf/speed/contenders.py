"""Who is measured: the full cache, fastkv and kvpress, each as a case says. Peers are imported where they are used."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastkv.lab.shapes import Compressed, Full

from .cases import Case

# Same score and hyper-parameters as fastkv's policy of that name.
PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "keydiff": ("KeyDiffPress", {}),
    "knorm": ("KnormPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
    "compactor": ("CompactorPress", {"blending": 0.3}),
}


class Generates(Full):
    """A model that is measured as a case says."""

    def __init__(self, model: Any, case: Case) -> None:
        super().__init__(model, case.step, case.room, case.block)
        self.case = case

    def generate(self, ids: Tensor, new: int, **options: Any) -> Tensor:
        """The prompt and exactly `new` greedy tokens, by the model's own `generate`."""
        length = {"max_new_tokens": new, "min_new_tokens": new}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length, **options)


class Stock(Generates):
    """The full cache."""

    def generate(self, ids: Tensor, new: int, **options: Any) -> Tensor:
        """With a static cache where steps are compiled."""
        static = {"cache_implementation": "static"} if self.how == "compiled" else {}
        return super().generate(ids, new, **static)


class FastKV(Compressed, Generates):
    """A patched model."""

    def __init__(self, model: Any, case: Case) -> None:
        import fastkv

        super().__init__(model, case)
        static = {"static": True} if case.step != "eager" else {}
        budget = fastkv.Budget(tokens=case.budget, heads="uniform")  # of random weights none needs more than others
        fastkv.patch(model, case.policy, budget, prefill_block=case.block, evict_every=case.period, **static)


class KVPress(Generates):
    """kvpress, as its own pipeline does it: the prompt is read whole under the press, decoding happens outside."""

    def __init__(self, model: Any, case: Case) -> None:
        import kvpress

        super().__init__(model, case)
        name, options = PRESSES[case.policy]
        self.make = lambda ratio: getattr(kvpress, name)(compression_ratio=ratio, **options)

    def pressed(self, length: int) -> AbstractContextManager[Any]:
        """Keeps `budget` of `length` tokens. kvpress truncates length * (1 - ratio), hence the half."""
        if self.case.budget >= length:
            return nullcontext()
        return self.make(1 - (self.case.budget + 0.5) / length)(self.model)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """The whole prompt; kvpress has no other way."""
        with self.pressed(ids.shape[1]):
            return self.model(ids, past_key_values=cache, logits_to_keep=1).logits

    def generate(self, ids: Tensor, new: int, **options: Any) -> Tensor:
        """`generate` under the press, which leaves decode steps alone."""
        with self.pressed(ids.shape[1]):
            return super().generate(ids, new)

    def kept(self, cache: Any) -> int:
        """Tokens held per KV head of the last layer, which attends to everything in all these models."""
        return cache.layers[-1].keys.shape[2]


CONTENDERS: dict[str, type[Generates]] = {"full": Stock, "fastkv": FastKV, "kvpress": KVPress}
