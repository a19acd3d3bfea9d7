"""PyramidKV: SnapKV with budgets that shrink from the first layer to the last."""

from __future__ import annotations

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """The score of SnapKV; layer budgets fall linearly from first to last, with the same total.

    Source: PyramidKV, Cai et al. 2024, arXiv:2406.02069. Where the budget says `layers="uniform"` this policy brings
    "pyramid", whose last layer gets a twentieth of the average (beta = 20); any other choice of layers is left alone.

    Args:
        window: observation window, queries; these tokens are themselves kept by `Budget.recent`.
        pool: odd width of the average pooling.
    """

    name = "pyramidkv"
    layers = "pyramid"
