"""PagedLayer: sequences that come and go, each in a page, do what a LayerCache of one row does to each alone."""

import pytest
import torch

from fastkv import Budget, HeadShares, ops
from fastkv.backend import Parallel
from fastkv.cache import CacheWorkspace
from fastkv.cache.layer import LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.cache.pages import PagedBlocks, PagedClock, PagedLayer, PagedRule
from fastkv.calibration import KEEPS
from fastkv.config import Config

from .launches import Operators, recorded
from .models import raises
from .pairwise import covering, named
from .states import splits

HQ, HKV, DIM, BLOCK, EVERY = 4, 2, 32, 8, 3
SCALE, PAGES, SEQUENCES = 0.3, 5, 3


def config_of(policy, correction="auto", budget=12, backend="auto", slots="auto"):
    budget = Budget(tokens=budget, sinks=2, recent=2) if isinstance(budget, int) else budget
    return Config.make(policy, budget, BLOCK, EVERY, correction, backend, None, slots)


def calibrated(*wanted, tokens=12, context=48):
    """A budget for one layer whose heads need so many times the mean, whatever stays."""
    table = torch.tensor(wanted).expand(len(KEEPS), 1, -1).half()
    shares = HeadShares(table.contiguous(), (len(wanted),), "", "", "", 1)
    return Budget(tokens=tokens, sinks=2, recent=2, heads=shares, context=context)


def tokens(num, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, num, DIM, generator=draw) for heads in (HQ, HKV, HKV))
    return q, k, v


def paged(config):
    like, shared = torch.empty(1, HKV, 0, DIM), CacheWorkspace(evict_every=EVERY, sequences=SEQUENCES)
    rule = PagedRule.of(LayerPlan(config), like, like)
    pages = torch.full((PAGES, rule.form.nbytes), 0xFF, dtype=torch.uint8)  # NaN, as whoever was there before left it
    return PagedLayer(rule, pages, HQ, SCALE, None, shared)


def alone(config, prompt, steps):
    """Outputs of a LayerCache for one sequence: of its blocks, and of its steps."""
    cache = LayerCache(LayerPlan(config), CacheWorkspace(evict_every=EVERY))
    _, k, v = prompt
    cache.allocate(HQ, k, v, k.shape[2])
    cache.configure(Attends(SCALE))
    blocks = zip(*(part.split(BLOCK, 2) for part in prompt))
    out = [cache.read(*block, torch.ones(1, block[0].shape[2], dtype=torch.bool)) for block in blocks]
    after = [cache.step(*token) for token in zip(*(part.split(1, 2) for part in steps))]
    return torch.cat(out, 2), torch.cat(after, 2)


def read_blocks(layer, rows, before, blocks):
    """The outputs [1, Hq, T, D] of blocks of prompts, (q, k, v) of each, which lie among other tokens of a batch.

    Heads lie beside each other in every token, as an engine has them."""
    layer.clear(torch.tensor([row for row, done in zip(rows, before) if not done], dtype=torch.int64))
    gap = torch.full((1, HQ, 1, DIM), float("nan"))
    parts = [[t for i in range(len(rows)) for t in (gap[:, : blocks[i][n].shape[1]], blocks[i][n])] for n in range(3)]
    flat = [torch.cat(part, 2)[0].transpose(0, 1).contiguous() for part in parts]
    lengths = [q.shape[2] for q, _, _ in blocks]
    starts = [1 + i + sum(lengths[:i]) for i in range(len(rows))]
    numbers = torch.tensor([rows, starts, lengths])
    out = torch.full_like(flat[0], 7.0)
    layer.read(PagedBlocks.of(lengths, before, numbers), *flat, out)
    assert (out[[start - 1 for start in starts]] == 7).all()  # other tokens stay
    return [out[start : start + length].transpose(0, 1)[None] for start, length in zip(starts, lengths)]


def read(layer, row, prompt):
    """A prompt in blocks: its output."""
    parts = list(zip(*(part.split(BLOCK, 2) for part in prompt)))
    return torch.cat([read_blocks(layer, [row], [i * BLOCK], [part])[0] for i, part in enumerate(parts)], 2)


def step(layer, rows, steps, at, due=()):
    """Those of the rows that are due evict; then one token of each sequence, at its own place."""
    layer.evict(torch.tensor(due, dtype=torch.int64))
    q, k, v = (torch.cat([given[i][:, :, place] for given, place in zip(steps, at)]) for i in range(3))
    return layer.step(torch.tensor(rows), q, k, v)


ADAPTIVE = Budget(tokens=12, sinks=2, recent=2, heads="adaptive")
CASES = {
    "keydiff": ("keydiff", "auto"), "centroids": ("snapkv", "centroids"), "h2o": ("h2o", "moments"),
    "momentkv reference": ("momentkv", "auto", 12, "reference"), "triton": ("snapkv", "centroids", 12, "triton"),
    "remembers": ("noncausal", "centroids"), "remembers, triton": ("noncausal", "centroids", 12, "triton"),
    "remembers, triton, adaptive": ("noncausal", "none", ADAPTIVE, "triton"),
    "remembers, adaptive": ("noncausal", "none", ADAPTIVE), "adaptive": ("snapkv", "mean", ADAPTIVE),
    "calibrated": ("keydiff", "auto", calibrated(1.5, 0.5)),
    "calibrated centroids": ("snapkv", "centroids", calibrated(0.4, 1.6)),
    "calibrated, triton": ("snapkv", "centroids", calibrated(0.4, 1.6), "triton"),
    "calibrated int8": ("noncausal", "mean", calibrated(1.5, 0.5), "auto", "int8"),
    "int8": ("snapkv", "centroids", 12, "auto", "int8"), "fp8": ("momentkv", "auto", 12, "reference", "fp8"),
    "int4": ("keydiff", "auto", 12, "auto", "int4"), "int4 and adaptive": ("snapkv", "mean", ADAPTIVE, "auto", "int4"),
}  # fmt: skip

PLAIN = {  # the interpreter is slow
    "triton": "centroids", "remembers, triton": "remembers", "calibrated, triton": "calibrated centroids",
    "remembers, triton, adaptive": "remembers, adaptive",
}  # fmt: skip


@pytest.mark.parametrize("case", [named(case, slow=case in ("triton", "remembers, triton")) for case in CASES])
def test_sequences_do_not_depend_on_each_other(case):
    """Sequence b arrives in turn b; blocks of all prompts are read together, of calibrated heads of two at once, while
    others decode and evict in their own time. Nor on the kernels: alone they are computed without them."""
    config, plain = config_of(*CASES[case]), config_of(*CASES[PLAIN.get(case, case)])
    prompts, steps = [tokens(num, num) for num in (29, 5, 16)], [tokens(6, 100 + num) for num in range(3)]
    lengths = [q.shape[2] for q, *_ in prompts]
    layer, rows, clock, done, found = paged(config), [3, 1, 4], PagedClock(EVERY), [0, 0, 0], [[], [], []]
    layer.at_once = 2 if "calibrated" in case else layer.at_once
    for turn in range(10):
        starts = [(turn - b) * BLOCK for b in range(3)]
        reading = [b for b in range(3) if 0 <= starts[b] < lengths[b]]
        decoding = [b for b in range(3) if starts[b] >= lengths[b] and done[b] < 6]
        if reading:
            cut = [[part[:, :, starts[b] : starts[b] + BLOCK] for part in prompts[b]] for b in reading]
            out = read_blocks(layer, [rows[b] for b in reading], [starts[b] for b in reading], cut)
            for b, own in zip(reading, out):
                found[b].append(own)
                clock.prompted[rows[b]] = min(starts[b] + BLOCK, lengths[b])
        if decoding:
            now = [rows[b] for b in decoding]
            due = [now[i] for i in clock.due(now, [lengths[b] + done[b] + 1 for b in decoding])]
            out = step(layer, now, [steps[b] for b in decoding], [done[b] for b in decoding], due)
            for b, own in zip(decoding, out):
                found[b].append(own[None, :, None])
                done[b] += 1
    assert done == [6, 6, 6]
    for prompt, following, outs in zip(prompts, steps, found):
        expected = torch.cat(alone(plain, prompt, following), 2)
        torch.testing.assert_close(torch.cat(outs, 2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", ["auto", "int4"])
def test_tensors_of_pages_begin_on_lines_of_a_cache(slots):
    """Else every row of keys and values would touch one line more."""
    form = PagedRule.of(LayerPlan(config_of("fastkv", slots=slots)), *tokens(0, 0)[1:]).form
    assert all(place % 128 == 0 for place in (*form.places.values(), form.nbytes))


def test_a_page_has_the_bytes_that_its_heads_need():
    """All together those of heads that are alike, but for where each begins."""
    alike, unlike = (paged(config_of("keydiff", budget=budget)) for budget in (12, calibrated(1.5, 0.5)))
    assert unlike.rule.layout.tokens == (18, 6)
    more = unlike.state.exact.starts[0].nbytes
    sizes = [sum(tensor[0].nbytes for _, tensor in layer.state.named_tensors()) for layer in (alike, unlike)]
    assert sizes[1] == sizes[0] + more


def test_processes_that_share_the_heads_have_pages_of_one_size():
    """Each lays out its own heads there; the page has room for those that keep most."""
    config, like = config_of("keydiff", budget=calibrated(1.5, 1.5, 0.5, 0.5)), torch.empty(1, HKV, 0, DIM)
    rules = [PagedRule.of(LayerPlan(config, parallel=Parallel(rank, 2)), like, like) for rank in range(2)]
    assert [rule.layer.layout.tokens for rule in rules] == [(18, 18), (6, 6)]
    assert [rule.form.template.nbytes() < rule.form.nbytes - 1000 for rule in rules] == [False, True]
    assert len({rule.form.nbytes for rule in rules}) == 1


COPIED = ["keydiff", "centroids", "triton", "remembers", "remembers, adaptive", "int8", "int4 and adaptive", "h2o"]


@pytest.mark.parametrize("case, blocks", covering(COPIED, [1, 3], together=1))
def test_a_copied_page_goes_on_as_the_first(case, blocks):
    """To the same bits, while the first goes on too, and whatever the row held before."""
    layer, rest, steps = paged(config_of(*CASES[case])), tokens(BLOCK + 3, 1), tokens(EVERY + 1, 2)
    read(layer, 2, tokens(blocks * BLOCK, 4))
    read(layer, 3, tokens(5 * BLOCK, 3))  # whose heads trade slots in another way
    names = layer.state.named_tensors
    for _, part in names():
        part[3] = part[2]
    outputs, parts = {}, list(zip(*(part.split(BLOCK, 2) for part in rest)))
    for row in (2, 3):
        outputs[row] = [*(read_blocks(layer, [row], [(blocks + i) * BLOCK], [part])[0] for i, part in enumerate(parts))]
    for at in range(EVERY + 1):
        for row in (2, 3):
            outputs[row].append(step(layer, [row], [steps], [at], [row] * (at > 0 and at % EVERY == 0)))
    assert all(torch.equal(first, second) for first, second in zip(outputs[2], outputs[3], strict=True))
    assert all(torch.equal(part[2], part[3]) for _, part in names())


def test_the_host_knows_when_sequences_are_due():
    """Before the step that follows `period` steps after a prompt, and nothing of sequences it never heard of."""
    clock = PagedClock(4)
    for name, blocks in ((7, (8, 13)), (2, (6,))):
        for seen in blocks:
            clock.prompted[name] = seen
    assert [clock.due([2, 7, 5], [6 + i, 13 + i, 4 * i]) for i in range(1, 7)] == [[], [], [], [], [0, 1], []]
    assert clock.due([7, 2], [18, 9]) == [0]
    clock.prompted[7] = 3  # somebody else
    assert clock.due([7], [18]) == [] and clock.due([7], [12]) == [0]


@pytest.mark.parametrize("policy, correction", [("noncausal", "centroids"), ("momentkv", "auto"), ("keydiff", "auto")])
def test_an_eviction_touches_as_many_bytes_whatever_the_batch(policy, correction):
    """Counted on launches that do not run: with one sequence due, the same beside two others as alone."""
    layer, added = paged(config_of(policy, correction, 12, "triton")), []
    for rows in ([2], [1, 2, 3]):
        nbytes = []
        for due in ([2], [], [2]):  # first what is made once
            with recorded() as launches, Operators() as operators:
                step(layer, rows, [tokens(1, 1)] * len(rows), [0] * len(rows), due)
            nbytes.append(launches.nbytes + operators.nbytes)
        added.append(nbytes[2] - nbytes[1])
    assert added[0] == added[1] > 0


def test_large_pages_are_copied_a_few_at_a_time():  # 8 heads of 32,768 tokens, thrice in bf16, are 400 MB
    like = torch.empty(1, 8, 0, 128, dtype=torch.bfloat16, device="meta")
    for budget, at_once in ((1024, 64), (32768, 2)):
        rule = PagedRule.of(LayerPlan(config_of("keydiff", budget=budget)), like, like)
        assert PagedLayer(rule, rule.form.allocate(2, "meta").pages, 8, 1.0, None, CacheWorkspace()).at_once == at_once


@pytest.mark.parametrize("policy, correction", [("snapkv", "centroids"), ("momentkv", "auto"), ("keydiff", "auto")])
def test_batches_of_all_sizes_share_scratch_whose_bytes_are_known(policy, correction):
    """Of Llama's heads, with 1,024 tokens kept: no more than the largest batch takes by itself."""
    num_heads, heads, dim, most = 32, 8, 128, 64
    config = Config.make(policy, Budget(tokens=1024, sinks=4, recent=32), 512, 16, correction, "triton", None)
    like, shared = torch.empty(1, heads, 0, dim, dtype=torch.bfloat16, device="meta"), CacheWorkspace(sequences=most)
    rule = PagedRule.of(LayerPlan(config), like, like)
    pages = torch.empty(most + 1, rule.form.nbytes, dtype=torch.uint8, device="meta")
    layer = PagedLayer(rule, pages, num_heads, SCALE, None, shared)
    alone = []
    for batch in range(1, most + 1):
        state = layer.state.at(torch.empty(batch, dtype=torch.int64, device="meta"))
        own = shared.scratch_of(num_heads, state, rule.layer.spec)
        plain = ops.workspace(num_heads, state, rule.layer.spec)
        assert [(one.shape, one.dtype) for one in own] == [(one.shape, one.dtype) for one in plain]
        assert all(one.storage_offset() % 32 == 0 for one in own)  # alike for all: what is compiled fits
        alone.append(sum(one.nbytes for one in plain))
    assert shared.nbytes() == rule.scratch_bytes(num_heads, most, like.device)
    assert max(alone) <= shared.nbytes() < 1.01 * max(alone) < sum(alone) / 20


@splits(2)
def test_what_one_batch_leaves_in_scratch_is_nothing_to_another():
    """Batches of three, one and two sequences decode and evict in the same memory, which was full of garbage."""
    config, plain = config_of(*CASES["triton"]), config_of(*CASES["centroids"])
    prompts, steps = [tokens(17 + row, row) for row in range(3)], [tokens(6, 9 + row) for row in range(3)]
    layer, rows = paged(config), [3, 1, 4]
    layer.shared.scratch_of(HQ, layer.state.at(torch.tensor(rows)), layer.rule.spec)
    (numbers, tickets) = next(iter(layer.shared.rooms.values()))
    numbers.fill_(torch.nan)
    for row, prompt in zip(rows, prompts):
        read(layer, row, prompt)
    found = [[], [], []]
    for at, batch in [(0, [0, 1, 2]), (1, [0]), (1, [1, 2]), (2, [2, 0]), (2, [1]), (3, [1, 0, 2])]:
        due = [rows[b] for b in batch if at and at % EVERY == 0]
        out = step(layer, [rows[b] for b in batch], [steps[b] for b in batch], [at] * len(batch), due)
        assert not tickets.any()
        for b, own in zip(batch, out):
            found[b].append(own)
    for b in range(3):
        expected = alone(plain, prompts[b], steps[b])[1][0, :, :4]
        torch.testing.assert_close(torch.stack(found[b], 1), expected, atol=1e-5, rtol=1e-5)


def test_refusals():
    raises("at most 3 sequences, got 4", step, paged(config_of("keydiff")), [0] * 4, [tokens(1, 1)] * 4, [0] * 4)
    for budget, message in (
        (Budget(keep=0.5), "a page holds the same number of tokens whatever the prompt"),
        (calibrated(1.5, 0.5, context=None), r"give Budget\(context=...\), the length that they are for"),
    ):
        raises(message, paged, config_of("keydiff", budget=budget))
