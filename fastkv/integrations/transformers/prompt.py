"""How a prompt is read: whole, in blocks, or held until all layers have read it, perhaps twice: some policies read it
again, and quality budgets grade it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...cache.layer import HeldPrompt
from ...calibration.fits import context_nll
from ...config import Config
from ...errors import FastKVError
from ...policies import SecondReading
from . import stock
from .cache import FastKVCache, Prompt
from .layer import FastKVLayer
from .stock import CACHE


class MaskMade(Exception):
    """Stops a base model that was run for the mask that it hands to its decoder, its one argument."""


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
        names = [name for name in given if "token_type" in name and given[name] is not None]
        names += ["position_ids", CACHE, "inputs_embeds" if given.get("input_ids") is None else "input_ids"]
        kept = {name: given.get(name) for name in (*names, "attention_mask")}
        return cls(base, kept, int(given[CACHE].get_seq_length()), tokens_of(given).shape[1])

    def part(self, start: int, end: int) -> Any:
        """Masks of tokens [start, end), which come next: 4-D or 2-D, or None, or one of these per type of layer."""
        taken = taken_from(self.given, start, end, self.total)
        # transformers reads types of tokens by their place in the whole sequence.
        taken |= {name: types[..., : self.seen + end] for name, types in self.given.items() if "token_type" in name}
        self.asking = True
        try:
            self.base._fastkv_base_forward(**taken, use_cache=True)
        except MaskMade as made:
            return made.args[0]
        finally:
            self.asking = False
        return None


def tokens_of(given: dict[str, Any]) -> Any:
    """What a forward reads: ids [B, T] or embeddings [B, T, hidden], None for neither."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def padding_of(given: dict[str, Any]) -> Tensor | None:
    """The 2-D mask [B, tokens so far] among the arguments of a forward, None without."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def ends_in_padding(mask: Tensor | None) -> bool:
    """Whether the last token of any row is padding, by a mask [B, N], None without any. One host sync."""
    return mask is not None and not bool((mask[:, -1] != 0).all())


def check_mask(mask: Any, what: str = "reading a prompt in blocks") -> None:
    """Raise FastKVError unless a mask can be cut, as `what` needs it."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise FastKVError(f"{what} needs a 2-D padding mask, got a prepared one; pass the 2-D one")


def taken_from(given: dict[str, Any], start: int, end: int, total: int) -> dict[str, Any]:
    """The arguments of a forward for tokens [start, end) of `total`; a 2-D mask also covers everything before them."""
    taken, tokens = dict(given), tokens_of(given)
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


def seen_in(mask: Any, num: int) -> Tensor | None:
    """Which tokens of a block of `num` its tokens see, [B, T, T] bool, by a 4-D mask; None by any other."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    return stock.seen(mask[:, 0, -num:, -num:])


# Whole, or in blocks that cut no image whose tokens see each other.


def in_blocks(cache: FastKVCache, total: int) -> bool:
    """Whether a prompt of `total` tokens is read in blocks; one that is compressed at once is not."""
    block = cache.config.prefill_block
    return block is not None and total > block and (cache.started or not cache.config.deferred)


def read_prompt(decoder: Any, cache: FastKVCache, given: dict[str, Any]) -> Any:
    """Forward of the decoder over a prompt, in blocks if the config says so.

    Args: cache: with its `prompt`.  given: arguments of the decoder's forward.
    Returns: the output that the stock forward has, of the last `prompt.rows` tokens if that is a number.
    """
    prompt, total, positions = cache.prompt, tokens_of(given).shape[1], given.get("position_ids")
    assert prompt is not None
    _check_positions(cache, positions, total)
    if positions is not None and positions.shape[-1] < total:
        given["position_ids"] = positions = positions.expand(*positions.shape[:-1], total)
    mask, padding = prompt.padding, None
    if mask is not None:
        padding = mask.shape[1] - cache.config.budget.length_of(mask.shape[1], (mask != 0).sum(-1))
    for layer in cache.compressed if not cache.compressed[0].rereading else ():
        layer.padding = layer.padding if padding is None else padding
        layer.expected = (total if layer.cache.static else layer.seen + total) - layer.padding
    deltas = cache.deltas_after(positions, total, prompt.padding)
    if positions is None and cache.rope_deltas is not None and not cache.started and prompt.padding is not None:
        deltas = total - prompt.padding[:, -total:].long().sum(-1, keepdim=True)  # transformers counts padding
    if in_blocks(cache, total):
        out = _read_blocks(decoder, cache, given, total)
    else:
        if cache.config.deferred and not cache.started:
            prompt.embeds, prompt.positions = given.get("inputs_embeds"), positions
        out = _read(decoder, cache, given, 0, total)
    if deltas is not None:
        cache.continue_from(deltas)
    return out


def _check_positions(cache: FastKVCache, positions: Tensor | None, total: int) -> None:
    """Raise FastKVError if the rotary embedding is to be undone at positions that it did not use. One host sync."""
    first, prompt = cache.compressed[0], cache.prompt
    if not cache.config.places or positions is None or first.rereading:
        return
    if positions.ndim == 3:
        wrong, what = positions != positions[:1], "images or videos, whose tokens have positions in three dimensions"
    elif cache.rope_deltas is not None or first.cache.pending is not None:  # of which nobody knows yet how much stays
        return
    else:
        real = torch.ones_like(positions) if prompt is None or prompt.padding is None else prompt.padding[:, -total:]
        real, seen = real.to(positions.device), torch.zeros_like(positions[:1, :1])
        if first.state is not None and cache.started:
            seen = first.state.seen[:, None].to(positions.device)
        wrong, what = (positions != seen + real.cumsum(-1) - 1) & real.bool(), "position_ids that say something else"
    if bool(wrong.any()):
        raise FastKVError(
            f"policy {cache.config.policy.name!r} or correction {cache.config.correction.name!r} undoes the rotary "
            f"embedding by each token's place in the sequence, but got {what}; use another policy or correction"
        )


def _read(decoder: Any, cache: FastKVCache, given: dict[str, Any], left: int, num: int) -> Any:
    """One call of the stock forward, over `num` tokens that come next; `left` more of the prompt follow."""
    assert cache.prompt is not None
    padding, shared = cache.prompt.padding, cache.workspace
    if padding is not None:
        end = padding.shape[1] - left
        shared.real = padding[:, end - num : end].bool().contiguous()  # kernels want rows without gaps
    if cache.started:  # without a past the stock attention follows the mask
        mask = given.get("attention_mask")
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        seen = seen_in(mask, num)
        if seen is not None:
            _check_causal(seen)
            shared.ahead = ahead if bool((ahead := seen.triu(1)).any()) else None
    try:
        return decoder._fastkv_decoder_forward(**given)
    finally:
        shared.ahead = shared.real = None


def _check_causal(seen: Tensor) -> None:
    """Raise FastKVError if an earlier real token of a block is hidden from a later one, see `seen_in`. One sync."""
    real = seen.diagonal(dim1=-2, dim2=-1)
    if bool((~seen & real[:, None] & real[..., None]).tril().any()):
        raise FastKVError(
            "the mask hides earlier new tokens from later ones, which a compressed cache with a past cannot follow; "
            "read such parts in calls of their own"
        )


def _read_blocks(decoder: Any, cache: FastKVCache, given: dict[str, Any], total: int) -> Any:
    prompt, compressed = cache.prompt, cache.compressed
    assert prompt is not None
    if prompt.masks is None:
        check_mask(given.get("attention_mask"))
    recording = any(layer.is_croppable for layer in compressed)
    in_tuple, outputs = given.get("return_dict") is False, list[Any]()
    if in_tuple:
        given = given | {"return_dict": True}
    for start, end, mask in _blocks(cache, total, recording):
        if recording:
            for layer in compressed:
                layer.cache.accept()
                layer.cache.records = False
                if end == total:  # only the last block can be taken back
                    layer.activate_past_recording()
        part = taken_from(given, start, end, total)
        if prompt.masks is not None:
            part["attention_mask"] = mask
        # A single token behind the blocks is decoded, as in servers, whose captured steps do not tell it from others.
        decoded = end - start == 1 and end == total and not ends_in_padding(prompt.padding)
        cache.workspace.reading = not decoded
        outputs.append(_read(decoder, cache, part, total - end, end - start))
        if prompt.rows is not None:
            while sum(out.last_hidden_state.shape[1] for out in outputs[1:]) >= prompt.rows:
                outputs.pop(0)
    out = _join(outputs)
    return out.to_tuple() if in_tuple else out


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
        found = [seen_in(mask, num) for mask in (made.values() if isinstance(made, dict) else [made])]
        cuts = _cuts([seen.triu(1) for seen in found if seen is not None], num)
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
    place = torch.arange(num, device="cpu")
    farthest = torch.zeros_like(place)
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
    out.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], -2)
    if out.get("hidden_states") is not None:
        out.hidden_states = tuple(torch.cat(states, -2) for states in zip(*[o.hidden_states for o in outputs]))
    if out.get("attentions") is not None:
        out.attentions = None
    if out.get("router_logits") is not None:
        rows = len(out.last_hidden_state)  # of each block one after the other
        out.router_logits = tuple(
            torch.cat([part.unflatten(0, (rows, -1)) for part in parts], 1).flatten(0, 1)
            for parts in zip(*[o.router_logits for o in outputs])
        )
    return out


# Held in full, and compressed when all layers have read it.


def read_in_full(base: Any, cache: FastKVCache, given: dict[str, Any], prompt: Prompt) -> Any:
    """Forward of the base model over a first prompt, then compression of all layers. Returns the model's output.

    Args: base: the patched base model.  cache: empty.  given: arguments of its forward.  prompt: that is read.
    """
    config, layers = cache.config, cache.compressed
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        raise FastKVError(
            "second readings and Budget(quality=...) need the prompt's tokens; pass input_ids, not inputs_embeds"
        )
    check_mask(mask, "what reads a prompt twice or follows Budget(quality=...)")
    held = [layer.hold() for layer in layers]
    out = base._fastkv_base_forward(**given)
    if config.policy.second_reading is not None:
        # Of images there are no ids, but embeddings, which the decoder got.
        tokens = ids if prompt.embeds is None else prompt.embeds
        read_again(base, cache, held, tokens, torch.ones_like(ids) if mask is None else mask)
    keep = None if config.budget.quality is None else share_to_keep(base, config, out.last_hidden_state, ids, mask)
    for layer in layers:
        layer.commit(keep)
    return out


def read_again(
    base: Any,
    cache: FastKVCache,
    held: Sequence[HeldPrompt],
    tokens: Tensor,
    mask: Tensor,
    chunk: int | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Feed the prompt once more, in chunks, and let each layer collect what attention its tokens receive.

    Each chunk stands where a text that goes on after the first reading would.
    Args: tokens: ids [B, N] or embeddings [B, N, hidden].  mask [B, N]: 0 for padding.  chunk: tokens, by default those
        of the policy.  after: called with the model's output for each chunk.
    """
    first = cache.prompt
    assert first is not None
    second = cache.config.policy.second_reading or SecondReading()
    batch, num = mask.shape
    follows = None
    if first.positions is not None:  # after the largest one of the prompt; of M-RoPE are the last three
        largest = first.positions if first.positions.ndim == 2 else first.positions[-3:].amax(0)
        follows = torch.where(mask.bool(), largest, 0).amax(-1, keepdim=True).long() + 1
    # Chunks count real tokens, so that a row does not depend on how far it is padded.
    order = (mask == 0).to(torch.uint8).argsort(dim=-1, stable=True)
    row = torch.arange(batch, device=order.device)[:, None]
    packed, packed_mask = tokens[row, order], mask[row, order]
    asked = torch.tensor(second.prompt, dtype=torch.long, device=tokens.device).expand(batch, -1)
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    request = base.get_input_embeddings()(asked).to(tokens.dtype) if name == "inputs_embeds" else asked.to(tokens.dtype)
    unpadded = mask.new_ones(asked.shape)
    others = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, FastKVLayer)}
    beside = {layer: stock.tensors(layer) for layer in cache.compressed}
    kept = {layer: {name: one.clone() for name, one in found.items()} for layer, found in beside.items()}
    for prompt in held:
        prompt.expect_again()
    chunk = chunk or second.chunk
    for start in range(0, num, chunk):
        part = slice(start, start + chunk)
        fed = torch.cat([request, packed[:, part]], 1)
        fed_mask = torch.cat([unpadded, packed_mask[:, part]], 1)
        # Layers that are transformers' forget the second reading by being put back.
        for index, layer in others.items():
            cache.layers[index] = stock.copied(layer)
        cache.prompt = replace(first, padding=torch.cat([mask, fed_mask], 1))
        # A decoder that was given no positions numbers its tokens itself: from the length on, padding included, or by
        # the mask. It goes on so.
        placed = {} if follows is None else {"position_ids": follows + (fed_mask.cumsum(-1) - 1).clamp(min=0)}
        out = base._fastkv_base_forward(
            **{name: fed}, **placed, attention_mask=cache.prompt.padding, **{CACHE: cache}, use_cache=True
        )
        if after is not None:
            after(out)
        with torch.no_grad():
            for layer, found in beside.items():
                for key, tensor in found.items():
                    tensor.copy_(kept[layer][key])
    cache.prompt = first
    for index, layer in others.items():
        cache.layers[index] = layer


def share_to_keep(base: Any, config: Config, hidden: Tensor, ids: Tensor, mask: Tensor | None) -> float:
    """The share of the prompt to keep for the budget's quality; of a batch, what its most demanding row needs."""
    assert config.curve is not None and config.budget.quality is not None
    text = base.config.get_text_config(decoder=True)
    if ids.shape[1] < 2:
        return 1.0
    softcap = getattr(text, "final_logit_softcapping", None)
    nll = context_nll(hidden, ids, base._fastkv_head, softcap, mask)
    shares = config.curve.keep(config.budget.quality, nll)
    known = shares[~shares.isnan()]  # a row that is not a number asks for nothing
    return float(known.max()) if len(known) else 1.0
