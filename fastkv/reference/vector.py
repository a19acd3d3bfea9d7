"""Values recovered from keys: attention over slots of which only the key is stored (VECTOR).

The value of such a slot is approximated as W^T k~, with k~ its key before the rotary embedding. Since that is linear, a
kernel needs no matrix product per token: sum_j p_j W^T k~_j = W^T sum_j p_j k~_j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state import LayerState


def unrotate(keys: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of keys [B, Hkv, N, D] at positions [B, Hkv, N].

    The convention is HF's rotate_half: dimension i is paired with i + D/2. cos, sin: [P, D/2], row p for position p.
    """
    first, second = keys.chunk(2, dim=-1)
    index = positions.long()
    c, s = cos.to(keys.dtype)[index], sin.to(keys.dtype)[index]
    return torch.cat([first * c + second * s, second * c - first * s], -1)


def recovered_values(state: LayerState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [B, Hkv, A, Dk] of the tokens that have no value, and what `state.recovery` makes of them, [B, Hkv, A, Dv].

    Args: dtype: of both results and of the computation.
    """
    slots, recovery = state.approx, state.recovery
    assert slots is not None and recovery is not None
    keys = slots["keys"].to(dtype)
    index = torch.where(slots.valid, slots["positions"], 0)  # the position of an unused slot may be anything
    return keys, unrotate(keys, index, recovery.cos, recovery.sin) @ recovery.weight.to(dtype)
