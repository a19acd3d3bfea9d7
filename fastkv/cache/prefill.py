"""Read a block of prompt tokens: attend, score, select, compact; and how long a block should be."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..policies import Reread
from ..reference import LayerState, Selection, attention_ahead, merge_partials
from . import compaction, key_only, selection, signals
from .layout import LayerConfig

# Tokens of a block. On an H200 a layer of an 8B model computes 4,000 of them in 4 ms, which is what the host needs for
# any block, by an estimate from blocks of 1,024 (perf/results/gpu_reading.jsonl).
ON_GPU, ELSEWHERE = 4096, 512


def attend_block(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, rule: LayerConfig, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attention of a block over everything retained, everything evicted and, causally, itself.

    Args: q [B, Hq, T, D]; k, v [B, Hkv, T, D]; valid [B, T] bool, false for padding; ahead [B, T, T] bool: later tokens
        of the block that a token sees too, None for none.
    Returns: [B, Hq, T, Dv] and the log of the mass that the evicted tokens have, [B, Hq, T], None if they have no part.
    """
    out, lse, mass = ops.prefill_attention(q, k, v, valid, state, rule.spec)
    if ahead is not None:
        more, more_lse = attention_ahead(q, k, v, ahead.to(q.device), rule.spec.scale, rule.spec.softcap)
        out, lse = merge_partials(out, lse, more, more_lse)
        out = out.to(q.dtype)
    if state.approx is not None:
        out = key_only.attend(q, out, lse, state, rule)
    return out, None if rule.spec.evicted(state) is None else mass


def absorb_block(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    rule: LayerConfig,
    reread: Reread | None = None,
    mass: Tensor | None = None,
    anew: bool = False,
) -> None:
    """Make the block part of the state, evicting down to the layer's budget; what leaves is remembered.

    Shapes as in `attend_block`, which comes first: every query sees its whole past before anything is evicted.
    reread: what is known of the block where it was read twice. mass: of `attend_block`. anew: whether heads are dealt
    other slots than they have.
    """
    num = k.shape[2]
    candidates, guard = signals.candidates(state, k, v, valid, rule)
    full = anew or state.exact.filled + num > rule.layout.least
    if full or rule.layout.memory:
        candidates, scores = signals.score(signals.of_block(candidates, q, state, rule, reread, mass), rule)
    if not full:
        kept = Selection(candidates.valid, candidates.valid.sum(-1))
    else:
        whole = rule.config.prefill_block is None and rule.config.policy.moments.rounds > 1
        keep = selection.keep_in_rounds if whole else selection.keep_best
        kept = keep(candidates, scores, guard, rule)
    compaction.store(state, candidates, kept, num, rule, full=full, anew=anew)
    if full and reread is not None and rule.config.correction.match is not None:
        compaction.match(candidates, reread, state, rule)


def without_padding(rows: Tensor, valid: Tensor) -> Tensor:
    """[B, H, T, D] with zeros where `valid` [B, T] is false, because rows of padding may hold NaN: a contiguous copy,
    except on a CPU, which sees whether there is any padding.
    """
    if rows.device.type == "cpu" and bool(valid.all()):
        return rows
    zero = rows.new_zeros(())
    return torch.where(valid[:, None, :, None], rows, zero, out=rows.new_empty(rows.shape))


def block_tokens(device: torch.device) -> int:
    """Tokens of a block that is about as fast per token as a whole prompt."""
    return ON_GPU if device.type == "cuda" else ELSEWHERE
