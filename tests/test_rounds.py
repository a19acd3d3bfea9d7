"""Prompts that are evicted from in rounds: against one token at a time (MomentKV, Alg. 1), and what must not matter."""

import pytest
import torch

import fastkv
from fastkv.cache.layout import LayerConfig, LayerPlan, Layout, spec_of
from fastkv.cache.selection import keep_best, keep_in_rounds, protected
from fastkv.config import Config
from fastkv.corrections import get
from fastkv.policies import MomentKV
from fastkv.reference import Moments

from .models import build, generate, prompt
from .states import make_signals
from .test_policy_matrix import EVERY, TOKENS, check, small

HEADS, NUM, KEEP, DIM, SCALE = 2, 40, 12, 6, 0.4


def made(pads=(0, 7)):
    """Candidates of two rows, the second padded, whose values depend on their keys; and the rule of the layer."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, HEADS, NUM, DIM, generator=generator)
    values = keys @ torch.randn(DIM, DIM, generator=generator) + torch.randn(2, HEADS, NUM, DIM, generator=generator)
    valid = torch.arange(NUM) >= torch.tensor(pads)[:, None, None].expand(-1, HEADS, 1)
    attention, positions = torch.rand(2, HEADS, NUM, generator=generator), (valid.cumsum(-1) - 1).int()
    given = {"positions": positions, "moments": Moments.empty(2, HEADS, DIM, DIM), "attention": attention}
    return make_signals(SCALE, keys=keys, values=values + 2, valid=valid, **given), valid[:, 0].sum(-1)


def rule_of(policy, tokens=(KEEP, KEEP), heads="uniform"):
    budget = fastkv.Budget(tokens=KEEP, sinks=1, recent=2, heads=heads)
    config = Config.make(policy, budget, None, 1, "moments", "reference", None)
    layout = Layout(tokens=tokens, correction=get("moments"), order=1, adaptive=heads == "adaptive")
    return LayerConfig(LayerPlan(config), layout, spec_of(config, layout, SCALE))


def one_by_one(signals, seen, row, head, tokens):
    """Alg. 1 with the attention of the prompt, in float64: the kept candidates of a head."""
    keys, values = signals.keys[row, head].double(), signals.values[row, head].double()
    index = [i for i in range(NUM) if signals.valid[row, head, i]]
    position = signals.positions[row, head].tolist()
    free = [i for i in index if 1 <= position[i] < int(seen[row]) - 2]
    gone = []
    while len(index) - len(gone) > tokens:
        residual = values
        if gone:
            mean_k, mean_v = keys[gone].mean(0), values[gone].mean(0)
            cross = (values[gone] - mean_v).T @ (keys[gone] - mean_k)
            residual = values - mean_v - keys @ cross.T * (SCALE / len(gone))
        score = signals.attention[row, head].double() * residual.norm(dim=-1)
        gone.append(min((i for i in free if i not in gone), key=lambda i: float(score[i])))
    return set(index) - set(gone)


def sets(kept):
    return [[{i for i in range(NUM) if kept[row, head, i]} for head in range(HEADS)] for row in range(len(kept))]


@pytest.mark.parametrize("tokens", [(KEEP, KEEP), (9, 15)], ids=["equal", "unequal"])
def test_as_many_rounds_as_tokens_leave_are_one_token_at_a_time(tokens):
    policy, (signals, seen) = MomentKV(chunk=1, rounds=NUM), made()
    rule = rule_of(policy, tokens)
    guard = protected(signals, seen, rule)
    kept = keep_in_rounds(signals, policy.score(signals), guard, rule).kept
    wanted = [[one_by_one(signals, seen, row, head, tokens[head]) for head in range(HEADS)] for row in range(2)]
    assert sets(kept) == wanted
    assert sets(keep_best(signals, policy.score(signals), guard, rule).kept) != wanted
    assert (signals.moments.count == 0).all()


@pytest.mark.parametrize("rounds, heads", [(2, "adaptive"), (3, "uniform"), (7, "adaptive")])
def test_rounds_keep_the_budget_and_each_row_for_itself(heads, rounds):
    policy, (signals, seen) = MomentKV(chunk=2, rounds=rounds), made()
    rule = rule_of(policy, heads=heads)
    kept = keep_in_rounds(signals, policy.score(signals), protected(signals, seen, rule), rule).kept
    assert (kept & ~signals.valid).sum() == 0
    assert (kept.sum((1, 2)) == HEADS * KEEP).all()
    if heads == "uniform":
        assert (kept.sum(-1) == KEEP).all()
    padding = 7
    own, last = made()[0], slice(1, 2)
    for name in ("keys", "values", "positions", "valid", "attention"):
        object.__setattr__(own, name, getattr(own, name)[last, :, padding:])
    object.__setattr__(own, "moments", Moments.empty(1, HEADS, DIM, DIM))
    alone = keep_in_rounds(own, policy.score(own), protected(own, seen[last], rule), rule).kept
    assert torch.equal(alone, kept[last, :, padding:])


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_a_model_reads_in_rounds_and_decodes(heads):
    """Same bytes, all tokens accounted for, and something else is kept than after one round."""
    model, (ids, mask) = build(), prompt()
    kept = []
    for rounds in (1, 4):
        fastkv.patch(model, MomentKV(rounds=rounds), small(heads=heads), evict_every=EVERY)
        cache = model(ids, attention_mask=mask).past_key_values
        kept.append([layer.state.exact["positions"].sort(-1).values for layer in cache.layers])
        sizes = [sum(slots.lengths.sum() for slots in layer.state.tiers.values()) for layer in cache.layers]
        assert len({int(size) for size in sizes}) == 1
        cache = generate(model, ids, mask, new=10, return_dict_in_generate=True).past_key_values
        check(cache, mask.sum(-1) + 9)
    assert TOKENS < ids.shape[1]
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*kept))


def test_blocks_are_not_read_in_rounds():
    model, (ids, mask) = build(), prompt()
    states = []
    for rounds in (1, 5):
        fastkv.patch(model, MomentKV(rounds=rounds), small(), prefill_block=16, evict_every=EVERY)
        states.append(model(ids, attention_mask=mask).past_key_values.layers[1].state)
    assert torch.equal(states[0].exact["keys"], states[1].exact["keys"])
    assert torch.equal(states[0].moments.key_mean, states[1].moments.key_mean)
