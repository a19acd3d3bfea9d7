"""GRKV: keep what SnapKV keeps, and spread what the others gave to attention over its values."""

from __future__ import annotations

from dataclasses import dataclass

from .snapkv import SnapKV


@dataclass(frozen=True)
class GRKV(SnapKV):
    """The score of SnapKV; its correction, "ridge", refits the values of what stays to the attention of the window.

    Source: GRKV, Peng et al. 2026, arXiv:2605.31105. The paper merges after any eviction method, SnapKV and CriticalKV
    among them: `patch(model, "criticalkv", correction="ridge")`. Its pool is 5; here it is SnapKV's, so that the two
    policies differ in nothing but the merging.

    Args:
        window: observation window of the score, queries; the regression has its own, of 32.
        pool: odd width of the average pooling.
    """

    name = "grkv"
    correction = "ridge"
