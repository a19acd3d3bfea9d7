"""What one layer remembers of a batch of sequences, and how it attends: the arguments of every operation on a layer.

Storage only, no maths. The first axis of every tensor is the row of the state that a sequence lives in: row b or, where
an engine gives every sequence a page for life, row `rows[b]`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .gather import pack, rows_at, slots_at, unpack
from .moments import Evicted, Moments
from .slots import PLAIN, SPECIFIED, Codec, SlotFormat, Stored

STRETCHES = 1024  # of a state at once
SCALES = {"keys": "key_scales", "values": "value_scales"}  # what belongs to codes


@dataclass
class Slots:
    """Room for tokens. Slots [0, lengths) of a head are in use, in no particular order.

    Equal heads: tensors are [B, Hkv, C, ...]. Unequal heads: they are slabs [B, S, ...], of which head h owns slots
    [starts[h], starts[h + 1]).

    Attributes:
        keys: [..., Dk] post-RoPE and values: [..., Dv], in the model's dtype or as codes of the format; values is None
            for a tier of keys only, and where they are the first numbers of keys (latent attention).
        lengths: [B, Hkv] int32.
        positions: int32, index of the token among the true (unpadded) tokens of its sequence; None where nothing asks.
        starts: [B, Hkv + 1] int32, None for equal heads.
        attention: fp32, attention received since it was last zero; None if no policy asks for it.
        memory: fp32, what the policy stored with each token; None if it stores nothing.
        bias: fp32, addend of each slot's logit, after the softcap: the slot counts e^bias times. 0 for new tokens; None
            unless the correction fits it.
        limit: slots of the head that has most, -1 for all there are.
        filled: upper bound of `lengths` that the host knows without a sync, -1 for `limit`.
        value_dim: Dv, 0 for a tier of keys only.
        key_scales, value_scales: of the codes, with the shapes of the format; None if it has none.
        format: how keys and values are stored.
        decodes_to: dtype of the model's keys and values, where those stored are codes; None where they have it.
        codec: converts between rows and codes.
        standing: what a backend has found out about these tensors, for the next time; None for nothing.
    """

    keys: Tensor
    values: Tensor | None
    lengths: Tensor
    positions: Tensor | None = None
    starts: Tensor | None = None
    attention: Tensor | None = None
    memory: Tensor | None = None
    bias: Tensor | None = None
    limit: int = -1
    filled: int = -1
    value_dim: int = 0
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    format: SlotFormat = PLAIN
    decodes_to: torch.dtype | None = None
    codec: Codec = SPECIFIED
    standing: Any = None
    # Tensors with a row for every token, which moves with it; then those with one for every slot.
    MOVING: ClassVar = ("keys", "values", "key_scales", "value_scales", "positions", "bias")
    PAIRS: ClassVar = MOVING[:4]  # what they are of
    EVERY: ClassVar = (*MOVING, "attention", "memory")

    def __post_init__(self) -> None:
        self.limit = self.keys.shape[-2] if self.limit < 0 else self.limit
        self.filled = self.limit if self.filled < 0 else self.filled
        self.value_dim = self.value_dim if self.values is None else self.format.values.dim(self.values.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's keys and values."""
        return self.decodes_to or self.keys.dtype

    def moving(self) -> dict[str, Tensor]:
        """The tensors that have a row for every token, by name."""
        return {name: rows for name in self.MOVING if (rows := getattr(self, name)) is not None}

    def encode(self, name: str, rows: Tensor) -> Stored:
        """`RowFormat.encode` of rows for the tensor of that name."""
        return self.codec.encode(getattr(self.format, name), rows)

    def decode(self, name: str, codes: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """`RowFormat.decode` for the tensor of that name, in `dtype`; plain rows as they are."""
        return codes if self.format.plain else self.codec.decode(getattr(self.format, name), codes, scales, dtype)

    def encoded(self, keys: Tensor, values: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Rows for `moving` of new tokens: keys, values [B, Hkv, N, D] and positions [B, Hkv, N], as stored."""
        rest = {"positions": positions}
        if self.bias is not None:
            rest["bias"] = torch.zeros_like(positions, dtype=self.bias.dtype)
        if self.format.plain:
            pairs = {"keys": keys} if self.values is None else {"keys": keys, "values": values}
            return {**pairs, **rest}
        alike = self.format.keys == self.format.values and keys.shape == values.shape
        if alike and keys.shape[2] == 1:  # of a step, in half as many operators
            (key_codes, codes), both = self.encode("keys", torch.stack([keys, values]))
            assert both is not None
            key_scales, scales = both
        else:
            (key_codes, key_scales), (codes, scales) = self.encode("keys", keys), self.encode("values", values)
        rows = {"keys": key_codes, "values": codes, "key_scales": key_scales, "value_scales": scales}
        return {**rows, **rest}  # type: ignore[dict-item]

    def pairs_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, decoded, of the slots at index [B, Hkv, m], counted from the first of each head."""
        pairs = {name: part for name, part in self.moving().items() if name in self.PAIRS}
        if self.starts is None:
            rows = {name: rows_at(part, index) for name, part in pairs.items()}
        else:
            rows = dict(zip(pairs, slots_at(pairs.values(), self.starts, index)))
        keys = self.decode("keys", rows["keys"], rows.get("key_scales"))
        if self.values is None:
            return keys, keys[..., : self.value_dim]
        return keys, self.decode("values", rows["values"], rows.get("value_scales"))

    def equal(self, num: int, room: int = 0) -> Slots:
        """A copy of the first `num` slots of every head and empty ones for `room` more tokens, equally many for all."""
        assert self.starts is not None
        slabs = self.moving()
        rows = dict(zip(slabs, unpack(slabs.values(), self.starts, num)))
        if room:
            rows = {name: torch.cat([t, t.new_zeros(*t.shape[:2], room, *t.shape[3:])], 2) for name, t in rows.items()}
        plain = {"starts": None, "attention": None, "memory": None, "limit": num + room, "filled": num}
        return replace(self, **plain, **rows)  # type: ignore[arg-type]

    def deal(self, capacities: Sequence[int]) -> None:
        """Give each head so many slots, all of them empty."""
        self.limit, self.filled = max(capacities), 0
        if self.starts is not None:
            self.starts.zero_()
            for head, end in enumerate(accumulate(capacities)):  # filled in: nothing is sent to the device
                self.starts[:, head + 1].fill_(end)

    def dealt(self, capacities: Sequence[int]) -> bool:
        """Whether each head of the first row has so many slots. The host waits for the device."""
        return self.starts is None or self.starts[0].diff().tolist() == list(capacities)

    def redeal(self, capacities: Sequence[int]) -> None:
        """Give each head so many slots, all of them empty, in slabs that are just large enough."""
        if self.keys.shape[1] != sum(capacities):
            self._map_slabs(lambda slab: slab.new_zeros(len(slab), sum(capacities), *slab.shape[2:]))
        self.deal(capacities)

    def trade(self, capacities: Tensor, everywhere: Tensor) -> None:
        """Give each head so many slots, [B, Hkv]; `everywhere` [B, all heads] says what the heads of all processes get.

        The one host sync of an adaptive layer, once per selection while a prompt is read. One process alone always
        has room; of several that share the heads, one may need more than its part, and its slab then grows.
        """
        assert self.starts is not None
        self.starts[:, 1:] = capacities.cumsum(-1)
        self.limit, room = torch.stack([everywhere.max(), capacities.sum(-1).max()]).tolist()
        missing = room - self.keys.shape[1]
        if missing > 0:
            self._map_slabs(lambda slab: torch.cat([slab, slab.new_zeros(len(slab), missing, *slab.shape[2:])], 1))

    def _map_slabs(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put another slab in the place of each."""
        for name in self.EVERY:
            slab = getattr(self, name)
            if slab is not None:
                setattr(self, name, change(slab))

    def __getitem__(self, name: str) -> Tensor:
        """The first `filled` slots of every head of the named tensor, [B, Hkv, filled, ...], as read by attention:
        keys and values are decoded.
        """
        return self.read(name, dtype=torch.float32)[0]

    def read(self, *names: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The same of each of the named tensors, in `dtype` or in the model's."""
        if not self.filled:  # as before every prompt
            dims = {"keys": [self.format.keys.dim(self.keys.shape[-1])], "values": [self.value_dim]}
            none = ((getattr(self, name), dims.get(name)) for name in names)
            return [
                self.keys.new_empty(*self.lengths.shape, 0, *dim, dtype=dtype or self.dtype)
                if dim
                else rows.new_empty(*self.lengths.shape, 0)
                for rows, dim in none
            ]
        found = self.codec.read(self, names, dtype or self.dtype)
        if found is not None:
            return found
        scales = {} if self.format.plain else {name: SCALES[name] for name in names if name in SCALES}
        every = (*names, *scales.values())
        rows = dict(zip(every, self.stored(*every)))
        for name, scale in scales.items():
            rows[name] = self.decode(name, rows[name], rows[scale], dtype or self.dtype)
        return [rows[name] for name in names]

    def stored(self, *names: str) -> list[Tensor]:
        """The first `filled` slots of every head of the named tensors as they are stored."""
        inside = self.keys[..., : self.value_dim] if self.values is None else self.values
        rows = [inside if name == "values" else getattr(self, name) for name in names]
        if self.starts is None:
            return [part[:, :, : self.filled] for part in rows]
        return unpack(rows, self.starts, self.filled)

    def biases(self, num: int) -> Tensor | None:
        """Addends [B, Hkv, num] of the logits of the first `filled` slots, then 0 for what follows; None for none."""
        if self.bias is None:
            return None
        return pad(self.stored("bias")[0], (0, num - self.filled))

    @property
    def valid(self) -> Tensor:
        """[B, Hkv, filled] bool, which of those slots are in use."""
        return torch.arange(self.filled, device=self.lengths.device) < self.lengths[..., None]


@dataclass
class Recovery:
    """What recovers the value of a token from its key (VECTOR): v ~ k~ @ weight, k~ the key before its rotation.

    Attributes: weight [Hkv, Dk, Dv], or [Hkv, Hkv * Dk, Dv] of the keys of all heads; cos, sin [P, D/2], row p for
        position p, divided by the rotary scaling factor.
    """

    weight: Tensor
    cos: Tensor
    sin: Tensor


@dataclass
class LayerState:
    """Retained tokens plus what is remembered of the evicted ones.

    Three lengths, never confused: `seen`, the true tokens absorbed; `lengths`, how many of them are stored; the slots
    there are. For every head, stored tokens + moments.count == seen.

    Attributes:
        exact: tokens with key and value.  approx: tokens of which only the key is stored, None unless VECTOR is used.
        seen: [B] int64.
        moments: of the evicted tokens, at least their number.
        parts: what the layer's correction remembers of them besides, None for most.
        recovery: of the values of `approx`; shared with other layers and not part of what the layer remembers.
        scratch: of the kernels, shared by the layers of a cache; empty for other backends.
        sink_logits: [Hq], any float dtype: a learned logit of each query head that takes part in its softmax with the
            value zero (attention sinks), None for none; a weight of the model, not part of what the layer remembers.
        rows: [B] int64, the state row of each batch row; None: batch row b lives in state row b. Row 0 is nobody's: it
            stands for batch rows that an operation is to pass over, as often as needed; their results mean nothing.
            All others differ. With rows, tensors may be views of pages, whose first axis has a stride of its own.
        standing: what a backend has found out about these tensors, for the next step; None for nothing.
        pages: [P, bytes] uint8, of which all tensors are views; None where each lies by itself.
        stretches: of pages, by their first and last row + 1, see `stretch`.
    """

    exact: Slots
    seen: Tensor
    moments: Moments
    approx: Slots | None = None
    parts: Evicted | None = None
    recovery: Recovery | None = None
    scratch: list[Tensor] = field(default_factory=list)
    sink_logits: Tensor | None = None
    rows: Tensor | None = None
    standing: Any = None
    pages: Tensor | None = None
    stretches: dict[tuple[int, int], LayerState] = field(default_factory=dict, repr=False)
    BORROWED: ClassVar = ("sink_logits", "rows", "pages")  # that belong to the model, or to a batch, or hold the others
    SLABS: ClassVar = tuple(f"exact.{name}" for name in Slots.EVERY)  # where heads have unequally many slots

    @property
    def tiers(self) -> dict[str, Slots]:
        """exact and, if there is one, approx."""
        return {"exact": self.exact} if self.approx is None else {"exact": self.exact, "approx": self.approx}

    @property
    def batch(self) -> int:
        """B, sequences of a batch."""
        return len(self.seen if self.rows is None else self.rows)

    @property
    def slots(self) -> int:
        """Slots per KV head, of all tiers, mean over heads."""
        return sum(tier.keys[0, ..., 0].numel() for tier in self.tiers.values()) // self.heads

    @property
    def heads(self) -> int:
        """Hkv."""
        return self.exact.lengths.shape[1]

    @property
    def stored(self) -> Tensor:
        """[B, Hkv] int32, tokens in the slots of each head."""
        return self.exact.lengths if self.approx is None else self.exact.lengths + self.approx.lengths

    def fill(self) -> None:
        """Let the host count on no slot being free."""
        self.exact.filled = self.exact.limit
        if self.approx is not None:
            self.approx.filled = self.approx.limit

    def owners(self) -> Iterator[tuple[str, object]]:
        """The objects that have tensors of the state as attributes, with the prefix of their names."""
        yield from (("", self), ("exact.", self.exact), ("moments.", self.moments))
        if self.approx is not None:
            yield "approx.", self.approx
        if self.parts is not None:
            yield f"{self.parts.kind}.", self.parts

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that belongs to the layer, with its name: seen, exact.keys, moments.count, ..."""
        for prefix, owner in self.owners():
            for one in fields(owner):  # type: ignore[arg-type]
                value = getattr(owner, one.name)
                if isinstance(value, Tensor) and one.name not in self.BORROWED:
                    yield prefix + one.name, value

    def replace(self, name: str, tensor: Tensor) -> None:
        """Put another tensor in the place of the one that `named_tensors` calls so."""
        prefix, _, attribute = name.rpartition(".")
        setattr(dict(self.owners())[prefix and f"{prefix}."], attribute, tensor)

    def at(self, rows: Tensor) -> LayerState:
        """The same storage, for a batch whose row b lives in state row rows[b]."""
        return replace(self, rows=rows)

    def shell(self) -> LayerState:
        """The same tensors in objects of their own, so that some may be replaced; for no chosen rows."""
        own = replace(self, rows=None, pages=None, stretches={}, standing=None)
        own.exact, own.moments = replace(self.exact), replace(self.moments)
        own.approx = None if self.approx is None else replace(self.approx)
        own.parts = copy.copy(self.parts)
        return own

    def names_but(self, but: tuple[str, ...]) -> list[str]:
        """Of `named_tensors` those that are not named, nor what they are part of."""
        names = (name for name, _ in self.named_tensors())
        return [name for name in names if name not in but and name.partition(".")[0] not in but]

    def taken(self, but: tuple[str, ...] = (), only: tuple[str, ...] | None = None, equal: bool = False) -> LayerState:
        """A copy of what `rows` say, in which batch row b lives in row b.

        Args: but: names of tensors, or of what they are part of, that stay where they are, in the rows of the state.
            only: last parts of the names of tensors that do not; None for all.  equal: whether heads of unequally many
            slots have as many in the copy as the one that has most; with starts among what is copied.
        """
        assert self.rows is not None
        own, named = self.shell(), dict(self.named_tensors())
        for name in self.names_but(but):
            if only is None or name.rpartition(".")[2] in only:
                own.replace(name, named[name].index_select(0, self.rows))
        exact = own.exact
        if equal and exact.starts is not None:
            slabs = [name for name in self.names_but(but) if name in self.SLABS]
            for name, rows in zip(slabs, unpack([getattr(exact, n[6:]) for n in slabs], exact.starts, exact.limit)):
                own.replace(name, rows)
            exact.starts = None
        return own

    def stretch(self, first: int, stop: int) -> LayerState:
        """Rows [first, stop) by themselves: views, so that what happens to them happens here. Of pages, whose place
        never changes, they are made once.
        """
        own = self.stretches.get((first, stop))
        if own is None:
            own = self.shell()
            for name, tensor in self.named_tensors():
                own.replace(name, tensor[first:stop])
            if self.pages is not None:
                if len(self.stretches) == STRETCHES:
                    self.stretches.clear()
                self.stretches[first, stop] = own
        for tier, slots in self.tiers.items():
            own.tiers[tier].limit, own.tiers[tier].filled = slots.limit, slots.filled
        return own

    def each(self) -> Iterator[LayerState]:
        """The sequences of a batch one after another, as `stretch`; nobody's are left out. Waits for the device."""
        assert self.rows is not None
        for row in self.rows.tolist():
            if row > 0:
                yield self.stretch(row, row + 1)

    def put(self, own: LayerState) -> None:
        """Write back what `taken` copied."""
        assert self.rows is not None
        named, starts = dict(self.named_tensors()), self.exact.starts
        slabs = self.SLABS if own.exact.starts is None and starts is not None else ()
        for name, new in own.named_tensors():
            tensor, rows = named[name], new
            if name in slabs and starts is not None:
                rows = tensor.index_select(0, self.rows)
                pack(starts.index_select(0, self.rows), [(rows, new)])
            if new is not tensor:
                tensor.index_copy_(0, self.rows, rows)

    @contextmanager
    def gathered(self, changes: bool = True, only: tuple[str, ...] | None = None) -> Iterator[LayerState]:
        """The state of the batch alone, for functions that know nothing of rows: itself, or a copy that is put back.

        Args: changes: whether there is something to put back.  only: as in `taken`, what the function looks at.
        """
        own = self
        if self.rows is not None:
            own = self.taken(only=only)
            for slots in own.tiers.values():
                slots.lengths.masked_fill_((self.rows == 0)[:, None], 0)  # what comes to nobody's row never fills it up
        yield own
        if own is not self and changes:
            self.put(own)

    def nbytes(self) -> int:
        """Bytes of all tensors: slots, positions, scores and what is remembered of evicted tokens."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def map_batch_(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the first axis to every tensor, in place where the shape stays."""
        for name, tensor in list(self.named_tensors()):
            new = change(tensor)
            if new.shape == tensor.shape:
                tensor.copy_(new)
            else:
                self.replace(name, new)


@dataclass(frozen=True)
class Spec:
    """How a layer attends and evicts: plain values, so that operators can pass it on as text.

    Attributes:
        scale: logit multiplier.  softcap: bends logits to c tanh(x / c), or None.
        correction: a `Correction`, which says what is mixed in for the evicted tokens; None for nothing.
        backend: "auto", "reference", "cpu" or "triton".
        tokens: that a head keeps at an eviction.  spare: slots beyond, which are filled in between.
        sinks, recent: first and last tokens that never leave.
    """

    scale: float
    softcap: float | None = None
    correction: Any = None
    backend: str = "auto"
    tokens: int = 0
    spare: int = 0
    sinks: int = 0
    recent: int = 0

    def evicted(self, state: LayerState) -> Evicted | None:
        """What is mixed into attention for the evicted tokens of a layer; None for nothing."""
        return None if self.correction is None else self.correction.evicted(state)
