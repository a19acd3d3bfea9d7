"""FastKVAttention: a layer's compressed attention as a torch module, for models that are not transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from .alone import NAME, check_alone, check_sizes, check_tokens
from .backend import check_backend, uses_kernels
from .budget import Budget
from .cache.decode import decode_token
from .cache.prefill import absorb_block, attend_block, without_padding
from .cache.workspace import Shared
from .calibration.vector_map import VectorMap
from .config import LayerPlan, Plan
from .errors import FastKVError
from .parallel import Parallel
from .policies import Policy
from .reference import Moments
from .rotary import Rotary
from .state import LayerState, Layout

MODEL_TYPED = ("exact_keys", "exact_values", "approx_keys", "moments_slope")  # change with the module's dtype


class FastKVAttention(Module):
    """Causal attention over everything seen so far, in slots of a fixed number: the state and steps of a patched model.

    Stands where a decoder layer calls `scaled_dot_product_attention`: after the projections and the rotary embedding,
    before the output projection. It has no weights. It is for inference: no gradient passes through it. Its state is
    made of buffers whose addresses stay: `allocate` makes them, or the first forward does.

    Args:
        num_heads: of queries, a multiple of num_kv_heads.  num_kv_heads: of keys and values.  head_dim: of all of them.
        policy, budget, prefill_block, evict_every, correction, backend: as in `fastkv.patch`. `Budget(bytes=...)` is
            per sequence, for all `num_layers`; `Budget(keep=...)` is the share of the first prompt.
        scale: logit multiplier, head_dim ** -0.5 if None.  softcap: bends logits to softcap * tanh(logits / softcap).
        layer: index among the model's layers.  num_layers: how many of them share the budget; 1: it is this layer's.
        rotary: for policies and corrections that need keys as they were before the rotary embedding.
        output: [hidden, num_heads * head_dim], weight of the layer's output projection, for policies that need it.
        vector: maps from keys to values, for correction="vector".
    Raises:
        FastKVError: if an argument cannot be used, or the method needs more than one layer sees.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        policy: str | Policy = "momentkv",
        budget: int | Budget = 1024,
        *,
        prefill_block: int | None = None,
        evict_every: int = 16,
        correction: str | bool | None = "auto",
        scale: float | None = None,
        softcap: float | None = None,
        layer: int = 0,
        num_layers: int = 1,
        backend: str = "auto",
        rotary: Rotary | None = None,
        output: Tensor | None = None,
        vector: VectorMap | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_heads, num_kv_heads, head_dim, layer, num_layers)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer, self.num_layers = layer, num_layers
        self.scale, self.softcap = head_dim**-0.5 if scale is None else float(scale), softcap
        plan = Plan.make(policy, budget, prefill_block, evict_every, correction, backend, None)
        self.plan = replace(plan, values=vector)
        check_alone(self.plan, num_heads, num_kv_heads, head_dim, layer, num_layers, rotary, output)
        self.projection = [output]  # in a list, because it is a parameter of the model and not of this module
        self.shared = Shared(rotary=rotary, evict_every=evict_every)
        self.state: LayerState | None = None
        self.rule: LayerPlan | None = None
        self.prompt = self.length = 0
        self.started = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of the new tokens to all tokens so far and, causally, to each other, [B, Hq, T, D].

        One token after others, without a mask, is a decode step; everything else is read like a prompt, in blocks if
        there is a prefill_block. Evicted tokens take part through their moments.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D]: with their rotary embedding, in the dtype of the buffers.
            mask [B, T]: false for padding, whose output means nothing; None if there is none.
        Raises: FastKVError if shapes, dtype or device do not fit the state.
        """
        q, k, v = q.detach(), k.detach(), v.detach()
        check_tokens((self.num_heads, self.num_kv_heads, self.head_dim), self.state, q, k, v, mask)
        if not self.started or q.shape[2] != 1 or mask is not None:
            return self._read(q, k, v, mask)
        if not torch.compiler.is_compiling():
            return self._decode(q, k, v)
        # The length, counted for VECTOR, must be an input of the graph and not a reason for another one at every step.
        with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
            return self._decode(q, k, v)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token."""
        state, rule, shared, table = self.state, self.rule, self.shared, None
        assert state is not None and rule is not None
        shared.phase = shared.phase.next
        if state.approx is not None:
            self.length += 1  # the tables of cos and sin have to reach so far
            table = shared.table(q.device, self.length)
        return decode_token(state, q, k, v, rule, evicts=shared.phase.evicts, table=table)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """A prompt, in blocks."""
        num = q.shape[2]
        if self.state is None:
            self.allocate(len(q), q.device, q.dtype, prompt=num)
        self._settle()  # the model may have loaded or moved its projection
        state, rule, size = self.state, self.rule, self.plan.prefill_block or num
        assert state is not None and rule is not None
        real = torch.ones(len(q), num, dtype=torch.bool, device=q.device) if mask is None else mask.bool()
        outs = []
        for start in range(0, num, size):
            rows = slice(start, start + size)
            queries, valid = q[:, :, rows], real[:, rows].clone()
            keys, values = (without_padding(part[:, :, rows], valid) for part in (k, v))
            block = queries, keys, values
            if self.started or mask is not None or self.softcap is not None:
                outs.append(attend_block(state, *block, valid, rule))
            else:
                outs.append(scaled_dot_product_attention(*block, is_causal=True, scale=self.scale, enable_gqa=True))
            absorb_block(state, *block, valid, rule)
            self.started = True
        self.shared.phase = self.shared.first
        self.length += num
        if state.approx is not None:
            self.shared.table(q.device, self.length + 1)  # made here, not in a step
        self._settle()  # unequal heads may have traded slots
        return torch.cat(outs, 2)

    # The state.

    def allocate(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        prompt: int | None = None,
    ) -> None:
        """Make the buffers for so many sequences, empty; the first forward does it unless this was called before.

        Args: device, dtype: of queries, keys and values, torch's defaults if None; prompt: length of the first prompt,
            which `Budget(keep=...)` is a share of.
        Raises: FastKVError if the budget needs the prompt, is too small, or the backend cannot run there.
        """
        plan, budget = self.plan, self.plan.budget
        if budget.follows_prompt and prompt is None:
            raise FastKVError(
                f"{NAME}: Budget(keep=...) is a share of the first prompt, whose length is not known yet; pass "
                "allocate(..., prompt=length) or let the first forward allocate"
            )
        like = torch.empty(batch_size, self.num_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        groups, kernels = self.num_heads // self.num_kv_heads, uses_kernels(plan.backend, like.device)
        check_backend(plan.backend, like.device, like.dtype, self.head_dim, groups, plan.evict_every)

        def layout(tokens: int) -> Layout:
            return plan.layout(self.layer, self.num_kv_heads, tokens, budget.keep, kernels, Parallel())

        cost = LayerState.cost(like, like, layout)
        place = self.layer if self.num_layers > 1 else 0
        tokens = budget.layer_tokens(place, self.num_layers, prompt or 0, cost)
        self._drop()
        self.prompt = prompt or 0 if budget.follows_prompt else 0
        self.state = LayerState.allocate(like, like, layout(tokens))
        for name, tensor in self.state.named_tensors():
            self.register_buffer(name.replace(".", "_"), tensor)
        self._settle()

    def _settle(self) -> None:
        """Make what follows from the state and where it lies: the rule, and scratch for decoding."""
        state, plan, rotary = self._known(), self.plan, self.shared.rotary
        keys, output = state.exact.keys, None
        weight = None if plan.values is None else plan.values.weights[self.layer].to(keys.device)
        if self.projection[0] is not None:
            output = self.projection[0].detach().to(keys.device).unflatten(1, (self.num_heads, self.head_dim))
        self.rule = LayerPlan(
            plan=plan,
            layer=self.layer,
            layout=state.layout,
            scale=self.scale,
            softcap=self.softcap,
            rotary=rotary and rotary.to(keys.device),
            output=output,
            weight=weight,
        )
        state.scratch = self.shared.workspace(self.num_heads, state, plan.backend)
        for _, tensor in state.named_tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)  # graphs are captured over it, not over a copy

    def _drop(self) -> None:
        """Give the buffers back."""
        for name in list(self._buffers):
            delattr(self, name)
        self.state = self.rule = None
        self.prompt, self.length, self.started = 0, 0, False

    def reset(self) -> None:
        """Forget the sequences in place: buffers keep their addresses, unless their number depends on the prompt."""
        if self.plan.budget.follows_prompt:
            self._drop()
        if self.state is not None:
            self.state.zero_()
            self._settle()
        self.length, self.started, self.shared.phase = 0, False, self.shared.first

    def nbytes(self) -> int:
        """Bytes of everything: slots, used or not, positions, scores, moments and working memory."""
        return self.shared.nbytes() + (0 if self.state is None else self.state.nbytes())

    def stored(self) -> Tensor:
        """[B, Hkv] int32, tokens held in the slots of each head."""
        return self._known().stored

    def moments(self) -> Moments:
        """Moments of what was evicted."""
        return self._known().moments

    def _known(self) -> LayerState:
        if self.state is None:
            raise FastKVError(f"{NAME} is empty; run it or call allocate first")
        return self.state

    # What torch does with a module: move it, save it, load it. Copies need nothing: state and buffers are one.

    def _bind(self) -> None:
        """Make the buffers the state's tensors again."""
        state = self._known()
        for name, _ in list(state.named_tensors()):
            owner, _, field = name.rpartition(".")
            setattr(getattr(state, owner) if owner else state, field, self._buffers[name.replace(".", "_")])
        self._settle()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FastKVAttention:
        """`.to(...)` and its like: keys and values follow the model's dtype, statistics stay in float32."""
        for name, tensor in self.named_buffers():
            statistic = tensor.dtype == torch.float32 and name not in MODEL_TYPED
            # Seen as integers, they move to another device but no conversion of floats applies to them.
            self._buffers[name] = fn(tensor.view(torch.int32)).view(torch.float32) if statistic else fn(tensor)
        self.shared = self.shared.twin()
        if self.state is not None:
            self._bind()
        return self

    def get_extra_state(self) -> Tensor:
        """What the host knows of the state, int64; empty if there is none."""
        if self.state is None:
            return torch.empty(0, dtype=torch.int64)
        host = [self.prompt, self.length, self.shared.phase.steps, *_sizes(self.state.layout)]
        tiers = self.state.tiers.values()
        return torch.tensor(host + [number for tier in tiers for number in (tier.filled, tier.limit)])

    def set_extra_state(self, host: Tensor) -> None:
        """Take over what `get_extra_state` returned; the buffers have been loaded."""
        state, numbers = self._known(), host.tolist()
        self.prompt, self.length = numbers[:2]
        self.shared.move_to(numbers[2])
        for tier, filled, limit in zip(state.tiers.values(), numbers[6::2], numbers[7::2]):
            tier.filled, tier.limit = filled, limit
        self.started = self.length > 0
        self._bind()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a sequence, which makes or replaces the buffers where they do not fit it."""
        host = state_dict.get(prefix + "_extra_state")
        if host is None:
            return  # weights of a model from before this module was put in: there is no sequence to continue
        if not len(host):
            self._drop()
            return
        keys, batch, prompt = state_dict[prefix + "exact_keys"], len(state_dict[prefix + "seen"]), int(host[0])
        if self.state is None or (len(self.state.seen), self.prompt) != (batch, prompt):
            place = keys if self.state is None else self.state.exact.keys
            self.allocate(batch, place.device, place.dtype, prompt=prompt)
        own, saved = _sizes(self._known().layout), host[3:6].tolist()
        if own != saved:
            raise FastKVError(f"{NAME}: {saved} slots were saved, this module has {own}; give it the same settings")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _sizes(layout: Layout) -> list[int]:
    """Tokens with value, tokens without and spare slots, each in all heads."""
    return [sum(layout.tokens), sum(layout.approx), layout.spare]
