"""What is remembered of evicted tokens: one interface, whatever it is."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class Evicted:
    """Base of what can be remembered of the evicted tokens of every head: a dataclass of tensors [B, Hkv, ...].

    A subclass implements `add` and `estimate`; `kinds` finds it by its name in lower case, under which its tensors are
    saved and handed to operators.

    Attributes: count: tokens in the set, [B, Hkv], or in each of its M parts, [B, Hkv, M].
    """

    count: Tensor
    kinds: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__.lower()] = cls

    @property
    def kind(self) -> str:
        """The name under which `kinds` has the class."""
        return type(self).__name__.lower()

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Self:
        """What is remembered of this set and the given pairs together.

        Args: keys [B, Hkv, N, Dk]; values [B, Hkv, N, Dv]; mask [B, Hkv, N] bool, true for pairs to add (default all).
        """
        raise NotImplementedError

    def estimate(self, q: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """What attention over the set would return, and how much mass it would carry.

        Args: q [B, Hq, T, Dk] post-RoPE; scale: logit multiplier; softcap: bends logits, or None.
        Returns: value [B, Hq, T, Dv] (zero for an empty set) and log_mass [B, Hq, T] (-inf for an empty set).
        """
        raise NotImplementedError

    def log_mass(self, q: Tensor, scale: float, softcap: float | None = None) -> Tensor:
        """The mass of `estimate` alone, [B, Hq, T]."""
        return self.estimate(q, scale, softcap)[1]

    def tensors(self) -> list[Tensor]:
        """The tensors that are present, in the order of the fields."""
        values = (getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, Tensor)]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def copy_(self, other: Self) -> None:
        """Overwrite in place, so that addresses stay what a captured graph has seen."""
        for mine, theirs in zip(self.tensors(), other.tensors()):
            mine.copy_(theirs)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 inputs, else float32: half-precision inputs are never summed in half precision."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
