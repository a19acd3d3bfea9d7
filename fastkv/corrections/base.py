"""What a correction is: what a layer remembers of the tokens it evicted, and what that adds to attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..budget import LayerCost
from ..reference import PLAIN, Evicted, LayerState, SlotFormat
from .matching import Matching


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


@dataclass(frozen=True)
class Correction:
    """Nothing is remembered but how many tokens were evicted, and nothing is added; base of all corrections.

    Attributes:
        name: what `fastkv.patch(..., correction=name)` calls it.
        order: of the moments that it reads: 1, 0 (means only) or None.
        kind: of what `empty` makes, as `Evicted.kinds` calls it; None for nothing.
        match: fits values and biases of what stays to a second reading of the prompt; None without.
        options: fields that `corrections.get` may be given; what attention mixes in depends on none of them.
    """

    name: str = "none"
    order: int | None = None
    kind: str | None = None
    match: Matching | None = None
    options: ClassVar[tuple[str, ...]] = ()

    def evicted(self, state: LayerState) -> Evicted | None:
        """What of the state is mixed into attention for the evicted tokens; None for nothing."""
        return None

    def empty(self, batch: int, shape: Shape, tokens: int, device: torch.device) -> Evicted | None:
        """What is remembered besides moments, of no tokens yet; None for nothing.

        Args: tokens: that the layer keeps per KV head.
        """
        return None

    def cost(self, shape: Shape, pairs: LayerCost) -> LayerCost:
        """Bytes of a layer's state, from those without what `empty` makes."""
        return pairs

    @property
    def key_only(self) -> bool:
        """Whether some tokens keep their key only and need `recovery` of their values."""
        return False

    def split(
        self, tokens: int, reserved: int, keep: float | None, usable: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that each KV head keeps with value, and without; the latter empty where none does.

        Args: tokens: pairs that there is room for per head.  reserved: of them always stay pairs.  keep: share of the
            prompt that stays, where that is known.  usable: of each head, whether values can be recovered.
        """
        return (tokens,) * len(usable), ()


@dataclass(frozen=True)
class MomentCorrection(Correction):
    """Mixes in what the moments say (MomentKV, arXiv:2606.01563, Eqs. 9, 11 and 12; `reference.moment_estimate`)."""

    def evicted(self, state: LayerState) -> Evicted | None:
        """The moments, without what a policy alone wants of them."""
        return state.moments.upto(self.order)


MEAN = MomentCorrection("mean", order=0)
MOMENTS = MomentCorrection("moments", order=1)
