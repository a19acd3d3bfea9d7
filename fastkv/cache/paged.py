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
from ..reference import LayerState, Recovery, Slots
from .layer import evict
from .layout import Attends, LayerConfig, LayerPlan, Layout
from .pages import PageFormat
from .prefill import absorb_block, attend_block
from .workspace import CacheWorkspace

AT_ONCE = 64  # sequences: copies of their pages, where they evict or are read together, do not grow with the batch


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

    What is due after a step happens before the next one, so that a captured step need not contain it; of a sequence
    that ends first, nobody asks.

    Attributes: prompted: tokens of the prompts, by what the engine calls a sequence.
    """

    def __init__(self, period: int) -> None:
        self.period, self.prompted = period, dict[int, int]()

    def read(self, name: int, seen: int) -> None:
        """A block of its prompt has made so many tokens of this sequence, which may have a former one's name."""
        self.prompted[name] = seen

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
    """

    lengths: Sequence[int]
    before: Sequence[int]
    index: Tensor
    valid: Tensor
    tokens: Tensor
    own: Tensor
    sequence: Tensor
    within: Tensor

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
        own = starts[sequence] + within
        return cls(lengths, before, index, valid, tokens, own, sequence, within)

    def gathered(self, part: Tensor, heads: Tensor) -> Tensor:
        """Of all tokens of the batch, [..., H, D], these: [R, H, T, D], contiguous as kernels want them.

        Args: heads: [H, 1] int64, their numbers.
        """
        return part[self.tokens[:, None], heads]


class PagedLayer:
    """What `LayerCache` is for a batch in lock-step: every sequence has a clock of its own, which starts at the end of
    its prompt, and what becomes of it does not depend on the others. A row is the number of a sequence's page.

    Attributes: state: views of all pages.  rule: how the layer attends and evicts.  num_heads: of queries.
        heads: [H, 1] int64, the numbers of the heads of queries, keys and values.
        starts: [1, Hkv + 1] of a page without tokens, by tier.
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
        queries, keys = (torch.arange(n, device=pages.device)[:, None] for n in (num_heads, self.state.heads))
        self.heads = queries, keys, keys
        empty = paged.form.allocate(1, pages.device)
        self.rule.layout.clear(empty)
        self.starts = {tier: slots.starts.clone() for tier, slots in empty.tiers.items() if slots.starts is not None}
        if self.rule.weight is not None:
            assert self.rule.rotary is not None
            table = shared.table(self.rule.rotary, self.state.seen.device, shared.positions)
            self.state.recovery = Recovery(self.rule.weight, *table)

    def clear(self, rows: Tensor) -> None:
        """New sequences are going to begin in these rows, [F] int64."""
        self.pages.index_fill_(0, rows, 0)
        for tier, starts in self.starts.items():
            self.state.tiers[tier].starts.index_copy_(0, rows, starts.expand(len(rows), -1))  # type: ignore[union-attr]

    def read(self, blocks: PagedBlocks, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the attention output of the next blocks of prompts into `out`; the state then includes them.

        They are read in a copy of their pages, in as many launches whatever their number.

        Args: all tokens of the batch: q [N, Hq, D], k, v [N, Hkv, D], out [N, Hq, Dv].
        """
        chosen, valid = self.state.at(blocks.index), blocks.valid
        own = chosen.taken()
        for slots in own.tiers.values():
            slots.limit = self._limit(slots, blocks)
            slots.filled = min(max(blocks.before), slots.limit - self.rule.layout.spare * (slots is own.exact))
        q, k, v = (blocks.gathered(part, heads) for part, heads in zip((q, k, v), self.heads))
        result, mass = attend_block(own, q, k, v, valid, self.rule)
        absorb_block(own, q, k, v, valid, self.rule, mass=mass)
        chosen.put(own)
        out.index_copy_(0, blocks.own, result.transpose(1, 2)[blocks.sequence, blocks.within])

    def _limit(self, slots: Slots, blocks: PagedBlocks) -> int:
        """Slots of the head that has most. The host waits for the device where heads have traded slots."""
        layout = self.rule.layout
        if not layout.adaptive or slots.starts is None:
            return slots.limit
        if not any(blocks.before):
            return max(layout.capacities("exact"))
        return int(slots.starts.diff(dim=-1).max())

    def evict(self, due: Tensor) -> None:
        """Let these sequences shrink to their budget; nothing but their pages is touched.

        Args: due [E] int64: rows, as `PagedClock` says before each step.
        """
        rule = self.rule
        if due.device.type == "cpu" and resolve(rule.spec.backend, due.device) != "triton":
            for own in self.state.at(due).each():  # the host may ask; mostly few are due, and nothing is copied
                own.fill()
                evict(own, rule)
        else:
            for some in due.split(AT_ONCE) if len(due) else ():
                evict(self._at(some), rule)

    def step(self, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output for the next token of each of these sequences, [B, Hq, Dv].

        Args: rows [B] int64; q [B, Hq, D]; k, v [B, Hkv, D].
        """
        out, _, _ = ops.decode_step(q, k[:, :, None], v[:, :, None], self._at(rows), self.rule.spec)
        return out

    def _at(self, rows: Tensor) -> LayerState:
        """The state for a batch in these rows, with scratch; the host counts on no slot being free."""
        state = self.state.at(rows)
        state.fill()
        state.scratch = self.shared.scratch_of(self.num_heads, state, self.rule.spec)
        return state
