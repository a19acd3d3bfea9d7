"""Sequences that come and go, for serving engines: each has a page of its own, a stretch of memory of fixed size, with
all that a layer remembers of it.

The pages of a layer are one buffer, and every tensor of its state is a view of all of them, [P, ...] with a page's
stride. Page 0 belongs to no sequence (`LayerState.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from .. import ops
from ..backend import resolve
from ..errors import FastKVError
from ..reference import LayerState, Recovery, Slots
from . import CacheWorkspace
from .layer import evict
from .layout import Attends, LayerConfig, LayerPlan, Layout
from .prefill import absorb_block, attend_block

ALIGNMENT = 128  # bytes, of every tensor and page: a line of a GPU's cache
SLOTS = 16  # kernels are compiled apart for numbers that are no multiples of so many
# Copies of pages, of sequences that evict or are read together, do not grow with the batch.
AT_ONCE, ROOM = 64, 1 << 30  # sequences at most, and bytes, unless one takes more
COPIES = 3  # of keys and values: as they are stored and in the model's dtype, and those that policies choose from


def aligned(number: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-number // unit) * unit


@dataclass(frozen=True)
class PageFormat:
    """Where the tensors of a layer's state lie in a page.

    Attributes: template: a state of the layer, of which only names, shapes and dtypes matter; it may be on "meta".
        places: first byte of each tensor, by name.  nbytes: of a page.
    """

    template: LayerState
    places: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, template: LayerState) -> PageFormat:
        """Tensors one after another, in the order of their names in the state."""
        places, end = {}, 0
        for name, tensor in template.named_tensors():
            places[name] = aligned(end, ALIGNMENT)
            end = places[name] + prod(tensor.shape[1:]) * tensor.itemsize
        return cls(template, places, aligned(end, ALIGNMENT))

    def view(self, pages: Tensor) -> LayerState:
        """The state in these pages, [P, nbytes] uint8: nothing is copied, and nothing is done to what lies there."""
        state = self.template.shell()
        for name, like in self.template.named_tensors():
            first, shape = self.places[name], like.shape[1:]
            stretch = pages[:, first : first + prod(shape) * like.itemsize].view(like.dtype)
            state.replace(name, stretch.unflatten(1, shape) if shape else stretch[:, 0])
        state.pages = pages
        return state

    def allocate(self, number: int, device: torch.device | str) -> LayerState:
        """So many empty pages."""
        return self.view(torch.zeros(number, self.nbytes, dtype=torch.uint8, device=device))


@dataclass(frozen=True)
class PagedRule:
    """What a layer needs of a config where its sequences live in pages.

    Attributes: layer: how it attends and evicts.  form: of its pages.
    """

    layer: LayerConfig
    form: PageFormat

    @classmethod
    def of(cls, plan: LayerPlan, keys: Tensor, values: Tensor) -> PagedRule:
        """For keys and values [1, Hkv, 0, D] of the dtype and device that pages will have.

        Where processes share the heads, each lays out its own in a page as large as the largest of theirs.

        Raises: FastKVError if the budget is too small, or follows the prompt: pages are of one size.
        """
        budget, parallel = plan.config.budget, plan.parallel
        if budget.needs_prompt is not None:
            raise FastKVError(f"a page holds the same number of tokens whatever the prompt, got {budget.needs_prompt}")
        ranks = (replace(parallel, rank=rank) for rank in range(parallel.size))
        layouts = [replace(plan, parallel=rank).of(keys, values)[0] for rank in ranks]
        forms = [_form(made, keys, values) for made in layouts]
        form = replace(forms[parallel.rank], nbytes=max(one.nbytes for one in forms))
        return cls(LayerConfig.of(plan, layouts[parallel.rank], keys.device), form)

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

    What is due after a step happens before the next one, so that a captured step need not contain it; of a sequence
    that ends first, nobody asks.

    Attributes: prompted: tokens that blocks of its prompt have made so far of each sequence, by what the engine calls
        it: perhaps as it called another one before.
    """

    def __init__(self, period: int) -> None:
        self.period, self.prompted = period, dict[int, int]()

    def due(self, names: Sequence[int], seen: Sequence[int]) -> list[int]:
        """Which of the sequences in a batch evict before a step that makes so many tokens of each.

        None of those whose prompts were never read: an engine warms up with such.
        """
        steps = [now - 1 - self.prompted.get(name, now - 1) for name, now in zip(names, seen)]
        return [i for i, done in enumerate(steps) if done > 0 and done % self.period == 0]


@dataclass(frozen=True)
class PagedBlocks:
    """The next blocks of some prompts, one of each, as a padded batch of R sequences and T tokens.

    Attributes: lengths, before: how many tokens of each, and how many it had read; what the host knows.
        index: [R] int64, the rows.  valid: [R, T] bool, false for padding, which comes last.
        tokens: [R, T] int64, which token of the engine's batch is where; the sequence's first where there is padding.
        own: [N] int64, the tokens of the batch that are read; of each, which of the R sequences it belongs to, and
        which of its T tokens it is, sequence and within: [N] int64.
        parts: see `split`.
    """

    lengths: Sequence[int]
    before: Sequence[int]
    index: Tensor
    valid: Tensor
    tokens: Tensor
    own: Tensor
    sequence: Tensor
    within: Tensor
    parts: dict[int, list[PagedBlocks]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], before: Sequence[int], numbers: Sequence[Tensor] | Tensor) -> PagedBlocks:
        """Nothing waits for the device.

        Args: numbers: [3, R] int64 on the device: rows, which token of the batch is the first of each, lengths.
        """
        (index, starts, counts), longest, total = numbers, max(lengths), sum(lengths)
        places = torch.arange(longest, device=index.device)
        valid = places < counts[:, None]
        tokens = starts[:, None] + torch.where(valid, places, 0)
        sequence = torch.arange(len(lengths), device=index.device).repeat_interleave(counts, output_size=total)
        within = torch.arange(total, device=index.device) - (counts.cumsum(0) - counts)[sequence]
        return cls(lengths, before, index, valid, tokens, starts[sequence] + within, sequence, within)

    def split(self, most: int) -> list[PagedBlocks]:
        """At most so many sequences each; the same for all layers that ask."""
        if len(self.lengths) <= most:
            return [self]
        if most not in self.parts:
            firsts = range(0, len(self.lengths), most)
            self.parts[most] = [self._of(slice(first, first + most)) for first in firsts]
        return self.parts[most]

    def _of(self, some: slice) -> PagedBlocks:
        lengths, first = self.lengths[some], sum(self.lengths[: some.start])
        inside, longest = slice(first, first + sum(lengths)), max(lengths)
        # Copies, because kernels are compiled for tensors that begin at 16 bytes.
        valid, tokens = (part[some, :longest].clone() for part in (self.valid, self.tokens))
        own, within, index = self.own[inside].clone(), self.within[inside].clone(), self.index[some].clone()
        sequence = self.sequence[inside] - some.start
        return PagedBlocks(lengths, self.before[some], index, valid, tokens, own, sequence, within)


class PagedLayer:
    """What `LayerCache` is for a batch in lock-step: every sequence has a clock of its own, which starts at the end of
    its prompt, and what becomes of it does not depend on the others. A row is the number of a sequence's page.

    Attributes: state: views of all pages; chosen: of the rows of a batch.  rule: how the layer attends and evicts.
        num_heads: of queries.  at_once: sequences that evict, or are read, together.  starts: [1, Hkv + 1] of a page
        without tokens, by tier.  scratch: by the size of a batch and of its longest head.
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
        exact = self.state.exact
        numbers = self.state.heads * exact.limit * (exact.format.keys.dim(exact.keys.shape[-1]) + exact.value_dim)
        most = min(AT_ONCE, ROOM // (COPIES * numbers * exact.dtype.itemsize))
        self.at_once = max(1, most - most % 2)  # so that each part of a list of rows begins at 16 bytes
        empty = paged.form.allocate(1, pages.device)
        self.rule.layout.clear(empty)
        self.starts = {tier: slots.starts.clone() for tier, slots in empty.tiers.items() if slots.starts is not None}
        self.chosen, self.scratch = self.state.at(self.state.seen[:0]), dict[tuple[int, int], list[Tensor]]()
        if self.rule.weight is not None:
            rotary = self.rule.config.rotations[self.rule.plan.layer]  # which layers that turn alike share
            table = shared.table(rotary, self.state.seen.device, shared.positions)
            self.state.recovery = self.chosen.recovery = Recovery(self.rule.weight, *table)
        # Whether sequences are read, and evict, one after another where they are: on a CPU, which copies nothing.
        self._in_pages = pages.device.type == "cpu" and resolve(self.rule.spec.backend, pages.device) != "triton"

    def clear(self, rows: Tensor) -> None:
        """New sequences are going to begin in these rows, [F] int64."""
        self.pages.index_fill_(0, rows, 0)
        for tier, starts in self.starts.items():
            self.state.tiers[tier].starts.index_copy_(0, rows, starts.expand(len(rows), -1))  # type: ignore[union-attr]

    def read(self, blocks: PagedBlocks, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the attention output of the next blocks of prompts into `out`; the state then includes them.

        On a GPU they are read in a copy of their pages, in as many launches whatever their number up to `at_once`; on a
        CPU one after another, in place.

        Args: all tokens of the batch: q [N, Hq, D], k, v [N, Hkv, D], out [N, Hq, Dv].
        """
        for some in blocks.split(self.at_once):
            self._read(some, q, k, v, out)

    def _read(self, blocks: PagedBlocks, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if self._in_pages:
            for i, (number, before) in enumerate(zip(blocks.lengths, blocks.before)):
                row, first = int(blocks.index[i]), int(blocks.tokens[i, 0])
                if row == 0:  # nobody's
                    continue
                own, some = self.state.stretch(row, row + 1), slice(first, first + number)
                new_q, new_k, new_v = (part[some].transpose(0, 1)[None] for part in (q, k, v))
                result = self._absorbed(own, new_q, new_k, new_v, blocks.valid[i : i + 1, :number], before, own)
                out[some] = result[0].transpose(0, 1)
            return
        chosen = self.state.at(blocks.index)
        own, q, k, v = ops.read(chosen, self.rule.spec, q, k, v, blocks.tokens, self.rule.layout.fixed)
        result = self._absorbed(own, q, k, v, blocks.valid, max(blocks.before), chosen)
        ops.write(chosen, own, result, blocks.own, blocks.sequence, blocks.within, out)

    def _absorbed(
        self, own: LayerState, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, before: int, chosen: LayerState
    ) -> Tensor:
        """Attention of the next blocks of sequences, [B, Hq, T, Dv]; their state then includes them.

        Args: own: their state, or a copy of what is `chosen`.  before: tokens that the longest of them had read.
        """
        for tier, slots in own.tiers.items():
            slots.limit = self._limit(slots, chosen.tiers[tier].starts, chosen.rows, before)
            slots.filled = min(before, slots.limit - self.rule.layout.spare * (slots is own.exact))
        result, mass = attend_block(own, q, k, v, valid, self.rule)
        absorb_block(own, q, k, v, valid, self.rule, mass=mass)
        return result

    def _limit(self, slots: Slots, starts: Tensor | None, rows: Tensor | None, before: int) -> int:
        """Slots of the head that has most. The host waits for the device where heads have traded slots: it counts them
        in so many at a time that few kernels serve whatever they trade.
        """
        layout = self.rule.layout
        if not layout.adaptive or starts is None:
            return slots.limit
        if not before:
            return max(layout.capacities("exact"))
        starts = starts if rows is None else starts.index_select(0, rows)
        return aligned(int(starts.diff(dim=-1).max()), SLOTS)

    def evict(self, due: Tensor) -> None:
        """Let these sequences shrink to their budget; nothing but their pages is touched.

        Args: due [E] int64: rows, as `PagedClock` says before each step.
        """
        rule = self.rule
        if self._in_pages:
            for own in self.state.at(due).each():  # the host may ask; mostly few are due, and nothing is copied
                own.fill()
                evict(own, rule)
        else:
            for some in due.split(self.at_once) if len(due) else ():
                evict(self._at(some), rule)

    def step(self, rows: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """Attention output for the next token of each of these sequences, [B, Hq, Dv].

        Args: rows [B] int64; q [B, Hq, D]; k, v [B, Hkv, D]; out: where it is written, None for new memory.
        """
        out = q.new_empty(*q.shape[:2], self.state.exact.value_dim) if out is None else out
        ops.decode_into(q, k[:, :, None], v[:, :, None], out, self._at(rows), self.rule.spec)
        return out

    def _at(self, rows: Tensor) -> LayerState:
        """The state for a batch in these rows, until the next; the host counts on no slot being free."""
        state = self.chosen
        state.rows = rows
        state.fill()
        sized = rows.shape[0], state.exact.limit  # which heads that trade slots change
        if sized not in self.scratch:
            self.scratch[sized] = self.shared.scratch_of(self.num_heads, state, self.rule.spec)
        state.scratch = self.scratch[sized]
        return state


# A layer's sequences before there are any: all kernels that traffic will need are compiled.
#
# How a kernel is compiled depends on the shapes that it meets: on the length of a prompt's last block, on how full the
# slots are, on how many of them one head got from the others, and on the number of sequences that decode together. So
# one of each kind is read and decoded, in two pages that are thrown away. What that takes of memory, traffic will take
# again; the scratch that it makes stays.

FEW = 33  # blocks of up to so many tokens are all read: kernels take a window's queries in powers of two


@dataclass(frozen=True)
class Traffic:
    """What is going to come.

    Attributes: longest: tokens of the longest prompt.  block: of a prompt that are read at once, None for all of it.
        sequences: that decode together at most.
    """

    longest: int
    block: int | None
    sequences: int


def warm_up(opened: Callable[[Tensor], PagedLayer], paged: PagedRule, traffic: Traffic, device: torch.device) -> None:
    """Launch what a layer of that rule will.

    Args: opened: makes the layer of its pages, [P, bytes] uint8.  device: of the pages.
    """
    layer = opened(torch.zeros(3, paged.form.nbytes, dtype=torch.uint8, device=device))
    exact, heads, layout = layer.state.exact, layer.state.heads, paged.layer.layout
    dim = exact.format.keys.dim(exact.keys.shape[-1])

    def tokens(number: int) -> list[Tensor]:
        """As an engine has them: q, k and v of each token beside each other."""
        sizes = (layer.num_heads, dim), (heads, dim), (heads, exact.value_dim)
        return [torch.zeros(number, *size, dtype=exact.dtype, device=device) for size in sizes]

    def read(before: int, *lengths: int) -> None:
        own = rows[: len(lengths)] + [0] * (len(lengths) - len(rows))  # others are nobody's
        starts = [0, *accumulate(lengths)][:-1]
        numbers = torch.tensor([own, starts, lengths], device=device)
        q, k, v = tokens(sum(lengths))
        out = torch.empty(sum(lengths), layer.num_heads, exact.value_dim, dtype=exact.dtype, device=device)
        layer.read(PagedBlocks.of(lengths, [before] * len(lengths), numbers), q, k, v, out)

    # Tokens of blocks of each kind.
    largest = min(traffic.block or traffic.longest, traffic.longest)
    powers = [1 << i for i in range(FEW.bit_length() - 1, largest.bit_length())]
    few = [layout.least + number for number in (1, 16, 17, 32, 33, 64)]  # of a prompt hardly longer than its budget
    every = {*range(1, FEW + 1), largest, *powers, *few}
    lengths = sorted(length for length in every if length <= largest)
    # How many full blocks come before the last one of a prompt: none, one, and where slots are nearly full or full.
    before, filling = (traffic.longest - 1) // largest, layout.least // largest
    full = sorted({min(blocks, before) for blocks in (0, 1, filling, filling + 1)})
    # Slots of the head that has most, of each kind, where heads trade them.
    widest: list[int] = []
    if layout.adaptive and traffic.longest > largest:
        widest = [size for i in range(exact.limit.bit_length()) if (size := 1 << i) > max(layout.capacities("exact"))]
        widest.append(exact.limit)
    rows, slots = [1, 2], exact.keys.shape[1]
    for others in (0, 1):  # prompts that are read with it
        for blocks in full:
            for length in lengths:
                layer.clear(torch.tensor(rows, device=device))
                for number in range(blocks):
                    read(number * largest, *(largest,) * (1 + others))
                read(blocks * largest, length, *(max(length - 1, 1),) * others)
        for most in widest:  # of the first head; the others share the rest of a page
            rest = [most + (slots - most) * head // max(heads - 1, 1) for head in range(heads)]
            for length in lengths:
                layer.clear(torch.tensor(rows, device=device))
                exact.starts[rows] = torch.tensor([0, *rest], dtype=torch.int32, device=device)  # type: ignore[index]
                read(min(most, traffic.longest), length, *(max(length - 1, 1),) * others)
    read(traffic.longest, *(min(FEW, largest),) * min(layer.at_once, traffic.sequences))  # most memory
    nobody = torch.zeros(traffic.sequences, dtype=torch.int64, device=device)
    for batch in range(1, traffic.sequences + 1):
        layer.evict(nobody[: batch if batch <= layer.at_once else 0])
        layer.step(nobody[:batch], *tokens(batch))
