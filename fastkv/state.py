"""LayerState: everything one layer remembers of a batch of sequences. Storage only, no maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from .budget import LayerCost
from .reference import Moments


@dataclass
class LayerState:
    """Fixed slots of retained tokens plus the moments of the evicted ones.

    Three lengths, never confused: `seen`, the true tokens absorbed; `lengths`, how many of them are stored; C, the
    slots there are. Slots [0, lengths) of a head are valid, in no particular order: `positions` says what is where.

    Attributes:
        keys: [B, Hkv, C, Dk], values: [B, Hkv, C, Dv], post-RoPE, in the model's dtype.
        positions: [B, Hkv, C] int32, index of the token among the true (unpadded) tokens of its sequence.
        lengths: [B, Hkv] int32.
        seen: [B] int64.
        moments: of the evicted tokens; for every head, lengths + moments.count == seen.
        attention: [B, Hkv, C] fp32, attention received since `steps` was last zero; None if no policy asks for it.
        filled: upper bound of `lengths` that the host knows without a sync.
        steps: tokens decoded since the last eviction.
        scratch: of the kernels, shared by the layers of a cache; empty where the reference runs.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    seen: Tensor
    moments: Moments
    attention: Tensor | None = None
    filled: int = 0
    steps: int = 0
    scratch: list[Tensor] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, like_keys: Tensor, like_values: Tensor, slots: int, *, order: int | None, attention: bool, slope: bool
    ) -> LayerState:
        """Empty state with `slots` slots for the batch, heads, sizes, dtype and device of the given [B, Hkv, T, D].

        Args: order of the moments; attention: whether to add up what slots receive; slope: whether to keep a
            half-precision copy of the cross moment for the decode kernel (for half-precision keys only).
        """
        batch, heads, _, key_dim = like_keys.shape
        value_dim = like_values.shape[-1]
        device = like_keys.device

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        moments = Moments.empty(batch, heads, key_dim, value_dim, device, order=order)
        if slope and moments.cross is not None and like_keys.element_size() == 2:
            moments.slope = zeros(heads, key_dim, value_dim, dtype=like_keys.dtype)
        return cls(
            keys=zeros(heads, slots, key_dim, dtype=like_keys.dtype),
            values=zeros(heads, slots, value_dim, dtype=like_values.dtype),
            positions=zeros(heads, slots, dtype=torch.int32),
            lengths=zeros(heads, dtype=torch.int32),
            seen=zeros(dtype=torch.int64),
            moments=moments,
            attention=zeros(heads, slots, dtype=torch.float32) if attention else None,
        )

    @classmethod
    def cost(
        cls, like_keys: Tensor, like_values: Tensor, *, order: int | None, attention: bool, slope: bool
    ) -> LayerCost:
        """Bytes per sequence that `allocate` would spend: per slot, and apart from slots."""

        def spent(slots: int) -> int:
            one = slice(0, 1)
            meta = [t[one].to("meta") for t in (like_keys, like_values)]
            return cls.allocate(meta[0], meta[1], slots, order=order, attention=attention, slope=slope).nbytes()

        return LayerCost(per_slot=spent(1) - spent(0), fixed=spent(0))

    @property
    def slots(self) -> int:
        """C, the slots per head."""
        return self.keys.shape[2]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state with its field name; the moments' as moments.*."""
        for owner, prefix in ((self, ""), (self.moments, "moments.")):
            for one in fields(owner):
                value = getattr(owner, one.name)
                if isinstance(value, Tensor):
                    yield prefix + one.name, value

    def nbytes(self) -> int:
        """Bytes of all tensors: slots, positions, scores and moments."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def zero_(self) -> None:
        """Forget everything, in place: addresses stay."""
        for _, tensor in self.named_tensors():
            tensor.zero_()
        self.filled = self.steps = 0

    def map_batch_(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis to every tensor, in place where the shape stays."""
        for name, tensor in list(self.named_tensors()):
            new = change(tensor)
            if new.shape == tensor.shape:
                tensor.copy_(new)
            else:
                owner = self.moments if name.startswith("moments.") else self
                setattr(owner, name.removeprefix("moments."), new)
