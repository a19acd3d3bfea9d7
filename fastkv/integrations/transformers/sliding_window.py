"""Sliding-window layers whose decode steps write into a ring at a fixed place.

transformers' own sliding-window layers move their tokens at every step, or count in numbers that would be part of a
compiled graph. Prompts are still read by transformers' code: before one, the rings are unrolled into what that code
expects, and after it rolled up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer


class Ring:
    """What the rings of a cache have in common: which place is next, and which places are real.

    Attributes:
        size: of the window, in tokens.  rolled: whether the layers are rings now.
        seen: int64 [], length of the sequence, padding included.  place: int64 [1], where the newest token lies.
        real: [B, size] bool, places that hold a token that is no padding.
        counted: whether one of its layers counts tokens.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rolled, self.counted = size, False, False
        self.seen = self.place = self.real = torch.empty(0)

    def recent(self, length: int, device: torch.device) -> Tensor:
        """Where the last tokens of a sequence lie, oldest first: those that the next token can see, [<= size - 1]."""
        return torch.arange(max(length - self.size + 1, 0), length, device=device) % self.size

    def roll(self, batch: int, recent: Tensor, length: int, mask: Tensor | None) -> None:
        """Go on from a sequence of so many tokens, `recent` of them still there; mask [B, length] is 0 for padding."""
        if self.real.shape[0] != batch or self.real.device != recent.device:
            self.seen = _fixed(torch.zeros((), dtype=torch.int64, device=recent.device))
            self.place = _fixed(torch.zeros(1, dtype=torch.int64, device=recent.device))
            self.real = _fixed(torch.zeros(batch, self.size, dtype=torch.bool, device=recent.device))
        self.seen.fill_(length)
        self.real.zero_()
        self.real[:, recent] = True if mask is None else mask[:, length - len(recent) : length].bool()
        self.rolled = True

    def step(self, dtype: torch.dtype | None) -> Tensor:
        """Make room for one more token. Returns its mask [B, 1, 1, size]: bool, or additive where there is a dtype.

        The token itself is counted by a layer, because transformers takes its position from the length before it.
        """
        self.place.copy_((self.seen % self.size)[None])
        self.real.index_fill_(1, self.place, True)
        mask = self.real[:, None, None]
        return mask.clone() if dtype is None else torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis."""
        if self.rolled:
            self.real = _changed(self.real, change)


class WindowLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer of a static cache; keys and values are rings [B, Hkv, size, D] while `ring.rolled`."""

    is_compileable = True
    keys: Any
    values: Any

    def __init__(self, ring: Ring) -> None:
        super().__init__(sliding_window=ring.size)
        self.ring, self.counts = ring, not ring.counted  # one layer counts for all that share the ring
        ring.counted = True
        self.key_room: Tensor | None = None
        self.value_room: Tensor | None = None

    def changed(self) -> list[Tensor]:
        """All tensors that a decode step changes."""
        return [self.keys, self.values, self.ring.seen, self.ring.place, self.ring.real]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, Hkv, T, D]; returns those that the new tokens see."""
        if not self.ring.rolled:
            return super().update(key_states, value_states, *args, **kwargs)
        if self.counts:
            self.ring.seen.add_(1)
        self.keys.index_copy_(2, self.ring.place, key_states)
        self.values.index_copy_(2, self.ring.place, value_states)
        return self.keys, self.values

    def roll(self, recent: Tensor) -> None:
        """Put the last tokens at those places of the rings."""
        self.keys = self.key_room = self._rolled(self.keys, self.key_room, recent)
        self.values = self.value_room = self._rolled(self.values, self.value_room, recent)

    def _rolled(self, tokens: Tensor, room: Tensor | None, recent: Tensor) -> Tensor:
        batch, heads, num, dim = tokens.shape
        if room is None or room.shape[0] != batch:
            room = _fixed(tokens.new_zeros(batch, heads, self.ring.size, dim))
        return room.index_copy_(2, recent, tokens[:, :, num - len(recent) :])

    def unroll(self, recent: Tensor, length: int) -> None:
        """Be what transformers' layer is after `length` tokens, the last of which are at those places."""
        self.keys, self.values = self.keys.index_select(2, recent), self.values.index_select(2, recent)
        self.cumulative_length = length

    def get_seq_length(self, *args: Any) -> Any:
        """Length of the sequence, padding included; on the device while rolled."""
        return self.ring.seen if self.ring.rolled else super().get_seq_length()

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis."""
        self.keys, self.values = _changed(self.keys, change), _changed(self.values, change)
        if self.ring.rolled:
            self.key_room, self.value_room = self.keys, self.values


def _fixed(tensor: Tensor) -> Tensor:
    """The tensor, which stays where it is from now on."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def _changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor after a change, in place where the shape stays."""
    new = change(tensor)
    return tensor.copy_(new) if new.shape == tensor.shape else _fixed(new)
