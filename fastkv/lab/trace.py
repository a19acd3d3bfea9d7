"""What became of every token of a text, read off a cache while a model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..cache.layer import LayerCache
from ..errors import FastKVError
from ..integrations.transformers import modules
from ..integrations.transformers.cache import FastKVCache
from ..integrations.transformers.layer import FastKVLayer
from ..integrations.transformers.stock import CACHE
from ..ops.operator import ATTRIBUTES
from ..reference import Centroids, Slots
from ..reference.centroids import BLOCK
from .equal_bytes import stored_bytes
from .fidelity import stored_tokens
from .reading import cache_bytes, kept_tokens, record_attention


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
    return Full(attention, out.logits[0, :-1].argmax(-1), cache_bytes(out[CACHE]))


@torch.no_grad()
def trace(model: Any, reading: Reading, full: Full) -> Trace:
    """Run the patched model over the text, and look at its cache after every forward.

    Centroids are followed where the backend is the reference; others may join tokens without `Centroids.add`.
    """
    cache, num = FastKVCache(model), reading.ids.shape[1]
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)}
    attending = modules.attentions(model)
    groups = {index: modules.Sizes.of(attending[index]).groups for index in layers}
    for layer in layers.values():
        track(layer.cache, num)
    following: list[Following] = []
    events: list[int] = []
    errors: list[Tensor] = []
    said, seen = [], 0
    with record_attention(model) as recorded:
        for part in reading.parts():
            before, seen = seen, seen + part.shape[1]
            logits = model(part, **{CACHE: cache}, logits_to_keep=1).logits
            said.append(logits[0, -1].argmax(-1))
            following = following or follow(model, layers.values(), num)
            lost = [one.lost() for one in following]
            if any(bool(mask.any()) for mask in lost):
                events.append(seen)
                for one, mask in zip(following, lost):
                    one.gone[mask] = len(events)
            heads = len(following[0].gone)
            # A text that is read twice has a second output, of the same tokens, which is left out.
            outputs = ((index, recorded[index][0][0], full.attention[index][before:seen]) for index in layers)
            errors.append(torch.stack([error(ours, theirs, heads, groups[index]) for index, ours, theirs in outputs]))
            for outputs_of_layer in recorded.values():
                outputs_of_layer.clear()
    kept = kept_tokens(cache)
    assert kept is not None
    centroids = [one.centroid() for one in following]
    return Trace(
        list(layers),
        events,
        torch.stack([one.gone.cpu() for one in following]),
        torch.stack([one for one in centroids if one is not None]) if None not in centroids else None,
        torch.cat(errors, -1),
        torch.stack(said[-reading.steps - 1 : -1]),
        kept,
        stored_bytes(cache) - sum(one.parts.place.nbytes for one in following if one.parts is not None),
        sum(one.slot() for one in following) / len(following),
        following[0].stored(),
    )


def error(attention: Tensor, full: Tensor, heads: int, groups: int) -> Tensor:
    """[heads, T], relative distance of attention outputs [T, Hq * Dv], mean over the query heads of a KV head."""
    ours, theirs = (one.double().unflatten(-1, (heads, groups, -1)) for one in (attention, full))
    length = theirs.norm(dim=-1)
    relative = (ours - theirs).norm(dim=-1) / length.clamp(min=torch.finfo(torch.float32).tiny)
    return relative.mean(-1).T.float().cpu()


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
    """One layer of a cache with a single sequence, looked at after every forward.

    Attributes: gone: [Hkv, N], as in `Trace`.
    """

    def __init__(self, layer: FastKVLayer, num: int) -> None:
        assert layer.state is not None
        self.layer = layer
        self.gone = torch.zeros(layer.state.heads, num, dtype=torch.int64, device=layer.state.seen.device)

    def lost(self) -> Tensor:
        """[Hkv, N] bool, tokens that were there when it was last asked and are not any more."""
        assert self.layer.state is not None
        return ~stored_tokens(self.layer.state, self.gone.shape[1])[0] & (self.gone == 0)

    @property
    def slots(self) -> Slots:
        """Of the layer."""
        assert self.layer.state is not None
        return self.layer.state.exact

    @property
    def parts(self) -> Tracked | None:
        """The centroids of the layer, None if it has none."""
        assert self.layer.state is not None
        parts = self.layer.state.parts
        return parts if isinstance(parts, Tracked) else None

    def stored(self) -> str:
        """How its keys and values are stored: the format of its slots, or the model's dtype."""
        return str(self.slots.dtype).rpartition(".")[2] if self.slots.format.plain else self.slots.format.name

    def slot(self) -> float:
        """Bytes of a token in a slot: its key, value, and all that moves with them."""
        return sum(part.nbytes for part in self.slots.moving().values()) / self.slots.keys[..., 0].numel()

    def centroid(self) -> Tensor | None:
        """[Hkv, N], as in `Trace`; None if the layer has none."""
        if self.parts is None:
            return None
        place = self.parts.place[0, :, :-1]
        members = torch.zeros_like(self.parts.count[0]).scatter_add_(
            -1, place.clamp(min=0), (place >= 0).to(self.parts.count.dtype)
        )
        assert torch.equal(members, self.parts.count[0]), "every token that left is in one centroid"
        never = len(self.gone[0]) + 1
        # Tokens leave by event, those of one event in order of age.
        order = torch.where(self.gone > 0, self.gone, never).argsort(dim=-1, stable=True)
        return torch.zeros_like(place).scatter_(-1, order, place + 1).cpu()


@dataclass
class Tracked(Centroids):
    """Centroids that know where each token went.

    A tensor, so that it goes wherever the state goes, through operators as well.

    Attributes: place: [B, Hkv, N + 1] int64, the centroid that the first, second, ... token to leave a head is part of
        now, -1 while there is none; the last column always is -1.
    """

    place: Tensor

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tracked:
        """As of `Centroids`."""
        inside = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device) if mask is None else mask
        arrived = (self.place >= 0).sum(-1, keepdim=True)
        last = self.place.shape[-1] - 1
        nth = torch.where(inside, arrived + inside.cumsum(-1) - 1, last)
        place, parts, blocks = self.place, Centroids(*self.tensors()[:4]), iter(nth.split(BLOCK, -1))
        for after, target, order in self.steps(keys, values, mask):
            if target is None:  # a block of tokens lines up behind the centroids
                block = next(blocks)
                behind = parts.num + torch.arange(block.shape[-1], device=block.device)
                place = place.scatter(-1, block, behind.expand_as(block))
                place[..., last] = -1
                total = parts.num + block.shape[-1]
            else:
                place = moved(place, target)
                total = target.shape[-1]
            here = torch.arange(order.shape[-1], device=order.device).expand_as(order)
            place = moved(place, here.new_zeros(*order.shape[:2], total).scatter_(-1, order, here))
            parts = after
        return Tracked(parts.count, parts.keys, parts.values, parts.spread, place)


ATTRIBUTES[Tracked] = tuple(one.name for one in fields(Tracked))  # so that operators take it apart


def moved(place: Tensor, target: Tensor) -> Tensor:
    """What was at place m is now at place target[..., m], [B, Hkv, M]."""
    return torch.where(place >= 0, target.gather(-1, place.clamp(min=0)), -1)


def track(layer: LayerCache, num: int) -> None:
    """Let the layer, still empty, know of `num` tokens in which of its centroids they are, if it comes to have any."""
    allocate = layer.allocate

    def tracking(*sizes: Any, **options: Any) -> None:
        allocate(*sizes, **options)
        assert layer.state is not None
        parts = layer.state.parts
        if isinstance(parts, Centroids):
            nowhere = parts.count.new_full((*parts.count.shape[:2], num + 1), -1, dtype=torch.int64)
            layer.state.parts = Tracked(parts.count, parts.keys, parts.values, parts.spread, nowhere)

    layer.allocate = tracking  # type: ignore[method-assign]
