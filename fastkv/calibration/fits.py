"""What is fitted to a model with text, and the files that hold it: maps from keys to values, statistics of queries,
curves of quality.

VECTOR recovers dropped values with linear maps: for every full-attention layer and KV head, value ~ k~ @ weight, k~ the
key before the rotary embedding, of this head or of all KV heads of the layer side by side ("joint", the paper's map).
The map has no intercept, because attention applies it once to the weighted sum of keys: sum_j p_j (k~_j @ W) =
(sum_j p_j k~_j) @ W.

A curve of context-calibrated compression says which share of the full cache's quality is left if a share r of the
context is kept (Compactor, Sec. 3.5):

    f(r) = expm1(k r) / expm1(k),   k = alpha * NLL(c) + beta

It goes from f(0) = 0 to f(1) = 1 and is convex for k > 0, where every evicted token hurts, the straight line for k = 0,
and concave for k < 0, where a few tokens carry everything. The paper asks for the largest r with f(r) >= quality; since
f grows, that is always 1, and the smallest is meant.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FINITE, FastKVError, is_number
from ..policies import QueryStatistics
from ..reference.attention import softcapped
from . import FITTED, TensorFile, check_fitted, header_of, replace_file

MAPS = TensorFile("vector", "maps from keys to values", FITTED | {"threshold": float})


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
        return (self.r2[layer] > self.threshold).expand(len(self.weights[layer])).tolist()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with a JSON header, as `TensorFile.save` does."""
        tensors = {f"weight.{layer}": weight for layer, weight in self.weights.items()}
        MAPS.save(path, self, tensors | {f"r2.{layer}": r2 for layer, r2 in self.r2.items()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> VectorMap:
        """Read a file for the model with this config, as `TensorFile.load` does."""
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


QUERIES = TensorFile("queries", "means of queries", FITTED)


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
        QUERIES.save(path, self, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> QueryCalibration:
        """Read a file for the model with this config, as `TensorFile.load` does."""
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


FORMAT = "fastkv context calibration"
VERSION = 1
TEXTS = ("policy", "fingerprint", "model")
NUMBERS = ("alpha", "beta", "triples", "residual")  # the order of a file
STRAIGHT = 1e-12  # below this |k| the curve is its straight limit, to double precision


def retained(keep: float | Tensor, k: float | Tensor) -> Tensor:
    """Quality that is left of a context of steepness `k` if a share `keep` of it stays.

    f(r) = expm1(k r) / expm1(k), and r for k = 0; never overflows, and f(0) = 0 and f(1) = 1 exactly.

    Args: keep: in [0, 1]; k: any number. They broadcast.  Returns: fp64 in [0, 1], differentiable in both.
    """
    keep, k = (torch.as_tensor(one, dtype=torch.float64) for one in (keep, k))
    bent = _bent(k)
    # The same ratio with exp(k) taken out of it, where that would overflow.
    falling = bent.abs().neg()
    ratio = torch.expm1(falling * keep) / torch.expm1(falling)
    curve = torch.where(bent > 0, torch.exp(falling * (1 - keep)) * ratio, ratio)
    return torch.where(k.abs() < STRAIGHT, keep, curve)


def keep_for(quality: float | Tensor, k: float | Tensor) -> Tensor:
    """Smallest share of a context of steepness `k` that leaves `quality`: the inverse of `retained`.

    r = log1p(q * expm1(k)) / k, and q for k = 0.

    Args: quality: in [0, 1]; k: any number. They broadcast.  Returns: fp64 in [0, 1].
    """
    quality, k = (torch.as_tensor(one, dtype=torch.float64) for one in (quality, k))
    bent = _bent(k)
    # Three forms of one expression, each where it neither overflows nor cancels.
    steep = 1 + torch.log(quality + (1 - quality) * torch.exp(-bent.abs())) / bent
    grown = quality * torch.expm1(bent.clamp(max=1.0))
    gentle = torch.log1p(grown) / bent
    early = torch.log((1 - quality) + quality * torch.exp(bent.clamp(max=1.0))) / bent
    curve = torch.where(bent > 1, steep, torch.where(grown > -0.5, gentle, early)).clamp(0, 1)
    share = torch.where(k.abs() < STRAIGHT, quality, curve)
    return torch.where((quality <= 0) | (quality >= 1), quality.clamp(0, 1), share)


def _bent(k: Tensor) -> Tensor:
    """`k` where the curve bends, any number that may be divided by where it does not."""
    return torch.where(k.abs() < STRAIGHT, 1.0, k)


def context_nll(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    softcap: float | None = None,
    mask: Tensor | None = None,
    chunk: int = 512,
) -> Tensor:
    """Mean negative log-likelihood of the tokens of each text, in nats (Compactor, Sec. 3.5, with an empty context).

    NLL(c) = - mean over i >= 1 of log p(ids_i | ids_<i).  The first token has no prediction and does not count; neither
    does padding, on either side. A text with fewer than two tokens has 0.

    Args:
        hidden: [B, N, H], what the language-model head reads, of every position.
        ids: [B, N] tokens.  head: hidden states [..., H] to logits [..., V].
        softcap: of the final logits (Gemma 2), or None.
        mask: [B, N], nonzero for tokens, zero for padding; None if there is none.
        chunk: rows of logits that exist at once, at least one for each text.

    Returns: [B] fp64.  Cost: one head product per position, chunk * V logits in memory, no host sync.
    """
    rows, length = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    counted = real[:, 1:] & real[:, :-1]
    total = torch.zeros(rows, dtype=torch.float64, device=hidden.device)
    step = max(1, chunk // max(rows, 1))
    for start in range(0, length - 1, step):
        end = min(start + step, length - 1)
        logits = head(hidden[:, start:end])
        logits = softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
        said = logits.gather(-1, ids[:, start + 1 : end + 1, None].to(logits.device))[..., 0]
        missed = logits.logsumexp(-1) - said
        missed = torch.where(counted[:, start:end].to(missed.device), missed, 0.0)
        total += missed.double().sum(1).to(total.device)  # the head may be on another device
    return total / counted.sum(1).clamp(min=1).to(total.device)


@dataclass(frozen=True)
class QualityCurve:
    """The fitted curve of one model and policy.

    Attributes:
        alpha, beta: steepness k = alpha * NLL + beta, NLL in nats per token of the context.
        policy: name.  fingerprint: of the model's config.  model: the same in words.
        triples: number of measurements behind the fit.
        residual: root mean square of measured minus fitted quality.
    """

    alpha: float
    beta: float
    policy: str
    fingerprint: str
    model: str
    triples: int
    residual: float

    def steepness(self, nll: float | Tensor) -> Tensor:
        """k for contexts of mean token negative log-likelihood `nll`; fp64, same shape."""
        return self.alpha * torch.as_tensor(nll, dtype=torch.float64) + self.beta

    def keep(self, quality: float, nll: float | Tensor) -> Tensor:
        """Share of each context to keep for `quality` in [0, 1]; fp64, same shape as `nll`, no host sync."""
        return keep_for(quality, self.steepness(nll))

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any, policy: str) -> QualityCurve:
        """The curve of `policy` for the model with this transformers `config`.

        Raises: FastKVError for a file that is not one, of a later format, of another model, or without the policy.
        """
        curves = curves_in(Path(path))
        fitted = next(iter(curves.values()))
        check_fitted(path, fitted.fingerprint, fitted.model, config, "context")
        if policy not in curves:
            raise FastKVError(
                f"{path} has no curve for policy {policy!r}, only for {', '.join(sorted(curves))}; run fastkv "
                f"calibrate context --policies {policy}"
            )
        return curves[policy]


def save_curves(path: str | os.PathLike[str], curves: Iterable[QualityCurve]) -> None:
    """Write curves of one model, whole or not at all; those of other policies that the file already holds stay in it.

    Raises: FastKVError for curves of several models, or for a file that holds something else or cannot be written.
    """
    path = Path(path)
    merged = {**(curves_in(path) if path.exists() else {}), **{curve.policy: curve for curve in curves}}
    models = {curve.fingerprint: curve.model for curve in merged.values()}
    if len(models) != 1:
        raise FastKVError(
            f"{path} must hold curves of one model, got {' and '.join(sorted(models.values())) or 'none'}; write each "
            "model's curves to a file of its own"
        )
    ((shape, model),) = models.items()
    entries = {policy: {name: getattr(merged[policy], name) for name in NUMBERS} for policy in sorted(merged)}
    content = {"format": FORMAT, "version": VERSION, "fingerprint": shape, "model": model, "curves": entries}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def curves_in(path: Path) -> dict[str, QualityCurve]:
    """All curves of a file, by policy; at least one. Raises FastKVError for whatever is not such a file."""
    again = "delete it and run fastkv calibrate context"
    try:
        content = header_of(path, path.read_text(encoding="utf-8", errors="replace"), VERSION)
    except FileNotFoundError:
        raise FastKVError(f"there is no calibration file {path}; make one with fastkv calibrate context") from None
    except OSError as error:
        raise FastKVError(f"cannot read the calibration file {path} ({error.strerror}); check the path") from error
    if content.get("format") != FORMAT:
        raise FastKVError(f"{path} must be a context calibration, got something else; {again}")
    try:
        shared = {name: content[name] for name in ("fingerprint", "model")}
        curves = {policy: _curve({**entry, "policy": policy, **shared}) for policy, entry in content["curves"].items()}
    except (KeyError, TypeError, AttributeError):
        curves = {}
    if not curves:
        raise FastKVError(f"{path} must be JSON with curves and their numbers, got something damaged; {again}")
    return curves


def _curve(values: dict[str, Any]) -> QualityCurve:
    """One entry of a file. Raises KeyError or TypeError for whatever is not one."""
    texts, numbers = ([values[name] for name in names] for names in (TEXTS, NUMBERS))
    if not all(isinstance(one, str) for one in texts) or not all(is_number(one, -FINITE, FINITE) for one in numbers):
        raise TypeError("a number is not finite, or something is of another type")
    return QualityCurve(**{name: values[name] for name in (*TEXTS, *NUMBERS)})
