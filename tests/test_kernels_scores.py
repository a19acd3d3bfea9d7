"""Score kernels against the reference in float64: at most twice the error of the same computation in its dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import ops, reference
from fastkv.errors import FastKVError
from fastkv.kernels import (
    expected_attention,
    key_scores,
    leverage,
    noncausal_mass,
    peak_attention,
    window_scores,
    z_scores,
)
from fastkv.reference import geometry

from .conftest import examples
from .pairwise import covering
from .states import sinks

# The interpreter truncates fp32 to bf16 where the GPU rounds; nothing here casts to bf16, so bf16 inputs are exact too.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def tokens(batch, heads, num, dim, dtype=torch.float32, seed=0, shift=0.0, size=1.0):
    """Keys or queries as Hugging Face makes them: a transposed view."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(batch, num, heads, dim, generator=generator) + shift) * size).to(dtype).transpose(1, 2)


def make_mask(kind, batch, heads, num, seed=0):
    mask = torch.ones(batch, heads, num, dtype=torch.bool)
    if kind == "left":
        mask[-1, :, : (num + 2) // 3] = False
    elif kind == "scattered":
        mask = torch.rand(batch, heads, num, generator=torch.Generator().manual_seed(seed)) > 0.4
    elif kind == "one":
        mask[:] = False
        mask[..., num // 2] = True
    elif kind == "empty":
        mask[0] = False
    return None if kind == "none" else mask


MASKS = ("none", "left", "scattered", "one", "empty")


def hide(keys, mask):
    return keys if mask is None else keys.masked_fill(~mask[..., None], float("nan"))


def close(got, exact, plain, tiny=3e-6):
    """got is as near to the float64 result as the same-dtype torch computation, within a factor of two."""
    assert got.dtype == torch.float32 and got.isfinite().all()
    if not exact.numel():
        return
    allowed = 2 * (plain.double() - exact).abs().max() + tiny * (1 + exact.abs().max())
    assert (got.double() - exact).abs().max() <= allowed


# KeyDiff and ManifoldKV


def check_keydiff(keys, anchor, distance, mask):
    args = {"anchor": anchor, "distance": distance}
    got = key_scores.keydiff_scores(keys=hide(keys, mask), **args, mask=mask)
    exact = reference.keydiff_scores(keys.double(), **args, mask=mask)
    plain = reference.keydiff_scores(keys.float(), **args, mask=mask)
    real = torch.ones(keys.shape[:3], dtype=torch.bool) if mask is None else mask
    assert (got[~real] == 0).all()
    close(got, torch.where(real, exact, 0), torch.where(real, plain, 0))


def check_manifold(keys, window, metric, mask, tiny=3e-6):
    got = key_scores.manifold_scores(keys=hide(keys, mask), window=window, metric=metric, mask=mask)
    close(
        got,
        geometry.manifold_scores(keys.double(), window, metric, mask=mask),
        geometry.manifold_scores(keys.float(), window, metric, mask=mask),
        tiny,
    )


@pytest.mark.parametrize(
    "distance, anchor, dtype", covering(["cosine", "dot", "euclidean"], ["mean", "normalized_mean"], DTYPES)
)
def test_keydiff(anchor, distance, dtype):
    for kind in MASKS if dtype == torch.float32 else ("left",):
        check_keydiff(tokens(2, 2, 37, 64, dtype), anchor, distance, make_mask(kind, 2, 2, 37))


@pytest.mark.parametrize("window, metric, dtype", covering([None, 16, 30, 500], geometry.METRICS, DTYPES))
def test_manifold(metric, window, dtype):
    for kind in MASKS if dtype == torch.float32 else ("left",):
        check_manifold(tokens(2, 1, 71, 64, dtype), window, metric, make_mask(kind, 2, 1, 71))


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256, 512])
def test_key_scores_head_dims(dim):
    check_keydiff(tokens(1, 2, 65, dim), "mean", "cosine", None)
    check_manifold(tokens(1, 2, 65, dim), 32, "l2", None)


@pytest.mark.parametrize("num", [1, 2, 63, 64, 129])
def test_key_scores_odd_lengths(num):
    check_keydiff(tokens(1, 1, num, 64), "mean", "cosine", None)
    check_manifold(tokens(1, 1, num, 64), 5, "l1", None)


def test_splits_of_the_keys(monkeypatch):
    monkeypatch.setattr(key_scores, "LEAST_ROWS", 64)
    for kind in ("none", "left"):
        check_keydiff(tokens(1, 2, 300, 64), "normalized_mean", "cosine", make_mask(kind, 1, 2, 300))
        check_manifold(tokens(1, 2, 300, 64), None, "l2", make_mask(kind, 1, 2, 300))
        check_manifold(tokens(1, 2, 300, 64), 140, "l2", make_mask(kind, 1, 2, 300))


def test_far_from_zero_nothing_cancels():
    """|k|^2 - 2 k.mu + |mu|^2 in fp32 would be wrong in the second digit here."""
    check_manifold(tokens(1, 1, 90, 64, shift=3000.0), None, "l2", None, tiny=1e-4)  # the mean itself rounds at 3000
    check_keydiff(tokens(1, 1, 90, 64, size=1e4), "mean", "cosine", None)


def test_keydiff_ignores_length_and_manifold_does_not():
    keys = tokens(1, 1, 40, 64).contiguous()
    longer = keys.clone()
    longer[0, 0, 3] *= 4
    normalised = {"anchor": "normalized_mean"}
    torch.testing.assert_close(
        key_scores.keydiff_scores(keys=keys, **normalised), key_scores.keydiff_scores(keys=longer, **normalised)
    )
    assert key_scores.manifold_scores(keys=longer)[0, 0, 3] > 3 * key_scores.manifold_scores(keys=keys)[0, 0, 3]


def test_other_anchors_are_refused():
    for anchor in ("median", "pairwise"):
        with pytest.raises(FastKVError, match=r"use reference\.keydiff_scores"):
            key_scores.keydiff_scores(keys=tokens(1, 1, 4, 16), anchor=anchor)
    with pytest.raises(FastKVError, match="metric must be one of"):
        key_scores.manifold_scores(keys=tokens(1, 1, 4, 16), metric="l7")


@settings(max_examples=examples(200), deadline=None)
@given(
    num=st.integers(1, 20),
    window=st.one_of(st.none(), st.integers(1, 22)),
    metric=st.sampled_from(geometry.METRICS),
    anchor=st.sampled_from(["mean", "normalized_mean"]),
    distance=st.sampled_from(["cosine", "dot", "euclidean"]),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 10**6),
)
def test_key_scores_any_case(num, window, metric, anchor, distance, mask, seed):
    keys, mask = tokens(1, 2, num, 16, seed=seed), make_mask(mask, 1, 2, num, seed)
    check_keydiff(keys, anchor, distance, mask)
    check_manifold(keys, window, metric, mask)


# SnapKV and TOVA


def window_case(batch=2, heads=1, groups=2, dim=64, num=50, window=8, dtype=torch.float32, mask="left", size=1.0,
                mass=True, padding=True, seed=0):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    q = tokens(batch, heads * groups, window, dim, dtype, seed + 1, size=size)
    positions = torch.rand(batch, heads, 2 * num, generator=generator).argsort(-1)[..., :num].to(torch.int32)
    query_positions = torch.randint(0, 2 * num, (batch, window), generator=generator)
    query_valid = torch.ones(batch, window, dtype=torch.bool)
    if padding:
        query_valid[-1, : (window + 1) // 2] = False
    log_mass = torch.randn(batch, heads * groups, window, generator=generator) if mass else None
    if mass:
        log_mass[0, 0] = -float("inf")
    valid = make_mask(mask, batch, heads, num, seed)
    return q, tokens(batch, heads, num, dim, dtype, seed + 2), positions, query_positions, valid, query_valid, log_mass


def check_window(q, keys, positions, query_positions, valid, query_valid, log_mass, scale=0.125, softcap=None):
    real = torch.ones(keys.shape[:3], dtype=torch.bool) if valid is None else valid
    visible = real[:, :, None] & (positions[:, :, None] <= query_positions[:, None, :, None])

    def wanted(dtype):
        mass = None if log_mass is None else log_mass.to(dtype)
        return reference.window_attention(
            q.to(dtype), keys.to(dtype), scale, softcap, visible=visible, query_valid=query_valid, log_mass=mass
        )

    got = window_scores.window_scores(
        q=q,
        keys=hide(keys, valid),
        scale=scale,
        softcap=softcap,
        positions=positions,
        query_positions=query_positions,
        valid=valid,
        query_valid=query_valid,
        log_mass=log_mass,
    )
    close(got, wanted(torch.float64), wanted(torch.float32), tiny=1e-6)
    return got


@pytest.mark.parametrize("groups, dtype", covering([1, 3, 4, 7, 8], DTYPES, together=1))
def test_window_groups(groups, dtype):
    check_window(*window_case(groups=groups, dtype=dtype))


@pytest.mark.parametrize("dim", [80, 96, 128, 256, 512])
def test_window_head_dims(dim):
    check_window(*window_case(dim=dim, dtype=torch.float16))


@pytest.mark.parametrize("mask", MASKS)
def test_window_masks(mask):
    check_window(*window_case(mask=mask), softcap=4.0)
    check_window(*window_case(mask=mask, mass=False, padding=False))


@pytest.mark.parametrize("window, num", [(1, 1), (1, 130), (32, 7), (40, 200)])
def test_window_sizes(window, num):
    """TOVA is a window of one query; more queries than keys, and several tiles of rows, are fine."""
    check_window(*window_case(batch=1, groups=3, window=window, num=num, padding=window > 1))


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_window_huge_logits(size):
    check_window(*window_case(size=size, mass=False))


def test_window_splits_of_the_keys(monkeypatch):
    monkeypatch.setattr(window_scores, "LEAST_KEYS", 64)
    check_window(*window_case(num=200))


def test_window_with_everything_visible():
    q, keys = tokens(2, 4, 6, 64), tokens(2, 2, 45, 64, seed=1)
    for pool in (1, 7):
        wanted = reference.window_scores(q.double(), keys.double(), 0.125, pool)
        got = ops.window_scores(q, keys, 0.125, pool, backend="triton")
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-5)
    mask = make_mask("scattered", 2, 2, 45)
    got = window_scores.window_scores(q=q, keys=hide(keys, mask), scale=0.125, valid=mask)
    wanted = reference.window_attention(q.double(), keys.double(), 0.125, visible=mask[:, :, None])
    torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-5)


@settings(max_examples=examples(200), deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 7]),
    window=st.integers(1, 5),
    num=st.integers(1, 14),
    mask=st.sampled_from(MASKS),
    mass=st.booleans(),
    padding=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_window_any_case(groups, window, num, mask, mass, padding, softcap, dtype, seed):
    case = window_case(1, 1, groups, 16, num, window, dtype, mask, 1.0, mass, padding, seed)
    check_window(*case, 0.3, softcap)


# Expected Attention, and z-scores


def check_expected(keys, groups, mask, scale=0.125):
    batch, heads, num, dim = keys.shape
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(batch, groups * heads, 1, dim, generator=generator)
    root = torch.randn(batch, groups * heads, dim, dim, generator=generator)
    covariance, valid = root @ root.mT / dim, make_mask("none" if mask is None else mask, batch, heads, num)
    valid = torch.ones(batch, heads, num, dtype=torch.bool) if valid is None else valid
    got = expected_attention.expected_attention(hide(keys, valid), mean, covariance, scale, valid=valid)
    wanted = (
        reference.expected_attention(keys, mean.to(d), covariance.to(d), scale, valid=valid)
        for d in (torch.float64, torch.float32)
    )
    close(got, *wanted, tiny=1e-6)
    assert (got[~valid] == 0).all()


@pytest.mark.parametrize("groups, dtype", covering([1, 3, 4, 7], DTYPES, together=1))
def test_expected_attention_of_groups(groups, dtype):
    check_expected(tokens(2, 2, 45, 64, dtype), groups, "scattered")


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256, 512])
def test_expected_attention_of_head_dims(dim):
    check_expected(tokens(1, 1, 40, dim, torch.float16), 2, None)


@pytest.mark.parametrize("mask", MASKS)
def test_expected_attention_of_masks(mask, monkeypatch):
    monkeypatch.setattr(expected_attention, "BLOCK", 64)  # weights of several tiles
    check_expected(tokens(2, 1, 150, 16), 2, mask)


def test_expected_attention_of_large_logits():
    check_expected(tokens(1, 1, 40, 64, size=30.0), 2, None)


def check_z(scores, mask):
    got = z_scores.z_scores(scores.masked_fill(~mask, float("nan")), mask)
    wanted = (reference.z_scores(scores.to(dtype), mask) for dtype in (torch.float64, torch.float32))
    close(got, *wanted)
    assert (got[~mask.expand_as(got)] == 0).all()


@pytest.mark.parametrize("mask", MASKS)
def test_z_scores(mask, monkeypatch):
    monkeypatch.setattr(z_scores, "BLOCK", 32)
    scores = torch.randn(3, 2, 2, 75, generator=torch.Generator().manual_seed(0)) + 5
    scores[1] = 0.3  # all equal
    scores[2] *= 1e4
    mask = make_mask(mask, 2, 2, 75)
    check_z(scores, torch.ones(2, 2, 75, dtype=torch.bool) if mask is None else mask)


def test_z_scores_refuse_a_mask_of_another_shape():
    with pytest.raises(FastKVError, match="end in the shape of the mask"):
        z_scores.z_scores(torch.zeros(3, 2, 2, 5), torch.ones(1, 2, 5, dtype=torch.bool))


# Compactor: non-causal attention


def check_mass(q, keys, chunk, mask, scale=0.125, softcap=None, sink_logits=None):
    given = dict(softcap=softcap, mask=mask, sink_logits=sink_logits)
    got = noncausal_mass.noncausal_attention_mass(q=q, keys=hide(keys, mask), scale=scale, chunk=chunk, **given)
    wanted = [
        geometry.noncausal_attention_mass(q.to(d), keys.to(d), scale, chunk, **given)
        for d in (torch.float64, torch.float32)
    ]
    close(got, *wanted, tiny=1e-6)
    return got


@pytest.mark.parametrize("groups, dtype", covering([1, 3, 4, 7, 8], DTYPES, together=1))
def test_mass_groups(groups, dtype):
    check_mass(tokens(1, 2 * groups, 45, 64, dtype), tokens(1, 2, 45, 64, dtype, 1), 16, None)


@pytest.mark.parametrize("softcap, chunk, kind", covering([None, 3.0], [7, 64, 1000], MASKS, together=1))
def test_mass_chunks_and_masks(chunk, kind, softcap):
    check_mass(tokens(2, 2, 75, 64), tokens(2, 1, 75, 64, seed=1), chunk, make_mask(kind, 2, 1, 75), softcap=softcap)


@pytest.mark.parametrize("dim", [80, 96, 128, 256, 512])
def test_mass_head_dims(dim):
    check_mass(tokens(1, 2, 40, dim, torch.float16), tokens(1, 1, 40, dim, torch.float16, 1), 32, None)


@pytest.mark.parametrize("kind", MASKS)
def test_mass_in_two_passes(kind, monkeypatch):
    monkeypatch.setattr(noncausal_mass, "ON_CHIP", 0)
    for chunk, dim in ((70, 64), (200, 256), (140, 512)):
        check_mass(tokens(2, 2, 150, dim), tokens(2, 1, 150, dim, seed=1), chunk, make_mask(kind, 2, 1, 150))


def test_mass_of_a_long_chunk():
    check_mass(tokens(1, 1, 300, 64), tokens(1, 1, 300, 64, seed=1), 256, None)
    check_mass(tokens(1, 1, 300, 64), tokens(1, 1, 300, 64, seed=1), 280, None)


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_mass_huge_logits(size):
    check_mass(tokens(1, 2, 50, 64, size=size), tokens(1, 1, 50, 64, seed=1), 20, None)


def test_ragged_tail_is_not_favoured():
    keys = tokens(1, 1, 1, 64).expand(1, 1, 37, 64)
    mass = noncausal_mass.noncausal_attention_mass(q=tokens(1, 2, 37, 64), keys=keys, scale=0.1, chunk=16)
    torch.testing.assert_close(mass, torch.ones_like(mass))


@settings(max_examples=examples(200), deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3]),
    num=st.integers(1, 14),
    chunk=st.integers(1, 22),
    mask=st.sampled_from(MASKS),
    single=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_mass_any_case(groups, num, chunk, mask, single, softcap, seed, data):
    before = noncausal_mass.ON_CHIP
    noncausal_mass.ON_CHIP = before if single else 0
    try:
        q, keys = tokens(1, groups, num, 16, seed=seed), tokens(1, 1, num, 16, seed=seed + 1)
        check_mass(q, keys, chunk, make_mask(mask, 1, 1, num, seed), 0.3, softcap, data.draw(sinks(groups), "sinks"))
    finally:
        noncausal_mass.ON_CHIP = before


# Compactor: leverage


def check_leverage(keys, size, mask, method="cholesky", centre=False, tiny=1e-4):
    kind = "srht" if method == "srht" else "gaussian"
    sketch = geometry.sketch_matrix(keys.shape[-1], size, kind=kind)
    got = leverage.leverage_scores(keys=hide(keys, mask), sketch=sketch, mask=mask, centre=centre)
    exact, plain = (
        geometry.leverage_scores(keys.to(d), size, method, mask=mask, centre=centre)
        for d in (torch.float64, torch.float32)
    )
    close(got, exact, plain, tiny)
    return got


@pytest.mark.parametrize("centre", [False, True])
def test_leverage_of_equal_and_nearly_equal_keys(centre):
    """Centred, nothing is left but rounding: no score may explode."""
    keys = tokens(1, 1, 1, 64).expand(1, 1, 80, 64).contiguous()
    score = leverage.leverage_scores(keys=keys, sketch=geometry.sketch_matrix(64, 16), centre=centre)
    assert score.isfinite().all() and score.max() < 0.05
    if centre:  # what rounding leaves of 16 coordinates, at most an ulp each, against the ridge of 1e-12 per key
        left = 16 * torch.finfo(torch.float32).eps ** 2
        assert score.sum() <= left / (left + 1e-12)
    else:
        torch.testing.assert_close(score.sum(), torch.tensor(1.0), atol=2e-2, rtol=0)
    check_leverage(tokens(1, 1, 200, 64, shift=1000.0), 16, None, centre=True, tiny=5e-3)


@pytest.mark.parametrize("centre, kind, dtype", covering([False, True], MASKS, DTYPES))
def test_leverage(kind, dtype, centre):
    check_leverage(tokens(2, 2, 90, 64, dtype, shift=1.0), 24, make_mask(kind, 2, 2, 90), centre=centre)


@pytest.mark.parametrize(
    "dim, size, method",
    [(80, 64, "srht"), (96, 16, "cholesky"), (128, 64, "srht"), (256, 100, "cholesky"), (512, 64, "srht")],
)
def test_leverage_head_dims(dim, size, method):
    check_leverage(tokens(1, 2, 150, dim, torch.float16), size, None, method)


@pytest.mark.parametrize("dim, size", [(128, 100), (256, 64)])
def test_leverage_of_wide_sketches_in_float32(dim, size):
    check_leverage(tokens(1, 2, 70, dim), size, None)


def test_leverage_splits_of_the_keys(monkeypatch):
    monkeypatch.setattr(leverage, "LEAST_ROWS", 64)
    for centre in (False, True):
        check_leverage(tokens(1, 2, 300, 64), 16, make_mask("left", 1, 2, 300), centre=centre)


@pytest.mark.parametrize("num, rank", [(5, 64), (1, 64), (200, 3), (200, 0)])
def test_leverage_survives_rank_deficiency(num, rank):
    keys = tokens(1, 2, num, 64, seed=1)
    if rank < 64:
        keys = keys[..., :rank] @ tokens(1, 1, rank, 64, seed=2)[0, 0] if rank else torch.zeros(1, 2, num, 64)
    score = leverage.leverage_scores(keys=keys, sketch=geometry.sketch_matrix(64, 32))
    assert score.isfinite().all() and score.min() >= 0 and score.max() < 1 + 1e-3
    wanted = torch.full((1, 2), float(min(num, rank, 32)))
    torch.testing.assert_close(score.sum(-1), wanted, atol=0.03, rtol=0)


def test_unsketched_leverage_sums_to_the_rank_and_survives_maps():
    keys = tokens(1, 2, 200, 64)
    turn = torch.eye(64) + 0.1 * torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    score = leverage.leverage_scores(keys=keys, sketch=torch.eye(64))
    torch.testing.assert_close(score.sum(-1), torch.full((1, 2), 64.0), atol=1e-2, rtol=0)
    torch.testing.assert_close(
        score, leverage.leverage_scores(keys=keys @ turn, sketch=torch.eye(64)), atol=1e-4, rtol=0
    )


def test_leverage_of_outlier_channels():
    """Six channels at 20 sigma make the columns of X nearly parallel: the condition number that Gram squares."""
    keys = tokens(1, 1, 400, 128).contiguous()
    keys[..., :6] += 20
    got = check_leverage(keys, 64, None, tiny=5e-3)
    exact = geometry.leverage_scores(keys.double(), 64)
    order, wanted = got.argsort(-1).argsort(-1).double(), exact.argsort(-1).argsort(-1).double()
    assert torch.corrcoef(torch.stack([order.flatten(), wanted.flatten()]))[0, 1] > 0.999


def test_leverage_refuses_a_wide_sketch():
    with pytest.raises(FastKVError, match="at most 128 columns"):
        leverage.leverage_scores(keys=tokens(1, 1, 4, 128), sketch=torch.ones(128, 256))
    for dim, dtype in ((256, torch.float32), (512, torch.float16)):
        with pytest.raises(FastKVError, match=f"at most 64 columns for {dtype} of size {dim}"):
            leverage.leverage_scores(keys=tokens(1, 1, 4, dim, dtype), sketch=torch.ones(dim, 65))


@settings(max_examples=examples(200), deadline=None)
@given(
    num=st.integers(1, 40),
    size=st.integers(1, 16),
    mask=st.sampled_from(MASKS),
    method=st.sampled_from(["cholesky", "srht"]),
    centre=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_leverage_any_case(num, size, mask, method, centre, dtype, seed):
    keys, mask = tokens(1, 2, num, 16, dtype, seed), make_mask(mask, 1, 2, num, seed)
    got = leverage.leverage_scores(
        keys=hide(keys, mask),
        sketch=geometry.sketch_matrix(16, size, kind="srht" if method == "srht" else "gaussian"),
        mask=mask,
        centre=centre,
    )
    exact = geometry.leverage_scores(keys.double(), None if size >= 16 else size, method, mask=mask, centre=centre)
    real = num if mask is None else int(mask.sum(-1).min())
    assert got.isfinite().all() and got.min() >= 0
    # Fewer keys than directions leave the ridge in charge of the rest; compare where the Gram matrix is regular.
    if size < 16 and real > 4 * size:
        assert (got - exact).abs().max() < 1e-3


# FastKV and KVzip: the largest attention


def check_peaks(q, keys, valid, asked=None, softcap=None, sink_logits=None, scale=0.125):
    asked = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if asked is None else asked
    given = dict(asked=asked, sink_logits=sink_logits)
    valid = torch.ones(keys.shape[:3], dtype=torch.bool) if valid is None else valid
    got = peak_attention.peak_attention(q, hide(keys, valid), scale, softcap, valid=valid, **given)
    wanted = [
        reference.peak_attention(q.to(d), hide(keys, valid).to(d), scale, softcap, valid=valid, **given)
        for d in (torch.float64, torch.float32)
    ]
    close(got, *wanted, tiny=1e-6)
    assert (got[~valid] == 0).all()
    return got


@pytest.mark.parametrize("groups, dtype", covering([1, 3, 4, 7, 8], DTYPES, together=1))
def test_peaks_groups(groups, dtype):
    check_peaks(tokens(1, 2 * groups, 37, 64, dtype), tokens(1, 2, 90, 64, dtype, 1), None)


@pytest.mark.parametrize("softcap, kind, dim", covering([None, 3.0], MASKS, [16, 80, 128], together=1))
def test_peaks_of_masked_keys(softcap, kind, dim):
    q, keys = tokens(2, 2, 70, dim), tokens(2, 1, 75, dim, seed=1)
    check_peaks(q, keys, make_mask(kind, 2, 1, 75), softcap=softcap)


@pytest.mark.parametrize("dim", [256, 512])
def test_peaks_head_dims(dim):
    check_peaks(tokens(1, 2, 40, dim, torch.float16), tokens(1, 1, 40, dim, torch.float16, 1), None)


def test_who_is_not_asked_has_no_say():
    q, keys = tokens(2, 2, 20, 64), tokens(2, 1, 30, 64, seed=1)
    asked = torch.rand(2, 20, generator=torch.Generator().manual_seed(2)) > 0.5
    got = check_peaks(q, keys, None, asked)
    q[~asked[:, None].expand(2, 2, 20)] = 100.0
    assert torch.equal(got, check_peaks(q, keys, None, asked))
    assert not check_peaks(q, keys, None, torch.zeros_like(asked)).any()


@settings(max_examples=examples(200), deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3]),
    num=st.integers(1, 14),
    asking=st.integers(1, 9),
    mask=st.sampled_from(MASKS),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_peaks_any_case(groups, num, asking, mask, softcap, seed, data):
    q, keys = tokens(1, groups, asking, 16, seed=seed), tokens(1, 1, num, 16, seed=seed + 1)
    asked = torch.rand(1, asking, generator=torch.Generator().manual_seed(seed)) > 0.3
    sink_logits = data.draw(sinks(groups), "sinks")
    check_peaks(q, keys, make_mask(mask, 1, 1, num, seed), asked, softcap, sink_logits, 0.3)


@pytest.mark.parametrize("softcap, dtype, dim", covering([None, 3.0], DTYPES, [16, 80, 128], together=1))
def test_most_attended(softcap, dtype, dim):
    q, keys = tokens(2, 6, 70, dim, dtype), tokens(2, 2, 75, dim, dtype, 1)
    lse = 4 + torch.randn(2, 6, 70, generator=torch.Generator().manual_seed(2))
    lse[1, :, 60:] = torch.inf  # padding
    got = peak_attention.most_attended(q, keys, lse, 0.125, softcap)
    wanted = [
        reference.most_attended(q.to(d), keys.to(d), lse.to(d), 0.125, softcap) for d in (torch.float64, torch.float32)
    ]
    close(got, *wanted, tiny=1e-6)
