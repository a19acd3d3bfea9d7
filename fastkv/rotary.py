"""Rotary embedding, undone: keys are cached rotated to their positions, some methods need them as they were before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """How one layer turns its keys: R dimensions of a head in R/2 pairs, each by its own angle per position.

    Two layers that turn alike share one object, so that they share its tables. A layer that does not turn its keys has
    frequencies of zero.

    Attributes:
        frequencies: [R/2] fp32, radians per position.
        scaling: factor on cos and sin (YaRN), 1 otherwise.
        interleaved: pair dimension 2i with 2i + 1 (Cohere, GLM) instead of i with i + R/2 (Llama).
        start: first of the dimensions that are turned; negative counts from the end of the head. The others stay.
    """

    frequencies: Tensor
    scaling: float = 1.0
    interleaved: bool = False
    start: int = 0

    def to(self, device: torch.device) -> Rotary:
        """The same on another device."""
        return self if self.frequencies.device == device else replace(self, frequencies=self.frequencies.to(device))

    @property
    def size(self) -> int:
        """How many dimensions are turned, R."""
        return 2 * self.frequencies.numel()

    def halves(self, dim: int) -> bool:
        """Whether dimension i is paired with i + dim/2 over a whole head of `dim`, as kernels read `table`."""
        return not self.interleaved and self.start == 0 and self.size == dim

    def table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, divided by the scaling, for positions 0 to length - 1: both [length, R/2] fp32."""
        cos, sin = self.turn(torch.arange(length, device=self.frequencies.device))
        return cos / self.scaling, sin / self.scaling

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, Hkv, N, D] as they were before the embedding turned them to `positions` [B, Hkv, N]; same dtype."""
        cos, sin = self.turn(positions)
        if self.scaling != 1:
            cos, sin = cos / self.scaling, sin / self.scaling
        return self.turned(keys, cos, -sin)

    def ahead(self, vectors: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        """Mean over `offsets` [O] of what the embedding makes of vectors [B, H, N, D] at `positions` + offset.

        Args: positions: int, broadcast to [B, H, N].
        """
        return self.turned(vectors, *self.turn_ahead(positions, offsets))

    def turn_ahead(self, positions: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean turn of `ahead`, for `turned`: cos and sin, times the scaling."""
        cos, sin = self.turn(positions[..., None] + offsets)
        return cos.mean(-2) * self.scaling, sin.mean(-2) * self.scaling

    def radius(self, keys: Tensor) -> Tensor:
        """What turning leaves as it is, of each dimension of keys [..., D]: the length of its pair, fp32."""
        before, (first, second), after = self._split(keys)
        length = torch.hypot(first, second)
        return torch.cat([before.float().abs(), self._joined(length, length), after.float().abs()], -1)

    def lengths(self, vectors: Tensor) -> Tensor:
        """Length of each pair of vectors [..., D], then what is not turned without its sign: [..., D - R/2] fp32."""
        before, pair, after = self._split(vectors)
        return torch.cat([torch.hypot(*pair), before.float().abs(), after.float().abs()], -1)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., R/2] fp32 of the angles at positions [...], without the scaling."""
        angle = positions[..., None].float() * self.frequencies
        return angle.cos(), angle.sin()

    def turned(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Vectors with each pair turned by an angle of which cos and sin are given."""
        # Queries come with tokens before heads: on such strides operators take several times as long as a copy.
        before, (first, second), after = self._split(vectors.contiguous())
        turned = self._joined((first * cos).sub_(second * sin), (second * cos).add_(first * sin)).to(vectors.dtype)
        return torch.cat([before, turned, after], -1) if self.size < vectors.shape[-1] else turned

    def _split(self, keys: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """What comes before the turned dimensions, the two members of each pair in fp32, what comes after."""
        start = self.start % keys.shape[-1]
        before, turned, after = keys.tensor_split([start, start + self.size], -1)
        turned = turned.float()
        pairs = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.tensor_split(2, -1)
        return before, (pairs[0], pairs[1]), after

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], -1).flatten(-2) if self.interleaved else torch.cat([first, second], -1)
