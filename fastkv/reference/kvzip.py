"""Attention of tokens that are read a second time, and how much any of them needs each key (KVzip)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .attention import masked_softmax
from .evicted import compute_dtype
from .scores import grouped_logits

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
    check_groups("most_attended", num_heads, heads)
    check_shape("most_attended", "keys", keys, (batch, heads, length, dim))
    check_shape("most_attended", "visible", visible, (batch, num, length))
    dtype = compute_dtype(q)
    keys, values = keys.to(dtype), values.to(dtype)
    most = torch.zeros(batch, heads, length, dtype=dtype, device=q.device)
    outs = []
    for start in range(0, num, QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        logits = grouped_logits(q[:, :, rows], keys, scale, softcap)
        probs, _ = masked_softmax(logits, visible[:, None, None, rows])
        most = torch.maximum(most, probs.amax((2, 3)))
        out = probs.flatten(2, 3) @ values
        outs.append(out.view(batch, num_heads, logits.shape[3], -1).to(q.dtype))
    return torch.cat(outs, 2), most
