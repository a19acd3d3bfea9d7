"""GRKV: values of what stays, refitted to attention before the eviction; against plain loops in float64."""

import math
from dataclasses import replace

import pytest
import torch

import fastkv
from fastkv import Budget, FastKVError
from fastkv.corrections import get
from fastkv.corrections.ridge import Ridge
from fastkv.policies import GRKV, SnapKV

from .models import build, prompt
from .test_module import HKV, HQ, B, D, fresh, tokens

GROUP, RIDGE = HQ // HKV, Ridge()


def filled(policy, rows, sink_logits=None, softcap=None, block=None, mask=None, heads="uniform", **options):
    """A layer that has read q, k, v [B, H, T, D]: 20 of its tokens stay, 2 sinks and 4 recent ones among them."""
    budget = Budget(tokens=20, sinks=2, recent=4, heads=heads)
    module = fresh(policy, budget, sink_logits=sink_logits, softcap=softcap, prefill_block=block, **options)
    module(*rows, mask)
    return module


def held(module, row, head):
    """{position: value} of the slots in use."""
    exact = module.state.exact
    num = int(exact.lengths[row, head])
    return dict(zip(exact["positions"][row, head, :num].tolist(), exact["values"][row, head, :num].clone()))


def weights(query, keys, at, sink, softcap):
    """Attention of a query at position `at` over {position: key}, as {position: weight}."""
    logits = {i: float(query @ k) * D**-0.5 for i, k in keys.items() if i <= at}
    if softcap is not None:
        logits = {i: softcap * math.tanh(x / softcap) for i, x in logits.items()}
    total = sum(map(math.exp, logits.values())) + (0 if sink is None else math.exp(sink))
    return {i: math.exp(x) / total for i, x in logits.items()}


def brute(q, k, values, kept, anchors, sinks, softcap, row, head, first=0):
    """{position: value} after one ridge step of one head, whose candidates have `values`; queries from `first` on."""
    num = k.shape[2]
    keys = {i: k[row, head, i] for i in values}
    fixed = {0, 1, *range(num - 4, num), *anchors}
    free = [i for i in kept if i not in fixed]
    rows, errors = [], []
    for group in range(GROUP):
        sink = None if sinks is None else float(sinks[head * GROUP + group])
        for at in range(max(num - 32, first), num):
            query = q[row, head * GROUP + group, at]
            full = weights(query, keys, at, sink, softcap)
            rest = weights(query, {i: keys[i] for i in kept}, at, sink, softcap)
            errors.append(sum((w - rest.get(i, 0.0)) * values[i] for i, w in full.items()))
            rows.append(torch.tensor([rest.get(i, 0.0) for i in free], dtype=k.dtype))
    a, e = torch.stack(rows), torch.stack(errors)
    change = torch.linalg.solve(a.T @ a + RIDGE.penalty * torch.eye(len(free), dtype=a.dtype), a.T @ e)
    return {i: values[i] + (change[free.index(i)] if i in free else 0) for i in kept}


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
@pytest.mark.parametrize("sinks,softcap", [(False, None), (True, 3.0)], ids=["plain", "sinks and softcap"])
def test_values_are_those_of_ridge_regression(sinks, softcap, heads):
    rows = tokens(40, dtype=torch.float64)
    sink_logits = torch.randn(HQ, dtype=torch.float64) if sinks else None
    plain = filled(SnapKV(), rows, sink_logits, softcap, heads=heads)
    merged = filled(GRKV(), rows, sink_logits, softcap, heads=heads)
    assert plain.nbytes() == merged.nbytes()
    for row in range(B):
        for head in range(HKV):
            before, after = held(plain, row, head), held(merged, row, head)
            assert before.keys() == after.keys(), "the same tokens stay"
            same = {i for i in before if torch.equal(before[i], after[i])}
            anchors = same - {0, 1, *range(36, 40)}
            assert len(anchors) <= 2 and len(same) < len(before)
            values = dict(enumerate(rows[2][row, head]))
            expected = brute(*rows[:2], values, sorted(before), anchors, sink_logits, softcap, row, head)
            for i in expected:
                torch.testing.assert_close(after[i], expected[i], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_tokens_of_earlier_blocks_are_refitted_again(heads):
    rows = tokens(40, dtype=torch.float64)
    module = filled(GRKV(), [part[:, :, :30] for part in rows], heads=heads)
    before = {(row, head): held(module, row, head) for row in range(B) for head in range(HKV)}
    module(*(part[:, :, 30:] for part in rows))
    for (row, head), values in before.items():
        values = values | {i: rows[2][row, head, i] for i in range(30, 40)}
        after = held(module, row, head)
        same = {i for i in after if torch.equal(after[i], values[i])}
        assert any(i < 30 for i in after.keys() - same)
        anchors = same - {0, 1, *range(36, 40)}
        expected = brute(*rows[:2], values, sorted(after), anchors, None, None, row, head, first=30)
        for i in expected:
            torch.testing.assert_close(after[i], expected[i], rtol=1e-9, atol=1e-9)


def test_the_objective_falls_and_a_large_penalty_changes_nothing():
    values, free = torch.randn(2, 3, 9, 5), torch.rand(2, 3, 9) < 0.6
    full, rest = torch.randn(2, 2, 3, 7, 9).softmax(-1)
    after = RIDGE.refitted(values, full, rest, free)
    assert torch.equal(after[~free], values[~free])
    error = [(rest @ new - full @ values).square().sum((-1, -2)) for new in (values, after)]
    assert (error[1] + RIDGE.penalty * (after - values).square().sum((-1, -2)) <= error[0] + 1e-5).all()
    torch.testing.assert_close(replace(RIDGE, penalty=1e9).refitted(values, full, rest, free), values)


def test_enough_free_tokens_repeat_full_attention():
    values = torch.randn(1, 1, 20, 4, dtype=torch.float64)
    full, rest = torch.randn(2, 1, 1, 6, 20, dtype=torch.float64).softmax(-1)
    exact = replace(RIDGE, penalty=1e-12).refitted(values, full, rest, torch.ones(1, 1, 20, dtype=torch.bool))
    torch.testing.assert_close(rest @ exact, full @ values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [None, 16], ids=["whole", "blocks"])
def test_a_padded_row_is_the_row_alone(block):
    model, (ids, mask) = build(), prompt(2, 50, (0, 19))
    fastkv.patch(model, "grkv", Budget(tokens=20, sinks=2, recent=4), prefill_block=block)
    together = model(ids, attention_mask=mask).past_key_values
    start = 19 if block is None else 16  # where the first of its blocks starts
    alone = model(ids[1:, start:], attention_mask=mask[1:, start:]).past_key_values
    for layer in range(4):
        mine, theirs = (cache.layers[layer].state.exact for cache in (together, alone))
        assert torch.equal(mine["positions"][1], theirs["positions"][0])
        torch.testing.assert_close(mine["values"][1], theirs["values"][0], rtol=1e-4, atol=1e-4)


def test_any_policy_merges_and_latents_do_not():
    options = {"correction": "ridge", "output": torch.randn(24, HQ * D)}
    merged, plain = (filled("criticalkv", tokens(40), **{**options, "correction": c}) for c in ("ridge", "none"))
    assert merged.config.correction is get("ridge") and plain.config.correction is get("none")
    model = fastkv.patch(build("deepseek_v3"), "grkv", Budget(tokens=20, sinks=2, recent=4))
    with pytest.raises(FastKVError, match="keeps inside its keys"):
        model(prompt()[0])


def test_defaults():
    assert (GRKV().window, GRKV().pool, GRKV().correction) == (32, 7, "ridge")
    assert (RIDGE.queries, RIDGE.penalty, RIDGE.anchors) == (32, 0.01, 0.1)
