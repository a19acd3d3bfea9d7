"""Families of keys that no training made, in bf16: what massive channels and the rotary embedding do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastkv import Budget, FastKVAttention
from fastkv.evaluation.equal_bytes import layer_token_bytes

from .cases import RECENT, SINKS, STEPS, Case
from .trained import check_held

HEADS, KV_HEADS, DIM, PROMPT, FED = 8, 4, 64, 960, 48
CLUSTERS = 40
SPREAD = 2.2  # standard deviation of the logits of a query
THETA = 1e4


def family(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [HEADS, N, DIM], k and v [KV_HEADS, N, DIM] of N = PROMPT + FED tokens.

    Clusters: keys and queries around 40 centres whose coordinates fall off as n^-1/2, about a common mean; values
    around centres of their own. Massive channels: two with means of 9 and -6, twice the deviation, and a first token
    with 1.8 times their keys and hardly a value.
    """
    draw = torch.Generator().manual_seed(seed)
    num = PROMPT + FED

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if name == "isotropic":
        return sharpened(normal(HEADS, num, DIM), *(normal(KV_HEADS, num, DIM) for _ in range(2)))
    spectrum = torch.arange(1, DIM + 1) ** -0.5
    spectrum = spectrum / spectrum.norm() * DIM**0.5
    centres, means = 0.8 * normal(KV_HEADS, CLUSTERS, DIM) * spectrum, normal(KV_HEADS, CLUSTERS, DIM)
    common = 0.7 * normal(KV_HEADS, 1, DIM)

    def of(points: Tensor) -> Tensor:
        """The centre of each token's key, or the mean of its value."""
        return points.gather(1, member[..., None].expand(-1, -1, DIM))

    member = torch.randint(0, CLUSTERS, (KV_HEADS, num), generator=draw)
    k = common + of(centres) + 0.5 * normal(KV_HEADS, num, DIM) * spectrum
    v = of(means) + 0.5 * normal(KV_HEADS, num, DIM)
    member = torch.randint(0, CLUSTERS, (KV_HEADS, HEADS // KV_HEADS * num), generator=draw)
    q = (0.7 * common + of(centres) + 0.5 * normal(*member.shape, DIM) * spectrum).reshape(HEADS, num, DIM)
    if "massive" in name:
        channels = [DIM // 2 - 2, DIM - 3]
        k[..., channels] += torch.tensor([9.0, -6.0]) + 2 * normal(KV_HEADS, num, 2)
        q[..., channels] += torch.tensor([3.0, -2.0])
        k[:, 0, channels] *= 1.8
        v[:, 0] *= 0.05
    if "RoPE" in name:
        q, k = turned(q), turned(k)
    return sharpened(q, k, v)


def turned(rows: Tensor) -> Tensor:
    """Rotary embedding of [H, N, DIM]."""
    frequency = THETA ** (-torch.arange(DIM // 2) / (DIM // 2))
    angle = torch.arange(rows.shape[1])[:, None] * frequency
    one, other = rows.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def sharpened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries whose logits have the standard deviation `SPREAD`, as sharp as trained attention."""
    logits = DIM**-0.5 * q[:, -FED:] @ k.repeat_interleave(HEADS // KV_HEADS, 0).mT
    return q * (SPREAD / logits.std(-1).mean()), k, v


class SyntheticBench:
    """One family, a batch row for each seed.

    Args: name: of the family; seeds: of the rows.
    """

    def __init__(self, name: str, seeds: list[int]) -> None:
        self.q, self.k, self.v = (
            torch.stack(parts).bfloat16() for parts in zip(*(family(name, seed) for seed in seeds))
        )
        self.full = full_attention(self.q, self.k, self.v)

    def run(self, case: Case) -> dict[str, Any]:
        """Read the prompts, feed the rest token by token, and compare with full attention in float64.

        Raises: FastKVError if the layer does not hold the bytes of MomentKV.
        """
        bound = held(module("momentkv", "auto", Budget(tokens=case.tokens, sinks=SINKS, recent=RECENT)))
        layer = module(case.policy, case.correction, Budget(bytes=bound, sinks=SINKS, recent=RECENT))
        stored = held(layer)
        layer.allocate(len(self.q), dtype=torch.bfloat16)
        outs = []
        for part in (slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, PROMPT + FED))):
            outs.append(layer(self.q[:, :, part], self.k[:, :, part], self.v[:, :, part]))
        rule = layer.cache.rule
        assert rule is not None
        nbytes = {"stored": stored, "bound": bound, "token": round(layer_token_bytes(layer.cache))}
        out = torch.cat(outs[1:], 2).double()
        error = ((out - self.full).norm(dim=-1) / self.full.norm(dim=-1)).mean((1, 2))
        check_held(case, nbytes)
        return {"error": {STEPS: error.tolist()}, "kept": rule.layout.total, "bytes": nbytes}


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, HEADS, FED, DIM] float64, of the last FED queries."""
    keys, values = (rows.double().repeat_interleave(HEADS // KV_HEADS, 1) for rows in (k, v))
    num = k.shape[2]
    future = torch.arange(num) > torch.arange(num - FED, num)[:, None]
    logits = (DIM**-0.5 * q[:, :, -FED:].double() @ keys.mT).masked_fill(future, float("-inf"))
    return logits.softmax(-1) @ values


def module(policy: str, correction: str, budget: Budget) -> FastKVAttention:
    """An empty layer."""
    return FastKVAttention(HEADS, KV_HEADS, DIM, policy, budget, correction=correction)


def held(layer: FastKVAttention) -> int:
    """Bytes of one sequence."""
    layer.allocate(1, dtype=torch.bfloat16)
    return layer.nbytes()
