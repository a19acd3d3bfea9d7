"""FastKVCache: transformers' view of the per-layer states, and the plumbing `generate` expects of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from . import ops
from .backend import uses_kernels
from .budget import LayerCost
from .decode import decode_token
from .errors import FastKVError
from .plan import LayerPlan, Plan
from .prefill import absorb_block, attend_block
from .reference import Moments
from .state import LayerState

StockAttention = Callable[[], Tensor]


class Scratch:
    """Working memory of the decode kernels, one for all layers of a cache that have the same shape and device."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], list[Tensor]] = {}

    def get(self, q: Tensor, state: LayerState, backend: str) -> list[Tensor]:
        """The scratch for queries [B, Hq, T, D] over this state, made on first use; empty for the reference."""
        shape = (q.device, q.shape[1], *state.keys.shape, state.attention is not None)
        if shape not in self.made:
            collects = state.attention is not None
            self.made[shape] = ops.workspace(q, state.keys, attention=collects, backend=backend)
        return self.made[shape]

    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for made in self.made.values() for tensor in made)


class FastKVLayer(CacheLayerMixin):
    """One compressed layer. `update` stores nothing: the attention function owns the state and calls `attend`.

    Attributes:
        state: LayerState, None until the first tokens arrive.
        seen: length of the sequence as transformers counts it, padding included.
        expected: tokens of the prompt being read, set by the block loop so that `Budget(keep=...)` sees all of it.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, plan: Plan, layer: int, place: int, num_compressed: int, scratch: Scratch) -> None:
        super().__init__()
        self.plan, self.layer, self.scratch = plan, layer, scratch
        self.place, self.num_compressed = place, num_compressed
        self.state: LayerState | None = None
        self.rule: LayerPlan | None = None
        self.seen = self.expected = 0
        self.batch_size = 0
        self.recording = False
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    # What transformers asks of a layer.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the slots, once, for the shapes and device of the first keys and values [B, Hkv, T, D]."""
        values = key_states if value_states is None else value_states
        plan = self.plan
        kind: dict[str, Any] = {
            "order": plan.moment_order,
            "attention": plan.wants_attention,
            "slope": uses_kernels(plan.backend, key_states.device),
        }
        context = max(self.expected, key_states.shape[2])
        cost = LayerState.cost(key_states, values, **kind)
        with_slack = LayerCost(cost.per_slot, cost.fixed + cost.per_slot * plan.evict_every)
        tokens = plan.budget.layer_tokens(self.place, self.num_compressed, context, with_slack)
        self.rule = LayerPlan(plan, self.layer, tokens, scale=0.0)
        self.state = LayerState.allocate(key_states, values, tokens + plan.evict_every, **kind)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: keys and values [B, Hkv, T, D] are returned as they came."""
        if not self.is_initialized or (self.seen == 0 and key_states.shape[0] != self.batch_size):
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise FastKVError(
                f"this cache holds {self.batch_size} sequences, got {key_states.shape[0]}; use another, reset() it or "
                "change its batch with batch_select_indices and batch_repeat_interleave"
            )
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """True length of the sequence, evicted tokens included; RoPE positions follow from it."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """The stock mask covers the new tokens only: T keys, starting at the true length."""
        num = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return num, self.seen

    def get_max_length(self) -> int:
        """No maximum: the sequence may grow for ever, the slots do not."""
        return -1

    get_max_cache_shape = get_max_length  # the name until transformers 5.13

    # Attention.

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float, softcap: float | None, stock: StockAttention
    ) -> Tensor:
        """Attention output for the new tokens, [B, Hq, T, Dv]; the state afterwards includes them.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D], post-RoPE; valid [B, T] bool, false for padding.
            stock: runs the model's own attention over the new tokens; used where they have no past, because it is exact
                and fast.
        """
        assert self.state is not None and self.rule is not None
        state, q, k, v = self.state, q.detach(), k.detach(), v.detach()
        if self.rule.scale != scale or self.rule.softcap != softcap:
            self.rule = LayerPlan(self.plan, self.layer, self.rule.tokens, scale, softcap)
        if not state.scratch:  # also after a change of the batch: a decode step then allocates once, not every time
            state.scratch = self.scratch.get(q, state, self.plan.backend)
        num = k.shape[2]
        first = self.seen == num
        if num == 1 and not first and not self.recording:
            return decode_token(state, q, k, v, self.rule)
        self.settle(0)  # another forward without a roll-back: everything pending was accepted
        k, v = without_padding(k, valid), without_padding(v, valid)
        out = stock() if first else attend_block(state, q, k, v, valid, self.rule)
        if self.recording:
            self.pending = (q, k, v, valid)
        else:
            absorb_block(state, q, k, v, valid, self.rule)
        return out

    # Roll-back for assisted decoding: the last forward stays pending until it is known what was accepted.

    def activate_past_recording(self) -> None:
        """From now on a forward is committed only by the next `crop`, or by the forward after it."""
        self.recording = True

    def settle(self, drop: int) -> None:
        """Absorb what the last forward left pending, without its last `drop` tokens."""
        if self.pending is None:
            return
        num = self.pending[1].shape[2]
        if drop > num:
            raise FastKVError(f"cannot roll back {drop} tokens, the last forward had {num}; older ones are compressed")
        q, k, v, valid = self.pending
        self.pending = None
        if drop < num:
            assert self.state is not None and self.rule is not None
            kept = slice(0, num - drop)
            absorb_block(self.state, q[:, :, kept], k[:, :, kept], v[:, :, kept], valid[:, kept], self.rule)

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last -tokens_to_remove tokens; a positive number is the length to keep (until 5.12)."""
        drop = self.seen - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        if drop <= 0 and self.pending is None:
            return
        if not self.recording:
            raise FastKVError(
                "a compressed cache cannot be cropped because evicted pairs are gone; start from a new cache, or use "
                "assisted decoding with transformers >= 5.14, which announces roll-backs"
            )
        self.settle(drop)
        self.seen -= drop

    # The batch axis.

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.settle(0)
            self.state.map_batch_(change)
            if self.state.keys.shape[0] != self.batch_size:
                self.state.scratch = []
            self.batch_size = self.state.keys.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch continues from row beam_idx[i]."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._map_batch(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the given rows."""
        self._map_batch(lambda t: t[indices.to(t.device)])

    def reset(self) -> None:
        """Forget the sequence but keep the slots, unless their number depends on the prompt (`Budget(keep=...)`)."""
        if self.plan.budget.keep is not None:
            self.state, self.is_initialized = None, False
        if self.state is not None:
            self.state.zero_()
        self.seen = 0
        self.pending = None

    def offload(self) -> None:
        """Not supported: the state is small and read every step."""
        raise FastKVError("a compressed cache is not offloaded; leave cache_implementation unset")

    prefetch = offload


class FastKVCache(Cache):
    """The cache of a patched model: compressed full-attention layers, stock sliding-window layers.

    `model.generate` and `model(...)` make one by themselves; make one by hand to keep it across calls. `layer` in the
    methods below is the index of a full-attention layer of the model.

    Args:
        model: a model that `fastkv.patch` has patched.
    Raises:
        FastKVError: if it is not.
    """

    layers: list[Any]

    def __init__(self, model: Module) -> None:
        plan = model.__dict__.get("_fastkv_plan")
        if plan is None:
            raise FastKVError(
                f"FastKVCache needs a patched model, got {type(model).__name__}; call fastkv.patch(model) first"
            )
        self.scratch = Scratch()
        super().__init__(layers=build_layers(model.config, plan, self.scratch))
        self.plan: Plan = plan

    def _state(self, layer: int) -> LayerState:
        compressed = [i for i, one in enumerate(self.layers) if isinstance(one, FastKVLayer)]
        if layer not in compressed:
            raise FastKVError(f"layer {layer} is not compressed; the compressed layers are {compressed}")
        state = self.layers[layer].state
        if state is None:
            raise FastKVError(f"layer {layer} is empty; run the model with this cache first")
        return state

    @property
    def fully_compressed(self) -> bool:
        """Whether no layer is left to transformers."""
        return all(isinstance(layer, FastKVLayer) for layer in self.layers)

    def nbytes(self) -> int:
        """Bytes of everything: slots, used or not, positions, scores, moments, stock sliding-window layers, scratch."""
        total = self.scratch.nbytes()
        for layer in self.layers:
            if isinstance(layer, FastKVLayer):
                total += layer.state.nbytes() if layer.state is not None else 0
            else:
                total += sum(t.nbytes for t in (layer.keys, layer.values) if t is not None)
        return total

    def stored(self, layer: int) -> Tensor:
        """[B, Hkv] int32, tokens held in the slots of each head."""
        return self._state(layer).lengths

    def slots(self, layer: int) -> int:
        """Slots per head: the layer's budget plus `evict_every`."""
        return self._state(layer).slots

    def moments(self, layer: int) -> Moments:
        """Moments of what the layer has evicted."""
        return self._state(layer).moments


def without_padding(rows: Tensor, valid: Tensor) -> Tensor:
    """A contiguous copy of [B, H, T, D] with zeros where `valid` [B, T] is false: rows of padding may hold NaN."""
    zero = rows.new_zeros(())
    return torch.where(valid[:, None, :, None], rows, zero, out=rows.new_empty(rows.shape))


def build_layers(config: Any, plan: Plan, scratch: Scratch) -> list[Any]:
    """The stock layer structure for this config, with every plain full-attention layer replaced by a FastKVLayer."""
    stock = DynamicCache(config=config.get_text_config(decoder=True)).layers
    full = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    return [
        FastKVLayer(plan, index, full.index(index), len(full), scratch) if index in full else layer
        for index, layer in enumerate(stock)
    ]
