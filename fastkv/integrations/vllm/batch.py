"""What the layers are told of a step, made of vLLM's description of it. vLLM itself is not needed here.

The host never waits for the device in a step that only decodes. It sends numbers from pinned memory, and asks for the
page of a request once, when its prompt begins; or in every step that reads prompts, where these may go on from a copy
of another's page. vLLM's older model runner does not say which request is which: on a GPU the host then asks for the
pages of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...cache.paged import AT_ONCE, PagedBlocks, PagedClock
from ...config import Config
from ...errors import FastKVError


@dataclass
class Block:
    """Tokens of a prompt: tokens [start, end) of the batch go to that row.

    Attributes: begins: whether they are the first of their sequence.  resumes: how many tokens the row holds, perhaps
        copied from another's page; 0 where the layers know.
    """

    row: int
    start: int
    end: int
    begins: bool
    resumes: int = 0


@dataclass
class Round:
    """Blocks of several prompts that are read together, one of each.

    Attributes:
        blocks: a padded batch of R sequences and T tokens.
        begins: rows whose sequences begin, and fresh: [F] int64, the same on the device.
        resumes: (row, tokens) of those that may go on from a copy of another's page.
        tokens: [R * T] int64, which token of the batch is where; any where there is padding.
        own: [N] int64, the tokens of the batch that are read, and places: [N] int64, where.
    """

    blocks: PagedBlocks
    begins: list[int]
    fresh: Tensor
    resumes: list[tuple[int, int]]
    tokens: Tensor
    own: Tensor
    places: Tensor


@dataclass
class Batch:
    """What the layers are told of a step.

    Attributes: rows: [B] int64, of the sequences that decode.  places: [B] int64, of their tokens in the batch.
        due: [E] int64, those of the rows that evict now.  rounds: of prompts, one after another.
    """

    rows: Tensor
    places: Tensor
    due: Tensor
    rounds: list[Round] = field(default_factory=list)


def rounds_of(prompts: Sequence[Sequence[Block]], size: int | None, device: torch.device) -> list[Round]:
    """The blocks of each prompt, in order, as few rounds: blocks of one sequence follow each other, and those of others
    that are about as long are read with them. How many rounds there are does not depend on how many prompts there are,
    up to `AT_ONCE`.

    Args: size: tokens of a whole block, None for prompts of any length.
    """
    made = []
    for turn in range(max(map(len, prompts), default=0)):
        groups: dict[int, list[Block]] = {}
        for blocks in prompts:
            if turn < len(blocks):
                number = blocks[turn].end - blocks[turn].start
                groups.setdefault(number if number == size else (number - 1).bit_length(), []).append(blocks[turn])
        for group in groups.values():
            some = range(0, len(group), AT_ONCE)
            made += [_round(group[first : first + AT_ONCE], device) for first in some]
    return made


def _round(blocks: Sequence[Block], device: torch.device) -> Round:
    rows, lengths = [block.row for block in blocks], [block.end - block.start for block in blocks]
    begins, longest = [block.row for block in blocks if block.begins], max(lengths)
    tokens: list[int] = []
    places: list[int] = []
    for place, (block, length) in enumerate(zip(blocks, lengths)):
        tokens += [*range(block.start, block.end), *[block.start] * (longest - length)]
        places += range(place * longest, place * longest + length)
    own = [token for block in blocks for token in range(block.start, block.end)]
    parts = (rows, lengths, begins, tokens, own, places)
    sent = to_device([number for part in parts for number in part], device).split([len(part) for part in parts])
    index, counts, fresh, tokens_there, own_there, places_there = sent
    resumes = [(block.row, block.resumes) for block in blocks if block.resumes and not block.begins]
    batch = PagedBlocks.of(rows, lengths, index, counts)
    return Round(batch, begins, fresh, resumes, tokens_there, own_there, places_there)


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[N] int64 on the device. The host goes on: the memory is pinned, and torch keeps it until it is copied."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> list[int]:
    """Numbers [N] of the device. The host waits for what the device was told to do before."""
    if tensor.device.type == "cpu":
        return tensor.tolist()  # type: ignore[no-any-return]
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    event.synchronize()
    return copied.tolist()  # type: ignore[no-any-return]


class Batcher:
    """Tells steps of decoding from prompts, cuts these into blocks, and knows which sequences evict.

    Attributes: clock: tells which evict.  pages: of the sequences whose prompts began. Both know a sequence by its
        place in the table of vLLM's model runner; the older runner does not say that, and then by its page.
    """

    def __init__(self, config: Config, repeats: bool, copies: bool = False) -> None:
        """Args: repeats: whether the engine calls an answer that is computed again a prompt.
        copies: whether a sequence may begin with a copy of another's page.
        """
        self.size, self.repeats, self.copies = config.prefill_block, repeats, copies
        self.clock, self.pages = PagedClock(config.evict_every), dict[int, int]()

    def batch(self, m: Any) -> Batch:
        """For a step as vLLM's `CommonAttentionMetadata` describes it."""
        pages, starts = m.block_table_tensor[:, 0], m.query_start_loc_cpu.tolist()
        counts = [stop - start for start, stop in zip(starts, starts[1:])]
        seen = to_host(m.seq_lens) if m.seq_lens_cpu_upper_bound is None else m.seq_lens_cpu_upper_bound.tolist()
        reading = self._reading(m.is_prefilling.tolist(), counts, seen)
        steps = [i for i, count in enumerate(counts) if count and i not in reading]
        if m.req_idx is None:
            names = to_host(pages[: len(counts)])
            self.pages.update((names[i], names[i]) for i in reading)
        else:
            names = m.req_idx.tolist()
            self._meet(names, [i for i in reading if self.copies or seen[i] == counts[i]], pages)
        for i in reading:
            self.clock.read(names[i], seen[i])
        due = [steps[j] for j in self.clock.due([names[i] for i in steps], [seen[i] for i in steps])]
        batch = self._steps(steps, due, pages, m.query_start_loc)
        prompts = [self._blocks(self.pages[names[i]], seen[i] - counts[i], starts[i], starts[i + 1]) for i in reading]
        batch.rounds = rounds_of(prompts, self.size, pages.device)
        return batch

    def _reading(self, prefilling: Sequence[bool], counts: Sequence[int], seen: Sequence[int]) -> dict[int, None]:
        """Places of the sequences whose prompts are read, in order."""
        found = [i for i, count in enumerate(counts) if count and prefilling[i]]
        if self.repeats:  # a single token that comes later is a step, always
            found = [i for i in found if counts[i] > 1 or seen[i] == counts[i]]
        return dict.fromkeys(found)

    def _meet(self, names: Sequence[int], new: list[int], pages: Tensor) -> None:
        """Ask for the pages of the sequences at these places, which begin; of those that go on they are known."""
        if new:
            found = to_host(pages.index_select(0, to_device(new, pages.device)))
            self.pages.update((names[i], page) for i, page in zip(new, found))

    def _steps(self, steps: list[int], due: list[int], pages: Tensor, starts: Tensor) -> Batch:
        """Of the sequences that decode. Mostly they are the first of the batch, and all that is sent is which are due.

        Args: due: places of those that evict.  pages: [>= B], of all.  starts: [> B] int32, of their tokens.
        """
        number = len(steps)
        first = steps == list(range(number))
        sent = due if first else steps + due
        index = to_device(sent, pages.device) if sent else pages[:0].long()
        if first:
            rows, places = pages[:number], starts[:number]
        else:
            rows, places = (part.index_select(0, index[:number]) for part in (pages, starts))
            index = index[number:]
        return Batch(rows.long(), places.long(), pages.index_select(0, index).long())

    def _blocks(self, row: int, before: int, start: int, end: int) -> list[Block]:
        size = self.size or end - start
        if before and (self.size is None or before % size):
            raise FastKVError(
                f"vLLM's scheduler cut a prompt after {before} tokens, expected whole blocks, "
                f"prefill_block={self.size}; leave scheduler_cls out"
            )
        held = before if self.copies else 0
        blocks = [Block(row, at, min(at + size, end), False) for at in range(start, end, size)]
        blocks[0].begins, blocks[0].resumes = not before, held
        return blocks
