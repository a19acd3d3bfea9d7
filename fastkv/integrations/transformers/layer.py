"""FastKVLayer: transformers' view of one layer's state, and where its attention function hands tokens over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...backend import uses_kernels
from ...cache.decode import decode_token
from ...cache.prefill import absorb_block, attend_block, attend_held, without_padding
from ...cache.workspace import Shared
from ...config import LayerPlan, Plan
from ...errors import FastKVError
from ...state import LayerState, Layout

StockAttention = Callable[[], Tensor]


class FastKVLayer(CacheLayerMixin):
    """One compressed layer. `update` stores nothing: the attention function owns the state and calls `attend`.

    Attributes:
        state: LayerState, None until the first tokens arrive.
        static: whether a decode step may be compiled into one graph: it then changes tensors only, at fixed addresses.
        seen: length of the sequence as transformers counts it, padding included; int64 [] on the device if static.
        started: whether there is a past.
        expected: tokens of the prompt being read, set by the block loop so that `Budget(keep=...)` sees all of it.
        deferring: whether the next forward is held in full until `commit`.  received: see `read_again`.
    """

    is_croppable = False
    is_sliding = False

    def __init__(
        self, plan: Plan, layer: int, place: int, num_compressed: int, shared: Shared, static: bool = False
    ) -> None:
        super().__init__()
        self.is_compileable = self.static = static
        self.plan, self.layer, self.shared, self.budget = plan, layer, shared, plan.budget
        self.place, self.num_compressed = place, num_compressed
        self.state: LayerState | None = None
        self.rule: LayerPlan | None = None
        self.seen: Any = 0
        self.expected = self.batch_size = 0
        self.started = self.recording = self.deferring = False
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.received: Tensor | None = None

    # What transformers asks of a layer.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember the shape of the first keys and values [B, Hkv, T, D] and, unless deferring, allocate the slots."""
        values = key_states if value_states is None else value_states
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        self.is_initialized = True
        if not self.deferring:
            self.allocate(key_states, values)

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make the slots, once, for the shapes and device of keys and values [B, Hkv, T, D]."""
        plan, budget, parallel = self.plan, self.budget, self.shared.parallel
        heads, kernels = keys.shape[1], uses_kernels(plan.backend, keys.device)

        def layout(tokens: int) -> Layout:
            return plan.layout(self.layer, heads, tokens, budget.keep, kernels, parallel)

        cost, context = LayerState.cost(keys, values, layout), max(self.expected, keys.shape[2])
        tokens = budget.layer_tokens(self.place, self.num_compressed, context, cost)
        self.adopt(LayerState.allocate(keys, values, layout(tokens)))

    def adopt(self, state: LayerState) -> None:
        """Go on from a state that was laid out for this layer: a new one or a saved one."""
        keys, shared = state.exact.keys, self.shared
        self.dtype, self.device, self.batch_size = keys.dtype, keys.device, keys.shape[0]
        self.is_initialized = True
        rotary = None if shared.rotary is None else shared.rotary.to(keys.device)
        weight = None
        if self.plan.values is not None:
            weight = shared.parallel.own(self.plan.values.weights[self.layer][None])[0].to(keys.device)
        self.rule = LayerPlan(self.plan, self.layer, state.layout, 0.0, None, shared.parallel, rotary, None, weight)
        self.state = state
        if self.static:
            self.seen = torch.as_tensor(self.seen, dtype=torch.int64, device=self.device)
        self.settle_in()

    def settle_in(self) -> None:
        """Make working memory for the state as it is now and, if static, promise that all of it stays where it is."""
        state, shared = self.state, self.shared
        assert state is not None
        state.scratch = shared.workspace(state.heads * shared.groups[self.layer], state, self.plan.backend)
        if state.approx is not None:
            shared.table(self.device, 0)  # made here, not in a step
        if self.static:
            weight = None if self.rule is None else self.rule.weight
            for tensor in (*self.changed(), *state.scratch, *([] if weight is None else [weight])):
                torch._dynamo.mark_static_address(tensor, guard=False)  # captured graphs then read and write in place

    def changed(self) -> list[Tensor]:
        """All tensors that a decode step changes, if static."""
        assert self.state is not None
        return [self.seen, *(tensor for _, tensor in self.state.named_tensors())]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: keys and values [B, Hkv, T, D] are returned as they came."""
        if not self.is_initialized or (not self.started and key_states.shape[0] != self.batch_size):
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise FastKVError(
                f"this cache holds {self.batch_size} sequences, got {key_states.shape[0]}; use another, reset() it or "
                "change its batch with batch_select_indices and batch_repeat_interleave"
            )
        if self.received is None:
            self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> Any:
        """True length of the sequence, evicted tokens included; RoPE positions follow from it."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The stock mask covers the new tokens only: T keys, starting at the true length."""
        return (query_length.shape[0] if isinstance(query_length, Tensor) else query_length), int(self.seen)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name until transformers 5.13

    # Attention.

    def decodes(self, num: int) -> bool:
        """Whether the next `num` tokens are one decode step."""
        return num == 1 and self.started and not self.recording and self.received is None

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, output: Tensor | None = None
    ) -> Tensor:
        """Attention output for one new token that is no padding, [B, Hq, 1, Dv]; arguments as in `attend`."""
        state, shared, rule, table = self.state, self.shared, self._rule(scale, softcap, output), None
        assert state is not None
        if self.place == 0:
            shared.phase = shared.phase.next
        if state.approx is not None:
            table = shared.table(q.device, 0 if self.static else self.seen)
            if self.static:
                torch._assert_async(self.seen <= len(table[0]), "the sequence is longer than the model's positions")
        return decode_token(state, q.detach(), k.detach(), v.detach(), rule, evicts=shared.phase.evicts, table=table)

    def _rule(self, scale: float, softcap: float | None, output: Tensor | None) -> LayerPlan:
        assert self.rule is not None
        if (self.rule.scale, self.rule.softcap) != (scale, softcap) or self.rule.output is not output:
            self.rule = replace(self.rule, scale=scale, softcap=softcap, output=output)
        return self.rule

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor,
        scale: float,
        softcap: float | None,
        stock: StockAttention,
        output: Tensor | None = None,
    ) -> Tensor:
        """Attention output for the tokens of a prompt, [B, Hq, T, Dv]; the state afterwards includes them.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D], post-RoPE; valid [B, T] bool, false for padding.
            stock: runs the model's own attention over the new tokens; used where they have no past: exact and fast.
            output: [hidden, Hq, Dv], the layer's output projection, for policies that need it.
        """
        q, k, v = q.detach(), k.detach(), v.detach()
        if self.received is not None:
            return self.read_again(q, k, v, valid, scale, softcap)
        if self.deferring:
            self.pending = (q, without_padding(k, valid), without_padding(v, valid), valid)
            self.settings = (scale, softcap, output)
            return stock()
        state, rule = self.state, self._rule(scale, softcap, output)
        assert state is not None
        self.settle(0)  # another forward without a roll-back: everything pending was accepted
        k, v = without_padding(k, valid), without_padding(v, valid)
        out = attend_block(state, q, k, v, valid, rule) if self.started else stock()
        self.started = True
        if self.recording:
            self.pending = (q, k, v, valid)
        else:
            self._absorb(q, k, v, valid)
        return out

    def _absorb(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, attention: Tensor | None = None) -> None:
        """Make tokens of a prompt part of the state; shapes as in `attend`."""
        state = self.state
        assert state is not None and self.rule is not None
        absorb_block(state, q, k, v, valid, self.rule, attention)
        self.shared.phase = self.shared.first
        if state.exact.starts is not None:
            self.settle_in()  # the longest head may have changed

    # A first prompt that is held in full until all layers have read it: `deferring`, perhaps `read_again`, `commit`.

    def read_again(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention of re-fed tokens over the held prompt and themselves; `received` [B, Hkv, N] becomes the most any
        of them gave to each token of the prompt. Nothing is stored.
        """
        assert self.pending is not None and self.received is not None
        out, most = attend_held(q, k, v, valid, self.pending[1:], scale, softcap)
        self.received = self.received.maximum(most)
        return out

    def commit(self, keep: float | None) -> None:
        """Compress the held prompt, to the share `keep` of its tokens if that was left open."""
        assert self.pending is not None
        q, k, v, valid = self.pending
        if keep is not None:
            self.budget = replace(self.budget, quality=None, calibration=None, keep=keep)
        self.allocate(k, v)
        self._rule(*self.settings)
        received, self.pending, self.received, self.deferring = self.received, None, None, False
        self.started = True
        self._absorb(q, k, v, valid, received)

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
            kept = slice(0, num - drop)
            self._absorb(q[:, :, kept], k[:, :, kept], v[:, :, kept], valid[:, kept])

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
        self.started = self.seen > 0

    # The batch axis.

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.settle(0)
            self.state.map_batch_(change)
            if self.state.seen.shape[0] != self.batch_size:
                self.settle_in()
            self.batch_size = self.state.seen.shape[0]

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
        """Forget the sequence but keep the slots, unless their number depends on the prompt."""
        if self.plan.budget.follows_prompt or self.plan.deferred:
            self.state, self.is_initialized, self.budget = None, False, self.plan.budget
        if self.state is not None:
            self.state.zero_()
            self.shared.phase = self.shared.first
        self.seen *= 0  # in place where it is a tensor
        self.pending = self.received = None
        self.started = self.deferring = False

    def offload(self) -> None:
        """Not supported: the state is small and read every step."""
        raise FastKVError("a compressed cache is not offloaded; leave cache_implementation unset")

    prefetch = offload
