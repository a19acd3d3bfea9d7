"""What the layers are told of a step, made of vLLM's description of it. vLLM itself is not needed here.

The host never waits for the device in a step that only decodes. It sends numbers from pinned memory, and asks for the
page of a request once, when its prompt begins; or in every step that reads prompts, where these may go on from a copy
of another's page. vLLM's older model runner does not say which request is which: on a GPU the host then asks for the
pages of every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...cache.pages import PagedBlocks, PagedClock, PagedLayer
from ...config import Config
from ...errors import FastKVError
from .settings import Kind

PADDING = 4096  # tokens that are computed for nothing: by estimate as long as further launches take


@dataclass
class Part:
    """What the layers are told of the sequences of a step that have the same settings.

    Attributes: rows: [B] int64, of those that decode.  places: [B] int64, of their tokens in the batch; None where they
        are its first.  due: [E] int64, those of the rows that evict before.  fresh: [F] int64, rows in which sequences
        begin.  prompts: blocks that are read, and which share no sequence.
    """

    rows: Tensor
    places: Tensor | None
    due: Tensor
    fresh: Tensor
    prompts: list[PagedBlocks] = field(default_factory=list)

    def prepare(self, layer: PagedLayer) -> None:
        """What does not happen in every step, and so before it: a step that is captured contains none of it."""
        if len(self.due):
            layer.evict(self.due)
        if len(self.fresh):
            layer.clear(self.fresh)

    def attend(self, layer: PagedLayer, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the attention of these sequences' tokens into `out`; their pages then include them.

        Args: all tokens of the batch: q [N, Hq, D]; k, v [N, Hkv, D]; out [N, Hq, Dv].
        """
        number, at = len(self.rows), self.places
        if number and at is None:
            layer.step(self.rows, q[:number], k[:number], v[:number], out[:number])
        elif number and at is not None:
            out.index_copy_(0, at, layer.step(self.rows, *(part.index_select(0, at) for part in (q, k, v))))
        for blocks in self.prompts:
            layer.read(blocks, q, k, v, out)


Batch = dict[Kind, Part]


def to_device(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Each list as int64 on the device, in one copy. The host goes on: its memory is pinned, and torch keeps it until
    then.
    """
    if not any(lists):
        return tuple(torch.empty(0, dtype=torch.int64, device=device) for _ in lists)
    even = [len(numbers) + len(numbers) % 2 for numbers in lists]  # each at 16 bytes, for which kernels are compiled
    flat = [number for numbers in lists for number in (*numbers, *[0] * (len(numbers) % 2))]
    made = torch.tensor(flat, dtype=torch.int64, device="cpu")
    sent = made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
    return tuple(part[: len(numbers)] for part, numbers in zip(sent.split(even), lists))


def to_host(tensor: Tensor) -> list[int]:
    """Numbers [N] of the device. The host waits for what the device was told to do before."""
    if tensor.device.type == "cpu":
        return tensor.tolist()  # type: ignore[no-any-return]
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
        tensor, non_blocking=True
    )
    event = torch.Event(tensor.device)
    event.record()
    event.synchronize()
    return copied.tolist()  # type: ignore[no-any-return]


def alike(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last + 1 of blocks that are read together, of those of so many tokens, the longest first: what is
    padded to the longest of all costs more than further launches.
    """
    first = 0
    for place, length in enumerate(lengths):
        if (lengths[first] - length) * (len(lengths) - place) >= PADDING:
            yield first, place
            first = place
    if lengths:
        yield first, len(lengths)


class Batcher:
    """Tells steps of decoding from prompts, and knows which sequences evict.

    Attributes: clock: tells which evict.  pages: of the sequences whose prompts began. Both know a sequence by its
        place in the table of vLLM's model runner; the older runner does not say that, and then by its page.
        kinds: what chooses the settings of a sequence, by that place, or by its place in the batch; None for most.
        staged: [B] int64, where steps find the rows that decode: a captured step reads them there.
    """

    def __init__(
        self, config: Config, sequences: int, copies: bool = False, kinds: Mapping[int, Kind] | None = None
    ) -> None:
        """Args: sequences: in a batch, at most; copies: whether one may begin with a copy of another's page."""
        self.size, self.sequences = config.prefill_block, sequences
        self.copies, self.kinds = copies, {} if kinds is None else kinds
        self.clock, self.pages = PagedClock(config.evict_every), dict[int, int]()
        self.staged: Tensor | None = None
        self.asked: Any = None
        self.made: Batch = {}

    def nobody(self, number: int, device: torch.device) -> Batch:
        """A step in which that many sequences decode, which are nobody's; its rows are staged where others' will be."""
        nothing = torch.zeros(number, dtype=torch.int64, device=device)
        return {None: Part(self._stage(nothing), None, nothing[:0], nothing[:0])}

    def _stage(self, rows: Tensor) -> Tensor:
        """These rows, [B] of any integers, at an address that is always the same. A captured step may be for more."""
        if self.staged is None:
            self.staged = torch.zeros(self.sequences, dtype=torch.int64, device=rows.device)
        self.staged[len(rows) :].zero_()  # nobody's
        return self.staged[: len(rows)].copy_(rows)

    def batch(self, m: Any) -> Batch:
        """For a step as vLLM's `CommonAttentionMetadata` describes it, the same for every size of pages."""
        if m is not self.asked:
            self.asked, self.made = m, self._made(m)
        return self.made

    def _made(self, m: Any) -> Batch:
        """`batch`, once for a step."""
        pages, starts = m.block_table_tensor[:, 0], m.query_start_loc_cpu.tolist()
        counts = [stop - start for start, stop in zip(starts, starts[1:])]
        seen = to_host(m.seq_lens) if m.seq_lens_cpu_upper_bound is None else m.seq_lens_cpu_upper_bound.tolist()
        prefilling = m.is_prefilling.tolist()
        # A single token is decoded, whatever it is: a captured step does nothing else, and the newer runner calls an
        # answer that is computed again a prompt.
        reading = dict.fromkeys(i for i, count in enumerate(counts) if count > 1 and prefilling[i])  # in order
        steps = [i for i, count in enumerate(counts) if count and i not in reading]
        begins = [i for i, count in enumerate(counts) if 0 < count == seen[i]]
        if m.req_idx is None:
            names, known = to_host(pages[: len(counts)]), range(len(counts))
            self.pages.update((names[i], names[i]) for i in (*reading, *begins))
        else:
            names = known = m.req_idx.tolist()
            new = list(dict.fromkeys((*begins, *reading))) if self.copies and reading else begins
            if new:  # of those that go on the pages are known
                asked = to_host(pages.index_select(0, *to_device([new], pages.device)))
                self.pages.update((names[i], page) for i, page in zip(new, asked))
        self.clock.prompted.update((names[i], seen[i]) for i in (*reading, *begins))
        due = {steps[j] for j in self.clock.due([names[i] for i in steps], [seen[i] for i in steps])}
        self._check(reading, counts, seen)
        found: Batch = {}
        for kind in dict.fromkeys(self.kinds.get(known[i]) for i in (*steps, *reading)):
            mine = [self.kinds.get(i) == kind for i in known]
            own, new, read = ([i for i in some if mine[i]] for some in (steps, begins, reading))
            read.sort(key=lambda i: -counts[i])
            first = own == list(range(len(own)))
            sent = [
                [] if first else own,
                [i for i in own if i in due],
                [self.pages[names[i]] for i in new],
                [self.pages[names[i]] for i in read],
                [starts[i] for i in read],
                [counts[i] for i in read],
            ]
            places, leaving, fresh, *prompts = to_device(sent, pages.device)
            staged = first and own  # which is so for one kind at most
            decoding = self._stage(pages[: len(own)]) if staged else pages.index_select(0, places).long()
            at = None if first else m.query_start_loc.index_select(0, places).long()
            part = found[kind] = Part(decoding, at, pages.index_select(0, leaving).long(), fresh)
            for start, stop in alike([counts[i] for i in read]):
                lengths, before = zip(*((counts[i], seen[i] - counts[i]) for i in read[start:stop]))
                chosen = [one[start:stop].clone() if start else one[:stop] for one in prompts]  # begins at 16 bytes
                part.prompts.append(PagedBlocks.of(lengths, before, chosen))
        return found

    def _check(self, reading: Collection[int], counts: Sequence[int], seen: Sequence[int]) -> None:
        """Raise FastKVError unless what is read of prompts are blocks, one of each."""
        for i in reading:
            length, done = counts[i], seen[i] - counts[i]
            if (done % self.size or length > self.size) if self.size else done:
                raise FastKVError(
                    f"vLLM's scheduler cut a prompt after {done} tokens and read {length} more, expected one block, "
                    f"prefill_block={self.size}; leave scheduler_cls out"
                )
