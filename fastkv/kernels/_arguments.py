"""What kernels are given: tuples that a launcher fills with tensors and numbers, and whose members a kernel reads.

Triton hands a NamedTuple over member by member. A tensor becomes a pointer; None is known while a kernel is compiled
and switches off what would read it. Numbers among the members are always specialised, on 1 and on multiples of 16, even
if `do_not_specialize` names the tuple: what follows the length of a prompt is an argument by itself.

A function cannot return a tuple with a None in it, because triton 3.6 would make a number of it. So kernels move the
pointers of a tuple where they stand:

    state = StatePointers(*[p if p is None else _page(p, row, page) for p in state])

Tuples of constants, such as `Group`, are `tl.constexpr` arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..reference import Moments, Slots


class StatePointers(NamedTuple):
    """Tensors of a layer's state, as in `Slots`: keys, values [B, Hkv, C, D] or [B, S, D], the rest without D; seen [B]
    int64. Absent: what the state has not, and what a kernel does not read.
    """

    keys_ptr: Any = None
    values_ptr: Any = None
    key_scales_ptr: Any = None
    value_scales_ptr: Any = None
    bias_ptr: Any = None
    positions_ptr: Any = None
    attention_ptr: Any = None
    lengths_ptr: Any = None
    starts_ptr: Any = None
    seen_ptr: Any = None
    memory_ptr: Any = None

    @classmethod
    def of(cls, slots: Slots, *names: str, seen: Tensor | None = None) -> StatePointers:
        """The tensors of these names."""
        return cls(**{f"{name}_ptr": getattr(slots, name) for name in names}, seen_ptr=seen)


PAIRS = ("keys", "values", "key_scales", "value_scales")  # of `StatePointers`


class TokenPointers(NamedTuple):
    """What a step is given of its token: queries [B, Hq, D], key and value [B, Hkv, 1, D], absent if not appended, and
    how many elements it is from one sequence to the next in each: an engine has them in one tensor, side by side.
    """

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    q_row: Any
    k_row: Any
    v_row: Any

    @classmethod
    def of(cls, q: Tensor, k: Tensor | None, v: Tensor | None) -> TokenPointers:
        """Of tensors of which each sequence's part lies in one piece."""
        return cls(q, k, v, *(None if part is None else part.stride(0) for part in (q, k, v)))


class EvictedPointers(NamedTuple):
    """What attention mixes in for the evicted tokens: moments, of order 1 with a matrix, or centroids, with sizes.

    Attributes:
        count_ptr: [B, Hkv] int64, tokens.  sizes_ptr: [B, Hkv, M] of centroids.
        key_mean_ptr, value_mean_ptr: [B, Hkv, D], or [B, Hkv, M, D] of centroids.
        matrix_ptr: [B, Hkv, Dk, Dv], S in fp32, or S / n in half precision.
        spread_ptr: [B, Hkv, M], of centroids.
    """

    count_ptr: Any = None
    key_mean_ptr: Any = None
    value_mean_ptr: Any = None
    matrix_ptr: Any = None
    spread_ptr: Any = None
    sizes_ptr: Any = None


class MomentPointers(NamedTuple):
    """Moments that are changed: count [B, Hkv] int64, means [B, Hkv, D], cross [B, Hkv, Dk, Dv] in fp32, slope the same
    in half precision. Absent: what is not kept.
    """

    count_ptr: Any
    key_mean_ptr: Any = None
    value_mean_ptr: Any = None
    cross_ptr: Any = None
    slope_ptr: Any = None

    @classmethod
    def of(cls, moments: Moments) -> MomentPointers:
        """All that there is."""
        return cls(*(getattr(moments, name.removesuffix("_ptr")) for name in cls._fields))


class PartPointers(NamedTuple):
    """Scratch of the partials of a split kernel, see `workspace`."""

    accs_ptr: Any = None
    tops_ptr: Any = None
    totals_ptr: Any = None
    tickets_ptr: Any = None


class ResultPointers(NamedTuple):
    """Results of a decode kernel: out [B, Hq, D], and two log-sum-exps [B, Hq] in fp32."""

    out_ptr: Any
    lse_retained_ptr: Any
    lse_evicted_ptr: Any


class Attended(NamedTuple):
    """What somebody else's kernel has made of a prompt block: out [B, T, Hq, D], log-sum-exp [Hq, B, T] in fp32, and
    runs [3 B + 1] int32: they hold for tokens runs[3 b + 1] to runs[3 b + 2] of row b, counted over all rows.
    """

    out_ptr: Any = None
    lse_ptr: Any = None
    runs_ptr: Any = None


class View(NamedTuple):
    """A tensor [B, H, N, D] of any strides, with unit stride along D."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Of a tensor."""
        return cls(tensor, *tensor.stride()[:3])


class Scaling(NamedTuple):
    """How q.k becomes a logit: softcap tanh(scale q.k / softcap), or scale q.k without a softcap."""

    scale: Any
    softcap: Any = None


class Group(NamedTuple):
    """A tile for the query heads of a KV head, of constants: G heads in M rows, D numbers in BLOCK_D columns."""

    G: int
    M: int
    D: int
    BLOCK_D: int
