"""Who is measured: the full cache, fastkv and kvpress, behind one interface. Peers are imported where they are used.

A contender reads prompts, decodes single tokens and generates; everything else about a measurement is the same for all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from fastkv.lab.shapes import Step

from .cases import Case

# Same score and hyper-parameters as fastkv's policy of that name.
PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "keydiff": ("KeyDiffPress", {}),
    "knorm": ("KnormPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
    "compactor": ("CompactorPress", {"blending": 0.3}),
}


class Full:
    """Everything is kept: transformers' dynamic cache, or its static one for a compiled step."""

    def __init__(self, model: Any, case: Case) -> None:
        self.model, self.case = model, case

    def new_cache(self, length: int) -> Any:
        """An empty cache for a prompt of that length and what is decoded after it."""
        if self.case.step == "eager":
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=length + self.case.room)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, 1, V] after the prompt [B, N], read whole or in the case's blocks."""
        for block in ids.split(self.case.block or ids.shape[1], 1):
            logits = self.model(block, past_key_values=cache, logits_to_keep=1).logits
        return logits

    def step(self, cache: Any) -> Step:
        """The decode step of this case; the only place where eager, compiled and captured differ."""
        model = self.model
        if self.case.step == "compiled":
            mode = "reduce-overhead" if model.device.type == "cuda" else None  # None: there are no graphs on a CPU
            model = torch.compile(model, fullgraph=True, mode=mode)
        return lambda token, position: model(token, past_key_values=cache, position_ids=position).logits

    def generate(self, ids: Tensor, new: int) -> Tensor:
        """The prompt and exactly `new` greedy tokens, by the model's own `generate`."""
        static = {"cache_implementation": "static"} if self.case.step == "compiled" else {}
        return self._generate(ids, new, **static)

    def _generate(self, ids: Tensor, new: int, **options: Any) -> Tensor:
        length = {"max_new_tokens": new, "min_new_tokens": new}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length, **options)

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that the cache holds on to, used or not."""
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def kept(self, cache: Any) -> int:
        """Tokens held per KV head of the last layer, which attends to everything in all these models."""
        return cache.layers[-1].keys.shape[2] if self.case.step == "eager" else int(cache.get_seq_length())


class FastKV(Full):
    """A patched model."""

    def __init__(self, model: Any, case: Case) -> None:
        import fastkv

        super().__init__(model, case)
        static = {"static": True} if case.step != "eager" else {}
        budget = fastkv.Budget(tokens=case.budget, heads="uniform")  # of random weights none needs more than others
        fastkv.patch(model, case.policy, budget, prefill_block=case.block, evict_every=case.period, **static)

    def new_cache(self, length: int) -> Any:
        """An empty cache; the length of the prompt does not matter."""
        import fastkv

        return fastkv.FastKVCache(self.model)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """The patched model splits the prompt into blocks by itself."""
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits

    def step(self, cache: Any) -> Step:
        """As for the full cache, or captured by fastkv's own helper."""
        if self.case.step != "captured":
            return super().step(cache)
        import fastkv

        replay = fastkv.capture_decode(self.model, cache, self.case.batch)
        return lambda token, position: replay(token)[:, None]

    def generate(self, ids: Tensor, new: int) -> Tensor:
        """Nothing has to be asked for: the patched model brings its cache."""
        return self._generate(ids, new)

    def cache_bytes(self, cache: Any) -> int:
        """What the cache itself says: slots, positions, scores, moments, scratch."""
        return cache.nbytes()

    def kept(self, cache: Any) -> int:
        """Tokens held per KV head of the last full-attention layer."""
        return int(cache.stored(len(cache.layers) - 1).max())


class KVPress(Full):
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

    def generate(self, ids: Tensor, new: int) -> Tensor:
        """`generate` under the press, which leaves decode steps alone."""
        with self.pressed(ids.shape[1]):
            return self._generate(ids, new)


CONTENDERS: dict[str, type[Full]] = {"full": Full, "fastkv": FastKV, "kvpress": KVPress}
