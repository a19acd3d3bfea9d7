"""How many kernels a step of a serving engine launches in a layer: none more for more requests.

Counted on launches that do not run; torch's operators are launches, too."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from fastkv import Budget
from fastkv.cache import CacheWorkspace
from fastkv.cache.layout import LayerPlan
from fastkv.cache.pages import PagedLayer, PagedRule
from fastkv.config import Config
from fastkv.integrations.vllm.batch import Batcher
from fastkv.rotary import Rotary

from .launches import Operators, recorded
from .test_paged import calibrated
from .test_serving_batch import described, only

HQ, HKV, DIM, BLOCK, EVERY = 8, 2, 32, 512, 16
# Of steps in which prompts begin, go on and end, and before one where an eviction is due.
LAUNCHES = {
    ("keydiff", "uniform"): (7, 10, 10, 7), ("keydiff", "calibrated"): (9, 10, 10, 7),
    ("momentkv", "uniform"): (8, 14, 14, 7), ("snapkv", "uniform"): (7, 12, 12, 5),
    ("fastkv", "uniform"): (14, 21, 16, 9), ("fastkv", "calibrated"): (17, 21, 16, 9),
}  # fmt: skip


class Server:
    """One layer of a model, and the batches of a server with so many sequences that decode and prompts that begin."""

    def __init__(self, policy, decoding, prompts, heads="uniform", tokens=BLOCK):
        budget = Budget(tokens=tokens, sinks=2, recent=8, heads="uniform")
        if heads == "calibrated":
            budget = replace(calibrated(1.5, 0.5, tokens=tokens, context=4096), recent=8)
        config = Config.make(policy, budget, BLOCK, EVERY, "auto", "triton", None)
        config = replace(config, rotations={0: Rotary(10000.0 ** -torch.linspace(0, 1, DIM // 2))})
        most = decoding + prompts
        like, shared = torch.empty(1, HKV, 0, DIM, dtype=torch.bfloat16), CacheWorkspace(sequences=most)
        rule = PagedRule.of(LayerPlan(config), like, like)
        pages = torch.zeros(most + 1, rule.form.nbytes, dtype=torch.uint8)
        self.layer, self.batcher = PagedLayer(rule, pages, HQ, 0.3, None, shared), Batcher(config, most)
        # Place, page, tokens of the prompt and those that are read, of each; prompts end at all places of a block.
        self.sequences = [[i, i + 1, BLOCK, 0] for i in range(decoding)]
        ends = [max(1 + 6 * (7 - i), 2) for i in range(prompts)]  # 43 first, which is the longest of few
        self.sequences += [[i, i + 1, 2 * BLOCK + end, 0] for i, end in enumerate(ends, decoding)]

    def skip(self, steps):
        """As if everybody had decoded so many tokens."""
        for one in self.sequences:
            one[3] += steps

    def step(self):
        """Launches of a step in which all take part: before it, and in it."""
        now = [min(BLOCK, whole - seen) if seen < whole else 1 for *_, whole, seen in self.sequences]
        part = only(self.batcher.batch(described([(*one, count) for one, count in zip(self.sequences, now)])))
        for one, count in zip(self.sequences, now):
            one[3] += count
        q, k, v = torch.zeros(sum(now), HQ + 2 * HKV, DIM, dtype=torch.bfloat16).split([HQ, HKV, HKV], 1)
        found = []
        for run in (part.prepare, lambda layer: part.attend(layer, q, k, v, q.new_empty(len(q), HQ, DIM))):
            with recorded() as launches, Operators() as operators:
                run(self.layer)
            launched = [name for name, _ in launches]
            # Of what counts bytes, and what is made once.
            other = ("ne.Scalar", "sum.default", "_local_scalar_dense.default", "zeros.default")
            found.append(launched + [name for name in operators.found if not name.endswith(other)])
        return found


@pytest.mark.calibrated
@pytest.mark.parametrize("policy, heads", LAUNCHES)
def test_launches_do_not_grow_with_the_number_of_requests(policy, heads):
    """Of steps with prompts beside sequences that decode, of one that only decodes, and before an eviction."""
    begin, on, end, before_eviction = LAUNCHES[policy, heads]
    cleared = 1 if heads == "uniform" else 2  # a page, and where its heads begin
    for number in (2, 8):
        server, counts = Server(policy, number, number, heads), []
        for at in range(6):
            if at == 5:
                server.skip(EVERY - 4)
            before, within = server.step()
            counts.append((len(before), len(within)))
        within = [name for name in within if name.endswith("_kernel")]
        assert counts[:4] == [(cleared, begin), (0, on), (0, end), (0, 1)]
        assert counts[4] == (0, 1) and counts[5] == (before_eviction, 1) and len(within) == 1


def test_one_sequence_decodes_in_as_many_launches():
    server = Server("keydiff", 1, 0)
    server.step()
    server.step()  # what is made once
    before, within = server.step()
    assert not before and len(within) == 1 and within[0].endswith("decode_attention_kernel")


SCORED = "momentkv keydiff manifold-windowed compactor leverage noncausal fastkv snapkv h2o knorm lagkv rkv random"


@pytest.mark.calibrated
@pytest.mark.parametrize("policy, heads", [*product(SCORED.split(), ["uniform"]), ("momentkv", "calibrated")])
def test_kernels_take_the_blocks_of_an_engine(policy, heads):
    """Of a block that is longer than the budget, tokens are chosen at once, among those that the engine hands over."""
    before, within = Server(policy, 2, 2, heads, tokens=BLOCK // 2).step()
    assert before and any(name.endswith("select_kernel") for name in within)
