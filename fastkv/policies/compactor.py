"""Compactor: attention without a query in mind, blended with the leverage of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import FastKVError
from ..reference import check_leverage, check_pool, known_or_mean, neighbour_mean
from .base import Policy, Signals, check_at_least, check_within


@dataclass(frozen=True)
class NonCausal(Policy):
    """score_i = mean over neighbours j of |v_j| a_j, a_j the attention that token j gets from its chunk, tokens before
    and after it alike: a_j = sum_q softmax(q . k)_j.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.3, Eq. 5, pooled as in the authors' code. As
    there, logits are not divided by the root of the head's size: on real weights with calibrated heads, answers and
    text then stay much closer to the full cache's than with the layer's own scale, which is an option. With uniform
    heads `values_first=False` stays closer. Chunks do not reach across prompt blocks, and a shorter
    last chunk has neither padded rows nor padded columns. Pooling averages over real neighbours only, so the ends are
    not favoured. The score of a prompt token is computed once, with its block, and stored. Generated tokens have
    none and get the mean of the others.

    Args:
        chunk: tokens that attend to each other.
        pool: odd width of the mean pooling; the paper names none.
        scaled: whether logits are multiplied by the layer's own scale, then bent by its soft-cap and joined by its
            sinks.
        values_first: whether the length of the values is pooled with the attention; else each token's own length
            multiplies what was pooled.
    """

    name = "noncausal"
    needs = frozenset({"queries", "memory"})

    chunk: int = 256
    pool: int = 3
    scaled: bool = False
    values_first: bool = True

    def __post_init__(self) -> None:
        check_at_least(self, chunk=1, pool=1)
        check_pool(self.pool)

    def remember(self, signals: Signals) -> Tensor:
        """The score of each token of a prompt block; 0, which no known score is, for generated tokens."""
        assert signals.memory is not None
        if signals.queries is None:
            return signals.memory
        start = signals.keys.shape[2] - signals.queries.shape[2]
        valid = signals.valid[:, :, start:].contiguous()
        keys, positions = signals.keys[:, :, start:], signals.positions[:, :, start:]
        layer = signals.layer
        # A soft-cap and sinks belong to scaled logits.
        scale, softcap, sinks = (layer.scale, layer.softcap, layer.sink_logits) if self.scaled else (1.0, None, None)
        given = signals.queries, keys, scale, self.chunk
        rest = {"softcap": softcap, "sink_logits": sinks, "mask": valid, "backend": layer.backend}
        mass = ops.noncausal_attention_mass(*given, **rest)
        length = torch.linalg.vector_norm(signals.values[:, :, start:].float(), dim=-1)
        first, last = (length, 1.0) if self.values_first else (1.0, length)
        score = (neighbour_mean(mass * first, self.pool, positions, valid) * last).float()
        known = score.clamp(min=torch.finfo(torch.float32).tiny)  # also where the value is zero
        return torch.cat([signals.memory[:, :, :start], torch.where(valid, known, 0)], 2)

    def score(self, signals: Signals) -> Tensor:
        """The remembered score; where there is none, the mean of those that the head remembers."""
        assert signals.memory is not None
        return known_or_mean(signals.memory, signals.valid)


LARGEST_SKETCH = 128  # columns that the leverage kernel holds on chip


@dataclass(frozen=True)
class Leverage(Policy):
    """score_i = |U_i|^2, U an orthonormal basis of the column space of K Phi: keys before the rotation, sketched.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.2, Alg. 1; its appendices for other methods.

    Args:
        sketch: columns of the Gaussian sketch Phi; None, or no fewer than the head size, for the keys themselves.
        method: "cholesky", "qr", "svd", "eig" (eigenvectors of the Gram matrix, Alg. 1 and App. C), "exact" (SVD of the
            keys, no sketch) or "srht" (Hadamard sketch, Cholesky).
        seed: of the sketch, which all heads and layers share.
        centred: whether the mean key is subtracted first, as in the authors' later code; the paper does not.
    """

    name = "leverage"
    needs = frozenset({"pre_rope"})

    sketch: int | None = 64
    method: str = "cholesky"
    seed: int = 0
    centred: bool = False

    def __post_init__(self) -> None:
        if self.sketch is not None:
            check_at_least(self, sketch=1)
        check_at_least(self, seed=0)
        check_leverage(self.sketch, self.method)
        if self.sketch is not None and self.sketch > LARGEST_SKETCH and self.method in ("cholesky", "srht"):
            raise FastKVError(
                f"{self.name}: sketch must be at most {LARGEST_SKETCH} columns for method {self.method!r}, got "
                f"{self.sketch}; pass None for unsketched keys, or method='qr'"
            )

    @property
    def waits(self) -> bool:  # type: ignore[override]
        """Whether torch's decomposition of this method does."""
        return self.method not in ("cholesky", "srht")

    def score(self, signals: Signals) -> Tensor:
        """Leverage of each key among the cached ones."""
        return ops.leverage_scores(
            signals.pre_rope_keys,
            self.sketch,
            self.method,
            self.seed,
            mask=signals.valid,
            centre=self.centred,
            backend=signals.layer.backend,
        )


@dataclass(frozen=True)
class Compactor(NonCausal, Leverage):
    """score = z(a) + blend z(o): a the non-causal attention of `NonCausal`, o the leverage of `Leverage`.

    Source: Compactor, Chari and Van Durme 2025, arXiv:2507.08143, Sec. 3.4, Eq. 6. Each z is over the cached tokens of
    one head of one sequence; where all tokens are equal it is 0.

    Args:
        chunk: tokens that attend to each other.
        pool: odd width of the mean pooling of the attention.
        scaled: whether its logits are multiplied by the layer's own scale, see `NonCausal`.
        values_first: whether the length of the values is pooled with it, see `NonCausal`.
        blend: weight of the leverage, lambda in the paper (0.35 in its Table 2).
        sketch: columns of the Gaussian sketch; None for no sketch.
        method: how leverage is computed, see `Leverage`.
        seed: of the sketch.
        centred: whether leverage is that of keys less their mean.
    """

    name = "compactor"
    needs = NonCausal.needs | Leverage.needs

    blend: float = 0.3

    def __post_init__(self) -> None:
        NonCausal.__post_init__(self)
        Leverage.__post_init__(self)
        check_within(self, 0, blend=0.3)

    def score(self, signals: Signals) -> Tensor:
        """Blend of the two z-scores."""
        attention, leverage = NonCausal.score(self, signals), Leverage.score(self, signals)
        both = ops.z_scores(torch.stack([attention, leverage]), signals.valid, backend=signals.layer.backend)
        return both[0] + self.blend * both[1]
