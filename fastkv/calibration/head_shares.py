"""Which heads of a model keep how much: the shares, what they come to in tokens, and the file that holds them."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FastKVError
from .files import TensorFile, describe

FILE = TensorFile(
    command="heads",
    what="shares of heads",
    version=1,
    facts={"fingerprint": str, "model": str, "weights": str, "tokens": int},
)
KEEPS = tuple(2 ** (-step / 2) for step in range(13))  # 1 to 1/64: shares are stored for these
HEADS_FILE = "heads.safetensors"  # beside a model
KNOWN = Path(__file__).parent / "known"  # of weights that were calibrated with the defaults, by their digest
FLOOR = 0.1  # of the mean, what every head keeps in any case


@dataclass(frozen=True, eq=False)
class HeadShares:
    """How much each KV head of a model keeps relative to the mean, for several shares of a text that stay.

    Heads differ in how much they need; the less stays, the more they differ. `fastkv.calibrate_heads` measures it.

    Attributes:
        table: [len(KEEPS), layers, Hkv] fp16 on the CPU, for the compressed layers in order; the mean of each row is 1.
            Layers with fewer heads than others are padded with 0.
        heads: number of KV heads in each of these layers.
        fingerprint: digest of the model's config.  model: the same in words.
        weights: digest of the model's weights.  tokens: how many tokens were read.
    """

    table: Tensor
    heads: tuple[int, ...]
    fingerprint: str
    model: str
    weights: str
    tokens: int

    def __post_init__(self) -> None:
        number = float(self.table.sum(-1).float().sum(-1).max()) if self.table.numel() else 0.0
        shape = (len(KEEPS), len(self.heads), max(self.heads, default=0))
        if tuple(self.table.shape) != shape or not math.isfinite(number) or not number or (self.table < 0).any():
            raise FastKVError(
                f"shares of heads must be finite, at least 0 and of shape {list(shape)}, got {list(self.table.shape)}; "
                "calibrate again with fastkv calibrate heads"
            )

    def __repr__(self) -> str:
        """Short, and the same for equal shares: saved caches are compared by it."""
        digest = hashlib.sha256(self.table.numpy().tobytes()).hexdigest()[:16]
        return f"HeadShares({len(self.heads)} layers, {sum(self.heads)} heads, {digest})"

    def shares(self, keep: float) -> Tensor:
        """[layers, Hkv] fp32, mean 1 over all heads: what each keeps relative to the mean if `keep` of a text stays.

        Between the rows of the table it is linear in log keep.
        Raises: FastKVError unless keep is in (0, 1].
        """
        if not 0 < keep <= 1:
            raise FastKVError(f"keep must be in (0, 1], got {keep!r}; 0.25 is a quarter")
        place = min(-2 * math.log2(keep), len(KEEPS) - 1.0)
        below = min(int(place), len(KEEPS) - 2)
        first, second = self.table[below].float(), self.table[below + 1].float()
        mixed = first + (second - first) * (place - below)
        return mixed * sum(self.heads) / mixed.sum()

    def tokens_of(
        self, average: int, context: int, reserved: int, layers: tuple[float, ...] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Tokens that each head of each layer keeps: `average` times the number of heads in all, each `reserved`.

        Args:
            average: tokens per head, at least `reserved` and 1.  reserved: tokens that every head keeps.
            context: tokens of the text; if they are no more than the average, all heads keep the same number.
            layers: weights of the layers, if heads share tokens within their layer only.
        """
        return _tokens_of(self, average, context, reserved, layers)

    def check(self, heads: list[int]) -> None:
        """Raise FastKVError unless a model has so many KV heads in its compressed layers."""
        if list(self.heads) != heads:
            raise FastKVError(
                f"the shares are for {len(self.heads)} layers of {_spread(self.heads)} KV heads, got a model with "
                f"{len(heads)} of {_spread(heads)}; calibrate it with fastkv calibrate heads"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all. Raises: FastKVError if that fails."""
        tensors = {"shares": self.table, "heads": torch.tensor(self.heads)}
        FILE.save(path, {name: getattr(self, name) for name in FILE.facts}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any) -> HeadShares:
        """Read a file for the model with this config, patched or not.

        Raises: FastKVError if there is no such file, if it is damaged, or of a model of another shape.
        """
        facts, tensors = FILE.load(path, config)
        if tensors.keys() != {"shares", "heads"} or tensors["heads"].ndim != 1:
            raise FILE.damaged(path)
        return cls(tensors["shares"], tuple(tensors["heads"].tolist()), **facts)


def _spread(numbers: Any) -> str:
    return " or ".join(str(number) for number in sorted(set(numbers)))


@functools.lru_cache(maxsize=64)  # every layer of a cache asks
def _tokens_of(
    shares: HeadShares, average: int, context: int, reserved: int, layers: tuple[float, ...] | None
) -> tuple[tuple[int, ...], ...]:
    if context <= average and layers is None:
        return tuple((average,) * heads for heads in shares.heads)
    keep = average / context if context > average else 1.0
    wanted = shares.shares(keep).double()
    real = torch.arange(wanted.shape[1]) < torch.tensor(shares.heads)[:, None]
    if layers is not None:
        weights = torch.tensor(layers, dtype=torch.float64)
        wanted = (
            wanted / wanted.sum(-1, keepdim=True) * (weights / weights.mean() * torch.tensor(shares.heads))[:, None]
        )
    wanted, total = wanted[real] * average, average * sum(shares.heads)
    floor = max(int(FLOOR * average), reserved, 1)
    most = float(context) if context > average else math.inf  # no head holds more than there is
    rest = (wanted - floor).clamp(min=1e-6, max=most - floor)
    for _ in range(20):  # what a clamp takes or gives is shared out again
        rest = (rest * ((total - floor * len(rest)) / rest.sum().clamp(min=1e-9))).clamp(max=most - floor)
    # Cumulative rounding: the total is met to a token.
    ends = (floor * torch.arange(1, len(rest) + 1) + rest.cumsum(0)).round().long()
    ends[-1] = total
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return tuple(tuple(counts.pop(0) for _ in range(heads)) for heads in shares.heads)


def weights_digest(model: Any) -> str:
    """16 hexadecimal digits that differ between fine-tunes of a model, but not between its dtypes and devices.

    Of each parameter up to 64 numbers are looked at, rounded to bfloat16.
    """
    named = sorted(model.named_parameters())
    return digest_of(model.config, (parameter.detach() for _, parameter in named if not parameter.is_meta))


def digest_of(config: Any, parameters: Iterable[Tensor]) -> str:
    """`weights_digest` of the model with that config and these parameters, in the order of their names."""
    found = hashlib.sha256(describe(config).encode())
    for parameter in parameters:
        flat = parameter.flatten()
        some = flat[:: max(len(flat) // 64, 1)][:64].to(torch.bfloat16).float().cpu()
        found.update(some.numpy().tobytes())
    return found.hexdigest()[:16]
