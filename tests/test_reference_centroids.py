"""Centroids of the evicted set: what merging conserves, which merges happen, and what the estimate guarantees."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv.reference import Centroids, Moments, centroid_estimate, centroids, moment_estimate

from .models import raises
from .states import attention, randn
from .test_reference import pairs

F64 = torch.float64
queries = partial(randn, 2, 6, 4, 8)


def empty(num, heads=3):
    return Centroids.empty(2, heads, num, 8, 6, dtype=F64)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_as_many_centroids_as_tokens_are_exact(softcap):
    keys, values = pairs(13)
    state = empty(16).add(keys[:, :, :5], values[:, :, :5]).add(keys[:, :, 5:], values[:, :, 5:])
    want = attention(queries(), keys, values, 0.3, softcap=softcap)[:2]
    torch.testing.assert_close(centroid_estimate(queries(), state, 0.3, softcap), want)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_centroid_is_the_mean(softcap):
    keys, values = pairs(40)
    mean = Moments.empty(2, 3, 8, 6, dtype=F64, order=0).add(keys, values)
    value, mass = moment_estimate(queries(), mean, 0.3, softcap, order=0)
    logit = 0.3 * (queries() * mean.key_mean.repeat_interleave(2, 1)[:, :, None]).sum(-1)
    slope = 1 if softcap is None else 1 - torch.tanh(logit / softcap) ** 2
    sigma = (keys - keys.mean(2, keepdim=True)).square().mean((2, 3)).sqrt().repeat_interleave(2, 1)[..., None]
    mass = mass + (0.3 * slope * queries().norm(dim=-1) * sigma).cosh().log()
    torch.testing.assert_close(centroid_estimate(queries(), empty(1).add(keys, values), 0.3, softcap), (value, mass))


def symmetric(num, seed, axis):
    """Keys [1, 1, 2 num, 4] in pairs m + d, m - d, with unequal lengths; all d on one axis or in all directions."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(4, generator=generator, dtype=F64)
    away = torch.randn(num, 4, generator=generator, dtype=F64).exp() * torch.randint(0, 2, (num, 4)).mul(2).sub(1)
    if axis:
        away = away * torch.tensor([1.0, 0, 0, 0], dtype=F64)
    return torch.cat([center + away, center - away])[None, None]


def one_dimensional(keys, scale):
    """log masses where the spread says all there is, along the first axis: Jensen's, of one centroid, and the truth."""
    keys, q = keys[..., :1], torch.ones(1, 2, 1, 1, dtype=F64)
    jensen = moment_estimate(q, Moments.empty(1, 1, 1, 1, dtype=F64).add(keys, keys), scale)[1]
    cosh = centroid_estimate(q, Centroids.empty(1, 1, 1, 1, 1, dtype=F64).add(keys, keys), scale)[1]
    return jensen, cosh, attention(q, keys, keys, scale)[1]


@given(num=st.integers(1, 30), scale=st.floats(0.01, 6.0), seed=st.integers(0, 2**31), axis=st.booleans())
def test_cosh_is_a_tighter_bound_for_symmetric_sets(num, scale, seed, axis):
    jensen, cosh, true_mass = one_dimensional(symmetric(num, seed, axis), scale)
    assert (jensen <= cosh).all() and (cosh <= true_mass + 1e-9).all()


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3), num=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_merging_conserves_count_means_and_squares(sizes, num, seed):
    keys, values = pairs(sum(sizes), seed)
    inside = torch.rand(2, 3, sum(sizes), generator=torch.Generator().manual_seed(seed)) > 0.3
    hidden = torch.where(inside[..., None], keys, float("nan"))
    state = empty(num)
    for part in zip(hidden.split(sizes, 2), values.split(sizes, 2), inside.split(sizes, 2)):
        state = state.add(*part)
    keys, values = keys * inside[..., None], values * inside[..., None]
    assert state.num == num and torch.equal(state.count.sum(-1), inside.sum(-1).double())
    torch.testing.assert_close((state.count[..., None] * state.keys).sum(2), keys.sum(2))
    torch.testing.assert_close((state.count[..., None] * state.values).sum(2), values.sum(2))
    squares = state.spread + state.count * state.keys.square().mean(-1)
    torch.testing.assert_close(squares.sum(-1), keys.square().mean(-1).sum(-1))
    assert torch.equal((state.count > 0).sum(-1), inside.sum(-1).clamp(max=num))  # no centroid is wasted


@pytest.mark.parametrize("num", [10, 64, 100, 400])
def test_rounds_become_finer(num, monkeypatch):
    """A quarter of the centroids, an eighth at the end; by each head's own."""
    left, targets = [], Centroids.targets

    def spy(total, joins, half):
        left.append((total.count > 0).sum(-1) - joins)
        return targets(total, joins, half)

    (keys, values), sizes = pairs(800), torch.tensor([[400, 380, 378], [289, 288, 60]])
    fresh = (sizes - num).clamp(0, centroids.few_enough(num))
    most, sizes = num + int(fresh.max()), fresh + num
    total = empty(num).add(keys[:, :, :num], values[:, :, :num])
    monkeypatch.setattr(Centroids, "targets", spy)
    used = sizes.flatten().tolist()
    total = total.add(keys[:, :, num:most], values[:, :, num:most], torch.arange(most - num) < fresh[..., None])
    for number in left:
        shares = [8 if size <= 288 else 4 for size in used]
        used = [max(size - max(size // share, 1), min(size, num)) for size, share in zip(used, shares)]
        assert number.flatten().tolist() == used
    assert (total.count > 0).sum(-1).flatten().tolist() == used and torch.equal(total.count.sum(-1), sizes.double())
    assert total.num == num


def costs_of(n, k, v):
    """What merging each two parts adds to the sum of squares within parts, in units of the variances of all."""
    share = (n / n.sum())[:, None]
    spread_k, spread_v = ((share * (rows - (share * rows).sum(0)) ** 2).sum() for rows in (k, v))
    apart = sum((rows[:, None] - rows).square().sum(-1) / size for rows, size in ((k, spread_k), (v, spread_v)))
    return (n[:, None] * n / (n[:, None] + n) * apart).tolist()


def test_tokens_join_their_nearest_seed():
    """Seeds are evenly spread by age; heads with few tokens keep them as they are. A second time tokens choose among
    the means of the first, in the same units, and a seed is still one of its own part."""
    keys, values = pairs(45)
    sizes = torch.tensor([[45, 33, 24], [13, 12, 0]])
    tokens = torch.arange(45) < sizes[..., None]
    held = (rows * tokens[..., None] for rows in (keys, values))
    found = Centroids(tokens.double(), *held, tokens.double() * 0).thinned(12)
    assert found.num == 12
    for row, head in itertools.product(range(2), range(3)):
        size = int(sizes[row, head])
        seeds = [place * size // 12 for place in range(12)] if size > 12 else list(range(size))
        k, v = keys[row, head, :size], values[row, head, :size]
        units = [(rows[seeds] - rows[seeds].mean(0)).square().sum(-1).mean() for rows in (k, v)]
        parts = [[seed] for seed in seeds]
        for _ in range(2):
            means = [[rows[part].mean(0) for rows in (k, v)] for part in parts]
            parts = [[seed] for seed in seeds]
            for token in sorted({*range(size)} - {*seeds}):
                own = k[token], v[token]
                far = [sum((x - m).square().sum() / unit for x, m, unit in zip(own, mean, units)) for mean in means]
                parts[min(range(len(seeds)), key=far.__getitem__)].append(token)
        assert found.count[row, head].tolist() == [float(len(part)) for part in parts] + [0.0] * (12 - len(parts))
        for place, part in enumerate(parts):
            torch.testing.assert_close(found.keys[row, head, place], k[part].mean(0))
            spread = (k[part] - k[part].mean(0)).square().mean(-1).sum()
            torch.testing.assert_close(found.spread[row, head, place], spread)


def test_seeds_that_are_alike_stay_apart():
    """All tokens are nearest to the oldest seed, whose part the others but seeds become."""
    ones = torch.ones(1, 1, 40, 8, dtype=torch.float64)
    found = Centroids(ones[..., 0], ones, ones, 0 * ones[..., 0]).thinned(12)
    assert found.count[0, 0].tolist() == [29.0] + [1.0] * 11


@given(num=st.integers(4, 12), more=st.integers(0, 20), half=st.integers(0, 1), seed=st.integers(0, 2**31))
def test_a_round_joins_the_cheapest_pairs_of_the_two_halves(num, more, half, seed):
    """Of tokens, or of parts that others have joined before."""
    state, drop = empty(num).add(*pairs(num + more, seed)), 2
    merged = state.joined(state.targets(torch.full((2, 3), drop), half))
    merged = merged.at(merged.order(num - drop))
    for row, head in itertools.product(range(2), range(3)):
        n, k, v = state.count[row, head], state.keys[row, head], state.values[row, head]
        cost, offers = costs_of(n, k, v), []
        for one in range(half, num, 2):
            cheapest, other = min((cost[one][to], to) for to in range(1 - half, num, 2))
            offers.append((cheapest, one, other))
        groups = {index: [index] for index in range(num)}
        for _, one, other in sorted(offers)[:drop]:
            groups[other] += groups.pop(one)
        expected = torch.stack([(n[own, None] * k[own]).sum(0) / n[own].sum() for own in groups.values()])
        torch.testing.assert_close(merged.keys[row, head], expected)
        assert merged.count[row, head].tolist() == [float(n[members].sum()) for members in groups.values()]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), pad=st.integers(0, 300), seed=st.integers(0, 2**31))
def test_neither_padding_nor_neighbours_change_a_bit(sizes, pad, seed):
    """Blocks that are wider than what they hold, because another row evicts more, merge as if they were not."""
    keys, values = pairs(sum(sizes), seed)
    tight = wide = Centroids.empty(1, 1, 6, 8, 6, dtype=F64)
    for k, v in zip(keys[:1, :1].split(sizes, 2), values[:1, :1].split(sizes, 2)):
        tight = tight.add(k, v)
        full = (torch.cat([rows, torch.full((1, 1, pad, rows.shape[-1]), torch.nan, dtype=F64)], 2) for rows in (k, v))
        wide = wide.add(*full, (torch.arange(k.shape[2] + pad) < k.shape[2])[None, None])
    torch.testing.assert_close(tight.tensors(), wide.tensors(), rtol=1e-10, atol=1e-10)


def test_wrong_arguments_are_refused():
    keys, values = pairs(5)
    raises("at least 1 per head, got 0", empty, 0)
    raises("keys must have shape", empty(4, heads=2).add, keys, values)
    raises("mask must have shape", empty(4).add, keys, values, torch.ones(2, 3, 4, dtype=torch.bool))


@given(seed=st.integers(0, 2**31), num=st.integers(1, 9))
def test_rounding_to_bfloat16_takes_a_neighbour(seed, num):
    """The number below or above, every fp32 that is one already as it is, and both equally often on average."""
    keys, values = pairs(40, seed)
    wide = Centroids.empty(2, 3, num, 8, 6).add(keys.float(), values.float())
    narrow = wide.rounded(torch.bfloat16)
    for exact, found in ((wide.keys, narrow.keys), (wide.values, narrow.values)):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - exact.double()).abs() < 2.0**-7 * exact.abs().double()).all()
    assert torch.equal(wide.count, narrow.count) and torch.equal(wide.spread, narrow.spread)
    again = Centroids(narrow.count + 1, narrow.keys.float(), narrow.values.float(), narrow.spread)
    assert all(map(torch.equal, again.rounded(torch.bfloat16).tensors()[1:3], narrow.tensors()[1:3]))


@pytest.mark.parametrize(
    "tokens,at_once", [(1_000, 4), *(pytest.param(100_000, few, marks=pytest.mark.slow) for few in (1, 16))]
)
def test_a_heavy_mean_in_bfloat16_follows_its_tokens(tokens, at_once):
    """One centroid, so that the mean is known; after a tenth of the tokens the others lie 1 away.

    Rounded to the nearest number, a mean would stop where the tokens that come move it by less than half of a last bit,
    some 0.9 away. Here what remains is a walk by last bits that later tokens pull back: with tokens sigma from their
    centre its standard deviation is (sigma ulp / 2)^(1 / 2), 0.044, however many tokens there are."""
    generator, total, sigma, ulp = torch.Generator().manual_seed(0), tokens // at_once, 0.25, 2**-6
    state = Centroids.empty(1, 1, 1, 32, 8, dtype=torch.bfloat16)
    true = torch.zeros(32, dtype=F64)
    for step in range(total):
        centre = 2.5 if step < total // 10 else 3.5
        keys = (torch.randn(1, 1, at_once, 32, generator=generator) * sigma + centre).bfloat16()
        state, true = state.add(keys, keys[..., :8]), true + keys[0, 0].double().sum(0)
    assert state.count.item() == tokens
    error = state.keys[0, 0, 0].double() - true / tokens
    assert error.abs().max() < 3 * (sigma * ulp / 2) ** 0.5 and error.mean().abs() < ulp
    assert torch.equal(state.keys[..., :8], state.values)
