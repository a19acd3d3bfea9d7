"""Attention of tokens that are read a second time, and how much any of them needs each key (KVzip)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .attention import masked_softmax, softcapped
from .moments import compute_dtype

QUERY_CHUNK = 64  # rows of logits that live at once


def most_attended(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output and, for each key, the largest weight that any query gives it (KVzip, arXiv:2505.23416, Eq. 2).

    Args: q [B, Hq, T, D]; keys [B, Hkv, N, D]; values [B, Hkv, N, Dv]; visible [B, T, N] bool.
    Returns: out [B, Hq, T, Dv] in the dtype of q (zeros for a query that sees nothing); most [B, Hkv, N] fp32 (fp64
        for fp64 inputs), the maximum over queries and over the query heads of a KV head.
    """
    batch, num_heads, num, dim = q.shape
    heads, length = keys.shape[1:3]
    groups = check_groups("most_attended", num_heads, heads)
    check_shape("most_attended", "keys", keys, (batch, heads, length, dim))
    check_shape("most_attended", "visible", visible, (batch, num, length))
    dtype = compute_dtype(q)
    keys, values = keys.to(dtype).transpose(-1, -2), values.to(dtype)
    most = torch.zeros(batch, heads, length, dtype=dtype, device=q.device)
    outs = []
    for start in range(0, num, QUERY_CHUNK):
        rows = q[:, :, start : start + QUERY_CHUNK].to(dtype)
        size = rows.shape[2]
        logits = (rows.reshape(batch, heads, groups * size, dim) * scale) @ keys
        logits = softcapped(logits, softcap).view(batch, heads, groups, size, length)
        probs, _ = masked_softmax(logits, visible[:, None, None, start : start + size])
        most = torch.maximum(most, probs.amax((2, 3)))
        out = probs.view(batch, heads, groups * size, length) @ values
        outs.append(out.view(batch, num_heads, size, -1).to(q.dtype))
    return torch.cat(outs, 2), most
