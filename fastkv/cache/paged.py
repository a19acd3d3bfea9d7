"""PagedLayer: one layer's tokens of many sequences that come and go, each in a page of its own; for serving engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops
from ..backend import resolve
from ..config import Config
from ..errors import FastKVError
from ..reference import LayerState, Recovery
from .layer import evict
from .layout import Attends, LayerConfig, LayerPlan, Layout
from .pages import PageFormat
from .prefill import absorb_block, attend_block, without_padding
from .workspace import CacheWorkspace

AT_ONCE = 32  # sequences: copies of their pages, where they evict or are read together, do not grow with the batch
Room = list[tuple[int, int]]  # of each tier: `Slots.filled` and `Slots.limit`


@dataclass(frozen=True)
class PagedRule:
    """What a layer needs of a config where its sequences live in pages.

    Attributes: layer: how it attends and evicts.  form: of its pages.
    """

    layer: LayerConfig
    form: PageFormat

    @classmethod
    def of(
        cls,
        config: Config,
        layer: int,
        place: int,
        num_layers: int,
        keys: Tensor,
        values: Tensor,
        shared: CacheWorkspace,
    ) -> PagedRule:
        """For keys and values [1, Hkv, 0, D] of the dtype and device that pages will have.

        Where processes share the heads, each lays out its own in a page as large as the largest of theirs.

        Args: layer: index in the model.  place: among the `num_layers` that share the budget.
        Raises: FastKVError if the budget is too small, or follows the prompt: pages are of one size.
        """
        budget, parallel = config.budget, shared.parallel
        if budget.follows_prompt:
            raise FastKVError(
                "a page holds the same number of tokens whatever the prompt, got a budget that follows the prompt "
                "(keep, compress or quality); give tokens or bytes"
            )
        if budget.shared is not None and budget.context is None:
            raise FastKVError(
                "a page holds the same number of tokens of each head for life, got heads that follow the length of the "
                "text; give Budget(context=...), the length that they are for"
            )
        ranks = (replace(parallel, rank=rank) for rank in range(parallel.size))
        plans = [LayerPlan(config, layer, place, num_layers, rank) for rank in ranks]
        layouts = [plan.of(keys, values)[0] for plan in plans]
        forms = [_form(made, keys, values) for made in layouts]
        form = replace(forms[parallel.rank], nbytes=max(one.nbytes for one in forms))
        return cls(LayerConfig.of(plans[parallel.rank], layouts[parallel.rank], keys.device), form)

    def scratch_bytes(self, num_heads: int, sequences: int, device: torch.device) -> int:
        """Bytes of the kernels' scratch for so many query heads and batches of up to so many sequences there, which
        all layers of this shape share."""
        sizes = ops.workspace_room(num_heads, self.form.template, self.layer.spec, sequences, device)
        return sum(number * dtype.itemsize for number, dtype in sizes)


def _form(layout: Layout, keys: Tensor, values: Tensor) -> PageFormat:
    """Of the pages of a layer with that layout and keys and values as in `PagedRule.of`."""
    template = layout.allocate(keys.to("meta"), values.to("meta"))
    if layout.adaptive:
        template.exact.limit = keys.shape[1] * layout.total + layout.spare  # what one head may get of the others
    return PageFormat.of(template)


class PagedClock:
    """When sequences evict, as far as the host knows without asking the device: every `period` steps after a prompt.

    Attributes: prompted: tokens of the prompts, by what the engine calls a sequence.
    """

    def __init__(self, period: int) -> None:
        self.period, self.prompted = period, dict[int, int]()

    def read(self, name: int, seen: int) -> None:
        """A block of its prompt has made so many tokens of this sequence, which may have a former one's name."""
        self.prompted[name] = seen

    def due(self, names: Sequence[int], seen: Sequence[int]) -> list[int]:
        """Which of the sequences in a batch evict after a step that makes so many tokens of each.

        None of those whose prompts were never read: an engine warms up with such.
        """
        known = [i for i, name in enumerate(names) if name in self.prompted]
        return [i for i in known if (seen[i] - self.prompted[names[i]]) % self.period == 0]


@dataclass(frozen=True)
class PagedBlocks:
    """The next blocks of some prompts, one of each, as a padded batch.

    Attributes: rows, lengths: of the R sequences, and how many tokens of each, what the host knows.
        index: [R] int64, the rows.  valid: [R, T] bool, false for padding, which comes last.
    """

    rows: Sequence[int]
    lengths: Sequence[int]
    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], lengths: Sequence[int], index: Tensor, counts: Tensor) -> PagedBlocks:
        """Args: index, counts: [R] int64, the same numbers on the device."""
        places = torch.arange(max(lengths), device=index.device)
        return cls(rows, lengths, index, places < counts[:, None])

    @property
    def padded(self) -> bool:
        """Whether there is padding."""
        return min(self.lengths) < max(self.lengths)


class PagedLayer:
    """What `LayerCache` is for a batch in lock-step: every sequence has a clock of its own, which starts at the end of
    its prompt, and what becomes of it does not depend on the others. A row is the number of a sequence's page.

    Attributes:
        state: views of all pages.  rule: how the layer attends and evicts.  num_heads: of queries.
        empty: what the host knows of the slots of a page without tokens.  starts: [1, Hkv + 1] of it, by tier.
        rooms: what the host knows of the slots of each row whose prompt is being read, without asking the device.
        read_by: tokens that each of those rows has read.
        reached: the rooms of a row that has read so many tokens, in whole blocks: the same for all prompts.
    """

    def __init__(
        self,
        paged: PagedRule,
        pages: Tensor,
        num_heads: int,
        scale: float,
        softcap: float | None,
        shared: CacheWorkspace,
        sink_logits: Tensor | None = None,
    ) -> None:
        """Args: pages: [P, bytes] uint8, of which page 0 is nobody's; num_heads, scale, softcap: how it attends."""
        self.rule, self.num_heads, self.shared = paged.layer.attending(Attends(scale, softcap)), num_heads, shared
        self.state = paged.form.view(pages)
        self.state.sink_logits = sink_logits
        self.pages = pages[:, : paged.form.nbytes]
        empty = paged.form.allocate(1, pages.device)
        self.rule.layout.clear(empty)
        self.empty: Room = [(slots.filled, slots.limit) for slots in empty.tiers.values()]
        self.starts = {tier: slots.starts.clone() for tier, slots in empty.tiers.items() if slots.starts is not None}
        if self.rule.weight is not None:
            assert self.rule.rotary is not None
            table = shared.table(self.rule.rotary, self.state.seen.device, shared.positions)
            self.state.recovery = Recovery(self.rule.weight, *table)
        self.rooms: dict[int, Room] = {}
        self.read_by: dict[int, int] = {}
        self.reached: dict[int, Room] = {}

    def clear(self, rows: Sequence[int], index: Tensor) -> None:
        """New sequences begin in these rows; index [R] int64: the same numbers on the device."""
        self.pages.index_fill_(0, index, 0)
        for tier, starts in self.starts.items():
            self.state.tiers[tier].starts.index_copy_(0, index, starts.expand(len(rows), -1))  # type: ignore[union-attr]
        for row in rows:
            self._left(row, self.empty, 0)

    def resume(self, row: int, seen: int) -> None:
        """A sequence goes on in this row, whose page holds what the first `seen` tokens of a prompt left: a copy of
        another's, which were read in whole blocks. The host waits for the device where heads trade slots.
        """
        room, layout = self.reached[seen], self.rule.layout
        if layout.adaptive and not layout.approx:
            starts = self.state.stretch(row, row + 1).exact.starts
            assert starts is not None
            ((filled, limit),), most = room, int(starts.diff(dim=-1).max())
            room = [(most - layout.spare if filled == limit - layout.spare else filled, most)]
        self.rooms[row], self.read_by[row] = room, seen

    def read(self, blocks: PagedBlocks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output for the next blocks of prompts, [R, Hq, T, Dv]; the state then includes them.

        The number of launches does not depend on how many there are. Several are read in a copy of their pages.

        Args: q [R, Hq, T, D]; k, v [R, Hkv, T, D].
        """
        valid, rows = blocks.valid, blocks.rows
        if blocks.padded:
            q, k, v = (without_padding(part, valid) for part in (q, k, v))
        chosen = self.state.at(blocks.index)
        own = chosen.taken() if len(rows) > 1 else self.state.stretch(rows[0], rows[0] + 1)
        rooms = [self.rooms[row] for row in rows]
        for slots, known in zip(own.tiers.values(), zip(*rooms)):
            slots.filled, slots.limit = (max(numbers) for numbers in zip(*known))
        out, mass = attend_block(own, q, k, v, valid, self.rule)
        absorb_block(own, q, k, v, valid, self.rule, mass=mass)
        if len(rows) > 1:
            chosen.put(own)
        for row, room, length in zip(rows, rooms, blocks.lengths):
            left = zip(room, own.tiers.values())
            now = [(min(filled + length, slots.filled), slots.limit) for (filled, _), slots in left]
            self._left(row, now, self.read_by[row] + length)
        return out

    def step(self, rows: Tensor, q: Tensor, k: Tensor, v: Tensor, due: Tensor) -> Tensor:
        """Attention output for the next token of each of these sequences, [B, Hq, Dv]; those that are due then evict.

        Args: rows [B] int64; q [B, Hq, D]; k, v [B, Hkv, 1, D]; due [E] int64: those of the rows that evict, as
            `PagedClock` says. Nothing but their pages is touched by evictions.
        """
        rule = self.rule
        out, _, _ = ops.decode_step(q, k, v, self._at(rows), rule.spec)
        if due.device.type == "cpu" and resolve(rule.spec.backend, due.device) != "triton":
            for own in self.state.at(due).each():  # the host may ask; mostly few are due, and nothing is copied
                own.fill()
                evict(own, rule)
        else:
            for some in due.split(AT_ONCE) if len(due) else ():
                evict(self._at(some), rule)
        return out

    def _at(self, rows: Tensor) -> LayerState:
        """The state for a batch in these rows, with scratch; the host counts on no slot being free."""
        state = self.state.at(rows)
        state.fill()
        state.scratch = self.shared.scratch_of(self.num_heads, state, self.rule.spec)
        return state

    def _left(self, row: int, room: Room, seen: int) -> None:
        self.rooms[row], self.read_by[row] = room, seen
        block = self.rule.config.prefill_block
        if block is not None and seen % block == 0:
            self.reached[seen] = room
