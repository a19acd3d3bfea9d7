"""The attention of a prompt block to itself by flash-attn, where it is installed: its kernels are written for the chip.

flash-attn attends to sequences that lie behind one another. A row of a block is three of them: padding, tokens and
padding. What it makes of padding nobody reads. Where padding lies between tokens, `prefill_attention` attends to that
row's tokens itself, as it does where flash-attn does not serve. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import flash_attention
from ..reference import Spec
from ._arguments import Attended
from ._attention import LOG2E, _add_sink

FEWEST = 64  # tokens of a block: of fewer, our own loop is too short to be worth two more launches
WIDEST = 256  # numbers of a head that flash-attn takes
CHUNK = 1024


@triton.jit
def _runs_kernel(valid_ptr, runs_ptr, T, CHUNK: tl.constexpr):
    """runs[3 b + 1], runs[3 b + 2]: the first token of row b that is no padding, and the first one after them all, in
    a count over all rows; both are the row's end if padding lies between tokens, or there is nothing else.
    """
    row = tl.program_id(0)
    begin, end, count = T, 0, 0
    for first in range(0, T, CHUNK):
        index = first + tl.arange(0, CHUNK)
        valid = tl.load(valid_ptr + row.to(tl.int64) * T + index, mask=index < T, other=0) != 0
        begin = tl.minimum(begin, tl.min(tl.where(valid, index, T)))
        end = tl.maximum(end, tl.max(tl.where(valid, index + 1, 0)))
        count += tl.sum(valid.to(tl.int32))
    whole = (count > 0) & (end - begin == count)
    if row == 0:
        tl.store(runs_ptr, 0)
    tl.store(runs_ptr + 3 * row + 1, row * T + tl.where(whole, begin, T))
    tl.store(runs_ptr + 3 * row + 2, row * T + tl.where(whole, end, T))
    tl.store(runs_ptr + 3 * row + 3, row * T + T)


@triton.jit
def _add_attended(
    top, total, acc, attended, batch, token, q_head, rows, T, BATCH, HEADS: tl.constexpr, DV: tl.constexpr
):
    """Add to partials of queries what they attend to by `Attended`: one token of that logit and value.

    Args: token, q_head, rows [M]: of each query, and whether it is one for which that holds.
    """
    column = tl.arange(0, acc.shape[1])[None, :]
    place = batch * T + token
    lse = tl.load(attended.lse_ptr + q_head * BATCH * T + place, mask=rows, other=-float("inf"))
    spot = attended.out_ptr + (place * HEADS + q_head)[:, None] * DV + column
    value = tl.load(spot, mask=rows[:, None] & (column < DV), other=0.0).to(tl.float32)
    top, total, decay = _add_sink(top, total, lse)
    weight = tl.exp2(lse * LOG2E - tl.where(top == -float("inf"), 0.0, top))
    return top, total, acc * decay[:, None] + weight[:, None] * value


def serves(q: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether a block's queries [B, Hq, T, D] attend to its values [B, Hkv, T, Dv] by flash-attn."""
    half, wide = q.dtype in (torch.bfloat16, torch.float16), v.shape[-1] != q.shape[-1] or q.shape[-1] > WIDEST
    fits = half and not wide and spec.softcap is None and q.shape[2] >= FEWEST
    return fits and flash_attention(q.device) is not None


def attend_itself(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, spec: Spec) -> Attended:
    """The causal attention of a block to itself by flash-attn; nothing where that does not serve.

    Args: as of `reference.prefill_attention`.
    """
    varlen = flash_attention(q.device)
    if varlen is None or not serves(q, v, spec):
        return Attended()
    batch, _, num, _ = q.shape
    runs = torch.empty(3 * batch + 1, dtype=torch.int32, device=q.device)
    _runs_kernel[(batch,)](valid.view(torch.uint8), runs, num, CHUNK=CHUNK)
    rows = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]
    how = {"softmax_scale": spec.scale, "causal": True, "return_attn_probs": True}
    out, lse, *_ = varlen(*rows, runs, runs, num, num, **how)
    return Attended(out.contiguous(), lse.contiguous(), runs)
