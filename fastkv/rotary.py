"""Rotary embedding, undone: keys are cached rotated to their positions, some methods need them as they were before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .errors import FastKVError

FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not change with the length


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model's full-attention layers, in HF's rotate_half pairing (i with i + D/2).

    Attributes:
        frequencies: [D/2] fp32, radians per position.  scaling: factor on cos and sin (YaRN), 1 otherwise.
    """

    frequencies: Tensor
    scaling: float = 1.0

    @classmethod
    def of(cls, model: Module) -> Rotary:
        """The embedding of a transformers model.

        Raises: FastKVError for a model without one, for frequencies that change with the length of the sequence, and
            for an embedding of a part of the head.
        """
        found: Any = next((m for m in model.modules() if _frequencies(m) is not None), None)
        if found is None:
            raise FastKVError(f"{type(model).__name__} has no rotary embedding, which this method has to undo")
        name = _frequencies(found)
        assert name is not None
        prefix = name.removesuffix("inv_freq")
        kind = getattr(found, "rope_type", "default")
        kind = kind.get("full_attention", "default") if isinstance(kind, dict) else kind
        if kind not in FIXED:
            raise FastKVError(
                f"the rotary embedding of {type(model).__name__} is of type {kind!r}, whose frequencies change with "
                f"the length; methods that undo the rotation work with {', '.join(FIXED)}"
            )
        frequencies = getattr(found, name).detach().float()
        config: Any = getattr(found, "config", None) or model.config
        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if 2 * frequencies.numel() != head_dim:
            raise FastKVError(
                f"the rotary embedding of {type(model).__name__} turns {2 * frequencies.numel()} of {head_dim} "
                "dimensions; methods that undo the rotation need it to turn all of them"
            )
        return cls(frequencies, float(getattr(found, f"{prefix}attention_scaling", 1.0)))

    def to(self, device: torch.device) -> Rotary:
        """The same on another device."""
        return Rotary(self.frequencies.to(device), self.scaling)

    def table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, divided by the scaling, for positions 0 to length - 1: both [length, D/2] fp32."""
        angle = torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies
        return angle.cos() / self.scaling, angle.sin() / self.scaling

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, Hkv, N, D] as they were before the embedding turned them to `positions` [B, Hkv, N]; same dtype."""
        angle = positions[..., None].float() * self.frequencies
        cos, sin = angle.cos() / self.scaling, angle.sin() / self.scaling
        first, second = keys.float().chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1).to(keys.dtype)


def _frequencies(module: Module) -> str | None:
    """The name of the buffer of frequencies of a rotary embedding; None if the module is something else."""
    return next((name for name in ("full_attention_inv_freq", "inv_freq") if hasattr(module, name)), None)
