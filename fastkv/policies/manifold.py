"""ManifoldKV: keep the keys that are far from the mean key, of the head or of their part of the text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import ops
from ..reference import check_metric, position_order
from .base import Policy, Signals, check_at_least


@dataclass(frozen=True)
class Manifold(Policy):
    """score_i = |k_i - mu|, mu the mean key of the head: unlike a cosine, it also depends on the norm of the key.

    Source: ManifoldKV, Datta et al. 2026, arXiv:2602.08343, Sec. 3.1, Eq. 4.

    Args:
        window: cached tokens, consecutive in the text, that share a mean; None for all of them.
        metric: "l2"; "l1", "linf" and "cosine" are the paper's ablation (Table 7).
    """

    name = "manifold"

    window: int | None = None
    metric: str = "l2"

    def __post_init__(self) -> None:
        if self.window is not None:
            check_at_least(self, window=1)
        check_metric(self.metric, self.window)

    def score(self, signals: Signals) -> Tensor:
        """Distance of each key to the mean of the cached keys of its window."""
        keys, valid, backend = signals.keys, signals.valid, signals.layer.backend
        if self.window is None or self.window >= keys.shape[2]:
            return ops.manifold_scores(keys, None, self.metric, mask=valid, backend=backend)
        order, inverse = position_order(signals.positions, valid)  # windows are cut in the order of the text
        keys, valid = keys.gather(2, order[..., None].expand_as(keys)), valid.gather(2, order)
        return ops.manifold_scores(keys, self.window, self.metric, mask=valid, backend=backend).gather(2, inverse)


@dataclass(frozen=True)
class WindowedManifold(Manifold):
    """ManifoldKV with a mean key per window: over a long text a single mean is close to no token in particular.

    Source: WindowedManifoldKV, Datta et al. 2026, arXiv:2602.08343, Sec. 3.3, Alg. 2. The last window may be shorter;
    selection is global over all windows.

    Args:
        window: cached tokens, consecutive in the text, that share a mean; None for all of them.
        metric: "l2"; "l1", "linf" and "cosine" are the paper's ablation (Table 7).
    """

    name = "manifold-windowed"

    window: int | None = 4096
