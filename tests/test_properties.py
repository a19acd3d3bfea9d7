"""Properties, 500 cases each: selection, compaction, moments, attention and budgets against literal float64 Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastkv import Budget, FastKVError, corrections, ops
from fastkv.cache.layout import LayerConfig, LayerPlan, Layout, cost, spec_of
from fastkv.cache.selection import keep_best, protected
from fastkv.config import Config
from fastkv.corrections import NONE
from fastkv.policies import KeyDiff, get
from fastkv.reference import Moments, Selection, compact, select
from fastkv.reference import attention as reference_attention

from .conftest import examples
from .states import deal, make_signals, make_spec, make_state, slab_of

CASES = settings(max_examples=examples(500))
F64 = torch.float64
NAN, INF = float("nan"), float("inf")
SCORES = [0.0, -0.0, 1.0, 1.0, 2.5, -3.0, 1e30, -1e30, NAN, INF, -INF]
SEEDS = st.integers(0, 2**31)
SIZES = {"batch": st.integers(1, 2), "heads": st.integers(1, 3), "seed": SEEDS}
ORDERS = st.sampled_from([None, 0, 1])
SOFTCAPS = st.sampled_from([None, 2.0])
D, DV, SCALE = 4, 3, 0.4


# What is expected, in words that a reader can check: no tensor operation but sums.


def best(candidates, tokens):
    """Names of the `tokens` best of (protected, score, place, name): protected first, then score, then lower place.

    NaN and minus infinity are the lowest scores there are."""

    def rank(candidate):
        protected, score, place, _ = candidate
        return not protected, -(-3.4e38 if math.isnan(score) or score == -INF else score), place

    return {candidate[3] for candidate in sorted(candidates, key=rank)[:tokens]}


def moments_of(tokens):
    """Count, means and centred cross moment of a list of (key, value), in float64; of none, zeros that fit any size."""
    if not tokens:
        return 0, *torch.zeros(3, 1, dtype=F64)
    keys, values = (torch.stack(part).double() for part in zip(*tokens))
    key_mean, value_mean = keys.mean(0), values.mean(0)
    return len(tokens), key_mean, value_mean, (keys - key_mean).T @ (values - value_mean)


def attention_of(q, tokens, gone, scale, softcap, order, value_dim=DV):
    """Attention of one query over (key, value) pairs and what the moments of `gone` stand for, without logarithms.

    Returns: the output, the weight of each token, the mass of the tokens and the mass of the moments."""

    def bent(x):
        return x if softcap is None else softcap * math.tanh(x / softcap)

    q = q.double()
    masses = [math.exp(bent(scale * float(q @ key.double()))) for key, _ in tokens]
    total = sum((mass * value.double() for mass, (_, value) in zip(masses, tokens)), torch.zeros(value_dim, dtype=F64))
    evicted = 0.0
    count, key_mean, value_mean, cross = moments_of(gone)
    if order is not None and count:
        x = scale * float(q @ key_mean)
        evicted = count * math.exp(bent(x))
        slope = 1.0 if softcap is None else 1 - math.tanh(x / softcap) ** 2
        estimate = value_mean if order == 0 else value_mean + scale * slope / count * (q @ cross)
        total = total + evicted * estimate
    mass = sum(masses)
    everything = mass + evicted
    if everything == 0:
        return total, [], mass, evicted
    return total / everything, [each / everything for each in masses], mass, evicted


# Cases.


def pairs(num, generator, dtype=F64):
    """`num` random (key [D], value [DV])."""
    keys = torch.randn(num, D, generator=generator, dtype=F64).to(dtype)
    return list(zip(keys, torch.randn(num, DV, generator=generator, dtype=F64).to(dtype) - 1))


def rows_of(tokens, width, fill, dtype=F64):
    """Keys [B, H, width, D] and values [B, H, width, DV] of tokens[b][h] = [(key, value)]; `fill` in empty places."""
    batch, heads = len(tokens), len(tokens[0])
    keys = torch.full((batch, heads, width, D), fill, dtype=dtype)
    values = torch.full((batch, heads, width, DV), fill, dtype=dtype)
    for b, h in each(batch, heads):
        for place, (key, value) in enumerate(tokens[b][h]):
            keys[b, h, place], values[b, h, place] = key, value
    return keys, values


def each(batch, heads):
    return [(b, h) for b in range(batch) for h in range(heads)]


def grid(batch, heads, make):
    return [[make(b, h) for h in range(heads)] for b in range(batch)]


def evicted_before(batch, heads, rng, generator, order, dtype=F64):
    """Up to five tokens per head that are gone already, and their moments."""
    gone = grid(batch, heads, lambda b, h: pairs(rng.choice([0, 0, 1, 5]), generator, dtype))
    mask = torch.tensor(grid(batch, heads, lambda b, h: [i < len(gone[b][h]) for i in range(5)]))
    moments = Moments.empty(batch, heads, D, DV, dtype=dtype, order=order).add(*rows_of(gone, 5, NAN, dtype), mask)
    return gone, moments


def assert_moments(moments, gone, tolerance):
    """The moments are those of gone[b][h], up to `tolerance` in units of the numbers that were added up."""
    for b, h in each(len(gone), len(gone[0])):
        count, *expected = moments_of(gone[b][h])
        assert int(moments.count[b, h]) == count
        largest = max([1.0, *(float(part.abs().max()) for token in gone[b][h] for part in token)])
        got = [part for part in (moments.key_mean, moments.value_mean, moments.cross) if part is not None]
        for part, exact, size in zip(got, expected, (largest, largest, largest**2 * max(count, 1))):
            assert float((part[b, h].double() - exact).abs().max()) <= tolerance * size


# Selection.


@CASES
@given(**SIZES, num=st.integers(1, 14), tokens=st.integers(1, 16))
def test_select_keeps_the_best(batch, heads, seed, num, tokens):
    rng = random.Random(seed)
    places = grid(batch, heads, lambda b, h: rng.sample(range(2 * num), num))
    scores = grid(batch, heads, lambda b, h: rng.choices(SCORES, k=num))
    valid, guard = (grid(batch, heads, lambda b, h: rng.choices([True, False], k=num)) for _ in range(2))
    given_tensors = torch.tensor(scores), torch.tensor(places).int(), torch.tensor(valid), torch.tensor(guard)
    for chosen in (select(*given_tensors, tokens), ops.select(*given_tensors, tokens)):
        for b, h in each(batch, heads):
            candidates = [(guard[b][h][i], scores[b][h][i], places[b][h][i], i) for i in range(num) if valid[b][h][i]]
            expected = best(candidates, tokens)
            assert {i for i in range(num) if chosen.kept[b, h, i]} == expected
            assert int(chosen.counts[b, h]) == len(expected)


@pytest.mark.parametrize("kind", ["uniform", "fixed", "adaptive"])
@CASES
@given(
    **SIZES, sinks=st.integers(0, 2), recent=st.integers(0, 2), more=st.integers(0, 5),
    share=st.sampled_from([0.0, 0.0, 0.3, 1.0]), places=st.integers(1, 16),
)  # fmt: skip
@example(batch=1, heads=1, seed=1, sinks=0, recent=0, more=2, share=0.3, places=16)  # a share of a token
def test_a_layer_keeps_the_best(kind, batch, heads, seed, sinks, recent, more, share, places):
    """Protection, per-head budgets and the competition of heads, for slots of which any may be empty."""
    rng, least = random.Random(seed), max(sinks + recent, 1)
    tokens = [least + (rng.randrange(more + 1) if kind == "fixed" else more) for _ in range(heads)]
    config = Config(KeyDiff(sliding_window=share), Budget(tokens=least, sinks=sinks, recent=recent))
    layout = Layout(tuple(tokens), NONE, adaptive=kind == "adaptive")
    rule = LayerConfig(LayerPlan(config), layout, spec_of(config, layout, 1.0))
    seen = [rng.choice([rng.randrange(4), rng.randint(8, 24)]) for _ in range(batch)]
    number = grid(batch, heads, lambda b, h: min(seen[b], rng.choice([places, places, rng.randint(0, places)])))
    held = grid(batch, heads, lambda b, h: rng.sample(range(seen[b]), number[b][h]))
    # A place holds a token's position or, if it is empty, None.
    at = grid(batch, heads, lambda b, h: held[b][h] + [None] * (places - len(held[b][h])))
    for b, h in each(batch, heads):
        rng.shuffle(at[b][h])
    positions = torch.tensor(grid(batch, heads, lambda b, h: [rng.randrange(20) if p is None else p for p in at[b][h]]))
    valid = torch.tensor(grid(batch, heads, lambda b, h: [p is not None for p in at[b][h]]))
    # In some heads nothing is worth much, so that only the floor stays.
    scores = grid(batch, heads, lambda b, h: rng.choices(rng.choice([SCORES, [1.0, 2.5], [-3.0, -5.0]]), k=places))
    keys, values = (torch.zeros(batch, heads, places, dim) for dim in (D, DV))
    signals = make_signals(keys=keys, values=values, positions=positions.int(), valid=valid)
    chosen = keep_best(signals, torch.tensor(scores), protected(signals, torch.tensor(seen), rule), rule)

    window = min(max(recent, math.ceil(share * (sum(tokens) // heads))), min(tokens) - sinks)
    for b in range(batch):
        there, first = [[(i, p) for i, p in enumerate(own) if p is not None] for own in at[b]], seen[b] - window
        candidates = [
            [(p < sinks or p >= first, scores[b][h][i], (p, h), (h, i)) for i, p in there[h]] for h in range(heads)
        ]
        if kind == "adaptive":
            floor = max(-(-tokens[0] // 5), sinks + window)
            safe = set().union(*(best(own, floor) for own in candidates))
            together = [(one[3] in safe, *one[1:]) for own in candidates for one in own]
            expected = best(together, heads * tokens[0])
        else:
            expected = set().union(*(best(own, number) for own, number in zip(candidates, tokens)))
        got = {(h, i) for h in range(heads) for i in range(places) if chosen.kept[b, h, i]}
        assert got == expected
        assert chosen.counts[b].tolist() == [sum(h == head for h, _ in expected) for head in range(heads)]


@CASES
@given(**SIZES, slots=st.integers(1, 9), new=st.integers(0, 6), order=ORDERS)
def test_compact_conserves_every_token(batch, heads, seed, slots, new, order):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    used = rng.randint(0, slots)
    lengths = grid(batch, heads, lambda b, h: rng.randint(0, used))
    pads = [rng.randint(0, new) for _ in range(batch)]
    held = grid(batch, heads, lambda b, h: pairs(lengths[b][h], generator, torch.float32))
    block = grid(batch, heads, lambda b, h: pairs(new, generator, torch.float32))
    gone, moments = evicted_before(batch, heads, rng, generator, order, torch.float32)
    keys, values = rows_of(held, slots, 1e30, torch.float32)
    new_keys, new_values = rows_of(block, new, 0.0, torch.float32)
    places = grid(batch, heads, lambda b, h: rng.sample(range(20), slots))
    new_places = [[list(range(20 - pads[b], 20 - pads[b] + new))] * heads for b in range(batch)]
    positions = torch.tensor(places).int()
    old = grid(batch, heads, lambda b, h: [(i, places[b][h][i], held[b][h][i]) for i in range(lengths[b][h])])
    fresh = grid(
        batch, heads, lambda b, h: list(zip(range(used, used + new), new_places[b][h], block[b][h]))[pads[b] :]
    )
    candidates = grid(batch, heads, lambda b, h: old[b][h] + fresh[b][h])
    valid = torch.zeros(batch, heads, used + new, dtype=torch.bool)
    kept = torch.zeros_like(valid)
    stay = grid(batch, heads, lambda b, h: [])
    for b, h in each(batch, heads):
        for one in rng.sample(candidates[b][h], len(candidates[b][h])):
            valid[b, h, one[0]] = True
            if rng.random() < 0.6 and len(stay[b][h]) < slots:
                kept[b, h, one[0]] = True
                stay[b][h].append(one)
            else:
                gone[b][h].append(one[2])
    counts = torch.full((batch, heads), -1, dtype=torch.int32)
    new_positions = torch.tensor(new_places, dtype=torch.int32).view(batch, heads, new)
    before = positions.clone()
    state = make_state(keys, values, counts, positions, moments=moments)
    compact(valid, Selection(kept, kept.sum(-1)), (new_keys, new_values, new_positions), None, state, make_spec())
    for b, h in each(batch, heads):
        expected = sorted(stay[b][h], key=lambda one: one[1])
        assert int(counts[b, h]) == len(expected)
        assert positions[b, h, : len(expected)].tolist() == [place for _, place, _ in expected]
        for slot, (_, _, (key, value)) in enumerate(expected):
            assert torch.equal(keys[b, h, slot], key) and torch.equal(values[b, h, slot], value)
    assert torch.equal(positions[:, :, used + new :], before[:, :, used + new :])
    assert_moments(moments, gone, 1e-6)


@CASES
@given(
    seed=SEEDS, sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), order=ORDERS,
    dtype=st.sampled_from([torch.float32, F64]), offset=st.sampled_from([0.0, 50.0]),
)  # fmt: skip
def test_merging_is_counting_together(seed, sizes, order, dtype, offset):
    """Any tree of merges of sets of any sizes, in two heads, one of which gets every second token only."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    together, parts = [[[], []]], []
    for size in sizes:
        tokens = [(key + offset, value - offset) for key, value in pairs(size, generator, dtype)]
        halves = [[tokens, tokens[::2]]]
        mask = torch.tensor([[[True] * size, [i % 2 == 0 for i in range(size)]]], dtype=torch.bool).view(1, 2, size)
        empty = Moments.empty(1, 2, D, DV, dtype=dtype, order=order)
        parts.append(empty.add(*rows_of([[tokens, tokens]], size, 0.0, dtype), mask))
        for head in range(2):
            together[0][head] += halves[0][head]
    while len(parts) > 1:
        one = parts.pop(rng.randrange(len(parts)))
        parts.append(parts.pop(rng.randrange(len(parts))).merge(one))
    assert parts[0].order == order and parts[0].count.dtype == torch.int64
    assert_moments(parts[0], together, 1e-5 if dtype == torch.float32 else 1e-13)


# Attention.


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("step", [False, True], ids=["attention", "step"])
@CASES
@given(**SIZES, groups=st.integers(1, 3), order=ORDERS, softcap=SOFTCAPS)
def test_decoding_is_softmax_over_all_tokens(step, ragged, batch, heads, seed, groups, order, softcap):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rooms = grid(batch, heads, lambda b, h: rng.randint(1, 6) if ragged else 6)
    free = int(step)
    most = grid(batch, heads, lambda b, h: rooms[b][h] - free)
    lengths = grid(batch, heads, lambda b, h: rng.choice([0, 1 - free, most[b][h], rng.randint(0, most[b][h])]))
    held = grid(batch, heads, lambda b, h: pairs(lengths[b][h], generator))
    gone, moments = evicted_before(batch, heads, rng, generator, 1)
    # Only a step may rely on finite numbers in free slots.
    slots = [*rows_of(held, 6, 7.0 if step else NAN), torch.zeros(batch, heads, 6, dtype=torch.int32)]
    received = torch.rand(batch, heads, 6, generator=generator, dtype=F64)
    starts = None
    old = received.clone()
    if ragged:
        starts, size = deal(rooms)
        *slots, received = (slab_of(rows, starts, size) for rows in (*slots, received))
    q = torch.randn(batch, heads * groups, D, generator=generator, dtype=F64)
    counts, seen = torch.tensor(lengths).int(), torch.randint(30, 60, (batch,), generator=generator)
    state = make_state(*slots[:2], counts, slots[2], seen.clone(), moments, starts=starts, attention=received)
    if ragged:
        state.exact.limit = state.exact.filled = 6
    spec, k, v = make_spec(SCALE, softcap, order, backend="reference"), None, None
    if step:
        token = grid(batch, heads, lambda b, h: pairs(1, generator))
        k, v = rows_of(token, 1, 0.0)
        held = grid(batch, heads, lambda b, h: held[b][h] + token[b][h])
    results = ops.decode_step(q, k, v, state, spec)
    assert torch.equal(state.seen, seen + step)
    out, retained, evicted = results
    for b, h in each(batch, heads):
        assert int(counts[b, h]) == len(held[b][h])
        first = 0 if starts is None else int(starts[b, h])
        own = [part[b, h] if starts is None else part[b, first:] for part in (*slots, received)]
        if step:
            assert torch.equal(own[0][lengths[b][h]], k[b, h, 0]) and torch.equal(own[1][lengths[b][h]], v[b, h, 0])
            assert int(own[2][lengths[b][h]]) == int(seen[b])
        weights = torch.zeros(6, dtype=F64)
        for head in range(h * groups, (h + 1) * groups):
            expected, shares, mass, left = attention_of(q[b, head], held[b][h], gone[b][h], SCALE, softcap, order)
            torch.testing.assert_close(out[b, head], expected, atol=1e-9, rtol=1e-9)
            assert float(retained[b, head].exp()) == pytest.approx(mass, rel=1e-9)
            assert float(evicted[b, head].exp()) == pytest.approx(left, rel=1e-9)
            weights[: len(shares)] += torch.tensor(shares, dtype=F64) / groups
        room = rooms[b][h]
        torch.testing.assert_close(own[3][:room], (old[b, h] + weights)[:room], atol=1e-9, rtol=1e-9)


@CASES
@given(
    **SIZES, groups=st.integers(1, 2), num=st.integers(1, 4), order=ORDERS, softcap=SOFTCAPS, at_once=st.integers(1, 4)
)
def test_a_block_is_softmax_over_its_past(batch, heads, seed, groups, num, order, softcap, at_once):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = grid(batch, heads, lambda b, h: rng.choice([0, 1, 5]))
    held = grid(batch, heads, lambda b, h: pairs(lengths[b][h], generator))
    block = grid(batch, heads, lambda b, h: pairs(num, generator))
    real = [rng.choices([True, False], [3, 1], k=num) for _ in range(batch)]
    gone, moments = evicted_before(batch, heads, rng, generator, 1)
    q = torch.randn(batch, heads * groups, num, D, generator=generator, dtype=F64)
    slots, new = rows_of(held, 5, 7.0), rows_of(block, num, 0.0)
    state = make_state(*slots, torch.tensor(lengths).int(), moments=moments)
    spec = make_spec(SCALE, softcap, order, backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "QUERY_CHUNK", at_once)
        out, lse, _ = ops.prefill_attention(q, *new, torch.tensor(real), state, spec)
    for b, head, t in ((b, head, t) for b in range(batch) for head in range(heads * groups) for t in range(num)):
        h = head // groups
        past = held[b][h] + [block[b][h][i] for i in range(t + 1) if real[b][i]]
        expected, _, mass, left = attention_of(q[b, head, t], past, gone[b][h], SCALE, softcap, order)
        torch.testing.assert_close(out[b, head, t], expected, atol=1e-9, rtol=1e-9)
        assert float(lse[b, head, t].exp()) == pytest.approx(mass + left, rel=1e-9)


# Budgets.


@CASES
@given(
    average=st.integers(1, 300), num_layers=st.integers(1, 12), sinks=st.integers(0, 5), recent=st.integers(0, 40),
    kind=st.sampled_from(["uniform", "pyramid", "weights"]), share=st.one_of(st.none(), st.floats(0.01, 1.0)),
    seed=SEEDS,
)  # fmt: skip
def test_layers_share_the_budget_exactly(average, num_layers, sinks, recent, kind, share, seed):
    """The sum is exact, each layer is within one token of its share and never below what is protected."""
    weights = [random.Random(seed).uniform(0.3, 2.0) for _ in range(num_layers)]
    layers = weights if kind == "weights" else kind
    least = max(sinks + recent, 1)
    if share is None:
        average = max(average, least)
        unit, context = {"tokens": average}, 7
    else:
        unit, context = {"keep": share}, average
        average = max(math.ceil(share * context), least)
    budget = Budget(**unit, sinks=sinks, recent=recent, layers=layers)
    base = {"uniform": 0, "pyramid": sinks + recent, "weights": 0}[kind]
    if kind == "uniform" or num_layers == 1:
        parts = [1.0] * num_layers
    elif kind == "pyramid":
        parts = [1.95 - 1.9 * layer / (num_layers - 1) for layer in range(num_layers)]
    else:
        parts = [weight * num_layers / sum(weights) for weight in weights]
    ideal = [base + (average - base) * part for part in parts]
    try:
        total = budget.average(num_layers, context, None)
        got = [budget.layer_tokens(total, layer, num_layers) for layer in range(num_layers)]
    except FastKVError:
        assert min(ideal) < least + 1
        return
    assert sum(got) == average * num_layers and min(got) >= least
    assert all(abs(tokens - exact) <= 1 + 1e-9 for tokens, exact in zip(got, ideal))


@CASES
@given(
    total=st.integers(2_000, 400_000), num_layers=st.integers(1, 5), heads=st.integers(1, 4),
    dim=st.sampled_from([8, 16]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    name=st.sampled_from(["streaming", "h2o", "momentkv", "fastkv"]), sharing=st.sampled_from(["uniform", "adaptive"]),
    layers=st.sampled_from(["uniform", "pyramid", (1.0, 2.0, 1.0, 3.0, 1.0)]), every=st.integers(1, 9),
    slope=st.booleans(),
)  # fmt: skip
def test_bytes_are_never_exceeded(total, num_layers, heads, dim, dtype, name, sharing, layers, every, slope):
    """Of states with all that a policy makes them hold; a token more does not fit, of unequal layers but a centroid."""
    layers = layers if isinstance(layers, str) else layers[:num_layers]
    budget = Budget(bytes=total, sinks=1, recent=2, heads=sharing, layers=layers)
    given = {"correction": corrections.get("centroids")} if name == "fastkv" else {}
    config = Config(get(name), budget, evict_every=every, backend="triton" if slope else "reference", **given)
    like = torch.empty(1, heads, 0, dim, dtype=dtype, device="meta")

    def layout(tokens):
        return LayerPlan(config).layout(heads, torch.device("cpu"), tokens)

    def spent(tokens):
        return layout(tokens).allocate(like, like).nbytes()

    price = cost(like, like, layout)
    assert price.spent(17) == spent(17)
    try:
        average = budget.average(num_layers, 0, price)
        tokens = [budget.layer_tokens(average, layer, num_layers) for layer in range(num_layers)]
    except FastKVError:
        assert layers != "uniform" or num_layers * spent(3) > total
        return
    rounding = num_layers * heads * 4 * (2 * dim + 2) if given and layers != "uniform" else 0
    assert sum(map(spent, tokens)) <= total < sum(spent(one + 1) for one in tokens) + rounding
