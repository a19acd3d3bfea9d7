"""What the kernels share: dot products that also run in the interpreter, the base-2 softmax update, small host helpers.

The interpreter cannot compute in bf16 (neither arithmetic nor `tl.dot`), so every loaded tile goes to `_dot`, which
upcasts there, or to `.to(tl.float32)`. Softmax is in base 2: scores carry a factor log2(e), log-sums are log2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import FastKVError, check_groups, check_shape
from ..reference import Centroids

INTERPRET = bool(triton.knobs.runtime.interpret)  # fixed at import, as it is for every @triton.jit
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MAX_FP32 = tl.constexpr(3.4028234663852886e38)
MIN_ROWS = 16  # tl.dot pads fewer rows to this anyway
MAX_HEAD_DIM = 256
CUDA_ARCHES, HIP_ARCHES = ("80", "90", "100"), ("gfx942",)


@triton.jit
def _dot32(a, b, INTERP: tl.constexpr):
    """a @ b for fp32 operands at fp32 accuracy: never TF32."""
    if INTERP:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="bf16x6")


@triton.jit
def _dot(a, b, INTERP: tl.constexpr):
    """a @ b with fp32 accumulation, for operands of one dtype: fp16 and bf16 on tensor cores, fp32 at full accuracy."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        return _dot32(a, b, INTERP)
    else:
        return tl.dot(a, b)


@triton.jit
def _tanh(x):
    """tanh to fp32 accuracy, also near zero, where 2 sigmoid(2x) - 1 cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    outer = (1 - decay) / (1 + decay)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -outer, outer))


@triton.jit
def _logits2(products, scale, softcap, HAS_CAP: tl.constexpr):
    """Base-2 logits log2(e) * softcapped(scale * products)."""
    if HAS_CAP:
        return softcap * LOG2E * _tanh(products * (scale / softcap))
    else:
        return products * (scale * LOG2E)


@triton.jit
def _softmax_update(top, total, acc, logits2):
    """One step of the online softmax over the last axis; -inf everywhere is an empty set, never NaN.

    Args: top, total [M], acc [M, D] so far (start: -inf, 0, 0); logits2 [M, N], base 2, -inf where masked.
    Returns: top, total, acc rescaled to the new top, and weights [M, N] still to be multiplied into acc.
    """
    new_top = tl.maximum(top, tl.max(logits2, 1))
    floor = tl.where(new_top == -float("inf"), 0.0, new_top)
    decay = tl.exp2(top - floor)
    weights = tl.exp2(logits2 - floor[:, None])
    return new_top, total * decay + tl.sum(weights, 1), acc * decay[:, None], weights


@triton.jit
def _normalise(total, acc):
    """acc / total, zero where total is zero."""
    return acc * tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)[:, None]


@triton.jit
def _order_bits(x):
    """uint32 that sort as the fp32 x do; -0.0 equals 0.0, NaN and -inf equal the lowest finite number."""
    x = tl.where(x == x, x, -MAX_FP32)
    x = tl.minimum(tl.maximum(x, -MAX_FP32), MAX_FP32)
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # no ~: the interpreter cannot


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled, as data for `perf.aot`. A kernel module lists its own in `AOT`.

    An argument in neither `types` nor `constants` is None (an absent tensor); INTERP is False.

    Attributes:
        types: argument name -> Triton type ("*bf16", "*fp32", "i32", "fp32").  constants: constexpr values.
        div16: integer arguments that are multiples of 16 (pointers always are).
        wide: 16-byte loads are expected.  arches: where it is used, all if empty ("80", "90", "100", "gfx942").
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    div16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    wide: bool = True
    arches: tuple[str, ...] = ()


def pow2(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def on_hip() -> bool:
    """Whether this torch is built for AMD."""
    return torch.version.hip is not None


def stages(wanted: int, hip: bool | None = None) -> int:
    """Software-pipeline depth: AMD has a quarter of the shared memory and pipelines through registers."""
    return min(wanted, 2) if (on_hip() if hip is None else hip) else wanted


def check_contiguous(op: str, **tensors: Tensor | None) -> None:
    """Raise FastKVError for the first tensor that is not contiguous: kernels index by shape alone and never copy."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise FastKVError(
                f"{op}: {name} must be contiguous, got strides {tensor.stride()} for shape {list(tensor.shape)}; "
                "call .contiguous() where it is made"
            )


def check_centroids(op: str, centroids: Centroids, shape: tuple[int, ...], dim: int, value_dim: int) -> None:
    """Raise FastKVError unless all tensors are fp32, contiguous and for `shape` [B, Hkv, M] centroids."""
    count, keys, values, spread = centroids.tensors()
    check_shape(op, "centroids.count", count, shape)
    check_shape(op, "centroids.keys", keys, (*shape, dim))
    check_shape(op, "centroids.values", values, (*shape, value_dim))
    check_shape(op, "centroids.spread", spread, shape)
    check_contiguous(op, centroid_count=count, centroid_keys=keys, centroid_values=values, centroid_spread=spread)
    if {t.dtype for t in centroids.tensors()} != {torch.float32}:
        raise FastKVError(
            f"{op} needs centroids in float32, got {', '.join(str(t.dtype) for t in centroids.tensors())}; convert them"
        )


def check_head_dim(op: str, head_dim: int) -> None:
    """Raise FastKVError unless the kernels support this head size."""
    if head_dim > MAX_HEAD_DIM or head_dim % 16:
        raise FastKVError(
            f"{op} supports head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}; use backend='reference'"
        )


def check_decode(op: str, q: Tensor, keys: Tensor, values: Tensor, *same_dtype: Tensor) -> int:
    """Query heads per KV head, or FastKVError unless q [B, Hq, D] and keys, values [B, Hkv, C, D] suit the kernel."""
    batch, num_heads, dim = q.shape
    heads, slots = keys.shape[1:3]
    groups = check_groups(op, num_heads, heads)
    check_head_dim(op, dim)
    check_shape(op, "keys", keys, (batch, heads, slots, dim))
    check_shape(op, "values", values, (batch, heads, slots, dim))
    dtypes = {t.dtype for t in (q, keys, values, *same_dtype)}
    if groups > MIN_ROWS or len(dtypes) > 1 or q.dtype == torch.float64:
        raise FastKVError(
            f"{op} needs one dtype below float64 and at most {MIN_ROWS} query heads per KV head, got "
            f"{', '.join(sorted(map(str, dtypes)))} and {groups}; use backend='reference'"
        )
    return groups


def decode_outputs(
    q: Tensor, out: Tensor | None, lse_retained: Tensor | None, lse_evicted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The given outputs of a decode kernel, made where None: out like q, the rest [B, Hq] fp32."""
    return (
        torch.empty_like(q) if out is None else out,
        q.new_empty(q.shape[:2], dtype=torch.float32) if lse_retained is None else lse_retained,
        q.new_empty(q.shape[:2], dtype=torch.float32) if lse_evicted is None else lse_evicted,
    )
