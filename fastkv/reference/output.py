"""What a token's value does to the layer's output, for CriticalKV.

Order of tokens along N does not matter, and they are taken in pieces, so scratch does not grow with the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check_groups, check_shape
from .evicted import compute_dtype

SCRATCH = 1 << 24  # numbers per intermediate result: 64 MiB in float32


def output_norms(values: Tensor, output: Tensor) -> Tensor:
    """How much each value moves the layer's output: |W_o v|_1 (CriticalKV, arXiv:2502.03805).

    norm[b, h, n] = mean over the group's query heads i of |W_o[:, i] v[b, h, n]|_1.

    Args: values [B, Hkv, N, Dv]; output [hidden, Hq, Dv], the output projection by query head.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 values).  Raises: FastKVError if Hq % Hkv or shapes disagree.
    """
    batch, heads, num, dim = values.shape
    hidden, num_heads = output.shape[:2]
    groups = check_groups("output_norms", num_heads, heads)
    check_shape("output_norms", "output", output, (hidden, num_heads, dim))
    dtype = compute_dtype(values)
    norms = torch.zeros(batch, heads, num, dtype=dtype, device=values.device)
    step = max(SCRATCH // (batch * heads * hidden), 1)
    for member in range(groups):
        weight = output[:, member::groups].to(dtype)
        for start in range(0, num, step):
            part = slice(start, start + step)
            moved = torch.einsum("bhnd,ohd->bhno", values[:, :, part].to(dtype), weight)
            norms[:, :, part] += moved.abs_().sum(-1)
    return norms / groups
