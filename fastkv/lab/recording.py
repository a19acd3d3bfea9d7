"""What a cache holds and what attention gives: bytes, tokens that are kept, outputs of attention as they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel

from ..errors import FastKVError
from ..integrations.transformers import modules, stock
from ..integrations.transformers.cache import FastKVCache


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
