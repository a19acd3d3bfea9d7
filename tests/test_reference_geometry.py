"""ManifoldKV and Compactor scores against brute force in float64, and the invariances that define them."""

import pytest
import torch

from fastkv.errors import FastKVError
from fastkv.reference import leverage_scores, manifold_scores, noncausal_attention_mass
from fastkv.reference.geometry import LEVERAGE_METHODS, METRICS, sketch_matrix

from .states import randn


@pytest.mark.parametrize("metric", METRICS)
def test_manifold_of_one_token_and_of_equal_tokens(metric):
    assert manifold_scores(randn(1, 1, 1, 8), metric=metric).abs().max() < 1e-12
    assert manifold_scores(randn(1, 1, 1, 8).expand(1, 1, 9, 8), 4, metric).abs().max() < 1e-7


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
