"""What the queries of each layer are like, as found in a text, and the file that holds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FastKVError
from ..policies import QueryStatistics
from .files import TensorFile

FILE = TensorFile(
    command="queries", what="means of queries", version=1, facts={"fingerprint": str, "model": str, "tokens": int}
)


@dataclass(frozen=True, eq=False)
class QueryCalibration:
    """Statistics of the queries of one model.

    Attributes:
        layers: layer -> what its queries are like.
        fingerprint: of the config of the model.  model: the same in words.
        tokens: how many were read.
    """

    layers: Mapping[int, QueryStatistics]
    fingerprint: str
    model: str
    tokens: int

    def of_layer(self, layer: int) -> QueryStatistics:
        """Those of one layer. Raises FastKVError for a layer that was not read."""
        if layer not in self.layers:
            raise FastKVError(
                f"layer {layer} has no statistics of queries, the layers of the file are {sorted(self.layers)}; choose "
                "one of them"
            )
        return self.layers[layer]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with a JSON header, whole or not at all. Raises: FastKVError if that fails."""
        tensors = {
            f"{name}.{layer}": part for layer, known in self.layers.items() for name, part in known._asdict().items()
        }
        FILE.save(path, {name: getattr(self, name) for name in FILE.facts}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> QueryCalibration:
        """Read a file for the model with this config, patched or not; tensors are on the CPU.

        Raises: FastKVError as `TensorFile.load`.
        """
        facts, tensors = FILE.load(path, config)
        layers = {
            i: QueryStatistics(*(tensors.pop(f"{name}.{i}") for name in QueryStatistics._fields))
            for i in range(config.get_text_config(decoder=True).num_hidden_layers)
            if all(f"{name}.{i}" in tensors for name in QueryStatistics._fields)
        }
        if tensors or not layers or not all(map(_fits, layers.values())):
            raise FILE.damaged(path)
        return cls(layers, **facts)


def _fits(known: QueryStatistics) -> bool:
    """Whether they are finite, [Hq, Dk] and [Hq, F] fp32."""
    shapes = known.mean.ndim == known.excess.ndim == 2 and len(known.mean) == len(known.excess)
    return shapes and all(part.dtype == torch.float32 and bool(part.isfinite().all()) for part in known)
