"""decode_step in kernels, with and without tokens that have no value, against the fp64 reference, in the interpreter or
on a GPU.

The limit is that of flash-attention: twice the error of the same computation in torch in the dtype of the inputs, plus
a little. The kernels also round the weights to that dtype, and the interpreter truncates where hardware rounds to
nearest bf16, so the little is 1e-6, 2e-4 and 8e-3 (bf16) of the largest value; three times that where the values are
themselves recovered in that dtype (VECTOR).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fastkv import reference
from fastkv.kernels import decode_attention, operations
from fastkv.kernels._launch import decode_programs
from fastkv.reference import Centroids, LayerState, Moments, Recovery, Slots
from perf.micro.states import filled

from . import states
from .models import raises
from .pairwise import covering
from .states import PER_SM, assert_same, copied, cycled, launched, make_spec, make_state, num_programs

SLACK = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 8e-3}
DTYPES = list(SLACK)
SCALE = 0.17
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


@dataclass
class Case:
    """One problem. Slots that hold nothing are NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: LayerState

    @classmethod
    def make(cls, batch, heads, groups, dim, slots, dtype, lengths, evicted, *, spread=1.0, exact=False, seed=0,
             parts=None, means=torch.float32):  # fmt: skip
        """lengths, evicted: per (sequence, head), cycled. exact: hand the kernel the fp32 cross moment.
        parts: how many centroids there are, with means of what dtype."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape, to=dtype):
            return torch.randn(*shape, generator=source).to(to)

        held, count = cycled(lengths, batch, heads), cycled(evicted, batch, heads)
        keys, values = normal(batch, heads, slots, dim), normal(batch, heads, slots, dim)
        unused = torch.arange(slots) >= held[..., None]
        keys[unused], values[unused] = NAN, NAN
        gone = max(max(evicted), 1)
        inside = torch.arange(gone) < count[..., None]
        old = normal(batch, heads, gone, dim, to=torch.float32), normal(batch, heads, gone, dim, to=torch.float32)
        old = (old[0] + 0.3, old[1] - old[0], inside)
        moments = Moments.empty(batch, heads, dim, dim).add(*old)
        if not exact and dtype != torch.float32:  # what the kernel is given is the truth
            moments.slope = (moments.cross / moments.count.clamp(min=1)[..., None, None]).to(dtype)
            moments.cross = moments.slope.float() * moments.count[..., None, None]
        q = normal(batch, heads * groups, dim, to=torch.float32).mul(spread).to(dtype)
        positions = torch.full((batch, heads, slots), -7, dtype=torch.int32)
        seen = torch.full((batch,), 1000)  # kernels count on, from lengths and moments
        centroids = None if parts is None else Centroids.empty(batch, heads, parts, dim, dim, dtype=means).add(*old)
        k, v = normal(batch, heads, 1, dim), normal(batch, heads, 1, dim)
        return cls(q, k, v, make_state(keys, values, held.int(), positions, seen, moments, parts=centroids))

    def copy(self):
        return replace(self, state=copied(self.state))

    def spec(self, softcap, order):
        return make_spec(SCALE, softcap, order, correction=None if self.state.parts is None else "centroids")

    def collect(self, attention):
        """Let the slots with value collect attention, or not."""
        collected = torch.full(self.state.exact.keys.shape[:3], 0.25)
        self.state.exact.attention = collected if attention else None

    def reference(self, dtype, softcap, order, append, attention):
        """The specification in `dtype`: out, lse_retained, lse_evicted, attention; and the state after it."""
        self.collect(attention)
        state, q = copied(self.state), self.q
        if dtype == torch.float64:
            state, q = copied(self.state, dtype), q.double()
        if append:
            reference.append(state.exact, self.k, self.v, state.stored + state.moments.count)
            state.seen += 1
        results = reference.decode_step(q, None, None, state, self.spec(softcap, order))
        return (*results, state.exact.attention), state

    def kernel(self, softcap=None, order=1, append=True, attention=False, workspace=None):
        """The kernel on this state, which it changes."""
        self.collect(attention)
        self.state.scratch = workspace or self.workspace()
        token = (self.k, self.v) if append else (None, None)
        results = operations.decode_step(self.q, *token, self.state, self.spec(softcap, order))
        self.state.scratch = []
        return (*results, self.state.exact.attention)

    def workspace(self):
        """Scratch full of NaN."""
        return states.workspace(self.q.shape[1], self.state)


def assert_close(results, truth, same_dtype, dtype, slack_factor=1, lse_slack=0.0):
    """Same infinities, no NaN, and error within twice that of torch in `dtype` plus the slack explained above."""
    for name, got, want, usual in zip(("out", "lse_retained", "lse_evicted", "attention"), results, truth, same_dtype):
        if want is None:
            continue
        assert torch.equal(got.isinf(), want.isinf()), name
        finite = ~want.isinf()
        got, want, usual = (t[finite].double() for t in (got, want, usual))
        if not want.numel():
            continue
        slack = SLACK[dtype] * slack_factor if name == "out" else max(SLACK[torch.float32], lse_slack)
        slack *= max(1.0, want.abs().max().item())
        if name == "attention":  # the rounding of a logit is relative to it, that of a weight as large as the logit's
            slack *= max(1.0, truth[1].nan_to_num(neginf=0.0).abs().max().item() / 4)
        error, limit = (got - want).abs().max().item(), 2 * (usual - want).abs().max().item() + slack
        assert error <= limit, f"{name}: error {error:.2e} > {limit:.2e}"


def check(case, softcap=None, order=1, append=True, attention=False, workspace=None, slack_factor=1, **slack):
    """Results as specified; the stored tokens, their positions and the sizes are equal bit for bit."""
    dtype = case.q.dtype
    truth, state = case.reference(torch.float64, softcap, order, append, attention)
    usual, _ = case.reference(dtype, softcap, order, append, attention)
    results = case.kernel(softcap, order, append, attention, workspace)
    assert_close(results, truth, usual, dtype, slack_factor, **slack)
    assert_same(case.state, state, but=["exact.attention"])
    return results


@pytest.fixture
def split():
    """Call it to fix the number of splits, which is otherwise a function of the shape."""
    with ExitStack() as stack:
        yield lambda number: stack.enter_context(states.splits(number))


SHAPES = {  # batch, KV heads, groups, head_dim, slots, lengths, evicted
    "llama": (1, 2, 4, 128, 150, (149, 97), (300, 5)), "gemma": (1, 1, 2, 256, 61, (33,), (40,)),
    "mha80": (1, 1, 1, 80, 70, (69,), (9,)), "group3-96": (2, 1, 3, 96, 40, (31, 7), (1, 2)),
    "group7": (1, 1, 7, 64, 100, (99,), (64,)), "group8": (1, 2, 8, 64, 33, (1, 32), (0, 3)),
    "group16": (1, 1, 16, 128, 50, (17,), (30,)), "fused": (1, 1, 4, 128, 48, (47,), (6,)),
    "few-and-none": (2, 2, 4, 64, 20, (0, 1, 5, 19), (0, 4, 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("softcap, append, splits", covering([None, 3.0], [True, False], [1, 4]))
def test_decode_variants_with_centroids(split, softcap, append, splits):
    split(splits)
    case = Case.make(2, 2, 3, 64, 24, torch.float32, (23, 0, 1, 14), (0, 0, 7, 70), parts=6)
    check(case, softcap, None, append, attention=True)


@pytest.mark.parametrize("number, pieces", [(2, 1), (4, 2), (8, 3), (16, 3)])
@pytest.mark.parametrize("shares", [None, (0.4, 0.6, 1.0, 2.0)], ids=["equal", "unequal"])
def test_many_centroids_are_shared_by_programs(split, monkeypatch, shares, number, pieces):
    """Of 40 centroids, 16 at a time, as many as there are tiles of them, if so many programs can be spared."""
    split(number)
    tiles = launched(monkeypatch, decode_attention)
    state, (q, k, v) = filled(2, 4, 64, 40, free=4, shares=shares), (torch.randn(2, n, 64) for n in (16, 4, 4))
    state.parts = Centroids.empty(2, 4, 40, 64, 64).add(*torch.randn(2, 2, 4, 90, 64))
    exact = copied(state, torch.float64)
    given = q, k[:, :, None], v[:, :, None]
    want = reference.decode_step(*(t.double() for t in given), exact, make_spec(SCALE, correction="centroids"))
    got = operations.decode_step(*given, state, make_spec(SCALE, correction="centroids"))
    assert tiles[0][0].PARTS - tiles[0][0].SPLITS == pieces
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def sunk(case, size=1.0):
    """The case with sinks of both signs and -inf."""
    made = torch.linspace(-size, size, case.q.shape[1])
    made[0] = -torch.inf
    case.state.sink_logits = made.to(case.q.dtype)
    return case


@pytest.mark.parametrize(
    "groups, dim, dtype, splits", [(1, 80, torch.float16, 1), (3, 64, torch.float32, 4), (8, 96, torch.bfloat16, 4)]
)
def test_decode_attention_with_sinks(split, groups, dim, dtype, splits):
    split(splits)
    case = sunk(Case.make(2, 2, groups, dim, 26, dtype, (23, 0, 1, 14), (0, 0, 7, 70)))
    check(case, attention=True)
    check_vector(case)


@pytest.mark.parametrize("size, splits", [(1e4, 2), (60000.0, 1)])
def test_decode_attention_with_large_sinks_and_logits(split, size, splits):
    split(splits)
    case = sunk(Case.make(1, 2, 4, 64, 40, torch.float32, (39, 2), (0, 9), spread=6000.0), size)
    assert case.q.double().abs().max() * SCALE * 8 > 1e4
    check(case, attention=True)


@pytest.mark.parametrize("attention", [True, False], ids=["attention", "plain"])
def test_decode_attention_steps_share_a_workspace(split, attention):
    split(4)
    case = Case.make(2, 1, 4, 64, 30, torch.float32, (3, 20), (5, 0))
    case.collect(attention)
    workspace = case.workspace()
    for _ in range(5):
        again = case.copy()
        results = check(case, attention=attention, workspace=workspace)
        assert not workspace[3].any()
        for mine, fresh in zip(results, again.kernel(attention=attention)):
            assert (mine is None and fresh is None) or torch.equal(mine, fresh)
        case.k, case.v = case.v.clone(), case.k.clone()


@pytest.mark.parametrize("dtype, splits", [(torch.float16, 1), (torch.bfloat16, 2)], ids=str)
def test_decode_attention_of_wide_heads(split, dtype, splits):
    split(splits)
    case = sunk(Case.make(1, 1, 4, 512, 37, dtype, (33,), (40,)))
    check(case, attention=True)
    check(Case.make(1, 1, 2, 272, 20, dtype, (19,), (9,), exact=True), 3.0)
    check_vector(case, 20, (17,))
    check(Case.make(1, 1, 2, 512, 20, dtype, (19,), (9,), parts=6))


@pytest.mark.parametrize("sms", [1, 108, 132, 148, 304])
@pytest.mark.parametrize("pairs", [1, 2, 3, 8, 16, 32, 64, 100, 128, 256, 1024])
def test_num_programs_fills_one_wave(pairs, sms):
    last = 1
    for slots in range(16, 20000, 16):
        programs = num_programs(pairs, slots, sms)
        assert programs & (programs - 1) == 0 and programs >= last
        assert programs == 1 or (pairs * max(programs, 3) <= PER_SM * sms and slots >= 32 * programs)
        last = programs


def test_unequal_heads_have_several_programs_in_every_batch():
    """And as many as equal ones for as many slots, however many the longest has."""
    for batch, each, several in ((1, 1024, 16), (32, 1024, 4), (32, 128, 1)):
        keys, starts = torch.empty(batch, 8 * each, 64, device="meta"), torch.zeros(batch, 9, dtype=torch.int32)
        slots = Slots(keys, keys, starts[:, 1:], None, starts, limit=4 * each)
        assert decode_programs(8 * batch, slots, 132) == several


def test_num_programs_follows_the_device():
    """One sequence of Llama 3 8B over 1040 slots: A100, H200, B200, MI300X."""
    assert [num_programs(8, 1040, sms) for sms in (108, 132, 148, 304)] == [16, 16, 16, 32]
    assert [num_programs(64, 1040, sms) for sms in (108, 132, 148, 304)] == [2, 4, 4, 8]


def check_vector(case, approx_slots=70, approx_lengths=(70, 0, 33, 1), softcap=None, order=1, append=True):
    """`check` with tokens that have no value; of their slots, unused ones are NaN at impossible positions."""
    batch, heads, _, dim = case.state.exact.keys.shape
    dtype = case.q.dtype
    held = cycled(approx_lengths, batch, heads)
    unused = torch.arange(approx_slots) >= held[..., None]
    keys = torch.randn(batch, heads, approx_slots, dim).to(dtype)
    positions = torch.randint(0, 99, (batch, heads, approx_slots), dtype=torch.int32)
    keys[unused], positions[unused] = NAN, 2**30
    weight = (torch.randn(heads, dim, dim) / dim**0.5).to(dtype)
    angle = torch.arange(99)[:, None] * 100.0 ** -(torch.arange(dim // 2) / dim * 2)
    case.state.approx = Slots(keys, None, held.int(), positions)
    case.state.recovery = Recovery(weight, angle.cos(), angle.sin())
    workspace = case.workspace()
    check(case, softcap, order, append, workspace=workspace, slack_factor=3)
    assert not workspace[3].any()


# What is known of the evicted, or that there are tokens without values.
KNOWN = {"centroids": dict(parts=17, means=torch.bfloat16), "keys alone": {}, "moments": {}}


def check_known(case, known):
    check_vector(case) if known == "keys alone" else check(case)


@pytest.mark.parametrize("name, dtype, known", covering(SHAPES, DTYPES, KNOWN, together=1))
def test_shapes(name, dtype, known):
    *sizes, lengths, evicted = SHAPES[name]
    check_known(Case.make(*sizes, dtype, lengths, evicted, **KNOWN[known]), known)


@pytest.mark.parametrize("known", KNOWN)
def test_a_token_is_read_where_an_engine_has_it(known):
    """Queries, keys and values of a sequence lie one after the other in one tensor."""
    case = Case.make(3, 2, 3, 64, 24, torch.float16, (23, 0, 1, 14), (0, 7, 70), **KNOWN[known])
    parts = case.q, case.k[:, :, 0], case.v[:, :, 0]
    case.q, *pairs = torch.cat(parts, 1).split([6, 2, 2], 1)
    case.k, case.v = (part[:, :, None] for part in pairs)
    check_known(case, known)
    raises("q must be contiguous for each sequence", replace(case, q=case.q.repeat(1, 1, 2)[..., ::2]).kernel)


def wrong(**given):
    """A step of which a tensor is not as it should be; of centroids by their own name."""
    case = Case.make(1, 2, 4, 64, 20, torch.float32, (5, 6), (1, 1), parts=3)
    places = {"sink_logits": case.state, "centroids": case.state.parts, "keys": case.state.exact}
    for name, change in given.items():
        held = places[name]
        field = "keys" if name == "centroids" else name
        setattr(held, field, change(getattr(held, field)))
    return case


REFUSED = {
    "means in bfloat16 or float32 and the rest in float32": dict(centroids=torch.Tensor.half),
    r"centroids\.keys must have shape": dict(centroids=lambda keys: keys[..., :32].contiguous()),
    "sink_logits": dict(sink_logits=lambda none: torch.zeros(2)),
    "keys must be contiguous": dict(keys=lambda keys: keys.mT.contiguous().mT),
    "one dtype": dict(keys=torch.Tensor.half),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    raises(message, wrong(**REFUSED[message]).kernel)


def test_wide_heads_in_float32_are_refused():
    raises("head_dim up to 256 in float32", Case.make(1, 1, 1, 272, 20, torch.float32, (5,), (1,)).kernel)
