"""Who decode attention is compared with: the same retained tokens, one query per sequence, no moments, no append.

Every peer is checked against the reference before it is timed. A peer that cannot run here raises; the row then holds
the reason. FlashInfer (optional, 0.6.4) compiles on first use and needs nvcc; see perf/README.md. Blocks of prompts are
timed beside the attention of as many tokens to themselves, which is less.
"""

import ctypes.util
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastkv import reference

from ..micro.states import SCALE, Heads
from .clock import Case, Work, nbytes, num_sets, randn, right, tokens
from .place import HALF, FlashAttnStandIn, FlashInferStandIn, Place, forget_compiled, plain_attention

PAGE = 16  # tokens of a FlashInfer page
Builder = Callable[[Case, Place], Work]


def peer_bytes(heads: Heads, batch: int, length: int) -> int:
    """Keys, values, the query and its output, in half precision."""
    return 2 * HALF.itemsize * batch * heads.head_dim * (heads.num_kv_heads * length + heads.num_heads)


def peer(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], case: Case, place: Place, token_major: bool = False
) -> Work:
    """Time `attend(q [B, Hq, D], keys, values)`, keys and values [B, Hkv, L, D], or [B, L, Hkv, D] if token-major."""
    heads, batch, length, dim = case.heads, case.batch, case.length, case.heads.head_dim
    shape = (batch, length, heads.num_kv_heads, dim) if token_major else (batch, heads.num_kv_heads, length, dim)
    needed = peer_bytes(heads, batch, length)
    shapes = ((batch, heads.num_heads, dim), shape, shape)
    cells = [[randn(place, *one) for one in shapes] for _ in range(num_sets(place, needed))]
    q, keys, values = (t[:1] for t in cells[0])
    if token_major:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    lengths = torch.full(keys.shape[:2], length, device=place.device)
    want = reference.decode_attention(q.float(), keys, values, lengths, None, SCALE)[0]
    error = right(attend(*cells[0])[:1].reshape(want.shape), want)
    return Work(lambda index: attend(*cells[index]), len(cells), needed, error=error)


def sdpa(case: Case, place: Place, backend: SDPBackend) -> Work:
    """torch's own attention, one backend, grouped heads not repeated."""

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH if place.toy else backend):
            return plain_attention(q, keys, values, SCALE)

    return peer(attend, case, place)


def flex(case: Case, place: Place) -> Work:
    """FlexAttention, compiled for this one shape."""
    from torch.nn.attention.flex_attention import flex_attention

    forget_compiled()
    run: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return run(q[:, :, None], keys, values, scale=SCALE, enable_gqa=True)[:, :, 0]

    return peer(attend, case, place)


def import_flashinfer(place: Place) -> Any:
    """The package, with its compiler able to link libcuda and to write somewhere; ImportError if not installed."""
    if place.toy:
        return FlashInferStandIn()
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError("flashinfer is not installed")
    room = Path(tempfile.gettempdir()) / "fastkv-flashinfer"
    room.mkdir(exist_ok=True)
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    folders = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib")
    found = next((Path(folder) / name for folder in folders if (Path(folder) / name).exists()), None)
    if found is not None and not (room / "libcuda.so").exists():
        (room / "libcuda.so").symlink_to(found)
    os.environ["LIBRARY_PATH"] = ":".join(filter(None, (str(room), os.environ.get("LIBRARY_PATH"))))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(room))
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    return importlib.import_module("flashinfer")


def flashinfer(case: Case, place: Place, tensor_cores: bool) -> Work:
    """FlashInfer: batched decode over pages of 16 tokens, planned before the clock runs."""
    package, heads = import_flashinfer(place), case.heads
    room = torch.zeros(1 if place.toy else 256 << 20, dtype=torch.uint8, device=place.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=tensor_cores)
    pages, numbers = case.length // PAGE, {"dtype": torch.int32, "device": place.device}
    start = torch.arange(case.batch + 1, **numbers) * pages
    index, last = torch.arange(case.batch * pages, **numbers), torch.full((case.batch,), PAGE, **numbers)
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE)
    wrapper.plan(start, index, last, *sizes, q_data_type=HALF, kv_data_type=HALF, sm_scale=SCALE)

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        paged = tuple(t.view(-1, PAGE, heads.num_kv_heads, heads.head_dim) for t in (keys, values))
        return wrapper.run(q, paged)

    return peer(attend, case, place, token_major=True)


def with_kvcache(case: Case, place: Place, name: str) -> Work:
    """Decode attention over a contiguous cache by flash-attn 2 (flash_attn) or 3 (flash_attn_interface)."""
    package: Any = FlashAttnStandIn() if place.toy else importlib.import_module(name)
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=place.device)

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = lengths[: len(q)]
        return package.flash_attn_with_kvcache(q[:, None], keys, values, cache_seqlens=held, softmax_scale=SCALE)

    return peer(attend, case, place, token_major=True)


def prompt(place: Place, case: Case) -> list[Tensor]:
    """q [B, T, Hq, D], k and v [B, T, Hkv, D] of a block."""
    return [part.transpose(1, 2).contiguous() for part in tokens(place, case.heads, case.batch, case.length)]


def causal(case: Case, place: Place) -> Work:
    """A block's attention to itself alone, by torch."""
    needed = nbytes(*(first := prompt(place, case)), first[0])  # the output is like q
    cells = [first, *(prompt(place, case) for _ in range(num_sets(place, needed) - 1))]

    def launch(index: int) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in cells[index])
        with sdpa_kernel(SDPBackend.MATH if place.toy else SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

    return Work(launch, len(cells), needed)


def copy(case: Case, place: Place) -> Work:
    """A device copy that moves as many bytes as a peer has to: what a launch of this size can reach at best."""
    size = peer_bytes(case.heads, case.batch, case.length) // 2
    sets = num_sets(place, 2 * size)
    source = torch.randint(0, 100, (sets, max(size, 16)), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return Work(lambda index: target[index].copy_(source[index]), sets, 2 * size)


PEERS: dict[str, Builder] = {
    "copy": copy,
    "SDPA flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "FlashInfer": partial(flashinfer, tensor_cores=False),
    "FlashInfer tensor cores": partial(flashinfer, tensor_cores=True),
    "flash-attn 2": partial(with_kvcache, name="flash_attn"),
    "flash-attn 3": partial(with_kvcache, name="flash_attn_interface"),
    "FlexAttention": flex,
}
