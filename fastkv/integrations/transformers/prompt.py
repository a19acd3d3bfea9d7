"""A prompt while it is read: what a base model knows of it and its decoder is not told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import FastKVError
from .stock import CACHE


@dataclass
class Prompt:
    """What the decoder needs to read a prompt.

    Attributes:
        padding: [B, tokens so far], 0 for padding; None without any.
        rows: how many last rows of hidden states somebody reads; None for all.
        masks: makes the masks of a block, if the base model prepares them.
        embeds: [B, T, hidden], the prompt as the decoder got it, images included; kept while it is read twice.
        positions: as the decoder got them, [1 or B, T] or [3 or 4, B, T]; kept likewise. None where it numbers tokens.
    """

    padding: Tensor | None = None
    rows: int | None = None
    masks: PreparedMasks | None = None
    embeds: Tensor | None = None
    positions: Tensor | None = None


class MaskMade(Exception):
    """Stops a base model that was run for the `mask` that it hands to its decoder."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask


@dataclass
class PreparedMasks:
    """Masks as a base model prepares them for its decoder, for one part of the prompt at a time.

    The base model is run over the part, and stopped where its decoder would start (see `decoder_forward`).

    Attributes:
        base: the base model.  given: arguments of its forward over the whole prompt that masks depend on.
        seen: tokens before the prompt, padding included.  total: tokens of the prompt.
        asking: whether the decoder is to raise `MaskMade`.
    """

    base: Any
    given: dict[str, Any]
    seen: int
    total: int
    asking: bool = False

    @classmethod
    def of(cls, base: Any, given: dict[str, Any]) -> PreparedMasks:
        """For a call of the base model. Raises: FastKVError if the mask is a prepared one."""
        check_mask(given.get("attention_mask"))
        ids = given.get("input_ids")
        names = [name for name in given if "token_type" in name and given[name] is not None]
        names += ["position_ids", CACHE, "inputs_embeds" if ids is None else "input_ids"]
        tokens = given[names[-1]]
        kept = {name: given.get(name) for name in (*names, "attention_mask")}
        return cls(base, kept, int(given[CACHE].get_seq_length()), tokens.shape[1])

    def part(self, start: int, end: int) -> Any:
        """Masks of tokens [start, end), which come next: 4-D or 2-D, or None, or one of these per type of layer."""
        taken = taken_from(self.given, start, end, self.total)
        # transformers reads types of tokens by their place in the whole sequence.
        taken |= {name: types[..., : self.seen + end] for name, types in self.given.items() if "token_type" in name}
        self.asking = True
        try:
            self.base._fastkv_base_forward(**taken, use_cache=True)
        except MaskMade as made:
            return made.mask
        finally:
            self.asking = False
        return None


def padding_of(given: dict[str, Any]) -> Tensor | None:
    """The 2-D mask [B, tokens so far] among the arguments of a forward, None without."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def check_mask(mask: Any, what: str = "reading a prompt in blocks") -> None:
    """Raise FastKVError unless a mask can be cut, as `what` needs it."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise FastKVError(f"{what} needs a 2-D padding mask, got a prepared one; pass the 2-D one")


def taken_from(given: dict[str, Any], start: int, end: int, total: int) -> dict[str, Any]:
    """The arguments of a forward for tokens [start, end) of `total`; a 2-D mask also covers everything before them."""
    taken, ids = dict(given), given.get("input_ids")
    tokens = given["inputs_embeds"] if ids is None else ids
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape[:2] == tokens.shape[:2]:
            taken[name] = value[:, start:end]
    mask, positions = padding_of(given), given.get("position_ids")
    if mask is not None:
        taken["attention_mask"] = mask[:, : mask.shape[1] - total + end]
    if positions is not None:
        taken["position_ids"] = positions[..., start:end]
    visual, features = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    if visual is not None and features is not None:
        # DeepStack adds a row for each visual token, rows of all tokens in order.
        order = (visual.flatten().cumsum(0) - 1).view_as(visual)
        rows = order[:, start:end][visual[:, start:end]]
        taken["deepstack_visual_embeds"] = [rows_of[rows.to(rows_of.device)] for rows_of in features]
    return taken


def later_tokens(mask: Any, num: int) -> Tensor | None:
    """Which later tokens of a block of `num` its tokens see, [B, T, T] bool, by a 4-D mask; None by any other."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    own = mask[:, 0, -num:, -num:]
    visible = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return visible.triu(1)
