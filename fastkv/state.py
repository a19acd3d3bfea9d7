"""LayerState: everything one layer remembers of a batch of sequences. Storage only, no maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from .budget import LayerCost
from .reference import Centroids, Moments, unpack

SKETCH_SHARE = 16  # centroids take one byte where pairs take so many
LEAST_CENTROIDS = 4
SAMPLE = 1024  # tokens per head at which the cost of a layout is measured; even, so that no rounding shows


@dataclass(frozen=True)
class Layout:
    """What a layer's state consists of, known before its first token arrives.

    Attributes:
        tokens: (key, value) pairs that each KV head keeps; where `adaptive`, what they keep before the first selection.
        spare: further slots per head, filled between evictions.
        adaptive: whether heads trade slots with each other when tokens are selected.
        approx: tokens of which each KV head keeps the key only (VECTOR); empty without.
        order: of the moments, None for the count only.  spread: whether they know the keys' mean square deviation.
        sketched: tokens per KV head, mean over the heads of all processes, that a share of `1 / SKETCH_SHARE` of the
            bytes of is given to centroids of the evicted tokens; 0 for no centroids.
        slope: whether to keep a half-precision copy of the cross moment for the kernels (half-precision keys only).
        attention: whether to add up the attention that slots receive.
        memory: whether the policy stores a number with each token.
    """

    tokens: tuple[int, ...]
    spare: int = 0
    adaptive: bool = False
    approx: tuple[int, ...] = ()
    order: int | None = None
    slope: bool = False
    attention: bool = False
    memory: bool = False
    spread: bool = False
    sketched: int = 0

    def centroids(self, key_dim: int, value_dim: int, itemsize: int) -> int:
        """Centroids per KV head, all heads alike, where keys and values have so many numbers of so many bytes."""
        if not self.sketched:
            return 0
        room = self.sketched * (key_dim + value_dim) * itemsize
        return max(room // (SKETCH_SHARE * centroid_bytes(key_dim, value_dim)), LEAST_CENTROIDS)

    @property
    def ragged(self) -> bool:
        """Whether heads own stretches of a slab instead of equally many slots."""
        return self.adaptive or len(set(self.tokens)) > 1


def centroid_bytes(key_dim: int, value_dim: int) -> int:
    """Bytes of a centroid: mean key, mean value, count and spread in float32."""
    return 4 * (key_dim + value_dim + 2)


@dataclass
class Slots:
    """Room for tokens. Slots [0, lengths) of a head are in use, in no particular order.

    Equal heads: tensors are [B, Hkv, C, ...]. Unequal heads: they are slabs [B, S, ...], of which head h owns slots
    [starts[h], starts[h + 1]).

    Attributes:
        keys: [..., Dk] post-RoPE and values: [..., Dv], in the model's dtype; values is None for a tier of keys only.
        positions: int32, index of the token among the true (unpadded) tokens of its sequence.
        lengths: [B, Hkv] int32.
        starts: [B, Hkv + 1] int32, None for equal heads.
        attention: fp32, attention received since `LayerState.steps` was last zero; None if no policy asks for it.
        memory: fp32, what the policy stored with each token; None if it stores nothing.
        filled: upper bound of `lengths` that the host knows without a sync.
        limit: slots of the head that has most.
    """

    keys: Tensor
    values: Tensor | None
    positions: Tensor
    lengths: Tensor
    starts: Tensor | None = None
    attention: Tensor | None = None
    memory: Tensor | None = None
    filled: int = 0
    limit: int = 0

    @classmethod
    def allocate(
        cls, like_keys: Tensor, like_values: Tensor | None, capacities: list[int], ragged: bool, layout: Layout
    ) -> Slots:
        """Empty slots, `capacities` of them for each head, for the batch, sizes, dtype and device of [B, Hkv, T, D]."""
        batch, heads, _, dim = like_keys.shape
        place = (batch, sum(capacities)) if ragged else (batch, heads, capacities[0])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=like_keys.device)

        made = cls(
            keys=zeros(*place, dim, dtype=like_keys.dtype),
            values=None if like_values is None else zeros(*place, like_values.shape[-1], dtype=like_values.dtype),
            positions=zeros(*place, dtype=torch.int32),
            lengths=zeros(batch, heads, dtype=torch.int32),
            starts=zeros(batch, heads + 1, dtype=torch.int32) if ragged else None,
            attention=zeros(*place) if layout.attention else None,
            memory=zeros(*place) if layout.memory else None,
        )
        made.deal(capacities)
        return made

    def deal(self, capacities: list[int]) -> None:
        """Give each head so many slots."""
        self.limit = max(capacities)
        if self.starts is not None:
            self.starts.zero_()
            self.starts[:, 1:] = torch.tensor(capacities, device=self.starts.device).cumsum(0)

    def trade(self, capacities: Tensor, everywhere: Tensor) -> None:
        """Give each head so many slots, [B, Hkv]; `everywhere` [B, all heads] says what the heads of all processes get.

        The one host sync of an adaptive layer, once per selection while a prompt is read. One process alone always
        has room; of several that share the heads, one may need more than its part, and its slab then grows.
        """
        assert self.starts is not None
        self.starts[:, 1:] = capacities.cumsum(-1)
        self.limit, room = torch.stack([everywhere.max(), capacities.sum(-1).max()]).tolist()
        missing = room - self.positions.shape[1]
        if missing > 0:
            for name in ("keys", "values", "positions", "attention", "memory"):
                slab = getattr(self, name)
                if slab is not None:
                    setattr(self, name, torch.cat([slab, slab.new_zeros(len(slab), missing, *slab.shape[2:])], 1))

    def __getitem__(self, name: str) -> Tensor:
        """The first `filled` slots of every head of the named tensor, [B, Hkv, filled, ...]."""
        rows: Tensor = getattr(self, name)
        return rows[:, :, : self.filled] if self.starts is None else unpack(rows, self.starts, self.filled)

    @property
    def pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """keys, values, positions and lengths of a tier that has values."""
        assert self.values is not None
        return self.keys, self.values, self.positions, self.lengths

    @property
    def width(self) -> int | None:
        """`limit` for unequal heads, None for equal ones, whose tensors say it."""
        return None if self.starts is None else self.limit

    @property
    def valid(self) -> Tensor:
        """[B, Hkv, filled] bool, which of those slots are in use."""
        return torch.arange(self.filled, device=self.lengths.device) < self.lengths[..., None]


@dataclass
class LayerState:
    """Retained tokens plus the moments, or the centroids, of the evicted ones.

    Three lengths, never confused: `seen`, the true tokens absorbed; `lengths`, how many of them are stored; the slots
    there are. For every head, stored tokens + moments.count == seen.

    Attributes:
        exact: tokens with key and value.  approx: tokens of which only the key is stored, None unless VECTOR is used.
        seen: [B] int64.
        moments: of the evicted tokens.  centroids: of the same tokens, None without that correction.
        scratch: of the kernels, shared by the layers of a cache; empty where the reference runs.
    """

    layout: Layout
    exact: Slots
    seen: Tensor
    moments: Moments
    approx: Slots | None = None
    centroids: Centroids | None = None
    scratch: list[Tensor] = field(default_factory=list)

    @classmethod
    def allocate(cls, like_keys: Tensor, like_values: Tensor, layout: Layout) -> LayerState:
        """Empty state for the batch, heads, sizes, dtype and device of the given [B, Hkv, T, D]."""
        batch, heads, _, key_dim = like_keys.shape
        value_dim, device = like_values.shape[-1], like_keys.device
        moments = Moments.empty(batch, heads, key_dim, value_dim, device, order=layout.order, spread=layout.spread)
        centroids, parts = None, layout.centroids(key_dim, value_dim, like_keys.element_size())
        if parts:
            centroids = Centroids.empty(batch, heads, parts, key_dim, value_dim, device)
        if layout.slope and moments.cross is not None and like_keys.element_size() == 2:
            moments.slope = torch.zeros(batch, heads, key_dim, value_dim, dtype=like_keys.dtype, device=device)
        pairs = [tokens + layout.spare for tokens in layout.tokens]
        approx = None
        if layout.approx:
            approx = Slots.allocate(like_keys, None, list(layout.approx), len(set(layout.approx)) > 1, layout)
        return cls(
            layout=layout,
            exact=Slots.allocate(like_keys, like_values, pairs, layout.ragged, layout),
            seen=torch.zeros(batch, dtype=torch.int64, device=device),
            moments=moments,
            approx=approx,
            centroids=centroids,
        )

    @classmethod
    def cost(cls, like_keys: Tensor, like_values: Tensor, layout: Callable[[int], Layout]) -> LayerCost:
        """Bytes per sequence that `allocate` would spend: for each token per KV head, and apart from them.

        Args: layout: makes one for a number of tokens per KV head.
        """

        def spent(tokens: int) -> int:
            meta = [t[:1].to("meta") for t in (like_keys, like_values)]
            return cls.allocate(meta[0], meta[1], replace(layout(tokens), sketched=0)).nbytes()

        each = (spent(2 * SAMPLE) - spent(SAMPLE)) / SAMPLE
        share, part, least = 0.0, 1, 0
        if layout(SAMPLE).sketched:
            heads, dims = like_keys.shape[1], (like_keys.shape[-1], like_values.shape[-1])
            share = heads * sum(dims) * like_keys.element_size() / SKETCH_SHARE
            part = heads * centroid_bytes(*dims)
            least = LEAST_CENTROIDS * part
        return LayerCost(each, spent(SAMPLE) - round(SAMPLE * each), share, part, least)

    @property
    def tiers(self) -> dict[str, Slots]:
        """exact and, if there is one, approx."""
        return {"exact": self.exact} if self.approx is None else {"exact": self.exact, "approx": self.approx}

    @property
    def slots(self) -> int:
        """Slots per KV head, of all tiers, mean over heads."""
        return sum(tier.positions[0].numel() for tier in self.tiers.values()) // self.heads

    @property
    def heads(self) -> int:
        """Hkv."""
        return self.exact.lengths.shape[1]

    @property
    def stored(self) -> Tensor:
        """[B, Hkv] int32, tokens in the slots of each head."""
        return self.exact.lengths if self.approx is None else self.exact.lengths + self.approx.lengths

    def _owners(self) -> Iterator[tuple[str, object]]:
        yield from (("", self), ("exact.", self.exact), ("moments.", self.moments))
        if self.approx is not None:
            yield "approx.", self.approx
        if self.centroids is not None:
            yield "centroids.", self.centroids

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state with its name: seen, exact.keys, moments.count, ..."""
        for prefix, owner in self._owners():
            for one in fields(owner):  # type: ignore[arg-type]
                value = getattr(owner, one.name)
                if isinstance(value, Tensor):
                    yield prefix + one.name, value

    def nbytes(self) -> int:
        """Bytes of all tensors: slots, positions, scores and moments."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def fill(self) -> None:
        """Let the host count on no slot being free."""
        self.exact.filled = self.exact.limit
        if self.approx is not None:
            self.approx.filled = self.approx.limit

    def zero_(self) -> None:
        """Forget everything, in place: addresses stay."""
        for _, tensor in self.named_tensors():
            tensor.zero_()
        self.exact.deal([tokens + self.layout.spare for tokens in self.layout.tokens])
        self.exact.filled = 0
        if self.approx is not None:
            self.approx.deal(list(self.layout.approx))
            self.approx.filled = 0

    def map_batch_(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis to every tensor, in place where the shape stays."""
        for _, owner in self._owners():
            for one in fields(owner):  # type: ignore[arg-type]
                tensor = getattr(owner, one.name)
                if not isinstance(tensor, Tensor):
                    continue
                new = change(tensor)
                if new.shape == tensor.shape:
                    tensor.copy_(new)
                else:
                    setattr(owner, one.name, new)
