"""Selection and compaction against a plain Python model of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.budget import Budget
from fastkv.cache.layout import LayerConfig, Layout, spec_of
from fastkv.cache.selection import keep_best
from fastkv.config import Config
from fastkv.policies import KeyDiff, Streaming
from fastkv.reference import LayerState, Moments, Slots, Spec, compact, evict, protected, select

from .conftest import examples
from .states import make_signals


def expected_set(scores, positions, valid, guard, tokens):
    """Sort by (protected first, score descending, position ascending) and take the first."""
    order = sorted((i for i in range(len(scores)) if valid[i]), key=lambda i: (not guard[i], -scores[i], positions[i]))
    return set(order[:tokens])


@settings(max_examples=examples(300))
@given(data=st.data(), num=st.integers(1, 20), tokens=st.integers(1, 25))
def test_select_equals_sorting(data, num, tokens):
    def draw(element):
        return data.draw(st.lists(element, min_size=num, max_size=num))

    scores = draw(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.5, 1e30]))
    positions = data.draw(st.permutations(range(num)))
    valid, guard = draw(st.booleans()), draw(st.booleans())
    tensors = [torch.tensor([[row]]) for row in (scores, positions, valid, guard)]
    chosen = select(tensors[0], tensors[1].int(), tensors[2], tensors[3], tokens)
    expected = expected_set(scores, positions, valid, guard, tokens)
    assert int(chosen.counts) == len(expected)
    assert {i for i in range(num) if chosen.kept[0, 0, i]} == expected


def test_nan_and_infinity_are_ordered():
    scores = torch.tensor([[[float("nan"), 1.0, float("-inf"), float("inf")]]])
    positions = torch.arange(4, dtype=torch.int32)[None, None]
    every = torch.ones(1, 1, 4, dtype=torch.bool)
    assert select(scores, positions, every, ~every, 2).kept.tolist() == [[[False, True, False, True]]]


def test_rows_do_not_depend_on_their_neighbours():
    scores = torch.randn(3, 2, 30)
    positions = torch.arange(30, dtype=torch.int32).expand(3, 2, 30)
    valid = torch.rand(3, 2, 30) > 0.3
    scores[1] = float("nan")
    together = select(scores, positions, valid, ~valid, 9)
    for row in (0, 2):
        one = slice(row, row + 1)
        alone = select(scores[one], positions[one], valid[one], ~valid[one], 9)
        assert torch.equal(alone.kept, together.kept[one])


@settings(max_examples=examples(200))
@given(data=st.data(), used=st.integers(0, 8), new=st.integers(0, 8), tokens=st.integers(1, 10))
def test_compact_keeps_the_chosen_and_remembers_the_rest(data, used, new, tokens):
    slots = 12
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, slots, 4, generator=generator)
    values = torch.randn(1, 2, slots, 4, generator=generator)
    positions = torch.arange(slots, dtype=torch.int32).expand(1, 2, slots).clone()
    block = [torch.randn(1, 2, new, 4, generator=generator) for _ in range(2)]
    block_positions = torch.arange(used, used + new, dtype=torch.int32).expand(1, 2, new)
    valid = torch.rand(1, 2, used + new, generator=generator) > 0.3
    scores = torch.rand(1, 2, used + new, generator=generator)
    candidates = torch.cat([keys[:, :, :used], block[0]], 2), torch.cat([values[:, :, :used], block[1]], 2)
    where = torch.cat([positions[:, :, :used], block_positions], 2)
    chosen = select(scores, where, valid, ~valid, tokens)
    before = Moments.empty(1, 2, 4, 4).add(*[torch.randn(1, 2, 3, 4, generator=generator) for _ in range(2)])
    moments = Moments(*[t.clone() for t in before.tensors()])
    lengths = torch.zeros(1, 2, dtype=torch.int32)
    state = LayerState(Slots(keys, values, lengths, positions), torch.zeros(1, dtype=torch.int64), moments)
    compact(valid, chosen, (*block, block_positions), state, Spec(1.0))
    for head in range(2):
        kept = [i for i in range(used + new) if chosen.kept[0, head, i]]
        kept.sort(key=lambda i: int(where[0, head, i]))
        assert int(lengths[0, head]) == len(kept)
        assert positions[0, head, : len(kept)].tolist() == [int(where[0, head, i]) for i in kept]
        assert torch.equal(keys[0, head, : len(kept)], candidates[0][0, head, kept])
        assert torch.equal(values[0, head, : len(kept)], candidates[1][0, head, kept])
    expected = before.add(*candidates, valid & ~chosen.kept)
    assert torch.equal(moments.count, expected.count)
    torch.testing.assert_close(moments.cross, expected.cross, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moments.key_mean, expected.key_mean, atol=1e-6, rtol=1e-5)


def test_evict_loses_only_what_is_too_much():
    keys, values = torch.randn(2, 1, 8, 4), torch.randn(2, 1, 8, 4)
    positions = torch.tensor([[[7, 1, 5, 0, 6, 3, 2, 4]], [[0, 1, 2, 0, 0, 0, 0, 0]]], dtype=torch.int32)
    lengths, seen = torch.tensor([[8], [3]], dtype=torch.int32), torch.tensor([8, 3])
    scores = torch.tensor([[[0.0, 5, 2, 0, 9, 2, 1, 3]], [[1.0, 1, 1, 9, 9, 9, 9, 9]]])
    moments = Moments.empty(2, 1, 4, 4)
    gone = keys[0, 0, [2, 6, 5]].clone()  # position 7 and 0 are protected; of the equal scores, 3 stays before 5
    before = keys.clone()
    state = LayerState(Slots(keys, values, lengths, positions), seen, moments)
    evict(scores, None, state, Spec(1.0, tokens=6, sinks=1, recent=1))
    assert lengths.tolist() == [[6], [3]] and moments.count.tolist() == [[2], [0]]
    assert sorted(positions[0, 0, :6].tolist()) == [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(moments.key_mean[0, 0], gone[:2].mean(0))
    assert torch.equal(keys[1], before[1])


def test_protection_is_sinks_and_recent():
    positions = torch.tensor([[[9, 0, 4, 8, 1]], [[5, 0, 4, 2, 1]]], dtype=torch.int32)
    guard = protected(positions, torch.tensor([10, 6]), sinks=2, recent=2)
    assert guard.tolist() == [[[True, True, False, True, True]], [[True, True, True, False, True]]]


def kept_positions(policy, tokens, num=40, **budget):
    config = Config(policy, Budget(tokens=tokens, **budget))
    positions = torch.arange(num, dtype=torch.int32).expand(1, 1, num)
    keys = torch.randn(1, 1, num, 8)
    signals = make_signals(
        keys=keys,
        values=keys,
        positions=positions,
        valid=torch.ones(1, 1, num, dtype=torch.bool),
        moments=Moments.empty(1, 1, 8, 8, order=None),
        scale=1.0,
        layer=0,
        decoding=False,
    )
    layout = Layout((tokens,), config.correction)
    rule = LayerConfig(config, 0, layout, spec_of(config, layout, 1.0))
    kept = keep_best(signals, policy.score(signals), torch.tensor([num]), rule).kept[0, 0]
    return positions[0, 0][kept].tolist()


def test_streaming_is_sinks_plus_a_window():
    assert kept_positions(Streaming(), 10, sinks=3, recent=0) == [0, 1, 2, *range(33, 40)]


def test_a_sliding_window_share_reserves_recent_tokens():
    kept = kept_positions(KeyDiff(sliding_window=0.5), 20, sinks=0, recent=2)
    assert set(range(30, 40)) <= set(kept) and len(kept) == 20
    assert not set(range(30, 40)) <= set(kept_positions(KeyDiff(), 20, sinks=0, recent=2))
    everything = kept_positions(KeyDiff(sliding_window=1.0), 20, sinks=4, recent=2)
    assert everything == [0, 1, 2, 3, *range(24, 40)]
