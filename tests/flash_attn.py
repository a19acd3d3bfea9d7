"""A stand-in for flash-attn: its functions as callers see them, computed by plain torch on any device.

Layout [B, T, H, D], causal masks aligned to the last key, and the log-sum-exp [B, H, T] in fp32 where it is asked for.
Calls are counted, and arguments that the package would refuse are refused.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

CALLS: list[tuple[str, int, int]] = []  # name, tokens and window (-1 for none) of every call


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: int, softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    groups = q.shape[2] // k.shape[2]
    keys, values = (rows.float().repeat_interleave(groups, 2) for rows in (k, v))
    logits = torch.einsum("bthd,bnhd->bhtn", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    behind = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (behind < 0) & causal | ((behind > window) & (window >= 0))
    logits = logits.masked_fill(hidden.to(q.device), float("-inf"))
    out = torch.einsum("bhtn,bnhd->bthd", logits.softmax(-1), values)
    lse = logits.logsumexp(-1)
    if sinks is not None:  # one more logit, of value zero
        total = torch.logaddexp(lse, sinks[:, None].float())
        out, lse = out * torch.exp(lse - total).transpose(1, 2)[..., None], total
    return out.to(q.dtype), lse


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Dense batches: q [B, T, Hq, D], k, v [B, N, Hkv, D]."""
    CALLS.append(("flash_attn_func", q.shape[1], window_size[0]))
    out, lse = _attend(q, k, v, softmax_scale, causal, window_size[0], softcap, s_aux)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, s_aux: Tensor | None = None, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Sequences of unequal lengths behind one another: q [tokens, Hq, D]; their log-sum-exps are [Hq, tokens]."""
    CALLS.append(("flash_attn_varlen_func", q.shape[0], window_size[0]))
    how = softmax_scale, causal, window_size[0], softcap, s_aux
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:])
    parts = [_attend(q[None, a:b], k[None, c:d], v[None, c:d], *how) for a, b, c, d in starts]
    out, lse = torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    assert out.shape == q.shape and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return (out, lse, None) if return_attn_probs else out


def pad_input(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    """Sequences back in their padded places, [B, T, ...]."""
    out = rows.new_zeros(batch * length, *rows.shape[1:])
    out[indices] = rows
    return out.view(batch, length, *rows.shape[1:])


def unpad_input(rows: Tensor, mask: Tensor, unused: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that are no padding, behind one another, and where they were."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero()[:, 0]
    starts = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows.flatten(0, 1)[indices], indices, starts, int(lengths.max()), lengths


def package(name: str) -> ModuleType:
    """A module of that name with these functions."""
    made = ModuleType(name)
    for function in (flash_attn_func, flash_attn_varlen_func, pad_input, unpad_input):
        setattr(made, function.__name__, function)
    made.flash_attn_with_kvcache = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    return made
