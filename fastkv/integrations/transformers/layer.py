"""The layers of a FastKVCache: compressed ones, where the attention function hands tokens over, and static windows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionLayer

from ...backend import check_backend
from ...cache import CacheWorkspace, fixed
from ...cache.layer import GROWTH, HeldPrompt, HeldTokens, LayerCache, Stock
from ...cache.layout import Attends
from ...errors import FastKVError
from ...policies import Reread
from ...reference import LayerState
from . import stock


def sizes_of(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """KV heads, and numbers of a key and of a value, of [B, Hkv, T, D]."""
    return keys.shape[1], keys.shape[3], values.shape[3]


class FastKVLayer(CacheLayerMixin):
    """One compressed layer. `update` stores nothing: the attention function owns the tokens and hands them to `attend`.

    Attributes:
        cache: of the layer.  reader: what prompts go to: the cache itself, or a wrapper that holds the prompt.
        seen: length of the sequence as transformers counts it, padding included; int64 [] on the device if static.
        sizes: KV heads, and numbers of a key and of a value, once they are known.
        named: whether a patched module has asked for the layer since the last tokens.
        awaited: whether attention has not been called yet for the tokens that `update` was given.
        padding: how many of these tokens are padding even in the longest row; heads share slots for the others.
        expected: how many others there will be after the prompt that is being read in blocks.
    """

    is_sliding = False

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache
        self.reader: LayerCache | HeldPrompt = cache
        self.is_compileable = cache.static
        self.seen: Any = 0
        self.expected = self.batch_size = self.padding = 0
        self.sizes: tuple[int, ...] = ()
        self.named = self.awaited = False

    @property
    def state(self) -> LayerState | None:
        """What the layer remembers; None until the first tokens arrive."""
        return self.cache.state

    # What transformers asks of a layer.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember the batch, dtype and device of the first keys [B, Hkv, T, D]; the first `attend` makes the slots."""
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        self.sizes = () if value_states is None else sizes_of(key_states, value_states)
        self.keys = self.values = key_states.new_empty(0)  # Mllama asks whether there are any
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: keys and values [B, Hkv, T, D] are returned as they came."""
        if not self.is_initialized or (not self.cache.started and key_states.shape[0] != self.batch_size):
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise FastKVError(
                f"this cache holds {self.batch_size} sequences, got {key_states.shape[0]}; use another, reset() it or "
                "change its batch with batch_select_indices and batch_repeat_interleave"
            )
        if self.sizes and self.sizes != sizes_of(key_states, value_states):
            raise FastKVError(
                f"layer {self.cache.layer} of this cache holds KV heads and numbers of their keys and values of "
                f"{self.sizes}, got {sizes_of(key_states, value_states)}; use the model that it was made for"
            )
        if self.awaited:
            raise FastKVError(
                f"layer {self.cache.layer} got more tokens before attention was called for the last ones, which a "
                "compressed cache would lose; call reset() on it, and fastkv.unpatch(model) if this comes back"
            )
        if not self.named:
            raise FastKVError(
                f"layer {self.cache.layer} of a compressed cache got tokens of a model that is not patched, which "
                "would attend to nothing before them; call fastkv.patch(model), or use a cache of transformers"
            )
        self.named, self.awaited = False, True
        if not self.rereading:
            self.seen += key_states.shape[-2]
        return key_states, value_states

    def _arrive(self) -> None:
        """Attention was called for the tokens that `update` was given."""
        if not self.awaited:
            raise FastKVError(
                f"layer {self.cache.layer} attends to tokens that its cache was not given, or twice to the same; such "
                "a model cannot be compressed, call fastkv.unpatch(model)"
            )
        self.awaited = False

    def get_seq_length(self, *args: Any) -> Any:
        """True length of the sequence, evicted tokens included; RoPE positions follow from it."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The stock mask covers the new tokens only: T keys, starting at the true length."""
        return (query_length.shape[0] if isinstance(query_length, Tensor) else query_length), int(self.seen)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    # Attention.

    def decodes(self, num: int) -> bool:
        """Whether the next `num` tokens, none of them padding, are one decode step."""
        free = self.reader is self.cache and not self.cache.records
        return num == 1 and free and self.cache.started and not self.cache.workspace.reading

    @property
    def begins(self) -> bool:
        """Whether the next `attend` returns what stock attention does, as the tokens have no past."""
        return not self.cache.started and not self.rereading

    def step(self, q: Tensor, k: Tensor, v: Tensor, how: Attends) -> Tensor:
        """Attention output for one new token that is no padding, [B, Hq, 1, Dv]; arguments as in `attend`."""
        self._arrive()
        cache = self.cache
        cache.configure(how)
        q, k, v = q.detach(), k.detach(), v.detach()
        if not cache.static:
            return cache.step(q, k, v, self.seen - self.padding)
        if cache.config.correction.key_only:
            room = cache.workspace.positions
            torch._assert_async(self.seen <= room, "the sequence is longer than the model's positions")
        return cache.step(q, k, v)

    def step_before_rope(
        self, q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor], how: Attends
    ) -> Tensor | None:
        """`update` and `step` in one, as `LayerCache.step_before_rope` has it."""
        cache = self.cache
        if self.awaited:
            return None  # `update` says what is wrong
        cache.configure(how)
        out = cache.step_before_rope(q, k, v, turns, 0 if cache.static else self.seen + 1 - self.padding)
        if out is not None:
            self.named = False
            self.seen += 1
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, how: Attends, stock: Stock) -> Tensor:
        """Attention output for the tokens of a prompt, [B, Hq, T, Dv]; the cache afterwards includes them.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D], post-RoPE; valid [B, T] bool, false for padding.
            stock: runs the model's own attention over the new tokens.
        """
        self._arrive()
        if not self.reader.differentiates:
            q, k, v = q.detach(), k.detach(), v.detach()
        state, config = self.cache.state, self.cache.config
        has_slots = state is not None and (self.cache.started or len(state.seen) == len(k))
        if not isinstance(self.reader, HeldPrompt) and not has_slots:
            sizes = k.shape[-1], q.shape[1] // k.shape[1], v.shape[-1], self.cache.plan.latent
            check_backend(config.backend, k.device, k.dtype, *sizes, config.slots.name)  # whatever the module said
            self.cache.allocate(q.shape[1], k, v, self.expected or k.shape[2])
            self._fix()
        elif not self.cache.static:
            self.cache.deal(max(self.seen - self.padding, self.expected), GROWTH if self.cache.records else 1.0)
        self.reader.configure(how)
        return self.reader.read(q, k, v, valid, stock)

    def attend_shared(self, q: Tensor, how: Attends, stock: Stock) -> Tensor:
        """Attention of another layer, after this one's, to the same keys and values: [B, Hq, <= T, Dv].

        Args: q [B, Hq, <= T, D]: of all or the last tokens.  stock: that layer's attention over the new tokens.
        """
        ours = q.detach().to(self.device)  # the other layer may be on another one
        if self.decodes(q.shape[2]):
            return self.cache.step_shared(ours, how).to(q.device)
        return self.reader.attend_shared(ours, how, stock).to(q.device)

    def _fix(self) -> None:
        """Let the length of a static cache be a tensor that stays where it is."""
        if self.cache.static:
            if isinstance(self.seen, int):  # filled on the device: a copy from the host would wait for it
                self.seen = torch.full((), self.seen, dtype=torch.int64, device=self.device)
            fixed(self.seen)

    def adopted(self, seen: int, rolls_back: bool, dtype: torch.dtype) -> None:
        """The cache has adopted a saved state of so many tokens; dtype: of the model."""
        state, _ = self.cache.held()
        self.lazy_initialization(state.exact.keys)
        self.dtype, exact = dtype, state.exact
        if not self.cache.plan.latent:  # transformers' are of other sizes
            self.sizes = state.heads, exact.format.keys.dim(exact.keys.shape[-1]), exact.value_dim
        self.seen, self.cache.started = seen, seen > 0
        self.padding = seen - self.cache.config.budget.length_of(seen, state.seen)
        self._fix()
        if rolls_back:
            self.activate_past_recording()

    # A first prompt that is held in full until all layers have read it.

    def hold(self) -> HeldPrompt:
        """Hold the next forward, a first prompt, until `commit`."""
        self.reader = held = HeldPrompt(self.cache)
        return held

    def hold_tokens(self, tokens: HeldTokens, how: Attends, reread: Reread | None = None) -> HeldPrompt:
        """Hold tokens as if they had been read; k and v are overwritten where heads keep different numbers of them."""
        self.lazy_initialization(tokens[1], None if self.cache.plan.latent else tokens[2])  # transformers' are others
        self.seen = tokens[1].shape[2]
        self.padding = self.seen - self.cache.config.budget.length_of(self.seen, tokens[3].sum(-1))
        held = self.hold()
        held.held, held.attends, held.reread = tokens, how, reread
        return held

    @property
    def rereading(self) -> bool:
        """Whether a held prompt is being read again."""
        return isinstance(self.reader, HeldPrompt) and self.reader.reread is not None

    def commit(self, keep: float | None) -> None:
        """Compress the held prompt, see `HeldPrompt.commit`."""
        assert isinstance(self.reader, HeldPrompt)
        held, self.reader = self.reader, self.cache
        held.commit(keep)
        self._fix()

    # Roll-back for assisted decoding.

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the last forward can be taken back."""
        return self.cache.records

    def activate_past_recording(self) -> None:
        """From now on a forward is committed only by the next `crop`, or by the forward after it."""
        self.cache.records = True

    def dropped(self, tokens_to_remove: int) -> int:
        """How many of the last tokens `crop` takes back. Raises: FastKVError if they are compressed."""
        drop = max(self.seen - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        pending = self.cache.pending if self.is_croppable else None
        if drop and pending is None:  # what was accepted is compressed
            raise FastKVError(
                "a compressed cache cannot be cropped because evicted pairs are gone; start from a new cache, or use "
                "assisted decoding, which announces roll-backs"
            )
        if pending is not None and drop > (num := pending.k.shape[2]):
            raise FastKVError(
                f"cannot roll back {drop} tokens, the last block had {num} and older ones are compressed; start from a "
                "new cache, and let drafts be shorter than two blocks of prefill_block"
            )
        return int(drop)

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last -tokens_to_remove tokens; a positive number is the length to keep (until 5.18)."""
        drop = self.dropped(tokens_to_remove)
        if self.cache.pending is None:
            return
        self.cache.accept(drop)
        self.seen -= drop
        self.cache.started = bool(self.seen > 0)

    # The batch axis.

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis to every tensor; what may be rolled back is accepted."""
        stock.map_batch(self, change)
        if self.state is not None:
            self.cache.accept()
            self.cache.map_batch(change)
            self.batch_size = len(self.state.seen)

    def copied(self, workspace: CacheWorkspace) -> FastKVLayer:
        """An independent copy, one of the layers of that workspace."""
        twin = copy.copy(self)
        twin.cache = self.cache.copied(workspace)
        if isinstance(self.seen, Tensor):
            twin.seen = self.seen.clone()
            twin._fix()
        twin.reader = twin.cache
        if self.reader is not self.cache:
            twin.reader = copy.deepcopy(self.reader, {id(self.cache): twin.cache})
        stock.separate(twin)
        return twin

    def reset(self) -> None:
        """Forget the sequence but keep the slots, unless their number depends on the prompt."""
        self.cache.reset()
        if self.cache.state is None:
            self.is_initialized = False
        self.named = self.awaited = False
        self.seen *= 0  # in place where it is a tensor
        self.padding = 0
        self.reader = self.cache

    def offload(self) -> None:
        """Not supported: the state is small and read every step."""
        raise FastKVError("a compressed cache is not offloaded; leave cache_implementation unset")

    prefetch = offload


class HybridLayer(FastKVLayer, LinearAttentionLayer):  # type: ignore[misc]
    """A compressed layer beside transformers' state of linear attention, where one layer has both (Falcon-H1)."""

    def __init__(self, cache: LayerCache, *states: int) -> None:
        """Args: states: how many of linear attention, where transformers lets a layer have several."""
        LinearAttentionLayer.__init__(self, *states)
        FastKVLayer.__init__(self, cache)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of the cache, which is given keys, or of the state, which is given keywords."""
        kind = LinearAttentionLayer if kwargs else FastKVLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Not supported: a state of linear attention has no past to go back to."""
        raise FastKVError("a model with linear attention cannot take tokens back; decode without an assistant")

    def reset(self) -> None:
        """Forget the sequence."""
        LinearAttentionLayer.reset(self)
        super().reset()


# Sliding windows whose decode steps write into a ring at a fixed place: transformers' own layers move their tokens at
# every step, or count in numbers that would be part of a compiled graph. Prompts are still read by transformers' code:
# before one, the rings are unrolled into what that code expects, and after it rolled up again.


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
            self.seen = fixed(torch.zeros((), dtype=torch.int64, device=recent.device))
            self.place = fixed(torch.zeros(1, dtype=torch.int64, device=recent.device))
            self.real = fixed(torch.zeros(batch, self.size, dtype=torch.bool, device=recent.device))
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
        if dtype is None:
            return mask.clone()
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis."""
        if self.rolled:
            self.real = stock.changed(self.real, change)


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

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, Hkv, T, D]; returns those that the new tokens see."""
        if not self.ring.rolled:
            return super().update(key_states, value_states, *args, **kwargs)
        if self.counts:
            self.ring.seen.add_(1)
        self.keys.index_copy_(2, self.ring.place, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.ring.place, value_states.to(self.values.dtype))  # autocast stores fp32
        return self.keys, self.values

    def roll(self, recent: Tensor) -> None:
        """Put the last tokens at those places of the rings."""
        self.keys = self.key_room = self._rolled(self.keys, self.key_room, recent)
        self.values = self.value_room = self._rolled(self.values, self.value_room, recent)

    def _rolled(self, tokens: Tensor, room: Tensor | None, recent: Tensor) -> Tensor:
        batch, heads, num, dim = tokens.shape
        if room is None or room.shape[0] != batch:
            room = fixed(tokens.new_zeros(batch, heads, self.ring.size, dim))
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
        stock.map_batch(self, change)
        if self.ring.rolled:
            self.key_room, self.value_room = self.keys, self.values
