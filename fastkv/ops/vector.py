"""Decoding where some tokens keep their key but no value (VECTOR)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..backend import uses_kernels
from ..reference import Moments
from ._register import STATISTICS, flat, operator
from .decode import decode_outputs


@operator(
    "vector_decode_attention(Tensor q, Tensor keys, Tensor values, Tensor lengths, Tensor approx_keys, "
    "Tensor approx_positions, Tensor approx_lengths, Tensor weight, Tensor cos, Tensor sin, "
    f"{STATISTICS}, float scale, float? softcap, int? order, str backend) -> (Tensor, Tensor, Tensor)",
    decode_outputs,
)
def _vector_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    count: Tensor,
    key_mean: Tensor | None,
    value_mean: Tensor | None,
    cross: Tensor | None,
    slope: Tensor | None,
    scale: float,
    softcap: float | None,
    order: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not uses_kernels(backend, q.device):
        moments = Moments(count, key_mean, value_mean, cross)
        approx = (approx_keys, approx_positions, approx_lengths, weight, cos, sin)
        return reference.vector_decode_attention(
            q, keys, values, lengths, *approx, moments, scale, softcap, order=order
        )
    from ..kernels.vector_decode import vector_decode_attention

    return vector_decode_attention(
        q=q,
        keys=keys,
        values=values,
        lengths=lengths,
        approx_keys=approx_keys,
        approx_positions=approx_positions,
        approx_lengths=approx_lengths,
        weight=weight,
        cos=cos,
        sin=sin,
        count=count,
        key_mean=key_mean,
        value_mean=value_mean,
        matrix=cross if slope is None else slope,
        scale=scale,
        softcap=softcap,
        order=order,
    )


def vector_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    approx_keys: Tensor,
    approx_positions: Tensor,
    approx_lengths: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    moments: Moments | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.vector_decode_attention`. Kernel: one launch, one product with the weight per query."""
    if moments is None or moments.order is None:
        moments, order = Moments(torch.zeros_like(lengths, dtype=torch.int64)), None
    slots = (keys, values, lengths, approx_keys, approx_positions, approx_lengths)
    return torch.ops.fastkv.vector_decode_attention(
        q, *slots, weight, cos, sin, *flat(moments), scale, softcap, order, backend
    )
