"""Prompts, read by the decoder: whole or in blocks that cut no image whose tokens see each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import FastKVError
from .cache import FastKVCache
from .prompt import PreparedMasks, check_mask, later_tokens, taken_from


def in_blocks(cache: FastKVCache, total: int) -> bool:
    """Whether a prompt of `total` tokens is read in blocks; one that is compressed at once is not."""
    block = cache.config.prefill_block
    return block is not None and total > block and (cache.started or not cache.config.deferred)


def read_prompt(decoder: Any, cache: FastKVCache, given: dict[str, Any]) -> Any:
    """Forward of the decoder over a prompt, in blocks if the config says so.

    Args: cache: with its `prompt`.  given: arguments of the decoder's forward.
    Returns: the output that the stock forward has, of the last `prompt.rows` tokens if that is a number.
    """
    prompt, ids = cache.prompt, given.get("input_ids")
    assert prompt is not None
    total = (given["inputs_embeds"] if ids is None else ids).shape[1]
    positions = given.get("position_ids")
    _check_positions(cache, positions)
    for layer in cache.compressed:
        layer.expected = total
    deltas = cache.deltas_after(positions, total, prompt.padding)
    if in_blocks(cache, total):
        out = _read_blocks(decoder, cache, given, total)
    else:
        if cache.config.deferred and not cache.started:
            prompt.embeds, prompt.positions = given.get("inputs_embeds"), positions
        out = _read(decoder, cache, given, 0, total)
    if deltas is not None:
        cache.continue_from(deltas)
    return out


def _check_positions(cache: FastKVCache, positions: Tensor | None) -> None:
    """Raise FastKVError if the rotary embedding is to be undone at positions that it did not use. One host sync."""
    if cache.config.places and positions is not None and positions.ndim == 3:
        if bool((positions != positions[:1]).any()):
            raise FastKVError(
                f"policy {cache.config.policy.name!r} or correction {cache.config.correction.name!r} undoes the rotary "
                "embedding by each token's place in the sequence, but got images or videos, whose tokens have "
                "positions in three dimensions; use another policy or correction for them"
            )


def _read(decoder: Any, cache: FastKVCache, given: dict[str, Any], left: int, num: int) -> Any:
    """One call of the stock forward, over `num` tokens that come next; `left` more of the prompt follow."""
    assert cache.prompt is not None
    padding, shared = cache.prompt.padding, cache.workspace
    if padding is not None:
        end = padding.shape[1] - left
        shared.real = padding[:, end - num : end].bool()
    if cache.started:  # without a past the stock attention follows the mask
        mask = given.get("attention_mask")
        ahead = later_tokens(mask.get("full_attention") if isinstance(mask, dict) else mask, num)
        shared.ahead = None if ahead is None or not bool(ahead.any()) else ahead
    try:
        return decoder._fastkv_decoder_forward(**given)
    finally:
        shared.ahead = shared.real = None


def _read_blocks(decoder: Any, cache: FastKVCache, given: dict[str, Any], total: int) -> Any:
    prompt, compressed = cache.prompt, cache.compressed
    assert prompt is not None
    if prompt.masks is None:
        check_mask(given.get("attention_mask"))
    recording = any(layer.recording for layer in compressed)
    outputs: list[Any] = []
    for start, end, mask in _blocks(cache, total, recording):
        if recording:
            for layer in compressed:
                layer.commit_block()
                if end == total:
                    layer.activate_past_recording()
        part = taken_from(given, start, end, total)
        if prompt.masks is not None:
            part["attention_mask"] = mask
        outputs.append(_read(decoder, cache, part, total - end, end - start))
        if prompt.rows is not None:
            while sum(out.last_hidden_state.shape[1] for out in outputs[1:]) >= prompt.rows:
                outputs.pop(0)
    return _join(outputs)


def _blocks(cache: FastKVCache, total: int, recording: bool) -> Iterator[tuple[int, int, Any]]:
    """Start and end of each block, and its mask if the base model prepares masks.

    Each has to be read before the next is asked for.
    """
    block, start = cache.config.prefill_block, 0
    assert block is not None and cache.prompt is not None
    while start < total:
        # Everything that may be rolled back has to sit in the last block.
        end = total if recording and total - start <= 2 * block else min(start + block, total)
        mask = None
        if cache.prompt.masks is not None:
            end, mask = _uncut(cache.prompt.masks, start, end)
        yield start, end, mask
        start = end


def _uncut(masks: PreparedMasks, start: int, end: int) -> tuple[int, Any]:
    """The last place up to `end` where no token sees one behind it, or the first after; and the mask up to there."""
    size = end - start
    while True:
        stop = min(start + size + 1, masks.total)  # one token more shows whether the last one sees it
        made, num = masks.part(start, stop), stop - start
        found = [later_tokens(mask, num) for mask in (made.values() if isinstance(made, dict) else [made])]
        cuts = _cuts([ahead for ahead in found if ahead is not None], num)
        cuts = cuts if stop == masks.total else cuts[cuts < num]
        if len(cuts):
            fitting = cuts[cuts <= end - start]
            cut = int(fitting[-1] if len(fitting) else cuts[0])
            return start + cut, _narrowed(made, num - cut)
        size *= 2


def _cuts(found: list[Tensor], num: int) -> Tensor:
    """Where `num` tokens can be cut, int64, ascending: no token before such a place sees one behind it.

    Args: found: [B, T, T] bool, the later tokens that tokens see; empty if none does.
    """
    place = torch.arange(num)
    farthest = torch.zeros(num, dtype=torch.int64)
    for ahead in found:
        columns = torch.arange(num, device=ahead.device)
        farthest = farthest.maximum((ahead * columns).amax((0, 2)).cpu())
    return 1 + torch.nonzero(farthest.cummax(0).values <= place)[:, 0]


def _narrowed(mask: Any, spare: int) -> Any:
    """A mask, or several by type of layer, without its last `spare` tokens."""
    if isinstance(mask, dict):
        return {name: _narrowed(one, spare) for name, one in mask.items()}
    if mask is None or not spare:
        return mask
    return mask[:, :-spare] if mask.ndim == 2 else mask[..., :-spare, :-spare]


def _join(outputs: list[Any]) -> Any:
    """One model output for all blocks."""
    out = outputs[-1]
    out.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], 1)
    if out.get("hidden_states") is not None:
        out.hidden_states = tuple(torch.cat(states, 1) for states in zip(*[o.hidden_states for o in outputs]))
    if out.get("attentions") is not None:
        out.attentions = None
    if out.get("router_logits") is not None:
        out.router_logits = tuple(torch.cat(logits, 0) for logits in zip(*[o.router_logits for o in outputs]))
    return out
