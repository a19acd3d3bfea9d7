"""VECTOR: two tokens may keep their key only, in the room of one pair; a linear map recovers their values.

Source: VECTOR, arXiv:2605.23258, Sec. 3.2. What attention adds for evicted tokens is another correction's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import FastKVError
from ..reference import Evicted, LayerState
from .base import MEAN, MOMENTS, Correction

STEPS = 64  # of the share: what a layer costs is measured at numbers of tokens that are multiples of it


@dataclass(frozen=True)
class VectorCorrection(Correction):
    """Tokens without value, and for evicted tokens what `inner` adds.

    Attributes: share: of the pairs that there is room for, those that two keys each take the place of, in steps of
        1/64: p_a / (1 - p_c) in the paper, 1/2 by its Eq. 1 where no more than half of the prompt stays.
    """

    inner: Correction = field(default_factory=Correction)
    share: float = 0.5
    options: ClassVar[tuple[str, ...]] = ("share",)

    def __post_init__(self) -> None:
        number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if not number or not 0 <= self.share <= 1:
            raise FastKVError(
                f"{self.name}: share must be in [0, 1], got {self.share!r}; 0.5 is the paper's at strong compression"
            )

    def evicted(self, state: LayerState) -> Evicted | None:
        """What `inner` mixes in."""
        return self.inner.evicted(state)

    @property
    def key_only(self) -> bool:
        """True."""
        return True

    def split(
        self, tokens: int, reserved: int, keep: float | None, usable: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two keys in the place of each pair that gives its value up, in heads whose values can be recovered."""
        keys = key_only(tokens, reserved, keep, self.share)
        approx = tuple(keys if one else 0 for one in usable)
        return tuple(tokens - extra // 2 for extra in approx), approx if any(approx) else ()


def key_only(tokens: int, reserved: int, keep: float | None, share: float) -> int:
    """How many tokens keep only their key where `tokens` pairs fit; two of them take the room of one pair.

    With removal ratio p_c = 1 - keep, p_a = min(p_c / 2, share (1 - p_c)) pairs of every prompt token become 2 p_a keys
    (VECTOR, Sec. 4, Eq. 1, with share = 1/2). Where `keep` is not known, the prompt is taken to be long. Protected
    tokens stay pairs.
    """
    pairs = tokens * round(STEPS * share) // STEPS
    if keep is not None:
        pairs = min(pairs, math.floor(tokens * (1 - keep) / (2 * keep)))
    return 2 * max(min(pairs, tokens - max(reserved, 1)), 0)


VECTOR = VectorCorrection("vector")
VECTOR_MEAN = VectorCorrection("vector+mean", order=0, inner=MEAN)
VECTOR_MOMENTS = VectorCorrection("vector+moments", order=1, inner=MOMENTS)
