"""What a layer's cache can be wrapped in while a prompt is read: held in full until all layers have read it (KVzip
reads it twice, quality budgets grade it), or taken back (assisted decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..errors import FastKVError
from ..policies import Reread
from ..reference import LayerState, Moments, Slots, Spec, rows_at
from .layer import LayerCache, Stock
from .layout import Attends, LayerConfig
from .prefill import without_padding

HeldTokens = tuple[Tensor, Tensor, Tensor, Tensor]  # q [B, Hq, T, D], k, v [B, Hkv, T, D], valid [B, T]
SAMPLED, FEWEST = 16, 64  # of a second reading one query in so many, and no fewer of a chunk, are there for a refit


class HeldPrompt:
    """A layer's cache while its first prompt is read: `read`, perhaps `read_again`, then `commit`.

    Attributes: reread: what a second reading has found so far; None unless it has begun.
    """

    differentiates = False

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.held: HeldTokens | None = None
        self.attends = Attends(scale=1.0)
        self.reread: Reread | None = None
        self.fed: tuple[Tensor, Tensor, Tensor] | None = None  # the last tokens of a second reading

    def configure(self, how: Attends) -> None:
        """As `LayerCache.configure`."""
        self.attends = how

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Hold the prompt, or attend to it where it is read again; arguments as in `LayerCache.read`."""
        if self.reread is not None:
            return self.read_again(q, k, v, valid)
        self.held = (q, without_padding(k, valid), without_padding(v, valid), valid)
        return stock()

    def attend_shared(self, q: Tensor, how: Attends, stock: Stock) -> Tensor:
        """As `LayerCache.attend_shared`; a second reading watches the queries of this layer only."""
        if self.reread is None:
            return stock()
        assert self.fed is not None
        k, v, valid = self.fed
        num = q.shape[2]
        whole = pad(q, (0, 0, k.shape[2] - num, 0))
        return self._attend(whole, k, v, valid, how)[0][:, :, -num:]

    def expect_again(self) -> None:
        """From now on the prompt is read a second time. Padding goes behind its tokens, which are then slots in use."""
        assert self.held is not None
        q, k, v, valid = self.held
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        q, k, v = (rows_at(rows, order[:, None].expand(rows.shape[:3])) for rows in (q, k, v))
        self.held = (q, k, v, valid.gather(1, order))
        self.reread = Reread(k.new_zeros(k.shape[:3], dtype=torch.float32), q[:, :, :0], valid[:, :0])

    def read_again(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Attention of re-fed tokens over the held prompt and, causally, themselves. Nothing is stored."""
        assert self.held is not None and self.reread is not None
        q, k, v = (without_padding(rows, valid) for rows in (q, k, v))
        self.fed = (k, v, valid)
        how = self.attends
        out, lse = self._attend(q, k, v, valid, how)
        everything = lse.masked_fill(~valid[:, None], float("inf"))
        most = ops.most_attended(q, self.held[1], everything, how.scale, how.softcap, backend=self.cache.config.backend)
        self.reread.received = self.reread.received.maximum(torch.where(self.held[3][:, None], most, 0))
        if self.cache.config.samples_queries:
            self._sample(self.reread, q, valid)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, how: Attends) -> tuple[Tensor, Tensor]:
        """Attention [B, Hq, T, Dv] of re-fed tokens and the log of its mass [B, Hq, T]; see `ops.prefill_attention`."""
        assert self.held is not None
        _, keys, values, real = self.held
        batch, heads, _, dim = keys.shape
        seen = real.sum(-1)
        state = LayerState(
            Slots(keys, values, seen[:, None].repeat(1, heads).to(torch.int32)),
            seen,
            Moments.empty(batch, heads, dim, values.shape[-1], keys.device, order=None),
            sink_logits=how.sink_logits,
        )
        spec = Spec(how.scale, how.softcap, backend=self.cache.config.backend)
        out, lse, _ = ops.prefill_attention(q, k, v, valid, state, spec)
        return out, lse

    def _sample(self, reread: Reread, q: Tensor, valid: Tensor) -> None:
        """Keep some of the queries, evenly spaced in each row: its own, as padding is on the right."""
        second = self.cache.config.policy.second_reading
        assert second is not None
        fed, num = valid.sum(-1, keepdim=True), max(second.chunk // SAMPLED, FEWEST)
        index = torch.arange(num, device=q.device) * fed // num
        some = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        reread.queries = torch.cat([reread.queries, some], 2)
        reread.asked = torch.cat([reread.asked, (fed > 0).expand_as(index)], 1)

    def commit(self, keep: float | None) -> None:
        """Compress the held prompt, to the share `keep` of its tokens if the budget left that open."""
        assert self.held is not None
        q, k, v, valid = self.held
        self.cache.allocate(q.shape[1], k, v, k.shape[2], keep)
        self.cache.configure(self.attends)
        self.cache.absorb(q, k, v, valid, self.reread)
        self.cache.started = True


class Rollback:
    """A layer's cache whose last forward can be taken back: it is absorbed by `accept`, or by the forward after it.

    Attributes: pending: q, k, v, valid and mass of the last forward, None if everything is absorbed.
    """

    differentiates = False

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None

    def configure(self, how: Attends) -> LayerConfig:
        """As `LayerCache.configure`."""
        return self.cache.configure(how)

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Attention as in `LayerCache.read`; another forward without a roll-back accepts everything pending."""
        self.accept(0)
        k, v = without_padding(k, valid), without_padding(v, valid)
        out, mass = self.cache.attend(q, k, v, valid, stock)
        self.pending = (q, k, v, valid, mass)
        return out

    def attend_shared(self, q: Tensor, how: Attends, stock: Stock) -> Tensor:
        """As `LayerCache.attend_shared`; nothing is absorbed."""
        return self.cache.attend_shared(q, how, stock)

    def accept(self, drop: int) -> None:
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
