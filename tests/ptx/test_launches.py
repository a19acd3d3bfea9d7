"""Kernels as they are compiled for a GPU: sizes of real models, programs in any order, and bugs put into their PTX.

Needs `-p tests.ptx.plugin`, with which the tests of kernels in tests/test_kernels_*.py are executed likewise.
"""

import re
from functools import partial

import pytest
import torch

from fastkv.kernels import select

from .. import test_kernels_codes as codes
from .. import test_kernels_decode as decode
from .. import test_kernels_prefill as prefill
from ..pairwise import covering
from ..states import in_pages, splits
from . import orders
from .driver import Driver
from .harness import executed, watched
from .memory import Fault

pytestmark = pytest.mark.ptx


def llama(dim=128, dtype=torch.bfloat16, slots=520, lengths=(519, 300), parts=None, groups=4, **rest):
    """A step of one sequence: slots of two heads, one of them full, and what they have evicted."""
    return decode.Case.make(1, 2, groups, dim, slots, dtype, lengths, (300, 5), parts=parts, **rest)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    "correction, dim, dtype, number",
    covering(["none", "moments", "centroids"], [64, 128, 256], DTYPES, [1, 16], together=2),
)
def test_decode_steps_of_real_sizes(correction, dim, dtype, number):
    case = llama(dim, dtype, parts=31 if correction == "centroids" else None)
    with splits(number):
        decode.check(case, order=None if correction == "none" else 1, attention=number > 1, append=True)


@pytest.mark.parametrize("slots, number", covering(["int8", "fp8", "int4", "k8v4"], [1, 16]))
def test_decode_steps_over_codes_in_pages(slots, number):
    """Rows of pages give the bits that rows of their own do, which are as near to the truth as they should be."""
    case = codes.coded(llama(), slots)
    placed = in_pages(case.state, [3], 5)
    with splits(number):
        paged = decode.operations.decode_step(case.q, case.k, case.v, placed, case.spec(None, 1))
        own = decode.check(case)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(paged, own[:3]))
    decode.assert_same(placed.taken(), case.state)


@pytest.mark.parametrize("dtype, correction", covering(DTYPES, ["moments", "centroids"], together=2))
def test_prompt_blocks_of_real_sizes(dtype, correction):
    sizes = dict(batch=1, heads=2, groups=4, dim=128, slots=200, num=70)
    block, state = prefill.case(**sizes, dtype=dtype, parts=31 if correction == "centroids" else None)
    prefill.check(block, state)


ORDERS = 2


@pytest.mark.parametrize("name", orders.CASES)
def test_any_order_of_programs_gives_the_same_bits(name, launches):
    problem = orders.CASES[name]()
    launches.step = 0
    outcomes = []
    for order in range(ORDERS):
        launches.order = order
        outcomes.append(problem.outcome(seed=order))
        orders.assert_same_bits(outcomes[-1], outcomes[0], order)
    launches.step = 1


class Bug:
    """A change of PTX: match number `number` of a pattern becomes something else."""

    def __init__(self, pattern, becomes, number=0):
        self.pattern, self.becomes, self.number, self.made = pattern, becomes, number, False

    def __call__(self, ptx):
        found = list(re.finditer(self.pattern, ptx))
        if len(found) <= self.number:
            return ptx
        self.made, match = True, found[self.number]
        return ptx[: match.start()] + match.expand(self.becomes) + ptx[match.end() :]


def selecting(num=600):
    positions, valid = torch.randperm(num)[None, None].int(), torch.rand(1, 1, num) > 0.05
    select.select(torch.randn(1, 1, num), positions, valid, ~valid, num // 2)


def decoding(number, **made):
    with splits(number):
        llama(**made).kernel(attention=True)


BARRIER = r"\tbar\.sync\s+0;"
LOAD = r"@%p\d+ (ld\.global)"
BUGS = {
    "a barrier is missing in select": (selecting, BARRIER, "", 4, "race"),
    "another one": (selecting, BARRIER, "", 20, "race"),
    "a barrier is missing in a step": (partial(decoding, 1), BARRIER, "", 5, "race"),
    "the barrier before a ticket is missing": (
        partial(decoding, 4), rf"{BARRIER}((?:(?!bar\.sync)[\s\S])*?atom\.)", r"\1", 0, "race"),
    "a ticket is taken before a store": (
        partial(decoding, 4), r"(\t@%p\d+ st\.global[^\n]*\n)((?:(?!st\.global)[\s\S])*?)(\t@%p\d+ atom[^\n]*\n)",
        r"\2\3\1", 0, "race"),
    "a ticket that orders nothing": (partial(decoding, 4), r"acq_rel", "relaxed", 0, "race"),
    "a ticket that only releases": (partial(decoding, 4), r"acq_rel", "release", 0, "race"),
    "a wait for copies is too short": (
        partial(decoding, 4), r"cp\.async\.wait_group\s+\d", "cp.async.wait_group 7", 0, "pending"),
    "it is missing": (partial(decoding, 1), r"cp\.async\.wait_group\s+\d;", "", 0, "pending"),
    "an offset is wrong": (partial(decoding, 4), r"(ld\.global[^\]]*) \+ 0", r"\1 + 1048576", 0, "bounds"),
    "a copy's address is odd": (
        partial(decoding, 1), r"(cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*) \+ 0", r"\1 + 2", 0, "alignment"),
    "a store's address is odd": (partial(decoding, 4), r"(st\.global\.v4[^\]]*) \+ 0", r"\1 + 4", 0, "alignment"),
    "a store has no mask": (selecting, r"@%p\d+ (st\.global\.b8)", r"\1", 2, "bounds"),
    "a load has no mask": (selecting, LOAD, r"\1", 2, "bounds"),
    "an early way out for some": (
        selecting, BARRIER, "\tsetp.gt.u32 %p1, %r1, 63;\n\t@%p1 ret;\n\tbar.sync 0;", 3, "barrier"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_reported(name):
    run, pattern, becomes, number, kind = BUGS[name]
    bug = Bug(pattern, becomes, number)
    with executed(Driver(bug)) as driver, watched(driver), pytest.raises(Fault) as found:
        run()
    assert bug.made and found.value.kind == kind, found.value
    assert re.search(
        r"^_\w+_kernel: .*program \(\d+, \d+, \d+\) thread \d+ .*\.py:\d+.*line \d+ of the PTX", str(found.value)
    )


def test_without_bugs_nothing_is():
    for run in {id(run): run for run, *_ in BUGS.values()}.values():
        run()
