"""FastKVAttention: the compressed attention of one layer as a torch module, for models outside of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from .backend import autocast_dtype, check_backend
from .budget import Budget
from .cache import CacheWorkspace
from .cache.layer import LayerCache
from .cache.layout import Attends, LayerPlan, Layout
from .calibration.fits import QueryCalibration, VectorMap
from .config import BUDGET, EVICT_EVERY, POLICY, WITHOUT_ROTARY, Config, check_shares
from .corrections import Correction
from .errors import FastKVError, check_groups, check_shape, is_number, is_whole
from .policies import Policy
from .reference import FORMATS, PLAIN, LayerState, Moments
from .rotary import Rotary

NAME = "FastKVAttention"
MODEL_TYPED = ("exact_keys", "exact_values", "approx_keys", "moments_slope")  # change with the module's dtype

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # as numbers of them are saved


class FastKVAttention(Module):
    """Causal attention over all tokens so far, with a fixed number of slots: the cache of one layer of a model.

    It replaces `scaled_dot_product_attention` in a decoder layer: after the projections and the rotary embedding,
    before the output projection. It has no weights, and is for inference: no gradient passes through it. Its state is
    in buffers at fixed addresses, which `allocate` or the first forward makes.

    Args:
        num_heads: query heads, a multiple of num_kv_heads.  num_kv_heads: KV heads.  head_dim: size of every head.
        policy, budget, prefill_block, evict_every, correction, backend, slots: as in `fastkv.patch`, but without
            `rotary` the default policy is momentkv, and prefill_block is a number or None. Heads are uniform unless the
            budget has `HeadShares` of the whole model. `Budget(bytes=...)` is per sequence, for all `num_layers`;
            `Budget(keep=...)` is the share of the first prompt.
        scale: logit multiplier, head_dim ** -0.5 if None.  softcap: logits become softcap * tanh(logits / softcap).
        layer: index among the model's layers.  num_layers: layers that share the budget; 1: it is this layer's alone.
        rotary: the layer's rotary embedding, for policies and corrections that need keys before it.
        output: [hidden, num_heads * head_dim], weight of the layer's output projection, for policies that need it.
        sink_logits: [num_heads], learned logits of attention sinks, whose value is zero.
        vector: maps from keys to values, for correction="vector".
        queries: statistics of the model's queries, for policies that need them (TriAttention).
    Raises:
        FastKVError: if an argument cannot be used, or the method needs more than one layer sees.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        policy: str | Policy | None = None,
        budget: int | str | Budget = BUDGET,
        *,
        prefill_block: int | None = None,
        evict_every: int = EVICT_EVERY,
        correction: str | bool | Correction | None = "auto",
        scale: float | None = None,
        softcap: float | None = None,
        layer: int = 0,
        num_layers: int = 1,
        backend: str = "auto",
        rotary: Rotary | None = None,
        output: Tensor | None = None,
        sink_logits: Tensor | None = None,
        vector: VectorMap | None = None,
        queries: QueryCalibration | None = None,
        slots: str = "auto",
    ) -> None:
        super().__init__()
        _check_sizes(num_heads, num_kv_heads, head_dim, layer, num_layers)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        for name, number in (("scale", scale), ("softcap", softcap)):
            if number is not None and (not is_number(number) or not 0 < number < math.inf):
                raise FastKVError(f"{NAME}: {name} must be a finite number above 0, or None, got {number!r}")
        self.scale, self.softcap = head_dim**-0.5 if scale is None else float(scale), softcap
        policy = (WITHOUT_ROTARY if rotary is None else POLICY) if policy is None else policy
        config = Config.make(policy, budget, prefill_block, evict_every, correction, backend, None, slots)
        config = config.coded((head_dim,))
        turning = {} if rotary is None else {layer: rotary}
        self.config = replace(config, vector=vector, queries=queries, rotations=turning)
        self._check_alone(layer, num_layers, rotary, output)
        if sink_logits is not None:
            check_shape(NAME, "sink_logits", sink_logits, (num_heads,))
        self.borrowed = [output, sink_logits]  # in a list, because they are parameters of the model, not of this module
        plan = LayerPlan(self.config, layer, layer if num_layers > 1 else 0, num_layers)
        self.cache = LayerCache(plan, CacheWorkspace(evict_every=evict_every), static=True)
        self.cache.leads = True
        self.prompt = self.length = 0

    def _check_alone(self, layer: int, num_layers: int, rotary: Rotary | None, output: Tensor | None) -> None:
        """Raise FastKVError if the config asks for something that a layer on its own does not have or was not given."""
        config, vector = self.config, self.config.vector
        name = f"policy {config.policy.name!r}"
        if config.deferred:
            raise FastKVError(
                f"{NAME}: {config.deferred} reads the prompt with the whole model before it evicts, got one layer; use "
                "another method or fastkv.patch"
            )
        config.budget.check_layers(num_layers)
        check_shares(config, [self.num_kv_heads] * num_layers)
        if config.undoes_rotation and rotary is None:
            what = "correction='vector'" if config.correction.key_only else name
            raise FastKVError(
                f"{NAME}: {what} needs keys as they were before the rotary embedding, got no embedding; pass "
                "rotary=fastkv.rotary.Rotary(frequencies)"
            )
        if rotary is not None and not isinstance(rotary, Rotary):
            raise FastKVError(f"{NAME}: rotary must be a fastkv.rotary.Rotary, got {type(rotary).__name__}; make one")
        dim = self.head_dim
        if rotary is not None and (rotary.start not in range(-dim, dim) or rotary.start % dim + rotary.size > dim):
            raise FastKVError(
                f"{NAME}: the rotary embedding must turn at most {self.head_dim} dimensions of a head, got "
                f"{rotary.size} from {rotary.start} on; pass a frequency for every two of them"
            )
        if rotary is not None and config.correction.key_only and not rotary.halves(self.head_dim):
            raise FastKVError(
                f"{NAME}: correction='vector' needs the rotary embedding to turn all {self.head_dim} dimensions of a "
                f"head in halves, got another one of {rotary.size}; use another correction"
            )
        if config.needs("output"):
            if output is None:
                raise FastKVError(
                    f"{NAME}: {name} needs the layer's output projection, got none; pass output=proj.weight"
                )
            check_shape(NAME, "output", output, (None, self.num_heads * self.head_dim))
        if config.needs("query_statistics"):
            if config.queries is None:
                raise FastKVError(
                    f"{NAME}: {name} needs statistics of the model's queries, got none; pass "
                    "queries=QueryCalibration(...)"
                )
            check_shape(NAME, "queries", config.queries.of_layer(layer).mean, (self.num_heads, self.head_dim))
        if config.correction.key_only != (vector is not None):
            given = "the first" if config.correction.key_only else "the second"
            raise FastKVError(
                f"{NAME}: correction='vector' and vector=VectorMap(...) need each other, got {given} only; pass both"
            )
        if vector is not None:
            vector.usable(layer)
            width = self.head_dim * (self.num_kv_heads if vector.joint else 1)
            check_shape(NAME, "vector", vector.weights[layer], (self.num_kv_heads, width, self.head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of the new tokens to all tokens so far and, causally, to each other, [B, Hq, T, D].

        A single token after others, without a mask, is a decode step, also where it is left of a prompt behind blocks.
        Everything else is read like a prompt, in blocks if `prefill_block` is set. Evicted tokens take part by their
        estimate.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D]: after the rotary embedding, in the dtype of the buffers.
            mask [B, T]: false for padding, whose output is meaningless; None without padding.
        Raises: FastKVError if shapes, dtype or device do not fit the state.
        """
        if (dtype := autocast_dtype(q)) is not None:
            with torch.autocast(q.device.type, enabled=False):
                return self.forward(q.to(dtype), k.to(dtype), v.to(dtype), mask)
        q, k, v = q.detach(), k.detach(), v.detach()
        self._check_tokens(q, k, v, mask)
        if not self.cache.started or q.shape[2] != 1 or mask is not None:
            return self._read(q, k, v, mask)
        if not torch.compiler.is_compiling():
            return self._step(q, k, v)
        # The length, counted for VECTOR, must be an input of the graph and not a reason for another one at every step.
        with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
            return self._step(q, k, v)

    def _check_tokens(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Raise FastKVError unless new tokens fit each other and the state."""
        check_shape(NAME, "q", q, (None, self.num_heads, None, self.head_dim))
        batch, _, num, _ = q.shape
        if not num:
            raise FastKVError(f"{NAME} needs at least one new token, got none; leave the call out")
        check_shape(NAME, "k", k, (batch, self.num_kv_heads, num, self.head_dim))
        check_shape(NAME, "v", v, (batch, self.num_kv_heads, num, self.head_dim))
        if mask is not None:
            check_shape(NAME, "mask", mask, (batch, num))
            if mask.is_floating_point():
                raise FastKVError(f"{NAME}: mask must be bool, false for padding, got {mask.dtype}; pass mask != 0")
            if mask.device != q.device:
                raise FastKVError(f"{NAME}: mask must be on {q.device} as q is, got {mask.device}; move it")
        if not batch or not q.is_floating_point():
            raise FastKVError(
                f"{NAME} needs queries of at least one sequence in floating point, got {batch} of {q.dtype}"
            )
        device, dtype = q.device, q.dtype
        if self.state is not None:
            device, dtype, held = self.state.seen.device, self.state.exact.dtype, len(self.state.seen)
            if held != batch:
                raise FastKVError(f"{NAME} holds {held} sequences, got {batch}; allocate({batch}) forgets those it has")
        for one in (q, k, v):
            if (one.dtype, one.device) != (dtype, device):
                what = "begins with queries" if self.state is None else "has buffers"
                raise FastKVError(
                    f"{NAME} {what} of {dtype} on {device}, got tokens of {one.dtype} on {one.device}; move one of "
                    "them with .to(...)"
                )

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token."""
        if self.config.correction.key_only:
            self.length += 1  # the tables of cos and sin have to reach so far
        return self.cache.step(q, k, v, self.length)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """A prompt, in blocks."""
        num = longest = q.shape[2]
        if mask is not None and not torch.compiler.is_compiling():
            longest = self.config.budget.length_of(num, mask.bool().sum(-1))
        if self.state is None:
            self.allocate(len(q), q.device, q.dtype, prompt=longest)
        self._configure()  # the model may have loaded or moved its projection
        size = self.config.prefill_block or num
        real = torch.ones(len(q), num, dtype=torch.bool, device=q.device) if mask is None else mask.bool()
        outs = []
        for start in range(0, num, size):
            rows = slice(start, start + size)
            block = q[:, :, rows], k[:, :, rows], v[:, :, rows]
            if start and start + 1 == num and mask is None:
                outs.append(self.cache.step(*block, self.length + num))
                continue
            plain = mask is None and self.softcap is None and self.borrowed[1] is None
            stock = partial(scaled_dot_product_attention, *block, is_causal=True, scale=self.scale, enable_gqa=True)
            outs.append(self.cache.read(*block, real[:, rows].clone(), stock if plain else None))
        self.length += longest
        self.cache.prepare()  # unequal heads may have traded slots
        return torch.cat(outs, 2)

    def _configure(self) -> None:
        """Tell the cache how this layer attends."""
        output, sink_logits = self.borrowed
        device = self.cache.held()[0].seen.device
        if output is not None:
            output = output.detach().to(device).unflatten(1, (self.num_heads, self.head_dim))
        if sink_logits is not None:
            sink_logits = sink_logits.detach().to(device)
        self.cache.configure(Attends(self.scale, self.softcap, output, sink_logits))

    # The state.

    @property
    def state(self) -> LayerState | None:
        """What the layer remembers; None until it is allocated."""
        return self.cache.state

    def allocate(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        prompt: int | None = None,
    ) -> None:
        """Make empty buffers for `batch_size` sequences; without this call the first forward does it.

        Args: device, dtype: of queries, keys and values, torch's defaults if None; prompt: tokens of the first prompt,
            of which `Budget(keep=...)` is a share.
        Raises: FastKVError if the budget needs the prompt, is too small, or the backend cannot run there.
        """
        config, follows = self.config, self.config.budget.needs_prompt
        if follows is not None and prompt is None:
            raise FastKVError(
                f"{NAME}: how many slots there are is not known before the first prompt, got {follows}, pass "
                "allocate(..., prompt=length) or let the first forward allocate"
            )
        if not is_whole(batch_size, 1) or not is_whole(prompt or 0, 0):
            raise FastKVError(
                f"{NAME}: allocate needs at least one sequence and whole tokens, got {batch_size!r} and {prompt!r}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise FastKVError(
                f"{NAME}: allocate needs a dtype of floating-point numbers, got {dtype}; pass the model's"
            )
        like = torch.empty(batch_size, self.num_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        groups = self.num_heads // self.num_kv_heads
        check_backend(config.backend, like.device, like.dtype, self.head_dim, groups, slots=config.slots.name)
        self.cache.plan.of(like, like, prompt or 0)  # refuses a budget before anything is forgotten
        self._drop()
        self.cache.allocate(self.num_heads, like, like, prompt or 0)
        self.prompt = 0 if follows is None else prompt or 0
        for name, tensor in self.cache.held()[0].named_tensors():
            self.register_buffer(name.replace(".", "_"), tensor)
        self._configure()

    def _drop(self) -> None:
        """Give the buffers back."""
        for name in list(self._buffers):
            delattr(self, name)
        self.cache.state = self.cache.rule = None
        self.cache.started = False
        self.prompt = self.length = 0

    def reset(self) -> None:
        """Forget the sequences; buffers keep their addresses, unless their size depends on the prompt."""
        if self.config.budget.follows_prompt:
            self._drop()
        self.cache.reset()
        if self.state is not None:
            self.cache.prepare()
        self.length = 0

    def nbytes(self) -> int:
        """Bytes of everything: slots (used or not), positions, scores, the memory of evicted tokens, and scratch."""
        return self.cache.workspace.nbytes() + self.cache.nbytes()

    def stored(self) -> Tensor:
        """[B, Hkv] int32, number of tokens in the slots of each head."""
        return self.cache.held()[0].stored

    def moments(self) -> Moments:
        """Moments of the evicted tokens."""
        return self.cache.held()[0].moments

    # What torch does with a module: move it, save it, load it. Copies need nothing: state and buffers are one.

    def _bind(self) -> None:
        """Make the buffers the state's tensors again."""
        state, rule = self.cache.held()
        for name, _ in list(state.named_tensors()):
            buffer = self._buffers[name.replace(".", "_")]
            assert buffer is not None
            state.replace(name, buffer)
        self.cache.adopt(state, rule.layout, self.num_heads)
        self._configure()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FastKVAttention:
        """`.to(...)` and its like: keys and values follow the model's dtype, statistics stay what they are.

        Raises: FastKVError for `.type(...)`, which changes whole numbers, too.
        """
        if fn(torch.empty(0, dtype=torch.int32)).dtype != torch.int32:
            raise FastKVError(f"{NAME} holds positions and counts, which are whole numbers; use .to(dtype)")
        for name, tensor in self.named_buffers():
            if tensor.is_floating_point() and name not in MODEL_TYPED:
                # Seen as integers, statistics move to another device but no conversion of floats applies to them.
                whole = torch.int32 if tensor.itemsize == 4 else torch.int16
                self._buffers[name] = fn(tensor.view(whole)).view(tensor.dtype)
            else:
                self._buffers[name] = fn(tensor)
        slope = self._buffers.get("moments_slope")
        if slope is not None and slope.itemsize != 2:  # kernels take one of other sizes for the moments themselves
            del self._buffers["moments_slope"]
            self.moments().slope = None
        self.cache.workspace = self.cache.workspace.twin()
        if self.state is not None and self.state.exact.decodes_to is not None:
            self.state.exact.decodes_to = fn(torch.empty(0, dtype=self.state.exact.decodes_to)).dtype
        if self.state is not None:
            self._bind()
        return self

    def get_extra_state(self) -> Tensor:
        """What the host knows of the state, int64; empty if there is none."""
        if self.state is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        host = [self.prompt, self.length, self.cache.workspace.clock.now.steps, *_sizes(self.cache.held()[1].layout)]
        host += [number for tier in self.state.tiers.values() for number in (tier.filled, tier.limit)]
        if not self.config.slots.plain:
            host += [list(FORMATS).index(self.config.slots.name), DTYPES.index(self.state.exact.dtype)]
        policy = self.config.policy.name.encode()
        return torch.tensor([*host, *policy, len(policy)], device="cpu")

    def set_extra_state(self, host: Tensor) -> None:
        """Take over what `get_extra_state` returned; the buffers have been loaded."""
        (state, _), numbers = self.cache.held(), host.tolist()
        self.prompt, self.length = numbers[:2]
        self.cache.workspace.clock.move_to(numbers[2])
        for tier, filled, limit in zip(state.tiers.values(), numbers[6::2], numbers[7::2]):
            tier.filled, tier.limit = filled, limit
        self.cache.started = self.length > 0
        self._bind()
        self.cache.loaded()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a sequence, which makes or replaces the buffers where they do not fit it."""
        host = state_dict.get(prefix + "_extra_state")
        if host is None:
            return  # weights of a model from before this module was put in: there is no sequence to continue
        if not len(host):
            self._drop()
            return
        missing = [name for name in ("exact_keys", "seen") if prefix + name not in state_dict]
        if missing:
            raise FastKVError(f"{NAME}: the state holds a sequence but no {prefix}{missing[0]}; load one that is whole")
        end = len(host) - 1 - int(host[-1])
        policy, host = bytes(host[end:-1].tolist()).decode(), host[:end]
        if policy != self.config.policy.name:  # what is known of each token means something else
            raise FastKVError(
                f"{NAME}: a sequence of policy {policy!r} was saved, this module has {self.config.policy.name!r}; give "
                "it the same settings"
            )
        keys, batch, prompt = state_dict[prefix + "exact_keys"], len(state_dict[prefix + "seen"]), int(host[0])
        device = keys.device if self.state is None else self.state.seen.device
        saved = keys.dtype if keys.is_floating_point() else DTYPES[int(host[-1])]  # of the model
        dtype = saved if self.state is None else self.state.exact.dtype
        other = self.state is None or (len(self.state.seen), self.prompt) != (batch, prompt)
        like = torch.empty(batch, self.num_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        layout = self.cache.plan.of(like, like, prompt)[0] if other else self.cache.held()[1].layout
        own, sizes = _sizes(layout), host[3:6].tolist()
        if own != sizes:
            raise FastKVError(f"{NAME}: {sizes} slots were saved, this module has {own}; give it the same settings")
        # Codes are the only keys that are integers, and what they are is at the end of `host`.
        slots = PLAIN.name if keys.is_floating_point() else list(FORMATS)[int(host[-2])]
        if slots != self.config.slots.name:
            raise FastKVError(
                f"{NAME}: slots={slots!r} were saved, this module has slots={self.config.slots.name!r}; give it the "
                "same settings"
            )
        meant = layout.allocate(like.to("meta"), like.to("meta")).named_tensors()
        expected = {prefix + name.replace(".", "_"): tensor.shape for name, tensor in meant}
        given = {name: tensor.shape for name, tensor in state_dict.items() if name.startswith(prefix)}
        either = {prefix + "_extra_state", prefix + "moments_slope"}  # the second follows the backend
        apart = sorted(name for name, shape in given.items() ^ expected.items() if name not in either)
        if apart:
            raise FastKVError(
                f"{NAME}: {apart[0]} was saved as {_shown(given, apart[0])}, this module has "
                f"{_shown(expected, apart[0])}; give it the same settings"
            )
        if other:
            self.allocate(batch, device, dtype, prompt=prompt)
        self._match_slope(state_dict, prefix + "moments_")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _match_slope(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Let a saved state have the half-precision copy of its moments only if this module has: backends differ."""
        slope, name = self.moments().slope, f"{prefix}slope"
        if slope is None:
            state_dict.pop(name, None)
        elif name not in state_dict and f"{prefix}cross" in state_dict:
            count = state_dict[f"{prefix}count"].clamp(min=1)[..., None, None]
            state_dict[name] = (state_dict[f"{prefix}cross"] / count).to(slope.dtype)


def _shown(shapes: dict[str, torch.Size], name: str) -> str:
    return f"{list(shapes[name])}" if name in shapes else "nothing"


def _sizes(layout: Layout) -> list[int]:
    """Tokens with value, tokens without and spare slots, each in all heads."""
    return [sum(layout.tokens), sum(layout.approx), layout.spare]


def _check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, layer: int, num_layers: int) -> None:
    """Raise FastKVError unless these are the sizes of a model and the index of one of its layers."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers}
    for name, value in sizes.items():
        if not is_whole(value, 1):
            raise FastKVError(f"{NAME}: {name} must be a whole number of at least 1, got {value!r}; pass the model's")
    check_groups(NAME, num_heads, num_kv_heads)
    if not is_whole(layer, 0) or 1 < num_layers <= layer:
        below = f" below num_layers = {num_layers}" if num_layers > 1 else ""
        raise FastKVError(f"{NAME}: layer must be a whole number from 0{below}, got {layer!r}; count from 0")
