"""Attention Matching: biases and values of what stays, fitted to the attention of a second reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import Spec
from ..reference.attention import QUERY_CHUNK, grouped_logits, masked_softmax
from ..reference.moments import compute_dtype

STEPS = 100  # of the descent for the weights, from the solution without bounds


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
        for _ in range(STEPS):
            last, now = now, (ahead + step * (wanted - gram @ ahead)).clamp(low, high)
            uphill = ((ahead - now) * (now - last)).sum(2, keepdim=True) > 0
            age = torch.where(uphill, 0, age + 1)  # steps since momentum was last given up
            ahead = now + age / (age + 3) * (now - last)
        return torch.where(free, now[..., 0] / length, 1)


def _normal_equations(parts: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A^T A [B, Hkv, L, L] and A^T b [B, Hkv, L, m] in float64, of rows A [B, Hkv, n, L] and b [B, Hkv, n, m]."""
    gram = right = torch.zeros((), dtype=torch.float64)
    for rows, wanted in parts:
        turned = rows.double().transpose(-1, -2)
        gram, right = gram + turned @ rows.double(), right + turned @ wanted.double()
    return gram, right
