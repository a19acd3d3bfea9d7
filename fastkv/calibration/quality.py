"""Context-calibrated compression: how much of a context a wanted quality needs, and the file of fitted curves.

A curve says which share of the full cache's quality is left if a share r of the context is kept (Compactor, Sec. 3.5):

    f(r) = expm1(k r) / expm1(k),   k = alpha * NLL(c) + beta

It goes from f(0) = 0 to f(1) = 1 and is convex for k > 0, where every evicted token hurts, the straight line for k = 0,
and concave for k < 0, where a few tokens carry everything. The paper asks for the largest r with f(r) >= quality; since
f grows, that is always 1, and the smallest is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FastKVError
from ..reference.attention import softcapped
from .files import check_fitted, header_of, replace_file

FORMAT = "fastkv context calibration"
VERSION = 1
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("alpha", "beta", "triples", "residual"), (int, float)),
    **dict.fromkeys(("policy", "fingerprint", "model"), (str,)),
}
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
        said = logits.gather(-1, ids[:, start + 1 : end + 1, None])[..., 0]
        missed = logits.logsumexp(-1) - said
        total += torch.where(counted[:, start:end], missed, 0.0).double().sum(1)
    return total / counted.sum(1).clamp(min=1)


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


def save(path: str | Path, curves: Iterable[QualityCurve]) -> None:
    """Write curves of one model, whole or not at all; those of other policies that the file already holds stay in it.

    Raises: FastKVError for curves of several models, or for a file that holds something else or cannot be written.
    """
    path = Path(path)
    merged = {**(_read(path) if path.exists() else {}), **{curve.policy: curve for curve in curves}}
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


def load(path: str | Path, config: Any, policy: str) -> QualityCurve:
    """The curve of `policy` for the model with this transformers `config`.

    Raises: FastKVError for a file that is not one, of a later format, of another model, or without the policy.
    """
    curves = _read(Path(path))
    fitted = next(iter(curves.values()))
    check_fitted(path, fitted.fingerprint, fitted.model, config, "context")
    if policy not in curves:
        raise FastKVError(
            f"{path} has no curve for policy {policy!r}, only for {', '.join(sorted(curves))}; run fastkv calibrate "
            f"context --policies {policy}"
        )
    return curves[policy]


def _read(path: Path) -> dict[str, QualityCurve]:
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
    for name, kinds in KINDS.items():
        if type(values[name]) not in kinds or (float in kinds and not math.isfinite(values[name])):
            raise TypeError(f"{name} is not finite or of another type")
    return QualityCurve(**{name: values[name] for name in KINDS})
