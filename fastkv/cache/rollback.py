"""Roll-back for assisted decoding: the last forward stays pending until it is known what of it was accepted."""

from __future__ import annotations

from torch import Tensor

from ..errors import FastKVError
from .layer import LayerCache, Stock
from .layout import LayerConfig
from .prefill import without_padding


class Rollback:
    """A layer's cache whose last forward can be taken back: it is absorbed by `settle`, or by the forward after it.

    Attributes: pending: q, k, v and valid of the last forward, None if everything is absorbed.
    """

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def configure(self, scale: float, softcap: float | None, output: Tensor | None = None) -> LayerConfig:
        """As `LayerCache.configure`."""
        return self.cache.configure(scale, softcap, output)

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Attention as in `LayerCache.read`; another forward without a roll-back accepts everything pending."""
        self.settle(0)
        k, v = without_padding(k, valid), without_padding(v, valid)
        out = self.cache.attend(q, k, v, valid, stock)
        self.pending = (q, k, v, valid)
        return out

    def settle(self, drop: int) -> None:
        """Absorb what the last forward left pending, without its last `drop` tokens.

        Raises: FastKVError if the last forward had fewer.
        """
        if self.pending is None:
            return
        q, k, v, valid = self.pending
        num = k.shape[2]
        if drop > num:
            raise FastKVError(f"cannot roll back {drop} tokens, the last forward had {num}; older ones are compressed")
        self.pending = None
        if drop < num:
            kept = slice(0, num - drop)
            self.cache.absorb(q[:, :, kept], k[:, :, kept], v[:, :, kept], valid[:, kept])
