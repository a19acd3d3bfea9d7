"""Corrections: what a layer remembers of evicted tokens, and what that adds to attention. Their kinds are moments,
centroids, VECTOR, whose tokens may keep their key only, and values and biases of what stays (Attention Matching).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .budget import LayerCost
from .errors import FastKVError, is_number, is_whole
from .reference import PLAIN, Centroids, Evicted, LayerState, SlotFormat, Spec, compute_dtype
from .reference.attention import QUERY_CHUNK, grouped_logits, masked_softmax

__all__ = ["ALL", "NONE", "Correction", "Matching", "Pairs", "Shape", "get", "names", "reading"]

MEANS = torch.bfloat16  # of their keys and values, whatever the model computes in
LEAST = 4  # centroids of a head
DESCENT = 100  # steps for the weights of `Matching`, from the solution without bounds
STEPS = 64  # of the share: what a layer costs is measured at numbers of tokens that are multiples of it


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer's keys and values, per sequence.

    Attributes: heads: KV heads of this process.  key_dim, value_dim: numbers of a key and a value.  itemsize: bytes of
        one of them in the model's dtype.  latent: whether values are the first numbers of keys and cost nothing.
        format: how they are stored.
    """

    heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    latent: bool = False
    format: SlotFormat = PLAIN

    @property
    def pair(self) -> int:
        """Bytes of a key and its value in the model's dtype; in 2-byte numbers where slots hold codes, which take as
        many bytes whatever the model computes in.
        """
        numbers = self.key_dim if self.latent else self.key_dim + self.value_dim
        return numbers * (self.itemsize if self.format.plain else 2)

    @property
    def centroid(self) -> int:
        """Bytes of a centroid: mean key and mean value in bf16, count and spread in fp32."""
        return MEANS.itemsize * (self.key_dim + self.value_dim) + 8


@dataclass(frozen=True)
class Correction:
    """Mixes in the moments of its order, or nothing; base of all corrections.

    Attributes:
        name: what `fastkv.patch(..., correction=name)` calls it.
        order: of the moments that it reads: 1, 0 (means only) or None.
        kind: of what `empty` makes, as `Evicted.kinds` calls it; None for nothing.
        match: fits values and biases of what stays to a second reading of the prompt; None without.
        options: fields that `corrections.get` may be given; what attention mixes in depends on none of them.
        key_only: whether some tokens keep their key only and need `recovery` of their values.
    """

    name: str = "none"
    order: int | None = None
    kind: str | None = None
    match: Matching | None = None
    options: ClassVar[tuple[str, ...]] = ()
    key_only: ClassVar[bool] = False

    def evicted(self, state: LayerState) -> Evicted | None:
        """What of the state is mixed into attention for the evicted tokens: what `empty` made, or the moments, without
        what a policy alone wants of them; None for nothing."""
        return state.parts if self.kind else state.moments.upto(self.order)

    def empty(self, batch: int, shape: Shape, tokens: int, device: torch.device) -> Evicted | None:
        """What is remembered besides moments, of no tokens yet; None for nothing.

        Args: tokens: that the layer keeps per KV head.
        """
        return None

    def cost(self, shape: Shape, pairs: LayerCost) -> LayerCost:
        """Bytes of a layer's state, from those without what `empty` makes."""
        return pairs

    def split(
        self, shares: tuple[int, ...], tokens: int, reserved: int, keep: float | None, usable: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that each KV head keeps with value, and without; the latter empty where none does.

        Args: shares: pairs that there is room for in each head, `tokens` on average.  reserved: of them always stay
            pairs.  keep: share of the prompt that stays, where that is known.  usable: of each head, whether values can
            be recovered.
        """
        return shares, ()


# MomentKV, arXiv:2606.01563, Eqs. 9, 11 and 12; `reference.moment_estimate`.
MEAN = Correction("mean", order=0)
MOMENTS = Correction("moments", order=1)


@dataclass(frozen=True)
class CentroidCorrection(Correction):
    """Mixes in what a few weighted pairs say (`reference.centroid_estimate`), in a sixteenth of the bytes that those
    which stay would take in 16 bits. How many the evicted need depends on what was evicted, not on how finely the
    others are stored.

    Attributes: share: centroids take one byte where pairs take so many (`Shape.pair`).
    """

    name: str = "centroids"
    kind: str | None = "centroids"
    share: int = 16
    options: ClassVar[tuple[str, ...]] = ("share",)

    def __post_init__(self) -> None:
        if not is_whole(self.share, 1):
            raise FastKVError(f"centroids: share must be a whole number of at least 1, got {self.share!r}; 16 is usual")

    def empty(self, batch: int, shape: Shape, tokens: int, device: torch.device) -> Evicted | None:
        """Unused centroids, equally many for all heads."""
        num = max(tokens * shape.pair // (self.share * shape.centroid), LEAST)
        return Centroids.empty(batch, shape.heads, num, shape.key_dim, shape.value_dim, device, MEANS)

    def cost(self, shape: Shape, pairs: LayerCost) -> LayerCost:
        """With the centroids, which come whole."""
        part = shape.heads * shape.centroid
        return replace(pairs, sketch=shape.heads * shape.pair / self.share, part=part, least=LEAST * part)


CENTROIDS = CentroidCorrection()


@dataclass(frozen=True)
class VectorCorrection(Correction):
    """VECTOR (arXiv:2605.23258, Sec. 3.2): two tokens may keep their key only, in the room of one pair; a linear map
    recovers their values. For evicted tokens, what the moments of its order add.

    Attributes: share: of the pairs that there is room for, those that two keys each take the place of, in steps of
        1/64: p_a / (1 - p_c) in the paper, 1/2 by its Eq. 1 where no more than half of the prompt stays.
    """

    share: float = 0.5
    options: ClassVar[tuple[str, ...]] = ("share",)
    key_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_number(self.share, 0, 1):
            raise FastKVError(
                f"{self.name}: share must be in [0, 1], got {self.share!r}; 0.5 is the paper's at strong compression"
            )

    def split(
        self, shares: tuple[int, ...], tokens: int, reserved: int, keep: float | None, usable: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two keys in the place of each pair that gives its value up, in heads whose values can be recovered."""
        alike, approx = len(set(shares)) == 1, []
        for number, recovers in zip(shares, usable):
            own = keep if keep is None or alike else min(keep * number / tokens, 1.0)
            approx.append(key_only(number, reserved, own, self.share) if recovers else 0)
        pairs = tuple(number - extra // 2 for number, extra in zip(shares, approx))
        return pairs, tuple(approx) if any(approx) else ()


def key_only(tokens: int, reserved: int, keep: float | None, share: float) -> int:
    """How many tokens keep only their key where `tokens` pairs fit; two of them take the room of one pair.

    With removal ratio p_c = 1 - keep, p_a = min(p_c / 2, share (1 - p_c)) pairs of every prompt token become 2 p_a keys
    (VECTOR, Sec. 4, Eq. 1, with share = 1/2). Where `keep` is not known, the prompt is taken to be long. Protected
    tokens stay pairs.
    """
    pairs = tokens * round(STEPS * share) // STEPS
    if keep is not None:
        pairs = min(pairs, math.floor(round(tokens * (1 - keep) / (2 * keep), 6)))
    return 2 * max(min(pairs, tokens - max(reserved, 1)), 0)


VECTOR = VectorCorrection("vector")
VECTOR_MEAN = VectorCorrection("vector+mean", order=0)
VECTOR_MOMENTS = VectorCorrection("vector+moments", order=1)


@dataclass(frozen=True)
class Pairs:
    """Tokens to be matched.

    Attributes: keys [B, Hkv, N, D]; values [B, Hkv, N, Dv]; matched [B, Hkv, N] bool: which of them take part.
    """

    keys: Tensor
    values: Tensor
    matched: Tensor


@dataclass(frozen=True)
class Matching:
    """Mass, then attention of reference queries i over the candidates j of a prompt, matched by the kept ones c.

        w = argmin over e^-3 <= w <= e^3 of sum_i (sum_c M_ic w_c - z_i)^2 + penalty sum_c (M^T M)_cc (w_c - 1)^2,
        M_ic = exp(s q_i . k_c - t_i),  z_i = sum_j exp(s q_i . k_j - t_i),  t_i = max_j s q_i . k_j;  beta_c = log w_c
        V <- V + (X^T X + penalty d I)^-1 X^T (Y - X V),  X = softmax_c(s q . k_c + beta_c),  d = mean diag X^T X

    Y is the attention of the queries over all candidates. Protected tokens are part of neither side and stay as they
    are, with the bias 0: if mass and attention of the others are met, so are those of all. What leaves while tokens are
    generated is not matched.

    Source: Attention Matching, Zweiger et al. 2026, arXiv:2602.16284, non-negative least squares for the biases and
    least squares for the values; bounds are those of its code for keys chosen by attention. The paper has no penalty,
    so that both problems have no single solution if there are fewer queries than kept tokens.

    Attributes: bounds: of a bias.  penalty: of changes.
    """

    bounds: tuple[float, float] = (-3.0, 3.0)
    penalty: float = 0.01

    def matched(self, q: Tensor, asked: Tensor, candidates: Pairs, kept: Pairs, spec: Spec) -> tuple[Tensor, Tensor]:
        """Biases [B, Hkv, L] and values [B, Hkv, L, Dv] of what is kept of a prompt that was read twice.

        By two least squares problems; results in fp32, for fp64 inputs in fp64.

        Args: q [B, Hq, W, D] and asked [B, W] bool, some of the queries of the second reading; candidates: the N tokens
            of the prompt, and kept: L of them, which change where they are matched; spec: how the layer attends.
        """
        free, values = kept.matched, kept.values.to(compute_dtype(q))
        match = candidates.matched[:, :, None, None]

        def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            """M [B, Hkv, n, L], z [B, Hkv, n, 1] and Y [B, Hkv, n, Dv] of some queries, zero for none."""
            for some, real in zip(q.split(QUERY_CHUNK, 2), asked.split(QUERY_CHUNK, 1)):
                real = real[:, None, None, :, None]
                logits = grouped_logits(some, candidates.keys, spec.scale, spec.softcap)
                weights, mass = masked_softmax(logits, match & real)
                top = logits.masked_fill(~match, torch.finfo(logits.dtype).min).amax(-1)
                own = (grouped_logits(some, kept.keys, spec.scale, spec.softcap) - top[..., None]).exp()
                own = torch.where(free[:, :, None, None] & real, own, 0)
                full = weights @ candidates.values.to(weights.dtype)[:, :, None]
                yield tuple(rows.flatten(2, 3) for rows in (own, (mass - top).exp()[..., None], full))  # type: ignore[misc]

        w = self._weights(*_normal_equations((own, mass) for own, mass, _ in parts()), free)

        def rest() -> Iterator[tuple[Tensor, Tensor]]:
            for own, _, full in parts():
                x = own * w.to(own.dtype)[:, :, None]
                x = x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
                yield x, full - x @ values

        gram, missing = _normal_equations(rest())
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp(min=1)
        diagonal.add_(torch.where(free, self.penalty * mean, 1.0))
        change = torch.linalg.solve_ex(gram, missing).result  # waits for no device
        return w.log().to(values.dtype), values + torch.where(free[..., None], change, 0).to(values.dtype)

    def _weights(self, gram: Tensor, mass: Tensor, free: Tensor) -> Tensor:
        """w [B, Hkv, L] from M^T M and M^T z: projected gradients with momentum, columns of length 1. 1 if not free."""
        length = torch.where(free, gram.diagonal(dim1=-2, dim2=-1), 1).clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
        gram = gram / (length[..., None] * length[..., None, :])
        gram.diagonal(dim1=-2, dim2=-1).fill_(1 + self.penalty)
        wanted = mass / length[..., None] + self.penalty * length[..., None]
        low, high = (torch.full_like(length, bound).exp()[..., None] * length[..., None] for bound in self.bounds)
        step = 1 / gram.sum(-1).amax(-1)[..., None, None]  # entries are not negative: at least the largest eigenvalue
        now = ahead = torch.linalg.solve_ex(gram, wanted).result.clamp(low, high)
        age = torch.zeros_like(step)
        for _ in range(DESCENT):
            last, now = now, (ahead + step * (wanted - gram @ ahead)).clamp(low, high)
            uphill = ((ahead - now) * (now - last)).sum(2, keepdim=True) > 0
            age = torch.where(uphill, 0, age + 1)  # steps since momentum was last given up
            ahead = now + age / (age + 3) * (now - last)
        return torch.where(free, now[..., 0] / length, 1)


def _normal_equations(parts: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A^T A [B, Hkv, L, L] and A^T b [B, Hkv, L, m] in float64, of rows A [B, Hkv, n, L] and b [B, Hkv, n, m]."""
    gram = right = torch.zeros((), dtype=torch.float64, device="cpu")  # joins tensors of any device
    for rows, wanted in parts:
        turned = rows.double().transpose(-1, -2)
        gram, right = gram + turned @ rows.double(), right + turned @ wanted.double()
    return gram, right


NONE = Correction()
MATCHING = Correction("matching", match=Matching())
ALL = (NONE, MEAN, MOMENTS, CENTROIDS, MATCHING, VECTOR, VECTOR_MEAN, VECTOR_MOMENTS)


def names() -> list[str]:
    """The names that `fastkv.patch(..., correction=...)` accepts besides "auto", which is the policy's own."""
    return [correction.name for correction in ALL]


def get(name: str | bool | Correction | None, **options: Any) -> Correction:
    """The correction called `name`, with the given options; "centroids:64" is "centroids" with share=64.

    True is "moments"; False and None are "none"; a Correction is returned as it is.

    Raises: FastKVError for an unknown name or option.
    """
    if isinstance(name, Correction):
        return name
    if name is None or isinstance(name, bool):
        name = "moments" if name else "none"
    name, _, share = name.partition(":") if isinstance(name, str) else (name, "", "")
    if share:
        with suppress(ValueError):  # the correction says what it expected
            options["share"] = share
            options["share"] = float(share) if "." in share else int(share)
    found = next((correction for correction in ALL if correction.name == name), None)
    if found is None:
        raise FastKVError(f"correction must be one of auto, {', '.join(names())}, got {name!r}")
    unknown = sorted(options.keys() - set(found.options))
    if unknown:
        known = ", ".join(found.options) or "none"
        raise FastKVError(f"correction {name!r} has no option {', '.join(unknown)}; it has {known}")
    return replace(found, **options) if options else found


def reading(state: LayerState, order: int | None) -> Correction:
    """The correction that mixes in what a state knows of evicted tokens, of moments no more than this order."""
    if state.parts is not None:
        return next(one for one in ALL if one.kind == state.parts.kind)
    known = state.moments.order
    wanted = None if order is None or known is None else min(order, known)
    return next(one for one in ALL if (one.order, one.kind) == (wanted, None))
