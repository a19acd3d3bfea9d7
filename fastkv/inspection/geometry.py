"""Shape of the keys of one layer, seen as the policies see it: lengths, directions, distances, leverage.

Every function takes one sequence, [Hkv, N, D] in order of position, and answers for each KV head in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference

SHORTEST = 256  # tokens of the shortest prefix that dilution looks at
WINDOW = 4096  # of WindowedManifoldKV
TOP = 0.1  # share of the tokens whose leverage is added up


@dataclass(frozen=True)
class Norms:
    """Of the rows of each head, all [Hkv]: mean norm, standard deviation over mean, largest over mean."""

    mean: Tensor
    spread: Tensor
    peak: Tensor


@dataclass(frozen=True)
class Dilution:
    """How much a centroid still says as the context grows.

    Attributes:
        pull: [P, Hkv], |mean of keys| / mean |key|: 1 if all keys are equal, 0 if they cancel.
        spread: [P, Hkv], standard deviation over mean of the distances |k_i - centroid|: what ManifoldKV ranks by. Near
            0 all tokens are equally far, and the ranking is noise.
    """

    pull: Tensor
    spread: Tensor


def norms(rows: Tensor) -> Norms:
    """Norms of keys or values [Hkv, N, D]; zeros where all rows are zero."""
    length = rows.double().norm(dim=-1)
    mean = length.mean(-1)
    return Norms(mean, _variation(length), length.amax(-1) / _positive(mean))


def anchor_similarity(keys: Tensor, anchor: str = "mean") -> Tensor:
    """Mean cosine of the keys [Hkv, N, D] with their anchor, [Hkv] (KeyDiff, Sec. 3.2).

    anchor: "mean" of the keys, or "normalized_mean", that of their directions (Eq. 8), for which the result is the
    length of that mean, and its square the mean cosine between two keys.
    """
    return -reference.keydiff_scores(keys.double()[None], anchor)[0].mean(-1)


def prefix_lengths(num: int) -> list[int]:
    """256, 512, ... and `num` itself."""
    lengths = []
    length = SHORTEST
    while length < num:
        lengths.append(length)
        length *= 2
    return [*lengths, num]


def window_length(num: int) -> int:
    """Tokens of a window over a context of `num`: the paper's 4096, or a quarter of a shorter context."""
    return max(1, min(WINDOW, num // 4))


def dilution(keys: Tensor, lengths: list[int], window: int | None = None) -> Dilution:
    """Pull and spread of the first n keys of [Hkv, N, D], for each n in `lengths` (ManifoldKV, Sec. 3.2 and App. F).

    The centroid is the mean of the n keys or, given a window, of each `window` of them; the pull is then the mean over
    tokens of the pull of their window, and distances of all windows are compared with each other, as they are ranked.
    """
    keys = keys.double()
    pull, spread = [], []
    for length in lengths:
        prefix = keys[:, :length]
        windows = prefix.split(window or length, dim=1)
        centroids = torch.stack([part.mean(1).norm(dim=-1) * part.shape[1] / length for part in windows]).sum(0)
        pull.append(centroids / _positive(prefix.norm(dim=-1).mean(-1)))
        spread.append(_variation(reference.manifold_scores(prefix[None], window)[0]))
    return Dilution(torch.stack(pull), torch.stack(spread))


def effective_rank(rows: Tensor) -> Tensor:
    """exp of the entropy of the singular values of [Hkv, N, D], scaled to sum to 1; [Hkv] (Roy and Vetterli 2007).

    Between 1 and D; 0 if all rows are zero. Rows are not centred, as in the leverage of Compactor.
    """
    sizes = torch.linalg.svdvals(rows.double())
    total = sizes.sum(-1, keepdim=True)
    return torch.special.entr(sizes / _positive(total)).sum(-1).exp() * (total[:, 0] > 0)


def leverage_share(pre_rope_keys: Tensor, top: float = TOP) -> Tensor:
    """Share of all leverage that the `top` share of the tokens of [Hkv, N, D] holds, [Hkv] (Compactor, Sec. 3.1).

    Exact leverage, no sketch. If every token had the same, the result would be `top`; 0 if all keys are zero.
    """
    scores = reference.leverage_scores(pre_rope_keys.double()[None], method="exact")[0]
    largest = scores.topk(max(1, round(top * scores.shape[-1]))).values.sum(-1)
    return largest / _positive(scores.sum(-1))


def _variation(sizes: Tensor) -> Tensor:
    """Standard deviation over mean along the last dimension; 0 where the mean is 0."""
    return sizes.std(-1, correction=0) / _positive(sizes.mean(-1))


def _positive(number: Tensor) -> Tensor:
    """The number, or the smallest positive one, to divide a zero by."""
    return number.clamp(min=torch.finfo(number.dtype).tiny)
