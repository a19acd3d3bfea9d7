"""What became of every token of a text, read off a cache while a model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import FastKVError
from ...integrations.transformers import modules
from ...integrations.transformers.cache import FastKVCache
from ...integrations.transformers.layer import FastKVLayer
from ...reference import Centroids, Slots
from ...reference.centroids import BLOCK
from ..equal_bytes import stored_bytes
from ..fidelity import Witness, stored_tokens
from ..recording import cache_bytes, kept_tokens, record_attention

Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Reading:
    """How a text is read: its first tokens in blocks, the last `steps` one at a time.

    Attributes: ids [1, N].  block: tokens of a block, None for one piece.
    """

    ids: Tensor
    block: int | None
    steps: int

    def parts(self) -> Iterator[Tensor]:
        """What is given to the model, one forward after the other."""
        prompt = self.ids.shape[1] - self.steps
        yield from self.ids[:, :prompt].split(self.block or prompt, 1)
        yield from self.ids[:, prompt:].split(1, 1)


@dataclass(frozen=True)
class Full:
    """What the stock model makes of a text.

    Attributes:
        attention: by index of the layer [N, Hq * Dv].
        said: [steps], the tokens that it finds most likely where the last `steps` tokens of the text stand.
        nbytes: of its cache.
    """

    attention: dict[int, Tensor]
    said: Tensor
    nbytes: int


@dataclass(frozen=True)
class Trace:
    """What a cache did with a text of N tokens.

    Attributes:
        layers: indices in the model of the L compressed ones.
        events: tokens seen when something was evicted, in order.
        gone: [L, Hkv, N] int64, the number of the event, from 1, in which a token was evicted; 0 if it is still there.
        centroid: [L, Hkv, N] int64, the centroid, from 1, that an evicted token is part of; 0 for none. None if the
            cache has no centroids.
        error: [L, Hkv, N], |o - full| / |full| of the attention output for each token, mean over the query heads of a
            KV head.
        said: as of `Full`.  kept: tokens per KV head, mean.  nbytes: of the compressed layers.
        slot: bytes of a token in the slots of a head, mean over layers.  stored: how its keys and values are stored.
    """

    layers: list[int]
    events: list[int]
    gone: Tensor
    centroid: Tensor | None
    error: Tensor
    said: Tensor
    kept: float
    nbytes: int
    slot: float
    stored: str


@torch.no_grad()
def read_full(model: Any, reading: Reading) -> Full:
    """Run the stock model over the whole text. Raises FastKVError if its attention cannot be recorded."""
    with record_attention(model) as recorded:
        out = model(reading.ids, use_cache=True, logits_to_keep=reading.steps + 1)
    attention = {layer: outputs[0][0] for layer, outputs in recorded.items()}
    return Full(attention, out.logits[0, :-1].argmax(-1), cache_bytes(out.past_key_values))


@torch.no_grad()
def trace(model: Any, reading: Reading, full: Full) -> Trace:
    """Run the patched model over the text, and look at its cache after every forward."""
    cache = FastKVCache(model)
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}
    witnesses = [Witness(layer) for layer in layers.values()]
    following: list[Following] = []
    events: list[int] = []
    said, seen = [], 0
    with record_attention(model) as recorded:
        for part in reading.parts():
            before = seen
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits
            seen += part.shape[1]
            said.append(logits[0, -1].argmax(-1))
            for outputs in recorded.values():
                del outputs[len(said) :]  # of a second reading
            following = following or follow(model, layers.values(), reading.ids.shape[1])
            lost = [one.lost() for one in following]
            if any(bool(mask.any()) for mask in lost):
                events.append(seen)
                for one, mask, witness in zip(following, lost, witnesses):
                    one.evicted(mask, len(events), (witness.keys, witness.values), before)
    for witness in witnesses:
        witness.leave()
    gone = torch.stack([one.gone.cpu() for one in following])
    centroids = [one.centroid() for one in following]
    attending, heads = modules.attentions(model), gone.shape[1]
    groups = {index: modules.Sizes.of(attending[index]).groups for index in layers}
    errors = [error(torch.cat(recorded[i], 1)[0], full.attention[i], heads, groups[i]) for i in layers]
    kept = kept_tokens(cache)
    assert kept is not None
    return Trace(
        list(layers),
        events,
        gone,
        torch.stack([one for one in centroids if one is not None]) if None not in centroids else None,
        torch.stack(errors),
        torch.stack(said[-reading.steps - 1 : -1]),
        kept,
        stored_bytes(cache),
        sum(one.slot() for one in following) / len(following),
        following[0].stored(),
    )


def error(attention: Tensor, full: Tensor, heads: int, groups: int) -> Tensor:
    """[heads, N], relative distance of attention outputs [N, Hq * Dv], mean over the query heads of a KV head."""
    ours, theirs = (one.double().cpu().unflatten(-1, (heads, groups, -1)) for one in (attention, full))
    length = theirs.norm(dim=-1)
    relative = (ours - theirs).norm(dim=-1) / length.clamp(min=torch.finfo(torch.float32).tiny)
    return relative.mean(-1).T


def follow(model: Any, layers: Iterable[FastKVLayer], num: int) -> list[Following]:
    """One for each layer of a cache that was filled. Raises FastKVError unless they have equally many heads."""
    made = [Following(layer, num) for layer in layers]
    heads = sorted({len(one.gone) for one in made})
    if len(heads) > 1:
        raise FastKVError(
            f"view draws layers with equally many KV heads, got {type(model).__name__} with {heads}; try another model"
        )
    return made


class Following:
    """One layer of a cache with a single sequence, followed from one forward to the next.

    Attributes:
        gone: [Hkv, N], as in `Trace`.
        parts: the layer's centroids, joined here once more, step by step; None if it has none.
        place: [Hkv, N] int64, where in them an evicted token is now, -1 for nowhere.
    """

    def __init__(self, layer: FastKVLayer, num: int) -> None:
        state = layer.state
        assert state is not None
        self.layer = layer
        self.gone = torch.zeros(state.heads, num, dtype=torch.int64, device=state.seen.device)
        self.place = torch.full_like(self.gone, -1)
        parts = state.parts
        self.parts = Centroids(*map(torch.zeros_like, parts.tensors())) if isinstance(parts, Centroids) else None

    def lost(self) -> Tensor:
        """[Hkv, N] bool, tokens that were there when it was last asked and are not any more."""
        state = self.layer.state
        assert state is not None
        return ~stored_tokens(state, self.gone.shape[1])[0] & (self.gone == 0)

    @property
    def slots(self) -> Slots:
        """Of the layer."""
        assert self.layer.state is not None
        return self.layer.state.exact

    def stored(self) -> str:
        """How its keys and values are stored: the format of its slots, or the model's dtype."""
        return str(self.slots.dtype).rpartition(".")[2] if self.slots.format.plain else self.slots.format.name

    def slot(self) -> float:
        """Bytes of a token in a slot: its key, value, and all that moves with them."""
        return sum(part.nbytes for part in self.slots.moving().values()) / self.slots.keys[..., 0].numel()

    def evicted(self, lost: Tensor, event: int, pairs: Pairs, before: int) -> None:
        """These tokens left in that event.

        Args: pairs: keys and values [1, Hkv, seen, D] of all tokens so far.  before: those of them that had been stored
            before the last ones came; what is known of them is what their slots held.
        """
        self.gone[lost] = event
        if self.parts is not None and lost.any():
            form = self.slots.format
            if not form.plain:
                held = (form.decode(*form.encode(part[:, :, :before])) for part in pairs)
                keys, values = (torch.cat([old, new[:, :, before:].float()], 2) for old, new in zip(held, pairs))
                pairs = keys, values
            self.join(self.parts, lost[:, : pairs[0].shape[2]], pairs)

    def join(self, parts: Centroids, lost: Tensor, pairs: Pairs) -> None:
        """Let them join the centroids, as `reference.remember` does, oldest first, and follow where each goes."""
        most = int(lost.sum(-1).max())
        index = (~lost).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]  # [Hkv, most], in order of age
        inside = lost.gather(1, index)
        keys, values = (rows[0].gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))[None] for rows in pairs)
        blocks = iter(range(0, most, BLOCK))
        for after, target, order in parts.steps(keys, values, inside[None]):
            if target is None:
                part = slice(start := next(blocks), start + BLOCK)
                new = parts.num + torch.arange(inside[:, part].shape[1], device=index.device)
                here = torch.where(inside[:, part], new, self.place.gather(1, index[:, part]))
                self.place.scatter_(1, index[:, part], here)
            else:
                self.move(target[0])
            size = (order if target is None else target).shape[-1]
            here = torch.arange(order.shape[-1], device=index.device).expand(len(index), -1)
            self.move(here.new_zeros(len(index), size).scatter_(1, order[0], here))
            parts = after
        self.parts = parts

    def move(self, target: Tensor) -> None:
        """What was at place m is now at place target[:, m], [Hkv, M]."""
        self.place = torch.where(self.place >= 0, target.gather(1, self.place.clamp(min=0)), -1)

    def centroid(self) -> Tensor | None:
        """[Hkv, N], as in `Trace`; None if the layer has none."""
        if self.parts is None:
            return None
        state = self.layer.state
        assert state is not None and state.parts is not None
        assert torch.equal(self.parts.count, state.parts.count), "what was followed is what the cache holds"
        return self.place.cpu() + 1
