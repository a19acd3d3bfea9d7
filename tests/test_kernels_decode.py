"""decode_attention and vector_decode_attention against the fp64 reference, in the interpreter or on a GPU.

The limit is that of flash-attention: twice the error of the same computation in torch in the dtype of the inputs, plus
a little. The kernels also round the weights to that dtype, and the interpreter truncates where hardware rounds to
nearest bf16, so the little is 1e-6, 2e-4 and 8e-3 (bf16) of the largest value; three times that where the values are
themselves recovered in that dtype (vector_decode_attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastkv import FastKVError, reference
from fastkv.kernels import _launch, decode_attention, vector_decode
from fastkv.kernels._launch import Workspace, num_splits
from fastkv.reference import Centroids, Moments
from fastkv.reference.attention import vector_decode_attention

from .conftest import examples
from .pairwise import covering

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 8e-3}
SCALE = 0.17
NAN = float("nan")


@dataclass
class Case:
    """One problem. Slots that hold nothing, and everything the kernels must write, are NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    seen: Tensor
    moments: Moments
    k: Tensor
    v: Tensor
    matrix: Tensor
    centroids: Centroids | None = None  # of the evicted tokens, in place of the moments

    @classmethod
    def make(
        cls,
        batch,
        heads,
        groups,
        dim,
        slots,
        dtype,
        lengths,
        evicted,
        *,
        spread=1.0,
        exact=False,
        seed=0,
        cosh=False,
        parts=None,
    ):
        """lengths, evicted: per (sequence, head), cycled. exact: hand the kernel the fp32 cross moment. cosh: the mass
        of the moments. parts: how many centroids there are."""
        source = torch.Generator().manual_seed(seed)

        def normal(*shape, to=dtype):
            return torch.randn(*shape, generator=source).to(DEVICE, to)

        def cycled(numbers):
            return torch.tensor([numbers[i % len(numbers)] for i in range(batch * heads)]).view(batch, heads).to(DEVICE)

        held, count = cycled(lengths), cycled(evicted)
        keys, values = normal(batch, heads, slots, dim), normal(batch, heads, slots, dim)
        unused = torch.arange(slots, device=DEVICE) >= held[..., None]
        keys[unused], values[unused] = NAN, NAN
        gone = max(max(evicted), 1)
        inside = torch.arange(gone, device=DEVICE) < count[..., None]
        old = normal(batch, heads, gone, dim, to=torch.float32), normal(batch, heads, gone, dim, to=torch.float32)
        old = (old[0] + 0.3, old[1] - old[0], inside)
        moments = Moments.empty(batch, heads, dim, dim, DEVICE, spread=cosh).add(*old)
        slope = (moments.cross / moments.count.clamp(min=1)[..., None, None]).to(dtype)
        exact = exact or dtype == torch.float32
        if not exact:  # what the kernel is given is the truth
            moments.cross = slope.float() * moments.count[..., None, None]
        return cls(
            q=normal(batch, heads * groups, dim, to=torch.float32).mul(spread).to(dtype),
            keys=keys,
            values=values,
            positions=torch.full((batch, heads, slots), -7, dtype=torch.int32, device=DEVICE),
            lengths=held.int(),
            seen=torch.full((batch,), 1000, device=DEVICE),
            moments=moments,
            k=normal(batch, heads, 1, dim),
            v=normal(batch, heads, 1, dim),
            matrix=moments.cross if exact else slope,
            centroids=None if parts is None else Centroids.empty(batch, heads, parts, dim, dim, DEVICE).add(*old),
        )

    def copy(self):
        return replace(self, **{n: t.clone() for n, t in vars(self).items() if isinstance(t, Tensor)})

    def collected(self):
        return torch.full(self.keys.shape[:3], 0.25, device=DEVICE)

    def reference(self, dtype, softcap, order, append, attention):
        """The specification in `dtype`: out, lse_retained, lse_evicted, attention; and the state after it."""
        case = self.copy()
        m, centroids = self.moments, self.centroids
        parts, spread = [m.key_mean, m.value_mean, m.cross], m.spread
        if dtype == torch.float64:
            case.q, case.keys, case.values = case.q.double(), case.keys.double(), case.values.double()
            parts, spread = [t.double() for t in parts], None if spread is None else spread.double()
            centroids = None if centroids is None else Centroids(*(t.double() for t in centroids.tensors()))
        moments = Moments(m.count, *parts, spread=spread)
        if append:
            position = case.lengths + m.count
            reference.append(
                case.keys, case.values, case.positions, case.lengths, case.k, case.v, torch.zeros_like(case.seen)
            )
            case.positions.scatter_(2, self.lengths.long()[..., None], position.int()[..., None])
            case.seen += 1
        total = self.collected().to(case.q.dtype if dtype == torch.float64 else torch.float32) if attention else None
        results = reference.decode_attention(
            case.q, case.keys, case.values, case.lengths, moments, SCALE, softcap, order=order, attention=total,
            mass="jensen" if spread is None else "cosh", centroids=centroids,
        )  # fmt: skip
        return (*results, total), case

    def kernel(self, softcap=None, order=1, append=True, attention=False, workspace=None):
        """The kernel on this state, which it changes; outputs start as NaN."""
        total = self.collected() if attention else None
        out = torch.full_like(self.q, NAN)
        lse = [torch.full(self.q.shape[:2], NAN, device=DEVICE) for _ in range(2)]
        decode_attention.decode_attention(
            q=self.q,
            keys=self.keys,
            values=self.values,
            lengths=self.lengths,
            count=self.moments.count,
            key_mean=self.moments.key_mean,
            value_mean=self.moments.value_mean,
            matrix=self.matrix,
            scale=SCALE,
            softcap=softcap,
            order=order,
            spread=self.moments.spread,
            centroids=self.centroids,
            attention=total,
            out=out,
            lse_retained=lse[0],
            lse_evicted=lse[1],
            workspace=workspace or self.workspace(),
            append=(self.k, self.v, self.positions, self.seen) if append else None,
        )
        return out, *lse, total

    def workspace(self, slots=0, sets=1):
        """Scratch full of NaN."""
        batch, heads, own, dim = self.keys.shape
        work = Workspace.allocate(batch, heads, self.q.shape[1] // heads, max(own, slots), dim, DEVICE, sets=sets)
        for tensor in (work.accs, work.tops, work.totals, work.logits):
            tensor.fill_(NAN)
        return work


def assert_close(results, truth, same_dtype, dtype, slack_factor=1):
    """Same infinities, no NaN, and error within twice that of torch in `dtype` plus the slack explained above."""
    for name, got, want, usual in zip(("out", "lse_retained", "lse_evicted", "attention"), results, truth, same_dtype):
        if want is None:
            continue
        assert torch.equal(got.isinf(), want.isinf()), name
        finite = ~want.isinf()
        got, want, usual = (t[finite].double() for t in (got, want, usual))
        if not want.numel():
            continue
        slack = SLACK[dtype] * slack_factor if name == "out" else SLACK[torch.float32]
        slack *= max(1.0, want.abs().max().item())
        error, limit = (got - want).abs().max().item(), 2 * (usual - want).abs().max().item() + slack
        assert error <= limit, f"{name}: error {error:.2e} > {limit:.2e}"


def assert_same_state(case, expected):
    """The stored tokens, their positions and the sizes are equal bit for bit, unused slots included."""
    for name in ("keys", "values"):
        got, want = getattr(case, name), getattr(expected, name).to(case.keys.dtype)
        assert torch.equal(got.nan_to_num(1e4), want.nan_to_num(1e4)), name
    for name in ("positions", "lengths", "seen"):
        assert torch.equal(getattr(case, name), getattr(expected, name)), name


def check(case, softcap=None, order=1, append=True, attention=False, workspace=None):
    dtype = case.q.dtype
    truth, state = case.reference(torch.float64, softcap, order, append, attention)
    usual, _ = case.reference(dtype, softcap, order, append, attention)
    results = case.kernel(softcap, order, append, attention, workspace)
    assert_close(results, truth, usual, dtype)
    assert_same_state(case, state)
    return results


@pytest.fixture
def split(monkeypatch):
    """Call it to fix the number of splits, which is otherwise a function of the shape."""

    def fix(number):
        for module in (_launch, decode_attention, vector_decode):
            monkeypatch.setattr(module, "num_splits", lambda pairs, slots: number)

    return fix


SHAPES = {  # batch, KV heads, groups, head_dim, slots, lengths, evicted
    "llama": (1, 2, 4, 128, 150, (149, 97), (300, 5)),
    "gemma": (1, 1, 2, 256, 61, (33,), (40,)),
    "mha80": (1, 1, 1, 80, 70, (69,), (9,)),
    "group3-96": (2, 1, 3, 96, 40, (31, 7), (1, 2)),
    "group7": (1, 1, 7, 64, 100, (99,), (64,)),
    "group8": (1, 2, 8, 64, 33, (1, 32), (0, 3)),
    "group16": (1, 1, 16, 128, 50, (17,), (30,)),
    "few-and-none": (2, 2, 4, 64, 20, (0, 1, 5, 19), (0, 4, 0, 1)),
    "fused": (1, 1, 4, 128, 48, (47,), (6,)),
}


@pytest.mark.parametrize("name, dtype", covering(SHAPES, [torch.float32, torch.float16, torch.bfloat16], together=1))
def test_decode_attention_shapes(name, dtype):
    shape = SHAPES[name]
    batch, heads, groups, dim, slots, lengths, evicted = shape
    check(Case.make(batch, heads, groups, dim, slots, dtype, lengths, evicted))


@pytest.mark.parametrize(
    "order, softcap, attention, append, splits",
    covering([None, 0, 1], [None, 3.0], [True, False], [True, False], [1, 4]),
)
def test_decode_attention_variants(split, order, softcap, attention, append, splits):
    split(splits)
    case = Case.make(2, 2, 3, 64, 24, torch.float32, (23, 0, 1, 14), (0, 0, 7, 70))
    check(case, softcap, order, append, attention)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decode_attention_reads_the_exact_cross_moment(split, dtype, splits):
    split(splits)
    check(Case.make(1, 2, 4, 80, 30, dtype, (20, 3), (50, 0), exact=True))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decode_attention_large_logits(split, dtype, splits):
    split(splits)
    case = Case.make(1, 2, 4, 64, 40, dtype, (39, 2), (0, 9), spread=6000.0)
    assert case.q.double().abs().max() * SCALE * 8 > 1e4
    check(case, attention=True)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("order", [None, 1])
def test_decode_attention_of_nothing_is_zero(split, order, splits):
    split(splits)
    case = Case.make(1, 2, 4, 64, 20, torch.float16, (0, 0), (0, 0))
    out, lse_retained, lse_evicted, total = check(case, order=order, append=False, attention=True)
    assert (out == 0).all() and (lse_retained == -torch.inf).all() and (lse_evicted == -torch.inf).all()
    assert (total == 0.25).all()


@pytest.mark.parametrize("attention", [True, False], ids=["attention", "plain"])
def test_decode_attention_steps_share_a_workspace(split, attention):
    split(4)
    case = Case.make(2, 1, 4, 64, 30, torch.float32, (3, 20), (5, 0))
    workspace = case.workspace()
    for _ in range(5):
        again = case.copy()
        results = check(case, attention=attention, workspace=workspace)
        assert (workspace.tickets == 0).all()
        for mine, fresh in zip(results, again.kernel(attention=attention)):
            assert (mine is None and fresh is None) or torch.equal(mine, fresh)
        case.k, case.v = case.v.clone(), case.k.clone()


def test_decode_attention_slot_order_does_not_matter():
    case = Case.make(1, 1, 4, 64, 90, torch.float32, (90,), (12,))
    shuffled = case.copy()
    order = torch.randperm(90, device=DEVICE)
    shuffled.keys, shuffled.values = case.keys[:, :, order].contiguous(), case.values[:, :, order].contiguous()
    for one, other in zip(case.kernel(append=False), shuffled.kernel(append=False)):
        assert one is None or torch.allclose(one, other, atol=1e-6)


def test_decode_attention_refuses():
    case = Case.make(1, 2, 4, 64, 20, torch.float32, (5, 6), (1, 1))
    case.keys = case.keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(FastKVError, match="keys must be contiguous"):
        case.kernel()
    case.keys = case.keys.to(torch.float16).contiguous()
    with pytest.raises(FastKVError, match="one dtype"):
        case.kernel()


@pytest.mark.parametrize("pairs", [1, 2, 3, 8, 16, 32, 64, 100, 128, 256, 1024])
def test_num_splits_fills_one_wave(pairs):
    last = 1
    for slots in range(16, 20000, 16):
        splits = num_splits(pairs, slots)
        assert splits & (splits - 1) == 0 and splits >= last
        assert splits == 1 or (pairs * (splits + 1) <= _launch.CTAS and slots >= 32 * splits)
        last = splits


small = dict(
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    groups=st.integers(1, 16),
    dim=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    evicted=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    order=st.sampled_from([None, 0, 1]),
    append=st.booleans(),
    splits=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=examples(200), deadline=None)
@given(**small, attention=st.booleans(), spread=st.sampled_from([0.0, 1.0, 30.0]))
def test_decode_attention_property(
    shape, groups, dim, dtype, lengths, evicted, softcap, order, append, splits, seed, attention, spread
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (_launch, decode_attention):
            patch.setattr(module, "num_splits", lambda pairs, slots: splits)
        case = Case.make(*shape, groups, dim, 24, dtype, lengths, evicted, spread=spread, seed=seed)
        check(case, softcap, order, append, attention)


def check_vector(case, approx_slots, approx_lengths, softcap, order, append):
    """vector_decode_attention against its twin, with unused approximated slots NaN at impossible positions."""
    batch, heads, _, dim = case.keys.shape
    dtype = case.q.dtype
    approx = torch.tensor([approx_lengths[i % len(approx_lengths)] for i in range(batch * heads)], device=DEVICE)
    approx = approx.view(batch, heads)
    unused = torch.arange(approx_slots, device=DEVICE) >= approx[..., None]
    approx_keys = torch.randn(batch, heads, approx_slots, dim, device=DEVICE).to(dtype)
    approx_positions = torch.randint(0, 99, (batch, heads, approx_slots), device=DEVICE, dtype=torch.int32)
    approx_keys[unused], approx_positions[unused] = NAN, 2**30
    weight = (torch.randn(heads, dim, dim, device=DEVICE) / dim**0.5).to(dtype)
    angle = torch.arange(99, device=DEVICE)[:, None] * 100.0 ** -(torch.arange(dim // 2, device=DEVICE) / dim * 2)
    cos, sin = angle.cos(), angle.sin()

    def specified(to):
        _, state = case.reference(to, softcap, order, append, False)
        m = case.moments
        parts = [t.to(to) if to == torch.float64 else t for t in (m.key_mean, m.value_mean, m.cross)]
        extra = (approx_keys.to(to), approx_positions, approx, weight.to(to), cos, sin)
        state.positions = torch.where(
            state.positions == -7, state.positions, state.positions + approx[..., None].int()
        )  # fmt: skip
        return vector_decode_attention(
            state.q, state.keys, state.values, state.lengths, *extra, Moments(m.count, *parts), SCALE, softcap,
            order=order,
        ), state  # fmt: skip

    truth, state = specified(torch.float64)
    usual, _ = specified(dtype)
    workspace = case.workspace(approx_slots, sets=2)
    out = torch.full_like(case.q, NAN)
    m = case.moments
    results = vector_decode.vector_decode_attention(
        q=case.q, keys=case.keys, values=case.values, lengths=case.lengths, approx_keys=approx_keys,
        approx_positions=approx_positions, approx_lengths=approx.int(), weight=weight, cos=cos, sin=sin, count=m.count,
        key_mean=m.key_mean, value_mean=m.value_mean, matrix=case.matrix, scale=SCALE, softcap=softcap, order=order,
        out=out, workspace=workspace, append=(case.k, case.v, case.positions, case.seen) if append else None,
    )  # fmt: skip
    assert (workspace.tickets == 0).all()
    assert_close(results, truth, usual, dtype, slack_factor=3)
    assert_same_state(case, state)


@pytest.mark.parametrize("name, dtype", covering(SHAPES, [torch.float32, torch.float16, torch.bfloat16], together=1))
def test_vector_decode_shapes(name, dtype):
    shape = SHAPES[name]
    batch, heads, groups, dim, slots, lengths, evicted = shape
    case = Case.make(batch, heads, groups, dim, slots, dtype, lengths, evicted)
    check_vector(case, 70, (70, 0, 33, 1), None, 1, True)


@settings(max_examples=examples(200), deadline=None)
@given(**small, approx_lengths=st.lists(st.integers(0, 24), min_size=1, max_size=4))
def test_vector_decode_property(
    shape, groups, dim, dtype, lengths, evicted, softcap, order, append, splits, seed, approx_lengths
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (_launch, vector_decode):
            patch.setattr(module, "num_splits", lambda pairs, slots: splits)
        case = Case.make(*shape, groups, dim, 24, dtype, lengths, evicted, seed=seed)
        check_vector(case, 24, approx_lengths, softcap, order, append)
