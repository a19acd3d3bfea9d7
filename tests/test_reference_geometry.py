"""ManifoldKV and Compactor scores against brute force in float64, and the invariances that define them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.errors import FastKVError
from fastkv.reference.geometry import (
    LEVERAGE_METHODS,
    METRICS,
    leverage_scores,
    manifold_scores,
    noncausal_attention_mass,
    sketch_matrix,
)

from .conftest import examples


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_manifold(keys, window, metric, real):
    """One token at a time."""
    out = torch.zeros(keys.shape[:3], dtype=torch.float64)
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            index = [i for i in range(keys.shape[2]) if real[b, h, i]]
            width = window or max(len(index), 1)
            for start in range(0, len(index), width):
                members = index[start : start + width]
                mean = sum(keys[b, h, i] for i in members) / len(members)
                for i in members:
                    k = keys[b, h, i]
                    gap = (k - mean).abs()
                    norms = max(k.norm().item(), 1e-12) * max(mean.norm().item(), 1e-12)
                    out[b, h, i] = {
                        "l2": gap.square().sum().sqrt(),
                        "l1": gap.sum(),
                        "linf": gap.max(),
                        "cosine": 1 - (k @ mean) / norms,
                    }[metric]
    return out


def brute_mass(q, keys, scale, chunk, softcap, real):
    """One query at a time."""
    batch, heads, num, _ = keys.shape
    groups = q.shape[1] // heads
    out = torch.zeros(batch, heads, num, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            index = [i for i in range(num) if real[b, h, i]]
            for start in range(0, len(index), chunk):
                members = index[start : start + chunk]
                for g in range(groups):
                    for i in members:
                        x = torch.stack([scale * (q[b, h * groups + g, i] @ keys[b, h, j]) for j in members])
                        if softcap is not None:
                            x = softcap * torch.tanh(x / softcap)
                        out[b, h, members] += torch.softmax(x, 0) / groups
    return out


def masks(shape, kind, seed=0):
    """all, left padding of different length per row, scattered, or one head empty."""
    batch, heads, num = shape
    mask = torch.ones(shape, dtype=torch.bool)
    if kind == "left":
        for b in range(batch):
            mask[b, :, : min(num, 3 * b + 2)] = False
    if kind == "scattered":
        mask = randn(*shape, seed=seed) > 0
    if kind == "empty":
        mask[0, 0] = False
    return mask


KINDS = ("all", "left", "scattered", "empty")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_manifold_is_the_formula(metric, window, kind):
    keys = randn(2, 2, 17, 8)
    mask = masks(keys.shape[:3], kind)
    poisoned = torch.where(mask[..., None], keys, float("nan"))
    torch.testing.assert_close(
        manifold_scores(poisoned, window, metric, mask=mask), brute_manifold(keys, window, metric, mask)
    )


def test_manifold_sees_magnitude_and_keydiff_does_not():
    from fastkv.reference import keydiff_scores

    keys = randn(1, 1, 12, 8)
    longer = keys.clone()
    longer[0, 0, 3] *= 7
    # The anchor must not move, or every score changes: compensate for the longer key in a token of its own.
    keys = torch.cat([keys, -keys[:, :, 3:4]], 2)
    longer = torch.cat([longer, -longer[:, :, 3:4]], 2)
    torch.testing.assert_close(keydiff_scores(keys), keydiff_scores(longer))
    assert manifold_scores(longer)[0, 0, 3] > 3 * manifold_scores(keys)[0, 0, 3]


@pytest.mark.parametrize("metric", METRICS)
def test_manifold_of_one_token_and_of_equal_tokens(metric):
    assert manifold_scores(randn(1, 1, 1, 8), metric=metric).abs().max() < 1e-12
    assert manifold_scores(randn(1, 1, 1, 8).expand(1, 1, 9, 8), 4, metric).abs().max() < 1e-7


def test_manifold_half_precision_is_computed_in_fp32():
    keys = randn(1, 2, 40, 16).to(torch.bfloat16)
    score = manifold_scores(keys, 7)
    assert score.dtype == torch.float32
    torch.testing.assert_close(score.double(), manifold_scores(keys.double(), 7), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", LEVERAGE_METHODS)
@pytest.mark.parametrize("sketch_dim", [None, 4])
def test_leverage_is_the_projector_diagonal(method, sketch_dim, kind):
    keys = randn(2, 2, 19, 6)
    mask = masks(keys.shape[:3], kind)
    score = leverage_scores(torch.where(mask[..., None], keys, float("nan")), sketch_dim, method, mask=mask)
    phi = torch.eye(6, dtype=torch.float64)
    if sketch_dim and method != "exact":
        phi = sketch_matrix(6, sketch_dim, kind="srht" if method == "srht" else "gaussian").double()
    for b in range(2):
        for h in range(2):
            rows = torch.where(mask[b, h, :, None], keys[b, h], 0) @ phi
            wanted = (rows @ torch.linalg.pinv(rows)).diagonal()
            ridge = 5e-4 if method in ("cholesky", "srht") else 1e-9  # of the smallest eigenvalue
            torch.testing.assert_close(score[b, h], wanted, atol=ridge, rtol=0)


@pytest.mark.parametrize("method", LEVERAGE_METHODS)
@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_leverage_sums_to_the_rank(method, rank):
    keys = randn(1, 2, 40, rank, seed=1) @ randn(1, 2, rank, 8, seed=2)
    score = leverage_scores(keys, None, method)
    assert score.isfinite().all()
    assert score.min() >= 0 and score.max() <= 1 + 1e-9
    wanted = torch.full((1, 2), float(rank), dtype=torch.float64)
    torch.testing.assert_close(score.sum(-1), wanted, atol=2e-2 if method in ("cholesky", "srht") else 1e-9, rtol=0)


@pytest.mark.parametrize("method", LEVERAGE_METHODS)
def test_leverage_in_fp32_survives_rank_deficiency(method):
    keys = (randn(1, 2, 50, 2, seed=1) @ randn(1, 2, 2, 32, seed=2)).float()
    keys[:, 1] = 0
    for sketch_dim in (None, 16):
        score = leverage_scores(keys, sketch_dim, method)
        assert score.dtype == torch.float32 and score.isfinite().all()
        assert (score[:, 1] == 0).all()
        assert abs(score[0, 0].sum().item() - 2) < 1e-2


def test_eigenvectors_of_the_gram_matrix_give_what_an_svd_of_the_keys_gives():
    """Also of fp32 keys of unequal directions, whose smallest eigenvalues fp32 could not hold beside the largest."""
    keys = (randn(1, 2, 200, 16) * torch.logspace(-3, 1, 16, dtype=torch.float64)).float()
    wanted = leverage_scores(keys.double(), None, "svd")
    torch.testing.assert_close(leverage_scores(keys, None, "eig").double(), wanted, atol=1e-5, rtol=1e-5)
    keys[0, 1, 3, 0] = float("nan")
    spoilt = leverage_scores(keys, None, "eig")
    assert spoilt[0, 1].isnan().all()
    torch.testing.assert_close(spoilt[0, 0].double(), wanted[0, 0], atol=1e-5, rtol=1e-5)


def test_leverage_with_fewer_tokens_than_columns():
    for method in LEVERAGE_METHODS:
        torch.testing.assert_close(
            leverage_scores(randn(1, 1, 5, 32), 16, method), torch.ones(1, 1, 5).double(), atol=1e-3, rtol=0
        )
        assert leverage_scores(randn(1, 1, 0, 32), 16, method).shape == (1, 1, 0)


@pytest.mark.parametrize("method", ["cholesky", "qr", "svd", "eig", "exact"])
def test_unsketched_leverage_is_invariant_to_invertible_maps(method):
    keys = randn(1, 2, 64, 8)
    turn = randn(8, 8, seed=5) + 3 * torch.eye(8)
    torch.testing.assert_close(
        leverage_scores(keys, None, method), leverage_scores(keys @ turn, None, method), atol=2e-4, rtol=0
    )


def test_leverage_centred_equals_leverage_of_centred_keys():
    keys = randn(2, 2, 30, 8) + 20
    mask = masks((2, 2, 30), "left")
    mean = torch.where(mask[..., None], keys, 0).sum(2, keepdim=True) / mask.sum(-1)[..., None, None]
    torch.testing.assert_close(
        leverage_scores(keys, 4, mask=mask, centre=True), leverage_scores(keys - mean, 4, mask=mask)
    )


def test_sketch_is_seeded_and_preserves_norms():
    assert torch.equal(sketch_matrix(64, 16), sketch_matrix(64, 16))
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    assert not torch.equal(sketch_matrix(64, 16, first), sketch_matrix(64, 16, second))
    for kind in ("gaussian", "srht"):
        # E[Phi Phi^T] = I over the draw.
        mean = sum(
            (lambda p: p @ p.T)(sketch_matrix(24, 16, torch.Generator().manual_seed(s), kind=kind)) for s in range(400)
        )
        torch.testing.assert_close(mean / 400, torch.eye(24), atol=0.12, rtol=0)


def test_leverage_depends_on_the_seed_only_when_sketched():
    keys = randn(1, 1, 40, 16)
    one, two = (leverage_scores(keys, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert not torch.allclose(one, two)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_mass_is_the_formula(chunk, softcap, kind):
    q, keys = randn(2, 6, 11, 8), randn(2, 2, 11, 8, seed=1)
    mask = masks(keys.shape[:3], kind)
    poisoned = torch.where(mask[..., None], keys, float("nan"))
    got = noncausal_attention_mass(q, poisoned, 0.4, chunk, softcap=softcap, mask=mask)
    torch.testing.assert_close(got, brute_mass(q, keys, 0.4, chunk, softcap, mask))


@pytest.mark.parametrize("tail", [1, 3, 15])
def test_ragged_tail_is_not_favoured(tail):
    """The tokens of any chunk share exactly one unit of mass each on average, however short the chunk."""
    q, keys = randn(1, 2, 32 + tail, 8), randn(1, 1, 32 + tail, 8, seed=1)
    mass = noncausal_attention_mass(q, keys, 0.3, 16)
    for part in (mass[..., :16], mass[..., 16:32], mass[..., 32:]):
        torch.testing.assert_close(part.mean(), torch.tensor(1.0, dtype=torch.float64))
    # Equal keys receive equal mass, in the tail as elsewhere.
    flat = noncausal_attention_mass(q, keys[:, :, :1].expand_as(keys), 0.3, 16)
    torch.testing.assert_close(flat, torch.ones_like(flat))


@settings(max_examples=examples(200), deadline=None)
@given(
    num=st.integers(1, 12),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    window=st.integers(1, 14),
    seed=st.integers(0, 10**6),
)
def test_padding_and_batch_do_not_matter(num, before, after, window, seed):
    q, keys = randn(1, 3, num, 4, seed=seed), randn(1, 1, num, 4, seed=seed + 1)
    other_q, other_keys = randn(1, 3, num + before + after, 4, seed=2), randn(1, 1, num + before + after, 4, seed=3)

    def pad(x):
        junk = torch.full((1, x.shape[1], 1, 4), math.nan, dtype=torch.float64)
        return torch.cat([junk.expand(-1, -1, before, -1), x, junk.expand(-1, -1, after, -1)], 2)

    mask = torch.ones(2, 1, num + before + after, dtype=torch.bool)
    mask[0, :, :before] = False
    mask[0, :, before + num :] = False
    queries, together = torch.cat([pad(q), other_q]), torch.cat([pad(keys), other_keys])
    inside = slice(before, before + num)
    for score in (
        lambda q, k, m: manifold_scores(k, window, mask=m),
        lambda q, k, m: leverage_scores(k, 2, mask=m),
        lambda q, k, m: leverage_scores(k, None, "qr", mask=m),
        lambda q, k, m: noncausal_attention_mass(q, k, 0.5, window, mask=m),
    ):
        alone, padded = score(q, keys, None), score(queries, together, mask)
        assert (padded[~mask] == 0).all() and padded.isfinite().all()
        torch.testing.assert_close(padded[:1, :, inside], alone, atol=1e-6, rtol=1e-6)


def test_refusals_name_the_choice():
    keys = randn(1, 2, 4, 8)
    with pytest.raises(FastKVError, match="metric must be one of l2, l1, linf, cosine"):
        manifold_scores(keys, metric="l3")
    with pytest.raises(FastKVError, match="window must be None or at least 1"):
        manifold_scores(keys, 0)
    with pytest.raises(FastKVError, match="method must be one of"):
        leverage_scores(keys, 4, "lu")
    with pytest.raises(FastKVError, match="sketch_dim must be"):
        leverage_scores(keys, 0)
    with pytest.raises(FastKVError, match="multiple of the number of KV heads"):
        noncausal_attention_mass(randn(1, 3, 4, 8), keys, 1.0)
    with pytest.raises(FastKVError, match="chunk must be at least 1"):
        noncausal_attention_mass(keys, keys, 1.0, 0)
