"""GRKV's merging: what evicted tokens gave to attention is spread over the values of those that stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import compute_dtype


@dataclass(frozen=True)
class Ridge:
    """V <- V + A^T (A A^T + penalty I)^-1 (O - A' V): ridge regression of full attention on what stays.

    O is the attention of the last queries of a prompt block, of all heads of a group, over all candidates; A' are their
    weights over the candidates that stay, and A those of tokens whose values may change. Protected tokens and the share
    with the best scores, the anchors, keep theirs. Attention then costs what it costs without a correction, and nothing
    is remembered; what leaves while tokens are generated is not merged.

    Source: GRKV, Peng et al. 2026, arXiv:2605.31105, the step for values. The paper also moves keys, by a linearised
    step: here they stay, because their positions do.

    Attributes: queries: the last so many of a block are looked at.  anchors: share of the tokens that stay.  penalty:
        of the change.
    """

    queries: int = 32
    anchors: float = 0.1
    penalty: float = 0.01

    def refitted(self, values: Tensor, full: Tensor, rest: Tensor, free: Tensor) -> Tensor:
        """The values [B, Hkv, N, Dv] of candidates after an eviction from them, by one step of the regression.

        Args: full, rest [B, Hkv, Q, N]: attention of Q queries over all candidates, and over those that stay.  free
            [B, Hkv, N] bool: whose values may change.
        """
        exact = values.to(compute_dtype(values))
        missing = (full - rest) @ exact
        weights = torch.where(free[:, :, None], rest, 0)
        gram = weights.double() @ weights.double().transpose(-1, -2)  # queries may be nearly alike
        gram.diagonal(dim1=-2, dim2=-1).add_(self.penalty)
        shares = torch.linalg.solve_ex(gram, missing.double()).result.to(exact.dtype)  # waits for no device
        return (exact + weights.transpose(-1, -2) @ shares).to(values.dtype)
