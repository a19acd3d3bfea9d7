"""What layers are told of a step of a serving engine, and that the host does not wait for the device to find it out.

The device is meta, which has shapes and no data: whatever would wait for a number has none to wait for and raises.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastkv.config import Config
from fastkv.integrations.vllm import batch as batches
from fastkv.integrations.vllm.batch import Batcher, Block

BLOCK, EVERY = 8, 3


def batcher(block=BLOCK, repeats=True, copies=False):
    return Batcher(Config.make("keydiff", 64, block, EVERY, "auto", "auto", None), repeats, copies)


def described(sequences, device="cpu", named=True, padded=0):
    """As vLLM describes a step. Sequences: (place in its table, page, prompt, tokens before, tokens now) of each."""
    counts = torch.tensor([now for *_, now in sequences] + [0] * padded)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    seen = torch.tensor([before + now for *_, before, now in sequences] + [0] * padded, dtype=torch.int32)
    pages = torch.tensor([page for _, page, *_ in sequences] + [0] * padded, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seen.to(device),
        seq_lens_cpu_upper_bound=seen,
        block_table_tensor=pages[:, None].to(device),
        is_prefilling=torch.tensor([before < whole for *_, whole, before, _ in sequences] + [False] * padded),
        req_idx=np.array([place for place, *_ in sequences] + [0] * padded) if named else None,
    )


def read_in(batch):
    """The blocks in the rounds of a batch, in order of their tokens; of a sequence no block comes before the last."""
    found, ends = [], {}
    for turn in batch.rounds:
        blocks, resumes = turn.blocks, dict(turn.resumes)
        assert len(set(blocks.rows)) == len(blocks.rows) and blocks.index.tolist() == list(blocks.rows)
        assert turn.fresh.tolist() == turn.begins and blocks.valid.sum(-1).tolist() == list(blocks.lengths)
        tokens, own = turn.tokens.view(blocks.valid.shape), turn.own.tolist()
        assert tokens[blocks.valid].tolist() == own == turn.tokens[turn.places].tolist()
        for row, length, places in zip(blocks.rows, blocks.lengths, tokens):
            start = int(places[0])
            assert places[:length].tolist() == list(range(start, start + length)) and ends.get(row, start) == start
            ends[row] = start + length
            found.append(Block(row, start, start + length, row in turn.begins, resumes.get(row, 0)))
    return sorted(found, key=lambda block: (block.start, block.row))


def test_rounds_do_not_grow_with_the_number_of_prompts():
    """Whole blocks together, ends of about one length together, up to a bound on the pages that are copied."""
    for number in (1, 3, batches.AT_ONCE):
        prompts = [(i, i + 1, 2 * BLOCK + 3, 0, 2 * BLOCK + 3) for i in range(number)]
        got = batcher(repeats=False).batch(described(prompts))
        assert [(len(turn.blocks.rows), max(turn.blocks.lengths)) for turn in got.rounds] == [
            (number, BLOCK),
            (number, BLOCK),
            (number, 3),
        ]
    got = batcher(repeats=False).batch(described([(i, i + 1, 9, 0, 9) for i in range(batches.AT_ONCE + 1)]))
    assert [len(turn.blocks.rows) for turn in got.rounds] == [batches.AT_ONCE, 1] * 2


@pytest.mark.parametrize("named", [True, False], ids=["named", "by page"])
def test_batches_of_traffic(named):
    """Sequences come, are read in blocks, decode, end and leave their places and pages to others; they change order."""
    draw, made = random.Random(0), batcher(repeats=False)
    running, free, pages, evicted = {}, set(range(6)), set(range(1, 9)), 0
    for _ in range(120):
        if free and draw.random() < 0.5:
            place, page = draw.choice(sorted(free)), draw.choice(sorted(pages))
            free.remove(place), pages.remove(page)
            running[place] = [page, draw.randint(1, 30), 0]
        step = []
        for place, (page, whole, before) in draw.sample(sorted(running.items()), len(running)):
            now = min(BLOCK * draw.randint(1, 2), whole - before) if before < whole else 1
            step.append((place, page, whole, before, now))
        got = made.batch(described(step, named=named, padded=draw.randint(0, 2)))
        starts = [sum(now for *_, now in step[:i]) for i in range(len(step))]
        decoding = [(page, start) for (_, page, whole, before, _), start in zip(step, starts) if before >= whole]
        assert list(zip(got.rows.tolist(), got.places.tolist())) == decoding
        due = [page for _, page, whole, before, _ in step if before >= whole and (before + 1 - whole) % EVERY == 0]
        assert got.due.tolist() == due
        blocks = [
            Block(page, start + at, start + min(at + BLOCK, now), before + at == 0)
            for (_, page, whole, before, now), start in zip(step, starts)
            if before < whole
            for at in range(0, now, BLOCK)
        ]
        assert read_in(got) == sorted(blocks, key=lambda block: (block.start, block.row))
        assert {part.dtype for part in (got.rows, got.places, got.due)} == {torch.int64}
        evicted += len(due)
        for place, page, _, _, now in step:
            running[place][2] += now
            if running[place][2] > running[place][1] and draw.random() < 0.1:
                del running[place]
                free.add(place), pages.add(page)
    assert evicted > 50


@pytest.mark.parametrize("named", [True, False], ids=["named", "by page"])
def test_a_sequence_may_go_on_from_a_copy(named):
    """In the place, and behind as many tokens, of one that ended; its evictions count from its own prompt's end."""
    made = batcher(repeats=False, copies=True)
    made.batch(described([(4, 1, 40, 0, 16)], named=named))
    got = made.batch(described([(4, 2, 19, 16, 3)], named=named))
    assert read_in(got) == [Block(2, 0, 3, False, resumes=16)]
    due = [made.batch(described([(4, 2, 19, before, 1)], named=named)).due.tolist() for before in range(19, 23)]
    assert due == [[], [], [2], []]
    got = made.batch(described([(4, 2, 40, 16, 16)], named=named))
    assert [(block.row, block.resumes) for block in read_in(got)] == [(2, 16), (2, 0)]


def test_a_single_token_that_is_computed_again_is_a_step():
    """The newer runner calls it a prompt, the older one does not."""
    again = [(0, 3, 10, 0, 8), (0, 3, 10, 8, 1)]
    for repeats in (True, False):
        made = batcher(repeats=repeats)
        assert len(made.batch(described(again[:1])).rounds) == 1
        assert len(made.batch(described(again[1:])).rounds) == (0 if repeats else 1)


class Crossings(TorchDispatchMode):
    """Notes what is copied between host and device: where to, and whether the host goes on meanwhile.

    Attributes: pinned: addresses of pinned memory.
    """

    def __init__(self):
        super().__init__()
        self.found, self.pinned = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "copy_" and args[0].device != args[1].device:
            goes_on = bool((*args[2:], kwargs.get("non_blocking", False))[0]) and args[0].data_ptr() in self.pinned
            self.found.append(("to host", goes_on))
            return args[0]
        out = func(*args, **kwargs)
        if name == "_to_copy" and out.device != args[0].device:
            goes_on = kwargs.get("non_blocking", False) and args[0].data_ptr() in self.pinned
            self.found.append(("to device", goes_on))
        return out


class Event:
    """Stands for a device's: what was waited for."""

    waits = 0

    def __init__(self, device):
        assert device.type == "meta"

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded
        Event.waits += 1


@pytest.fixture
def crossings(monkeypatch):
    """The mode, in which host memory can be pinned, and what the device's events say."""
    mode, empty = Crossings(), torch.empty

    def pinned(tensor, *args):
        mode.pinned.add(tensor.data_ptr())
        return tensor

    def allocate(*shape, pin_memory=False, **options):
        made = empty(*shape, **options).zero_()
        return pinned(made) if pin_memory else made

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch, "Event", Event)
    Event.waits = 0
    return mode


def on_device(mode, made, sequences, **options):
    """What was copied to make the batch, and how often the host waited."""
    mode.found.clear()
    before, m = Event.waits, described(sequences, "meta", **options)
    with mode:
        got = made.batch(m)
    assert got.rows.device.type == got.places.device.type == got.due.device.type == "meta"
    assert all(goes_on for _, goes_on in mode.found), "an ordinary copy waits for all that the device has to do"
    return [where for where, _ in mode.found], Event.waits - before, got


def test_the_host_waits_once_for_each_prompt_and_never_while_decoding(crossings):
    made = batcher()
    ends, goes_on = (4, 1, 8, 0, 8), [(7, 2, 20, 8 * i, 8 if i < 2 else 4) for i in range(3)]
    begins = ["to device", "to host", "to device"], 1  # whose page; then the tokens of each round
    assert on_device(crossings, made, [goes_on[0]])[:2] == begins
    assert on_device(crossings, made, [ends, goes_on[1]])[:2] == begins
    for after in (8, 9, 10):  # the others decode; a prompt that goes on lies before, between or behind them
        decoding = (4, 1, 8, after, 1)
        due = after - 8 == EVERY - 1
        copies, waits, got = on_device(crossings, made, [decoding, goes_on[2]])
        assert waits == 0 and copies == ["to device"] * (due + 1) and len(got.due) == due
        copies, waits, got = on_device(crossings, made, [goes_on[2], decoding])
        assert waits == 0 and copies == ["to device"] * 2 and len(got.rows) == 1
    copies, waits, got = on_device(crossings, made, [(4, 1, 8, 11, 1)], padded=3)
    assert (copies, waits, len(got.rows)) == ([], 0, 1)


def test_the_older_runner_makes_the_host_wait_once_a_step(crossings):
    """It tells sequences apart by nothing but their pages, which are on the device."""
    made = batcher(repeats=False)
    reading = on_device(crossings, made, [(0, 3, 8, 0, 8), (1, 5, 8, 0, 8)], named=False)
    assert reading[:2] == (["to host", "to device"], 1)
    assert on_device(crossings, made, [(0, 3, 8, 8, 1), (1, 5, 8, 8, 1)], named=False)[:2] == (["to host"], 1)


def test_numbers_on_a_cpu_are_not_copied():
    numbers = torch.tensor([3, 1])
    assert batches.to_host(numbers) == [3, 1]
    assert torch.equal(batches.to_device([3, 1], torch.device("cpu")), numbers)
