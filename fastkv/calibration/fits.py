"""What is fitted to a model with text, and the files that hold it: maps from keys to values, statistics of queries.

VECTOR recovers dropped values with linear maps: for every full-attention layer and KV head, value ~ k~ @ weight, k~ the
key before the rotary embedding, of this head or of all KV heads of the layer side by side ("joint", the paper's map).
The map has no intercept, because attention applies it once to the weighted sum of keys: sum_j p_j (k~_j @ W) =
(sum_j p_j k~_j) @ W.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FastKVError
from ..policies import QueryStatistics
from .files import TensorFile, check_fitted

MAPS = TensorFile(
    command="vector",
    what="maps from keys to values",
    version=1,
    facts={"fingerprint": str, "model": str, "tokens": int, "threshold": float},
)


def required_r2(boundary: float = 1.0) -> float:
    """R^2 above which dropping the values of more tokens loses less than dropping whole pairs, at equal memory.

    It is m / (w + m) = 1 / (1 + s), w the importance at the edge of the tokens that keep their key, m the mean
    importance of these, s = w / m (VECTOR, arXiv:2605.23258, Proposition 1).

    A file is fitted before any importance is known. The default, equal importance of all tokens, gives 1/2: the least
    that any prompt and any policy ask for. It is compared with the R^2 of all tokens, a lower bound in expectation for
    the R^2 of the tokens chosen for their small error. Pass the s of your prompts to ask for more.

    Args: boundary: s, in (0, 1].
    Raises: FastKVError if it is outside.
    """
    if not 0 < boundary <= 1:
        raise FastKVError(f"required_r2 needs a boundary in (0, 1], got {boundary}; 1 where all tokens matter alike")
    return 1 / (1 + boundary)


@dataclass(frozen=True, eq=False)
class VectorMap:
    """Maps from keys to values for one model, and how well they do on text that they were not fitted to.

    Attributes:
        weights: layer -> [Hkv, Dk, Dv] fp32, value ~ k~ @ weight; joint: [Hkv, Hkv * Dk, Dv].
        r2: layer -> [Hkv] fp64, held-out R^2 of each head against the mean of its values (see `fastkv.calibration`);
            joint: [1], of all heads together.
        threshold: R^2 that a head has to exceed, see `required_r2`.
        fingerprint: of the config of the model it was fitted to.  model: the same in words.
        tokens: how many were read, the held-out ones included.
    """

    weights: Mapping[int, Tensor]
    r2: Mapping[int, Tensor]
    threshold: float
    fingerprint: str
    model: str
    tokens: int

    @property
    def joint(self) -> bool:
        """Whether a head's values are made of the keys of all heads, which then have to keep the same tokens."""
        return any(len(self.r2[layer]) != len(weight) for layer, weight in self.weights.items())

    def usable(self, layer: int) -> list[bool]:
        """For each KV head of a full-attention layer whether its values may be dropped; the others evict plainly.

        Raises: FastKVError for a layer that was not fitted.
        """
        if layer not in self.r2:
            raise FastKVError(f"layer {layer} has no map, the fitted layers are {sorted(self.r2)}; choose one of them")
        heads = len(self.weights[layer])
        return (self.r2[layer] > self.threshold).expand(heads).tolist()

    def check(self, config: Any) -> None:
        """Raise FastKVError unless it was fitted to a model with this config, patched or not."""
        check_fitted("this VectorMap", self.fingerprint, self.model, config, "vector")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with a JSON header; whoever reads `path` sees the old file or the whole new one.

        Raises: FastKVError if it cannot be written; a file that was there before is then still there.
        """
        facts = {name: getattr(self, name) for name in MAPS.facts} | {"threshold": float(self.threshold)}
        tensors = {f"weight.{layer}": weight for layer, weight in self.weights.items()}
        MAPS.save(path, facts, tensors | {f"r2.{layer}": r2 for layer, r2 in self.r2.items()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> VectorMap:
        """Read a file for the model with this config, patched or not; tensors are on the CPU.

        Raises: FastKVError if there is no such file, if it is damaged or something else, if a newer fastkv wrote it, or
            if it was fitted to another model.
        """
        facts, tensors = MAPS.load(path, config)
        layers = range(config.get_text_config(decoder=True).num_hidden_layers)
        weights = {i: tensors.pop(f"weight.{i}") for i in layers if f"weight.{i}" in tensors}
        r2 = {i: tensors.pop(f"r2.{i}") for i in layers if f"r2.{i}" in tensors}
        whole = not tensors and weights and weights.keys() == r2.keys()
        sound = whole and all(_fits(weight, r2[i]) for i, weight in weights.items())
        if not sound or len({len(r2[i]) > 1 for i, weight in weights.items() if len(weight) > 1}) > 1:
            raise MAPS.damaged(path)
        return cls(weights, r2, **facts)


def _fits(weight: Tensor, r2: Tensor) -> bool:
    """Whether they are finite, [Hkv, Dk, Dv] fp32 and [Hkv] fp64, or joint."""
    kinds = (weight.ndim, weight.dtype, r2.ndim, r2.dtype) == (3, torch.float32, 1, torch.float64)
    joint = len(r2) == 1 and weight.shape[1] % len(weight) == 0
    return kinds and (joint or len(r2) == len(weight)) and all(bool(tensor.isfinite().all()) for tensor in (weight, r2))


QUERIES = TensorFile(
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
        QUERIES.save(path, {name: getattr(self, name) for name in QUERIES.facts}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> QueryCalibration:
        """Read a file for the model with this config, patched or not; tensors are on the CPU.

        Raises: FastKVError as `TensorFile.load`.
        """
        facts, tensors = QUERIES.load(path, config)
        layers = {
            i: QueryStatistics(*(tensors.pop(f"{name}.{i}") for name in QueryStatistics._fields))
            for i in range(config.get_text_config(decoder=True).num_hidden_layers)
            if all(f"{name}.{i}" in tensors for name in QueryStatistics._fields)
        }
        if tensors or not layers or not all(map(_sound, layers.values())):
            raise QUERIES.damaged(path)
        return cls(layers, **facts)


def _sound(known: QueryStatistics) -> bool:
    """Whether they are finite, [Hq, Dk] and [Hq, F] fp32."""
    shapes = known.mean.ndim == known.excess.ndim == 2 and len(known.mean) == len(known.excess)
    return shapes and all(part.dtype == torch.float32 and bool(part.isfinite().all()) for part in known)
