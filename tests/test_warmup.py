"""After a warm-up traffic compiles nothing: counted on launches that do not run."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from fastkv import Budget
from fastkv.cache import CacheWorkspace
from fastkv.cache.layout import LayerPlan
from fastkv.cache.pages import PagedBlocks, PagedLayer, PagedRule, Traffic, warm_up
from fastkv.config import Config
from fastkv.reference import Slots
from fastkv.rotary import Rotary

from .launches import recorded
from .pairwise import named

HQ, HKV, D, EVERY = 4, 2, 32, 16
SEQUENCES, LONGEST, BUDGET = 40, 1500, 512
LEAST = BUDGET // 5 + EVERY  # slots of a head that has traded away what it may
CPU = torch.device("cpu")
TRADE = Slots.trade
CASES = {  # policy, correction, slots, block, heads
    "default": ("fastkv", "auto", "auto", 256, "uniform"), "leverage": ("leverage", "moments", "auto", 256, "uniform"),
    "centroids": ("snapkv", "centroids", "auto", 256, "uniform"),
    "moments, codes": ("momentkv", "auto", "int8", 256, "uniform"),
    "whole prompts": ("keydiff", "centroids", "int4", None, "uniform"),
    "remembers": ("noncausal", "centroids", "auto", 128, "uniform"),
    "all queries watched": ("h2o", "mean", "auto", 256, "uniform"),
    "adaptive": ("momentkv", "auto", "auto", 256, "adaptive"),
    "few tokens a block": ("snapkv", "none", "auto", 48, "uniform"),
}  # fmt: skip


def made(policy, correction, slots, block, heads):
    budget = Budget(tokens=BUDGET, sinks=4, recent=32, heads=heads)
    config = Config.make(policy, budget, block, EVERY, correction, "triton", None, slots)
    config = replace(config, rotations={0: Rotary(100.0 ** -torch.linspace(0, 1, D // 2))})
    like = torch.empty(1, HKV, 0, D, dtype=torch.bfloat16)
    return PagedRule.of(LayerPlan(config), like, like), CacheWorkspace(evict_every=EVERY, sequences=SEQUENCES)


def tokens(number):
    """Parts of a fused projection, as an engine hands them over."""
    return torch.zeros(number, HQ + 2 * HKV, D, dtype=torch.bfloat16).split([HQ, HKV, HKV], 1)


def trading(first):
    """`Slots.trade` where the first head gets first(of how many) slots: what it is given no kernel wrote."""

    def trade_so(slots, capacities, everywhere):
        total = slots.keys.shape[1]
        capacities = torch.tensor([[one, total - one] for one in (first(total) for _ in capacities)])
        TRADE(slots, capacities, capacities)

    return trade_so


def serve(layer, block, seed):
    """Prompts of some lengths, read into pages together, and steps of some batches of which some evict."""
    draw = random.Random(seed)
    lengths = [
        draw.choice([draw.randint(1, LONGEST), int(2 ** draw.uniform(0, 11)), BUDGET + draw.randint(1, 64)])
        for _ in range(draw.choice([1, 3, 5]))
    ]
    rows = list(range(1, 1 + len(lengths)))
    layer.clear(torch.tensor(rows))
    for at in range(0, max(lengths), block or max(lengths)):
        read = [(row, min(block or length, length - at)) for row, length in zip(rows, lengths) if length > at]
        now, numbers = zip(*read)
        starts = [sum(numbers[:i]) for i in range(len(now))]
        blocks = PagedBlocks.of(numbers, [at] * len(now), torch.tensor([now, starts, numbers]))
        layer.read(blocks, *tokens(sum(numbers)), torch.empty(sum(numbers), HQ, D, dtype=torch.bfloat16))
    batch = draw.randint(1, SEQUENCES)
    rows = torch.arange(1, batch + 1)
    layer.evict(rows[: draw.randint(0, batch)])
    layer.step(rows, *(part.contiguous() for part in tokens(batch)))


@pytest.mark.parametrize("case", [named(case, slow=case == "leverage") for case in CASES])
def test_after_a_warm_up_traffic_compiles_nothing(case, monkeypatch):
    """Also of more sequences than are read or evict together."""
    monkeypatch.setattr("fastkv.cache.pages.AT_ONCE", 3)
    (rule, shared), block = made(*CASES[case]), CASES[case][3]
    opened = partial(PagedLayer, rule, num_heads=HQ, scale=D**-0.5, softcap=None, shared=shared)
    pages = torch.zeros(SEQUENCES + 1, rule.form.nbytes + 128, dtype=torch.uint8)  # of the largest layer
    monkeypatch.setattr(Slots, "trade", trading(lambda total: total // 2))
    with recorded() as launches:
        warm_up(opened, rule, Traffic(LONGEST, block, SEQUENCES), CPU)
        compiled = {*launches}
        scratch = shared.nbytes()
        launches.clear()
        layer = opened(pages)
        draw = random.Random(0)
        monkeypatch.setattr(Slots, "trade", trading(lambda total: draw.randint(LEAST, total - LEAST)))
        for seed in range(24):
            serve(layer, block, seed)
    late = {launch for launch in launches if launch not in compiled}
    assert len(launches) > 120 and not late, sorted(late | {one for one in compiled if one[0] in dict(late)})
    assert scratch == shared.nbytes() == rule.scratch_bytes(HQ, SEQUENCES, CPU) > 0
