"""What layers are told of a step of a serving engine, and that the host does not wait for the device to find it out.

The device is meta, which has shapes and no data: whatever would wait for a number has none to wait for and raises."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastkv import FastKVError
from fastkv.config import Config
from fastkv.integrations.vllm import batch as batches
from fastkv.integrations.vllm.batch import Batcher

BLOCK, EVERY, SEQUENCES = 8, 3, 80


def batcher(block=BLOCK, **options):
    return Batcher(Config.make("keydiff", 64, block, EVERY, "auto", "auto", None), SEQUENCES, **options)


def only(batch):
    """What the layers are told where all sequences have the same settings."""
    ((kind, part),) = batch.items()
    assert kind is None
    return part


def placed(part):
    """Rows that decode, with the place of the token of each."""
    places = range(len(part.rows)) if part.places is None else part.places.tolist()
    return list(zip(part.rows.tolist(), places))


def described(sequences, device="cpu", named=True, padded=0):
    """As vLLM describes a step of (place in its table, page, prompt, tokens before, tokens now), padded with others."""
    counts = torch.tensor([now for *_, now in sequences] + [0] * padded)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    seen = torch.tensor([before + now for *_, before, now in sequences] + [0] * padded, dtype=torch.int32)
    pages = torch.tensor([page for _, page, *_ in sequences] + [0] * padded, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=seen.to(device),
        seq_lens_cpu_upper_bound=seen, block_table_tensor=pages[:, None].to(device),
        is_prefilling=torch.tensor([before < whole for *_, whole, before, _ in sequences] + [False] * padded),
        req_idx=np.array([place for place, *_ in sequences] + [0] * padded) if named else None,
    )  # fmt: skip


def read_in(part):
    """(row, first token, end, tokens before) of the blocks that are read, in order of their tokens."""
    found = []
    for blocks in part.prompts:
        assert blocks.valid.sum(-1).tolist() == list(blocks.lengths)
        tokens, own = blocks.tokens.view(blocks.valid.shape), blocks.own.tolist()
        assert tokens[blocks.valid].tolist() == own == tokens[blocks.sequence, blocks.within].tolist()
        for row, length, done, places in zip(blocks.index.tolist(), blocks.lengths, blocks.before, tokens):
            start = int(places[0])
            assert places.tolist() == [*range(start, start + length), *[start] * (len(places) - length)]
            found.append((row, start, start + length, done))
    assert len({row for row, *_ in found}) == len(found)
    assert set(part.fresh.tolist()) >= {row for row, *_, done in found if not done}
    return sorted(found, key=lambda block: block[1])


def test_prompts_are_read_together():
    """Of whatever lengths, the longest first, unless padding them costs more than reading them apart."""
    for number in (1, 3, 65):
        prompts = [(i, i + 1, 2 + i % (BLOCK - 1), 0, 2 + i % (BLOCK - 1)) for i in range(number)]
        (blocks,) = only(batcher().batch(described(prompts))).prompts
        assert list(blocks.lengths) == sorted(blocks.lengths, reverse=True) and len(blocks.lengths) == number
        for some in blocks.split(2):  # as the kernels want them
            assert some.valid.is_contiguous() and some.tokens.is_contiguous() and some.valid.sum() == len(some.own)
    assert list(batches.alike([512, *[28] * 56])) == [(0, 1), (1, 57)]
    assert list(batches.alike([512, 500, *[28] * 8])) == [(0, 10)] and not [*batches.alike([])]


@pytest.mark.parametrize("block, before, now", [(BLOCK, 0, BLOCK + 1), (BLOCK, BLOCK - 1, 2), (None, 3, 5)])
def test_steps_that_do_not_end_with_blocks_are_refused(block, before, now):
    with pytest.raises(FastKVError, match=f"cut a prompt after {before} tokens and read {now} more"):
        batcher(block).batch(described([(0, 1, 30, before, now)]))


def test_lists_begin_at_sixteen_bytes():
    """Kernels are compiled apart for addresses that are no multiple of it."""
    parts = batches.to_device([[1], [], [2, 3], [4, 5, 6]], torch.device("cpu"))
    assert [part.tolist() for part in parts] == [[1], [], [2, 3], [4, 5, 6]]
    assert not any((part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts)


def test_sequences_with_other_settings_are_told_apart():
    """By their place in vLLM's table or, where that is not said, in the batch."""
    sequences = [(3, 1, 4, 4, 1), (1, 2, 4, 4, 1), (2, 3, 9, 0, 8), (0, 4, 8, 0, 8)]
    for named, kinds in ((True, {1: "small", 2: "small"}), (False, {1: "small", 2: "small"})):
        got = batcher(kinds=kinds).batch(described(sequences, named=named))
        assert [*got] == [None, "small"]
        assert [placed(got[kind]) for kind in got] == [[(1, 0)], [(2, 1)]]
        assert [read_in(got[kind]) for kind in got] == [[(4, 10, 18, 0)], [(3, 2, 10, 0)]]
    got = batcher(kinds={2: "small"}).batch(described([sequences[0], sequences[2]]))
    assert placed(got[None]) == [(1, 0)] and not placed(got["small"]) and read_in(got["small"]) == [(3, 1, 9, 0)]


@pytest.mark.parametrize("named", [True, False], ids=["named", "by page"])
def test_batches_of_traffic(named):
    """Sequences come, are read in blocks, decode, end and leave their places and pages to others; they change order.

    A single token is decoded, also the first or last of a prompt.
    """
    draw, made = random.Random(0), batcher()
    running, free, pages, evicted = {}, set(range(6)), set(range(1, 9)), 0
    for _ in range(120):
        if free and draw.random() < 0.5:
            place, page = draw.choice(sorted(free)), draw.choice(sorted(pages))
            free.remove(place), pages.remove(page)
            running[place] = [page, draw.randint(1, 30), 0]
        step = []
        for place, (page, whole, before) in draw.sample(sorted(running.items()), len(running)):
            now = min(BLOCK, whole - before) if before < whole else 1
            step.append((place, page, whole, before, now))
        if not step:
            continue
        got = only(made.batch(described(step, named=named, padded=draw.randint(0, 2))))
        starts = [sum(now for *_, now in step[:i]) for i in range(len(step))]
        assert placed(got) == [(page, start) for (_, page, *_, now), start in zip(step, starts) if now == 1]
        due = []
        for _, page, whole, before, _ in step:
            read = whole - (whole > BLOCK and whole % BLOCK == 1)
            due += [page] if before > read and (before - read) % EVERY == 0 else []
        assert got.due.tolist() == due
        blocks = ((page, start, start + now, before) for (_, page, _, before, now), start in zip(step, starts))
        assert read_in(got) == [block for block in blocks if block[2] - block[1] > 1]
        assert {part.dtype for part in (got.rows, got.due)} == {torch.int64}
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
    made = batcher(copies=True)
    made.batch(described([(4, 1, 40, 0, 8)], named=named))
    assert read_in(only(made.batch(described([(4, 2, 19, 16, 3)], named=named)))) == [(2, 0, 3, 16)]
    due = [only(made.batch(described([(4, 2, 19, before, 1)], named=named))).due.tolist() for before in range(19, 24)]
    assert due == [[], [], [], [2], []]


def test_a_single_token_that_is_computed_again_is_a_step():
    """The newer runner calls it a prompt."""
    again = [(0, 3, 10, 0, 8), (0, 3, 10, 8, 1)]  # of a prompt of 8 tokens, with two more that were its answer
    made = batcher()
    assert len(only(made.batch(described(again[:1]))).prompts) == 1
    assert not only(made.batch(described(again[1:]))).prompts


class Crossings(TorchDispatchMode):
    """Notes what is copied: where to, and whether the host goes on. Attributes: pinned: addresses of pinned memory."""

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
        got = only(made.batch(m))
    assert {part.device.type for part in (got.rows, got.due, got.places) if part is not None} == {"meta"}
    assert all(goes_on for _, goes_on in mode.found), "an ordinary copy waits for all that the device has to do"
    return [where for where, _ in mode.found], Event.waits - before, got


def test_the_host_waits_once_for_each_prompt_and_never_while_decoding(crossings):
    made = batcher()
    ends, goes_on = (4, 1, 8, 0, 8), [(7, 2, 20, 8 * i, 8 if i < 2 else 4) for i in range(3)]
    begins = ["to device", "to host", "to device"], 1  # whose page; then the tokens of each round
    assert on_device(crossings, made, [goes_on[0]])[:2] == begins
    assert on_device(crossings, made, [ends, goes_on[1]])[:2] == begins
    for after in (8, 9, 11):  # the others decode; a prompt that goes on lies before, between or behind them
        decoding = (4, 1, 8, after, 1)
        due = after - 8 == EVERY
        copies, waits, got = on_device(crossings, made, [decoding, goes_on[2]])
        assert waits == 0 and copies == ["to device"] and len(got.due) == due
        copies, waits, got = on_device(crossings, made, [goes_on[2], decoding])
        assert waits == 0 and copies == ["to device"] and len(got.rows) == 1
    copies, waits, got = on_device(crossings, made, [(4, 1, 8, 12, 1)], padded=3)
    assert (copies, waits, len(got.rows)) == ([], 0, 1)


def test_the_older_runner_makes_the_host_wait_once_a_step(crossings):
    """It tells sequences apart by nothing but their pages, which are on the device."""
    made = batcher()
    reading = on_device(crossings, made, [(0, 3, 8, 0, 8), (1, 5, 8, 0, 8)], named=False)
    assert reading[:2] == (["to host", "to device"], 1)
    assert on_device(crossings, made, [(0, 3, 8, 8, 1), (1, 5, 8, 8, 1)], named=False)[:2] == (["to host"], 1)


def test_a_captured_step_finds_its_rows_where_it_was_captured():
    """Padding is nobody's; behind a step that evicts and one with prompts, too. Single tokens never are prompts."""
    made = batcher()
    (captured,) = (part.rows for part in made.nobody(4, torch.device("cpu")).values())
    assert captured.tolist() == [0] * 4
    only(made.batch(described([(0, 5, 6, 0, 6), (1, 7, 8, 0, 8)])))
    made.batch(described([(place, 4, 1, 5, 1) for place in range(10, 14)]))  # others were there before
    for after, page in ((6, 5), (7, 5), (8, 6), (9, 6)):
        sequences = [(0, page, 6, after, 1), (1, 7, 8, after + 2, 1), (2, 9, 1, 0, 1)]
        got = only(made.batch(described(sequences, padded=1)))
        assert got.rows.data_ptr() == captured.data_ptr() and captured.tolist() == [page, 7, 9, 0]
        assert got.places is None and not got.prompts and got.fresh.tolist() == [9]
        assert got.due.tolist() == ([page, 7] if after == 9 else [])
