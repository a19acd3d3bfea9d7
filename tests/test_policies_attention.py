"""Policies that score by attention: each against float64 brute force, exact selections, and what all have in common."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv.policies import H2O, TOVA, CriticalKV, DuoAttention, KVzip, MomentKV, PyramidKV, SnapKV
from fastkv.reference import Moments, most_attended, output_norms
from fastkv.reference import attention as kvzip
from fastkv.reference import scores as output

from .models import raises
from .states import attention, changed, make_signals, randn
from .test_policies_geometry import kept, scored

F64 = torch.float64
B, HEADS, GROUP, DIM, HIDDEN, SCALE = 2, 2, 3, 4, 5, 0.4
POLICIES = {
    "tova": TOVA(), "h2o": H2O(), "pyramidkv": PyramidKV(), "kvzip": KVzip(), "duoattention": DuoAttention(),
    "criticalkv": CriticalKV(), "criticalkv on h2o": CriticalKV(base=H2O()), "momentkv": MomentKV(),
    "momentkv uninformed": MomentKV(informed=False), "momentkv order 0": MomentKV(residual_order=0),
}  # fmt: skip
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def make(num=13, seed=0, **changes):
    """Signals in float64, slots in another order in every head but one, six tokens evicted before."""
    keys, values = randn(B, HEADS, num + 6, DIM, seed=seed), randn(B, HEADS, num + 6, DIM, seed=seed + 1)
    order = randn(B, HEADS, num, seed=seed + 2).argsort(-1)
    order[0, 0] = torch.arange(num)
    attention, memory = randn(2, B, HEADS, num, seed=seed + 3).softmax(-1)
    made = make_signals(
        SCALE, keys=keys[:, :, :num], values=values[:, :, :num], positions=order.int(),
        valid=torch.ones(B, HEADS, num, dtype=torch.bool), tokens=6, attention=attention, memory=memory,
        moments=Moments.empty(B, HEADS, DIM, DIM, dtype=F64).add(keys[:, :, num:], values[:, :, num:]),
        queried=torch.full((B, 1, 1), 7.0), output=randn(HIDDEN, HEADS * GROUP, DIM, seed=seed + 4),
    )  # fmt: skip
    return changed(made, **changes)


CANDIDATES = ("keys", "values", "positions", "valid", "attention", "memory")


def mapped(signals, change):
    """The same with `change` applied to everything that has an entry per candidate."""
    return replace(signals, **{name: change(getattr(signals, name)) for name in CANDIDATES})


def row_of(signals, row):
    alone = slice(row, row + 1)
    moments = Moments(*(part[alone] for part in signals.moments.tensors()))
    return replace(mapped(signals, lambda part: part[alone]), moments=moments, queried=signals.queried[alone])


def by_position(signals, row, head, values):
    """{position: value} of the valid candidates."""
    real = signals.valid[row, head]
    return dict(zip(signals.positions[row, head][real].tolist(), values[row, head][real].tolist()))


def agree(signals, scores, expected):
    """Scores equal expected(row, head) -> {position: score}."""
    for row, head in itertools.product(range(len(signals.valid)), range(HEADS)):
        assert by_position(signals, row, head, scores) == pytest.approx(expected(row, head), rel=1e-12, abs=1e-15)


# What all of them have in common


@every_policy
@pytest.mark.parametrize("decoding", [False, True], ids=["prompt", "decode"])
@given(num=st.integers(1, 20), pads=st.integers(0, 5), seed=st.integers(0, 1000))
def test_rows_padding_and_order_of_slots_do_not_matter(policy, decoding, num, pads, seed):
    signals = make(num, seed, decoding=decoding)
    scores = scored(policy, signals)
    assert scores.shape == signals.valid.shape and scores.isfinite().all()
    for row in range(B):
        torch.testing.assert_close(scored(policy, row_of(signals, row))[0], scores[row])

    def pad(part):
        empty = {torch.bool: False, torch.int32: 3}.get(part.dtype, float("nan"))
        return torch.cat([torch.full_like(part[:, :, :1], empty).repeat_interleave(pads, 2), part], 2)

    order = randn(B, HEADS, pads + num, seed=seed).argsort(-1)

    def shuffle(part):
        return part.gather(2, order if part.ndim == 3 else order[..., None].expand_as(part))

    other = mapped(mapped(signals, pad), shuffle)
    moved = scored(policy, other)
    torch.testing.assert_close(moved[other.valid], shuffle(pad(scores))[other.valid])
    assert kept(moved, other) == kept(scores, signals)


class Process:
    """One of two processes that hold a head each, as threads: what `fastkv.backend.Parallel` does for a policy."""

    def __init__(self, rank, parts, barrier):
        self.rank, self.parts, self.barrier = rank, parts, barrier

    def gather(self, part):
        self.parts[self.rank] = part
        self.barrier.wait()
        whole = torch.cat(self.parts, 1)
        self.barrier.wait()
        return whole

    def own(self, whole):
        return whole.chunk(len(self.parts), 1)[self.rank]


@every_policy
def test_heads_split_between_processes_score_as_on_one(policy):
    signals, parts, barrier = make(), [None, None], threading.Barrier(2, timeout=60)

    def run(rank):
        mine = slice(rank, rank + 1)
        own = changed(
            mapped(signals, lambda part: part[:, mine]),
            moments=Moments(*(part[:, mine] for part in signals.moments.tensors())),
            output=signals.layer.output[:, rank * GROUP : (rank + 1) * GROUP],
            parallel=Process(rank, parts, barrier),
        )
        return scored(policy, own)

    with ThreadPoolExecutor(2) as pool:
        torch.testing.assert_close(torch.cat(list(pool.map(run, range(2))), 1), scored(policy, signals))


@pytest.mark.parametrize("unequal", [False, True])
def test_tova_is_the_mean_over_the_heads_that_hold_a_token(unequal):
    signals = make()
    if unequal:
        others = signals.positions % 3 != torch.arange(HEADS)[:, None]
        signals = changed(signals, valid=signals.valid & others)
    scores = TOVA().score(signals)

    def expected(row, head):
        each = [by_position(signals, row, other, signals.attention) for other in range(HEADS)]
        held = {place: [one[place] for one in each if place in one] for place in each[head]}
        return {place: sum(found) / len(found) for place, found in held.items()}

    agree(signals, scores, expected)
    found = kept(scores, signals)
    assert unequal or found[::HEADS] == found[1::HEADS]


@pytest.mark.parametrize("blocks", [[17], [5, 1, 8, 3], [1] * 17], ids=["whole", "blocks", "tokens"])
def test_h2o_in_blocks_equals_the_column_sums_of_the_whole_matrix(blocks):
    num, pads, steps = 17, 3, 4
    q, keys = randn(B, HEADS * GROUP, num + steps, DIM), randn(B, HEADS, num + steps, DIM, seed=1)
    logits = SCALE * q @ keys.repeat_interleave(GROUP, 1).transpose(-1, -2)
    real = torch.ones(B, num + steps, dtype=torch.bool)
    real[1, :pads] = False
    visible = torch.ones(num + steps, num + steps).tril().bool() & real[:, None] & real[:, :, None]
    weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    weights = weights.unflatten(1, (HEADS, GROUP)).mean(2)  # [B, Hkv, query, key]
    policy, memory, start = H2O(), torch.zeros(B, HEADS, 0), 0
    for size in blocks:
        end = start + size
        queried = real[:, start:end].sum(-1)[:, None, None].float()
        attention = (weights[:, :, start:end, :end].sum(2) / queried.clamp(min=1)).float()
        memory = torch.cat([memory, torch.zeros(B, HEADS, size)], 2)
        signals = make(memory=memory, attention=attention, queried=queried)
        memory, start = policy.remember(signals), end
        assert torch.equal(policy.score(replace(signals, memory=memory)), memory)
    torch.testing.assert_close(memory, weights[:, :, :num, :num].sum(2).float(), atol=1e-6, rtol=0)
    # Generated tokens: one flush of four steps, each token the mean over the queries that saw it.
    queried = (num + steps - torch.arange(num + steps)).clamp(max=steps).float().expand(B, HEADS, -1)
    attention = (weights[:, :, num:].sum(2) / queried).float()
    memory = torch.cat([memory, torch.zeros(B, HEADS, steps)], 2)
    memory = policy.remember(make(memory=memory, attention=attention, queried=queried, decoding=True))
    torch.testing.assert_close(memory, weights.sum(2).float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pool", [1, 5, 7])
def test_pyramidkv_scores_like_snapkv_and_brings_a_pyramid(pool):
    signals = make()
    scores = PyramidKV(pool=pool).score(signals)

    def expected(row, head):
        one = by_position(signals, row, head, signals.attention)
        near = range(-(pool // 2), pool // 2 + 1)
        return {position: sum(one.get(position + step, 0.0) for step in near) / pool for position in one}

    agree(signals, scores, expected)
    assert torch.equal(scores, SnapKV(pool=pool).score(signals))
    assert torch.equal(SnapKV(pool=pool).score(replace(signals, decoding=True)), signals.attention)  # one by one


def test_kvzip_remembers_the_largest_weight_and_scores_generated_tokens_by_attention():
    signals = make()
    signals.memory[:, :, ::3] = 0
    policy = KVzip()
    largest = policy.remember(signals)
    before, now = signals.memory.flatten().tolist(), signals.attention.flatten().tolist()
    assert largest.flatten().tolist() == [max(pair) for pair in zip(before, now)]
    later = replace(signals, decoding=True)
    assert torch.equal(policy.remember(later), signals.memory)
    assert policy.score(later).flatten().tolist() == [old or new for old, new in zip(before, now)]
    assert torch.equal(CriticalKV(base=policy).remember(signals), largest)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 2, 256])
def test_most_attended_equals_brute_force(monkeypatch, softcap, chunk):
    monkeypatch.setattr(kvzip, "QUERY_CHUNK", chunk)
    q, keys = randn(B, HEADS * GROUP, 5, DIM), randn(B, HEADS, 12, DIM, seed=1)
    _, lse, weights = attention(q, keys, keys, SCALE, softcap=softcap)
    lse[1, :, 3], weights[1, :, 3] = float("inf"), 0  # a padded query
    want = weights.unflatten(1, (HEADS, GROUP)).amax((2, 3))[..., :9]  # of all that queries attend to
    torch.testing.assert_close(most_attended(q, keys[:, :, :9], lse, SCALE, softcap), want)


@pytest.mark.parametrize("scratch", [1, 70, 1 << 24])
def test_output_norms_equal_brute_force(monkeypatch, scratch):
    monkeypatch.setattr(output, "SCRATCH", scratch)
    values, projection = randn(B, HEADS, 9, DIM), randn(HIDDEN, HEADS * GROUP, DIM, seed=1)
    moved = torch.einsum("ohgd,bhnd->bhnog", projection.unflatten(1, (HEADS, GROUP)), values)
    torch.testing.assert_close(output_norms(values, projection), moved.abs().sum((3, 4)) / GROUP)
    assert output_norms(values.bfloat16(), projection.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("first", [0, 0.3, 0.5, 1])
@given(num=st.integers(1, 24), tokens=st.integers(1, 26), seed=st.integers(0, 1000))
def test_criticalkv_top_k_does_both_stages(first, num, tokens, seed):
    signals = make(num, seed, tokens=tokens)
    signals.valid[1, 0, : num // 3] = False
    policy, base = CriticalKV(first=first), SnapKV().score(signals)
    scores, norms = policy.score(signals), output_norms(signals.values, signals.layer.output)
    expected = []
    for row, head in itertools.product(range(B), range(HEADS)):
        real = by_position(signals, row, head, base)
        effect = by_position(signals, row, head, norms)
        won = sorted(real, key=lambda position: (-real[position], position))[: math.ceil(first * tokens)]
        least = min(real.values(), default=0.0)
        second = {p: (real[p] - least + 1e-4) * effect[p] for p in real if p not in won}
        rest = sorted(second, key=lambda position: (-second[position], position))[: tokens - len(won)]
        expected.append(sorted(won + rest))
        got = by_position(signals, row, head, scores)
        assert all(got[p] >= 2 for p in won) and all(0 <= got[p] <= 1 for p in second)
    assert kept(scores, signals, tokens) == expected


@pytest.mark.parametrize(
    "text,match",
    [(None, "needs the pattern file of the model, got none; download"),
     ("missing", "readable file of numbers separated by tabs, got .*nowhere.tsv .*No such file"),
     ("0.1\t0.9\n0.5\tmany\n", "readable file of numbers separated by tabs, got .*'many'"),
     ("0.1\t0.9\n0.5\tnan\n", "must hold finite numbers, got others"), ("\n", "must hold finite numbers, got none"),
     ("0.1\t0.9\n", "2 lines of 2 for this model, got 1 of 2 in .*use the file made for this model"),
     ("0.1\t0.9\n0.5\t0.5\t0.5\n", "2 lines of 2 for this model, got 2 of 2 or 3")],
    ids=["none", "missing", "garbled", "nan", "empty", "lines", "columns"],
)  # fmt: skip
def test_duoattention_says_what_is_wrong_with_a_pattern(tmp_path, text, match):
    path = tmp_path / "nowhere.tsv"
    if text not in (None, "missing"):
        path.write_text(text)
    raises(match, DuoAttention(pattern="" if text is None else path).check, [2, 2])


def test_duoattention_reads_its_pattern_once(tmp_path):
    path = tmp_path / "pattern.tsv"
    path.write_text("1.0\t0.2\t0.5\n0.0\t0.0\t0.0\n")
    policy = DuoAttention(pattern=str(path))
    policy.check([3, 3])
    path.unlink()
    policy.check([3, 3])
    assert policy.head_tokens(0, 3, 100, 36) == (132, 36, 132)
    assert replace(policy, threshold=0.6).head_tokens(0, 3, 100, 36) == (228, 36, 36)
    assert replace(policy, threshold=0.2).head_tokens(0, 3, 100, 36) == (100, 100, 100)
    assert policy.head_tokens(1, 3, 100, 36) is None, "streaming heads alone share the budget evenly"


@given(heads=st.lists(st.booleans(), min_size=1, max_size=8), tokens=st.integers(1, 90), data=st.data())
def test_duoattention_shares_out_exactly_the_budget(tmp_path_factory, heads, tokens, data):
    reserved = data.draw(st.integers(0, tokens))
    path = tmp_path_factory.mktemp("duo") / "full_attention_heads.tsv"
    path.write_text("\t".join("0.75" if full else "0.25" for full in heads))
    shares = DuoAttention(pattern=path).head_tokens(0, len(heads), tokens, reserved)
    if not any(heads):
        assert shares is None
        return
    assert sum(shares) == len(heads) * tokens
    assert all(share == reserved for share, full in zip(shares, heads) if not full)
    retrieval = [share for share, full in zip(shares, heads) if full]
    assert retrieval == sorted(retrieval, reverse=True) and retrieval[0] - retrieval[-1] <= 1
    assert retrieval[-1] >= tokens


def residual(signals, row, head, slot, order):
    """|r_j| from the six evicted pairs themselves."""
    everything = randn(B, HEADS, 19, DIM)[row, head, 13:], randn(B, HEADS, 19, DIM, seed=1)[row, head, 13:]
    key_mean, value_mean = (part.mean(0) for part in everything)
    r = signals.values[row, head, slot] - value_mean
    if order == 1:
        cross = sum(torch.outer(v - value_mean, k - key_mean) for k, v in zip(*everything))
        r = r - SCALE / 6 * cross @ signals.keys[row, head, slot]
    return float(r.norm())


@pytest.mark.parametrize("decoding", [False, True], ids=["prompt", "decode"])
@pytest.mark.parametrize("order", [1, 0, None], ids=["complete", "order 0", "uninformed"])
def test_momentkv_ablations_equal_brute_force(order, decoding):
    signals = make(decoding=decoding)
    policy = MomentKV(informed=False) if order is None else MomentKV(residual_order=order)
    assert policy.moments.order == order

    def expected(row, head):
        weights = signals.attention[row, head].tolist()
        raw = [w if order is None else w * residual(signals, row, head, n, order) for n, w in enumerate(weights)]
        one = dict(zip(signals.positions[row, head].tolist(), raw))
        if decoding:
            return one
        chunks = {p: [one[other] for other in one if other // 4 == p // 4] for p in one}
        return {p: sum(chunk) / len(chunk) for p, chunk in chunks.items()}

    agree(signals, policy.score(signals), expected)
