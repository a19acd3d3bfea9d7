"""How predictable a text is to the model that has just read it, without the logits of all its tokens at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def context_nll(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    softcap: float | None = None,
    mask: Tensor | None = None,
    chunk: int = 512,
) -> Tensor:
    """Mean negative log-likelihood of the tokens of each text, in nats (Compactor, Sec. 3.5, with an empty context).

    NLL(c) = - mean over i >= 1 of log p(ids_i | ids_<i).  The first token has no prediction and does not count; neither
    does padding, on either side. A text with fewer than two tokens has 0.

    Args:
        hidden: [B, N, H], what the language-model head reads, of every position.
        ids: [B, N] tokens.  head: hidden states [..., H] to logits [..., V].
        softcap: of the final logits (Gemma 2), or None.
        mask: [B, N], nonzero for tokens, zero for padding; None if there is none.
        chunk: rows of logits that exist at once, at least one for each text.

    Returns: [B] fp64.  Cost: one head product per position, chunk * V logits in memory, no host sync.
    """
    rows, length = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    counted = real[:, 1:] & real[:, :-1]
    total = torch.zeros(rows, dtype=torch.float64, device=hidden.device)
    step = max(1, chunk // max(rows, 1))
    for start in range(0, length - 1, step):
        end = min(start + step, length - 1)
        logits = head(hidden[:, start:end])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        said = logits.gather(-1, ids[:, start + 1 : end + 1, None])[..., 0]
        missed = logits.logsumexp(-1) - said
        total += torch.where(counted[:, start:end], missed, 0.0).double().sum(1)
    return total / counted.sum(1).clamp(min=1)
