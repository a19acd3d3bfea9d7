"""How fastkv's operators are called: a cache layer as they take it, and a function for each that changes with it.

The only file of perf/ that knows their arguments. `module` is `fastkv.ops`, with a backend among the further arguments,
or `fastkv.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkv import ops
from fastkv.reference import Centroids, Moments, Selection

SCALE = 0.1
EVICTED = 5000  # tokens in the statistics of a random layer
SINKS, RECENT = 4, 8
Attended = tuple[Tensor, ...]  # out, log-sum-exp of everything and of the evicted tokens


@dataclass
class State:
    """The slots of a cache layer and what it remembers of evicted tokens.

    Attributes:
        keys, values [B, Hkv, C, D], positions [B, Hkv, C], lengths [B, Hkv]: the slots.  seen [B]: tokens so far.
        moments, centroids: of the evicted tokens; without centroids the moments take part in attention.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    seen: Tensor
    moments: Moments
    centroids: Centroids | None = None

    @property
    def slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """keys, values, positions, lengths."""
        return self.keys, self.values, self.positions, self.lengths


def filled(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    tokens: int,
    *,
    free: int = 0,
    order: int | None = 1,
    num_centroids: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> State:
    """Random numbers, never zeros, which run faster than data: `tokens` stored per head, and `free` slots.

    Args: order: of the moments; None to remember nothing.  num_centroids: of the evicted tokens, instead of moments.
    """
    shape = batch, num_kv_heads, tokens + free

    def randn(*size: int) -> Tensor:
        return torch.randn(*shape[:2], *size, device=device)

    count = torch.full(shape[:2], EVICTED, device=device)
    moments, centroids = Moments(count), None
    if num_centroids:
        each = torch.full((*shape[:2], num_centroids), EVICTED / num_centroids, device=device)
        means = randn(num_centroids, head_dim), randn(num_centroids, head_dim)
        centroids = Centroids(each, *means, torch.rand_like(each) * each)
    elif order == 0:
        moments = Moments(count, *(0.1 * randn(head_dim) for _ in "kv"))
    elif order == 1:
        slope = (0.1 * randn(head_dim, head_dim)).to(dtype)
        half = slope if dtype.itemsize == 2 else None
        moments = Moments(count, *(0.1 * randn(head_dim) for _ in "kv"), slope.float() * EVICTED, half)
    return State(
        *(randn(shape[2], head_dim).to(dtype) for _ in "kv"),
        torch.arange(shape[2], dtype=torch.int32, device=device).expand(shape).contiguous(),
        torch.full(shape[:2], tokens, dtype=torch.int32, device=device),
        torch.full((batch,), tokens + EVICTED, device=device),
        moments,
        centroids,
    )


def workspace(q: Tensor, state: State, attention: bool = False, backend: str = "triton") -> list[Tensor]:
    """What decode steps of this shape need beside the state. q [B, Hq, D]."""
    return ops.workspace(q[:, :, None], state.keys, attention=attention, backend=backend)


def decode_step(module: Any, state: State, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Attended:
    """Append a token and attend. q [B, Hq, D]; k, v [B, Hkv, 1, D]."""
    held = {} if state.centroids is None else {"centroids": state.centroids}
    return module.decode_step(q, k, v, *state.slots, state.seen, state.moments, SCALE, **held, **rest)


def decode_attention(module: Any, state: State, q: Tensor, **rest: Any) -> Attended:
    """Attend. q [B, Hq, D]."""
    return module.decode_attention(q, state.keys, state.values, state.lengths, state.moments, SCALE, **rest)


def prefill_attention(
    module: Any, state: State, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, **rest: Any
) -> Attended:
    """A block of queries over slots, statistics and itself. q [B, Hq, T, D]; k, v [B, Hkv, T, D]; valid [B, T]."""
    held = state.keys, state.values, state.lengths
    return module.prefill_attention(q, *held, k, v, valid, state.moments, SCALE, **rest)


def evict(module: Any, state: State, scores: Tensor, tokens: int, **rest: Any) -> None:
    """Shrink every head to `tokens`. scores [B, Hkv, C]."""
    module.evict(*state.slots, state.seen, state.moments, scores, tokens, SINKS, RECENT, **rest)


def compact(
    module: Any, state: State, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor, kept: Selection, **rest: Any
) -> None:
    """Put what was selected of slots and a block into the slots. positions: of the block; valid: of all candidates."""
    module.compact(*state.slots, state.moments, k, v, positions, valid, kept, **rest)


def moment_scores(state: State, attention: Tensor, backend: str = "auto") -> Tensor:
    """Attention times residual of every slot."""
    return ops.moment_scores(attention, state.keys, state.values, state.moments, SCALE, backend=backend)


def add_to_centroids(state: State, k: Tensor, v: Tensor) -> None:
    """Merge evicted pairs [B, Hkv, N, D] into the centroids."""
    ops.centroids_add(state.centroids, k, v)
