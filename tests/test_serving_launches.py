"""How many kernels a step of a serving engine launches in a layer: none more for more requests.

Counted on launches that do not run; torch's operators are launches, too.
"""

import pytest
import torch

from fastkv import Budget
from fastkv.cache.paged import PagedLayer, PagedRule
from fastkv.cache.workspace import CacheWorkspace
from fastkv.config import Config
from fastkv.integrations.vllm.batch import Batcher

from .launches import Operators, recorded
from .test_serving_batch import described, only

HQ, HKV, DIM, BLOCK, EVERY = 8, 2, 32, 64, 16
LAUNCHES = {  # of a step in which prompts begin, of one that reads their ends, before one where an eviction is due
    "keydiff": (29, 42, 7),
    "momentkv": (41, 101, 12),
    "snapkv": (32, 75, 5),
}


class Server:
    """One layer of a model, and the batches of a server with so many sequences that decode and prompts that begin."""

    def __init__(self, policy, decoding, prompts):
        budget = Budget(tokens=BLOCK, sinks=2, recent=8, heads="uniform")
        config = Config.make(policy, budget, BLOCK, EVERY, "auto", "triton", None)
        most = decoding + prompts
        like, shared = torch.empty(1, HKV, 0, DIM, dtype=torch.bfloat16), CacheWorkspace(sequences=most)
        rule = PagedRule.of(config, 0, 0, 1, like, like, shared)
        pages = torch.zeros(most + 1, rule.form.nbytes, dtype=torch.uint8)
        self.layer, self.batcher = PagedLayer(rule, pages, HQ, 0.3, None, shared), Batcher(config, most)
        # Place, page, tokens of the prompt and those that are read, of each; prompts end at all places of a block.
        self.sequences = [[i, i + 1, BLOCK, 0] for i in range(decoding)]
        ends = [1 + 7 * (7 - i) % BLOCK for i in range(prompts)]  # 50 first, which is the longest of few
        self.sequences += [[i, i + 1, 2 * BLOCK + end, 0] for i, end in enumerate(ends, decoding)]

    def step(self):
        """Launches of a step in which all take part: before it, and in it."""
        now = [min(BLOCK, whole - seen) if seen < whole else 1 for *_, whole, seen in self.sequences]
        part = only(self.batcher.batch(described([(*one, count) for one, count in zip(self.sequences, now)])))
        for one, count in zip(self.sequences, now):
            one[3] += count
        q, k, v = (torch.zeros(sum(now), heads, DIM, dtype=torch.bfloat16) for heads in (HQ, HKV, HKV))
        found = []
        for run in (part.prepare, lambda layer: part.attend(layer, q, k, v, torch.empty_like(q))):
            with recorded() as launches, Operators() as operators:
                run(self.layer)
            launched = [name for name, _ in launches]
            checks = ("ne.Scalar", "sum.default", "_local_scalar_dense.default")  # of what counts bytes
            found.append(launched + [name for name in operators.found if not name.endswith(checks)])
        return found


@pytest.mark.parametrize("policy", LAUNCHES)
def test_launches_do_not_grow_with_the_number_of_requests(policy):
    """Of a step in which prompts begin, of one that reads their ends beside sequences that decode, of one that only
    decodes, and of what comes before the step after an eviction is due.
    """
    for number in (2, 8):
        server, counts = Server(policy, number, number), []
        for _ in range(EVERY + 2):
            before, within = server.step()
            counts.append((len(before), len(within)))
        within = [name for name in within if name.endswith("_kernel")]
        assert [counts[at] for at in (0, 2, 3)] == [(1, LAUNCHES[policy][0]), (0, LAUNCHES[policy][1]), (0, 2)]
        assert counts[-1] == (LAUNCHES[policy][2], 2) and len(within) == 1
        assert {counts[at] for at in range(3, EVERY + 1)} == {(0, 2)}  # in between nothing else happens


def test_one_sequence_decodes_in_as_many_launches():
    server = Server("keydiff", 1, 0)
    server.step()
    server.step()  # what is made once
    before, within = server.step()
    assert not before and len(within) == 2 and within[0].endswith("decode_attention_kernel")
