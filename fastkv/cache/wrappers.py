"""What a layer's cache can be wrapped in while a prompt is read: held in full until all layers have read it (KVzip
reads it twice, quality budgets grade it), or taken back (assisted decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import FastKVError
from .layer import LayerCache, Stock
from .layout import LayerConfig
from .prefill import attend_held, without_padding

Attends = tuple[float, float | None, Tensor | None, Tensor | None]  # what `LayerCache.configure` takes


class HeldPrompt:
    """A layer's cache while its first prompt is read: `read`, perhaps `read_again`, then `commit`.

    Attributes: received: [B, Hkv, N] fp32, the most attention that re-fed tokens gave to each token of the prompt; None
        unless `rereads`, between the two readings.
    """

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.held: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.attends: Attends = (1.0, None, None, None)
        self.received: Tensor | None = None
        self.fed: tuple[Tensor, Tensor, Tensor] | None = None  # the last tokens of a second reading

    def configure(
        self, scale: float, softcap: float | None, output: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> None:
        """As `LayerCache.configure`."""
        self.attends = scale, softcap, output, sink_logits

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Hold the prompt, or attend to it where it is read again; arguments as in `LayerCache.read`."""
        if self.received is not None:
            return self.read_again(q, k, v, valid)
        self.held = (q, without_padding(k, valid), without_padding(v, valid), valid)
        return stock()

    def look(self, q: Tensor, scale: float, softcap: float | None, stock: Stock) -> Tensor:
        """As `LayerCache.look`; a second reading watches the queries of this layer only."""
        if self.received is None:
            return stock()
        assert self.fed is not None and self.held is not None
        k, v, valid = self.fed
        num = q.shape[2]
        whole = pad(q, (0, 0, k.shape[2] - num, 0))
        return attend_held(whole, k, v, valid, self.held[1:], scale, softcap)[0][:, :, -num:]

    def expect_again(self) -> None:
        """From now on the prompt is read a second time."""
        assert self.held is not None
        keys = self.held[1]
        self.received = keys.new_zeros(keys.shape[:3], dtype=torch.float32)

    def read_again(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Attention of re-fed tokens over the held prompt and themselves. Nothing is stored."""
        assert self.held is not None and self.received is not None
        self.fed = (k, v, valid)
        scale, softcap, _, sink_logits = self.attends
        out, most = attend_held(q, k, v, valid, self.held[1:], scale, softcap, sink_logits)
        self.received = self.received.maximum(most)
        return out

    def commit(self, keep: float | None) -> None:
        """Compress the held prompt, to the share `keep` of its tokens if the budget left that open."""
        assert self.held is not None
        q, k, v, valid = self.held
        self.cache.allocate(q.shape[1], k, v, k.shape[2], keep)
        self.cache.configure(*self.attends)
        self.cache.absorb(q, k, v, valid, self.received)
        self.cache.started = True


class Rollback:
    """A layer's cache whose last forward can be taken back: it is absorbed by `settle`, or by the forward after it.

    Attributes: pending: q, k, v, valid and mass of the last forward, None if everything is absorbed.
    """

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None

    def configure(
        self, scale: float, softcap: float | None, output: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> LayerConfig:
        """As `LayerCache.configure`."""
        return self.cache.configure(scale, softcap, output, sink_logits)

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Attention as in `LayerCache.read`; another forward without a roll-back accepts everything pending."""
        self.settle(0)
        k, v = without_padding(k, valid), without_padding(v, valid)
        out, mass = self.cache.attend(q, k, v, valid, stock)
        self.pending = (q, k, v, valid, mass)
        return out

    def look(self, q: Tensor, scale: float, softcap: float | None, stock: Stock) -> Tensor:
        """As `LayerCache.look`; nothing is absorbed."""
        return self.cache.look(q, scale, softcap, stock)

    def settle(self, drop: int) -> None:
        """Absorb what the last forward left pending, without its last `drop` tokens.

        Raises: FastKVError if the last forward had fewer.
        """
        if self.pending is None:
            return
        q, k, v, valid, mass = self.pending
        num = k.shape[2]
        if drop > num:
            raise FastKVError(f"cannot roll back {drop} tokens, the last forward had {num}; older ones are compressed")
        self.pending = None
        if drop < num:
            kept = slice(0, num - drop)
            mass = None if mass is None else mass[:, :, kept]
            self.cache.absorb(q[:, :, kept], k[:, :, kept], v[:, :, kept], valid[:, kept], mass=mass)
