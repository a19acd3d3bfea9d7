"""Budget: how much a compressed cache may keep, and how that is shared between layers.

A budget is a promise in one unit (tokens per KV head, a share of the prompt, or bytes per sequence). It becomes a
number of slots only when a layer is allocated, because only then are the prompt length and the head sizes known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import Tensor

from .calibration import HeadShares
from .errors import FINITE, FastKVError, is_number, is_whole

HEADS = ("calibrated", "uniform", "adaptive")
UNITS = {"tokens": int, "keep": float, "bytes": int, "compress": float, "quality": float}
TIMES = re.compile(r"\d+(\.\d+)?x")
LARGEST = 2**40  # tokens or bytes of a sequence, at most
PYRAMID_BETA = 20.0  # PyramidKV (arXiv:2406.02069): the last layer gets 1/beta of the average


@dataclass(frozen=True)
class LayerCost:
    """Bytes per sequence of one layer's state: `per_token` for each token per KV head, `fixed` for the rest.

    On top come `sketch` for each token per KV head, in whole parts of `part` bytes, at least `least` in all: what is
    remembered of evicted tokens. `full`: bytes of a token per KV head in a bfloat16 cache of all tokens.
    """

    per_token: float
    fixed: int
    sketch: float = 0.0
    part: int = 1
    least: int = 0
    full: float = 0.0

    def spent(self, tokens: float) -> float:
        """Bytes of a whole number of tokens per KV head."""
        return self.fixed + self.per_token * tokens + max(self.sketch * tokens // self.part * self.part, self.least)

    def tokens(self, room: float) -> float:
        """The largest whole number of tokens per KV head that fit; negative if there is no room for any."""
        left = room - self.fixed
        found = min((left - self.least) // self.per_token, left // (self.per_token + self.sketch))
        while self.spent(found + 1) <= room:  # where no further part begins
            found += 1
        return found


@dataclass(frozen=True)
class Budget:
    """How many tokens each KV head keeps.

    Exactly one of `tokens`, `keep`, `bytes`, `compress` and `quality` is given.

    Args:
        tokens: retained tokens per KV head, averaged over layers.
        keep: share of the first prompt that is retained, in (0, 1]; resolved once, when the prompt is first read.
        bytes: bytes per sequence for all compressed layers together, moments and positions included. How many tokens
            they hold depends on `slots`, which have 8 bits by default.
        compress: how many times smaller the compressed layers are than in a bfloat16 cache of the first prompt, at
            least 1; resolved once the prompt is known. Slots have 8 bits by default, and 4 from 12 on.
        quality: share of the full cache's answer quality to aim for, in (0, 1]. The share of the prompt that is kept
            then depends on how predictable the prompt is (context-calibrated compression, Compactor Sec. 3.5). The
            prompt is held in full until it has been read.
        calibration: file of `fastkv calibrate context`, for `quality`; None: the model's own directory is searched for
            context.json.
        sinks: first tokens of a sequence that are never evicted.
        recent: last tokens of a sequence that are never evicted.
        layers: "uniform", "pyramid" (PyramidKV: linear from first to last layer, same total), or one positive weight
            per compressed layer (layer l keeps `tokens * weight[l] / mean(weights)`).
        heads: "calibrated": each KV head of each layer keeps as many tokens as `fastkv.calibrate_heads` found that it
            needs, according to heads.safetensors beside the model, or else the user's cache, where `fastkv.patch`
            stores the result for these weights. A path or a `HeadShares` names another source. "uniform": all heads
            keep the same number of tokens. "adaptive": the heads of a layer compete by their scores while a prompt is
            read, and each keeps at least a fifth of the mean (Ada-KV, arXiv:2407.11550). The total is the same.
            Calibrated heads share tokens across layers unless `layers` says otherwise.
        context: tokens of the text that calibrated heads get their tokens for, whatever the prompt: the distribution is
            then fixed. None: the length of each prompt, and distributed anew as the text grows.

    Raises:
        FastKVError: for a value outside its range, none or several units, or fewer tokens than sinks + recent.
    """

    tokens: int | None = None
    keep: float | None = None
    bytes: int | None = None
    sinks: int = 4
    recent: int = 32
    layers: str | Sequence[float] = "uniform"
    heads: str | Path | HeadShares = "calibrated"
    quality: float | None = None
    calibration: str | Path | None = None
    compress: float | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise FastKVError(
                f"Budget needs exactly one of {', '.join(UNITS)}, got {' and '.join(given) or 'none'}; "
                "for example Budget(tokens=1024)"
            )
        for name, least in (("sinks", 0), ("recent", 0), ("tokens", 1), ("bytes", 1), ("context", 1)):
            value = getattr(self, name)
            if value is None and least:
                continue
            if not is_whole(value, least) or value > LARGEST:
                raise FastKVError(
                    f"Budget {name} must be an integer of at least {least} and at most 2^40, got {value!r}; pass a "
                    "whole number"
                )
        for name, example in (("keep", "0.25 keeps a quarter"), ("quality", "0.95 loses a twentieth")):
            share = getattr(self, name)
            if share is not None and (not is_number(share) or not 0 < share <= 1):
                raise FastKVError(f"Budget {name} must be in (0, 1], got {share!r}; {example}")
        if self.compress is not None and (not is_number(self.compress) or not 1 <= self.compress < math.inf):
            raise FastKVError(f"Budget compress must be at least 1, got {self.compress!r}; 16 is sixteen times smaller")
        if self.context is not None and self.follows_prompt:
            raise FastKVError(
                f"Budget context is for budgets of tokens or bytes, got {given[0]}, which follows the prompt; leave it "
                "out"
            )
        if self.calibration is not None and self.quality is None:
            raise FastKVError(
                "Budget calibration is for quality=..., got none; give a quality or leave calibration out"
            )
        if self.calibration is not None and not isinstance(self.calibration, (str, PathLike)):
            raise FastKVError(f"Budget calibration must be a file, got {self.calibration!r}; pass its path")
        if self.tokens is not None and self.tokens < self.reserved:
            raise FastKVError(
                f"a budget of {self.tokens} tokens is smaller than sinks + recent = {self.sinks} + {self.recent}; "
                "raise tokens or lower sinks and recent in Budget(...)"
            )
        if isinstance(self.layers, str):
            if self.layers not in ("uniform", "pyramid"):
                raise FastKVError(
                    f"Budget layers must be 'uniform', 'pyramid' or a list of weights, got {self.layers!r}"
                )
        else:
            weights = tuple(self.layers) if isinstance(self.layers, Iterable) else ()
            if not weights or not all(is_number(weight, 0, FINITE) and weight for weight in weights):
                raise FastKVError(f"Budget layers must list positive weights, got {self.layers!r}; one per layer")
            object.__setattr__(self, "layers", weights)
        named = isinstance(self.heads, str) and (self.heads in HEADS or self.heads.endswith(".safetensors"))
        if not named and not isinstance(self.heads, (Path, HeadShares)):
            raise FastKVError(
                f"Budget heads must be {', '.join(map(repr, HEADS))}, a .safetensors file or HeadShares, got "
                f"{self.heads!r}; see fastkv.Budget"
            )

    @classmethod
    def of(cls, value: int | str | Budget) -> Budget:
        """`Budget` unchanged, an int as tokens per KV head, "16x" as `compress=16`.

        Raises: FastKVError for anything else.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and TIMES.fullmatch(value):
            return cls(compress=float(value[:-1]))
        if isinstance(value, bool) or not isinstance(value, int):
            raise FastKVError(
                f"budget must be a whole number of tokens per KV head, how many times smaller as '16x', or a "
                f"fastkv.Budget, got {value!r}; for a share of the prompt use Budget(keep=0.25)"
            )
        return cls(tokens=value)

    @property
    def follows_prompt(self) -> bool:
        """Whether the number of tokens depends on the prompt."""
        return self.keep is not None or self.compress is not None or self.quality is not None

    def length_of(self, columns: int, real: Tensor) -> int:
        """The length of a text that heads share slots for, tokens: that of its longest row, without padding. A share of
        a prompt is of its padding, too.

        Args: columns: tokens of each row, padding included.  real [B]: those that are no padding.
        """
        return columns if self.follows_prompt else max(int(real.max()), 1)

    @property
    def needs_prompt(self) -> str | None:
        """What makes the number of slots depend on the prompt, and what to give instead; None for nothing."""
        if self.follows_prompt:
            return "a budget that follows the prompt (keep, compress or quality); give tokens or bytes"
        if self.shared is not None and self.context is None:
            return "heads that follow the length of the text; give Budget(context=...), the length that they are for"
        return None

    @property
    def in_bytes(self) -> bool:
        """Whether it says how much memory is spent, not on how many tokens."""
        return self.bytes is not None or self.compress is not None

    @property
    def shared(self) -> HeadShares | None:
        """The shares of heads that were calibrated, if they decide."""
        return self.heads if isinstance(self.heads, HeadShares) else None

    @property
    def reserved(self) -> int:
        """Tokens per KV head that no policy may evict."""
        return self.sinks + self.recent

    def check_layers(self, num_layers: int) -> None:
        """Raise FastKVError unless explicit layer weights match the number of compressed layers."""
        if not isinstance(self.layers, str) and len(self.layers) != num_layers:
            raise FastKVError(
                f"Budget layers lists {len(self.layers)} weights, but the model has {num_layers} compressed layers; "
                "give one weight per full-attention layer"
            )
        if self.shared is not None and len(self.shared.heads) != num_layers:
            raise FastKVError(
                f"Budget heads are shares of {len(self.shared.heads)} layers, but the model has {num_layers} that are "
                "compressed; calibrate it with fastkv calibrate heads"
            )
        if self.tokens is not None and self.shared is None:
            for index in range(num_layers):
                self.layer_tokens(self.tokens, index, num_layers)

    def heads_of(self, index: int, num_layers: int, average: int, context: int) -> tuple[int, ...]:
        """Tokens of each KV head of compressed layer `index` by calibrated shares, see `HeadShares.tokens_of`.

        Args: context: length of the text, unless the budget says for which one.
        """
        assert self.shared is not None
        weights = None if self.layers == "uniform" or num_layers == 1 else tuple(self._weights(num_layers))
        return self.shared.tokens_of(average, self.context or context, self.reserved, weights)[index]

    def average(self, num_layers: int, context: int, cost: LayerCost) -> int:
        """Tokens per KV head, mean over all layers.

        Args: context: length of the prompt being read, tokens.  cost: bytes of a layer's state per sequence.
        Raises: FastKVError if bytes hold fewer tokens than sinks + recent.
        """
        if self.tokens is not None:
            return self.tokens
        if self.keep is not None:
            # A short prompt is never compressed below what is protected anyway.
            return max(math.ceil(round(self.keep * context, 6)), self.reserved, 1)
        assert self.in_bytes, "quality becomes keep before a layer is allocated"
        room = self.bytes or num_layers * cost.full * context / (self.compress or 1)  # bytes of all layers together
        average = int(cost.tokens(room / num_layers))
        if average < max(self.reserved, 1):
            if self.bytes is None:
                return max(self.reserved, 1)  # as above
            need = math.ceil(num_layers * cost.spent(max(self.reserved, 1)))
            raise FastKVError(
                f"a budget of {self.bytes} bytes leaves {max(average, 0)} tokens per KV head, fewer than "
                f"sinks + recent = {self.reserved}; give at least {need} bytes or lower sinks and recent"
            )
        while self._spent(average, num_layers, context, cost) > room:
            average -= 1  # layers below the least of others pay for more than their share
        return average

    def _spent(self, average: int, num_layers: int, context: int, cost: LayerCost) -> float:
        """Bytes of all layers where they keep so many tokens on average; 0 where that cannot exceed the budget."""
        if not cost.least:
            return 0
        if self.shared is not None:
            heads = [self.heads_of(layer, num_layers, average, context) for layer in range(num_layers)]
            return sum(cost.spent(sum(own) / len(own)) for own in heads)
        if self.layers == "uniform":
            return 0
        return sum(cost.spent(self.layer_tokens(average, layer, num_layers)) for layer in range(num_layers))

    def _weights(self, num_layers: int) -> Sequence[float]:
        """Of each layer."""
        if not isinstance(self.layers, str):
            return self.layers
        low = 1 / PYRAMID_BETA
        return [2 - low - (2 - 2 * low) * layer / (num_layers - 1) for layer in range(num_layers)]

    def layer_tokens(self, average: int, index: int, num_layers: int) -> int:
        """Tokens per KV head of compressed layer `index`, unless heads were calibrated.

        Raises: FastKVError if they are fewer than sinks + recent.
        """
        if self.layers == "uniform" or num_layers == 1:
            return average
        # Of a pyramid only what is not protected is shared out, so that every layer can hold sinks and recent.
        base, weights = float(self.reserved) if self.layers == "pyramid" else 0.0, self._weights(num_layers)
        unit = (average - base) * num_layers / sum(weights)
        # Cumulative rounding: the layers' tokens add up to the total exactly.
        tokens = int(base) + round(unit * sum(weights[: index + 1])) - round(unit * sum(weights[:index]))
        if tokens < max(self.reserved, 1):
            if self.follows_prompt:
                return max(self.reserved, 1)  # of a short prompt, see `average`
            raise FastKVError(
                f"Budget layers gives layer {index} only {tokens} tokens, fewer than sinks + recent = {self.reserved}; "
                "raise tokens, even out the weights, or lower sinks and recent"
            )
        return tokens
