"""Scores against float64 brute force, and the properties the papers claim for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkv.errors import FastKVError
from fastkv.reference import chunk_mean, keydiff_scores, random_scores, window_attention, window_scores

from .states import randn

F64 = torch.float64


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("anchor", ["mean", "normalized_mean", "median", "pairwise"])
def test_keydiff_equals_brute_force(anchor):
    keys = randn(2, 3, 11, 5) + 0.5
    got = keydiff_scores(keys, anchor)
    for row in range(2):
        for head in range(3):
            these = keys[row, head]
            unit = these / these.norm(dim=-1, keepdim=True)
            for i in range(11):
                if anchor == "pairwise":
                    expected = -sum(cosine(these[i], other) for other in these)
                else:
                    center = {"mean": these.mean(0), "normalized_mean": unit.mean(0), "median": these.median(0).values}[
                        anchor
                    ]
                    expected = -cosine(center, these[i])
                assert abs(float(got[row, head, i]) - expected) < 1e-12


@pytest.mark.parametrize("distance", ["dot", "euclidean"])
def test_keydiff_distances_of_the_ablation(distance):
    keys = randn(1, 1, 9, 5) + 0.5
    center = keys[0, 0].mean(0)
    expected = [-float(center @ k) if distance == "dot" else float((center - k).norm()) for k in keys[0, 0]]
    torch.testing.assert_close(keydiff_scores(keys, distance=distance)[0, 0], torch.tensor(expected, dtype=F64))


def test_keydiff_in_bf16_does_not_tie():
    keys = (randn(1, 1, 300, 64) + 3).bfloat16()
    scores = keydiff_scores(keys)
    # In bf16 there would be a dozen values for all of them; in fp32 two of 300 so close together may meet by chance.
    assert scores.dtype == torch.float32 and len(scores.unique()) >= 298


@pytest.mark.parametrize("pool", [1, 5, 7])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_window_scores_equal_brute_force(groups, pool):
    q, keys = randn(2, 2 * groups, 4, 8), randn(2, 2, 20, 8, seed=1)
    got = window_scores(q, keys, 0.4, pool)
    for row in range(2):
        for head in range(2):
            weights = torch.zeros(20, dtype=F64)
            for g in range(groups):
                for w in range(4):
                    weights += (0.4 * keys[row, head] @ q[row, head * groups + g, w]).softmax(0) / (4 * groups)
            for n in range(20):
                near = [weights[m] for m in range(n - pool // 2, n + pool // 2 + 1) if 0 <= m < 20]
                torch.testing.assert_close(got[row, head, n], sum(near) / pool)


def test_window_attention_is_causal_ignores_padding_and_shares_with_the_evicted():
    q, keys = randn(1, 2, 3, 8), randn(1, 1, 6, 8, seed=1)
    visible = torch.arange(6) <= torch.tensor([3, 4, 5])[:, None]
    mass = randn(1, 2, 3, seed=2)
    query_valid = torch.tensor([[False, True, True]])
    got = window_attention(q, keys, 0.4, visible=visible[None, None], query_valid=query_valid, log_mass=mass)
    expected = torch.zeros(6, dtype=F64)
    for g in range(2):
        for w in (1, 2):
            weights = (0.4 * keys[0, 0] @ q[0, g, w]).exp() * visible[w]
            expected += weights / (weights.sum() + mass[0, g, w].exp()) / 4
    torch.testing.assert_close(got[0, 0], expected)


@given(chunk=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_chunks_share_the_mean_of_their_tokens(chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(40, generator=generator)[:15].to(torch.int32).expand(2, 3, 15)
    scores = torch.rand(2, 3, 15, generator=generator)
    valid = torch.rand(2, 3, 15, generator=generator) > 0.2
    got = chunk_mean(scores, chunk, positions, valid)
    for row in range(2):
        for head in range(3):
            for i in range(15):
                if valid[row, head, i]:
                    same = (positions[row, head] // chunk == positions[row, head, i] // chunk) & valid[row, head]
                    torch.testing.assert_close(got[row, head, i], scores[row, head][same].mean())


def test_random_depends_on_seed_layer_head_and_position_only():
    positions = torch.arange(1000, dtype=torch.int32).expand(2, 3, 1000)
    scores = random_scores(positions, seed=1, stream=2)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[:1, :, 100:200], random_scores(positions[:1, :, 100:200], seed=1, stream=2))
    others = [random_scores(positions, seed=2, stream=2), random_scores(positions, seed=1, stream=3)]
    for other in [*others, scores.roll(1, dims=1)]:
        correlation = torch.corrcoef(torch.stack([scores[0].flatten(), other[0].flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.1
    assert 0 <= float(scores.min()) and float(scores.max()) < 1
    counts = torch.histc(scores[0, 0], 10, 0, 1)
    assert float(counts.min()) > 60 and float(counts.max()) < 140


def test_bad_arguments():
    with pytest.raises(FastKVError, match="anchor must be one of"):
        keydiff_scores(randn(1, 1, 3, 4), "mode")
    with pytest.raises(FastKVError, match="odd width"):
        window_scores(randn(1, 1, 1, 4), randn(1, 1, 3, 4), 1.0, pool=2)
