"""Slots with a bias, an addend of their logits: e^bias = n counts as n copies of the slot, and moves with it."""

from functools import partial
from itertools import product

import pytest
import torch

from fastkv import ops
from fastkv.reference import FORMATS, Selection

from .models import raises
from .states import encoded, in_slab, make_spec, make_state, randn, shrink
from .test_ops import biased, step, vector

B, HKV, G, D, C = 2, 2, 3, 32, 9
HQ = HKV * G
LENGTHS = torch.tensor([[9, 4], [1, 7]], dtype=torch.int32)
COPIES = torch.tensor([[1, 3, 2, 5, 1, 4, 2, 1, 6], [2, 6, 1, 3, 4, 1, 5, 2, 1]])  # of slot i of each head
random = partial(randn, dtype=torch.float32)


def held(dtype=torch.float32, slots="model", attention=False, spare=0):
    """Heads that hold LENGTHS tokens with biases log(COPIES), and room for `spare` more."""
    keys, values = (random(B, HKV, C + spare, D, seed=seed, dtype=dtype) for seed in (1, 2))
    positions = torch.arange(C + spare, dtype=torch.int32).repeat(B, HKV, 1)
    made = make_state(keys, values, LENGTHS.clone(), positions, LENGTHS.amax(-1).long())
    made.exact.bias = COPIES.double().log().to(torch.promote_types(dtype, torch.float32)).repeat(B, 1, 1)
    made.exact.bias = torch.nn.functional.pad(made.exact.bias, (0, spare), value=7.0)
    made.exact.attention = torch.zeros(B, HKV, C + spare) if attention else None
    return encoded(made, slots)


def expected(q, state, more=None, softcap=None):
    """Attention of q [B, HQ, D] in float64 over every pair as often as it counts, then over `more` pairs; its lse."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    for b, head in product(range(B), range(HQ)):
        own = head // G
        num = int(LENGTHS[b, own])
        keys, values = (state.exact[name][b, own, :num].double() for name in ("keys", "values"))
        keys, values = (part.repeat_interleave(COPIES[own, :num], 0) for part in (keys, values))
        if more is not None:
            keys, values = (torch.cat([part, new[b, own].double()]) for part, new in zip((keys, values), more))
        logits = D**-0.5 * keys @ q[b, head].double()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        out[b, head], lse[b, head] = logits.softmax(0) @ values, logits.logsumexp(0)
    return out, lse


@pytest.mark.parametrize(
    "backend,slots,softcap,slab",
    [("triton", "model", 2.0, False), ("triton", "int8", None, True),
     ("reference", "model", 2.0, False), ("reference", "int4", None, True), ("cpu", "model", None, False),
     ("cpu", "model", None, True), ("cpu", "int8", None, False)],
)  # fmt: skip
@pytest.mark.parametrize("attention", [False, True])
def test_a_step_counts_a_slot_as_often_as_its_bias_says(backend, slots, softcap, slab, attention):
    state = held(slots=slots, attention=attention, spare=1)
    own = in_slab(state, [[C + 3, C + 1]] * B) if slab else state
    if slab and attention:
        own.exact.attention.zero_()
    q, k, v = random(B, HQ, D, seed=3), random(B, HKV, 1, D, seed=4), random(B, HKV, 1, D, seed=5)
    more = k, v
    if slots != "model":
        more = tuple(FORMATS[slots].decode(*FORMATS[slots].encode(part)) for part in more)
    want, lse = expected(q, state, more, softcap)
    out, retained, _ = ops.decode_step(q, k, v, own, make_spec(D**-0.5, softcap, backend=backend))
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(retained.double(), lse, atol=1e-5, rtol=1e-5)
    assert not own.exact["bias"].gather(-1, LENGTHS.long()[..., None]).any(), "a new token counts once"
    if attention:
        torch.testing.assert_close(own.exact["attention"].sum(-1), torch.ones(B, HKV), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("slab", [False, True])
def test_a_block_counts_what_came_before_it_as_often(backend, slab):
    state = held()
    state = in_slab(state, [[C + 3, C + 1]] * B) if slab else state
    q, k, v = random(B, HQ, 3, D, seed=3), random(B, HKV, 3, D, seed=4), random(B, HKV, 3, D, seed=5)
    spec = make_spec(D**-0.5, backend=backend)
    out, lse, _ = ops.prefill_attention(q, k, v, torch.ones(B, 3, dtype=torch.bool), state, spec)
    for at in range(3):
        want, total = expected(q[:, :, at], held(), (k[:, :, : at + 1], v[:, :, : at + 1]))
        torch.testing.assert_close(out[:, :, at].double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, :, at].double(), total, atol=1e-5, rtol=1e-5)


def test_biases_of_slots_that_are_decoded_first():
    """As kernels decode codes of 4 bits of wide heads, of which not all slots are in use."""
    keys, values = (random(1, HKV, 16, 128, seed=seed) for seed in (1, 2))
    positions = torch.arange(16, dtype=torch.int32).repeat(1, HKV, 1)
    state = make_state(keys, values, torch.tensor([[7, 8]], dtype=torch.int32), positions, torch.tensor([8]))
    state.exact.bias, state.exact.filled = random(1, HKV, 16, seed=3), 8
    state = encoded(state, "int4")
    block = random(1, HQ, 3, 128, seed=4), *(random(1, HKV, 3, 128, seed=seed) for seed in (5, 6))
    given = *block, torch.ones(1, 3, dtype=torch.bool), state
    found, want = (ops.prefill_attention(*given, make_spec(0.1, backend=name)) for name in ("triton", "reference"))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_observed_attention_is_that_of_as_many_copies(backend):
    q, keys = random(B, HQ, 4, D, seed=3, dtype=torch.float64), held(dtype=torch.float64).exact.keys
    positions = torch.arange(C, dtype=torch.int32).repeat(B, HKV, 1)
    valid = (positions < LENGTHS[..., None]) & (positions < C - 4)
    valid[:, :, -4:] = torch.tensor([[[0, 1, 1, 1]], [[1, 1, 1, 1]]], dtype=torch.bool)
    copies = COPIES.clone()
    copies[:, -4:], copies[0, 4] = 1, 5  # of a block there is one each
    given, bias = {"log_mass": random(B, HQ, 4, seed=6), "window": 3}, copies.double().log().repeat(B, 1, 1)
    one = [part.float() for part in (q, keys, bias)]
    found, _ = ops.observed_attention(*one[:2], positions, valid, D**-0.5, bias=one[2], backend=backend, **given)
    owner = torch.stack([torch.arange(C).repeat_interleave(number) for number in copies]).expand(B, -1, -1)
    many = keys.gather(2, owner[..., None].expand(-1, -1, -1, D)), positions.gather(2, owner), valid.gather(2, owner)
    each, _ = ops.observed_attention(q, *many, D**-0.5, backend="reference", **given)
    want = torch.zeros(B, HKV, C, dtype=torch.float64).scatter_add_(-1, owner, each)
    torch.testing.assert_close(found.double()[valid], want[valid], atol=1e-6, rtol=1e-5)


def biases(state):
    """{position: bias} of every head."""
    exact = state.exact
    lists = exact["positions"].tolist(), exact["bias"].tolist(), exact.lengths.tolist()
    return [[dict(zip(p[:n], x[:n])) for p, x, n in zip(*rows)] for rows in zip(*lists)]


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("slab", [False, True])
@pytest.mark.parametrize("slots", ["model", "int8"])
def test_a_bias_moves_with_its_slot(backend, slab, slots):
    state = held(slots=slots)
    before = biases(state)
    state = in_slab(state, [[C, C]] * B) if slab else state
    spec = make_spec(1.0, backend=backend, tokens=5, spare=4, sinks=1, recent=1)
    shrink(ops, random(B, HKV, C, seed=8), state, spec)
    assert state.exact.lengths.tolist() == [[5, 4], [1, 5]]
    for b, rows in enumerate(biases(state)):
        for head, row in enumerate(rows):
            assert row.items() <= before[b][head].items() and len(row) == int(state.exact.lengths[b, head])


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_a_block_comes_with_no_bias(backend):
    state, block = held(), (random(B, HKV, 2, D, seed=4), random(B, HKV, 2, D, seed=5))
    before = biases(state)
    positions = (LENGTHS.amax(-1)[:, None, None] + torch.arange(2)).expand(B, HKV, 2).int()
    valid = torch.cat([state.exact.valid, torch.ones(B, HKV, 2, dtype=torch.bool)], 2)
    kept = valid & (torch.arange(C + 2) % 2 == 0)
    ops.compact(valid, Selection(kept, kept.sum(-1)), (*block, positions), None, state, make_spec(1.0, backend=backend))
    for b, rows in enumerate(biases(state)):
        for head, row in enumerate(rows):
            want = before[b][head] | {int(LENGTHS[b].max()) + i: 0.0 for i in range(2)}
            assert len(row) == int(kept[b, head].sum()) and row.items() <= want.items()


def test_kernels_refuse_it_beside_tokens_without_values():
    (q, *token, state, spec), _ = step(biased(vector()), "triton", correction="vector")
    raises("adds no bias beside tokens without values", ops.decode_step, q, *token, state, spec)
