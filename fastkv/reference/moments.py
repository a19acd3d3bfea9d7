"""First and second moments of the evicted tokens, and the attention they stand for (MomentKV, arXiv:2606.01563).

Let E be the evicted tokens of one KV head, n = |E|, with means k_mean, v_mean and the centred cross moment
S = sum_j (k_j - k_mean)(v_j - v_mean)^T. With logits s_j = scale * q.k_j = s_mean + delta_j, exp(delta) ~ 1 + delta
gives

    value   f(q)  = v_mean + (scale / n) * S^T q             (Eq. 9)
    mass    log Z = log n + scale * q.k_mean <= log sum_j exp(s_j)   (Eq. 11, Jensen)

The paper keeps raw sums in half precision and subtracts at query time, which loses the correction to cancellation
after some thousand evictions. Here the state is centred and in float32, and sets are merged with Chan's formula:
order does not matter and the relative error stays near 1e-7.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import FastKVError, check_groups, check_shape

if TYPE_CHECKING:
    from typing_extensions import Self


class Evicted:
    """Base of what can be remembered of the evicted tokens of every head: a dataclass of tensors [B, Hkv, ...].

    A subclass implements `add` and `estimate`; `kinds` finds it by its name in lower case, under which its tensors are
    saved and handed to operators.

    Attributes: count: tokens in the set, [B, Hkv], or in each of its M parts, [B, Hkv, M].
    """

    count: Tensor
    kinds: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__.lower()] = cls

    @property
    def kind(self) -> str:
        """The name under which `kinds` has the class."""
        return type(self).__name__.lower()

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Self:
        """What is remembered of this set and the given pairs together.

        Args: keys [B, Hkv, N, Dk]; values [B, Hkv, N, Dv]; mask [B, Hkv, N] bool, true for pairs to add (default all).
        """
        raise NotImplementedError

    def estimate(self, q: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """What attention over the set would return, and how much mass it would carry.

        Args: q [B, Hq, T, Dk] post-RoPE; scale: logit multiplier; softcap: bends logits, or None.
        Returns: value [B, Hq, T, Dv] (zero for an empty set) and log_mass [B, Hq, T] (-inf for an empty set).
        """
        raise NotImplementedError

    def check(self, op: str, batch: int, heads: int, dim: int, value_dim: int) -> None:
        """Raise FastKVError in the name of `op` unless it is of so many sequences and KV heads, with keys and values of
        these sizes.
        """
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """The tensors that are present, in the order of the fields."""
        values = (getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, Tensor)]

    def copy_(self, other: Self) -> None:
        """Overwrite in place, so that addresses stay what a captured graph has seen."""
        for mine, theirs in zip(self.tensors(), other.tensors()):
            mine.copy_(theirs)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 inputs, else float32: half-precision inputs are never summed in half precision."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


CHUNK = 4096  # pairs centred at once: bounds the float32 copies that a long prompt needs


@dataclass
class Moments(Evicted):
    """Moments of a set of (key, value) pairs per sequence and KV head.

    `order` says how much is remembered: 1 everything, 0 the means only, None the count only (a plain eviction
    baseline spends no bytes on moments).

    Attributes:
        count: [B, Hkv] int64, size of the set.
        key_mean: [B, Hkv, Dk], value_mean: [B, Hkv, Dv]; zero for an empty set; absent for order None.
        cross: [B, Hkv, Dk, Dv], sum of (k - key_mean)(v - value_mean)^T; absent below order 1.
        slope: optional half-precision copy of cross / count, [B, Hkv, Dk, Dv]: what the decode kernel reads instead of
            cross. `copy_` and the eviction kernels refresh it; the reference does not read it.
    """

    count: Tensor
    key_mean: Tensor | None = None
    value_mean: Tensor | None = None
    cross: Tensor | None = None
    slope: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        order: int | None = 1,
    ) -> Moments:
        """Moments of the empty set."""
        keys, values = (
            torch.empty(batch, num_kv_heads, 0, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim)
        )
        return cls.of(keys, values, None, dtype, order)

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, mask: Tensor | None, dtype: torch.dtype, order: int | None = 1
    ) -> Moments:
        """Moments of the pairs `keys` [B, Hkv, N, Dk], `values` [B, Hkv, N, Dv] where `mask` [B, Hkv, N] is true."""
        batch, heads, num, _ = keys.shape

        def inside(rows: Tensor) -> Tensor:
            # where, not multiply: a masked-out row may hold NaN.
            return rows if mask is None else torch.where(mask[..., None], rows, 0)

        count = torch.full((batch, heads), num, device=keys.device) if mask is None else mask.sum(-1)
        if order is None:
            return cls(count)
        inverse = 1 / count.clamp(min=1).to(dtype)[..., None]
        keys, values = inside(keys.to(dtype)), inside(values.to(dtype))
        key_mean, value_mean = keys.sum(2) * inverse, values.sum(2) * inverse
        if order == 0:
            return cls(count, key_mean, value_mean)
        keys, values = inside(keys - key_mean[:, :, None]), inside(values - value_mean[:, :, None])
        return cls(count, key_mean, value_mean, keys.transpose(-1, -2) @ values)

    @property
    def order(self) -> int | None:
        """1 with the cross moment, 0 with the means only, None with the count only."""
        return None if self.key_mean is None else 0 if self.cross is None else 1

    def upto(self, order: int | None) -> Moments | None:
        """The part of the statistics that an estimate of this order reads; None for order None."""
        if order is None or self.key_mean is None:
            return None
        if order >= 1 or self.cross is None:
            return self
        return Moments(self.count, self.key_mean, self.value_mean)

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Moments of this set and the given pairs together, in one pass over the pairs; arguments as in `Evicted`."""
        batch, heads = self.count.shape
        check_shape("Moments.add", "keys", keys, (batch, heads, None, None))
        check_shape("Moments.add", "values", values, (batch, heads, keys.shape[2], None))
        self.check("Moments.add", batch, heads, keys.shape[3], values.shape[3])
        if mask is not None:
            check_shape("Moments.add", "mask", mask, keys.shape[:3])
        dtype = torch.float32 if self.key_mean is None else self.key_mean.dtype
        total = self
        for start in range(0, keys.shape[2], CHUNK):
            part = slice(start, start + CHUNK)
            inside = None if mask is None else mask[:, :, part]
            total = total.merge(Moments.of(keys[:, :, part], values[:, :, part], inside, dtype, self.order))
        return total

    def check(self, op: str, batch: int, heads: int, dim: int, value_dim: int) -> None:
        """As `Evicted` says."""
        rest = {"count": (), "key_mean": (dim,), "value_mean": (value_dim,), "cross": (dim, value_dim)}
        for name, size in rest.items():
            part = getattr(self, name)
            if part is not None:
                check_shape(op, name, part, (batch, heads, *size))

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of two disjoint sets (Chan et al. 1979).

        With n = n_a + n_b and d = mean_b - mean_a: mean = mean_a + d n_b / n, S = S_a + S_b + (n_a n_b / n) d_k d_v^T.
        """
        count = self.count + other.count
        if self.key_mean is None:
            return Moments(count)
        assert self.value_mean is not None and other.key_mean is not None and other.value_mean is not None
        share = (other.count.to(self.key_mean.dtype) / count.clamp(min=1))[..., None]
        key_step, value_step = other.key_mean - self.key_mean, other.value_mean - self.value_mean
        merged = Moments(count, self.key_mean + share * key_step, self.value_mean + share * value_step)
        if self.cross is not None:
            assert other.cross is not None
            weight = self.count.to(share.dtype)[..., None] * share
            step = key_step[..., :, None] * value_step[..., None, :]
            merged.cross = self.cross + other.cross + weight[..., None] * step
        return merged

    def copy_(self, other: Moments) -> None:
        """Overwrite in place, so that addresses stay what a captured graph has seen."""
        super().copy_(other)
        if self.slope is not None:
            assert self.cross is not None
            self.slope.copy_(self.cross / self.count.clamp(min=1)[..., None, None])

    def tensors(self) -> list[Tensor]:
        """The statistics that are present, in field order; `slope` follows from them and is not among them."""
        return [t for t in (self.count, self.key_mean, self.value_mean, self.cross) if t is not None]

    def estimate(self, q: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """`moment_estimate` of as high an order as there is."""
        assert self.order is not None
        return moment_estimate(q, self, scale, softcap, self.order)


def moment_estimate(
    q: Tensor, moments: Moments, scale: float, softcap: float | None = None, order: int = 1
) -> tuple[Tensor, Tensor]:
    """What attention over the evicted set would return, and how much mass it would carry (MomentKV Eqs. 9 and 11).

    With softcap c the logit is c tanh(x / c): the mass uses c tanh(x_mean / c) and the linear term is multiplied by the
    slope 1 - tanh^2(x_mean / c). Order 0 drops the linear term.

    Args: q [B, Hq, T, D] post-RoPE; moments of Hkv heads; scale: logit multiplier; order: 0 or 1.
    Returns: value [B, Hq, T, Dv] (zero for an empty set) and log_mass [B, Hq, T] (-inf for an empty set).
    """
    if moments.key_mean is None or moments.value_mean is None or (moments.cross is None and order >= 1):
        raise FastKVError(
            f"moment_estimate of order {order} needs moments of that order, got {moments.order}; see Moments.empty"
        )
    batch, num_heads, num, dim = q.shape
    heads = moments.count.shape[1]
    check_groups("moment_estimate", num_heads, heads)
    moments.check("moment_estimate", batch, heads, dim, moments.value_mean.shape[2])
    dtype = torch.promote_types(compute_dtype(q), moments.key_mean.dtype)
    grouped = q.reshape(batch, heads, -1, dim).to(dtype)
    count = moments.count.to(dtype)[..., None]
    logit = scale * (grouped @ moments.key_mean.to(dtype)[..., None])[..., 0]
    slope = torch.ones_like(logit)
    if softcap is not None:
        bent = torch.tanh(logit / softcap)
        logit, slope = softcap * bent, 1 - bent * bent
    log_mass = torch.where(count > 0, count.log() + logit, float("-inf"))
    value = moments.value_mean.to(dtype)[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    if order >= 1:
        assert moments.cross is not None
        linear = grouped @ moments.cross.to(dtype)
        value = torch.addcmul(value, linear, (scale / count.clamp(min=1) * slope)[..., None])
    return value.reshape(batch, num_heads, num, -1), log_mass.reshape(batch, num_heads, num)


def moment_residual(keys: Tensor, values: Tensor, moments: Moments, scale: float) -> Tensor:
    """How badly the moments predict each token's value: |v - v_mean - (scale / n) S^T k| (MomentKV Eq. 10).

    The key is not centred, as in the paper, and a soft-cap of logits is ignored. For an empty set this is |v|.

    Args: keys [B, Hkv, N, Dk], values [B, Hkv, N, Dv].  Returns: [B, Hkv, N].
    """
    batch, heads, _, dim = keys.shape
    moments.check("moment_residual", batch, heads, dim, values.shape[3])
    dtype = compute_dtype(keys)
    residual = values.to(dtype)
    if moments.value_mean is not None:
        residual = residual - moments.value_mean.to(dtype)[:, :, None]
    if moments.cross is not None:
        slope = moments.cross.to(dtype) * (scale / moments.count.clamp(min=1).to(dtype))[..., None, None]
        rows = (part.flatten(0, 1) for part in (residual, keys.to(dtype), slope))
        residual = torch.baddbmm(*rows, alpha=-1).view_as(residual)  # residual - keys @ slope, in one pass
    return residual.norm(dim=-1)


def moment_scores(attention: Tensor | None, keys: Tensor, values: Tensor, moments: Moments, scale: float) -> Tensor:
    """`attention * moment_residual(...)`, or the residual alone (MomentKV Eq. 10).

    Args: attention [B, Hkv, N] or None; keys, values [B, Hkv, N, D].  Returns: [B, Hkv, N].
    """
    residual = moment_residual(keys, values, moments, scale)
    return residual if attention is None else attention * residual
