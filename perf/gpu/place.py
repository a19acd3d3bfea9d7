"""Where checks and timings run: on a GPU, or in a dry run on a CPU, where stand-ins take the place of the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..micro.states import Heads

HALF = torch.bfloat16  # what is timed


@dataclass(frozen=True)
class Place:
    """Where checks run.

    Attributes:
        device: of all tensors.
        toy: a dry run on tiny shapes: the reference stands in for kernels, and `StandIn` for CUDA.
    """

    device: torch.device
    toy: bool = False

    @property
    def cuda(self) -> Any:
        """`torch.cuda`, or what stands in for it."""
        return StandIn() if self.toy else torch.cuda

    @property
    def backend(self) -> str:
        """Of the operations that are checked and timed."""
        return "reference" if self.toy else "triton"

    @property
    def stance(self) -> Any:
        """A with block in which `torch.compile` compiles, or in a dry run leaves functions as they are."""
        return torch.compiler.set_stance("force_eager" if self.toy else "default")

    @property
    def slots(self) -> int:
        """Slots per head; not a multiple of any tile on the GPU."""
        return 40 if self.toy else 1008

    def heads(self, heads: Heads) -> Heads:
        """The heads, or few and small ones of that name."""
        return replace(heads, num_heads=4, num_kv_heads=2, head_dim=32) if self.toy else heads


class StandIn(nullcontext):
    """Stands in for `torch.cuda`, its streams, events and graphs: has what they have, and nothing waits for anything.

    A name that torch does not have raises, so that a dry run notices it. What is captured has run once already; a
    replay does nothing and takes 2 ms.
    """

    total_memory, L2_cache_size = 1 << 20, 1 << 10
    KNOWN = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph)

    def __getattr__(self, name: str) -> StandIn:
        if not any(hasattr(one, name) for one in self.KNOWN):
            raise AttributeError(f"torch.cuda has nothing called {name!r}")
        return self

    def __call__(self, *arguments: Any, **options: Any) -> StandIn:
        return self

    def elapsed_time(self, end: StandIn) -> float:
        """Milliseconds."""
        return 2.0


def forget_compiled() -> None:
    """Forget what `torch.compile` has compiled, so that every case is compiled for its own shapes.

    The reset goes through a table of backends, and importing inductor on the way adds to it: hence before.
    """
    import torch._inductor.cudagraph_trees

    torch.compiler.reset()


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention [B, Hq, D] of one query each over keys, values [B, Hkv, L, D]: what stands in for a peer's kernel."""
    return scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]


class FlashAttnStandIn:
    """Stands in for flash-attn: the call that `perf.gpu.peers` makes, with its arguments."""

    def flash_attn_with_kvcache(
        self, q: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor, softmax_scale: float
    ) -> Tensor:
        """Attention [B, 1, Hq, D] of q over all of keys, values [B, L, Hkv, D]."""
        return plain_attention(q[:, 0], keys.transpose(1, 2), values.transpose(1, 2), softmax_scale)[:, None]


class FlashInferStandIn:
    """Stands in for the package and for its wrapper: the calls that `perf.gpu.peers` makes."""

    def BatchDecodeWithPagedKVCacheWrapper(self, room: Tensor, layout: str, use_tensor_cores: bool) -> Any:
        return self

    def plan(self, *pages: Any, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        self.scale = sm_scale

    def run(self, q: Tensor, paged: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of q [B, Hq, D] over pages [pages, 16, Hkv, D] of equally many tokens each."""
        keys, values = (rows.reshape(len(q), -1, *rows.shape[2:]).transpose(1, 2) for rows in paged)
        return plain_attention(q, keys, values, self.scale)
